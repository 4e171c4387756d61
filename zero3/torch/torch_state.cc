#include "zero3/torch/torch_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <c10/util/intrusive_ptr.h>
#include <offload/torch.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/log.h"
#include "zero3/torch/own_options.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// ---- One parameter -----------------------------------------------------------------------------

// Planes have the numbers of the classes' rows (kernels/rules).
template <class State>
KeptState ReadAdam(const OptimizerParamState& any) {
  const auto& state = static_cast<const State&>(any);
  return {.update_count = static_cast<uint64_t>(state.step()),
          .planes = {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()}};
}
template <class State>
void WriteAdam(const KeptState& kept, OptimizerParamState& any) {
  auto& state = static_cast<State&>(any);
  state.step(static_cast<int64_t>(kept.update_count));
  state.exp_avg(kept.planes[0]).exp_avg_sq(kept.planes[1]).max_exp_avg_sq(kept.planes[2]);
}

using torch::optim::SGDParamState;
KeptState ReadSgd(const OptimizerParamState& any) {
  const auto& state = static_cast<const SGDParamState&>(any);
  return {.update_count = state.momentum_buffer().defined() ? 1u : 0u,
          .planes = {state.momentum_buffer()}};
}
void WriteSgd(const KeptState& kept, OptimizerParamState& any) {
  static_cast<SGDParamState&>(any).momentum_buffer(kept.planes[0]);
}

using torch::optim::AdagradParamState;
KeptState ReadAdagrad(const OptimizerParamState& any) {
  const auto& state = static_cast<const AdagradParamState&>(any);
  return {.update_count = static_cast<uint64_t>(state.step()), .planes = {state.sum()}};
}
void WriteAdagrad(const KeptState& kept, OptimizerParamState& any) {
  auto& state = static_cast<AdagradParamState&>(any);
  state.step(static_cast<int64_t>(kept.update_count));
  state.sum(kept.planes[0]);
}

using torch::optim::RMSpropParamState;
KeptState ReadRmsProp(const OptimizerParamState& any) {
  const auto& state = static_cast<const RMSpropParamState&>(any);
  return {.update_count = static_cast<uint64_t>(state.step()),
          .planes = {state.square_avg(), state.momentum_buffer(), state.grad_avg()}};
}
void WriteRmsProp(const KeptState& kept, OptimizerParamState& any) {
  auto& state = static_cast<RMSpropParamState&>(any);
  state.step(static_cast<int64_t>(kept.update_count));
  state.square_avg(kept.planes[0]).momentum_buffer(kept.planes[1]).grad_avg(kept.planes[2]);
}

template <class State>
std::unique_ptr<OptimizerParamState> Make() {
  return std::make_unique<State>();
}

template <class State>
std::unique_ptr<OptimizerParamState> MakeBlank(const OptimizerParamState* values,
                                               std::shared_ptr<void> held) {
  struct Blank : State {
    std::shared_ptr<void> held;
  };
  auto blank = std::make_unique<Blank>();
  if (values != nullptr) static_cast<State&>(*blank) = static_cast<const State&>(*values);
  blank->held = std::move(held);
  return blank;
}

// ---- The classes -------------------------------------------------------------------------------

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// The options that a file has, and back.
using Convert = std::unique_ptr<OptimizerOptions> (*)(const OptimizerOptions& options);

std::unique_ptr<OptimizerOptions> Same(const OptimizerOptions& options) { return options.clone(); }

using torch::optim::AdamWOptions;
// Those that both have.
template <class From, class To>
std::unique_ptr<OptimizerOptions> Converted(const OptimizerOptions& any) {
  const auto& options = static_cast<const From&>(any);
  auto converted = std::make_unique<To>(options.lr());
  if constexpr (requires { options.betas(), converted->betas(); })
    converted->betas(options.betas());
  if constexpr (requires { options.eps(), converted->eps(); }) converted->eps(options.eps());
  if constexpr (requires { options.weight_decay(), converted->weight_decay(); })
    converted->weight_decay(options.weight_decay());
  return converted;
}

struct Row {
  const std::type_info& options;
  KeptState (*read)(const OptimizerParamState& state);
  void (*write)(const KeptState& kept, OptimizerParamState& state);
  std::unique_ptr<OptimizerParamState> (*make)();
  std::unique_ptr<OptimizerParamState> (*blank)(const OptimizerParamState* values,
                                                std::shared_ptr<void> held);
  void (*save)(const Optimizer& optimizer, OutputArchive& archive);
  void (*load)(Optimizer& optimizer, InputArchive& archive);
  Convert to_file = Same, from_file = Same;
};

template <class State, class Options>
void Save(const Optimizer& optimizer, OutputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, optimizer);
}
template <class State, class Options>
void Load(Optimizer& optimizer, InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, optimizer);
}
template <class State, class Options>
Row RowWith(KeptState (*read)(const OptimizerParamState& state),
            void (*write)(const KeptState& kept, OptimizerParamState& state)) {
  return {typeid(Options),     read, write, Make<State>, MakeBlank<State>, Save<State, Options>,
          Load<State, Options>};
}
template <class State, class Options>
Row AdamRow() {
  return RowWith<State, Options>(ReadAdam<State>, WriteAdam<State>);
}

template <class Options>
Row RowLikeAdamW() {
  using State = torch::optim::AdamWParamState;
  return {typeid(Options),
          ReadAdam<State>,
          WriteAdam<State>,
          Make<State>,
          MakeBlank<State>,
          Save<State, AdamWOptions>,
          Load<State, AdamWOptions>,
          Converted<Options, AdamWOptions>,
          Converted<AdamWOptions, Options>};
}

template <class... Options>
std::vector<Row> MakeRows(OptionsList<Options...>) {
  return {
      AdamRow<torch::optim::AdamWParamState, AdamWOptions>(),
      AdamRow<torch::optim::AdamParamState, torch::optim::AdamOptions>(),
      RowWith<SGDParamState, torch::optim::SGDOptions>(ReadSgd, WriteSgd),
      RowWith<AdagradParamState, torch::optim::AdagradOptions>(ReadAdagrad, WriteAdagrad),
      RowWith<RMSpropParamState, torch::optim::RMSpropOptions>(ReadRmsProp, WriteRmsProp),
      RowLikeAdamW<Options>()...,
  };
}

std::unique_ptr<OptimizerParamState> Made(const Row& row, const KeptState& kept) {
  std::unique_ptr<OptimizerParamState> state = row.make();
  row.write(kept, *state);
  return state;
}

const Row* RowOf(const Optimizer& optimizer) {
  // For ever: optimizers are saved in destructors of globals, too.
  static const auto* const kRows = new std::vector<Row>(MakeRows(OwnOptions()));
  const torch::optim::OptimizerOptions& options = optimizer.defaults();
  for (const Row& row : *kRows) {
    if (row.options == typeid(options)) return &row;
  }
  return nullptr;
}

// Has state and groups, with the options of a file, and steps never.
class Carrier final : public Optimizer {
 public:
  Carrier(const Optimizer& like, Convert convert)
      : Optimizer(like.param_groups(), convert(like.defaults())) {
    for (auto& group : param_groups()) group.set_options(convert(group.options()));
  }
  at::Tensor step(LossClosure) override { return {}; }
};

const Row& FileRowOf(const Optimizer& optimizer) {
  const Row* const row = RowOf(optimizer);
  OFFLOAD_CHECK(row != nullptr) << "an optimizer of ours without files";
  return *row;
}

// Adagrad has its sums from the beginning, and the daemon begins them with the options' value.
void CheckBeginning(const torch::optim::AdagradOptions& options, const at::Tensor& sum) {
  if (!sum.defined() || at::all(at::eq(sum, options.initial_accumulator_value())).item<bool>())
    return;
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "Adagrad has sums of no step that are not its initial_accumulator_value",
                        "Give the optimizer the initial_accumulator_value that its sums have"));
}

// True when a new optimizer of the class has it, too.
bool IsBeginning(const Optimizer& optimizer, const KeptState& kept) {
  if (kept.update_count > 0) return false;
  const auto* const adagrad =
      dynamic_cast<const torch::optim::AdagradOptions*>(&optimizer.defaults());
  if (adagrad != nullptr) CheckBeginning(*adagrad, kept.planes[0]);
  return adagrad != nullptr ||
         std::none_of(kept.planes.begin(), kept.planes.end(),
                      [](const at::Tensor& plane) { return plane.defined(); });
}

}  // namespace

std::vector<KeptState> StateOf(const Optimizer& optimizer) {
  std::vector<KeptState> states;
  const Row* const row = RowOf(optimizer);
  if (row == nullptr) return states;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end() || found->second == nullptr) continue;
      KeptState kept = row->read(*found->second);
      kept.parameter = parameter;
      if (!IsBeginning(optimizer, kept)) states.push_back(std::move(kept));
    }
  }
  return states;
}

void SetState(Optimizer& optimizer, std::span<const KeptState> states) {
  optimizer.state().clear();
  const Row* const row = RowOf(optimizer);
  for (const KeptState& kept : states)
    optimizer.state()[kept.parameter.unsafeGetTensorImpl()] = Made(*row, kept);
}

void SaveState(const Optimizer& optimizer, std::span<const KeptState> states,
               OutputArchive& archive) {
  const Row& row = FileRowOf(optimizer);
  Carrier carrier(optimizer, row.to_file);
  SetState(carrier, states);
  row.save(carrier, archive);
}

void LoadState(Optimizer& optimizer, InputArchive& archive,
               const std::function<void(std::span<const KeptState>)>& take) {
  const Row& row = FileRowOf(optimizer);
  Carrier carrier(optimizer, row.to_file);
  row.load(carrier, archive);
  take(StateOf(carrier));
  for (size_t i = 0; i < carrier.param_groups().size(); ++i)
    optimizer.param_groups()[i].set_options(row.from_file(carrier.param_groups()[i].options()));
}

std::unique_ptr<OptimizerParamState> BlankState(const Optimizer& optimizer,
                                                std::shared_ptr<void> held) {
  const Row* const row = RowOf(optimizer);
  if (row == nullptr) return MakeBlank<torch::optim::LBFGSParamState>(nullptr, std::move(held));
  KeptState empty;
  empty.planes.fill(at::empty({0}));
  return row->blank(Made(*row, empty).get(), std::move(held));
}

// ---- state() -----------------------------------------------------------------------------------

thread_local int PlainState::depth_ = 0;

namespace {

bool IsSame(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.is_same_size(b) && at::equal(a, b);
}

bool IsSame(const KeptState& a, const KeptState& b) {
  return a.update_count == b.update_count &&
         std::equal(a.planes.begin(), a.planes.end(), b.planes.begin(),
                    [](const at::Tensor& x, const at::Tensor& y) { return IsSame(x, y); });
}

const KeptState* Find(const std::vector<KeptState>& states, const at::Tensor& parameter) {
  const auto found = std::find_if(states.begin(), states.end(), [&](const KeptState& state) {
    return state.parameter.is_same(parameter);
  });
  return found == states.end() ? nullptr : &*found;
}

// Takes everything but the mark out of the map while `work` runs.
template <class Work>
void WithoutMark(Optimizer& optimizer, void* mark, Work work) {
  std::unique_ptr<OptimizerParamState> kept;
  if (mark != nullptr) kept = std::move(optimizer.state()[mark]);
  work();
  if (mark != nullptr) optimizer.state()[mark] = std::move(kept);
}

// The values, in a tensor that a trainer may have where that can be.
at::Tensor CopiedInto(const at::Tensor& there, const at::Tensor& values) {
  if (!values.defined()) return values;
  if (!there.defined() || there.requires_grad() || !there.is_same_size(values) ||
      there.scalar_type() != values.scalar_type() || there.device() != values.device())
    return values.clone();
  at::Tensor target = there;
  return target.copy_(values);
}

uint64_t BytesOf(const std::vector<KeptState>& states) {
  uint64_t bytes = 0;
  for (const KeptState& state : states) {
    for (const at::Tensor& plane : state.planes) bytes += plane.defined() ? plane.nbytes() : 0;
  }
  return bytes;
}

}  // namespace

void ShowState(Optimizer& optimizer, StateKeeper& keeper, ShownState& shown, void* mark) {
  if (shown.is_shown) return;
  const at::NoGradGuard no_grad;
  const PlainState plain;
  const Row& row = FileRowOf(optimizer);
  shown.states = keeper.GatherState();
  WithoutMark(optimizer, mark, [&] {
    optimizer.state().clear();
    for (KeptState& state : shown.states) {
      void* const key = state.parameter.unsafeGetTensorImpl();
      const auto found = shown.objects.find(key);
      std::unique_ptr<OptimizerParamState> object =
          found != shown.objects.end() ? std::move(found->second) : row.make();
      KeptState copy = row.read(*object);
      copy.update_count = state.update_count;
      for (size_t i = 0; i < copy.planes.size(); ++i)
        copy.planes[i] = CopiedInto(copy.planes[i], state.planes[i]);
      row.write(copy, *object);
      state.update_count = row.read(*object).update_count;  // SGD's state has none
      optimizer.state()[key] = std::move(object);
    }
  });
  shown.objects.clear();
  shown.is_shown = true;
}

void ShowAgain(Optimizer& optimizer, StateKeeper& keeper, ShownState& shown, void* mark) {
  if (shown.objects.empty() || shown.size_bytes > kFollowedBytesMax) return;
  try {
    ShowState(optimizer, keeper, shown, mark);
  } catch (const std::exception&) {  // the step was taken; who asks for the state is told
  }
}

void TakeBackState(Optimizer& optimizer, StateKeeper& keeper, ShownState& shown, void* mark) {
  if (!shown.is_shown) return;
  const at::NoGradGuard no_grad;
  const PlainState plain;
  const std::vector<KeptState> now = StateOf(optimizer);
  std::vector<KeptState> changed;
  for (const KeptState& state : now) {
    const KeptState* const before = Find(shown.states, state.parameter);
    if (before == nullptr || !IsSame(*before, state)) changed.push_back(state);
  }
  for (const KeptState& state : shown.states) {
    if (Find(now, state.parameter) == nullptr) changed.push_back({.parameter = state.parameter});
  }
  if (!changed.empty()) keeper.ReplaceState(changed);
  ShownState next{.size_bytes = BytesOf(now)};
  WithoutMark(optimizer, mark, [&] {
    for (auto& [key, object] : optimizer.state()) {
      if (object == nullptr) continue;
      if (next.size_bytes > kFollowedBytesMax) FileRowOf(optimizer).write(KeptState(), *object);
      next.objects.emplace(key, std::move(object));
    }
    optimizer.state().clear();
  });
  shown = std::move(next);
}

// ---- Masters -----------------------------------------------------------------------------------

namespace {

// By the place of their parameters in the groups.
constexpr char kMasters[] = "offload_masters";

struct Read {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  at::Tensor master;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, Read> read;
  std::atomic<size_t> count = 0;

  void Counted() { count = read.size(); }
};
Table& OfProcess() {
  static auto* const kTable = new Table;
  return *kTable;
}

template <typename Function>
void ForEachInOrder(const torch::optim::Optimizer& optimizer, Function function) {
  size_t number = 0;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) function(parameter, number++);
  }
}

void Write(const std::vector<at::Tensor>& masters, torch::serialize::OutputArchive& archive) {
  torch::serialize::OutputArchive of_masters(archive.compilation_unit());
  bool has_any = false;
  for (size_t i = 0; i < masters.size(); ++i) {
    if (!masters[i].defined()) continue;
    of_masters.write(std::to_string(i), masters[i], /*is_buffer=*/true);
    has_any = true;
  }
  if (has_any) archive.write(kMasters, of_masters);
}

}  // namespace

void WriteMasters(const MasterKeeper& keeper, torch::serialize::OutputArchive& archive) {
  Write(keeper.Masters(), archive);
}

void WriteReadMasters(const torch::optim::Optimizer& optimizer,
                      torch::serialize::OutputArchive& archive) {
  if (!HasReadMasters()) return;
  std::vector<at::Tensor> masters;
  ForEachInOrder(optimizer, [&](const at::Tensor& parameter, size_t) {
    Table& table = OfProcess();
    const std::lock_guard lock(table.mutex);
    const auto found = table.read.find(parameter.unsafeGetTensorImpl());
    const bool waits = found != table.read.end() && !found->second.parameter.expired();
    masters.push_back(waits ? found->second.master : at::Tensor());
  });
  Write(masters, archive);
}

void ReadMasters(const torch::optim::Optimizer& optimizer,
                 torch::serialize::InputArchive& archive) {
  ForgetReadMasters(optimizer);
  torch::serialize::InputArchive of_masters;
  if (!archive.try_read(kMasters, of_masters)) return;
  ForEachInOrder(optimizer, [&](const at::Tensor& parameter, size_t number) {
    at::Tensor master;
    if (!of_masters.try_read(std::to_string(number), master, /*is_buffer=*/true) ||
        master.sizes() != parameter.sizes() || parameter.scalar_type() == MasterType(parameter))
      return;
    Table& table = OfProcess();
    const std::lock_guard lock(table.mutex);
    std::erase_if(table.read, [](const auto& entry) { return entry.second.parameter.expired(); });
    table.read.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Read{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()),
             master.to(at::kCPU, MasterType(parameter))});
    table.Counted();
  });
}

void ForgetReadMasters(const torch::optim::Optimizer& optimizer) {
  if (!HasReadMasters()) return;
  Table& table = OfProcess();
  const std::lock_guard lock(table.mutex);
  ForEachInOrder(optimizer, [&](const at::Tensor& parameter, size_t) {
    table.read.erase(parameter.unsafeGetTensorImpl());
  });
  table.Counted();
}

bool HasReadMasters() { return OfProcess().count > 0; }

void TakeLastReadMasters(MasterKeeper& keeper) {
  if (!keeper.TakeReadMasters(/*is_last=*/true)) return;
  Log().warn(
      "a file that an optimizer has read is of other 16-bit weights than the model has: what it "
      "says of their fp32 masters is not taken. Load the model's file, too");
}

ReadMaster TakeReadMaster(const at::Tensor& parameter, bool is_last) {
  if (!HasReadMasters()) return {};
  const at::NoGradGuard no_grad;
  Table& table = OfProcess();
  at::Tensor master;
  {
    const std::lock_guard lock(table.mutex);
    const auto found = table.read.find(parameter.unsafeGetTensorImpl());
    if (found == table.read.end()) return {};
    if (!found->second.parameter.expired()) master = found->second.master;
  }
  const at::Tensor weight = parameter.detach().cpu();
  const bool fits = master.defined() && at::equal(weight, master.to(weight.scalar_type()));
  if (fits || is_last) {
    const std::lock_guard lock(table.mutex);
    table.read.erase(parameter.unsafeGetTensorImpl());
    table.Counted();
  }
  return {.master = fits ? master : at::Tensor(),
          .is_dropped = is_last && master.defined() && !fits};
}

}  // namespace offload::zero3
