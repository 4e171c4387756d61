// The window on any device: operators are copies back to the host.
#include "zero3/gpu/gpu_window.h"

#include <string>
#include <vector>

#include "accelerator/any_device.h"
#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gradient_return.h"

namespace offload::zero3 {
namespace {

using accelerator::Accelerator;
using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Stream;

constexpr uint64_t kWeightBytes = 4096;
constexpr uint32_t kWeights = 8;

// All weights, always in host memory.
class HostWeights final : public WeightSource {
 public:
  HostWeights() { Random(1).Fill(memory()); }

  std::span<std::byte> memory() { return memory_.span(); }
  std::span<const std::byte> weight(uint32_t tensor) const {
    return memory_.span().subspan(tensor * kWeightBytes, kWeightBytes);
  }
  int leases() const { return leases_; }

  void Prefetch(uint32_t) override {}
  absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) override {
    ++leases_;
    return weight(tensor).data();
  }
  absl::StatusOr<const std::byte*> Lease(uint32_t tensor) override { return TryLease(tensor); }
  void Return(uint32_t) override { --leases_; }

 private:
  // Pages of its own: CUDA registers none twice.
  const MappedRegion memory_ = *MappedRegion::Anonymous(kWeights * kWeightBytes);
  int leases_ = 0;
};

// A model of equal weights, its window, and an operator that reads a weight to the host.
class Trainer {
 public:
  // `shared_leases_max`: bytes that may be leased of weights that are not its own alone; 0: they
  // are.
  Trainer(Accelerator* device, uint64_t gpu_ram_bytes, uint64_t shared_leases_max = 0)
      : device_(device) {
    const std::vector<GpuTensor> tensors(kWeights, {kWeightBytes, kWeightBytes});
    plan_ = *MakeGpuPlan(tensors, gpu_ram_bytes);
    Hold(weights_.memory());
    Hold(result_.span());
    Hold(gradients_.span());
    window_ = *GpuWindow::Make(
        device, &weights_, std::vector<uint64_t>(kWeights, kWeightBytes),
        {.window_bytes = plan_.window_bytes,
         .lookahead_bytes = plan_.lookahead_bytes,
         .leased_bytes_max = shared_leases_max > 0 ? shared_leases_max : kWeights * kWeightBytes,
         .source_is_shared = shared_leases_max > 0});
    return_ = *GradientReturn::Make(
        device, {.bucket_bytes = 2 * kWeightBytes, .held_bytes_max = plan_.gradient_bytes},
        [this](uint32_t tensor) { delivered_.push_back(tensor); });
    stream_ = *device->StreamCreate();
    event_ = *device->EventCreate();
  }
  ~Trainer() {
    Finish();
    return_.reset();
    window_.reset();
    EXPECT_EQ(weights_.leases(), 0);
    held_.clear();
    EXPECT_TRUE(device_->EventDestroy(event_).ok());
    EXPECT_TRUE(device_->StreamDestroy(stream_).ok());
  }

  void Operator(uint32_t tensor) {
    const absl::StatusOr<std::byte*> bytes = window_->Pin(tensor, stream_);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    device_->NoteUse(stream_, accelerator::Use::kRead, *bytes, kWeightBytes);
    ASSERT_TRUE(device_->MemcpyToHost(result_.data(), *bytes, kWeightBytes, stream_).ok());
    ASSERT_TRUE(window_->Unpin(tensor, stream_).ok());
  }
  // The gradient of a weight is the weight.
  void Gradient(uint32_t tensor) {
    std::byte* const bytes = *device_->Malloc(kWeightBytes);
    const absl::StatusOr<std::byte*> weight = window_->Pin(tensor, stream_);
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(
        device_->MemcpyToDevice(bytes, weights_.weight(tensor).data(), kWeightBytes, stream_).ok());
    ASSERT_TRUE(window_->Unpin(tensor, stream_).ok());
    ASSERT_TRUE(return_
                    ->Add({.tensor = tensor,
                           .device = bytes,
                           .host = gradients_.data() + tensor * kWeightBytes,
                           .size_bytes = kWeightBytes,
                           .drop = [this, bytes] { EXPECT_TRUE(device_->Free(bytes).ok()); }},
                          stream_)
                    .ok());
  }
  void ForwardAndBackward() {
    for (uint32_t tensor = 0; tensor < kWeights; ++tensor) Operator(tensor);
    for (uint32_t tensor = kWeights; tensor-- > 0;) Gradient(tensor);
  }
  void Step() {
    ASSERT_TRUE(return_->Flush().ok());
    ASSERT_TRUE(window_->EndStep({}).ok());
  }
  void Finish() {
    EXPECT_TRUE(device_->EventRecord(event_, stream_).ok());
    EXPECT_TRUE(device_->EventSynchronize(event_).ok());
  }

  GpuWindow& window() { return *window_; }
  HostWeights& weights() { return weights_; }
  Stream stream() const { return stream_; }
  std::span<const std::byte> result() const { return result_.span(); }
  std::span<const std::byte> gradients() const { return gradients_.span(); }
  const std::vector<uint32_t>& delivered() const { return delivered_; }

 private:
  void Hold(std::span<std::byte> memory) {
    held_.push_back(
        *HostRegistration::Register(device_, memory, {}, accelerator::HostAccess::kReadWrite));
    ASSERT_TRUE(held_.back().held());
  }

  Accelerator* const device_;
  HostWeights weights_;
  const MappedRegion result_ = *MappedRegion::Anonymous(kWeightBytes);
  const MappedRegion gradients_ = *MappedRegion::Anonymous(kWeights * kWeightBytes);
  std::vector<HostRegistration> held_;
  GpuPlan plan_;
  std::unique_ptr<GpuWindow> window_;
  std::unique_ptr<GradientReturn> return_;
  std::vector<uint32_t> delivered_;
  Stream stream_;
  accelerator::Event event_;
};

constexpr uint64_t kFloorBytes = 5 * kWeightBytes;

class GpuWindowTest : public accelerator::AnyDeviceTest {};
OFFLOAD_ON_ANY_DEVICE(GpuWindowTest);

TEST_P(GpuWindowTest, OperatorsReadTheirWeightsAndGradientsArrive) {
  Trainer trainer(device_.get(), kFloorBytes);
  for (int step = 0; step < 3; ++step) {
    for (uint32_t tensor = 0; tensor < kWeights; ++tensor) {
      trainer.Operator(tensor);
      trainer.Finish();
      const auto expected = trainer.weights().weight(tensor);
      ASSERT_TRUE(std::ranges::equal(trainer.result(), expected)) << "tensor " << tensor;
    }
    trainer.ForwardAndBackward();
    trainer.Step();
    EXPECT_TRUE(std::ranges::equal(trainer.gradients(), trainer.weights().memory()));
    EXPECT_EQ(trainer.delivered().size(), kWeights * (step + 1u));
  }
}

TEST_P(GpuWindowTest, WhatDoesNotFitBesideOthersIsAnErrorThatChangesNothing) {
  Trainer trainer(device_.get(), kFloorBytes);
  GpuWindow& window = trainer.window();
  for (const uint32_t tensor : {0, 1, 2}) ASSERT_TRUE(window.Pin(tensor, trainer.stream()).ok());
  const absl::Status status = window.Pin(3, trainer.stream()).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kWindowExhausted);
  EXPECT_THAT(status.ToString(), testing::HasSubstr("Raise gpu_ram"));
  for (const uint32_t tensor : {0, 1, 2}) ASSERT_TRUE(window.Unpin(tensor, trainer.stream()).ok());
  EXPECT_TRUE(window.Pin(3, trainer.stream()).ok());
  EXPECT_TRUE(window.Unpin(3, trainer.stream()).ok());
}

TEST_P(GpuWindowTest, WhatChangesWhileItIsPinnedIsReadAnewAfterwards) {
  Trainer trainer(device_.get(), kFloorBytes);
  trainer.Operator(0);
  trainer.Finish();
  ASSERT_TRUE(trainer.window().Pin(0, trainer.stream()).ok());
  Random(2).Fill(trainer.weights().memory());
  const uint32_t changed = 0;
  ASSERT_TRUE(trainer.window().Changed({&changed, 1}).ok());
  ASSERT_TRUE(trainer.window().Unpin(0, trainer.stream()).ok());
  trainer.Operator(0);
  trainer.Finish();
  EXPECT_TRUE(std::ranges::equal(trainer.result(), trainer.weights().weight(0)));
}

// Copies that are done when they are submitted cost nobody a wait.
TEST(GpuWindowCountersTest, CountCopiesAndWhatIsInUse) {
  HostAccelerator device({.pace = accelerator::Pace::kEager});
  Trainer trainer(&device, kFloorBytes);
  EXPECT_EQ(trainer.window().counters().used_bytes, 0u);
  for (int step = 0; step < 2; ++step) {
    trainer.ForwardAndBackward();
    trainer.Step();
  }
  const GpuWindow::Counters counters = trainer.window().counters();
  EXPECT_EQ(counters.bytes_to_device, (counters.misses + counters.prefetches) * kWeightBytes);
  EXPECT_GT(counters.used_bytes, 0u);
  EXPECT_EQ(counters.used_bytes % kWeightBytes, 0u);
  EXPECT_EQ(counters.stall_seconds, 0);
}

TEST(GpuWindowLeaseTest, WhileTheHostWaitsForTheSourceNothingIsLeased) {
  HostAccelerator device({.pace = accelerator::Pace::kLate, .queries_are_late = true});
  {
    Trainer trainer(&device, kFloorBytes);
    trainer.Operator(0);
    EXPECT_GT(trainer.weights().leases(), 0);
    trainer.window().BeginSourceWait();
    EXPECT_EQ(trainer.weights().leases(), 0);
    for (const uint32_t tensor : {1, 2, 3, 4}) {
      trainer.Operator(tensor);
      EXPECT_EQ(trainer.weights().leases(), 0);
    }
    trainer.window().EndSourceWait();
    trainer.Operator(5);
    trainer.Operator(6);
    EXPECT_GT(trainer.weights().leases(), 0);
  }
  EXPECT_THAT(device.Violations(), testing::IsEmpty());
  EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
}

TEST(GpuWindowLeaseTest, ABrokenDeviceHoldsNothingFromTheSource) {
  HostAccelerator device({.pace = accelerator::Pace::kLate, .failing_copy = 3});
  static Trainer* const trainer = new Trainer(&device, kFloorBytes);  // cannot end in order
  for (uint32_t tensor = 0; tensor < kWeights; ++tensor) {
    if (!trainer->window().Pin(tensor, trainer->stream()).ok()) break;
    trainer->window().Unpin(tensor, trainer->stream()).IgnoreError();
  }
  trainer->window().BeginSourceWait();
  EXPECT_EQ(trainer->weights().leases(), 0);
  EXPECT_EQ(ErrorIdOf(trainer->window().Pin(0, trainer->stream()).status()), ErrorId::kGpuFailed);
}

TEST(SteadyStateTest, NeitherForwardNorBackwardMakesTheHostWait) {
  HostAccelerator device({.pace = accelerator::Pace::kEager});
  {
    Trainer trainer(&device, kFloorBytes);
    trainer.ForwardAndBackward();
    trainer.Step();
    for (int step = 0; step < 5; ++step) {
      const uint64_t waits = device.counters().synchronizes;
      const uint64_t misses = trainer.window().counters().misses;
      trainer.ForwardAndBackward();
      EXPECT_EQ(device.counters().synchronizes, waits);
      EXPECT_EQ(trainer.window().counters().misses, misses);
      trainer.Step();
    }
  }
  EXPECT_THAT(device.Violations(), testing::IsEmpty());
  EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
}

// Who has the source, too, may wait for room while nobody calls this window.
TEST(SharedSourceTest, AfterACallNoMoreIsLeasedThanThisOnesShare) {
  for (const uint64_t leases_max : {kWeightBytes / 2, 2 * kWeightBytes}) {
    HostAccelerator device({.pace = accelerator::Pace::kLate, .queries_are_late = true});
    {
      Trainer trainer(&device, kFloorBytes, leases_max);
      for (int step = 0; step < 3; ++step) {
        for (uint32_t tensor = 0; tensor < kWeights; ++tensor) {
          trainer.Operator(tensor);
          EXPECT_LE(trainer.window().leased_bytes(), leases_max);
          EXPECT_LE(trainer.weights().leases() * kWeightBytes, leases_max);
        }
        trainer.Step();
      }
    }
    EXPECT_THAT(device.Violations(), testing::IsEmpty());
  }
}

TEST(SteadyStateTest, GpuRamIsNeverExceededAndMoreOfItMeansFewerBytes) {
  uint64_t last_bytes = UINT64_MAX;
  for (const uint64_t gpu_ram_bytes :
       {kFloorBytes, 7 * kWeightBytes, 10 * kWeightBytes, 16 * kWeightBytes}) {
    HostAccelerator device(
        {.pace = accelerator::Pace::kLate, .memory_bytes = gpu_ram_bytes + kWeightBytes});
    {
      Trainer trainer(&device, gpu_ram_bytes);
      for (int step = 0; step < 4; ++step) {
        trainer.ForwardAndBackward();
        trainer.Step();
      }
    }
    EXPECT_LE(device.counters().allocated_bytes_max, gpu_ram_bytes + kWeightBytes);
    EXPECT_LE(device.counters().bytes_to_device, last_bytes);
    last_bytes = device.counters().bytes_to_device;
    EXPECT_THAT(device.Violations(), testing::IsEmpty());
  }
}

}  // namespace
}  // namespace offload::zero3
