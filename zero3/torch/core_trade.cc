#include "zero3/torch/core_trade.h"

#include <algorithm>
#include <utility>

namespace offload::zero3 {

// What lies between two calls is the update of the step that the first one was for, and what was
// begun for the second: a sample when neither was begun. The first two hold the loading of weights
// and the schedule that nobody knew.
bool CoreTrade::Judge(const StepCosts& now) {
  const StepCosts before = std::exchange(before_, now);
  if (++steps_ > 2 && !begins_ && !began_) {
    samples_[sample_count_++ % kSamples] = {
        now.forward_wait_nanoseconds - before.forward_wait_nanoseconds,
        now.computed_nanoseconds - before.computed_nanoseconds};
  }
  began_ = begins_;
  ++turn_;
  if (begins_ ? turn_ >= kBegun : turn_ >= kLookedAt && IsWorthIt()) {
    begins_ = !begins_;
    turn_ = 0;
  }
  return begins_;
}

bool CoreTrade::IsWorthIt() const {
  if (sample_count_ < kSamples) return false;
  double waited = 0, computed = 0;
  for (const StepCosts& sample : samples_) {
    waited += static_cast<double>(sample.forward_wait_nanoseconds);
    computed += static_cast<double>(sample.computed_nanoseconds);
  }
  return waited > kMargin * computed;
}

}  // namespace offload::zero3
