// accelerator/any_device.h
//
// For tests that run on the stand-in everywhere, and on a GPU where there is one.
//
// Thread safety: none.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "accelerator/cuda_loader.h"
#include "accelerator/host_accelerator.h"
#include "gtest/gtest.h"

namespace offload::accelerator {

// The parameter: "standin" or "cuda".
class AnyDeviceTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "standin") {
      device_ = std::make_unique<HostAccelerator>(HostAccelerator::Options{});
      return;
    }
    auto device = OpenCuda(0, std::string("./") + std::getenv("CUDA_PLUGIN"));
    if (!device.ok() && std::getenv("OFFLOADD_REQUIRE_GPU") == nullptr)
      GTEST_SKIP() << "no GPU: " << device.status();
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  std::unique_ptr<Accelerator> device_;
};

#define OFFLOAD_ON_ANY_DEVICE(suite)                                      \
  INSTANTIATE_TEST_SUITE_P(On, suite, testing::Values("standin", "cuda"), \
                           [](const auto& info) { return std::string(info.param); })

}  // namespace offload::accelerator
