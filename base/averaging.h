// base/averaging.h
//
// Whether a job keeps a moving average of its weights beside them, and which, as its user says it:
// "none", "ema:0.999", or "swa:1000:100" (parse_averaging.h).
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>

namespace offload {

struct Averaging {
  // kExponential: every update of a tensor moves its average. kEqual: updates number `from`, `from`
  // + `every`, … of a tensor count, all of them equally. The first of them is the average, and of
  // kEqual so is every update before it.
  enum class Kind : uint8_t { kNone, kExponential, kEqual };
  Kind kind = Kind::kNone;
  double decay = 0;              // of kExponential
  uint64_t from = 1, every = 1;  // of kEqual

  bool is_on() const { return kind != Kind::kNone; }
  // As it was said.
  std::string Text() const;
  friend bool operator==(const Averaging&, const Averaging&) = default;
};

// What the update number `update` of a tensor, 1 for its first, does to its average.
struct AverageStep {
  enum class Kind : uint8_t { kKeep, kTake, kLerp, kMean };
  Kind kind = Kind::kKeep;
  // kLerp: of the weight that comes, 1 - decay. kMean: of how many weights the average then is.
  double value = 0;
};
AverageStep StepOf(const Averaging& averaging, int64_t update);

}  // namespace offload
