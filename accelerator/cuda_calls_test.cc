// The device of a thread, by a runtime and a driver that do what NVIDIA's say of theirs: the
// runtime uses the context that is current to the thread, else that of the device which was set,
// or of the first; setting a device makes its context.
#include "accelerator/cuda_calls.h"

#include <cuda.h>

#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace {

constexpr int kDevices = 4;

std::set<int> contexts;  // that were made
char places[kDevices];
thread_local int chosen = 0;
thread_local std::vector<CUcontext> current = {nullptr};

CUcontext ContextOf(int device) {
  contexts.insert(device);
  return reinterpret_cast<CUcontext>(&places[device]);
}

CUresult DeviceGet(CUdevice* device, int number) {
  *device = number;
  return number < kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult PrimaryRetain(CUcontext* context, CUdevice device) {
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}
CUresult Push(CUcontext context) {
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult Pop(CUcontext* context) {
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}
CUresult GetCurrent(CUcontext* context) {
  *context = current.back();
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  const void* const context = current.back();
  *device =
      context == nullptr ? chosen : static_cast<int>(static_cast<const char*>(context) - places);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device >= kDevices) return cudaErrorInvalidDevice;
  chosen = device;
  current.back() = ContextOf(device);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfATest"; }
const char* cudaGetErrorString(cudaError_t) { return "of a test"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  *function = is("cuDeviceGet")                ? reinterpret_cast<void*>(&DeviceGet)
              : is("cuDevicePrimaryCtxRetain") ? reinterpret_cast<void*>(&PrimaryRetain)
              : is("cuCtxPushCurrent")         ? reinterpret_cast<void*>(&Push)
              : is("cuCtxPopCurrent")          ? reinterpret_cast<void*>(&Pop)
              : is("cuCtxGetCurrent")          ? reinterpret_cast<void*>(&GetCurrent)
                                               : nullptr;
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"

namespace offload::accelerator {
namespace {

int Current() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

// What `work` does has a thread of its own.
template <class Work>
void InThread(const Work& work) {
  contexts.clear();
  std::thread(work).join();
}

TEST(OnDeviceTest, AThreadThatHasUsedNoneHasNoneAfterwards) {
  InThread([] {
    {
      const OnDevice on(1);
      EXPECT_EQ(Current(), 1);
    }
    // As a program that names a device once and "cuda" elsewhere means it.
    EXPECT_EQ(Current(), 0);
    EXPECT_EQ(current.back(), nullptr);
    EXPECT_EQ(contexts.count(0), 0u) << "hundreds of MiB on a device that nobody uses";
  });
}

TEST(OnDeviceTest, AThreadThatHasUsedOneGoesOnWithThat) {
  InThread([] {
    cudaSetDevice(2);
    {
      const OnDevice on(1);
      EXPECT_EQ(Current(), 1);
      const OnDevice same(1);
      EXPECT_EQ(Current(), 1);
      {
        const OnDevice other(3);
        EXPECT_EQ(Current(), 3);
      }
      EXPECT_EQ(Current(), 1);
    }
    EXPECT_EQ(Current(), 2);
  });
}

TEST(OnDeviceTest, TheCurrentOneIsLeftAsItIs) {
  InThread([] {
    {
      const OnDevice on(0);
      EXPECT_EQ(Current(), 0);
    }
    EXPECT_TRUE(contexts.empty());
  });
}

TEST(OnDeviceTest, OneThatIsNotThereChangesNothing) {
  InThread([] {
    {
      const OnDevice on(kDevices);
      EXPECT_EQ(Current(), 0);
    }
    EXPECT_EQ(Current(), 0);
  });
}

}  // namespace
}  // namespace offload::accelerator
