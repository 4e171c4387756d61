#include "zero3/torch/home_pages.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
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

}  // namespace offload::zero3
