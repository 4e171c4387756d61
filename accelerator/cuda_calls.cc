#include "accelerator/cuda_calls.h"

#include <cuda.h>

#include <map>
#include <mutex>

#include "accelerator/cuda_error.h"

namespace offload::accelerator {
namespace {

// The functions of the driver that the runtime has no name for.
struct Driver {
  CUresult (*device_get)(CUdevice*, int) = nullptr;
  CUresult (*primary_retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;

  bool is_whole() const {
    return device_get != nullptr && primary_retain != nullptr && push != nullptr && pop != nullptr;
  }
};

template <class Function>
void Find(const char* name, Function* function) {
  constexpr unsigned kVersion = 12000;  // of the functions' forms
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &result);
  const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  *function = reinterpret_cast<Function>(is_found ? address : nullptr);
}

const Driver& TheDriver() {
  static const Driver kDriver = [] {
    Driver driver;
    Find("cuDeviceGet", &driver.device_get);
    Find("cuDevicePrimaryCtxRetain", &driver.primary_retain);
    Find("cuCtxPushCurrent", &driver.push);
    Find("cuCtxPopCurrent", &driver.pop);
    return driver;
  }();
  return kDriver;
}

// The context that the runtime has on a device, made where there is none yet; null: it cannot be.
CUcontext ContextOf(int device) {
  static std::mutex mutex;
  static auto* const kContexts = new std::map<int, CUcontext>();
  const std::lock_guard lock(mutex);
  const auto found = kContexts->find(device);
  if (found != kContexts->end()) return found->second;
  CUdevice number = 0;
  CUcontext context = nullptr;
  if (!TheDriver().is_whole() || TheDriver().device_get(&number, device) != CUDA_SUCCESS ||
      TheDriver().primary_retain(&context, number) != CUDA_SUCCESS)
    return nullptr;
  return (*kContexts)[device] = context;
}

}  // namespace

absl::Status StatusOf(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return CudaStatus(error, call, cudaGetErrorName(error), cudaGetErrorString(error));
}

// Where there is no context for it, the call that follows says why.
OnDevice::OnDevice(int device) {
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && current == device) return;
  const CUcontext context = ContextOf(device);
  is_pushed_ = context != nullptr && TheDriver().push(context) == CUDA_SUCCESS;
  if (!is_pushed_) cudaSetDevice(device);
}

OnDevice::~OnDevice() {
  CUcontext context = nullptr;
  if (is_pushed_) TheDriver().pop(&context);
}

}  // namespace offload::accelerator
