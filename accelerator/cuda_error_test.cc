#include "accelerator/cuda_error.h"

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

TEST(CudaStatusTest, SuccessIsOk) { EXPECT_TRUE(CudaStatus(0, "cudaMalloc", "", "").ok()); }

TEST(CudaStatusTest, NamesCallErrorAndWayOut) {
  const absl::Status status =
      CudaStatus(35, "cudaGetDeviceCount", "cudaErrorInsufficientDriver", "too old");
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kGpuMissing);
  EXPECT_EQ(status.message(),
            "OFD-2001 cudaGetDeviceCount: cudaErrorInsufficientDriver (too old). Install driver "
            "580 or newer and see what nvidia-smi shows, or keep the model on the CPU.");
}

TEST(CudaStatusTest, WhatTheCallerCanDoDecidesTheIdentifier) {
  EXPECT_EQ(ErrorIdOf(CudaStatus(2, "", "", "")), ErrorId::kGpuMemory);
  EXPECT_EQ(ErrorIdOf(CudaStatus(46, "", "", "")), ErrorId::kGpuMissing);
  EXPECT_EQ(ErrorIdOf(CudaStatus(100, "", "", "")), ErrorId::kGpuMissing);
  EXPECT_EQ(ErrorIdOf(CudaStatus(101, "", "", "")), ErrorId::kGpuMissing);
  EXPECT_EQ(ErrorIdOf(CudaStatus(214, "", "", "")),
            ErrorId::kGpuFailed);  // uncorrectable ECC error
  EXPECT_EQ(ErrorIdOf(CudaStatus(700, "", "", "")), ErrorId::kGpuFailed);  // illegal address
}

TEST(NoSuchDeviceTest, SaysHowManyThereAreAndWhatAnInstanceIsCalled) {
  const absl::Status status = NoSuchDevice(3, 1);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kGpuMissing);
  EXPECT_EQ(status.message(),
            "OFD-2001 cuda:3 of 1 devices. Name one that CUDA_VISIBLE_DEVICES shows; of a GPU that "
            "is divided (MIG) a process sees one instance, which that names, as cuda:0.");
}

}  // namespace
}  // namespace offload::accelerator
