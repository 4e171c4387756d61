#include "proto/slab_layout.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/shm_abi.h"

namespace offload::proto {
namespace {

// Estimates of what the heaps of daemon and client take; docs and `plan` call their sum "overhead".
constexpr uint64_t kFixedOverheadBytes = 24ull << 20;
constexpr uint64_t kOverheadPerExtentPlaneBytes = 128;
constexpr uint64_t kOverheadPerTensorBytes = 512;

absl::Status Unsupported(std::string_view what) {
  return MakeError(ErrorId::kUnsupportedModel, what);
}
absl::Status Inconsistent(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }

// Fills in the element count; a count that is already there has to be right.
absl::Status CompleteElementCount(Tensor& tensor) {
  uint64_t count = 1;
  for (const int64_t dimension : tensor.shape) {
    if (dimension <= 0) {
      return Unsupported(absl::StrCat("parameter \"", tensor.name, "\" has a dimension of ",
                                      dimension, " elements"));
    }
    const std::optional<uint64_t> product =
        CheckedMultiply(count, static_cast<uint64_t>(dimension));
    if (!product.has_value() || *product > kElementsMax) {
      return Unsupported(absl::StrCat("parameter \"", tensor.name, "\" has more than ",
                                      kElementsMax, " elements"));
    }
    count = *product;
  }
  if (tensor.element_count != 0 && tensor.element_count != count) {
    return Unsupported(absl::StrCat("parameter \"", tensor.name, "\" says ", tensor.element_count,
                                    " elements, its shape ", count));
  }
  tensor.element_count = count;
  return absl::OkStatus();
}

// There is one way to say an order, so that orders can be compared.
absl::Status CheckDimensionOrder(const Tensor& tensor) {
  std::vector<uint32_t> rows;
  for (uint32_t dimension = 0; dimension < tensor.shape.size(); ++dimension) {
    if (tensor.shape[dimension] > 1) rows.push_back(dimension);
  }
  const std::vector<uint32_t>& order = tensor.dimension_order;
  if (order.empty() ||
      (order != rows && std::is_permutation(order.begin(), order.end(), rows.begin(), rows.end())))
    return absl::OkStatus();
  return Unsupported(absl::StrCat("parameter \"", tensor.name,
                                  "\" has an order of dimensions that does not fit its shape"));
}

absl::Status CheckTensors(std::vector<Tensor>& tensors) {
  if (tensors.size() > kTensorsMax) {
    return Unsupported(
        absl::StrCat("the model has ", tensors.size(), " parameters, at most ", kTensorsMax));
  }
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(tensors.size());
  uint64_t element_count = 0;
  for (Tensor& tensor : tensors) {
    if (tensor.name.empty()) return Unsupported("a parameter has no name");
    if (!names.insert(tensor.name).second) {
      return Unsupported(absl::StrCat("two parameters have the name \"", tensor.name, "\""));
    }
    if (static_cast<size_t>(tensor.dtype) >= kDtypeCount) {
      return Unsupported(absl::StrCat("parameter \"", tensor.name, "\" has the unknown dtype ",
                                      static_cast<int>(tensor.dtype)));
    }
    OFFLOAD_RETURN_IF_ERROR(CompleteElementCount(tensor));
    OFFLOAD_RETURN_IF_ERROR(CheckDimensionOrder(tensor));
    element_count += tensor.element_count;  // both are at most kElementsMax: no overflow
    if (element_count > kElementsMax) {
      return Unsupported(absl::StrCat("the model has more than ", kElementsMax, " elements"));
    }
  }
  return absl::OkStatus();
}

// The bundle that small tensors of one kind are put into at the moment.
class BundleWriter {
 public:
  // Returns where the next tensor goes; begins a bundle when there is none or it has no room.
  Placement Place(const Tensor& tensor, uint32_t id, std::vector<StoreTensor>& store_tensors) {
    uint64_t offset = store_tensor_.has_value()
                          ? AlignUp(store_tensors[*store_tensor_].element_count, kBundleAlignment)
                          : 0;
    if (!store_tensor_.has_value() || !IsInside(offset, tensor.element_count, kExtentElements)) {
      store_tensor_ = static_cast<uint32_t>(store_tensors.size());
      store_tensors.push_back(
          {.dtype = tensor.dtype, .trainable = tensor.trainable, .bundle = true});
      offset = 0;
    }
    StoreTensor& bundle = store_tensors[*store_tensor_];
    bundle.element_count = offset + tensor.element_count;
    bundle.members.push_back(id);
    return {.store_tensor = *store_tensor_, .element_offset = offset};
  }

 private:
  std::optional<uint32_t> store_tensor_;
};

// Hands out consecutive pieces of the slab; after an overflow there is none any more.
class SlabCursor {
 public:
  // Returns the offset of the piece; meaningless after an overflow.
  uint64_t Take(uint64_t size_bytes) {
    const uint64_t begin = end_bytes_.value_or(0);
    // The window is aligned already and everything else is bounded: no overflow in the padding.
    if (end_bytes_.has_value()) end_bytes_ = CheckedAdd(begin, PaddedBytes(size_bytes));
    return begin;
  }
  std::optional<uint64_t> end_bytes() const { return end_bytes_; }

 private:
  std::optional<uint64_t> end_bytes_ = 0;
};

absl::Status CheckPlanSizes(const Catalogue& catalogue, const MemoryPlan& plan) {
  const size_t stores = catalogue.store_tensors.size();
  if (plan.weight_resident.size() != stores || plan.state_resident.size() != stores ||
      plan.gradients.size() != catalogue.tensors.size()) {
    return Inconsistent(absl::StrCat("the plan is for ", plan.weight_resident.size(), "/",
                                     plan.state_resident.size(), "/", plan.gradients.size(),
                                     " tensors, the job has ", stores, "/", stores, "/",
                                     catalogue.tensors.size()));
  }
  if (!IsAligned(plan.window_bytes, kSectorBytes)) {
    return Inconsistent(absl::StrCat("the plan has window_bytes ", plan.window_bytes,
                                     ", no multiple of ", kSectorBytes));
  }
  if (plan.region_bytes < kRegionFixedBytes) {
    return Inconsistent(absl::StrCat("the plan has region_bytes ", plan.region_bytes, ", at least ",
                                     kRegionFixedBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckWorld(const MemoryPlan& plan) {
  const bool is_one = plan.world_size == 1;
  if (plan.world_size == 0 || plan.world_size > kWorldSizeMax) {
    return Inconsistent(
        absl::StrCat("the plan has world_size ", plan.world_size, ", 1 to ", kWorldSizeMax));
  }
  if (is_one ? plan.other_region_bytes != 0 : plan.other_region_bytes < kRegionFixedBytes) {
    return Inconsistent(absl::StrCat("the plan has other_region_bytes ", plan.other_region_bytes,
                                     " for ", plan.world_size - 1, " other ranks"));
  }
  if (is_one && plan.sum_blocks != 0) {
    return Inconsistent(absl::StrCat("the plan has sum_blocks ", plan.sum_blocks, " for one rank"));
  }
  return absl::OkStatus();
}

absl::Status CheckStoreTensors(const Catalogue& catalogue, const MemoryPlan& plan) {
  bool needs_pipeline = false;
  for (size_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    const StoreTensor& tensor = catalogue.store_tensors[i];
    const uint32_t extents = ExtentCount(tensor.element_count);
    if (plan.state_resident[i] > extents) {
      return Inconsistent(absl::StrCat("the plan has state_resident ", plan.state_resident[i],
                                       " for store tensor ", i, " of ", extents, " extents"));
    }
    needs_pipeline |= tensor.trainable && plan.state_resident[i] < extents;
    if (plan.weight_resident[i]) continue;
    if (tensor.bundle) {
      return Inconsistent(absl::StrCat("the plan evicts store tensor ", i, ", which is a bundle"));
    }
    if (plan.window_bytes < WeightSlotBytes(tensor)) {
      return Inconsistent(absl::StrCat("the plan has window_bytes ", plan.window_bytes,
                                       ", store tensor ", i, " needs ", WeightSlotBytes(tensor)));
    }
  }
  if (needs_pipeline && plan.pipeline_blocks == 0) {
    return Inconsistent("the plan has pipeline_blocks 0 and state that is not resident");
  }
  return absl::OkStatus();
}

absl::Status CheckGradient(const Tensor& tensor, const GradientPlacement& gradient,
                           const MemoryPlan& plan) {
  const auto refuse = [&](std::string_view why) {
    return Inconsistent(absl::StrCat("the plan puts the gradient of \"", tensor.name, "\" at home ",
                                     static_cast<int>(gradient.home), ", offset ",
                                     gradient.offset_bytes, ": ", std::string(why)));
  };
  if (!tensor.trainable) {
    return gradient.home == GradientHome::kNone ? absl::OkStatus() : refuse("it is frozen");
  }
  const uint64_t size_bytes = PaddedBytes(tensor.element_count * DtypeBytes(tensor.dtype));
  if (!IsAligned(gradient.offset_bytes, kSectorBytes)) return refuse("the offset is not aligned");
  switch (gradient.home) {
    case GradientHome::kNone:
      return refuse("it is trainable");
    case GradientHome::kRegion:
      if (gradient.offset_bytes < kRegionFixedBytes) return refuse("the rings stand there");
      if (!IsInside(gradient.offset_bytes, size_bytes, plan.region_bytes)) {
        return refuse(absl::StrCat("the region has ", plan.region_bytes, " bytes"));
      }
      if (plan.world_size > 1 &&
          !IsInside(gradient.offset_bytes, size_bytes, plan.other_region_bytes)) {
        return refuse(absl::StrCat("other regions have ", plan.other_region_bytes, " bytes"));
      }
      return absl::OkStatus();
    case GradientHome::kSlab:
      if (plan.world_size == 1) return refuse("there is one rank");
      return gradient.offset_bytes == 0 ? absl::OkStatus() : refuse("the layout places it");
    case GradientHome::kSlabScratch:
      if (plan.world_size == 1) return refuse("there is one rank");
      if (plan.sum_blocks == 0) return refuse("there are no sum_blocks");
      [[fallthrough]];
    case GradientHome::kScratch:
      if (!IsInside(gradient.offset_bytes, size_bytes, plan.scratch_bytes)) {
        return refuse(absl::StrCat("the scratch file has ", plan.scratch_bytes, " bytes"));
      }
      if (!plan.pipeline_gradients || plan.pipeline_blocks == 0) {
        return refuse("no pipeline block has room for it");
      }
      return absl::OkStatus();
  }
  return refuse("unknown home");
}

absl::Status CheckPlan(const Catalogue& catalogue, const MemoryPlan& plan) {
  OFFLOAD_RETURN_IF_ERROR(CheckPlanSizes(catalogue, plan));
  OFFLOAD_RETURN_IF_ERROR(CheckWorld(plan));
  OFFLOAD_RETURN_IF_ERROR(CheckStoreTensors(catalogue, plan));
  for (size_t i = 0; i < catalogue.tensors.size(); ++i) {
    OFFLOAD_RETURN_IF_ERROR(CheckGradient(catalogue.tensors[i], plan.gradients[i], plan));
  }
  return absl::OkStatus();
}

// The largest gradient of one extent of any trainable store tensor.
uint64_t FullGradientBytes(const Catalogue& catalogue) {
  uint64_t largest = 0;
  for (const StoreTensor& tensor : catalogue.store_tensors) {
    if (!tensor.trainable) continue;
    const uint64_t elements = ExtentElements(tensor.element_count, 0);
    largest = std::max(largest, PaddedBytes(elements * DtypeBytes(tensor.dtype)));
  }
  return largest;
}

// Behind everything else, so that nothing moves for one rank.
void PlaceSums(const Catalogue& catalogue, const MemoryPlan& plan, SlabCursor& cursor,
               SlabLayout& layout) {
  layout.sum_offset.resize(catalogue.tensors.size(), 0);
  for (size_t i = 0; i < catalogue.tensors.size(); ++i) {
    const Tensor& tensor = catalogue.tensors[i];
    if (plan.gradients[i].home != GradientHome::kSlab) continue;
    layout.sum_offset[i] = cursor.Take(tensor.element_count * DtypeBytes(tensor.dtype));
  }
  layout.sum_block_bytes = plan.sum_blocks > 0 ? FullGradientBytes(catalogue) : 0;
  layout.sum_blocks_offset = cursor.Take(layout.sum_block_bytes * plan.sum_blocks);
}

}  // namespace

absl::StatusOr<Catalogue> BuildCatalogue(std::vector<Tensor> tensors,
                                         const kernels::OptimizerSpec& optimizer) {
  OFFLOAD_RETURN_IF_ERROR(CheckTensors(tensors));
  Catalogue catalogue;
  catalogue.placements.reserve(tensors.size());
  BundleWriter bundles[kDtypeCount][2];  // by dtype, trainable
  for (uint32_t id = 0; id < tensors.size(); ++id) {
    const Tensor& tensor = tensors[id];
    if (tensor.element_count <= kBundledElementsMax) {
      BundleWriter& bundle = bundles[static_cast<size_t>(tensor.dtype)][tensor.trainable ? 1 : 0];
      catalogue.placements.push_back(bundle.Place(tensor, id, catalogue.store_tensors));
      continue;
    }
    catalogue.placements.push_back(
        {.store_tensor = static_cast<uint32_t>(catalogue.store_tensors.size())});
    catalogue.store_tensors.push_back({.dtype = tensor.dtype,
                                       .trainable = tensor.trainable,
                                       .element_count = tensor.element_count,
                                       .members = {id}});
  }
  for (StoreTensor& tensor : catalogue.store_tensors)
    tensor.planes = PlaneSet(tensor.dtype, tensor.trainable, optimizer);
  catalogue.tensors = std::move(tensors);
  return catalogue;
}

uint32_t ExtentCount(uint64_t element_count) {
  return static_cast<uint32_t>(CeilDivide(element_count, kExtentElements));
}

uint32_t ExtentElements(uint64_t element_count, uint32_t index) {
  const uint64_t begin = uint64_t{index} * kExtentElements;
  if (begin >= element_count) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>(element_count - begin, kExtentElements));
}

uint64_t PaddedBytes(uint64_t bytes) { return AlignUp(bytes, kSectorBytes); }

uint64_t OpenBytes(uint32_t world_size) {
  return PaddedBytes(sizeof(SlabHeader)) + world_size * (kRegionFixedBytes + kLoadingStagingBytes);
}

uint64_t WeightSlotBytes(const StoreTensor& tensor) {
  // Full extents are multiples of a sector, so padding the whole pads the last one only.
  static_assert(kExtentElements * DtypeBytes(Dtype::kBFloat16) % kSectorBytes == 0);
  return PaddedBytes(tensor.element_count * DtypeBytes(tensor.dtype));
}

uint64_t StateBytes(const StoreTensor& tensor, uint32_t index) {
  const uint64_t elements = ExtentElements(tensor.element_count, index);
  uint64_t bytes = 0;
  for (const Plane plane : kUpdateOnlyPlanes)
    bytes += PaddedBytes(tensor.planes.Bytes(plane, elements));
  return bytes;
}

uint64_t FullStateBytes(const Catalogue& catalogue) {
  uint64_t largest = 0;
  for (const StoreTensor& tensor : catalogue.store_tensors) {
    largest = std::max(largest, StateBytes(tensor, 0));  // the first is the largest
  }
  return largest;
}

std::optional<uint64_t> ExtentsInMemory(const Catalogue& catalogue, const MemoryPlan& plan) {
  uint64_t count = 0;
  for (size_t i = 0; i < catalogue.store_tensors.size(); ++i) {
    const StoreTensor& tensor = catalogue.store_tensors[i];
    if (!tensor.trainable) continue;
    const uint32_t extents = ExtentCount(tensor.element_count);
    if (plan.state_resident[i] < extents) return std::nullopt;
    count += extents;
  }
  return count;
}

absl::StatusOr<SlabLayout> ComputeSlabLayout(const Catalogue& catalogue, const MemoryPlan& plan) {
  OFFLOAD_RETURN_IF_ERROR(CheckPlan(catalogue, plan));
  const size_t store_count = catalogue.store_tensors.size();
  SlabLayout layout;
  SlabCursor cursor;
  cursor.Take(sizeof(SlabHeader));
  layout.tensor_words_offset = cursor.Take(catalogue.tensors.size() * sizeof(TensorWord));
  if (plan.world_size > 1)
    layout.gradient_words_offset = cursor.Take(catalogue.tensors.size() * sizeof(GradientWord));
  layout.weight_offset.resize(store_count, 0);
  for (size_t i = 0; i < store_count; ++i) {
    if (!plan.weight_resident[i]) continue;
    layout.weight_offset[i] = cursor.Take(WeightSlotBytes(catalogue.store_tensors[i]));
  }
  layout.state_offset.resize(store_count);
  for (size_t i = 0; i < store_count; ++i) {
    layout.state_offset[i].reserve(plan.state_resident[i]);
    for (uint32_t extent = 0; extent < plan.state_resident[i]; ++extent) {
      layout.state_offset[i].push_back(cursor.Take(StateBytes(catalogue.store_tensors[i], extent)));
    }
  }
  layout.window_bytes = plan.window_bytes;
  layout.window_offset = cursor.Take(plan.window_bytes);
  layout.pipeline_block_bytes =
      FullStateBytes(catalogue) + (plan.pipeline_gradients ? FullGradientBytes(catalogue) : 0);
  // A block is at most a few MiB and their number a 32-bit one: no overflow in the product.
  layout.pipeline_offset = cursor.Take(layout.pipeline_block_bytes * plan.pipeline_blocks);
  if (plan.world_size > 1) PlaceSums(catalogue, plan, cursor, layout);
  if (!cursor.end_bytes().has_value()) {
    return Inconsistent(absl::StrCat("the plan has window_bytes ", plan.window_bytes, " and ",
                                     plan.pipeline_blocks,
                                     " pipeline_blocks, more than can be addressed"));
  }
  layout.total_bytes = *cursor.end_bytes();
  return layout;
}

uint64_t OverheadBytes(const Catalogue& catalogue) {
  uint64_t bytes = kFixedOverheadBytes + catalogue.tensors.size() * kOverheadPerTensorBytes;
  for (const StoreTensor& tensor : catalogue.store_tensors) {
    bytes += uint64_t{ExtentCount(tensor.element_count)} * tensor.planes.updated_count() *
             kOverheadPerExtentPlaneBytes;
  }
  return bytes;
}

}  // namespace offload::proto
