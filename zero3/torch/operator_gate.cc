#include "zero3/torch/operator_gate.h"

namespace offload::zero3 {

// Passes of this thread.
static thread_local int depth = 0;

OperatorGate& OperatorGate::OfProcess() {
  static auto* const kGate = new OperatorGate;
  return *kGate;
}

template <class Free>
void OperatorGate::Pass::Wait(std::unique_lock<std::mutex>& lock, const Free& is_free) {
  while (!gate_.changed_.wait_for(lock, gate_.patience_, is_free) && gate_.for_long_ > 0) {
  }
}

OperatorGate::Pass::Pass(Passage passage, OperatorGate& gate) : gate_(gate), passage_(passage) {
  if (++depth > 1) return;
  if (passage == Passage::kAloneForLong) ++gate_.laying_out_;
  std::unique_lock lock(gate_.mutex_);
  if (passage == Passage::kBesideSteps) {
    Wait(lock, [this] { return gate_.laying_out_ == 0; });
    ++gate_.beside_steps_;
  } else if (passage == Passage::kTogether) {
    Wait(lock, [this] { return gate_.alone_ == 0 && gate_.waiting_alone_ == 0; });
    ++gate_.together_;
  } else {
    ++gate_.waiting_alone_;
    Wait(lock, [this, passage] {
      return gate_.alone_ == 0 && gate_.together_ == 0 &&
             (passage != Passage::kAloneForLong || gate_.beside_steps_ == 0);
    });
    --gate_.waiting_alone_;
    ++gate_.alone_;
    if (passage == Passage::kAloneForLong) ++gate_.for_long_;
  }
}

OperatorGate::Pass::~Pass() {
  if (--depth > 0) return;
  const std::lock_guard lock(gate_.mutex_);
  --(passage_ == Passage::kBesideSteps ? gate_.beside_steps_
     : passage_ == Passage::kTogether  ? gate_.together_
                                       : gate_.alone_);
  if (passage_ == Passage::kAloneForLong) {
    --gate_.for_long_;
    ++gate_.laid_out_;
    --gate_.laying_out_;
  }
  if (passage_ != Passage::kBesideSteps || gate_.laying_out_ > 0) gate_.changed_.notify_all();
}

}  // namespace offload::zero3
