// zero3/torch/module_engine.h
//
// offload::Engine for C++ modules: lists their parameters for the tensor engine, and gives each
// optimizer those that are its own.
//
// Several modules may be parts of one job. The first one's tensors have the names that the module
// gives them, those of the n-th further one begin with "n/" (1/fc.weight), so that names are the
// same in every run that attaches the same modules in the same order. A tensor that two modules
// share is one tensor, with its first name, and is updated by the first optimizer that has it.
//
// Modules may grow: what an optimizer has got since and the job has not is looked for in those that
// were attached and that a shared_ptr holds, and joins the job with their other new tensors.
//
// Thread safety: as offload::Engine.
#pragma once

#include <offload/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zero3/torch/own_optimizer.h"
#include "zero3/torch/tensor_engine.h"

namespace offload::zero3 {

using ParameterGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Which parameters have an optimizer already, and what modules are called: the same with and
// without a daemon.
class ModuleList {
 public:
  // The parameters of a module under the names that they have in the job, tables left out.
  std::vector<NamedTensor> Names(const torch::nn::Module& module) const;
  // Its buffers, and those tables, in the same way.
  std::vector<NamedTensor> BufferNames(const torch::nn::Module& module) const;
  // Which module a name belongs to: 0 for the first.
  static int NumberOf(std::string_view name);
  // They are attached; `has_new` when some were not before.
  void Add(const torch::nn::Module& module, bool has_new);
  bool IsEmpty() const { return count_ == 0; }
  // What the modules have now that were attached, those left out that are gone or that no
  // shared_ptr holds.
  std::vector<NamedTensor> NamesNow() const;
  std::vector<NamedTensor> BufferNamesNow() const;
  // Whether none is left out.
  bool AreAllThere() const;

  // `groups`, or, when they are all of the module's parameters in one group without options, those
  // of them that no optimizer has. OFD-1604 when there are none.
  ParameterGroups LeaveToOthers(const torch::nn::Module& module, ParameterGroups groups) const;
  // OFD-1002 when one is in two places, or has an optimizer already.
  void CheckFree(const ParameterGroups& groups) const;
  void Claim(const ParameterGroups& groups);

 private:
  struct Member {
    const torch::nn::Module* address;  // may be gone
    std::weak_ptr<const torch::nn::Module> module;
    std::string prefix;
  };

  std::string PrefixOf(const torch::nn::Module& module) const;
  // By an object that lives; torch's objects that die leave theirs to the next.
  bool IsClaimed(const at::Tensor& parameter) const;

  int count_ = 0;
  std::vector<Member> members_;
  std::unordered_set<const void*> claimed_;  // TensorImpl
};

class InMemoryOptimizer;

class ModuleEngine final : public Engine {
 public:
  explicit ModuleEngine(std::shared_ptr<TensorEngine> tensors)
      : tensors_(std::move(tensors)), begun_at_(tensors_->step()) {}

  std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(torch::nn::Module& module,
                                                         ParameterGroups groups,
                                                         NamedOptimizer&& optimizer) override;
  size_t AttachForeign(torch::nn::Module& module, ParameterGroups groups,
                       const std::string& optimizer, bool commits_itself) override;
  void GiveForeign(size_t number, torch::optim::Optimizer& optimizer) override;
  void CommitForeign(size_t number, torch::optim::Optimizer& optimizer) override;
  // Whether the job has what the optimizer of this number has kept.
  bool HasForeign(size_t number) const;
  // What the job has of one that is dead: another takes its place, and begins anew.
  void ForgetForeign(size_t number);
  // The number of the next that runs in this process.
  size_t NextForeign(const std::string& optimizer);
  // That will be this one: it takes the place of one that is dead.
  void GiveNumber(size_t number) { given_number_ = number; }
  // The job knows of it from now on. `in_process`: one of ours behind it, or null.
  void AddForeign(size_t number, bool commits_itself,
                  const std::shared_ptr<InMemoryOptimizer>& in_process = nullptr);
  // These are updated by the daemon from now on.
  void TakeToDaemon(const std::unordered_set<const void*>& parameters);
  // Whether an optimizer keeps other planes than the job's, which can run in this process then.
  bool IsOfOtherKind(const kernels::OptimizerSpec& optimizer) const;
  // Takes part like AttachForeign, with an optimizer of ours whose state is in memory.
  void AttachInProcess(torch::nn::Module& module, const ParameterGroups& groups,
                       const kernels::OptimizerSpec& optimizer);
  // OFD-1604 when the job goes on after steps of such an optimizer, which were of another run, and
  // does not have what it had kept.
  absl::Status CheckResumes(const ParameterGroups& groups, const kernels::OptimizerSpec& optimizer,
                            size_t number) const;
  static bool HasMasters(const ParameterGroups& groups);
  void CommitStep() override { tensors_->CommitStep(); }
  void Seal() override { tensors_->Seal(); }
  int rank() const override { return static_cast<int>(tensors_->attachment()->rank()); }
  int world_size() const override { return static_cast<int>(tensors_->attachment()->world_size()); }
  std::vector<std::string> Exchange(std::string blob) override {
    return tensors_->Exchange(std::move(blob));
  }
  int64_t step() const override { return tensors_->step(); }
  void WaitDurable() override { tensors_->WaitDurable(); }
  int64_t Checkpoint() override { return tensors_->Checkpoint(); }
  void SetTrainerState(std::string blob) override { tensors_->SetTrainerState(std::move(blob)); }
  std::string TrainerState() const override { return tensors_->trainer_state(); }
  torch::Tensor Gather(const torch::Tensor& parameter, const std::string& plane) override;
  void SetInitialWeights(std::string path, LoadOptions options) override {
    tensors_->SetInitialWeights(std::move(path), std::move(options));
  }
  void LoadWeights(const std::string& path, const LoadOptions& options) override {
    TakeWhatCame();
    tensors_->LoadWeights(path, options);
  }
  void SaveWeights(const std::string& folder, const SaveOptions& options) override {
    TakeWhatCame();
    tensors_->SaveWeights(folder, options);
  }
  Statistics statistics() const override { return tensors_->statistics(); }
  PlanSummary plan() const override { return tensors_->plan(); }

  TensorEngine& tensors() const { return *tensors_; }
  // Threads may attach at once: one after another, between steps, before the store is made or
  // after.
  struct AttachTurn {
    TensorEngine::Turn turn;
    std::unique_lock<std::recursive_mutex> seal;
  };
  AttachTurn TakeAttachTurn() const {
    return {tensors_->TakeTurn(), tensors_->attachment()->HoldSeal()};
  }
  // Whether the job had steps when this process opened it.
  bool has_resumed() const { return begun_at_ > 0; }
  std::weak_ptr<TensorEngine> weak_tensors() const { return tensors_; }

 private:
  // Of a job that has a note of every optimizer that ran in its processes: there was no such one.
  bool IsNew(size_t number) const;
  void TellOfMissingForeign();
  // OFD-1601 for a parameter of the groups that neither the module nor one before has.
  void CheckHas(const torch::nn::Module& module, const ParameterGroups& groups) const;
  void Attach(torch::nn::Module& module, const ParameterGroups& groups,
              const kernels::OptimizerSpec& optimizer);
  // Files have all that the modules have, as they call it now; what they have got since becomes the
  // job's, trained or not.
  void TakeWhatCame();
  absl::Status ForeignIsLost(size_t number) const;
  // What it keeps goes with the next step; or why not.
  absl::Status Keep(size_t number, torch::optim::Optimizer& optimizer);
  // Its weights become the job's, where they are not yet.
  void AttachWeights(torch::nn::Module& module, const ParameterGroups& groups);

  const std::shared_ptr<TensorEngine> tensors_;
  struct Foreign {
    std::string optimizer;                        // its class
    std::weak_ptr<InMemoryOptimizer> in_process;  // one of ours, which keeps its state
    bool commits_itself = false;                  // libtorch's own
    bool has_told = false;                        // why what it keeps is not the job's
    size_t file_bytes = 0;                        // of what it kept last
    // Those that in_process has stepped, and no optimizer in the daemon since (TensorImpl).
    std::unordered_set<const void*> stepped;
  };
  std::vector<Foreign> foreign_;  // by their numbers
  bool has_told_of_missing_ = false;
  std::optional<size_t> given_number_;
  const int64_t begun_at_;  // the step that the job was at when this process opened it
  const std::shared_ptr<ModuleList> modules_ = std::make_shared<ModuleList>();
};

}  // namespace offload::zero3
