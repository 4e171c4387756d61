#include "tools/universal.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/hf_layout.h"
#include "zero3/pickle.h"
#include "zero3/safetensors.h"
#include "zero3/saved_tensor.h"

namespace offload::tools {
namespace {

namespace fs = std::filesystem;
using Form = zero3::SavedTensorWriter::Form;

constexpr char kFormatVersion[] = "0.19.6";  // of DeepSpeed
// It reads as many groups as its program has, and of each what takes the place of the program's own
// options: nothing.
constexpr size_t kGroups = 1024;

absl::Status CannotWrite(const fs::path& path, const std::error_code& error) {
  return MakeError(ErrorId::kFileWrite,
                   absl::StrCat(path.string(), " cannot be written: ", error.message()));
}

absl::Status CheckName(const std::string& name) {
  if (!LeadsOut(name)) return absl::OkStatus();
  return MakeError(ErrorId::kStoreDamaged,
                   absl::StrCat("a tensor is called \"", zero3::ShownName(name), "\""));
}

// Its files hold fp32 numbers.
absl::Status CheckTypes(const proto::Catalogue& catalogue) {
  for (const proto::Tensor& tensor : catalogue.tensors) {
    if (tensor.dtype != proto::Dtype::kFloat64) continue;
    return MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("'", tensor.name, "' is float64, and a universal checkpoint holds float32"),
        "Export the weights without --universal, or write it in the trainer: "
        "handle.save_universal(folder) keeps float64");
  }
  return absl::OkStatus();
}

using Items = std::vector<std::pair<std::string, std::string>>;

// A file of torch.save() with one number in it, which `object` says the place of.
absl::Status WriteNumber(const fs::path& path, float number, const std::string& object) {
  OFFLOAD_ASSIGN_OR_RETURN(zero3::SavedTensorWriter file,
                           zero3::SavedTensorWriter::Create(path, {}, object));
  OFFLOAD_RETURN_IF_ERROR(file.Append(std::as_bytes(std::span(&number, 1))));
  return file.Commit();
}

// What DeepSpeed reads beside the parameters: the state of its optimizer (stages 1 and 2 look for
// the groups at the top, stage 3 below), and that of its engine, under the names of all stages.
absl::Status WriteGlobalState(const fs::path& folder, uint64_t step) {
  const auto text = [](const char* key) { return zero3::PickledText(key); };
  const auto number = [](int64_t value) { return zero3::PickledInteger(value); };
  const std::string none = zero3::PickledDictionary({});
  const std::string groups = zero3::PickledList(std::vector<std::string>(
      kGroups, zero3::PickledDictionary(Items{{text("params"), zero3::PickledList({})}})));
  const Items first = {{text("step"), zero3::PickledTensor({})}};
  const Items states = {{number(0), zero3::PickledDictionary(first)}};
  const Items optimizer = {{text("state"), zero3::PickledDictionary(states)},
                           {text("param_groups"), groups}};
  OFFLOAD_RETURN_IF_ERROR(
      WriteNumber(folder / "zero" / "optimizer_state.pt", static_cast<float>(step),
                  zero3::PickledDictionary(
                      Items{{text("ds_version"), text(kFormatVersion)},
                            {text("optimizer_state_dict"), zero3::PickledDictionary(optimizer)},
                            {text("param_groups"), groups}})));
  const std::string engine =
      zero3::PickledDictionary(Items{{text("module"), none},
                                     {text("ds_version"), text(kFormatVersion)},
                                     {text("dp_world_size"), number(1)},
                                     {text("mp_world_size"), number(1)},
                                     {text("skipped_steps"), number(0)},
                                     {text("global_steps"), number(static_cast<int64_t>(step))}});
  for (const char* name :
       {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"})
    OFFLOAD_RETURN_IF_ERROR(WriteNumber(folder / name, static_cast<float>(step), engine));
  return absl::OkStatus();
}

class UniversalWriter {
 public:
  using Progress = std::function<void(uint64_t, uint64_t)>;

  UniversalWriter(StoredModel& model, fs::path zero, const Progress& progress)
      : model_(model), zero_(std::move(zero)), counts_(model.update_counts()), progress_(progress) {
    for (const proto::StoreTensor& tensor : model.catalogue().store_tensors)
      total_bytes_ += tensor.element_count * sizeof(float) * PlaneCount(tensor);
  }

  absl::Status Write() {
    const auto& tensors = model_.catalogue().store_tensors;
    for (uint32_t id = 0; id < tensors.size(); ++id) {
      OFFLOAD_RETURN_IF_ERROR(MakeFolders(tensors[id]));
      OFFLOAD_RETURN_IF_ERROR(
          model_.Copy(id, Source::kWeights, Values::kFloat32, Into("fp32", /*always=*/true)));
      if (!tensors[id].trainable) continue;
      for (const auto& [plane, name] : model_.kept())
        OFFLOAD_RETURN_IF_ERROR(model_.CopyState(id, plane, Into(name, /*always=*/false)));
      OFFLOAD_RETURN_IF_ERROR(WriteCounts(tensors[id]));
    }
    return absl::OkStatus();
  }

  uint64_t written_bytes() const { return written_bytes_; }

 private:
  size_t PlaneCount(const proto::StoreTensor& tensor) const {
    return 1 + (tensor.trainable ? model_.kept().size() : 0);
  }

  fs::path FolderOf(uint32_t tensor) const {
    return zero_ / model_.catalogue().tensors[tensor].name;
  }

  absl::Status MakeFolders(const proto::StoreTensor& tensor) const {
    for (const uint32_t member : tensor.members) {
      if (!model_.IsWeight(member)) continue;
      OFFLOAD_RETURN_IF_ERROR(CheckName(model_.catalogue().tensors[member].name));
      std::error_code error;
      fs::create_directories(FolderOf(member), error);
      if (error) return CannotWrite(FolderOf(member), error);
    }
    return absl::OkStatus();
  }

  // Writes each tensor's elements into a file of that name, one after the other; unless `always`,
  // of those only that were updated.
  ElementSink Into(std::string name, bool always) {
    return [this, name = std::move(name), always](
               uint32_t tensor, std::span<const std::byte> bytes) -> absl::Status {
      if (!always && counts_[tensor] == 0) return absl::OkStatus();
      if (!file_.has_value()) {
        OFFLOAD_ASSIGN_OR_RETURN(
            file_, zero3::SavedTensorWriter::Create(FolderOf(tensor) / absl::StrCat(name, ".pt"),
                                                    model_.catalogue().tensors[tensor].shape,
                                                    Form::kParameter));
      }
      OFFLOAD_RETURN_IF_ERROR(file_->Append(bytes));
      written_bytes_ += bytes.size();
      progress_(written_bytes_, total_bytes_);
      if (!file_->is_complete()) return absl::OkStatus();
      OFFLOAD_RETURN_IF_ERROR(file_->Commit());
      file_.reset();
      return absl::OkStatus();
    };
  }

  absl::Status WriteCounts(const proto::StoreTensor& tensor) const {
    for (const uint32_t member : tensor.members) {
      if (!model_.IsWeight(member) || counts_[member] == 0) continue;
      OFFLOAD_RETURN_IF_ERROR(WriteNumber(FolderOf(member) / "step.pt",
                                          static_cast<float>(counts_[member]),
                                          zero3::PickledTensor({})));
    }
    return absl::OkStatus();
  }

  StoredModel& model_;
  const fs::path zero_;
  const std::vector<uint64_t>& counts_;
  const Progress& progress_;
  std::optional<zero3::SavedTensorWriter> file_;
  uint64_t written_bytes_ = 0, total_bytes_ = 0;
};

absl::Status SyncFolders(const fs::path& top) {
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(top, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    if (it->is_directory()) OFFLOAD_RETURN_IF_ERROR(zero3::SyncFolder(it->path().string()));
  }
  if (error) return CannotWrite(top, error);
  return zero3::SyncFolder(top.string());
}

}  // namespace

bool LeadsOut(const std::string& name) {
  const fs::path path(name);
  return name.empty() || path.is_absolute() ||
         std::any_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
}

std::string UniversalTag(const StoredModel& model) {
  return absl::StrCat("global_step", model.store().committed().epoch, "_universal");
}

absl::Status CheckHoldsNoUniversal(const std::string& folder, const std::string& tag) {
  const fs::path target = fs::path(folder) / tag;
  std::error_code error;
  if (!fs::exists(target, error)) return absl::OkStatus();
  return MakeError(ErrorId::kFileWrite, absl::StrCat(target.string(), " is there already"));
}

absl::StatusOr<uint64_t> WriteUniversal(StoredModel& model, const std::string& folder,
                                        const std::string& tag,
                                        const std::function<void(uint64_t, uint64_t)>& progress) {
  OFFLOAD_RETURN_IF_ERROR(CheckTypes(model.catalogue()));
  OFFLOAD_RETURN_IF_ERROR(CheckHoldsNoUniversal(folder, tag));
  const fs::path target = fs::path(folder) / tag, building = absl::StrCat(target.string(), ".part");
  std::error_code error;
  fs::remove_all(building, error);
  fs::create_directories(building / "zero", error);
  if (error) return CannotWrite(building, error);
  UniversalWriter writer(model, building / "zero", progress);
  absl::Status status = writer.Write();
  if (status.ok()) status = WriteGlobalState(building, model.store().committed().epoch);
  if (status.ok()) status = SyncFolders(building);
  if (!status.ok()) {
    fs::remove_all(building, error);
    return status;
  }
  fs::rename(building, target, error);
  if (error) return CannotWrite(target, error);
  OFFLOAD_RETURN_IF_ERROR(
      zero3::WriteTextFile((fs::path(folder) / kLatestUniversal).string(), tag));
  return writer.written_bytes();
}

}  // namespace offload::tools
