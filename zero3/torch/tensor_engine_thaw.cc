#include <ATen/Functions.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/log.h"
#include "zero3/torch/open_job.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// Parameters that were frozen and are trained after all.

std::vector<at::Tensor> TensorEngine::FindThawed(std::span<const GroupUpdate> updates) const {
  std::vector<at::Tensor> thawed;
  if (attachment_->world_size() > 1) return thawed;  // GradientOf() says what to do
  for (const GroupUpdate& update : updates) {
    for (const at::Tensor& parameter : update.tensors) {
      if (parameter.numel() == 0 || !parameter.grad().defined()) continue;
      const auto known = ids_.find(parameter.unsafeGetTensorImpl());
      if (known != ids_.end() && !declared_[known->second].trainable) thawed.push_back(parameter);
    }
  }
  return thawed;
}

void TensorEngine::CheckThaws() const {
  if (attachment_->world_size() == 1) return;
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "a parameter that was frozen is to be trained, or has a state in the "
                        "optimizer, and there are several ranks",
                        "Call requires_grad_(true) in all ranks before attaching, or make the job "
                        "with options.may_thaw"));
}

void TensorEngine::Thaw(std::span<const at::Tensor> parameters) {
  CheckThaws();
  if (attachment_->device() != nullptr) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                          absl::StrCat("parameter '", declared_[IdOf(parameters.front())].name,
                                       "' was frozen when it was attached, and is on a device"),
                          "Call requires_grad_(true) before attaching, or make the job with "
                          "options.may_thaw"));
  }
  const LayoutPass alone(*this);
  const std::vector<KeptState> unsettled = GatherUnsettled();
  const std::optional<std::vector<Edit>> edits = GatherEdits();
  std::vector<proto::Tensor> before = declared_;
  for (const at::Tensor& parameter : parameters) declared_[IdOf(parameter)].trainable = true;
  try {
    CheckLeavable("a frozen parameter has a gradient",
                  "Start the program again and call requires_grad_(true) before its first step: "
                  "the job goes on where it is");
    ThrowIfError(MakePlan(DescribeJob({}, optimizer_, buffers_)).status());
  } catch (...) {
    declared_ = std::move(before);
    throw;
  }
  Log().info(
      "parameter '{}'{} is trained now: the store of job {} is laid out anew with room "
      "for what the optimizer keeps",
      declared_[IdOf(parameters.front())].name,
      parameters.size() == 1 ? "" : absl::StrCat(" and ", parameters.size() - 1, " more"),
      options_.job);
  BringHome(attachment_.get());
  if (!edits.has_value()) KeepEdits();
  std::vector<at::Tensor> trained = LeaveGradients();
  for (const at::Tensor& parameter : parameters) trained[IdOf(parameter)] = parameter;
  LayOutAnew([&] {
    Reopen(/*others=*/nullptr);
    WatchGradients(trained);
    if (edits.has_value()) PutEdits(*edits);
    PutStates(unsettled);
  });
}

proto::Plane TensorEngine::PlaneOfEdits(uint32_t id) const {
  return attachment_->input().catalogue.planes(id).Has(proto::Plane::kResidual)
             ? proto::Plane::kMaster
             : proto::Plane::kWeight;
}

uint64_t TensorEngine::EditBytes() const {
  uint64_t size_bytes = 0;
  for (const uint32_t id : attachment_->PutSinceEpoch()) {
    if (id >= declared_.size()) continue;
    const uint64_t bits = attachment_->input().catalogue.planes(id).Bits(PlaneOfEdits(id));
    size_bytes += attachment_->tensor(id).element_count * (bits / 8);
  }
  return size_bytes;
}

std::optional<std::vector<TensorEngine::Edit>> TensorEngine::GatherEdits() {
  std::vector<Edit> edits;
  for (const uint32_t id : attachment_->PutSinceEpoch()) {
    if (id >= declared_.size()) {  // of a step that was not taken: the next one puts it anew
      buffers_.large()[id - declared_.size()].crc.reset();
    } else {
      edits.push_back({id, PlaneOfEdits(id), {}});
    }
  }
  if (!MayHold(EditBytes())) return std::nullopt;
  const ProcessMemory::Use use(process_memory_, /*inside_passes=*/false);
  for (Edit& edit : edits) {
    const uint64_t element_bytes =
        attachment_->input().catalogue.planes(edit.id).Bits(edit.plane) / 8;
    const uint64_t size_bytes = attachment_->tensor(edit.id).element_count * element_bytes;
    edit.values = at::empty({static_cast<int64_t>(size_bytes)}, at::kByte);
    ThrowIfError(attachment_->CopyOut(edit.id, edit.plane, element_bytes,
                                      static_cast<std::byte*>(edit.values.mutable_data_ptr())),
                 absl::StrCat("parameter '", declared_[edit.id].name, "'"));
  }
  return edits;
}

void TensorEngine::KeepEdits() {
  Log().warn(
      "what the program has written into weights since step {} is more than a quarter of ram, and "
      "is part of job {} from now on, before the next step: a run that goes on at step {} has it, "
      "and must not write it again where that changes it (mul_(), add_()). Take a step between",
      step_, options_.job, step_);
  ThrowIfError(attachment_->session().EndLoad());
  attachment_->EndEpoch();
}

void TensorEngine::PutEdits(const std::vector<Edit>& edits) {
  for (const Edit& edit : edits) {
    const uint64_t element_bytes =
        attachment_->input().catalogue.planes(edit.id).Bits(edit.plane) / 8;
    const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
      std::memcpy(target, edit.values.const_data_ptr<uint8_t>() + begin * element_bytes,
                  count * element_bytes);
      return absl::OkStatus();
    };
    ThrowIfError(attachment_->StreamIn(edit.id, edit.plane, fill, /*digest=*/0),
                 absl::StrCat("parameter '", declared_[edit.id].name, "'"));
  }
}

std::vector<std::shared_ptr<torch::autograd::Node>> TensorEngine::Accumulations() const {
  std::vector<std::shared_ptr<torch::autograd::Node>> nodes;
  for (const Gradient* const gradient : gradients_) {
    if (gradient != nullptr && gradient->is_watched()) nodes.push_back(gradient->accumulation());
  }
  return nodes;
}

void TensorEngine::LayOutAnew(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    const absl::string_view reason = absl::StripSuffix(error.what(), ".");
    attachment_->SetEndReason(
        absl::StrCat("its store was not laid out anew for what is trained now: ", reason));
    for (WeightResidency* const weight : weights_) weight->Close();
    try {
      attachment_->Close();
    } catch (const std::exception& error) {
      Log().error("closing job {}: {}", options_.job, error.what());
    }
    throw;
  }
}

// In another session: memory is planned anew, too.
void TensorEngine::Reopen(const client::OtherTensors* others) {
  before_ = statistics();
  attachment_->Reopen([this] {
    OpenedJob opened = OpenJob(options_, WorldOf(options_), ram_bytes_);
    if (!opened.info.exists || opened.info.step != step_) {
      ThrowStatus(
          MakeError(ErrorId::kSessionEnded, absl::StrCat("job ", options_.job,
                                                         " was changed by another process, it "
                                                         "is at step ",
                                                         opened.info.step, " instead of ", step_)));
    }
    return std::move(opened.session);
  });
  roots_are_said_ = false;
  SayRoots(optimizer_);
  Declare(others);
}

uint64_t TensorEngine::SpilledGradientBytes() const {
  if (!attachment_->plan().gradients_spilled) return 0;
  uint64_t size_bytes = 0;
  for (const Gradient* gradient : gradients_) {
    if (gradient != nullptr) size_bytes += gradient->live_bytes();
  }
  return size_bytes;
}

bool TensorEngine::MayHold(uint64_t size_bytes) const {
  return size_bytes <= ram_bytes_ / 4 || process_memory_->CanPage();
}

// All that are in the scratch file would be in memory at once.
void TensorEngine::CheckLeavable(const std::string& what, const std::string& way_out) const {
  const uint64_t size_bytes = SpilledGradientBytes();
  if (MayHold(size_bytes)) return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat(what, ", and gradients of ", FormatDecimalBytes(size_bytes),
                   " are on the drive, more than a quarter of ram (", FormatBytes(ram_bytes_),
                   "), which would be in memory while the store is laid "
                   "out anew"),
      way_out));
}

// They are ordinary tensors until the next step takes them. Returns their parameters by id.
std::vector<at::Tensor> TensorEngine::LeaveGradients() {
  const ProcessMemory::Use use(process_memory_, /*inside_passes=*/false);
  if (announcement_ != nullptr) announcement_->End();
  std::vector<at::Tensor> trained(gradients_.size());
  for (uint32_t id = 0; id < gradients_.size(); ++id) {
    Gradient* const gradient = std::exchange(gradients_[id], nullptr);
    if (gradient == nullptr) continue;
    trained[id] = gradient->parameter();
    gradient->LeaveInMemory();
    gradient->Unreference();
  }
  gradient_window_.reset();
  return trained;
}

}  // namespace offload::zero3
