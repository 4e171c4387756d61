// What is planned against what a window on the stand-in copies.
#include "zero3/gpu/gpu_traffic.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "zero3/gpu/gpu_window.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Stream;

constexpr uint64_t kKiB = 1 << 10;

// Weights in host memory, one behind the other.
class HostWeights final : public WeightSource {
 public:
  explicit HostWeights(const std::vector<GpuTensor>& tensors) {
    uint64_t size_bytes = 0;
    for (const GpuTensor& tensor : tensors) {
      begins_.push_back(size_bytes);
      size_bytes += DeviceBytes(tensor.weight_bytes);
    }
    memory_.resize(size_bytes);
  }

  std::span<const std::byte> memory() const { return memory_; }
  void Prefetch(uint32_t) override {}
  absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) override {
    return memory_.data() + begins_[tensor];
  }
  absl::StatusOr<const std::byte*> Lease(uint32_t tensor) override { return TryLease(tensor); }
  void Return(uint32_t) override {}

 private:
  std::vector<uint64_t> begins_;
  std::vector<std::byte> memory_;
};

// Bytes that a window copies in the last of six steps.
uint64_t CopiedByAWindow(const std::vector<GpuTensor>& tensors, const GpuPlan& plan,
                         int micro_batches) {
  constexpr int kSteps = 6;
  HostAccelerator device({.pace = accelerator::Pace::kEager});
  HostWeights weights(tensors);
  std::vector<uint64_t> sizes;
  std::vector<uint32_t> changed;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    sizes.push_back(tensors[tensor].weight_bytes);
    if (tensors[tensor].gradient_bytes > 0) changed.push_back(tensor);
  }
  uint64_t before = 0, now = 0;
  const Stream stream = *device.StreamCreate();
  {
    const HostRegistration held = *HostRegistration::Register(&device, weights.memory(), {},
                                                              accelerator::HostAccess::kReadOnly);
    const auto window =
        *GpuWindow::Make(&device, &weights, sizes,
                         {.window_bytes = plan.window_bytes,
                          .lookahead_bytes = plan.lookahead_bytes,
                          .leased_bytes_max = std::numeric_limits<uint64_t>::max()});
    const auto use = [&](uint32_t tensor) {
      EXPECT_TRUE(window->Pin(tensor, stream).ok());
      EXPECT_TRUE(window->Unpin(tensor, stream).ok());
    };
    for (int step = 0; step < kSteps; ++step) {
      before = now;
      for (int pass = 0; pass < micro_batches; ++pass) {
        for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) use(tensor);
        for (auto tensor = static_cast<uint32_t>(tensors.size()); tensor-- > 0;) use(tensor);
      }
      EXPECT_TRUE(window->EndStep(changed).ok());
      now = window->counters().bytes_to_device;
    }
  }
  EXPECT_TRUE(device.StreamDestroy(stream).ok());
  EXPECT_THAT(device.Violations(), testing::IsEmpty());
  return now - before;
}

// Blocks of one large and some small tensors, some of them frozen.
std::vector<GpuTensor> Model(Random& random) {
  std::vector<GpuTensor> tensors;
  const uint64_t blocks = 2 + random.Below(6);
  const bool freezes = random.Below(3) == 0;
  for (uint64_t block = 0; block < blocks; ++block) {
    for (const uint64_t size_bytes : {16 * kKiB, 100 + random.Below(kKiB), 6 * kKiB, 8 * kKiB}) {
      const bool is_frozen = freezes && random.Below(2) == 0;
      tensors.push_back({size_bytes, is_frozen ? 0 : size_bytes});
    }
  }
  return tensors;
}

uint64_t AllWeights(const std::vector<GpuTensor>& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), uint64_t{0},
      [](uint64_t sum, const GpuTensor& tensor) { return sum + tensor.weight_bytes; });
}

uint64_t AllGradients(const std::vector<GpuTensor>& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), uint64_t{0},
      [](uint64_t sum, const GpuTensor& tensor) { return sum + tensor.gradient_bytes; });
}

TEST(GpuTrafficTest, WeightsAreCopiedAsPlannedToTheByte) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const std::vector<GpuTensor> tensors = Model(random);
    const uint64_t floor_bytes = MakeGpuPlan(tensors, uint64_t{1} << 40)->floor_bytes;
    const uint64_t gpu_ram_bytes =
        floor_bytes + random.Below(AllWeights(tensors) + AllGradients(tensors));
    const GpuPlan plan = *MakeGpuPlan(tensors, gpu_ram_bytes);
    const int micro_batches = 1 + static_cast<int>(random.Below(3));
    EXPECT_EQ(PlanLinkTraffic(tensors, plan, micro_batches).weight_bytes,
              CopiedByAWindow(tensors, plan, micro_batches));
  }
}

TEST(GpuTrafficTest, EverythingThatFitsTravelsOnceAStep) {
  Random random(7);
  std::vector<GpuTensor> tensors = Model(random);
  for (GpuTensor& tensor : tensors) tensor.gradient_bytes = tensor.weight_bytes;
  const GpuPlan plan = *MakeGpuPlan(tensors, uint64_t{1} << 40);
  const LinkTraffic traffic = PlanLinkTraffic(tensors, plan, 4);
  EXPECT_EQ(traffic.weight_bytes, AllWeights(tensors));
  EXPECT_EQ(traffic.fetched_bytes, 0u);
  EXPECT_EQ(traffic.gradient_bytes, 4 * AllGradients(tensors)) << "each pass has its copy";
}

TEST(GpuTrafficTest, WhatIsUpdatedThereTravelsAtCheckpointsAlone) {
  const std::vector<GpuTensor> tensors(8, {16 * kKiB, 16 * kKiB, 80 * kKiB});
  const GpuPlan plan = *MakeGpuPlan(tensors, (8 * 32 + 3 * 80) * kKiB + kDeviceAlignment);
  const LinkTraffic traffic = PlanLinkTraffic(tensors, plan, 2);
  EXPECT_EQ(traffic, (LinkTraffic{.weight_bytes = 5 * 16 * kKiB,
                                  .gradient_bytes = 2 * 5 * 16 * kKiB,
                                  .checkpoint_bytes = 3 * 96 * kKiB}));
}

TEST(GpuTrafficTest, FrozenWeightsThatFitDoNotTravelAtAll) {
  const std::vector<GpuTensor> tensors(8, {16 * kKiB, 0});
  const GpuPlan plan = *MakeGpuPlan(tensors, 8 * 16 * kKiB);
  EXPECT_EQ(PlanLinkTraffic(tensors, plan, 2), LinkTraffic());
}

TEST(GpuTrafficTest, GradientsThatHaveNoRoomAreFetchedByFurtherMicroBatches) {
  const std::vector<GpuTensor> tensors(8, {16 * kKiB, 16 * kKiB});
  GpuPlan plan = *MakeGpuPlan(tensors, 16 * 16 * kKiB);
  EXPECT_EQ(PlanLinkTraffic(tensors, plan, 3).fetched_bytes, 0u);
  plan.gradient_bytes = 4 * 16 * kKiB;
  EXPECT_EQ(PlanLinkTraffic(tensors, plan, 1).fetched_bytes, 0u);
  EXPECT_EQ(PlanLinkTraffic(tensors, plan, 2).fetched_bytes, AllGradients(tensors))
      << "who was used longest ago is needed next";
}

TEST(GpuTrafficTest, MoreGpuRamIsNeverMoreTraffic) {
  const std::vector<GpuTensor> tensors(12, {16 * kKiB, 16 * kKiB});
  uint64_t last_bytes = UINT64_MAX;
  for (uint64_t gpu_ram_bytes = 5 * 16 * kKiB; gpu_ram_bytes <= 24 * 16 * kKiB;
       gpu_ram_bytes += 16 * kKiB) {
    const LinkTraffic traffic = PlanLinkTraffic(tensors, *MakeGpuPlan(tensors, gpu_ram_bytes), 2);
    EXPECT_LE(traffic.ToDeviceBytes(), last_bytes) << gpu_ram_bytes;
    last_bytes = traffic.ToDeviceBytes();
  }
  EXPECT_EQ(last_bytes, AllWeights(tensors));
}

TEST(GpuTrafficTest, ManyMicroBatchesGoOnAsTheLastThatWasFollowed) {
  Random random(3);
  const std::vector<GpuTensor> tensors = Model(random);
  const GpuPlan plan =
      *MakeGpuPlan(tensors, MakeGpuPlan(tensors, uint64_t{1} << 40)->floor_bytes + 9 * kKiB);
  const LinkTraffic two = PlanLinkTraffic(tensors, plan, 2),
                    three = PlanLinkTraffic(tensors, plan, 3);
  const LinkTraffic many = PlanLinkTraffic(tensors, plan, 1000);
  EXPECT_EQ(many.weight_bytes, three.weight_bytes + 997 * (three.weight_bytes - two.weight_bytes));
  EXPECT_EQ(many.gradient_bytes, 1000 * AllGradients(tensors));
}

// Each use of each: no more than a window without places could need.
TEST(GpuTrafficTest, OfVeryManyTensorsThePlanIsCoarse) {
  const std::vector<GpuTensor> tensors(5000, {kKiB, kKiB});
  const GpuPlan some = *MakeGpuPlan(tensors, 5000 * kKiB);
  EXPECT_EQ(PlanLinkTraffic(tensors, some, 1).weight_bytes, 2 * 5000 * kKiB);
  const GpuPlan all = *MakeGpuPlan(tensors, 10000 * kKiB);
  EXPECT_EQ(PlanLinkTraffic(tensors, all, 1).weight_bytes, 5000 * kKiB);
}

}  // namespace
}  // namespace offload::zero3
