// zero3/torch/untouched/watch.h
//
// Attaches a program that knows nothing of offload (offloadctl run): sees it register parameters,
// make objects of torch::optim and begin its first forward pass, and steps these objects in the
// daemon.
//
// The model is attached when an operator with gradients touches a registered tensor for the first
// time while there is an optimizer: until then initialisation, loading of weights and evaluation
// run in memory as ever, and what a job has replaces their result just before the first use that
// counts. With OFFLOADD_FROM_FIRST_USE a run that goes on counts uses without gradients, too. With
// a size in OFFLOADD_BORN_ABOVE, parameters of at least so many bytes leave memory as soon as they
// are registered, as those that are made under an InitGuard, and are initialised where they are.
//
// What cannot be served ends the program with the reason, exit status 1: it would otherwise
// train in memory while its user believes that it does not.
//
// Behind each of the program's optimizers stands one of the watch's own, of the same class and over
// the same tensors, which is attached (Engine::Attach) and stays where it is; the program's is
// recognised by its default options, which it takes along wherever it is moved. Of several objects
// over the same tensors, made in turn for the phases of a training, one at a time is attached: from
// its first step on, the one before it is taken for dead. If it is not, which a mark among its
// state tells (until the program looks there), and what both keep fits into memory well, both go on
// to train: the newer one in this process.
//
// Thread safety: all methods from any thread.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <offload/torch.h>
#include <sys/types.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "zero3/torch/untouched/registered.h"

namespace offload::untouched {

class Watch {
 public:
  static Watch& OfProcess();

  // ---- What the program has just done ----
  void OnParameter(const torch::nn::Module& module, at::Tensor& parameter);
  void OnBuffer(const at::Tensor& buffer);
  void OnNames(const torch::nn::Module& module, const NamedTensors& parameters);
  void OnGroup(const torch::optim::Optimizer& optimizer);
  void OnRead(const torch::optim::Optimizer& optimizer);
  // A module is moved or cast: an operator over its parameters, and no forward pass.
  void Cast(const torch::nn::Module& module, const std::function<void()>& cast);
  // A tensor gets the values of a file, and the memory that they are in.
  void Read(const at::Tensor& tensor, const std::function<void()>& read);

  // ---- What it is about to do ----
  void BeforeOperator(const char* name, c10::ArrayRef<const c10::IValue> inputs);
  // A graph gets an edge to a tensor. An autograd::Function of the program's own has it before its
  // operators, which run without gradients.
  void BeforeEdge(const at::Tensor& tensor);
  // Ends the program where the object's gradients were used by a step that is not of torch's class:
  // one of a class that derives from it may call it.
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);

  // The attached object behind one of the program's, with the options that that has now; null for
  // one that was never seen, and for an attached one itself. The first step attaches, when the
  // forward pass is in its closure.
  torch::optim::Optimizer* BeforeStep(torch::optim::Optimizer& optimizer);
  torch::optim::Optimizer* BeforeFile(torch::optim::Optimizer& optimizer);
  // Null also for one that was replaced: there is nothing to see.
  torch::optim::Optimizer* BeforeLook(torch::optim::Optimizer& optimizer);
  // Runs what goes through the state of one that is not attached.
  void WithOwnState(const torch::optim::Optimizer& optimizer,
                    const std::function<void()>& function);

  // The process ends by exit(): commits what was stepped. The program's own functions and
  // destructors that run then may use the model until it is closed, behind all of them.
  void Commit();
  void Close();
  // Whether anything was attached, here or in a forked child.
  bool has_attached() const { return *has_attached_; }
  bool has_engine() const { return engine_ != nullptr; }
  // How far the job is that a run which has attached nothing was to go on with; 0: there is none.
  int64_t FindStepOfJob() const;

 private:
  Watch();

  enum class State { kWatching, kAttached, kClosed };

  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // An object of torch::optim, as it was made.
  struct Seen {
    bool IsDead() const { return identity == nullptr || (life.expired() && !was_looked_at); }

    const torch::optim::OptimizerOptions* identity = nullptr;  // its own defaults; null: it is dead
    std::weak_ptr<void> life;  // of the mark; expired: it is dead, or the program has looked
    ParamGroups groups;
    std::unique_ptr<torch::optim::OptimizerOptions> defaults;
    bool was_looked_at = false;
    bool has_read = false;     // a file, before it was attached
    bool has_stepped = false;  // attached
    bool begins_anew = false;  // what had stepped these parameters before is replaced
    std::unique_ptr<torch::optim::Optimizer>
        attached;  // null until it is, and when another took over
  };

  Seen* Find(const torch::optim::Optimizer& optimizer);
  bool IsSuperseded(const Seen& seen) const;
  static void Mark(const torch::optim::Optimizer& optimizer, Seen& seen);
  bool MayStepAgain(const Seen& seen) const;
  void TakeOver(Seen& seen);
  void CheckIsNotReplaced(const Seen& seen) const;
  bool IsTrigger(c10::ArrayRef<const c10::IValue> inputs) const;
  void NoteLook(const char* name, c10::ArrayRef<const c10::IValue> inputs);
  void OpenEngine();
  bool IsRegistered(const at::Tensor& tensor);
  // Runs what gives parameters other memory, of which nobody has a pointer yet.
  static void WithOtherMemory(const std::vector<at::Tensor>& parameters,
                              const std::function<void()>& change);
  bool IsBorn(const at::Tensor& parameter) const;
  void BearOffloaded(at::Tensor& parameter);
  void CheckNothingRan(const Seen& seen) const;
  void Attach();
  void AttachOptimizer(Seen& seen);
  void TakeWhatCame(const std::vector<torch::optim::OptimizerParamGroup>& groups);
  void CheckGroups(const torch::optim::Optimizer& optimizer, const Seen& seen);
  void Follow(torch::optim::Optimizer& optimizer, Seen& seen);
  void SayAttached() const;
  void SayMasters(const Seen& seen);
  void CloseEngine();

  const Options options_;
  const bool resumes_, from_first_use_;
  std::atomic<bool>* const has_attached_;  // forked children share it
  std::mutex mutex_;
  std::atomic<State> state_ = State::kWatching;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;  // sees operators, until a step
  Registered registered_;
  std::atomic<bool> has_looked_ =
      false;                    // an operator without gradients has, at registered tensors
  size_t foreign_count_ = 0;    // tensors of optimizers that no module has registered
  std::list<Seen> optimizers_;  // in the order in which they were made
  std::optional<uint64_t> born_above_bytes_;
  std::shared_ptr<Engine> engine_;
  int64_t begun_at_ = 0;  // the job's step when it was attached
  std::atomic<pid_t> attached_by_ = 0;
  std::shared_ptr<torch::nn::Module> model_;
  std::unordered_set<const void*> attached_tensors_;  // TensorImpl, of the job's parameters
  size_t later_count_ = 0;  // of parameters that were made since the attach
  bool has_seen_step_ = false;
  bool has_said_masters_ = false;
  int64_t buffer_writes_ = 0;  // when the last optimizer was made
};

// Says why on standard error and ends the process at once, with exit status 1.
[[noreturn]] void EndProgram(const char* reason);

// One line on standard error.
void Say(const std::string& text);

}  // namespace offload::untouched
