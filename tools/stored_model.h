// tools/stored_model.h
//
// What a job's store holds of a model, read without daemon, trainer or torch: weights, fp32
// masters, and what the optimizer keeps, in pieces of one extent.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "proto/slab_layout.h"
#include "proto/stored_catalogue.h"
#include "swap/store.h"
#include "zero3/stored_buffers.h"

namespace offload::tools {

// kWeights: as they are; kFloat32: the masters of bf16 and fp16 weights, fp64 rounded.
enum class Values { kWeights, kFloat32, kBFloat16 };
// Averages are those of weights in the place of their masters; of what was never updated, and is
// frozen, the weight.
enum class Source { kWeights, kAverages };

proto::Dtype DtypeOf(Values values, proto::Dtype stored);

// The most bytes of an extent of any plane.
inline constexpr uint64_t kPlaneBytesMax = uint64_t{proto::kExtentElements} * sizeof(double);

// The nearest bf16 number to one of fp32, ties to even, as torch rounds; bits of both.
uint16_t ToBFloat16(uint32_t bits);

// Takes the next elements of a parameter, row by row. `tensor` is its number in the catalogue.
using ElementSink = std::function<absl::Status(uint32_t tensor, std::span<const std::byte> bytes)>;

using BufferSink = std::function<absl::Status(std::span<const std::byte> bytes)>;

class StoredModel {
 public:
  // Opens a snapshot, or with an empty name the last step of a job that nobody uses. OFD-1207 when
  // the store's own list of tensors is not that of the catalogue; errors as swap::OpenForkSource.
  static absl::StatusOr<StoredModel> Open(const std::string& pool, const std::string& job,
                                          const std::string& snapshot);

  const swap::Store& store() const { return *store_; }
  // An extent of a plane as it is, into memory of at least ExtentBytes(id); zeros when it was never
  // written.
  absl::Status ReadExtent(const swap::ExtentId& id, const MappedRegion& to) {
    return ReadPlane(id, to);
  }
  const proto::Catalogue& catalogue() const { return catalogue_; }
  const std::string& optimizer() const { return optimizer_; }  // its name
  // OFD-1602 where kept() is not what all parameters have.
  const absl::Status& is_of_one_kind() const { return is_of_one_kind_; }
  // What the optimizer keeps of what it trains, with torch's names.
  const proto::KeptPlanes& kept() const { return kept_; }
  // Whether it has an average of the weights of what it trains.
  bool keeps_average() const { return keeps_average_; }
  // Whether a tensor of the catalogue is a parameter of the model, and no buffer.
  bool IsWeight(uint32_t tensor) const;
  size_t weight_count() const;

  // Gives `sink` what a store tensor has: one parameter, or those of a bundle. One that does not
  // lie row by row is collected first: it is in memory twice.
  absl::Status Copy(uint32_t store_tensor, Source source, Values wanted, const ElementSink& sink);
  // How often each tensor of the catalogue was updated.
  const std::vector<uint64_t>& update_counts() const { return update_counts_; }
  // What is committed with a first step of another job that begins with other values: the buffers,
  // these counts, and nothing that a trainer has kept for itself.
  absl::StatusOr<std::string> BlobWith(std::vector<uint64_t> update_counts) const;
  // The buffers of the module, as they were committed; of a job of several ranks, the first one's.
  absl::StatusOr<std::vector<zero3::StoredBuffer>> Buffers() const;
  // Gives `sink` the bytes of one of them, row by row, in pieces. OFD-1207 when it is to be in the
  // store, and is not.
  absl::Status CopyBuffer(const zero3::StoredBuffer& buffer, const BufferSink& sink);

  // The same of a state, fp32, of one that is trained.
  absl::Status CopyState(uint32_t store_tensor, proto::Plane state, const ElementSink& sink);

 private:
  using Piece = absl::StatusOr<std::span<const std::byte>>;

  StoredModel() = default;
  absl::Status CopyPieces(uint32_t store_tensor, uint64_t element_bytes,
                          const std::function<Piece(uint32_t index)>& read,
                          const std::function<bool(uint32_t tensor)>& wants,
                          const ElementSink& sink) const;
  absl::Status CopyLargeBuffer(uint32_t tensor, uint64_t size_bytes, const BufferSink& sink);
  Piece Read(uint32_t store_tensor, uint32_t index, Values wanted);
  Piece ReadAverage(uint32_t store_tensor, uint32_t index, Values wanted);
  absl::Status ReadPlane(const swap::ExtentId& id, const MappedRegion& to);
  absl::Status ToFloat32(const proto::StoreTensor& tensor, const swap::ExtentId& residual,
                         size_t count);
  absl::Status WidenHalves(const proto::StoreTensor& tensor, const swap::ExtentId& residual,
                           size_t count);
  absl::Status Widen(const proto::StoreTensor& tensor, const swap::ExtentId& residual,
                     size_t count);
  // Of values_, in place: fp32 to bf16 and to fp16, fp64 to fp32.
  void Narrow(size_t count);
  void NarrowToHalf(size_t count);
  void NarrowDoubles(size_t count);

  std::unique_ptr<swap::Store> store_;
  proto::Catalogue catalogue_;
  std::string optimizer_;
  absl::Status is_of_one_kind_;
  proto::KeptPlanes kept_;
  bool keeps_average_ = false;
  std::vector<uint64_t> update_counts_;
  std::string buffers_;  // encoded
  MappedRegion weight_, residual_, ties_;
  std::vector<std::byte> values_;
};

}  // namespace offload::tools
