// swap/fork.h
//
// A new job that begins with the state of another: of one of its snapshots, or of its last epoch.
//
// Invariants
//   * The new store is formatted under a temporary name and gets its own when everything is copied
//   and committed: whatever happens before leaves no job.
//   * Every extent is checked against its checksum while it is copied, and gets one that binds the
//   new store. Bytes are never shared between stores: a shared block would have to be allocated
//   when one of the two writes it, and a store never runs out of space after its format.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"

namespace offload::swap {

// Opens the state that is to be copied. Of a snapshot, also while the job is in use; with an empty
// name the last epoch, which takes the lock of the store. Errors as Store::Open and OpenSnapshot.
absl::StatusOr<std::unique_ptr<Store>> OpenForkSource(const std::string& pool,
                                                      const std::string& job,
                                                      const std::string& snapshot,
                                                      const StoreOptions& options);

// Bytes of the extents that have been written: what a fork copies.
uint64_t WrittenBytes(const Store& source);

// Makes job `job` in `pool` with the state of `source`; options.generations spare generations are
// formatted, and options.progress tells of the format and then of the copy. Blocking. Errors as
// Store::Create, and OFD-1208 naming the extent that is damaged.
absl::Status Fork(Store& source, const std::string& pool, const std::string& job,
                  const StoreOptions& options);

}  // namespace offload::swap
