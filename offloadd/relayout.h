// offloadd/relayout.h
//
// Moves a job into a store of another layout: some of its tensors are trained now that were frozen,
// so that they have more planes, or it has got further ones, or lost some; and small ones are in
// other bundles.
//
// Invariants
//   * Every extent is checked against its checksum, and gets one that binds the new store.
//   * Values of planes keep their bits, masters included; planes that a tensor did not have are
//   zeros, of which a master is its weight, and so are further tensors.
//   * What is in memory meanwhile is a few extents.
//
// Thread safety: none. Blocks, and polls both stores.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

struct LaidOutStore {
  swap::Store* store;
  const proto::Catalogue* catalogue;  // by which it is laid out
};

struct Moves {
  // By tensor of the new store, the one of the old store that it is, with the same shape and dtype,
  // and trained where that is. Nothing: a further one.
  std::vector<std::optional<uint32_t>> sources;
  std::optional<std::string> blob;  // of the epoch; nothing: the one that it has
};

// Copies what `from` holds into `to`, which is new, and commits it there under the same epoch.
// `cancelled` is asked again and again; may be null. OFD-1208 naming the extent that is damaged,
// 1209, 1210, 1802.
absl::Status CopyEpoch(const LaidOutStore& from, const LaidOutStore& to, const Moves& moves,
                       const std::function<bool()>& cancelled);

}  // namespace offload::daemon
