// zero3/torch/torch_state.h
//
// What optimizers with the options of torch's own classes (AdamW, Adam, SGD, Adagrad, RMSprop)
// keep, as KeptState and back, and their files, which are libtorch's. SGD counts no updates: a
// momentum buffer says that there was one. Those that libtorch does not have (own_options.h)
// have files as AdamW with their options and moments would have them.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "zero3/torch/kept_state.h"

namespace offload::zero3 {

// Of the parameters that it has updated; nothing for other classes. Tensors are the optimizer's
// own. OFD-1604 for a state without updates that is not the one that the class begins with.
std::vector<KeptState> StateOf(const torch::optim::Optimizer& optimizer);

// As if it had made the updates itself. What it had before is gone.
void SetState(torch::optim::Optimizer& optimizer, std::span<const KeptState> states);

// Writes what libtorch's class of these options would write, were it in that state.
void SaveState(const torch::optim::Optimizer& optimizer, std::span<const KeptState> states,
               torch::serialize::OutputArchive& archive);
// Reads what libtorch's class reads: `take` gets the states, then the groups get the file's
// options. What the file says of no parameter stays as it is. Throws what libtorch throws of a file
// that is of another class or of other groups; nothing has changed then.
void LoadState(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive,
               const std::function<void(std::span<const KeptState>)>& take);

// Of the class that the optimizer's states have, with empty tensors; holds `held`.
std::unique_ptr<torch::optim::OptimizerParamState> BlankState(
    const torch::optim::Optimizer& optimizer, std::shared_ptr<void> held);

// ---- Masters -----------------------------------------------------------------------------------

// fp32 masters of 16-bit weights are in the file of an optimizer beside what libtorch writes and
// reads: weights that are loaded are theirs rounded. A file may be read before the weights are, or
// before the optimizer is attached: masters wait for a weight that they are rounded to, until the
// next step. These functions may be called from any thread.

// An optimizer that trains 16-bit weights on masters.
class MasterKeeper {
 public:
  virtual ~MasterKeeper() = default;
  // In the order of the groups; undefined where there is none.
  virtual std::vector<at::Tensor> Masters() const = 0;
  // What was read and fits (ReadMaster) is the parameters' now. `is_last`: what does not fit is
  // dropped, and true returned.
  virtual bool TakeReadMasters(bool is_last) = 0;
};

void WriteMasters(const MasterKeeper& keeper, torch::serialize::OutputArchive& archive);
// For the parameters of these groups, as long as they live.
void ReadMasters(const torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);
void ForgetReadMasters(const torch::optim::Optimizer& optimizer);
// Those that wait, of an optimizer that is not attached, into its own file.
void WriteReadMasters(const torch::optim::Optimizer& optimizer,
                      torch::serialize::OutputArchive& archive);
// Before a step, behind which none waits. What is dropped is told.
void TakeLastReadMasters(MasterKeeper& keeper);
// Whether there are any, of whatever parameters.
bool HasReadMasters();
// What was read last for a parameter, if the parameter is its cast. `is_last`: it does not wait any
// longer.
struct ReadMaster {
  at::Tensor master;
  bool is_dropped = false;
};
ReadMaster TakeReadMaster(const at::Tensor& parameter, bool is_last);

// ---- state() of an optimizer that keeps nothing itself ------------------------------------------

// While it lives, state() of the calling thread is the object's own map.
class PlainState {
 public:
  PlainState() { ++depth_; }
  ~PlainState() { --depth_; }
  PlainState(const PlainState&) = delete;
  PlainState& operator=(const PlainState&) = delete;
  static bool is_on() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

// Of states that are no larger, what a trainer has of a state that it has asked for (a reference to
// the map or to one of its objects, a tensor) has the values of the next step, too. Of larger ones
// tensors stay what they were, and those of objects are undefined until state() is called again.
inline constexpr uint64_t kFollowedBytesMax = 16 << 20;

// Copies of what is kept that stand in an object's state(), as they were given.
struct ShownState {
  bool is_shown = false;
  uint64_t size_bytes = 0;  // of what was there last
  std::vector<KeptState> states;
  // While it is not shown: those that the map had, by parameter.
  std::unordered_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> objects;
};

// Gives state() copies of what `keeper` keeps, unless it has them. The mark of an attached object,
// under `mark`, stays.
void ShowState(torch::optim::Optimizer& optimizer, StateKeeper& keeper, ShownState& shown,
               void* mark = nullptr);
// Hands what was changed of them to `keeper`, and takes them away.
void TakeBackState(torch::optim::Optimizer& optimizer, StateKeeper& keeper, ShownState& shown,
                   void* mark = nullptr);
// After that, when the step is done: as ShowState(), where the trainer has asked for a small one.
void ShowAgain(torch::optim::Optimizer& optimizer, StateKeeper& keeper, ShownState& shown,
               void* mark = nullptr);
inline void TakeBackState(torch::optim::Optimizer& optimizer, StateKeeper& keeper) {
  TakeBackState(optimizer, keeper, keeper.shown_state());
}

}  // namespace offload::zero3
