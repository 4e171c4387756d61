#include "accelerator/copy_rates.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>

#include "accelerator/host_registration.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace offload::accelerator {
namespace {

constexpr int kCopies = 4;  // of each measurement, behind one that is not counted
constexpr size_t kSlabBytes = size_t{1} << 20;

// One direction: its stream, and memory on both sides.
class Way {
 public:
  explicit Way(Accelerator* accelerator) : accelerator_(accelerator) {}
  ~Way() {
    if (event_.handle != 0) accelerator_->EventDestroy(event_).IgnoreError();
    if (device_ != nullptr) accelerator_->Free(device_).IgnoreError();
    registration_ = {};
    if (stream_.handle != 0) accelerator_->StreamDestroy(stream_).IgnoreError();
  }
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  absl::Status Open(size_t size_bytes) {
    OFFLOAD_ASSIGN_OR_RETURN(host_, MappedRegion::Anonymous(size_bytes));
    std::memset(host_.data(), 1, size_bytes);
    OFFLOAD_ASSIGN_OR_RETURN(registration_, HostRegistration::Register(accelerator_, host_.span(),
                                                                       {}, HostAccess::kReadWrite));
    if (!registration_.held())
      return MakeError(ErrorId::kGpuMissing, "memory of the host cannot be page-locked for it");
    OFFLOAD_ASSIGN_OR_RETURN(stream_, accelerator_->StreamCreate());
    OFFLOAD_ASSIGN_OR_RETURN(event_, accelerator_->EventCreate());
    OFFLOAD_ASSIGN_OR_RETURN(device_, accelerator_->Malloc(size_bytes));
    return accelerator_->Memset(device_, 0, size_bytes, stream_);
  }

  absl::Status Copy(bool to_device) {
    return to_device ? accelerator_->MemcpyToDevice(device_, host_.data(), host_.size(), stream_)
                     : accelerator_->MemcpyToHost(host_.data(), device_, host_.size(), stream_);
  }
  absl::Status Finish() {
    OFFLOAD_RETURN_IF_ERROR(accelerator_->EventRecord(event_, stream_));
    return accelerator_->EventSynchronize(event_);
  }

 private:
  Accelerator* const accelerator_;
  MappedRegion host_;
  HostRegistration registration_;
  Stream stream_;
  Event event_;
  std::byte* device_ = nullptr;
};

absl::StatusOr<double> Seconds(const std::function<absl::Status()>& copy,
                               const std::function<absl::Status()>& finish) {
  OFFLOAD_RETURN_IF_ERROR(copy());
  OFFLOAD_RETURN_IF_ERROR(finish());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCopies; ++i) OFFLOAD_RETURN_IF_ERROR(copy());
  OFFLOAD_RETURN_IF_ERROR(finish());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return std::max(elapsed.count(), 1e-9) / kCopies;
}

// As the daemon makes it and a rank maps it.
absl::StatusOr<MappedRegion> MakeSlab() {
  const UniqueFd file(memfd_create("offloadctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid() || posix_fallocate(file.get(), 0, kSlabBytes) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) != 0)
    return absl::InternalError(std::strerror(errno));
  return MappedRegion::Map(file.get(), 0, kSlabBytes, PROT_READ, MAP_SHARED);
}

}  // namespace

absl::StatusOr<CopyRates> MeasureCopyRates(Accelerator* accelerator, size_t size_bytes) {
  CopyRates rates;
  {
    OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion slab, MakeSlab());
    OFFLOAD_ASSIGN_OR_RETURN(
        const HostRegistration registration,
        HostRegistration::Register(accelerator, slab.span(), {}, HostAccess::kReadOnly));
    rates.registers_slab = registration.held();
  }
  Way down(accelerator), up(accelerator);
  OFFLOAD_RETURN_IF_ERROR(down.Open(size_bytes));
  OFFLOAD_RETURN_IF_ERROR(up.Open(size_bytes));
  const auto size = static_cast<double>(size_bytes);
  OFFLOAD_ASSIGN_OR_RETURN(const double down_seconds,
                           Seconds([&] { return down.Copy(true); }, [&] { return down.Finish(); }));
  OFFLOAD_ASSIGN_OR_RETURN(const double up_seconds,
                           Seconds([&] { return up.Copy(false); }, [&] { return up.Finish(); }));
  OFFLOAD_ASSIGN_OR_RETURN(const double both_seconds,
                           Seconds(
                               [&]() -> absl::Status {
                                 OFFLOAD_RETURN_IF_ERROR(down.Copy(true));
                                 return up.Copy(false);
                               },
                               [&]() -> absl::Status {
                                 OFFLOAD_RETURN_IF_ERROR(down.Finish());
                                 return up.Finish();
                               }));
  rates.to_device = size / down_seconds;
  rates.to_host = size / up_seconds;
  rates.both = 2 * size / both_seconds;
  return rates;
}

}  // namespace offload::accelerator
