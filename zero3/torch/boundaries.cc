#include "zero3/torch/boundaries.h"

#include <ATen/Functions.h>
#include <errno.h>
#include <fcntl.h>

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/posix_io.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

[[noreturn]] void Throw(ErrorId id, const std::string& folder, const std::string& what) {
  ThrowStatus(MakeError(id, absl::StrCat("spill_folder '", folder, "': ", what),
                        "Name a folder of a drive that has room for what blocks give each other, "
                        "or none: it is kept in memory then"));
}

ErrorId OfOpening(int error_number) {
  switch (error_number) {
    case ENOENT:
      return ErrorId::kPoolMissing;
    case ENOSPC:
      return ErrorId::kPoolFull;
    case EIO:
      return ErrorId::kIo;
    default:
      return ErrorId::kPoolNotUsable;
  }
}

// Of a transfer that failed.
ErrorId IdOf(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? ErrorId::kPoolFull : ErrorId::kIo;
}

bool CanSpill(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.nbytes() > 0 &&
         tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

Boundaries::Boundaries(size_t count, const std::string& folder) : folder_(folder), kept_(count) {
  if (folder.empty()) return;
  file_ = UniqueFd(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file_.valid()) {
    const int error_number = errno;
    Throw(OfOpening(error_number), folder_,
          absl::StrCat("no file can be made, ", ErrnoText(error_number)));
  }
}

void Boundaries::Put(size_t index, const at::Tensor& tensor) {
  Kept& kept = kept_[index];
  kept.tensor = tensor.detach();
  if (!file_.valid() || !CanSpill(tensor)) return;
  const std::span bytes(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
  const absl::Status written = PwriteFully(file_.get(), end_bytes_, bytes);
  if (!written.ok()) Throw(IdOf(written), folder_, std::string(written.message()));
  kept.offset_bytes = end_bytes_;
  kept.tensor = at::empty_strided(tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kMeta).requires_grad(false));
  end_bytes_ += bytes.size();
}

at::Tensor Boundaries::Get(size_t index) const {
  const Kept& kept = kept_[index];
  if (!kept.offset_bytes.has_value()) return kept.tensor.detach();
  at::Tensor read = at::empty_strided(kept.tensor.sizes(), kept.tensor.strides(),
                                      kept.tensor.options().device(at::kCPU));
  const std::span bytes(static_cast<std::byte*>(read.mutable_data_ptr()), read.nbytes());
  const absl::Status status = PreadFully(file_.get(), *kept.offset_bytes, bytes);
  if (!status.ok()) Throw(IdOf(status), folder_, std::string(status.message()));
  return read;
}

}  // namespace offload::zero3
