#include "zero3/torch/buffers.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/buffer_tensors.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/values_in_order.h"
#include "zero3/torch/weight_residency.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kRankMax = 64;

// One of the encoded buffers: the header, its sizes (int64), its name, its bytes. Of those in the
// store there are no bytes. Tools read it, too: zero3/stored_buffers.h.
struct Header {
  uint32_t name_bytes, dtype, dimensions, is_in_store;
  uint64_t data_bytes;
};

uint64_t SizeBytes(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

void Append(std::string& to, const void* bytes, size_t size_bytes) {
  to.append(static_cast<const char*>(bytes), size_bytes);
}

// `data_bytes` are to follow; none of one in the store.
void AppendDescribed(std::string& to, const std::string& name, const at::Tensor& tensor,
                     bool is_in_store, uint64_t data_bytes) {
  const Header header = {.name_bytes = static_cast<uint32_t>(name.size()),
                         .dtype = static_cast<uint32_t>(tensor.scalar_type()),
                         .dimensions = static_cast<uint32_t>(tensor.dim()),
                         .is_in_store = is_in_store ? 1u : 0u,
                         .data_bytes = data_bytes};
  Append(to, &header, sizeof(header));
  Append(to, tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
  to += name;
}

// Whether a module makes it anew with nothing in it, and gives it a size when it first has
// something to keep (observers of quantisation, queues); or it was emptied.
bool MayTakeSize(const at::Tensor& tensor, const std::vector<int64_t>& sizes, uint64_t data_bytes) {
  uint64_t size_bytes = tensor.element_size();
  bool is_empty = false;
  for (const int64_t size : sizes) {
    if (size < 0 || (size > 0 && size_bytes > UINT32_MAX / static_cast<uint64_t>(size)))
      return false;
    size_bytes *= std::max<uint64_t>(size, 1);
    is_empty |= size == 0;
  }
  if ((is_empty ? 0 : size_bytes) != data_bytes || (tensor.numel() > 1 && !is_empty)) return false;
  return Residency::Of(tensor) == nullptr && !tensor.is_inference() && tensor.storage().resizable();
}

// Keeps the version when nothing changes.
void Assign(const at::Tensor& tensor, std::string_view bytes) {
  if (tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor present = ValuesInOrder(tensor);
  if (std::memcmp(present.const_data_ptr(), bytes.data(), SizeBytes(tensor)) == 0) return;
  at::Tensor value = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  std::memcpy(value.mutable_data_ptr(), bytes.data(), SizeBytes(tensor));
  at::Tensor target = tensor.detach();
  target.copy_(value);
}

absl::Status Damaged() {
  return MakeError(ErrorId::kStoreDamaged,
                   "the buffers of the last epoch are not from this library");
}

std::string ShapeText(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

}  // namespace

void Buffers::CheckSupported(std::span<const NamedTensor> buffers) {
  for (const NamedTensor& named : buffers) {
    const at::Tensor& tensor = named.tensor;
    if (!tensor.defined()) continue;
    const bool is_somewhere = tensor.device().is_cpu() || HasAccelerator(tensor.device().type());
    if (is_somewhere && tensor.layout() == at::kStrided) continue;
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("buffer '", named.name,
                     "' is not a dense tensor of the host or of a device for which there is an "
                     "accelerator plug-in"),
        "Keep it in an ordinary member of the module, or make it dense, to_dense(), before the "
        "module is attached"));
  }
}

void Buffers::Add(std::span<const NamedTensor> buffers) {
  CheckSupported(buffers);
  for (const NamedTensor& named : buffers) {
    const at::Tensor& tensor = named.tensor;
    if (!tensor.defined() || known_.contains(tensor.unsafeGetTensorImpl())) continue;
    // One over a parameter's memory is that parameter.
    if (dynamic_cast<const WeightResidency*>(Residency::Of(tensor)) != nullptr) continue;
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) continue;
    known_.insert(tensor.unsafeGetTensorImpl());
    all_.push_back(named);
  }
}

bool Buffers::Replace(std::string_view name, const at::Tensor& tensor) {
  const auto has_name = [name](const auto& each) { return each.name == name; };
  const auto found = absl::c_find_if(all_, has_name);
  if (found == all_.end() || !tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.device() != found->tensor.device() ||
      tensor.scalar_type() != found->tensor.scalar_type() ||
      at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    return false;
  const auto small = absl::c_find_if(small_, has_name);
  if (tensor.sizes() != found->tensor.sizes()) {
    const bool makes_room =
        FirstBytes(*found) <= static_cast<uint64_t>(tensor.element_size()) || tensor.numel() == 0;
    if (small == small_.end() || !makes_room) return false;
    first_bytes_.try_emplace(found->name, SizeBytes(found->tensor));
  }
  known_.erase(found->tensor.unsafeGetTensorImpl());
  known_.insert(tensor.unsafeGetTensorImpl());
  found->tensor = tensor;
  if (small != small_.end()) small->tensor = tensor;
  const auto large = absl::c_find_if(large_, has_name);
  if (large != large_.end()) large->tensor = tensor;
  return true;
}

uint64_t Buffers::FirstBytes(const NamedTensor& named) const {
  const auto found = first_bytes_.find(named.name);
  return found != first_bytes_.end() ? found->second : SizeBytes(named.tensor);
}

uint64_t Buffers::size_bytes() const {
  uint64_t size_bytes = 0;
  for (const NamedTensor& named : all_) size_bytes += SizeBytes(named.tensor);
  return size_bytes;
}

void Buffers::Divide(uint64_t small_bytes_max) {
  std::vector<size_t> order(all_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) {
    return FirstBytes(all_[a]) < FirstBytes(all_[b]);
  });
  uint64_t small_bytes = 0;
  for (const size_t i : order) {
    small_bytes += FirstBytes(all_[i]);
    Place(all_[i], small_bytes <= small_bytes_max);
  }
}

void Buffers::AddLater(std::span<const NamedTensor> buffers, uint64_t small_bytes_max) {
  const size_t known_count = all_.size();
  Add(buffers);
  const std::vector<NamedTensor> added(all_.begin() + static_cast<ptrdiff_t>(known_count),
                                       all_.end());
  for (const NamedTensor& named : added) {
    const auto is_former = [&named](const auto& each) {
      return each.name == named.name && !each.tensor.is_same(named.tensor);
    };
    std::erase_if(all_, is_former);
    std::erase_if(small_, is_former);
    std::erase_if(large_, is_former);
    uint64_t small_bytes = FirstBytes(named);
    for (const NamedTensor& small : small_) small_bytes += FirstBytes(small);
    Place(named, small_bytes <= small_bytes_max);
  }
}

void Buffers::Rename(std::span<const NamedTensor> buffers) {
  std::unordered_map<const void*, std::string> names;
  for (const NamedTensor& named : buffers) {
    if (named.tensor.defined()) names.try_emplace(named.tensor.unsafeGetTensorImpl(), named.name);
  }
  std::unordered_map<std::string, uint64_t> first_bytes;
  const auto rename = [&](auto& each) {
    const auto found = names.find(each.tensor.unsafeGetTensorImpl());
    if (found == names.end()) return;
    const auto first = first_bytes_.find(each.name);
    if (first != first_bytes_.end()) first_bytes.emplace(found->second, first->second);
    each.name = found->second;
  };
  absl::c_for_each(all_, rename);
  absl::c_for_each(small_, rename);
  absl::c_for_each(large_, rename);
  first_bytes_ = std::move(first_bytes);
}

void Buffers::DivideByNames(const std::unordered_set<std::string>& small) {
  for (const NamedTensor& named : all_) Place(named, small.contains(named.name));
}

void Buffers::Place(const NamedTensor& named, bool is_small) {
  if (is_small || FirstBytes(named) == 0) return small_.push_back(named);
  large_.push_back({.name = named.name,
                    .tensor = named.tensor,
                    .element_count = (SizeBytes(named.tensor) + 3) / 4});
}

void Buffers::AddSlots(std::span<const uint64_t> sizes_bytes) {
  for (const uint64_t size_bytes : sizes_bytes) {
    const size_t slot = slot_count_++;
    large_.push_back({.name = proto::OptimizerSlotName(slot),
                      .element_count = (size_bytes + 3) / 4,
                      .slot = slot});
  }
}

std::vector<Buffers::Large*> Buffers::slots() {
  std::vector<Large*> slots(slot_count_);
  for (Large& large : large_) {
    if (large.slot.has_value()) slots.at(*large.slot) = &large;
  }
  return slots;
}

void Buffers::SortLarge(const std::unordered_map<std::string, size_t>& places) {
  const auto place = [&places](const Large& large) {
    const auto found = places.find(proto::BufferTensorName(large.name));
    return found != places.end() ? found->second : places.size();
  };
  std::ranges::stable_sort(large_, {}, place);
}

namespace {

// The bytes of buffers in their order, copied from each device at once: one copy takes as long as
// the host has to wait for the device, whatever it copies.
class BytesOnHost {
 public:
  explicit BytesOnHost(std::span<const NamedTensor> buffers) : buffers_(buffers) {
    const at::NoGradGuard no_grad;
    for (const NamedTensor& named : buffers) {
      const at::Tensor& tensor = named.tensor;
      if (!IsCopiedWithOthers(tensor)) continue;
      Device& device = devices_[tensor.device()];
      device.parts.push_back(
          tensor.detach().contiguous().reshape({tensor.numel()}).view(at::kByte));
    }
    for (auto& [where, device] : devices_)
      device.bytes =
          ValuesInOrder(device.parts.size() == 1 ? device.parts[0] : at::cat(device.parts));
  }
  // For each buffer in turn; until it is called again.
  std::string_view Next() {
    const at::Tensor& tensor = buffers_[next_++].tensor;
    const uint64_t size_bytes = SizeBytes(tensor);
    if (size_bytes == 0) return {};
    if (!IsCopiedWithOthers(tensor)) {
      alone_ = ValuesInOrder(tensor);
      return {static_cast<const char*>(alone_.const_data_ptr()), size_bytes};
    }
    Device& device = devices_[tensor.device()];
    const auto* const bytes = static_cast<const char*>(device.bytes.const_data_ptr());
    return {bytes + std::exchange(device.read, device.read + size_bytes), size_bytes};
  }

 private:
  struct Device {
    std::vector<at::Tensor> parts;
    at::Tensor bytes;
    uint64_t read = 0;
  };

  static bool IsCopiedWithOthers(const at::Tensor& tensor) {
    return !tensor.device().is_cpu() && tensor.numel() > 0 && Residency::Of(tensor) == nullptr &&
           !tensor.is_conj() && !tensor.is_neg() && !tensor.is_quantized();
  }

  const std::span<const NamedTensor> buffers_;
  size_t next_ = 0;
  std::unordered_map<c10::Device, Device> devices_;
  at::Tensor alone_;
};

}  // namespace

std::string Buffers::EncodeSmall() const {
  std::string encoded;
  BytesOnHost all(small_);
  for (const NamedTensor& named : small_) {
    const std::string_view bytes = all.Next();
    AppendDescribed(encoded, named.name, named.tensor, /*is_in_store=*/false, bytes.size());
    Append(encoded, bytes.data(), bytes.size());
  }
  for (const Large& large : large_) {
    if (large.slot.has_value()) continue;
    CheckFits(large);
    AppendDescribed(encoded, large.name, large.tensor, /*is_in_store=*/true, 0);
  }
  return encoded;
}

absl::Status Buffers::Restore(std::string_view encoded) {
  while (!encoded.empty()) {
    Header header;
    if (encoded.size() < sizeof(header)) return Damaged();
    std::memcpy(&header, encoded.data(), sizeof(header));
    encoded.remove_prefix(sizeof(header));
    const uint64_t sizes_bytes = header.dimensions * sizeof(int64_t);
    if (header.dimensions > kRankMax || sizes_bytes > encoded.size() ||
        header.name_bytes > encoded.size() - sizes_bytes ||
        header.data_bytes > encoded.size() - sizes_bytes - header.name_bytes)
      return Damaged();
    std::vector<int64_t> sizes(header.dimensions);
    if (sizes_bytes > 0) std::memcpy(sizes.data(), encoded.data(), sizes_bytes);
    const std::string name(encoded.substr(sizes_bytes, header.name_bytes));
    const std::string_view data =
        encoded.substr(sizes_bytes + header.name_bytes, header.data_bytes);
    encoded.remove_prefix(sizes_bytes + header.name_bytes + header.data_bytes);
    const auto found = std::find_if(
        all_.begin(), all_.end(), [&name](const NamedTensor& named) { return named.name == name; });
    if (found == all_.end() || !restored_.insert(name).second) continue;
    const at::Tensor& tensor = found->tensor;
    const bool is_in_store = header.is_in_store != 0;
    if (tensor.sizes() != sizes && !is_in_store &&
        static_cast<uint32_t>(tensor.scalar_type()) == header.dtype &&
        MayTakeSize(tensor, sizes, data.size())) {
      const at::NoGradGuard no_grad;
      first_bytes_.emplace(name, SizeBytes(tensor));
      tensor.resize_(sizes);
    }
    if (tensor.sizes() != sizes || static_cast<uint32_t>(tensor.scalar_type()) != header.dtype ||
        (!is_in_store && SizeBytes(tensor) != data.size())) {
      return MakeError(
          ErrorId::kOtherModel,
          absl::StrCat("buffer '", name, "' has the shape ", ShapeText(sizes), " in the job, ",
                       ShapeText(tensor.sizes()), " in the model, or another type"),
          "Give the model a buffer like the job's, or choose another job name, or remove the old "
          "job with offloadctl rm");
    }
    if (!is_in_store) zero3::Assign(tensor, data);
  }
  return absl::OkStatus();
}

void Buffers::CheckFits(const Large& large) {
  const uint64_t size_bytes = SizeBytes(large.tensor);
  if (size_bytes <= large.element_count * sizeof(float)) return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat("buffer '", large.name, "' has grown to ", size_bytes,
                   " bytes, and the store has room for the ", large.element_count * sizeof(float),
                   " that it had when it was attached"),
      "Register it with the size that it will have before the module is attached"));
}

at::Tensor Buffers::InOrder(const Large& large) {
  if (!large.tensor.defined()) return {};
  CheckFits(large);
  return ValuesInOrder(large.tensor);
}

uint32_t Buffers::CrcOf(const at::Tensor& in_order) {
  return in_order.defined() ? Crc32c(0, in_order.const_data_ptr(), SizeBytes(in_order)) : 0;
}

void Buffers::Assign(Large& large, std::string_view bytes) { zero3::Assign(large.tensor, bytes); }

}  // namespace offload::zero3
