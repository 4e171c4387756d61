#include "base/parse_averaging.h"

#include <charconv>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload {
namespace {

constexpr std::string_view kExponential = "ema:", kEqual = "swa:";
constexpr uint64_t kCountMax = 1'000'000'000;

absl::Status Unknown(std::string_view text) {
  return MakeError(ErrorId::kBadValue, absl::StrCat("average \"", ToAbsl(text), "\""),
                   "Use none; ema:DECAY, 0 < DECAY < 1, for an exponential average of all updates; "
                   "or swa:FROM:EVERY for the mean of the weights after every EVERYth update from "
                   "the FROMth on");
}

template <typename Number>
std::optional<Number> NumberIn(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// A number of updates.
std::optional<uint64_t> CountIn(std::string_view text) {
  const std::optional<uint64_t> count = NumberIn<uint64_t>(text);
  return count.has_value() && *count >= 1 && *count <= kCountMax ? count : std::nullopt;
}

std::optional<Averaging> Exponential(std::string_view text) {
  const std::optional<double> decay = NumberIn<double>(text);
  if (!decay.has_value() || !(*decay > 0 && *decay < 1)) return std::nullopt;
  return Averaging{.kind = Averaging::Kind::kExponential, .decay = *decay};
}

std::optional<Averaging> Equal(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<uint64_t> from = CountIn(text.substr(0, colon));
  const std::optional<uint64_t> every = CountIn(text.substr(colon + 1));
  if (!from.has_value() || !every.has_value()) return std::nullopt;
  return Averaging{.kind = Averaging::Kind::kEqual, .from = *from, .every = *every};
}

}  // namespace

absl::StatusOr<Averaging> ParseAveraging(std::string_view text) {
  if (text.empty() || text == "none") return Averaging{};
  std::optional<Averaging> averaging;
  if (text.starts_with(kExponential)) averaging = Exponential(text.substr(kExponential.size()));
  if (text.starts_with(kEqual)) averaging = Equal(text.substr(kEqual.size()));
  if (!averaging.has_value()) return Unknown(text);
  return *averaging;
}

}  // namespace offload
