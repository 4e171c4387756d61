// offloadd/relayout.h
//
// Moves a job into a store of another layout: its tensors are the same, but some of them are
// trained now that were frozen, so that they have more planes, and small ones are in other bundles.
//
// Invariants
//   * Every extent is checked against its checksum, and gets one that binds the new store.
//   * Values of planes keep their bits, masters included; planes that a tensor did not have are
//   zeros, of which a master is its weight.
//   * What is in memory meanwhile is a few extents.
//
// Thread safety: none. Blocks, and polls both stores.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

struct LaidOutStore {
  swap::Store* store;
  const proto::Catalogue* catalogue;  // by which it is laid out
};

// Copies what `from` holds into `to`, which is new, and commits it there under the same epoch with
// the same blob. Both catalogues have the same tensors, and `to` trains all that `from` does.
// `cancelled` is asked again and again; may be null. OFD-1208 naming the extent that is damaged,
// 1209, 1210, 1802.
absl::Status CopyEpoch(const LaidOutStore& from, const LaidOutStore& to,
                       const std::function<bool()>& cancelled);

}  // namespace offload::daemon
