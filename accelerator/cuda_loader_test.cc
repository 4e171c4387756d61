// The plug-in as programs find it, on machines with and without a GPU.
#include "accelerator/cuda_loader.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

using ::testing::HasSubstr;

std::string Plugin() { return std::string("./") + std::getenv("CUDA_PLUGIN"); }

TEST(OpenCudaTest, AMissingPluginIsOneError) {
  const auto device = OpenCuda(0, "/nowhere/liboffload_cuda.so");
  EXPECT_EQ(ErrorIdOf(device.status()), ErrorId::kGpuPlugin);
  EXPECT_THAT(device.status().ToString(), HasSubstr("/nowhere/liboffload_cuda.so"));
}

TEST(OpenCudaTest, AnotherLibraryIsRefused) {
  const auto device = OpenCuda(0, "libdl.so.2");
  EXPECT_EQ(ErrorIdOf(device.status()), ErrorId::kGpuPlugin);
  EXPECT_THAT(device.status().ToString(), HasSubstr("libdl.so.2 is not our plug-in"));
}

TEST(OpenCudaTest, GivesADeviceOrSaysWhyNot) {
  const auto device = OpenCuda(0, Plugin());
  if (device.ok()) {
    EXPECT_THAT((*device)->Name(), HasSubstr("cuda:0"));
    return;
  }
  // No driver or device; or a plug-in that was built without CUDA.
  EXPECT_TRUE(ErrorIdOf(device.status()) == ErrorId::kGpuMissing ||
              ErrorIdOf(device.status()) == ErrorId::kGpuPlugin)
      << device.status();
}

TEST(OpenCudaTest, ADeviceThatIsNotThereIsRefused) {
  EXPECT_FALSE(OpenCuda(1000, Plugin()).ok());
  EXPECT_FALSE(OpenCuda(-1, Plugin()).ok());
}

TEST(CudaPluginPathTest, StandsBesideTheProgramOrWhereTheVariableSays) {
  unsetenv("OFFLOADD_CUDA_PLUGIN");
  EXPECT_THAT(CudaPluginPath(), HasSubstr("/liboffload_cuda.so"));
  setenv("OFFLOADD_CUDA_PLUGIN", "/somewhere/else.so", 1);
  EXPECT_EQ(CudaPluginPath(), "/somewhere/else.so");
  unsetenv("OFFLOADD_CUDA_PLUGIN");
}

TEST(RuntimeConflictTest, OneRuntimeOfOurVersionAndOneTorchAreFine) {
  const std::vector<std::string> libraries = {"/lib/libc.so.6", "/a/libcudart.so.13",
                                              "/a/libcudart.so.13.0.96", "/t/libc10_cuda.so"};
  EXPECT_EQ(RuntimeConflict(libraries), "");
}

TEST(RuntimeConflictTest, AnotherRuntimeIsNamed) {
  const std::vector<std::string> libraries = {"/a/libcudart.so.12"};
  EXPECT_EQ(RuntimeConflict(libraries),
            "the process has loaded /a/libcudart.so.12, and the plug-in is for CUDA 13");
  const std::vector<std::string> newer = {"/a/libcudart.so.130"};
  EXPECT_NE(RuntimeConflict(newer), "");
}

TEST(RuntimeConflictTest, TwoCopiesOfTorchAreNamed) {
  const std::vector<std::string> libraries = {"/a/libc10_cuda.so", "/b/libc10_cuda.so"};
  EXPECT_THAT(RuntimeConflict(libraries), HasSubstr("/a/libc10_cuda.so and /b/libc10_cuda.so"));
}

}  // namespace
}  // namespace offload::accelerator
