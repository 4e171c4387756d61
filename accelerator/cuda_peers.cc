// Nothing but translation: no test without GPUs sees it run.
#include "accelerator/cuda_peers.h"

#include <dlfcn.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "accelerator/cuda_calls.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::accelerator {
namespace {

constexpr std::chrono::seconds kPatience(60);      // for the others to join, or to be launched
constexpr std::chrono::seconds kPatienceAtEnd(2);  // for them to take what is on its way
constexpr std::chrono::microseconds kPause(100);
constexpr const char* kLibrary = "libnccl.so.2";

// The functions of the library that the process has loaded, or that is found now.
struct Nccl {
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&::ncclCommGetAsyncError) comm_async_error = nullptr;
  decltype(&::ncclCommFinalize) comm_finalize = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
};

absl::StatusOr<const Nccl*> OpenNccl() {
  static const absl::StatusOr<Nccl> kNccl = []() -> absl::StatusOr<Nccl> {
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) return MakeError(ErrorId::kGpuPlugin, dlerror());
    Nccl nccl;
    absl::Status status;
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      if (*function == nullptr)
        status.Update(MakeError(ErrorId::kGpuPlugin, absl::StrCat(kLibrary, " has no ", name)));
    };
    find("ncclGetUniqueId", &nccl.get_unique_id);
    find("ncclCommInitRankConfig", &nccl.comm_init);
    find("ncclCommGetAsyncError", &nccl.comm_async_error);
    find("ncclCommFinalize", &nccl.comm_finalize);
    find("ncclCommDestroy", &nccl.comm_destroy);
    find("ncclCommAbort", &nccl.comm_abort);
    find("ncclAllGather", &nccl.all_gather);
    find("ncclGroupStart", &nccl.group_start);
    find("ncclGroupEnd", &nccl.group_end);
    find("ncclSend", &nccl.send);
    find("ncclRecv", &nccl.recv);
    find("ncclGetErrorString", &nccl.error_string);
    if (!status.ok()) return status;
    return nccl;
  }();
  if (!kNccl.ok()) return kNccl.status();
  return &*kNccl;
}

absl::Status NcclStatus(const Nccl& nccl, ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return absl::OkStatus();
  cudaGetLastError();  // of ours, as in StatusOf
  return MakeError(ErrorId::kGpuFailed, absl::StrCat(call, ": ", nccl.error_string(result)));
}

// Calls do not wait (blocking = 0): what they began is asked for, so that Abort() comes between.
class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(const Nccl* nccl, int device) : nccl_(nccl), device_(device) {}

  ~NcclCollectives() override {
    const OnDevice on(device_);
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    if (Begun(nccl_->comm_finalize(comm_)) && Finished(kPatienceAtEnd) == ncclSuccess) {
      nccl_->comm_destroy(comm_);
    } else {
      nccl_->comm_abort(comm_);
    }
  }

  absl::Status Init(const ncclUniqueId& id, uint32_t rank, uint32_t world_size) {
    const OnDevice on(device_);
    const std::lock_guard lock(mutex_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    rank_ = rank;
    ncclResult_t result =
        nccl_->comm_init(&comm_, static_cast<int>(world_size), id, static_cast<int>(rank), &config);
    if (result == ncclInProgress) result = Finished(kPatience);
    return NcclStatus(*nccl_, result, "ncclCommInitRankConfig");
  }

  absl::Status AllGather(std::byte* bytes, size_t part_bytes, Stream stream) override {
    const OnDevice on(device_);
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      OFFLOAD_RETURN_IF_ERROR(Ended());
      result = nccl_->all_gather(bytes + rank_ * part_bytes, bytes, part_bytes, ncclInt8, comm_,
                                 Unwrap(stream));
    }
    return Launched(result, "ncclAllGather");
  }

  // Sends and receives of one group go on together: no order of theirs can deadlock.
  absl::Status ExchangeSlices(std::span<const SlicedRange> ranges, Stream stream) override {
    const OnDevice on(device_);
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      OFFLOAD_RETURN_IF_ERROR(Ended());
      result = nccl_->group_start();
      for (const SlicedRange& range : ranges) {
        const std::vector<size_t>& offsets = range.offsets_bytes;
        const size_t own_bytes = offsets[rank_ + 1] - offsets[rank_];
        for (size_t rank = 0; rank + 1 < offsets.size(); ++rank) {
          if (rank == rank_) continue;
          const int peer = static_cast<int>(rank);
          if (Begun(result))
            result = nccl_->send(range.from + offsets[rank], offsets[rank + 1] - offsets[rank],
                                 ncclInt8, peer, comm_, Unwrap(stream));
          if (Begun(result))
            result = nccl_->recv(range.to[rank], own_bytes, ncclInt8, peer, comm_, Unwrap(stream));
        }
      }
      const ncclResult_t ended = nccl_->group_end();  // also after a failure
      if (Begun(result)) result = ended;
    }
    return Launched(result, "ncclSend, ncclRecv");
  }

  absl::Status AsyncError() override {
    const std::lock_guard lock(mutex_);
    OFFLOAD_RETURN_IF_ERROR(Ended());
    ncclResult_t result = ncclSuccess;
    nccl_->comm_async_error(comm_, &result);
    if (result == ncclInProgress) return absl::OkStatus();
    return NcclStatus(*nccl_, result, "NCCL");
  }

  void Abort() override {
    const OnDevice on(device_);
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) nccl_->comm_abort(comm_);
    comm_ = nullptr;
  }

 private:
  static bool Begun(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
  }

  // What a call has begun, until the stream has it. Abort() may come between.
  absl::Status Launched(ncclResult_t result, const char* call) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (result == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
      const std::lock_guard lock(mutex_);
      OFFLOAD_RETURN_IF_ERROR(Ended());
      nccl_->comm_async_error(comm_, &result);
    }
    return NcclStatus(*nccl_, result, call);
  }

  absl::Status Ended() const {
    if (comm_ != nullptr) return absl::OkStatus();
    return MakeError(ErrorId::kGpuFailed, "the connection between the ranks' devices was ended");
  }

  // What the last call began.
  ncclResult_t Finished(std::chrono::seconds patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    ncclResult_t result = ncclInProgress;
    for (;;) {
      if (nccl_->comm_async_error(comm_, &result) != ncclSuccess) return ncclInternalError;
      if (result != ncclInProgress || std::chrono::steady_clock::now() > deadline) return result;
      std::this_thread::sleep_for(kPause);
    }
  }

  const Nccl* const nccl_;
  const int device_;
  std::mutex mutex_;
  size_t rank_ = 0;
  ncclComm_t comm_ = nullptr;
};

class CudaPeers final : public Peers {
 public:
  explicit CudaPeers(int device) : device_(device) {}

  // On the bus: numbers of devices differ between processes.
  std::string Address() const override {
    char address[32] = {};
    const absl::Status status =
        OFFLOAD_CUDA(cudaDeviceGetPCIBusId, address, sizeof(address), device_);
    return status.ok() ? address : "";
  }

  // A device that this process does not see (CUDA_VISIBLE_DEVICES) cannot be asked about.
  bool CanAccess(const std::string& address) const override {
    int other = 0, can = 0;
    if (!OFFLOAD_CUDA(cudaDeviceGetByPCIBusId, &other, address.c_str()).ok()) return false;
    if (other == device_) return false;
    return OFFLOAD_CUDA(cudaDeviceCanAccessPeer, &can, device_, other).ok() && can != 0;
  }

  absl::StatusOr<std::string> MakeId(uint32_t) override {
    OFFLOAD_ASSIGN_OR_RETURN(const Nccl* const nccl, OpenNccl());
    ncclUniqueId id;
    OFFLOAD_RETURN_IF_ERROR(NcclStatus(*nccl, nccl->get_unique_id(&id), "ncclGetUniqueId"));
    return std::string(id.internal, sizeof(id.internal));
  }

  absl::StatusOr<std::unique_ptr<Collectives>> Join(const std::string& id, uint32_t rank,
                                                    uint32_t world_size) override {
    OFFLOAD_ASSIGN_OR_RETURN(const Nccl* const nccl, OpenNccl());
    ncclUniqueId unique;
    if (id.size() != sizeof(unique.internal))
      return absl::InvalidArgumentError(absl::StrCat("an id of ", id.size(), " B"));
    std::memcpy(unique.internal, id.data(), id.size());
    auto collectives = std::make_unique<NcclCollectives>(nccl, device_);
    const absl::Status joined = collectives->Init(unique, rank, world_size);
    if (!joined.ok()) {
      collectives->Abort();
      return joined;
    }
    return collectives;
  }

 private:
  const int device_;
};

}  // namespace

std::unique_ptr<Peers> MakeCudaPeers(int device) { return std::make_unique<CudaPeers>(device); }

}  // namespace offload::accelerator
