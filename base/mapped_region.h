// base/mapped_region.h
//
// Owns a range of mapped memory: move-only, unmaps it once.
//
// Thread safety: the object as a pointer; the memory is the callers' business.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "absl/status/statusor.h"

namespace offload {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

class MappedRegion {
 public:
  // Maps [offset_bytes, offset_bytes + size_bytes) of a file or memfd. `prot` and `flags` are those
  // of mmap, MAP_SHARED or MAP_PRIVATE included. What is as large as a huge page begins at a
  // multiple of one. INVALID_ARGUMENT for a size of 0; otherwise the kernel's refusal.
  static absl::StatusOr<MappedRegion> Map(int fd, uint64_t offset_bytes, size_t size_bytes,
                                          int prot, int flags);

  // Private zeroed memory, page aligned.
  static absl::StatusOr<MappedRegion> Anonymous(size_t size_bytes);

  // Address space only: no memory is charged, and every access faults until something is mapped
  // over it.
  static absl::StatusOr<MappedRegion> Reserve(size_t size_bytes, int prot = PROT_NONE);

  MappedRegion() = default;
  ~MappedRegion() { Unmap(); }
  MappedRegion(MappedRegion&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MappedRegion& operator=(MappedRegion&& other) noexcept;
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  bool valid() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  size_t size() const { return size_bytes_; }
  std::span<std::byte> span() const { return {data_, size_bytes_}; }

  // Gives the whole huge pages inside [offset, offset + size) of memory one page each instead of
  // 512 (Linux 6.1 and newer), so that a drive is told of one piece of memory; contents stay. A
  // hint: returns the bytes that got one, and the rest is as it was. Private memory must have been
  // written before. Blocks while it allocates.
  size_t UseHugePages(size_t offset_bytes, size_t size_bytes);

  // Unmaps now. Does nothing when there is nothing mapped.
  void Unmap();

 private:
  MappedRegion(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace offload
