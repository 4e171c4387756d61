#include "base/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload {
namespace {

// Of nodes, as the system calls take them: more than any kernel has.
constexpr uint32_t kNodesMax = 1024;
constexpr uint32_t kWordBits = CHAR_BIT * sizeof(unsigned long);
using NodeMask = std::array<unsigned long, kNodesMax / kWordBits>;

CpuList ReadList(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return ParseCpuList(text.str()).value_or(CpuList());
}

}  // namespace

std::vector<NumaNode> ReadNumaNodes(const std::string& folder) {
  std::vector<NumaNode> nodes;
  for (const uint32_t number : ReadList(absl::StrCat(folder, "/has_memory"))) {
    CpuList processors = ReadList(absl::StrCat(folder, "/node", number, "/cpulist"));
    if (!processors.empty()) nodes.push_back({number, std::move(processors)});
  }
  return nodes;
}

std::vector<NumaNode> UsableNumaNodes() {
  std::vector<NumaNode> nodes = ReadNumaNodes();
  NodeMask allowed = {};
  if (::syscall(SYS_get_mempolicy, nullptr, allowed.data(), kNodesMax, nullptr,
                MPOL_F_MEMS_ALLOWED) != 0)
    return nodes;
  std::erase_if(nodes, [&](const NumaNode& node) {
    return node.number >= kNodesMax ||
           ((allowed[node.number / kWordBits] >> (node.number % kWordBits)) & 1) == 0;
  });
  return nodes;
}

bool HasMemoryPolicy() {
  int mode = MPOL_DEFAULT;
  if (::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return false;
  return mode != MPOL_DEFAULT && mode != MPOL_LOCAL;
}

absl::Status PlaceMemory(void* memory, size_t size_bytes, const CpuList& nodes) {
  NodeMask mask = {};
  for (const uint32_t node : nodes) {
    if (node < kNodesMax) mask[node / kWordBits] |= 1ul << (node % kWordBits);
  }
  const int mode = nodes.size() > 1 ? MPOL_INTERLEAVE : MPOL_PREFERRED;
  // The kernel takes one bit less than it is told of.
  if (::syscall(SYS_mbind, memory, size_bytes, mode, mask.data(), kNodesMax + 1, 0) != 0) {
    return MakeError(
        ErrorId::kSharedMemory,
        absl::StrCat("memory on NUMA nodes ", FormatCpuList(nodes), ", mbind: ", ErrnoText(errno)));
  }
  return absl::OkStatus();
}

}  // namespace offload
