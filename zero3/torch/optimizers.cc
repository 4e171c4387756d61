#include "zero3/torch/optimizers.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_state.h"
#include "zero3/torch/update_counts.h"

namespace offload::zero3 {
namespace {

using torch::optim::OptimizerParamGroup;

class OffloadOptimizer final : public torch::optim::Optimizer,
                               public StateKeeper,
                               public MasterKeeper {
 public:
  OffloadOptimizer(std::shared_ptr<TensorEngine> engine, std::shared_ptr<ModuleList> modules,
                   std::vector<OptimizerParamGroup> groups, NamedOptimizer optimizer)
      : Optimizer(std::move(groups), optimizer.defaults->clone()),
        engine_(std::move(engine)),
        modules_(std::move(modules)),
        optimizer_(std::move(optimizer)),
        living_(std::make_shared<Living>()) {
    living_->self = this;
  }
  ~OffloadOptimizer() override {
    const std::lock_guard lock(living_->mutex);
    living_->self = nullptr;
  }

  torch::Tensor step(LossClosure closure) override {
    const at::NoGradGuard no_grad;
    torch::Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    const TensorEngine::Turn turn = engine_->TakeTurn();
    TakeBackState(*this, *this);
    CheckEachOnce(param_groups());
    TakeWhatCame();
    TakeLastReadMasters(*this);
    std::vector<GroupUpdate> updates;
    for (const OptimizerParamGroup& group : param_groups())
      updates.push_back({GroupOf(group.options()), group.params()});
    engine_->Step(updates, [living = living_] { return GroupsNowOf(*living); });
    if (optimizer_.counts_as_write) {
      for (const OptimizerParamGroup& group : param_groups())
        engine_->CountAsWrites(group.params());
    }
    CountEmpty(updates);
    ShowAgain(*this, *this, shown_);
    return loss;
  }

  void BeginWith(std::vector<KeptState> states) override {
    CountEmptyAs(states);
    engine_->BeginWith(std::move(states));
  }
  // Those that will be trained and are frozen yet begin with nothing: the store gets room for all
  // of them at once, before it takes what no epoch has.
  void ReplaceState(std::span<const KeptState> states) override {
    TakeWhatCame();
    std::vector<KeptState> all(states.begin(), states.end());
    for (const OptimizerParamGroup& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const bool is_thawed = parameter.requires_grad() && parameter.numel() > 0 &&
                               !IsTable(parameter) && engine_->IsFrozen(parameter);
        const auto is_its = [&](const KeptState& state) {
          return state.parameter.is_same(parameter);
        };
        if (is_thawed && std::none_of(states.begin(), states.end(), is_its))
          all.push_back({.parameter = parameter});
      }
    }
    engine_->ReplaceState(all);
    CountEmptyAs(states);
  }
  bool IsLeft() const override { return engine_->leaves_weights() && engine_->step() > 0; }
  std::vector<KeptState> GatherState() const override {
    std::vector<KeptState> states;
    const bool keeps_state = engine_->keeps_state();
    if (keeps_state) CheckMayHold();
    const ProcessMemory::Use use(engine_->process_memory(), /*inside_passes=*/false);
    for (const OptimizerParamGroup& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (IsTable(parameter)) continue;
        if (parameter.numel() == 0) {
          if (const uint64_t count = CountOfEmpty(parameter); count > 0)
            states.push_back(StateOfEmpty(parameter, count));
        } else if (keeps_state && engine_->update_count(parameter) > 0) {
          states.push_back(engine_->GatherState(parameter));
        }
      }
    }
    return states;
  }

  ShownState& shown_state() override { return shown_; }

  void save(torch::serialize::OutputArchive& archive) const override {
    auto& self = const_cast<OffloadOptimizer&>(*this);  // whose shown state is no part of its value
    TakeBackState(self, self);
    SaveState(*this, GatherState(), archive);
    WriteMasters(*this, archive);
    ShowAgain(self, self, self.shown_);
  }
  void load(torch::serialize::InputArchive& archive) override {
    TakeBackState(*this, *this);
    LoadState(*this, archive, [this](std::span<const KeptState> states) { ReplaceState(states); });
    ReadMasters(*this, archive);
    TakeReadMasters(/*is_last=*/false);
  }

  std::vector<at::Tensor> Masters() const override {
    std::vector<at::Tensor> masters;
    if (engine_->step() == 0) return masters;
    const ProcessMemory::Use use(engine_->process_memory(), /*inside_passes=*/false);
    for (const OptimizerParamGroup& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        masters.push_back(HasMaster(parameter) ? engine_->Gather(parameter, "master")
                                               : at::Tensor());
      }
    }
    return masters;
  }
  bool TakeReadMasters(bool is_last) override {
    bool has_dropped = false;
    if (!HasReadMasters()) return has_dropped;
    for (const OptimizerParamGroup& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (!HasMaster(parameter)) continue;
        const ReadMaster read = TakeReadMaster(parameter, is_last);
        has_dropped |= read.is_dropped;
        if (!read.master.defined()) continue;
        KeptState state = engine_->GatherState(parameter);
        state.master = read.master;
        engine_->ReplaceState({&state, 1});
      }
    }
    return has_dropped;
  }

 private:
  // For the backward, which may outlive the optimizer.
  struct Living {
    std::mutex mutex;
    OffloadOptimizer* self = nullptr;  // null: no more
  };

  static std::vector<client::Group> GroupsNowOf(Living& living) {
    const std::lock_guard lock(living.mutex);
    std::vector<client::Group> groups;
    if (living.self == nullptr) return groups;
    for (const OptimizerParamGroup& group : living.self->param_groups())
      groups.push_back(living.self->GroupOf(group.options()));
    return groups;
  }

  client::Group GroupOf(const torch::optim::OptimizerOptions& options) const {
    client::Group group = CheckedSpec(optimizer_, options);
    CheckKeeps(engine_->optimizer(), group);
    return group;
  }

  // Parameters without elements are no tensors of the job. In memory an optimizer has a state of
  // each, with a count of its updates.
  void CountEmpty(std::span<const GroupUpdate> updates) {
    for (const GroupUpdate& update : updates) {
      if (!IsCounted(update.group)) continue;
      for (const at::Tensor& parameter : update.tensors) {
        if (parameter.numel() == 0 && parameter.grad().defined())
          ++counts_of_empty_[parameter.unsafeGetTensorImpl()];
      }
    }
  }
  void CountEmptyAs(std::span<const KeptState> states) {
    for (const KeptState& state : states) {
      if (state.parameter.numel() == 0)
        counts_of_empty_[state.parameter.unsafeGetTensorImpl()] = state.update_count;
    }
  }
  uint64_t CountOfEmpty(const at::Tensor& parameter) const {
    const auto found = counts_of_empty_.find(parameter.unsafeGetTensorImpl());
    return found == counts_of_empty_.end() ? 0 : found->second;
  }
  KeptState StateOfEmpty(const at::Tensor& parameter, uint64_t update_count) const {
    KeptState state{.parameter = parameter, .update_count = update_count};
    for (size_t i = 0; i < state.planes.size(); ++i) {
      if (engine_->optimizer().Plane(i) != nullptr)
        state.planes[i] = at::zeros_like(parameter, MasterType(parameter));
    }
    return state;
  }

  // Parameters that groups have got since become the job's.
  void TakeWhatCame() {
    const auto is_unknown = [this](const at::Tensor& parameter) {
      return parameter.numel() > 0 && !IsTable(parameter) && !engine_->Has(parameter);
    };
    const auto has_unknown = [&](const OptimizerParamGroup& group) {
      return std::any_of(group.params().begin(), group.params().end(), is_unknown);
    };
    if (std::none_of(param_groups().begin(), param_groups().end(), has_unknown)) return;
    const std::vector<NamedTensor> buffers = modules_->BufferNamesNow();
    Buffers::CheckSupported(buffers);
    modules_->AreAllThere()
        ? engine_->Grow(modules_->NamesNow(), buffers)
        : engine_->Attach(modules_->NamesNow(), engine_->optimizer(), buffers, /*takes_now=*/true);
    modules_->Claim(param_groups());
  }

  bool HasMaster(const at::Tensor& parameter) const {
    return parameter.numel() > 0 && !IsTable(parameter) &&
           parameter.scalar_type() != MasterType(parameter) && engine_->Has(parameter) &&
           !engine_->IsFrozen(parameter);
  }

  void CheckMayHold() const {
    const uint64_t state_bytes = engine_->plan().state_bytes;
    const uint64_t budget_bytes = engine_->statistics().budget_bytes;
    if (engine_->MayHold(state_bytes)) return;
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer,
        absl::StrCat("the job has ", FormatDecimalBytes(state_bytes),
                     " of weights and optimizer state, more than a quarter of ram (",
                     FormatBytes(budget_bytes), "), and a file of it is made in memory"),
        "Start the program again with the same job: it continues at the last step; Gather() gives "
        "what is kept of one parameter"));
  }

  const std::shared_ptr<TensorEngine> engine_;
  const std::shared_ptr<ModuleList> modules_;
  const NamedOptimizer optimizer_;
  const std::shared_ptr<Living> living_;
  std::unordered_map<const void*, uint64_t> counts_of_empty_;  // by TensorImpl
  ShownState shown_;
};

}  // namespace

std::unique_ptr<torch::optim::Optimizer> MakeOffloadOptimizer(
    std::shared_ptr<TensorEngine> engine, std::shared_ptr<ModuleList> modules,
    std::vector<OptimizerParamGroup> groups, NamedOptimizer optimizer) {
  return std::make_unique<OffloadOptimizer>(std::move(engine), std::move(modules),
                                            std::move(groups), std::move(optimizer));
}

}  // namespace offload::zero3
