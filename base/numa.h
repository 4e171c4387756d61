// base/numa.h
//
// The machine's NUMA nodes, and where memory lies on them. On a machine of one node, and where the
// kernel knows of none, there is nothing to place.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/cpu_list.h"

namespace offload {

struct NumaNode {
  uint32_t number = 0;
  CpuList processors;  // not empty
};

inline constexpr char kNumaFolder[] = "/sys/devices/system/node";

// Nodes that have processors and memory, ascending. Empty where the kernel tells of none.
std::vector<NumaNode> ReadNumaNodes(const std::string& folder = kNumaFolder);
// Those of this machine whose memory this process may take.
std::vector<NumaNode> UsableNumaNodes();
// Who started this process has said where its memory lies (numactl).
bool HasMemoryPolicy();
// Pages of [memory, memory + size) that are not there yet come from these nodes in turn; from the
// only one as long as that has room. Of shared memory: whoever touches them. Whole pages. Fails
// where the kernel knows of no nodes, or not of these.
absl::Status PlaceMemory(void* memory, size_t size_bytes, const CpuList& nodes);

}  // namespace offload
