// Nothing but translation: no test without a GPU sees it run.
#include "accelerator/cuda_accelerator.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "accelerator/cuda_calls.h"
#include "accelerator/cuda_error.h"
#include "accelerator/cuda_peers.h"
#include "accelerator/sums.h"
#include "accelerator/timing.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::accelerator {
namespace {

class CudaAccelerator final : public Accelerator,
                              public PeerDevice,
                              public SummingDevice,
                              public TimingDevice {
 public:
  CudaAccelerator(int device, std::string name, bool registers_read_only)
      : device_(device),
        name_(std::move(name)),
        registers_read_only_(registers_read_only),
        peers_(MakeCudaPeers(device)) {}

  std::string Name() const override { return absl::StrCat("cuda:", device_, " ", name_); }

  Peers* peers() override { return peers_.get(); }

  absl::StatusOr<MemoryInfo> MemGetInfo() override {
    const OnDevice on(device_);
    size_t free_bytes = 0, total_bytes = 0;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaMemGetInfo, &free_bytes, &total_bytes));
    return MemoryInfo{free_bytes, total_bytes};
  }

  absl::StatusOr<std::byte*> Malloc(size_t size_bytes) override {
    const OnDevice on(device_);
    void* bytes = nullptr;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaMalloc, &bytes, size_bytes));
    return static_cast<std::byte*>(bytes);
  }
  absl::Status Free(std::byte* bytes) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaFree, bytes);
  }

  absl::StatusOr<bool> HostRegister(const std::byte* bytes, size_t size_bytes,
                                    HostAccess access) override {
    const OnDevice on(device_);
    if (access == HostAccess::kReadOnly && !registers_read_only_) return false;
    const unsigned flags =
        cudaHostRegisterPortable | (access == HostAccess::kReadOnly ? cudaHostRegisterReadOnly : 0);
    const cudaError_t error = cudaHostRegister(const_cast<std::byte*>(bytes), size_bytes, flags);
    if (error == cudaSuccess) return true;
    cudaGetLastError();
    // Refusals of this memory, of which drivers know many where it is read-only; anything else is
    // the device's trouble, which the next call meets as well.
    if (access == HostAccess::kReadOnly || error == cudaErrorNotSupported ||
        error == cudaErrorInvalidValue || error == cudaErrorMemoryAllocation ||
        error == cudaErrorNotPermitted || error == cudaErrorOperatingSystem) {
      return false;
    }
    return StatusOf(error, "cudaHostRegister");
  }
  absl::Status HostUnregister(const std::byte* bytes) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaHostUnregister, const_cast<std::byte*>(bytes));
  }

  absl::StatusOr<Stream> StreamCreate() override {
    const OnDevice on(device_);
    int lowest = 0, highest = 0;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaDeviceGetStreamPriorityRange, &lowest, &highest));
    cudaStream_t stream = nullptr;
    OFFLOAD_RETURN_IF_ERROR(
        OFFLOAD_CUDA(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking, highest));
    return Stream{reinterpret_cast<uintptr_t>(stream)};
  }
  absl::Status StreamDestroy(Stream stream) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaStreamDestroy, Unwrap(stream));
  }
  absl::StatusOr<bool> StreamIsCapturing(Stream stream) override {
    const OnDevice on(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(Unwrap(stream), &status);
    if (error == cudaErrorStreamCaptureImplicit) {
      // The default stream, while one is captured that waits for it.
      cudaGetLastError();
      return true;
    }
    OFFLOAD_RETURN_IF_ERROR(StatusOf(error, "cudaStreamIsCapturing"));
    return status != cudaStreamCaptureStatusNone;
  }

  absl::StatusOr<Event> EventCreate() override {
    const OnDevice on(device_);
    cudaEvent_t event = nullptr;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaEventCreateWithFlags, &event, cudaEventDisableTiming));
    return Event{reinterpret_cast<uintptr_t>(event)};
  }
  absl::Status EventDestroy(Event event) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaEventDestroy, Unwrap(event));
  }
  absl::Status EventRecord(Event event, Stream stream) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaEventRecord, Unwrap(event), Unwrap(stream));
  }
  absl::Status StreamWaitEvent(Stream stream, Event event) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaStreamWaitEvent, Unwrap(stream), Unwrap(event), 0);
  }
  absl::StatusOr<bool> EventQuery(Event event) override {
    const OnDevice on(device_);
    // Another thread may be capturing a graph in mode "global", which a query would spoil.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaThreadExchangeStreamCaptureMode, &mode));
    const cudaError_t error = cudaEventQuery(Unwrap(event));
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaThreadExchangeStreamCaptureMode, &mode));
    if (error != cudaErrorNotReady) {
      OFFLOAD_RETURN_IF_ERROR(StatusOf(error, "cudaEventQuery"));
      return true;
    }
    cudaGetLastError();
    return false;
  }
  absl::Status EventSynchronize(Event event) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaEventSynchronize, Unwrap(event));
  }

  absl::Status MemcpyToDevice(std::byte* device, const std::byte* host, size_t size_bytes,
                              Stream stream) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaMemcpyAsync, device, host, size_bytes, cudaMemcpyHostToDevice,
                        Unwrap(stream));
  }
  absl::Status MemcpyToHost(std::byte* host, const std::byte* device, size_t size_bytes,
                            Stream stream) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaMemcpyAsync, host, device, size_bytes, cudaMemcpyDeviceToHost,
                        Unwrap(stream));
  }
  absl::Status Memset(std::byte* device, uint8_t value, size_t size_bytes, Stream stream) override {
    const OnDevice on(device_);
    return OFFLOAD_CUDA(cudaMemsetAsync, device, value, size_bytes, Unwrap(stream));
  }
  absl::Status Update(const kernels::OptimizerSpec& optimizer, int64_t step,
                      const kernels::DeviceRun& run, Stream stream) override {
    const OnDevice on(device_);
    const int error = kernels::LaunchUpdate(optimizer, step, run, Unwrap(stream));
    return StatusOf(static_cast<cudaError_t>(error), "kernels::LaunchUpdate");
  }
  absl::Status AddParts(const kernels::DeviceSum& sum, Stream stream) override {
    const OnDevice on(device_);
    const int error = kernels::LaunchSum(sum, Unwrap(stream));
    return StatusOf(static_cast<cudaError_t>(error), "kernels::LaunchSum");
  }

  absl::StatusOr<Event> TimedEventCreate() override {
    const OnDevice on(device_);
    cudaEvent_t event = nullptr;
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaEventCreateWithFlags, &event, cudaEventDefault));
    return Event{reinterpret_cast<uintptr_t>(event)};
  }
  absl::StatusOr<std::optional<double>> SecondsBetween(Event begin, Event end) override {
    const OnDevice on(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // as EventQuery()
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaThreadExchangeStreamCaptureMode, &mode));
    float milliseconds = 0;
    const cudaError_t error = cudaEventElapsedTime(&milliseconds, Unwrap(begin), Unwrap(end));
    OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaThreadExchangeStreamCaptureMode, &mode));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return std::nullopt;
    }
    OFFLOAD_RETURN_IF_ERROR(StatusOf(error, "cudaEventElapsedTime"));
    return milliseconds * 1e-3;
  }

 private:
  const int device_;
  const std::string name_;
  const bool registers_read_only_;
  const std::unique_ptr<Peers> peers_;
};

absl::Status CheckRuntime() {
  int loaded = 0;
  OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaRuntimeGetVersion, &loaded));
  if (loaded / 1000 == CUDART_VERSION / 1000) return absl::OkStatus();
  return MakeError(ErrorId::kGpuPlugin,
                   absl::StrCat("liboffload_cuda.so is for CUDA ", CUDART_VERSION / 1000,
                                ", and the process has the runtime of CUDA ", loaded / 1000));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Accelerator>> OpenCudaDevice(int device) {
  OFFLOAD_RETURN_IF_ERROR(CheckRuntime());
  int count = 0;
  OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaGetDeviceCount, &count));
  if (device < 0 || device >= count) return NoSuchDevice(device, count);
  cudaDeviceProp properties;
  OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaGetDeviceProperties, &properties, device));
  int registers_read_only = 0;
  OFFLOAD_RETURN_IF_ERROR(OFFLOAD_CUDA(cudaDeviceGetAttribute, &registers_read_only,
                                       cudaDevAttrHostRegisterReadOnlySupported, device));
  return std::make_unique<CudaAccelerator>(device, properties.name, registers_read_only != 0);
}

}  // namespace offload::accelerator
