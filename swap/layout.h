// swap/layout.h
//
// Where everything stands in a store file, computed from its spec alone: a pure function, so that
// the file needs to hold no offsets that could disagree with it. swap/DESIGN.md has the picture and
// a worked example.
//
// Invariants
//   * Every offset and length is a multiple of 4096; no two areas overlap; all arithmetic on
//   numbers of a file is checked.
//   * In one place, the planes of one (tensor, index) stand side by side in the spec's order,
//   indexes side by side in a tensor,
//     tensors side by side in the area of the place: a whole step reads and writes two ascending
//     streams.
//   * Spare generations stand behind everything else, each with the table and the blob of one
//   snapshot and one more place: a store that grows by one moves nothing.
//   * Table entries stand in the same order as the extents, so that what is written together is
//   dirty together.
//
// Thread safety: immutable after Make().
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/run_names.h"
#include "swap/format.h"
#include "swap/store.h"

namespace offload::swap {

// What a store accepts. Decoding a file is bounded by the same limits.
struct Limits {
  static constexpr size_t kJobBytesMax = kJobNameBytesMax;
  static constexpr uint32_t kExtentElementsUnit = 32768;
  static constexpr uint32_t kExtentElementsMax = 1u << 28;
  static constexpr uint32_t kBitsPerElementMax = 64;
  static constexpr uint64_t kTensorsMax = 1u << 20;
  static constexpr uint64_t kElementsMax = uint64_t{1} << 46;  // of one tensor
  static constexpr uint64_t kExtentsMax = uint64_t{1} << 30;   // of a store
  static constexpr uint64_t kFileBytesMax = uint64_t{1} << 60;
  static constexpr uint64_t kCatalogueBytesMax = uint64_t{64} << 20;
  static constexpr uint64_t kBlobBytesMax = uint64_t{1} << 20;
};

// Refuses a spec outside the limits: OFD-1002, naming the tensor and the value.
absl::Status ValidateSpec(const StoreSpec& spec);

struct TensorLayout {
  uint64_t first_entry = 0;  // of index 0; index i begins at first_entry + i * plane_count
  uint64_t base_bytes = 0;   // of index 0, from the start of a place's area
  uint64_t group_bytes = 0;  // of all planes of one full index
  uint32_t index_count = 0;
  uint32_t plane_count = 0;
  std::array<int8_t, kPlaneCount> slot_of_plane{-1, -1, -1, -1, -1, -1, -1};
  struct Slot {
    uint64_t full_bytes = 0, full_offset_bytes = 0;  // in every index but the last
    uint64_t last_bytes = 0, last_offset_bytes = 0;  // in the last one, which may be shorter
  };
  std::array<Slot, kPlaneCount> slots{};
};

class Layout {
 public:
  // Where an extent stands: its table entry, its length, and its offset from the start of any
  // place's area.
  struct Where {
    uint64_t entry = 0;
    uint64_t size_bytes = 0;
    uint64_t area_offset_bytes = 0;
  };

  static absl::StatusOr<Layout> Make(const StoreSpec& spec);

  // False when the store has no such extent. O(1).
  bool Find(const ExtentId& id, Where* where) const;
  // The length of an extent that Find() knows, else 0.
  uint64_t ExtentBytes(const ExtentId& id) const;

  uint64_t entry_count() const { return entry_count_; }
  uint32_t table_page_count() const { return table_page_count_; }
  uint64_t table_bytes() const { return uint64_t{table_page_count_} * kPageBytes; }
  uint64_t file_bytes(uint32_t generation_count = 0) const {
    return file_bytes_ + generation_count * generation_bytes();
  }
  uint64_t generation_bytes() const {
    return 2 * (table_bytes() + Limits::kBlobBytesMax) + place_bytes_;
  }
  uint64_t place_bytes() const { return place_bytes_; }
  const std::vector<TensorLayout>& tensors() const { return tensors_; }

  static uint64_t HeaderOffset(uint32_t copy) { return copy * kPageBytes; }
  static uint64_t SuperblockOffset(uint32_t copy) { return (2 + copy) * kPageBytes; }
  static uint64_t SpecOffset(uint32_t copy, uint64_t spec_bytes) {
    return kSpecAreaOffset + copy * RoundUpToPage(spec_bytes);
  }
  uint64_t TableOffset(uint32_t copy, uint32_t mirror) const {
    return table_offset_bytes_ + (copy * 2 + mirror) * table_bytes();
  }
  uint64_t BlobOffset(uint32_t area, uint32_t mirror) const {
    return blob_offset_bytes_ + (area * 2 + mirror) * Limits::kBlobBytesMax;
  }
  uint64_t PlaceOffset(uint32_t place) const {
    return place < 2 ? data_offset_bytes_ + place * place_bytes_ : SnapshotBlobOffset(place - 2, 2);
  }
  // Of the record with this number in the superblock.
  uint64_t SnapshotTableOffset(uint32_t number, uint32_t mirror) const {
    return file_bytes(number) + mirror * table_bytes();
  }
  uint64_t SnapshotBlobOffset(uint32_t number, uint32_t mirror) const {
    return file_bytes(number) + 2 * table_bytes() + mirror * Limits::kBlobBytesMax;
  }

 private:
  std::vector<TensorLayout> tensors_;
  uint64_t entry_count_ = 0;
  uint32_t table_page_count_ = 0;
  uint64_t table_offset_bytes_ = 0;
  uint64_t blob_offset_bytes_ = 0;
  uint64_t data_offset_bytes_ = 0;
  uint64_t place_bytes_ = 0;
  uint64_t file_bytes_ = 0;
};

}  // namespace offload::swap
