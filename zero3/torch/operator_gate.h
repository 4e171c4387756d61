// zero3/torch/operator_gate.h
//
// Operators over weights that lie in the daemon run side by side, as many threads as there are, but
// not across a step, and not beside one that writes weights. What an operator has pinned before a
// step has the values of before it, so that another thread's operator after the step would share
// them; and while it waits for a second weight, the daemon waits for the first, since small weights
// are updated and written together. Operators that use gradients only pass beside steps, but not
// while a store is laid out anew.
//
// Invariants
//   * What a thread does within an operator, or while it is alone, is part of that.
//   * Nobody waits for ever: after kPatience it goes on, since an operator may wait for a thread
//     that waits here. But who lays a store out anew waits for nobody, and takes as long as it
//     takes.
//
// Thread safety: all of it may be used from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace offload::zero3 {

class OperatorGate {
 public:
  static constexpr std::chrono::seconds kPatience{10};

  explicit OperatorGate(std::chrono::milliseconds patience = kPatience) : patience_(patience) {}
  // Of all engines in the process: an operator may use weights of several.
  static OperatorGate& OfProcess();

  enum class Passage { kBesideSteps, kTogether, kAlone, kAloneForLong };
  // Whether a store is being laid out anew, or is about to be: what tensors are with may change
  // until then. How often that has ended.
  bool is_laying_out() const { return laying_out_.load(std::memory_order_acquire) > 0; }
  uint64_t laid_out() const { return laid_out_.load(std::memory_order_acquire); }
  // Waits until it may pass; until it is destroyed, others wait for it.
  class Pass {
   public:
    explicit Pass(Passage passage, OperatorGate& gate = OfProcess());
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    // Whether nobody is there, or patience has ended.
    template <class Free>
    void Wait(std::unique_lock<std::mutex>& lock, const Free& is_free);

    OperatorGate& gate_;
    const Passage passage_;
  };

 private:
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int beside_steps_ = 0, together_ = 0, alone_ = 0, for_long_ = 0;
  std::atomic<int> laying_out_ = 0;
  std::atomic<uint64_t> laid_out_ = 0;
  int waiting_alone_ = 0;  // before whom nobody passes any more
};

}  // namespace offload::zero3
