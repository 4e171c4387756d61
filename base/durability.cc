#include "base/durability.h"

#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload {
namespace {

constexpr std::string_view kCheckpoint = "checkpoint:";
constexpr uint64_t kCountMax = 1'000'000'000;

absl::Status Unknown(std::string_view text) {
  return MakeError(ErrorId::kBadValue, absl::StrCat("durability \"", ToAbsl(text), "\""),
                   "Use step, checkpoint:N for a commit after every N steps, or checkpoint:10min "
                   "(s, min or h) for one so long after the other");
}

}  // namespace

absl::StatusOr<Durability> ParseDurability(std::string_view text) {
  if (text.empty() || text == "step") return Durability{};
  if (!text.starts_with(kCheckpoint)) return Unknown(text);
  const std::string_view interval = text.substr(kCheckpoint.size());
  uint64_t count = 0;
  const auto [end, error] =
      std::from_chars(interval.data(), interval.data() + interval.size(), count);
  if (error != std::errc() || count == 0 || count > kCountMax) return Unknown(text);
  const std::string_view unit = interval.substr(static_cast<size_t>(end - interval.data()));
  if (unit.empty()) return Durability{.steps = count};
  constexpr std::pair<std::string_view, double> kUnits[] = {{"s", 1}, {"min", 60}, {"h", 3600}};
  for (const auto& [name, seconds] : kUnits) {
    if (unit == name)
      return Durability{.steps = 0, .seconds = static_cast<double>(count) * seconds};
  }
  return Unknown(text);
}

}  // namespace offload
