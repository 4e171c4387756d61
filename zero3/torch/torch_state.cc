#include "zero3/torch/torch_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <offload/torch.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "base/check.h"
#include "base/error.h"
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
std::unique_ptr<OptimizerParamState> WriteAdam(const KeptState& kept) {
  auto state = std::make_unique<State>();
  state->step(static_cast<int64_t>(kept.update_count));
  state->exp_avg(kept.planes[0]).exp_avg_sq(kept.planes[1]).max_exp_avg_sq(kept.planes[2]);
  return state;
}

using torch::optim::SGDParamState;
KeptState ReadSgd(const OptimizerParamState& any) {
  const auto& state = static_cast<const SGDParamState&>(any);
  return {.update_count = state.momentum_buffer().defined() ? 1u : 0u,
          .planes = {state.momentum_buffer()}};
}
std::unique_ptr<OptimizerParamState> WriteSgd(const KeptState& kept) {
  auto state = std::make_unique<SGDParamState>();
  state->momentum_buffer(kept.planes[0]);
  return state;
}

using torch::optim::AdagradParamState;
KeptState ReadAdagrad(const OptimizerParamState& any) {
  const auto& state = static_cast<const AdagradParamState&>(any);
  return {.update_count = static_cast<uint64_t>(state.step()), .planes = {state.sum()}};
}
std::unique_ptr<OptimizerParamState> WriteAdagrad(const KeptState& kept) {
  auto state = std::make_unique<AdagradParamState>();
  state->step(static_cast<int64_t>(kept.update_count));
  state->sum(kept.planes[0]);
  return state;
}

using torch::optim::RMSpropParamState;
KeptState ReadRmsProp(const OptimizerParamState& any) {
  const auto& state = static_cast<const RMSpropParamState&>(any);
  return {.update_count = static_cast<uint64_t>(state.step()),
          .planes = {state.square_avg(), state.momentum_buffer(), state.grad_avg()}};
}
std::unique_ptr<OptimizerParamState> WriteRmsProp(const KeptState& kept) {
  auto state = std::make_unique<RMSpropParamState>();
  state->step(static_cast<int64_t>(kept.update_count));
  state->square_avg(kept.planes[0]).momentum_buffer(kept.planes[1]).grad_avg(kept.planes[2]);
  return state;
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
  std::unique_ptr<OptimizerParamState> (*write)(const KeptState& state);
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
            std::unique_ptr<OptimizerParamState> (*write)(const KeptState& state)) {
  return {typeid(Options),     read, write, MakeBlank<State>, Save<State, Options>,
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

const Row* RowOf(const Optimizer& optimizer) {
  static const std::vector<Row> kRows = MakeRows(OwnOptions());
  const torch::optim::OptimizerOptions& options = optimizer.defaults();
  for (const Row& row : kRows) {
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
    optimizer.state()[kept.parameter.unsafeGetTensorImpl()] = row->write(kept);
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
  return row->blank(row->write(empty).get(), std::move(held));
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

}  // namespace

void ShowState(Optimizer& optimizer, StateKeeper& keeper, ShownState& shown, void* mark) {
  if (shown.is_shown) return;
  const PlainState plain;
  shown.states = keeper.GatherState();
  std::vector<KeptState> copies = shown.states;
  for (KeptState& copy : copies) {
    for (at::Tensor& plane : copy.planes) {
      if (plane.defined()) plane = plane.clone();
    }
  }
  WithoutMark(optimizer, mark, [&] { SetState(optimizer, copies); });
  // As it will be read again: SGD's state has no count.
  const Row& row = FileRowOf(optimizer);
  for (KeptState& state : shown.states)
    state.update_count = row.read(*row.write(state)).update_count;
  shown.is_shown = true;
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
  WithoutMark(optimizer, mark, [&] { optimizer.state().clear(); });
  shown = ShownState();
}

}  // namespace offload::zero3
