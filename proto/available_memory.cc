// What the kernel tells of memory, in /proc and in the files of control groups.

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "proto/shared_memory.h"

namespace offload::proto {
namespace {

// The two kinds of control groups; the names that a kind does not have are "".
struct Kind {
  const char* usage;
  std::vector<const char*> limits;
  std::vector<const char*> droppable;  // in memory.stat
};

// Above memory.high nobody is killed, but all are slowed until they hardly move.
const Kind& Unified() {
  static const Kind kind = {
      "memory.current", {"memory.max", "memory.high"}, {"inactive_file", "active_file"}};
  return kind;
}

const Kind& Legacy() {
  static const Kind kind = {"memory.usage_in_bytes",
                            {"memory.limit_in_bytes"},
                            {"total_inactive_file", "total_active_file"}};
  return kind;
}

// Missing also for "max", which is no limit.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The number behind `name` in a file of such lines.
uint64_t ReadNamedNumber(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string each;
  uint64_t number = 0;
  while (file >> each >> number) {
    if (each == name) return number;
  }
  return 0;
}

std::optional<uint64_t> MachineBytes(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name;
  uint64_t kibibytes = 0;
  std::string unit;
  while (file >> name >> kibibytes) {
    if (name == "MemAvailable:") return kibibytes << 10;
    std::getline(file, unit);
  }
  return std::nullopt;
}

void Bound(const std::string& root, const std::string& folder, const Kind& kind,
           std::optional<AvailableMemory>& least) {
  const std::optional<uint64_t> usage = ReadNumber(root + folder + "/" + kind.usage);
  if (!usage.has_value()) return;
  for (const char* name : kind.limits) {
    const std::string file = folder + "/" + name;
    const std::optional<uint64_t> limit = ReadNumber(root + file);
    if (!limit.has_value()) continue;
    uint64_t used = *usage;
    for (const char* droppable : kind.droppable)
      used -= std::min(used, ReadNamedNumber(root + folder + "/memory.stat", droppable));
    const uint64_t left = *limit - std::min(*limit, used);
    if (!least.has_value() || left < least->bytes)
      least = {.bytes = left, .limit_file = file, .limit_bytes = *limit};
  }
}

// Where this process is in the hierarchy of a kind: "/docker/1f0c", for "memory" or, of the unified
// one, "".
std::string GroupOf(const std::string& root, std::string_view controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    for (const auto name : absl::StrSplit(fields[1], ',')) {
      if (std::string_view(name.data(), name.size()) == controller) return fields[2];
    }
  }
  return "";
}

// `group` as seen below a mount that shows only what is below `shown`.
std::string Below(const std::string& group, const std::string& shown) {
  if (shown == "/") return group;
  return absl::StartsWith(group, shown) ? group.substr(shown.size()) : "";
}

bool HasMemory(const std::string& options) {
  const std::vector<std::string> each = absl::StrSplit(options, ',');
  return std::find(each.begin(), each.end(), "memory") != each.end();
}

// A limit counts for all below it.
void BoundByGroups(const std::string& root, std::optional<AvailableMemory>& least) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // ID PARENT DEVICE SHOWN MOUNTED OPTIONS … - TYPE SOURCE OPTIONS
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> mount = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> type = absl::StrSplit(halves[1], ' ');
    if (mount.size() < 5 || type.size() < 3) continue;
    const bool is_unified = type[0] == "cgroup2";
    if (!is_unified && (type[0] != "cgroup" || !HasMemory(type[2]))) continue;
    const Kind& kind = is_unified ? Unified() : Legacy();
    std::string group = Below(GroupOf(root, is_unified ? "" : "memory"), mount[3]);
    while (!group.empty() && group.back() == '/') group.pop_back();
    for (;; group.resize(group.rfind('/'))) {
      Bound(root, mount[4] + group, kind, least);
      if (group.rfind('/') == std::string::npos) break;
    }
  }
}

}  // namespace

std::string AvailableMemory::Describe() const {
  if (limit_file.empty()) return FormatBytes(bytes);
  return absl::StrCat(FormatBytes(bytes), " (the control group's limit is ",
                      FormatBytes(limit_bytes), ", ", limit_file, ")");
}

std::optional<AvailableMemory> FindAvailableMemory(const std::string& root) {
  std::optional<AvailableMemory> least;
  if (const std::optional<uint64_t> bytes = MachineBytes(root)) least = {.bytes = *bytes};
  BoundByGroups(root, least);
  return least;
}

}  // namespace offload::proto
