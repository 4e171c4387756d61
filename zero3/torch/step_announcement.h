// zero3/torch/step_announcement.h
//
// What a rank tells the daemon while its backward runs, so that updates may begin before step() is
// called (offloadd/update_ahead.h): what the step will probably be, once, and then each gradient
// that is probably final. Both are guesses from the last step: the same tensors, each updated once
// more, with the hyper-parameters that the optimizer has now; a gradient is final when as many
// passes have given it as before that step. A wrong one costs time and nothing else: when
// hyper-parameters were not as announced, nothing is until they have stayed the same from one step
// to the next; and where optimizers take turns, each with tensors of its own, nothing is. Where
// updates take cores from the backward, steps are announced as far as they give more than they take
// (CoreTrade). Knows nothing of torch.
//
// Thread safety: Accumulated() and End() from any thread, the rest from the one that steps.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/session.h"
#include "zero3/torch/core_trade.h"

namespace offload::zero3 {

// The hyper-parameters of the groups of an optimizer as they are now; may throw. Called on the
// thread of a backward.
using GroupsNow = std::function<std::vector<client::Group>()>;

class StepAnnouncement {
 public:
  // The calls of the session that are made.
  struct Channel {
    std::function<absl::Status(const client::StepCommand&)> begin_step;
    std::function<void(uint32_t tensor)> release_gradient;
    // What the job has cost, where the backward computes on every core; else null.
    std::function<StepCosts()> costs;
  };
  StepAnnouncement(Channel channel, size_t tensor_count)
      : channel_(std::move(channel)), given_(tensor_count), expected_(tensor_count) {}

  // The daemon has taken a step. `groups_now`: of the optimizer that stepped; null: its
  // hyper-parameters will be the same.
  void Stepped(const client::StepCommand& command, GroupsNow groups_now);
  // A pass has given the tensor a gradient, which is in its place.
  void Accumulated(uint32_t tensor);
  // Nothing is announced from now on: gradients are no longer in their places. Waits for a thread
  // that announces, but not for ever.
  void End();

 private:
  enum class State : uint8_t {
    kNotYet,
    kUnderWay,  // by one thread; tensors that become final meanwhile wait
    kDone,
    kOff,  // for this step
  };

  bool Announce();
  bool IsWorthIt() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !channel_.costs || trade_.Judge(channel_.costs());
  }
  bool IsFinal(uint32_t tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ++given_[tensor] == expected_[tensor];
  }

  const Channel channel_;
  absl::Mutex mutex_;
  CoreTrade trade_ ABSL_GUARDED_BY(mutex_);
  bool trusts_groups_ ABSL_GUARDED_BY(mutex_) = true;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOff;  // before the first step nothing is known
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  client::StepCommand next_;  // written by Stepped() and by the thread that announces
  GroupsNow groups_now_;
  std::vector<uint32_t> given_ ABSL_GUARDED_BY(mutex_);     // by tensor: passes since the step
  std::vector<uint32_t> expected_ ABSL_GUARDED_BY(mutex_);  // before the last step; 0: not stepped
  std::vector<uint32_t> final_ ABSL_GUARDED_BY(mutex_);     // that wait for the announcement
};

}  // namespace offload::zero3
