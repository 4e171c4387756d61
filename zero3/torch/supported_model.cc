#include "zero3/torch/supported_model.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/home_pages.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

constexpr size_t kNamesMax = 8;  // of one reason

// Why a parameter cannot be attached: of one, of several, and what to do.
struct Reason {
  std::string of_one, of_several, fix;
  bool operator==(const Reason& other) const { return of_one == other.of_one; }
};

Reason OfType(at::ScalarType type) {
  const std::string rest = absl::StrCat(" dtype ", c10::toString(type),
                                        ", float32, bfloat16, float16 and float64 are supported");
  return {absl::StrCat("has", rest), absl::StrCat("have", rest),
          c10::isComplexType(type)
              ? "Register torch::view_as_real() of it as the parameter, and compute with "
                "torch::view_as_complex() of that; or keep it out of the module that is attached"
              : "Convert the module, module->to(torch::kFloat), before attaching it"};
}

// Those parts of one storage that do not overlap and that nothing else uses, by TensorImpl.
class LonelyParts {
 public:
  explicit LonelyParts(std::span<const NamedTensor> parameters) {
    std::unordered_map<const void*, std::vector<at::Tensor>> by_storage;
    std::unordered_set<const void*> seen;
    for (const auto& [name, tensor] : parameters) {
      const bool is_plain = tensor.defined() && tensor.layout() == at::kStrided &&
                            !tensor.is_meta() && tensor.numel() > 0;
      if (is_plain && seen.insert(tensor.unsafeGetTensorImpl()).second)
        by_storage[tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()].push_back(
            tensor);
    }
    for (auto& [storage, parts] : by_storage) {
      if (!AreAlone(parts)) continue;
      for (const at::Tensor& part : parts) alone_.insert(part.unsafeGetTensorImpl());
    }
  }

  bool Have(const at::Tensor& tensor) const {
    return alone_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  static bool AreAlone(std::vector<at::Tensor>& parts) {
    const size_t users = parts.front().unsafeGetTensorImpl()->unsafe_storage().use_count();
    if (users != parts.size() || Residency::Of(parts.front()) != nullptr) return false;
    const auto begin = [](const at::Tensor& tensor) {
      return tensor.storage_offset() * tensor.element_size();
    };
    std::sort(parts.begin(), parts.end(),
              [&](const at::Tensor& a, const at::Tensor& b) { return begin(a) < begin(b); });
    const auto overlap = [&](const at::Tensor& a, const at::Tensor& b) {
      return begin(a) + a.numel() * a.element_size() > begin(b);
    };
    return std::adjacent_find(parts.begin(), parts.end(), overlap) == parts.end();
  }

  std::unordered_set<const void*> alone_;
};

// Null when there is nothing against it.
const Reason* FirstReason(const at::Tensor& tensor, Memory memory, const LonelyParts& parts) {
  static const Reason kSparse{"is sparse", "are sparse",
                              "Register a dense one, parameter.to_dense()"};
  static const Reason kDevice{
      "is on a device for which there is no accelerator plug-in",
      "are on a device for which there is no accelerator plug-in",
      "Move the module to the host, module->to(torch::kCPU), or to a CUDA device, before attaching "
      "it"};
  static const Reason kGaps{"has elements that overlap or lie apart in memory",
                            "have elements that overlap or lie apart in memory",
                            "Lay it out anew before attaching the module, "
                            "parameter.set_data(parameter.contiguous())"};
  static const Reason kPart{"is a part of a larger tensor, which would not see what is trained",
                            "are parts of larger tensors, which would not see what is trained",
                            "Give it memory of its own before attaching the module, "
                            "parameter.set_data(parameter.clone()), or let nothing else use the "
                            "larger tensor: parts that were cut with detach(), and no name for the "
                            "whole"};
  static const Reason kOwnMemory{
      "lies in memory that the program gave it (from_blob, a mapped file), which would not see "
      "what is trained",
      "lie in memory that the program gave them (from_blob, a mapped file), which would not see "
      "what is trained",
      "Give the module a copy, parameter.set_data(parameter.clone()), before attaching it, and "
      "copy it back with Engine::Gather"};
  static const Reason kInference{
      "was made under c10::InferenceMode, so that nobody sees when it is written",
      "were made under c10::InferenceMode, so that nobody sees when they are written",
      "Make the module outside of it (torch::NoGradGuard does as well), or keep it out of the "
      "module that is attached"};
  if (tensor.layout() != at::kStrided) return &kSparse;
  if (tensor.is_inference()) return &kInference;
  if (!tensor.device().is_cpu() && !HasAccelerator(tensor.device().type())) return &kDevice;
  if (!tensor.is_non_overlapping_and_dense()) return &kGaps;
  if (IsPart(tensor) && !parts.Have(tensor)) return &kPart;
  if (memory == Memory::kOfTorch && IsMemoryOfProgram(tensor)) return &kOwnMemory;
  return nullptr;
}

// The parameters that cannot be attached, by reason, in the order of the module.
class Refusal {
 public:
  void Add(const Reason& reason, const std::string& name) {
    const auto same = [&](const auto& known) { return known.first == reason; };
    auto found = std::find_if(reasons_.begin(), reasons_.end(), same);
    if (found == reasons_.end()) found = reasons_.insert(found, {reason, {}});
    found->second.push_back(absl::StrCat("'", name, "'"));
  }

  void ThrowIfAny() const {
    if (reasons_.empty()) return;
    std::vector<std::string> what, fixes;
    for (const auto& [reason, names] : reasons_) {
      what.push_back(Say(reason, names));
      if (std::find(fixes.begin(), fixes.end(), reason.fix) == fixes.end())
        fixes.push_back(reason.fix);
    }
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel, absl::StrJoin(what, "; "),
                          absl::StrJoin(fixes, ". ")));
  }

 private:
  static std::string Say(const Reason& reason, const std::vector<std::string>& names) {
    if (names.size() == 1) return absl::StrCat("parameter ", names.front(), " ", reason.of_one);
    std::string list =
        absl::StrJoin(names.begin(), names.begin() + std::min(names.size(), kNamesMax), ", ");
    if (names.size() > kNamesMax)
      absl::StrAppend(&list, " and ", names.size() - kNamesMax, " more");
    return absl::StrCat("parameters ", list, " ", reason.of_several);
  }

  std::vector<std::pair<Reason, std::vector<std::string>>> reasons_;
};

bool HasElements(const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }

}  // namespace

static c10::Device TrainedOn(const at::Tensor& tensor, std::optional<c10::Device> destination) {
  return tensor.device().is_cpu() ? destination.value_or(tensor.device()) : tensor.device();
}

static void CheckOneDevice(std::span<const NamedTensor> parameters,
                           std::optional<c10::Device> destination) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& named : parameters) {
    if (!HasElements(named.tensor)) continue;
    if (first == nullptr) first = &named;
    const c10::Device device = TrainedOn(named.tensor, destination);
    const c10::Device others = TrainedOn(first->tensor, destination);
    if (device != destination.value_or(device)) {
      ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                            absl::StrCat("parameter '", named.name, "' is on ", device.str(),
                                         ", and `device` is ", destination->str()),
                            "Name its device, or leave the module on the host"));
    }
    if (device == others) continue;
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                          absl::StrCat("parameter '", first->name, "' is on ", others.str(),
                                       " and parameter '", named.name, "' on ", device.str()),
                          "Move the module to one device before attaching it"));
  }
}

void CheckSupported(std::span<const NamedTensor> parameters, Memory memory,
                    std::optional<c10::Device> destination) {
  Refusal refusal;
  const LonelyParts parts(parameters);
  for (const auto& [name, tensor] : parameters) {
    if (!HasElements(tensor)) continue;
    if (!TrainedDtype(tensor.scalar_type()).has_value()) {
      refusal.Add(OfType(tensor.scalar_type()), name);
    } else if (const Reason* const reason = FirstReason(tensor, memory, parts)) {
      refusal.Add(*reason, name);
    }
  }
  refusal.ThrowIfAny();
  CheckOneDevice(parameters, destination);
}

void CheckSupportedTypes(std::span<const NamedTensor> parameters) {
  Refusal refusal;
  for (const auto& [name, tensor] : parameters) {
    if (HasElements(tensor) && !TrainedDtype(tensor.scalar_type()).has_value())
      refusal.Add(OfType(tensor.scalar_type()), name);
  }
  refusal.ThrowIfAny();
}

bool IsMemoryOfProgram(const at::Tensor& tensor) {
  static const c10::DeleterFnPtr kOrdinary = c10::GetCPUAllocator()->allocate(1).get_deleter();
  if (Residency::Of(tensor) != nullptr) return false;
  auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return storage->data_ptr().get_deleter() != kOrdinary && storage->allocator() == nullptr &&
         HomePages::Of(*storage) == nullptr;
}

bool IsPart(const at::Tensor& tensor) {
  const size_t size_bytes = tensor.numel() * tensor.element_size();
  return tensor.storage_offset() != 0 ||
         tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() != size_bytes;
}

bool IsTable(const at::Tensor& parameter) {
  return parameter.defined() && !parameter.requires_grad() &&
         at::isIntegralType(parameter.scalar_type(), /*includeBool=*/true);
}

}  // namespace offload::zero3
