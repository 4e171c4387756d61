// proto/slab_layout.h
//
// How a job's tensors become tensors of its store, and where everything stands in its shared
// memory. Client (planner) and daemon compute the same from the same input, so only the input
// crosses the border: the client plans, the daemon checks the sums.
//
// All functions are pure. Their input may come from a peer: they return errors, never overflow.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "proto/plane_set.h"

namespace offload::proto {

// Elements of one extent. Part of every store's format, never depends on ram: bf16 512 KiB of
// weight, 3 MiB of state in all.
inline constexpr uint32_t kExtentElements = 256 * 1024;
// A tensor of at most so many elements is put into a bundle with others of its kind; bundles are
// always resident.
inline constexpr uint32_t kBundledElementsMax = 32 * 1024;
// Members of a bundle begin at multiples of this many elements.
inline constexpr uint32_t kBundleAlignment = 64;
inline constexpr uint64_t kSectorBytes = 4096;
inline constexpr uint32_t kTensorsMax = 1u << 20;
inline constexpr uint64_t kElementsMax = 1ull << 44;
inline constexpr uint32_t kWorldSizeMax = 64;  // ranks of a job on a node

// A tensor as the trainer knows it. Its index in the list is its id in every message.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  Dtype dtype = Dtype::kFloat32;
  bool trainable = true;
  uint64_t element_count = 0;  // product of shape
  // The dimensions of more than one element, outermost in memory first; empty where elements lie
  // row by row. Planes have the order of memory, files are row by row (zero3/dimension_order.h).
  std::vector<uint32_t> dimension_order = {};
};

// A tensor of the store: one big tensor, or a bundle of small ones of the same dtype and
// trainability.
struct StoreTensor {
  Dtype dtype = Dtype::kFloat32;
  bool trainable = true;
  bool bundle = false;
  uint64_t element_count = 0;
  std::vector<uint32_t> members;  // ids of tensors, ascending by element_offset
  PlaneSet planes = {};
};

struct Placement {
  uint32_t store_tensor = 0;
  uint64_t element_offset = 0;  // of the tensor's first element; 0 unless bundled
};

struct Catalogue {
  std::vector<Tensor> tensors;
  std::vector<Placement> placements;  // one per tensor
  std::vector<StoreTensor> store_tensors;

  const PlaneSet& planes(uint32_t tensor) const {
    return store_tensors[placements[tensor].store_tensor].planes;
  }
};
// `optimizer` trains them all. Errors: OFD-1601 for duplicate names, zero elements, too many
// tensors or elements, and an order that the dimensions cannot have.
absl::StatusOr<Catalogue> BuildCatalogue(
    std::vector<Tensor> tensors,
    const kernels::OptimizerSpec& optimizer = kernels::OptimizerSpec());

uint32_t ExtentCount(uint64_t element_count);
// Elements of extent `index` of a store tensor.
uint32_t ExtentElements(uint64_t element_count, uint32_t index);
uint64_t PaddedBytes(uint64_t bytes);  // up to a multiple of kSectorBytes
// What a job has in memory before its plan is made: the head of the slab, a region of each rank.
uint64_t OpenBytes(uint32_t world_size);
// Bytes of a store tensor's weights in the slab: its extents one after the other, the last padded.
uint64_t WeightSlotBytes(const StoreTensor& tensor);
// Bytes of the planes of one extent that only the update needs (kUpdateOnlyPlanes, in this order;
// none when not trainable), each padded.
uint64_t StateBytes(const StoreTensor& tensor, uint32_t index);
uint64_t FullStateBytes(const Catalogue& catalogue);  // the largest StateBytes of any extent

// Where a tensor's gradient accumulates.
enum class GradientHome : uint8_t {
  kNone = 0,
  kRegion = 1 /* in the rank's region, at `offset_bytes` */,
  kScratch = 2 /* in the scratch file */,
  kSlab =
      3 /* with several ranks: in the slab, added up by the daemon, at SlabLayout::sum_offset */,
  kSlabScratch = 4 /* likewise, in the scratch file at `offset_bytes` */
};
struct GradientPlacement {
  GradientHome home = GradientHome::kNone;
  uint64_t offset_bytes = 0;  // multiple of 4096
};

// What the planner decides (zero3/planner.h). All of it is checked again by the daemon.
struct MemoryPlan {
  uint64_t window_bytes = 0;     // for weights that are not resident for good
  uint32_t pipeline_blocks = 0;  // updates in flight, one extent each
  bool pipeline_gradients =
      false;  // a pipeline block has room for an extent's gradient, too (spilled gradients)
  std::vector<bool> weight_resident;  // per store tensor; always true for bundles
  std::vector<uint32_t>
      state_resident;  // per store tensor: so many leading extents keep their state planes in DRAM
  std::vector<GradientPlacement> gradients;  // per tensor
  uint64_t scratch_bytes = 0;                // of the scratch file, for spilled gradients
  uint64_t region_bytes = 0;                 // of the rank's region, all of it
  uint32_t world_size = 1;                   // ranks of the job on this node
  uint64_t other_region_bytes =
      0;                    // of the regions of the ranks after the first, when there are any
  uint32_t sum_blocks = 0;  // for sums in the scratch file: extents being added to at a time
};

// How many extents a step updates, where the state of all of them stays in memory; nothing where
// that of one is read from the drive.
std::optional<uint64_t> ExtentsInMemory(const Catalogue& catalogue, const MemoryPlan& plan);

// Offsets in the slab. Everything begins at a multiple of 4096.
struct SlabLayout {
  uint64_t tensor_words_offset = 0;     // after the header: one 64-bit word per tensor (shm_abi.h)
  std::vector<uint64_t> weight_offset;  // per store tensor; 0 when not resident for good
  std::vector<std::vector<uint64_t>> state_offset;  // per store tensor, per resident extent
  uint64_t window_offset = 0, window_bytes = 0;
  uint64_t pipeline_offset = 0, pipeline_block_bytes = 0;
  // With several ranks only; 0 otherwise.
  uint64_t gradient_words_offset = 0;  // one 64-bit word per tensor (shm_abi.h)
  std::vector<uint64_t> sum_offset;    // per tensor; 0 unless its gradient's home is kSlab. Empty
                                       // with one rank
  uint64_t sum_blocks_offset = 0, sum_block_bytes = 0;
  uint64_t total_bytes = 0;
};
absl::StatusOr<SlabLayout> ComputeSlabLayout(const Catalogue& catalogue, const MemoryPlan& plan);

// What neither slab nor region holds but ram pays for: heaps of daemon and client, extent table,
// rings. Stated, and tested.
uint64_t OverheadBytes(const Catalogue& catalogue);

}  // namespace offload::proto
