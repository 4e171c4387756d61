#include "base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/string_view.h"
#include "base/suggest.h"

namespace offload {
namespace {

constexpr std::string_view kPrefix = "OFFLOADD_";

enum class Takes { kAny, kNumber, kSize, kChoice };

struct Variable {
  std::string_view name;
  Takes takes = Takes::kAny;
  std::string_view choices;  // or what a number counts
};

constexpr Variable kVariables[] = {
    {"OFFLOADCTL_BINARY"},
    {"OFFLOADD_BESIDE_RAM", Takes::kSize},
    {"OFFLOADD_BINARY"},
    {"OFFLOADD_BORN_ABOVE", Takes::kSize},
    {"OFFLOADD_CONFIG"},
    {"OFFLOADD_CUDA_PLUGIN"},
    {"OFFLOADD_DEVICE"},
    {"OFFLOADD_DISABLE", Takes::kChoice, "0|1|true|yes|on"},
    {"OFFLOADD_FAULT_POINT"},
    {"OFFLOADD_FROM_FIRST_USE"},
    {"OFFLOADD_GPU_PEERS", Takes::kChoice, "off|always"},
    {"OFFLOADD_GPU_RAM"},
    {"OFFLOADD_IO", Takes::kChoice, kIoChoices},
    {"OFFLOADD_ISA", Takes::kChoice, kIsaChoices},
    {"OFFLOADD_JOB"},
    {"OFFLOADD_JOIN_TIMEOUT", Takes::kNumber, "seconds"},
    {"OFFLOADD_LIBRARY"},
    {"OFFLOADD_LOCK_TIMEOUT", Takes::kNumber, "seconds"},
    {"OFFLOADD_POOL"},
    {"OFFLOADD_POOL_READ", Takes::kNumber, "bytes per second"},
    {"OFFLOADD_POOL_WRITE", Takes::kNumber, "bytes per second"},
    {"OFFLOADD_RAM"},
    {"OFFLOADD_READ_AHEAD", Takes::kChoice, "0|1"},
    {"OFFLOADD_REPLAN", Takes::kNumber, "bytes"},
    {"OFFLOADD_REPLAN_STEPS", Takes::kNumber, "steps"},
    {"OFFLOADD_RESUME"},
    {"OFFLOADD_ROOM_TIMEOUT", Takes::kNumber, "seconds"},
    {"OFFLOADD_SANDBOX", Takes::kChoice, kSandboxChoices},
    {"OFFLOADD_SCRUB", Takes::kNumber, "bytes per second"},
    {"OFFLOADD_SOCKET"},
    {"OFFLOADD_STEP_LOG"},
    {"OFFLOADD_TRACE"},
    // Of tests and tools.
    {"OFFLOADD_DEEPSPEED_ENVIRONMENT"},
    {"OFFLOADD_LONG_TESTS"},
    {"OFFLOADD_REQUIRE_GPU"},
    {"OFFLOADD_TEST_DEVICE"},
    {"OFFLOADD_TIER_CHILD"},
};

const Variable* FindVariable(std::string_view name) {
  const Variable* const found = std::ranges::find(kVariables, name, &Variable::name);
  return found != std::end(kVariables) ? found : nullptr;
}

std::string_view NameIn(std::string_view entry) { return entry.substr(0, entry.find('=')); }

// What it may be; nothing when `value` is that.
std::optional<std::string> Allowed(const Variable& variable, std::string_view value) {
  double number = 0;
  switch (variable.takes) {
    case Takes::kAny:
      return std::nullopt;
    case Takes::kNumber:
      if (absl::SimpleAtod(ToAbsl(value), &number) && number >= 0) return std::nullopt;
      return absl::StrCat("a number of ", ToAbsl(variable.choices), ", from 0");
    case Takes::kSize:
      if (ParseByteSize(value).ok()) return std::nullopt;
      return "a size such as 64MiB";
    case Takes::kChoice: {
      const std::vector<std::string> choices = ChoicesIn(variable.choices);
      if (std::ranges::find(choices, value) != choices.end()) return std::nullopt;
      return absl::StrCat("one of ", absl::StrJoin(choices, ", "));
    }
  }
  return std::nullopt;
}

std::vector<std::string> KnownNames() {
  std::vector<std::string> names;
  for (const Variable& variable : kVariables) names.emplace_back(variable.name);
  return names;
}

}  // namespace

std::vector<std::string> ChoicesIn(std::string_view choices) {
  return absl::StrSplit(ToAbsl(choices), '|');
}

std::vector<std::string> EnvironmentOfThisProcess() {
  std::vector<std::string> entries;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
    entries.emplace_back(*entry);
  return entries;
}

absl::Status CheckEnvironment(std::span<const std::string> entries) {
  for (const std::string_view entry : entries) {
    const std::string_view name = NameIn(entry);
    const Variable* const variable = FindVariable(name);
    if (variable == nullptr || entry.size() <= name.size() + 1) continue;
    const std::string_view value = entry.substr(name.size() + 1);
    const std::optional<std::string> allowed = Allowed(*variable, value);
    if (!allowed.has_value()) continue;
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("the environment variable ", ToAbsl(name), " is \"", ToAbsl(value), "\""),
        absl::StrCat("Set it to ", *allowed, ", or leave it out"));
  }
  return absl::OkStatus();
}

std::vector<std::string> UnknownVariables(std::span<const std::string> entries) {
  const std::vector<std::string> known = KnownNames();
  std::vector<std::string> sentences;
  for (const std::string_view entry : entries) {
    const std::string_view name = NameIn(entry);
    if (!name.starts_with("OFFLOAD") || FindVariable(name) != nullptr) continue;
    const std::string nearest = NearestWord(name, known);
    // Others may have names that begin with OFFLOAD_.
    if (!name.starts_with(kPrefix) && (nearest.empty() || EditDistance(name, nearest) > 1))
      continue;
    sentences.push_back(
        absl::StrCat("the environment variable ", ToAbsl(name), " means nothing here",
                     nearest.empty() ? "" : absl::StrCat(". Did you mean ", nearest, "?")));
  }
  return sentences;
}

}  // namespace offload
