// base/clock.h
//
// Monotonic time behind an interface, so that policies can be tested without waiting.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace offload {

class Clock {
 public:
  virtual ~Clock() = default;

  // Nanoseconds since some fixed moment; never goes back.
  virtual int64_t NowNanoseconds() const = 0;

  double NowSeconds() const { return static_cast<double>(NowNanoseconds()) * 1e-9; }

  // The system's steady clock. Lives for ever.
  static const Clock& Real();
};

class RealClock final : public Clock {
 public:
  int64_t NowNanoseconds() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

inline const Clock& Clock::Real() {
  static const RealClock clock;
  return clock;
}

// Stands still until a test moves it.
class FakeClock final : public Clock {
 public:
  int64_t NowNanoseconds() const override {
    return now_nanoseconds_.load(std::memory_order_relaxed);
  }
  void AdvanceNanoseconds(int64_t nanoseconds) {
    now_nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
  }
  void AdvanceSeconds(double seconds) { AdvanceNanoseconds(static_cast<int64_t>(seconds * 1e9)); }

 private:
  std::atomic<int64_t> now_nanoseconds_{0};
};

}  // namespace offload
