#include "zero3/torch/home_pages.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/intrusive_ptr.h>
#include <dlfcn.h>
#include <torch/nn/module.h>
#include <torch/serialize/input-archive.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "zero3/torch/options_check.h"
#include "zero3/torch/raw_access.h"

namespace offload::zero3 {
namespace {

using Range = std::shared_ptr<MappedRegion>;

void Drop(void* context) {
  const std::unique_ptr<Range> range(static_cast<Range*>(context));
  if (range->use_count() > 1) RawCopy((*range)->data(), (*range)->size()).Remove();
}

bool IsOrdinary(const c10::DataPtr& bytes) {
  static const c10::DeleterFnPtr kOrdinary = c10::GetCPUAllocator()->allocate(1).get_deleter();
  return bytes.get_deleter() == kOrdinary;
}

}  // namespace

void HomePages::Give(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !tensor.is_cpu()) return;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::DataPtr& bytes = storage._mutable_data_ptr_no_checks();
  if (storage.nbytes() == 0 || !IsOrdinary(bytes)) return;
  absl::StatusOr<MappedRegion> pages = MappedRegion::Anonymous(storage.nbytes());
  if (!pages.ok()) return;  // pointers are good until the tensor is attached, then
  std::memcpy(pages->data(), bytes.get(), storage.nbytes());
  auto range = std::make_unique<Range>(std::make_shared<MappedRegion>(*std::move(pages)));
  std::byte* const begin = (*range)->data();
  storage.set_data_ptr_noswap({begin, range.release(), &Drop, c10::Device(c10::kCPU)});
}

Range HomePages::Of(c10::StorageImpl& storage) {
  const c10::DataPtr& bytes = storage._mutable_data_ptr_no_checks();
  return bytes.get_deleter() == &Drop ? *static_cast<Range*>(bytes.get_context()) : nullptr;
}

// ---- In front of libtorch -----------------------------------------------------------------------

// Parameters get such memory when a module registers them, and again when to() or a file gives them
// another (own_optimizer.h says how a function stands in front); not with OFFLOADD_DISABLE=1.

namespace {

constexpr char kRegister[] =
    "_ZN5torch2nn6Module18register_parameterENSt7__cxx1112basic_"
    "stringIcSt11char_traitsIcESaIcEEEN2at6TensorEb";

template <typename Function>
Function Next(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  OFFLOAD_CHECK(found != nullptr) << name;
  return reinterpret_cast<Function>(found);
}

// Whether libtorch's calls come here first: `offloadctl run` has its own in front, which knows more
// of them.
bool IsInFront() {
  static const bool kIs = [] {
    Dl_info first{}, here{};
    return ::dladdr(::dlsym(RTLD_DEFAULT, kRegister), &first) != 0 &&
           ::dladdr(reinterpret_cast<const void*>(&IsOrdinary), &here) != 0 &&
           first.dli_fbase == here.dli_fbase;
  }();
  return kIs;
}

bool MayBeAttached() { return !IsDisabled() && IsInFront(); }

// `change` gives parameters other memory, to which nobody may have a pointer yet. One whose storage
// stays may have pointers into it.
void FollowChange(const std::vector<at::Tensor>& parameters, absl::FunctionRef<void()> change) {
  if (!MayBeAttached()) return change();
  std::vector<std::pair<at::Tensor, c10::weak_intrusive_ptr<c10::StorageImpl>>> with_pages;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() || !parameter.has_storage()) continue;
    const c10::Storage& storage = parameter.unsafeGetTensorImpl()->unsafe_storage();
    if (HomePages::Of(*storage.unsafeGetStorageImpl()) != nullptr)
      with_pages.emplace_back(parameter, storage.getWeakStorageImpl());
  }
  change();
  for (const auto& [parameter, before] : with_pages) {
    if (before.expired()) HomePages::Give(parameter);
  }
}

}  // namespace
}  // namespace offload::zero3

namespace torch::nn {

Tensor& Module::register_parameter(std::string name, Tensor tensor, bool requires_grad) {
  static const auto next = offload::zero3::Next<Tensor& (*)(Module*, std::string, Tensor, bool)>(
      offload::zero3::kRegister);
  Tensor& registered = next(this, std::move(name), std::move(tensor), requires_grad);
  // Nobody else has it, and so no pointer.
  if (registered.defined() && registered.use_count() == 1 && registered.has_storage() &&
      registered.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1 &&
      offload::zero3::MayBeAttached())
    offload::zero3::HomePages::Give(registered);
  return registered;
}

void Module::to(Device device, Dtype dtype, bool non_blocking) {
  static const auto next = offload::zero3::Next<void (*)(Module*, Device, Dtype, bool)>(
      "_ZN5torch2nn6Module2toEN3c106DeviceENS2_10ScalarTypeEb");
  offload::zero3::FollowChange(parameters(), [&] { next(this, device, dtype, non_blocking); });
}

void Module::to(Dtype dtype, bool non_blocking) {
  static const auto next = offload::zero3::Next<void (*)(Module*, Dtype, bool)>(
      "_ZN5torch2nn6Module2toEN3c1010ScalarTypeEb");
  offload::zero3::FollowChange(parameters(), [&] { next(this, dtype, non_blocking); });
}

}  // namespace torch::nn

namespace torch::serialize {

void InputArchive::read(const std::string& key, Tensor& tensor, bool is_buffer) {
  static const auto next =
      offload::zero3::Next<void (*)(InputArchive*, const std::string&, Tensor&, bool)>(
          "_ZN5torch9serialize12InputArchive4readERKNSt7__cxx1112basic_"
          "stringIcSt11char_traitsIcESaIcEEERN2at6TensorEb");
  offload::zero3::FollowChange({tensor}, [&] { next(this, key, tensor, is_buffer); });
}

}  // namespace torch::serialize
