#include "swap/layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace offload::swap {
namespace {

// Elements and bits are bounded by Limits: 2^28 * 64 bits does not overflow.
uint64_t PlaneBytes(uint64_t element_count, uint32_t bits_per_element) {
  return RoundUpToPage((element_count * bits_per_element + 7) / 8);
}

absl::Status BadSpec(size_t tensor, std::string_view what) {
  return MakeError(ErrorId::kBadValue, absl::StrCat("store tensor ", tensor, " ", ToAbsl(what)));
}

absl::Status ValidateTensor(const TensorSpec& tensor, size_t index) {
  if (tensor.element_count > Limits::kElementsMax) {
    return BadSpec(index, absl::StrCat("has too many elements: ", tensor.element_count));
  }
  if (tensor.planes.empty() || tensor.planes.size() > kPlaneCount) {
    return BadSpec(index, absl::StrCat("has ", tensor.planes.size(), " planes"));
  }
  std::array<bool, kPlaneCount> seen{};
  for (const PlaneSpec& plane : tensor.planes) {
    const auto number = static_cast<size_t>(plane.plane);
    if (number >= kPlaneCount) return BadSpec(index, absl::StrCat("has an unknown plane ", number));
    if (seen[number]) return BadSpec(index, absl::StrCat("has plane ", number, " twice"));
    seen[number] = true;
    if (plane.bits_per_element == 0 || plane.bits_per_element > Limits::kBitsPerElementMax) {
      return BadSpec(index,
                     absl::StrCat("has a plane of ", plane.bits_per_element, " bits per element"));
    }
  }
  // A transfer of the other planes has no gap only when the plane that is hardly ever used stands
  // at the end.
  if (seen[static_cast<size_t>(Plane::kTies)] && tensor.planes.back().plane != Plane::kTies) {
    return BadSpec(index, "must have the plane of tie bits last");
  }
  return absl::OkStatus();
}

TensorLayout LayOutTensor(const TensorSpec& spec, uint32_t extent_elements) {
  TensorLayout layout;
  layout.plane_count = static_cast<uint32_t>(spec.planes.size());
  layout.index_count =
      static_cast<uint32_t>((spec.element_count + extent_elements - 1) / extent_elements);
  if (layout.index_count == 0) return layout;
  const uint64_t last_elements =
      spec.element_count - uint64_t{layout.index_count - 1} * extent_elements;
  uint64_t full_offset = 0, last_offset = 0;
  for (size_t slot = 0; slot < spec.planes.size(); ++slot) {
    const PlaneSpec& plane = spec.planes[slot];
    layout.slot_of_plane[static_cast<size_t>(plane.plane)] = static_cast<int8_t>(slot);
    TensorLayout::Slot& at = layout.slots[slot];
    at = {PlaneBytes(extent_elements, plane.bits_per_element), full_offset,
          PlaneBytes(last_elements, plane.bits_per_element), last_offset};
    full_offset += at.full_bytes;
    last_offset += at.last_bytes;
  }
  layout.group_bytes = full_offset;
  return layout;
}

// Bytes of one place of a tensor. Bounded: at most 2^31 indexes of 6 * 2 GiB.
unsigned __int128 TensorBytes(const TensorLayout& layout) {
  if (layout.index_count == 0) return 0;
  const TensorLayout::Slot& last = layout.slots[layout.plane_count - 1];
  return static_cast<unsigned __int128>(layout.group_bytes) * (layout.index_count - 1) +
         last.last_offset_bytes + last.last_bytes;
}

}  // namespace

bool IsValidSnapshotName(std::string_view name) {
  return IsValidJobName(name) && name.size() <= kSnapshotNameBytesMax;
}

absl::Status ValidateSpec(const StoreSpec& spec) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(spec.job));
  if (spec.extent_elements == 0 || spec.extent_elements % Limits::kExtentElementsUnit != 0 ||
      spec.extent_elements > Limits::kExtentElementsMax) {
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("extent_elements is no multiple of ", Limits::kExtentElementsUnit, " up to ",
                     Limits::kExtentElementsMax, ": ", spec.extent_elements));
  }
  if (spec.tensors.size() > Limits::kTensorsMax) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("store has too many tensors: ", spec.tensors.size()));
  }
  if (spec.catalogue.size() > Limits::kCatalogueBytesMax) {
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("catalogue is longer than 64 MiB: ", spec.catalogue.size(), " bytes"));
  }
  for (size_t i = 0; i < spec.tensors.size(); ++i) {
    if (absl::Status status = ValidateTensor(spec.tensors[i], i); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Layout> Layout::Make(const StoreSpec& spec) {
  if (absl::Status status = ValidateSpec(spec); !status.ok()) return status;
  Layout layout;
  layout.tensors_.reserve(spec.tensors.size());
  unsigned __int128 place_bytes = 0;  // cannot overflow: 2^20 tensors of less than 2^65 bytes
  for (const TensorSpec& tensor : spec.tensors) {
    TensorLayout at = LayOutTensor(tensor, spec.extent_elements);
    at.first_entry = layout.entry_count_;
    at.base_bytes = static_cast<uint64_t>(place_bytes);
    layout.entry_count_ += uint64_t{at.index_count} * at.plane_count;
    place_bytes += TensorBytes(at);
    if (layout.entry_count_ > Limits::kExtentsMax || place_bytes > Limits::kFileBytesMax / 32) {
      return MakeError(ErrorId::kBadValue,
                       absl::StrCat("store has too many extents: ", layout.entry_count_, " of ",
                                    spec.extent_elements, " elements"));
    }
    layout.tensors_.push_back(at);
  }
  const uint64_t pages = (layout.entry_count_ + kEntriesPerTablePage - 1) / kEntriesPerTablePage;
  layout.table_page_count_ = static_cast<uint32_t>(std::max<uint64_t>(pages, 1));
  layout.place_bytes_ = static_cast<uint64_t>(place_bytes);
  layout.table_offset_bytes_ = SpecOffset(2, EncodeSpec(spec).size());
  layout.blob_offset_bytes_ = layout.table_offset_bytes_ + 4 * layout.table_bytes();
  layout.data_offset_bytes_ = layout.blob_offset_bytes_ + 4 * Limits::kBlobBytesMax;
  layout.file_bytes_ = layout.data_offset_bytes_ + 2 * layout.place_bytes_;
  return layout;
}

bool Layout::Find(const ExtentId& id, Where* where) const {
  if (id.tensor >= tensors_.size() || static_cast<size_t>(id.plane) >= kPlaneCount) return false;
  const TensorLayout& tensor = tensors_[id.tensor];
  const int slot = tensor.slot_of_plane[static_cast<size_t>(id.plane)];
  if (slot < 0 || id.index >= tensor.index_count) return false;
  const TensorLayout::Slot& at = tensor.slots[slot];
  const bool last = id.index + 1 == tensor.index_count;
  where->entry = tensor.first_entry + uint64_t{id.index} * tensor.plane_count + slot;
  where->size_bytes = last ? at.last_bytes : at.full_bytes;
  where->area_offset_bytes = tensor.base_bytes + id.index * tensor.group_bytes +
                             (last ? at.last_offset_bytes : at.full_offset_bytes);
  return true;
}

uint64_t Layout::ExtentBytes(const ExtentId& id) const {
  Where where;
  return Find(id, &where) ? where.size_bytes : 0;
}

}  // namespace offload::swap
