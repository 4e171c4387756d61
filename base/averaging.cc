#include "base/averaging.h"

#include <charconv>

namespace offload {

std::string Averaging::Text() const {
  switch (kind) {
    case Kind::kNone:
      return "none";
    case Kind::kExponential: {
      char digits[32];
      const auto written = std::to_chars(digits, digits + sizeof(digits), decay);
      return std::string("ema:").append(digits, written.ptr);
    }
    case Kind::kEqual:
      break;
  }
  return "swa:" + std::to_string(from) + ":" + std::to_string(every);
}

AverageStep StepOf(const Averaging& averaging, int64_t update) {
  using Kind = AverageStep::Kind;
  switch (averaging.kind) {
    case Averaging::Kind::kNone:
      return {};
    case Averaging::Kind::kExponential:
      if (update <= 1) return {.kind = Kind::kTake};
      return {.kind = Kind::kLerp, .value = 1 - averaging.decay};
    case Averaging::Kind::kEqual:
      break;
  }
  const auto number = static_cast<uint64_t>(update);
  if (number <= averaging.from) return {.kind = Kind::kTake};
  const uint64_t past = number - averaging.from;
  if (past % averaging.every != 0) return {};
  return {.kind = Kind::kMean, .value = static_cast<double>(past / averaging.every + 1)};
}

}  // namespace offload
