#include "zero3/torch/record.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/version.h>

#include <exception>
#include <utility>

#include "base/check.h"
#include "base/error.h"

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

Record::Record(std::string name, std::string subject, size_t size_bytes, std::byte* home)
    : name_(std::move(name)),
      subject_(std::move(subject)),
      size_bytes_(size_bytes),
      home_(home),
      weak_storage_(c10::intrusive_ptr<c10::StorageImpl>()) {}

Record* Record::Of(c10::StorageImpl* storage) {
  if (storage == nullptr) return nullptr;
  const c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &Record::Drop ? static_cast<Record*>(pointer.get_context())
                                                : nullptr;
}

Record* Record::Of(const at::Tensor& tensor) {
  // storage() and data_ptr() may throw.
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? Of(impl->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
}

bool Record::IsWhole(const at::Tensor& tensor) const {
  return tensor.storage_offset() == 0 && tensor.is_contiguous() &&
         static_cast<size_t>(tensor.numel()) * tensor.element_size() == size_bytes_;
}

void Record::Unreference() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

c10::DataPtr Record::MakeDataPtr(std::byte* bytes) {
  data_ptrs_.fetch_add(1, std::memory_order_relaxed);
  return {bytes, this, &Record::Drop, c10::Device(c10::kCPU)};
}

// A swap makes the new DataPtr before the old one goes, so the count reaches zero only with the
// storage.
void Record::Drop(void* context) {
  auto* record = static_cast<Record*>(context);
  if (record->data_ptrs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    std::lock_guard lock(record->mutex_);
    record->storage_.store(nullptr, std::memory_order_relaxed);
    record->OnStorageDeath();
  }
  record->Unreference();
}

void Record::Attach(c10::StorageImpl* storage) {
  OFFLOAD_CHECK(storage_.load() == nullptr) << subject_ << " has a storage";
  Reference();  // of the storage
  storage_.store(storage, std::memory_order_relaxed);
  weak_storage_ = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  SetMessage(std::string(
      MakeError(
          ErrorId::kReleased,
          subject_ + " is offloaded: its bytes are in memory only while an operation uses them")
          .message()));
}

void Record::Manage(c10::StorageImpl* storage) {
  std::lock_guard lock(mutex_);
  Attach(storage);
  PointHome();
}

c10::Storage Record::MakeStorage() {
  c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes_, MakeDataPtr(home_),
                       /*allocator=*/nullptr, /*resizable=*/false);
  std::lock_guard lock(mutex_);
  Attach(storage.unsafeGetStorageImpl());
  PointHome();
  return storage;
}

c10::DataPtr Record::MakeFirstDataPtr(std::byte* bytes) {
  Reference();  // of the storage
  return MakeDataPtr(bytes);
}

void Record::LearnSlowly(c10::StorageImpl* storage) {
  std::lock_guard lock(mutex_);
  if (storage_.load(std::memory_order_relaxed) != nullptr) return;
  Attach(storage);
  Unreference();  // MakeFirstDataPtr has counted the storage
  auto* const bytes = static_cast<std::byte*>(storage->_mutable_data_ptr_no_checks().get());
  PointTo(bytes, /*throws=*/bytes == home_);
}

void Record::SetMessage(const std::string& text) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage != nullptr) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}

void Record::PointTo(std::byte* bytes, bool throws) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage == nullptr) return;
  ThrowFlag(*storage, ThrowFlagTag{}) = throws;
  storage->set_data_ptr_noswap(MakeDataPtr(bytes));
}

void Record::HandOver(c10::DataPtr bytes) {
  c10::StorageImpl* const storage = storage_.load(std::memory_order_relaxed);
  if (storage == nullptr) return;
  ThrowFlag(*storage, ThrowFlagTag{}) = false;
  // Keeps the count above zero: the storage does not die, it leaves.
  data_ptrs_.fetch_add(1, std::memory_order_relaxed);
  storage->set_data_ptr_noswap(std::move(bytes));
  data_ptrs_.fetch_sub(1, std::memory_order_relaxed);
  storage_.store(nullptr, std::memory_order_relaxed);
  Unreference();
}

thread_local Pins* Pins::top_ = nullptr;

void Pins::Add(Record* record, Access access) {
  record->Pin(access);
  record->Reference();
  // Those that write unpin last: the daemon may need the memory of the others to take what they
  // put back.
  records_.insert(access == Access::kRead ? records_.end() : records_.begin(), record);
}

void Pins::AddPinned(Record* record) {
  record->Reference();
  records_.push_back(record);
}

void Pins::Finish() {
  std::exception_ptr failure;
  while (!records_.empty()) {
    Record* record = records_.back();
    try {
      record->Unpin();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    records_.pop_back();
    record->Unreference();
  }
  if (failure) std::rethrow_exception(failure);
}

Pins::~Pins() {
  try {
    Finish();
  } catch (...) {  // an operator is failing already, with its own reason
  }
  top_ = below_;
}

int Pins::CountOwn(const Record* record) {
  int count = 0;
  for (const Pins* pins = top_; pins != nullptr; pins = pins->below_) {
    for (const Record* pinned : pins->records_) count += pinned == record ? 1 : 0;
  }
  return count;
}

at::Tensor WithManagedKey(const at::Tensor& tensor) {
  c10::AutoGradMode no_grad(false);
  const at::Tensor plain = tensor.detach();
  at::Tensor keyed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(plain.unsafeGetTensorImpl()->unsafe_storage()), plain.key_set().add(kManagedKey),
      plain.dtype());
  keyed.unsafeGetTensorImpl()->set_sizes_and_strides(plain.sizes(), plain.strides());
  keyed.unsafeGetTensorImpl()->set_storage_offset(plain.storage_offset());
  return keyed;
}

at::Tensor MakeManagedTensor(c10::Storage storage, at::IntArrayRef sizes, at::ScalarType dtype) {
  const c10::DispatchKeySet keys({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                  c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
                                  kManagedKey});
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys,
                                                               c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace offload::zero3
