// offloadctl export: the weights of a job as a safetensors folder, without daemon, trainer or
// torch.

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "kernels/split.h"
#include "proto/buffer_tensors.h"
#include "proto/slab_layout.h"
#include "proto/stored_catalogue.h"
#include "swap/fork.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/jobs.h"
#include "zero3/dimension_order.h"
#include "zero3/hf_layout.h"

namespace offload::tools {
namespace {

using proto::Dtype;

constexpr uint64_t kPlaneBytesMax = uint64_t{proto::kExtentElements} * sizeof(float);

enum class Values { kWeights, kFloat32, kBFloat16 };

Dtype DtypeOf(Values values, Dtype stored) {
  if (values == Values::kWeights) return stored;
  return values == Values::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16;
}

// As torch rounds: to the nearest, ties to even.
uint16_t ToBFloat16(uint32_t bits) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Reads the weights of a store, one extent at a time.
class ExtentReader {
 public:
  static absl::StatusOr<ExtentReader> Make(swap::Store* store) {
    ExtentReader reader(store);
    for (MappedRegion* region : {&reader.weight_, &reader.residual_, &reader.ties_}) {
      OFFLOAD_ASSIGN_OR_RETURN(*region, MappedRegion::Anonymous(kPlaneBytesMax));
    }
    reader.values_.resize(kPlaneBytesMax);
    return reader;
  }

  // The elements of an extent in the type that is wanted; good until the next call.
  absl::StatusOr<std::span<const std::byte>> Read(const proto::StoreTensor& tensor, uint32_t id,
                                                  uint32_t index, Values wanted) {
    const size_t count = proto::ExtentElements(tensor.element_count, index);
    OFFLOAD_RETURN_IF_ERROR(ReadPlane({id, swap::Plane::kWeight, index}, weight_));
    const Dtype dtype = DtypeOf(wanted, tensor.dtype);
    const size_t size_bytes = count * proto::DtypeBytes(dtype);
    if (dtype == tensor.dtype) return std::span<const std::byte>(weight_.data(), size_bytes);
    if (dtype == Dtype::kBFloat16) {
      Narrow(count);
    } else {
      OFFLOAD_RETURN_IF_ERROR(Widen(tensor, {id, swap::Plane::kResidual, index}, count));
    }
    return std::span<const std::byte>(values_.data(), size_bytes);
  }

 private:
  explicit ExtentReader(swap::Store* store) : store_(store) {}

  absl::Status ReadPlane(const swap::ExtentId& id, const MappedRegion& to) {
    const uint64_t size_bytes = store_->ExtentBytes(id);
    if (size_bytes > kPlaneBytesMax)
      return MakeError(ErrorId::kStoreDamaged, absl::StrCat(swap::NameOf(id), " is too large"));
    const swap::ReadRequest request{id, to.data()};
    swap::Stamp stamp;
    OFFLOAD_RETURN_IF_ERROR(RunToEnd(*store_, [&](swap::Store::Done done) {
      store_->Read({&request, 1}, {&stamp, 1}, std::move(done));
    }));
    if (stamp.never_written() || store_->Verify(id, stamp, {to.data(), size_bytes}))
      return absl::OkStatus();
    return RunToEnd(*store_, [&](swap::Store::Done done) {
      store_->ReadAgain(request, stamp, std::move(done));
    });
  }

  void Narrow(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, weight_.data() + i * sizeof(bits), sizeof(bits));
      const uint16_t rounded = ToBFloat16(bits);
      std::memcpy(values_.data() + i * sizeof(rounded), &rounded, sizeof(rounded));
    }
  }

  // The fp32 masters of bf16 weights; the weights themselves where they are not trained.
  absl::Status Widen(const proto::StoreTensor& tensor, const swap::ExtentId& residual,
                     size_t count) {
    const auto* weights = reinterpret_cast<const uint16_t*>(weight_.data());
    auto* values = reinterpret_cast<uint32_t*>(values_.data());
    if (!tensor.trainable) {
      for (size_t i = 0; i < count; ++i) values[i] = uint32_t{weights[i]} << 16;
      return absl::OkStatus();
    }
    OFFLOAD_RETURN_IF_ERROR(ReadPlane(residual, residual_));
    const swap::Stamp stamp = store_->stamp(residual);
    if ((stamp.flags & swap::kFlagTiesPlane) != 0) {
      OFFLOAD_RETURN_IF_ERROR(
          ReadPlane({residual.tensor, swap::Plane::kTies, residual.index}, ties_));
    } else {
      std::memcpy(ties_.data(), &stamp.word, sizeof(stamp.word));
    }
    kernels::TieReader ties{reinterpret_cast<const uint8_t*>(ties_.data())};
    kernels::Merge(weights, reinterpret_cast<const int16_t*>(residual_.data()), count, values,
                   &ties);
    return absl::OkStatus();
  }

  swap::Store* store_;
  MappedRegion weight_, residual_, ties_;
  std::vector<std::byte> values_;
};

bool IsWeight(const proto::Tensor& tensor) { return !proto::IsBufferTensor(tensor.name); }

// OFD-1207 when the store's own list of tensors is not that of the catalogue.
absl::StatusOr<proto::Catalogue> CatalogueOf(const swap::Store& store) {
  OFFLOAD_ASSIGN_OR_RETURN(proto::StoredCatalogue stored,
                           proto::DecodeCatalogue(store.spec().catalogue));
  OFFLOAD_ASSIGN_OR_RETURN(proto::Catalogue catalogue,
                           proto::BuildCatalogue(std::move(stored.tensors)));
  bool fits = catalogue.store_tensors.size() == store.spec().tensors.size() &&
              store.spec().extent_elements == proto::kExtentElements;
  for (size_t i = 0; fits && i < catalogue.store_tensors.size(); ++i)
    fits = catalogue.store_tensors[i].element_count == store.spec().tensors[i].element_count;
  if (fits) return catalogue;
  return MakeError(ErrorId::kStoreDamaged,
                   absl::StrCat(store.path(), ": the list of tensors is not that of its extents"));
}

std::vector<zero3::FileTensor> FileTensors(const proto::Catalogue& catalogue, Values values) {
  std::vector<zero3::FileTensor> tensors;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    if (!IsWeight(tensor)) continue;
    tensors.push_back({.name = tensor.name,
                       .dtype = DtypeOf(values, tensor.dtype) == Dtype::kFloat32
                                    ? zero3::FileDtype::kF32
                                    : zero3::FileDtype::kBF16,
                       .shape = {tensor.shape.begin(), tensor.shape.end()}});
  }
  return tensors;
}

// Appends weights in pieces, in the order of memory. One that does not lie row by row is collected,
// and written when it is whole: it is in memory twice.
class RowWriter {
 public:
  explicit RowWriter(zero3::HfCheckpointWriter& writer) : writer_(writer) {}

  absl::Status Append(const proto::Tensor& weight, uint64_t element_bytes,
                      std::span<const std::byte> bytes) {
    if (weight.dimension_order.empty()) return writer_.Append(weight.name, bytes);
    elements_.insert(elements_.end(), bytes.begin(), bytes.end());
    if (elements_.size() < weight.element_count * element_bytes) return absl::OkStatus();
    std::vector<std::byte> rows(elements_.size());
    zero3::CopyToRows(weight.shape, weight.dimension_order, element_bytes,
                      {0, weight.element_count}, elements_.data(), rows.data());
    elements_ = {};
    return writer_.Append(weight.name, rows);
  }

 private:
  zero3::HfCheckpointWriter& writer_;
  std::vector<std::byte> elements_;
};

// Writes what a store tensor has of `wanted` type: one weight, or the members of a bundle.
absl::Status CopyTensor(const proto::Catalogue& catalogue, uint32_t id, Values wanted,
                        ExtentReader& reader, RowWriter& writer) {
  const proto::StoreTensor& tensor = catalogue.store_tensors[id];
  const uint64_t element_bytes = proto::DtypeBytes(DtypeOf(wanted, tensor.dtype));
  for (uint32_t index = 0; index < proto::ExtentCount(tensor.element_count); ++index) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes,
                             reader.Read(tensor, id, index, wanted));
    for (const uint32_t member : tensor.members) {
      const proto::Tensor& weight = catalogue.tensors[member];
      if (!IsWeight(weight)) continue;
      const uint64_t begin = catalogue.placements[member].element_offset * element_bytes;
      OFFLOAD_RETURN_IF_ERROR(writer.Append(
          weight, element_bytes,
          tensor.bundle ? bytes.subspan(begin, weight.element_count * element_bytes) : bytes));
    }
  }
  return absl::OkStatus();
}

class ExportCommand : public Command {
 public:
  const char* name() const override { return "export"; }
  const char* summary() const override {
    return "Writes the weights of a job, as they are after its last step or in a snapshot, into a "
           "safetensors folder";
  }
  const char* examples() const override {
    return "  offloadctl export /nvme0 run1 weights\n"
           "  offloadctl export /nvme0 run1 weights --snapshot best --dtype float32\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "as offloadctl ls names it")->required();
    app.add_option("FOLDER", folder_, "which holds no checkpoint yet")->required();
    app.add_option("--snapshot", snapshot_, "of the job, which may be in use; none: the last step");
    app.add_option("--dtype", dtype_,
                   "weights: as they are; float32: the masters of bfloat16 weights; bfloat16")
        ->check(CLI::IsMember({"weights", "float32", "bfloat16"}));
    app.add_option("--shard", shard_, "the most bytes of a file, such as 5GB");
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_ASSIGN_OR_RETURN(const swap::StoreSummary summary, FindJob(pool_, job_));
    if (snapshot_.empty() && summary.in_use) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat(summary.path, " is in use"),
                       "Make a snapshot (offloadctl snapshot create) and export that");
    }
    OFFLOAD_RETURN_IF_ERROR(zero3::CheckHoldsNoCheckpoint(folder_));
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> store,
                             swap::OpenForkSource(pool_, job_, snapshot_, {}));
    OFFLOAD_ASSIGN_OR_RETURN(const proto::Catalogue catalogue, CatalogueOf(*store));
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t bytes, Write(*store, catalogue));
    return Describe(*store, catalogue, bytes);
  }

 private:
  Values values() const {
    return dtype_ == "weights"   ? Values::kWeights
           : dtype_ == "float32" ? Values::kFloat32
                                 : Values::kBFloat16;
  }

  absl::StatusOr<uint64_t> Write(swap::Store& store, const proto::Catalogue& catalogue) const {
    zero3::HfCheckpointWriter::Settings settings;
    if (!shard_.empty()) {
      OFFLOAD_ASSIGN_OR_RETURN(settings.shard_bytes, ParseByteSize(shard_));
    }
    const std::vector<zero3::FileTensor> tensors = FileTensors(catalogue, values());
    uint64_t total_bytes = 0, done_bytes = 0;
    for (const zero3::FileTensor& tensor : tensors)
      total_bytes += zero3::DataBytes(tensor).value_or(0);
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<zero3::HfCheckpointWriter> writer,
                             zero3::HfCheckpointWriter::Create(folder_, tensors, settings));
    OFFLOAD_ASSIGN_OR_RETURN(ExtentReader reader, ExtentReader::Make(&store));
    RowWriter rows(*writer);
    const auto progress = ProgressLine();
    for (uint32_t id = 0; id < catalogue.store_tensors.size(); ++id) {
      OFFLOAD_RETURN_IF_ERROR(CopyTensor(catalogue, id, values(), reader, rows));
      const proto::StoreTensor& tensor = catalogue.store_tensors[id];
      done_bytes += tensor.element_count * proto::DtypeBytes(DtypeOf(values(), tensor.dtype));
      progress(std::min(done_bytes, total_bytes), total_bytes);
    }
    OFFLOAD_RETURN_IF_ERROR(writer->Commit());
    return total_bytes;
  }

  Answer Describe(const swap::Store& store, const proto::Catalogue& catalogue,
                  uint64_t bytes) const {
    size_t weights = 0;
    for (const proto::Tensor& tensor : catalogue.tensors) weights += IsWeight(tensor);
    Answer answer;
    answer.data = {{"pool", pool_},
                   {"job", job_},
                   {"snapshot", snapshot_.empty() ? Json(nullptr) : Json(snapshot_)},
                   {"step", store.committed().epoch},
                   {"folder", folder_},
                   {"weights", weights},
                   {"bytes", bytes}};
    answer.text =
        absl::StrCat(weights, " weights of job ", job_, " at step ", store.committed().epoch,
                     " in ", folder_, ", ", FormatDecimalBytes(bytes), "\n");
    answer.advice =
        "Buffers of the module (running statistics) and its configuration are the trainer's: they "
        "are not in the folder.";
    return answer;
  }

  std::string pool_, job_, folder_, snapshot_, shard_;
  std::string dtype_ = "weights";
};

}  // namespace

std::unique_ptr<Command> MakeExportCommand() { return std::make_unique<ExportCommand>(); }

}  // namespace offload::tools
