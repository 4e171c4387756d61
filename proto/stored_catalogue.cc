#include "proto/stored_catalogue.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::proto {
namespace {

constexpr std::string_view kCatalogueMagic = "OFDC";
constexpr uint32_t kCatalogueVersion = 2, kCatalogueVersionWithOrders = 3;

static_assert(static_cast<int>(Dtype::kFloat32) == v1::FLOAT32 &&
              static_cast<int>(Dtype::kBFloat16) == v1::BFLOAT16 &&
              static_cast<int>(Dtype::kFloat64) == v1::FLOAT64 &&
              static_cast<int>(Dtype::kFloat16) == v1::FLOAT16);

// Of the first release: a byte for what the optimizer keeps, then the tensors.
bool IsFirstVersion(std::string_view bytes) {
  return !bytes.empty() && static_cast<uint8_t>(bytes[0]) <= 2;
}

}  // namespace

absl::StatusOr<Tensor> TensorFromMessage(const v1::Tensor& message) {
  Tensor tensor;
  tensor.name = message.name();
  tensor.shape.assign(message.shape().begin(), message.shape().end());
  tensor.trainable = message.trainable();
  tensor.dimension_order.assign(message.dimension_order().begin(), message.dimension_order().end());
  if (!v1::Dtype_IsValid(message.dtype())) {
    return MakeError(ErrorId::kUnsupportedModel,
                     absl::StrCat("parameter \"", message.name(), "\" has the unknown dtype ",
                                  static_cast<int>(message.dtype())));
  }
  tensor.dtype = static_cast<Dtype>(message.dtype());
  return tensor;
}

KeptPlanes KeptBy(const kernels::OptimizerSpec& optimizer) {
  KeptPlanes planes;
  for (size_t i = 0; i < kStatePlanes.size(); ++i) {
    const kernels::StatePlane* const plane = optimizer.Plane(i);
    if (plane != nullptr) planes.emplace_back(kStatePlanes[i], plane->name);
  }
  if (optimizer.averaging().is_on()) planes.emplace_back(Plane::kAverage, "average");
  return planes;
}

std::string EncodeCatalogue(const Catalogue& catalogue, const kernels::OptimizerSpec& optimizer) {
  v1::StoredCatalogue message;
  uint32_t version = kCatalogueVersion;
  for (const Tensor& tensor : catalogue.tensors) {
    v1::Tensor* out = message.add_tensors();
    out->set_name(tensor.name);
    for (const int64_t dimension : tensor.shape) out->add_shape(dimension);
    out->set_dtype(static_cast<v1::Dtype>(tensor.dtype));
    out->set_trainable(tensor.trainable);
    for (const uint32_t dimension : tensor.dimension_order) out->add_dimension_order(dimension);
    if (!tensor.dimension_order.empty()) version = kCatalogueVersionWithOrders;
  }
  message.mutable_optimizer()->set_name(std::string(optimizer.name()));
  for (const auto& [plane, name] : KeptBy(optimizer)) {
    v1::StoredPlane* out = message.mutable_optimizer()->add_planes();
    out->set_plane(static_cast<uint32_t>(plane));
    out->set_name(name);
  }
  std::string bytes(kCatalogueMagic);
  bytes.append(reinterpret_cast<const char*>(&version), sizeof(version));
  message.AppendToString(&bytes);
  return bytes;
}

absl::StatusOr<StoredCatalogue> DecodeCatalogue(std::string_view bytes) {
  constexpr size_t kHeadBytes = kCatalogueMagic.size() + sizeof(uint32_t);
  uint32_t version = IsFirstVersion(bytes) ? 1 : 0;
  if (bytes.size() >= kHeadBytes && bytes.starts_with(kCatalogueMagic))
    std::memcpy(&version, bytes.data() + kCatalogueMagic.size(), sizeof(version));
  if (version != 0 && version != kCatalogueVersion && version != kCatalogueVersionWithOrders) {
    return MakeError(ErrorId::kStoreVersion,
                     absl::StrCat("the store's list of tensors has version ", version,
                                  ", this release writes and reads versions ", kCatalogueVersion,
                                  " and ", kCatalogueVersionWithOrders));
  }
  v1::StoredCatalogue message;
  if (version == 0 || !message.ParseFromArray(bytes.data() + kHeadBytes,
                                              static_cast<int>(bytes.size() - kHeadBytes))) {
    return MakeError(ErrorId::kStoreDamaged,
                     absl::StrCat("the list of tensors, ", bytes.size(), " bytes, cannot be read"));
  }
  StoredCatalogue stored;
  stored.optimizer = message.optimizer().name();
  for (const v1::StoredPlane& plane : message.optimizer().planes())
    stored.planes.emplace_back(static_cast<Plane>(plane.plane()), plane.name());
  for (const v1::Tensor& tensor : message.tensors()) {
    OFFLOAD_ASSIGN_OR_RETURN(Tensor decoded, TensorFromMessage(tensor));
    stored.tensors.push_back(std::move(decoded));
  }
  return stored;
}

}  // namespace offload::proto
