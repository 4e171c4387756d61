#include "zero3/torch/storage_swap.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <torch/version.h>

#include <utility>

#include "base/check.h"

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6,
              "the insides of StorageImpl are those of torch 2.6 and newer; 2.11 is tested");

namespace offload::zero3 {
namespace {

// Torch can make a storage refuse raw accesses, but has no way back: the flag is private. An
// explicit instantiation may name private members, so it hands out a pointer to it.
template <auto Member, class Tag>
struct Expose {
  friend bool& ThrowFlag(c10::StorageImpl& storage, Tag) { return storage.*Member; }
};
struct ThrowFlagTag {};
bool& ThrowFlag(c10::StorageImpl& storage, ThrowFlagTag);
template struct Expose<&c10::StorageImpl::throw_on_immutable_data_ptr_, ThrowFlagTag>;

}  // namespace

StorageSwap::StorageSwap(Owner& owner, c10::Device device, size_t size_bytes, std::byte* home)
    : owner_(owner),
      device_(device),
      size_bytes_(size_bytes),
      home_(home),
      weak_storage_(c10::intrusive_ptr<c10::StorageImpl>()) {}

StorageSwap* StorageSwap::Named(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &StorageSwap::Drop
             ? static_cast<StorageSwap*>(pointer.get_context())
             : nullptr;
}

StorageSwap::Owner* StorageSwap::OwnerOf(c10::StorageImpl* storage) {
  if (storage == nullptr) return nullptr;
  StorageSwap* const swap = Named(storage->_mutable_data_ptr_no_checks());
  return swap != nullptr ? &swap->owner_ : nullptr;
}

StorageSwap::Owner* StorageSwap::OwnerOf(const at::Tensor& tensor) {
  // storage() and data_ptr() may throw.
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? OwnerOf(impl->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
}

c10::DataPtr StorageSwap::MakeDataPtr(std::byte* bytes) {
  if (data_ptrs_.fetch_add(1, std::memory_order_relaxed) == 0) owner_.Reference();
  return {bytes, this, &StorageSwap::Drop, device_};
}

// A swap makes the new DataPtr before the old one goes, so the count reaches zero only with the
// storage.
void StorageSwap::Drop(void* context) {
  auto* swap = static_cast<StorageSwap*>(context);
  if (swap->data_ptrs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  swap->owner_.OnStorageDeath();
  swap->owner_.Unreference();
}

void StorageSwap::Remember(c10::StorageImpl* storage, const std::string& message) {
  OFFLOAD_CHECK(!knows_storage()) << message;
  storage_.store(storage, std::memory_order_relaxed);
  weak_storage_ = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  SetMessage(message);
}

c10::DataPtr StorageSwap::Manage(c10::StorageImpl* storage, const std::string& message) {
  OFFLOAD_CHECK(storage->device_type() == device_.type()) << storage->device().str();
  Remember(storage, message);
  c10::DataPtr before = std::exchange(storage->_mutable_data_ptr_no_checks(), MakeDataPtr(home_));
  PointHome();
  return before;
}

c10::Storage StorageSwap::MakeStorage(const std::string& message) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes_, MakeDataPtr(home_),
                       /*allocator=*/nullptr, /*resizable=*/false);
  Remember(storage.unsafeGetStorageImpl(), message);
  PointHome();
  return storage;
}

c10::DataPtr StorageSwap::MakeFirstDataPtr(std::byte* bytes) { return MakeDataPtr(bytes); }

void StorageSwap::Learn(c10::StorageImpl* storage, const std::string& message) {
  if (knows_storage()) return;
  Remember(storage, message);
  auto* const bytes = static_cast<std::byte*>(storage->_mutable_data_ptr_no_checks().get());
  PointTo(bytes, /*throws=*/bytes == home_);
}

void StorageSwap::SetMessage(const std::string& text) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage != nullptr) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}

void StorageSwap::PointTo(std::byte* bytes, bool throws) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage == nullptr) return;
  ThrowFlag(*storage, ThrowFlagTag{}) = throws;
  storage->set_data_ptr_noswap(MakeDataPtr(bytes));
}

void StorageSwap::HandOver(c10::DataPtr bytes) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage == nullptr) return;
  ThrowFlag(*storage, ThrowFlagTag{}) = false;
  // Keeps the count above zero: the storage does not die, it leaves.
  data_ptrs_.fetch_add(1, std::memory_order_relaxed);
  storage->set_data_ptr_noswap(std::move(bytes));
  Leave();
  if (data_ptrs_.fetch_sub(1, std::memory_order_acq_rel) == 1) owner_.Unreference();
}

void StorageSwap::Exchange(StorageSwap& other, const std::string& message,
                           const std::string& others_message) {
  OFFLOAD_CHECK(size_bytes_ == other.size_bytes_) << message;
  // Keeps both counts above zero: no storage dies.
  data_ptrs_.fetch_add(1, std::memory_order_relaxed);
  other.data_ptrs_.fetch_add(1, std::memory_order_relaxed);
  c10::StorageImpl* const own = storage_.load(std::memory_order_relaxed);
  storage_.store(other.storage_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  other.storage_.store(own, std::memory_order_relaxed);
  std::swap(weak_storage_, other.weak_storage_);
  std::swap(home_, other.home_);
  SetMessage(message);
  other.SetMessage(others_message);
  PointHome();
  other.PointHome();
  data_ptrs_.fetch_sub(1, std::memory_order_relaxed);
  other.data_ptrs_.fetch_sub(1, std::memory_order_relaxed);
}

void StorageSwap::Leave() {
  Die();
  weak_storage_.reset();
}

// An ordinary tensor under InferenceMode, too, like the next one: autograd uses it outside of that,
// later.
at::Tensor WithManagedKey(const at::Tensor& tensor) {
  const c10::InferenceMode ordinary(false);
  c10::AutoGradMode no_grad(false);
  const at::Tensor plain = tensor.detach();
  at::Tensor keyed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(plain.unsafeGetTensorImpl()->unsafe_storage()), plain.key_set().add(kManagedKey),
      plain.dtype());
  keyed.unsafeGetTensorImpl()->set_sizes_and_strides(plain.sizes(), plain.strides());
  keyed.unsafeGetTensorImpl()->set_storage_offset(plain.storage_offset());
  return keyed;
}

at::Tensor MakeManagedTensor(c10::Storage storage, const at::Tensor& like) {
  const c10::InferenceMode ordinary(false);
  // The constructor adds the keys of autograd and autocast that go with the device.
  const c10::DispatchKeySet keys(
      {c10::computeDispatchKey(like.scalar_type(), c10::kStrided, storage.device()), kManagedKey});
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

}  // namespace offload::zero3
