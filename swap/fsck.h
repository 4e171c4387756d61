// swap/fsck.h
//
// Reads everything of a closed store that its last commit refers to and says what is wrong with it:
// both headers, the four superblocks, both spec copies, both mirrors of each table page and of the
// trainer's state, every extent.
//
// Invariants
//   * Without `repair` nothing is written.
//   * With it, a damaged copy is rewritten with what its intact twin says, nothing else: never an
//   extent, and nothing at all when recovery refuses the store.
//   * What a crash leaves between the two superblocks of a commit is told, as what it is and not as
//   damage: a repair does what the next Open would do.
//
// Thread safety: blocking functions of one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device.h"
#include "swap/store.h"

namespace offload::swap {

struct FsckFinding {
  enum class Part { kStore, kHeader, kSuperblock, kSpec, kTable, kState, kExtent };
  Part part;
  std::string what;            // "superblock copy 2: superblock checksum"
  bool has_twin = false;       // the same content is intact elsewhere: nothing is lost
  bool repaired = false;       // it was rewritten from there, and read back
  bool is_unfinished = false;  // no damage: a run ended before it wrote it, and the next Open does
};

struct FsckReport {
  std::string job, path;
  uint64_t file_bytes = 0;
  CommitInfo committed;         // blob left empty
  uint64_t copies_checked = 0;  // of headers, superblocks, specs, table pages, the trainer's state
  uint64_t extents_checked = 0, extents_never_written = 0;
  uint64_t extent_bytes_read = 0;
  std::vector<FsckFinding> findings;

  bool is_clean() const;  // nothing is damaged or lost
  // True when something was lost that no twin has: an extent, or the store.
  bool has_loss() const;
  // True when something stays unwritten that a killed run has left so.
  bool has_unfinished() const;
  // True when a damaged copy stays damaged.
  bool has_open_repairs() const;
};

struct FsckOptions {
  bool repair = false;
  StoreOptions store;  // io, lock timeout, progress (bytes of extents read, and in all), cancelled
  FsckOptions() { store.lock_timeout_seconds = 0; }
};

// Takes the lock of the job's store and checks it. A failed status means that it could not be
// looked at: NOT_FOUND without an identifier, OFD-1201…1203, 1205 with the holder, 1206, 1802.
absl::StatusOr<FsckReport> CheckStore(const std::string& pool, const std::string& job,
                                      const FsckOptions& options);

// The same over a device that nobody else uses, for simulators. `name` is what messages call it.
absl::StatusOr<FsckReport> CheckDevice(aio::Device* device, const std::string& name,
                                       const FsckOptions& options);

}  // namespace offload::swap
