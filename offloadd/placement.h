// offloadd/placement.h
//
// On which NUMA nodes memory and threads of a job belong: pure policy. Memory lies where its ranks
// compute, evenly over their nodes, since every weight is read by all of a rank's threads. Threads
// run there, too: on these nodes, and where the daemon is the ranks' own, on their processors. On a
// machine of one node there is no memory to place.
//
// Thread safety: none needed.
#pragma once

#include <vector>

#include "base/cpu_list.h"
#include "base/numa.h"

namespace offload::daemon {

struct Placement {
  CpuList nodes;       // of memory; empty: wherever the kernel puts it
  CpuList processors;  // of threads; empty: those that the daemon was started on
};

// For ranks that compute on `processors`; empty: it is not known. The daemon was started on
// `own_processors`: by an administrator, who means it, or, where it is private, by one of its
// ranks, perhaps from a thread that was bound to one processor (OMP_PROC_BIND, mpirun).
inline Placement Place(const std::vector<NumaNode>& nodes, const CpuList& own_processors,
                       const CpuList& processors, bool is_private) {
  Placement placement;
  CpuList near = own_processors;
  if (is_private && !processors.empty()) {
    near = processors;
  } else if (nodes.size() > 1 && !processors.empty()) {
    CpuList of_nodes;
    for (const NumaNode& node : nodes) {
      if (!Intersection(node.processors, processors).empty())
        of_nodes = Union(of_nodes, node.processors);
    }
    near = Intersection(of_nodes, own_processors);
  }
  if (near != own_processors) placement.processors = near;
  for (const NumaNode& node : nodes) {
    const bool is_near = processors.empty() || !Intersection(node.processors, processors).empty();
    if (nodes.size() > 1 && is_near) placement.nodes.push_back(node.number);
  }
  return placement;
}

}  // namespace offload::daemon
