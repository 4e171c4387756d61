// offloadctl export: the weights and buffers of a job as a safetensors folder, or all that it
// trains with as a universal checkpoint of DeepSpeed, without daemon, trainer or torch.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/buffer_tensors.h"
#include "tools/command.h"
#include "tools/jobs.h"
#include "tools/stored_model.h"
#include "tools/universal.h"
#include "zero3/hf_layout.h"
#include "zero3/stored_buffers.h"

namespace offload::tools {
namespace {

using proto::Dtype;

zero3::FileDtype FileDtypeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return zero3::FileDtype::kF32;
    case Dtype::kBFloat16:
      return zero3::FileDtype::kBF16;
    case Dtype::kFloat16:
      return zero3::FileDtype::kF16;
    case Dtype::kFloat64:
      break;
  }
  return zero3::FileDtype::kF64;
}

std::vector<zero3::FileTensor> FileTensors(const StoredModel& model, Values values) {
  std::vector<zero3::FileTensor> tensors;
  for (uint32_t id = 0; id < model.catalogue().tensors.size(); ++id) {
    if (!model.IsWeight(id)) continue;
    const proto::Tensor& tensor = model.catalogue().tensors[id];
    tensors.push_back({.name = tensor.name,
                       .dtype = FileDtypeOf(DtypeOf(values, tensor.dtype)),
                       .shape = {tensor.shape.begin(), tensor.shape.end()}});
  }
  return tensors;
}

std::vector<zero3::FileTensor> FileTensors(const std::vector<zero3::StoredBuffer>& buffers) {
  std::vector<zero3::FileTensor> tensors;
  for (const zero3::StoredBuffer& buffer : buffers) {
    tensors.push_back({.name = buffer.name,
                       .dtype = *zero3::FileDtypeOfStored(buffer.type),
                       .shape = {buffer.shape.begin(), buffer.shape.end()}});
  }
  return tensors;
}

class ExportCommand : public Command {
 public:
  const char* name() const override { return "export"; }
  const char* summary() const override {
    return "Writes weights and buffers of a job, as they are after its last step or in a snapshot, "
           "into a "
           "safetensors folder; with --universal masters and optimizer state for DeepSpeed";
  }
  const char* examples() const override {
    return "  offloadctl export /nvme0 run1 weights\n"
           "  offloadctl export /nvme0 run1 weights --snapshot best --dtype float32\n"
           "  offloadctl export /nvme0 run1 averages --average\n"
           "  offloadctl export /nvme0 run1 checkpoints --universal\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "as offloadctl ls names it")->required();
    app.add_option("FOLDER", folder_, "which holds no checkpoint yet")->required();
    app.add_option("--snapshot", snapshot_, "of the job, which may be in use; none: the last step");
    CLI::Option* const dtype =
        app.add_option("--dtype", dtype_,
                       "weights: as they are; float32: the masters of bfloat16 and float16 "
                       "weights, float64 rounded; bfloat16")
            ->check(CLI::IsMember({"weights", "float32", "bfloat16"}));
    CLI::Option* const shard =
        app.add_option("--shard", shard_, "the most bytes of a file, such as 5GB");
    CLI::Option* const average = app.add_flag(
        "--average", average_, "the moving averages that the job keeps, in place of weights");
    app.add_flag("--universal", universal_,
                 "a universal checkpoint of DeepSpeed: masters, moments and counts of steps")
        ->excludes(dtype)
        ->excludes(shard)
        ->excludes(average);
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_ASSIGN_OR_RETURN(const swap::StoreSummary summary, FindJob(pool_, job_));
    if (snapshot_.empty() && summary.in_use) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat(summary.path, " is in use"),
                       "Make a snapshot (offloadctl snapshot create) and export that");
    }
    if (!universal_) OFFLOAD_RETURN_IF_ERROR(zero3::CheckHoldsNoCheckpoint(folder_));
    OFFLOAD_ASSIGN_OR_RETURN(StoredModel model, StoredModel::Open(pool_, job_, snapshot_));
    if (universal_) OFFLOAD_RETURN_IF_ERROR(model.is_of_one_kind());
    if (average_ && !model.keeps_average()) {
      return MakeError(ErrorId::kBadValue,
                       absl::StrCat("job \"", job_, "\" keeps no average of its weights"),
                       "Make a job with the option average (ema:0.999), or leave --average out");
    }
    OFFLOAD_ASSIGN_OR_RETURN(
        const uint64_t bytes,
        universal_ ? WriteUniversal(model, folder_, UniversalTag(model), ProgressLine())
                   : WriteWeights(model));
    return Describe(model, bytes);
  }

 private:
  Source source() const { return average_ ? Source::kAverages : Source::kWeights; }
  Values values() const {
    return dtype_ == "weights"   ? Values::kWeights
           : dtype_ == "float32" ? Values::kFloat32
                                 : Values::kBFloat16;
  }

  absl::StatusOr<uint64_t> WriteWeights(StoredModel& model) {
    zero3::HfCheckpointWriter::Settings settings;
    if (!shard_.empty()) {
      OFFLOAD_ASSIGN_OR_RETURN(settings.shard_bytes, ParseByteSize(shard_));
    }
    OFFLOAD_ASSIGN_OR_RETURN(std::vector<zero3::StoredBuffer> buffers, model.Buffers());
    for (const zero3::StoredBuffer& buffer : buffers) {
      if (zero3::FileDtypeOfStored(buffer.type).has_value()) continue;
      return MakeError(ErrorId::kFileDtype,
                       absl::StrCat("buffer '", buffer.name, "' has a type that files have not"),
                       "Save the weights from the trainer");
    }
    buffer_count_ = buffers.size();
    for (const proto::Tensor& tensor : model.catalogue().tensors) {
      unknown_buffers_ +=
          proto::IsBufferTensor(tensor.name) && !proto::IsOptimizerSlot(tensor.name);
    }
    for (const zero3::StoredBuffer& buffer : buffers) unknown_buffers_ -= buffer.is_in_store;
    std::vector<zero3::FileTensor> tensors = FileTensors(model, values());
    for (zero3::FileTensor& tensor : FileTensors(buffers)) tensors.push_back(std::move(tensor));
    uint64_t total_bytes = 0, done_bytes = 0;
    for (const zero3::FileTensor& tensor : tensors)
      total_bytes += zero3::DataBytes(tensor).value_or(0);
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<zero3::HfCheckpointWriter> writer,
                             zero3::HfCheckpointWriter::Create(folder_, tensors, settings));
    const auto progress = ProgressLine();
    const ElementSink write = [&](uint32_t id, std::span<const std::byte> bytes) {
      done_bytes += bytes.size();
      progress(done_bytes, total_bytes);
      return writer->Append(model.catalogue().tensors[id].name, bytes);
    };
    for (uint32_t id = 0; id < model.catalogue().store_tensors.size(); ++id)
      OFFLOAD_RETURN_IF_ERROR(model.Copy(id, source(), values(), write));
    for (const zero3::StoredBuffer& buffer : buffers) {
      OFFLOAD_RETURN_IF_ERROR(model.CopyBuffer(buffer, [&](std::span<const std::byte> bytes) {
        done_bytes += bytes.size();
        progress(done_bytes, total_bytes);
        return writer->Append(buffer.name, bytes);
      }));
    }
    OFFLOAD_RETURN_IF_ERROR(writer->Commit());
    return total_bytes;
  }

  Answer Describe(const StoredModel& model, uint64_t bytes) const {
    const uint64_t step = model.store().committed().epoch;
    Answer answer;
    answer.data = {{"pool", pool_},
                   {"job", job_},
                   {"snapshot", snapshot_.empty() ? Json(nullptr) : Json(snapshot_)},
                   {"step", step},
                   {"folder", folder_},
                   {"average", average_},
                   {"weights", model.weight_count()},
                   {"buffers", buffer_count_},
                   {"bytes", bytes}};
    answer.text =
        absl::StrCat(average_ ? "averages of " : "", model.weight_count(), " weights of job ", job_,
                     " at step ", step, " in ", folder_, ", ", FormatDecimalBytes(bytes), "\n");
    if (universal_) {
      answer.data["tag"] = UniversalTag(model);
      answer.advice =
          "Options, schedules and buffers are the program's: they are not in the folder. In "
          "DeepSpeed: load_checkpoint(FOLDER, load_lr_scheduler_states=False), with "
          "\"checkpoint\": {\"load_universal\": true}.";
    } else {
      answer.advice =
          unknown_buffers_ == 0
              ? "The configuration of the module is the trainer's: it is not in the folder."
              : absl::StrCat(unknown_buffers_,
                             " large buffers are not in the folder: the job has to take a step "
                             "with this version first.");
    }
    return answer;
  }

  std::string pool_, job_, folder_, snapshot_, shard_;
  std::string dtype_ = "weights";
  bool universal_ = false, average_ = false;
  size_t buffer_count_ = 0;
  int64_t unknown_buffers_ = 0;  // in the store, of a type that an earlier version did not write
};

}  // namespace

std::unique_ptr<Command> MakeExportCommand() { return std::make_unique<ExportCommand>(); }

}  // namespace offload::tools
