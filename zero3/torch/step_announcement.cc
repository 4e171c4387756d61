#include "zero3/torch/step_announcement.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "zero3/torch/update_counts.h"

namespace offload::zero3 {
namespace {

bool NameSame(const std::vector<client::TensorUpdate>& a,
              const std::vector<client::TensorUpdate>& b) {
  return std::ranges::equal(a, b, {}, &client::TensorUpdate::tensor, &client::TensorUpdate::tensor);
}

bool AreSame(const std::vector<client::Group>& a, const std::vector<client::Group>& b) {
  return std::ranges::equal(a, b, [](const client::Group& x, const client::Group& y) {
    return x.index() == y.index() && std::ranges::equal(x.values(), y.values());
  });
}

}  // namespace

void StepAnnouncement::Stepped(const client::StepCommand& command, GroupsNow groups_now) {
  absl::MutexLock lock(&mutex_);
  std::ranges::fill(expected_, 0);
  for (const client::TensorUpdate& update : command.updates)
    expected_[update.tensor] = given_[update.tensor];
  std::ranges::fill(given_, 0);
  final_.clear();
  const bool is_worth_it = IsWorthIt();
  // A thread that still announces the step that was taken has the words of it.
  if (state_ == State::kUnderWay) return;
  const bool is_in_turn = next_.updates.empty() || NameSame(next_.updates, command.updates);
  // What `next_` says was announced, or, when nothing was, is of the step before.
  const bool were_as_thought = AreSame(next_.groups, command.groups);
  trusts_groups_ = state_ == State::kDone ? were_as_thought : trusts_groups_ || were_as_thought;
  state_ = trusts_groups_ && is_in_turn && is_worth_it ? State::kNotYet : State::kOff;
  groups_now_ = std::move(groups_now);
  next_ = {.step = command.step + 1, .groups = command.groups, .updates = command.updates};
  for (client::TensorUpdate& update : next_.updates)
    update = {update.tensor, update.group,
              update.update_count + IsCounted(command.groups.at(update.group))};
}

void StepAnnouncement::Accumulated(uint32_t tensor) {
  {
    absl::MutexLock lock(&mutex_);
    if (has_ended_ || !IsFinal(tensor) || state_ == State::kOff) return;
    if (state_ != State::kDone) final_.push_back(tensor);
    if (state_ == State::kUnderWay) return;
    if (state_ == State::kNotYet) state_ = State::kUnderWay;
    if (state_ == State::kDone) return channel_.release_gradient(tensor);
  }
  // Without the lock: hyper-parameters and the daemon may take their time.
  const bool is_announced = Announce();
  absl::MutexLock lock(&mutex_);
  state_ = is_announced && !has_ended_ ? State::kDone : State::kOff;
  for (const uint32_t each : std::exchange(final_, {})) {
    if (state_ == State::kDone) channel_.release_gradient(each);
  }
}

void StepAnnouncement::End() {
  absl::MutexLock lock(&mutex_);
  has_ended_ = true;
  const auto is_quiet = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return state_ != State::kUnderWay;
  };
  // It may wait for hyper-parameters, and they for who waits here.
  mutex_.AwaitWithTimeout(absl::Condition(&is_quiet), absl::Seconds(10));
}

// False: the session, the optimizer or its user's values do not allow it; the step will say why.
bool StepAnnouncement::Announce() {
  try {
    if (groups_now_) {
      std::vector<client::Group> groups = groups_now_();
      if (groups.size() != next_.groups.size()) return false;
      next_.groups = std::move(groups);
    }
    return channel_.begin_step(next_).ok();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace offload::zero3
