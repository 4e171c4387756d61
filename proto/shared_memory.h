// proto/shared_memory.h
//
// Memory that the daemon shares with ranks: a memfd whose size never changes.
//
// The memory has the size of the whole budget as address space, but only the parts that Allocate()
// was called for have pages: those are reserved at once, so touching them can neither raise SIGBUS
// nor exceed the budget. Touching anything else would; the plan says where nobody does.
//
// Seals: SHRINK and GROW from the beginning. SealForWriting() adds FUTURE_WRITE and SEAL: existing
// maps stay as they are, no new writable map, write(), punch or truncation is possible for anybody.
// A slab is sealed at once, a region when its rank has mapped it.
//
// Thread safety: one thread at a time; the memory itself is the callers' business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/cpu_list.h"
#include "base/mapped_region.h"
#include "base/unique_fd.h"

namespace offload::proto {

// Daemon's side.
class SharedMemory {
 public:
  // Creates and maps it (not inherited by forked children). `size_bytes` is rounded up to a
  // multiple of 4096. OFD-1302.
  static absl::StatusOr<SharedMemory> Create(const std::string& name, uint64_t size_bytes);

  // Of one process and without seals: shared with nobody, pages come as they are touched. For
  // simulators.
  static absl::StatusOr<SharedMemory> CreatePrivate(uint64_t size_bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&&) = default;
  SharedMemory& operator=(SharedMemory&&) = default;

  // Reserves zeroed pages for [offset, offset + length), huge ones where the kernel gives them;
  // again for pages that are there does nothing. OFD-1302 when the kernel has no memory, OFD-1503
  // when the range is not inside.
  absl::Status Allocate(uint64_t offset_bytes, uint64_t length_bytes);

  // Pages that are reserved from now on come from these NUMA nodes (base/numa.h). OFD-1302 where
  // the kernel cannot.
  absl::Status PlaceOn(const CpuList& nodes);

  absl::Status SealForWriting();

  // Bytes that have pages, as the kernel counts them.
  absl::StatusOr<uint64_t> AllocatedBytes() const;

  int fd() const { return fd_.get(); }
  std::byte* data() const { return map_.data(); }
  uint64_t size_bytes() const { return map_.size(); }

 private:
  UniqueFd fd_;
  MappedRegion map_;
};

// How much memory this process may still take before the kernel has a process killed: of the
// machine, and of the control groups that it is in (a container's limit, a job's of Slurm). What
// can be dropped of files in memory counts as available, what can be swapped out does not.
struct AvailableMemory {
  uint64_t bytes = 0;
  // Of the control group that bounds it; "" when the machine does.
  std::string limit_file;
  uint64_t limit_bytes = 0;

  // "3.0 GiB", and what bounds it when that is a control group.
  std::string Describe() const;
};

// Reads what the kernel tells below `root` ("" but for tests); missing when it does not tell.
std::optional<AvailableMemory> FindAvailableMemory(const std::string& root = "");

// Rank's side: maps what the daemon sent, after checking size and seals; not inherited by forked
// children. OFD-1503, OFD-1302.
absl::StatusOr<MappedRegion> MapFromDaemon(int fd, uint64_t size_bytes, bool writable);

}  // namespace offload::proto
