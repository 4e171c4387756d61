#include "offloadd/job_catalogue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::daemon {
namespace {

const char* DtypeName(proto::Dtype dtype) {
  return dtype == proto::Dtype::kFloat32 ? "float32" : "bfloat16";
}

const char* OptimizerName(proto::OptimizerState optimizer) {
  switch (optimizer) {
    case proto::OptimizerState::kNone:
      return "an optimizer without state";
    case proto::OptimizerState::kMomentum:
      return "SGD with momentum";
    case proto::OptimizerState::kAdam:
      return "AdamW";
  }
  return "an unknown optimizer";
}

std::string Describe(const proto::Tensor& tensor) {
  return absl::StrCat("\"", tensor.name, "\" [", absl::StrJoin(tensor.shape, ", "), "] ",
                      DtypeName(tensor.dtype), tensor.trainable ? "" : " frozen");
}

bool SameTensor(const proto::Tensor& a, const proto::Tensor& b) {
  return a.name == b.name && a.shape == b.shape && a.dtype == b.dtype && a.trainable == b.trainable;
}

bool IsOptimizerState(uint32_t value) {
  return value <= static_cast<uint32_t>(proto::OptimizerState::kAdam);
}

}  // namespace

absl::StatusOr<proto::Tensor> TensorFromMessage(const proto::v1::Tensor& message) {
  proto::Tensor tensor;
  tensor.name = message.name();
  tensor.shape.assign(message.shape().begin(), message.shape().end());
  tensor.trainable = message.trainable();
  switch (message.dtype()) {
    case proto::v1::FLOAT32:
      tensor.dtype = proto::Dtype::kFloat32;
      return tensor;
    case proto::v1::BFLOAT16:
      tensor.dtype = proto::Dtype::kBFloat16;
      return tensor;
    default:
      return MakeError(ErrorId::kUnsupportedModel,
                       absl::StrCat("parameter \"", message.name(), "\" has the unknown dtype ",
                                    static_cast<int>(message.dtype())));
  }
}

absl::StatusOr<SealedPlan> PlanFromMessages(const std::vector<proto::v1::SealRequest>& messages) {
  if (messages.empty() || !IsOptimizerState(messages.front().optimizer_state())) {
    return MakeError(ErrorId::kProtocol, "a Seal without plan");
  }
  const proto::v1::SealRequest& first = messages.front();
  SealedPlan sealed;
  sealed.optimizer = static_cast<proto::OptimizerState>(first.optimizer_state());
  sealed.pins_offset = first.pins_offset();
  proto::MemoryPlan& plan = sealed.plan;
  plan.window_bytes = first.window_bytes();
  plan.pipeline_blocks = first.pipeline_blocks();
  plan.pipeline_gradients = first.pipeline_gradients();
  plan.scratch_bytes = first.scratch_bytes();
  plan.region_bytes = first.region_bytes();
  plan.world_size = std::max(first.world_size(), 1u);
  plan.other_region_bytes = first.other_region_bytes();
  if (first.sum_blocks() > UINT32_MAX) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan with ", first.sum_blocks(), " sum_blocks"));
  }
  plan.sum_blocks = static_cast<uint32_t>(first.sum_blocks());
  std::vector<uint32_t> homes;
  for (const proto::v1::SealRequest& message : messages) {
    plan.weight_resident.insert(plan.weight_resident.end(), message.weight_resident().begin(),
                                message.weight_resident().end());
    plan.state_resident.insert(plan.state_resident.end(), message.state_resident().begin(),
                               message.state_resident().end());
    homes.insert(homes.end(), message.gradient_home().begin(), message.gradient_home().end());
    for (const uint64_t offset : message.gradient_offset())
      plan.gradients.push_back({.offset_bytes = offset});
    if (std::max({plan.weight_resident.size(), plan.state_resident.size(), homes.size(),
                  plan.gradients.size()}) > proto::kTensorsMax) {
      return MakeError(ErrorId::kProtocol, "a plan for too many tensors");
    }
  }
  if (homes.size() != plan.gradients.size()) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan with ", homes.size(), " homes and ",
                                  plan.gradients.size(), " offsets of gradients"));
  }
  for (size_t i = 0; i < homes.size(); ++i) {
    if (homes[i] > static_cast<uint32_t>(proto::GradientHome::kScratch)) {
      return MakeError(ErrorId::kProtocol, absl::StrCat("a gradient at home ", homes[i]));
    }
    plan.gradients[i].home = static_cast<proto::GradientHome>(homes[i]);
  }
  return sealed;
}

// One byte for the optimizer, then the tensors as they are declared in messages.
std::string EncodeCatalogue(const proto::Catalogue& catalogue, proto::OptimizerState optimizer) {
  proto::v1::DeclareTensorsRequest message;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    proto::v1::Tensor* out = message.add_tensors();
    out->set_name(tensor.name);
    for (const int64_t dimension : tensor.shape) out->add_shape(dimension);
    out->set_dtype(tensor.dtype == proto::Dtype::kFloat32 ? proto::v1::FLOAT32
                                                          : proto::v1::BFLOAT16);
    out->set_trainable(tensor.trainable);
  }
  std::string bytes(1, static_cast<char>(optimizer));
  message.AppendToString(&bytes);
  return bytes;
}

absl::StatusOr<StoredCatalogue> DecodeCatalogue(std::string_view bytes) {
  proto::v1::DeclareTensorsRequest message;
  if (bytes.empty() || !IsOptimizerState(static_cast<uint8_t>(bytes[0])) ||
      !message.ParseFromArray(bytes.data() + 1, static_cast<int>(bytes.size() - 1))) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat("the list of tensors, ", bytes.size(), " bytes, cannot be read"));
  }
  StoredCatalogue stored;
  stored.optimizer = static_cast<proto::OptimizerState>(bytes[0]);
  for (const proto::v1::Tensor& tensor : message.tensors()) {
    OFFLOAD_ASSIGN_OR_RETURN(proto::Tensor decoded, TensorFromMessage(tensor));
    stored.tensors.push_back(std::move(decoded));
  }
  return stored;
}

swap::StoreSpec MakeStoreSpec(const std::string& job, const proto::Catalogue& catalogue,
                              proto::OptimizerState optimizer) {
  swap::StoreSpec spec;
  spec.job = job;
  spec.extent_elements = proto::kExtentElements;
  spec.catalogue = EncodeCatalogue(catalogue, optimizer);
  for (const proto::StoreTensor& tensor : catalogue.store_tensors) {
    const bool split = tensor.trainable && tensor.dtype == proto::Dtype::kBFloat16;
    swap::TensorSpec planes{tensor.element_count,
                            {{swap::Plane::kWeight, 8 * proto::DtypeBytes(tensor.dtype)}}};
    if (split) planes.planes.push_back({swap::Plane::kResidual, 16});
    if (tensor.trainable && optimizer != proto::OptimizerState::kNone)
      planes.planes.push_back({swap::Plane::kExpAvg, 32});
    if (tensor.trainable && optimizer == proto::OptimizerState::kAdam)
      planes.planes.push_back({swap::Plane::kExpAvgSq, 32});
    if (split) planes.planes.push_back({swap::Plane::kTies, 1});
    spec.tensors.push_back(std::move(planes));
  }
  return spec;
}

absl::Status CompareWithStored(const std::string& job, const StoredCatalogue& stored,
                               const proto::Catalogue& catalogue, proto::OptimizerState optimizer) {
  const size_t common = std::min(stored.tensors.size(), catalogue.tensors.size());
  for (size_t i = 0; i < common; ++i) {
    if (SameTensor(stored.tensors[i], catalogue.tensors[i])) continue;
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat("job \"", job, "\" has ", Describe(stored.tensors[i]), " as parameter ", i,
                     ", the model has ", Describe(catalogue.tensors[i])));
  }
  if (stored.tensors.size() > common) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat("job \"", job, "\" has ", Describe(stored.tensors[common]), " as parameter ",
                     common, ", the model has only ", common, " parameters"));
  }
  if (catalogue.tensors.size() > common) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat("the model has ", Describe(catalogue.tensors[common]), " as parameter ",
                     common, ", job \"", job, "\" has only ", common, " parameters"));
  }
  if (stored.optimizer == optimizer) return absl::OkStatus();
  return MakeError(
      ErrorId::kOtherModel,
      absl::StrCat("job \"", job, "\" was trained with ", OptimizerName(stored.optimizer),
                   ", the trainer has ", OptimizerName(optimizer)));
}

}  // namespace offload::daemon
