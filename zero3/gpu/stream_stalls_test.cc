#include "zero3/gpu/stream_stalls.h"

#include <vector>

#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "zero3/gpu/careless_accelerator.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Stream;

constexpr uint64_t kBytes = 1 << 20;
constexpr double kCopySeconds = kBytes / HostAccelerator::kCopiedBytesPerSecond;

// A copy that arrives when it is let.
class StreamStallsTest : public testing::Test {
 protected:
  StreamStallsTest()
      : copies_(*device_.StreamCreate()),
        bytes_(*device_.Malloc(kBytes)),
        copied_(*device_.EventCreate()) {
    host_ = *HostRegistration::Register(&device_, memory_, {}, accelerator::HostAccess::kReadWrite);
  }
  ~StreamStallsTest() override {
    device_.RunAll();
    EXPECT_TRUE(device_.EventSynchronize(copied_).ok());
    EXPECT_TRUE(device_.EventDestroy(copied_).ok());
    EXPECT_TRUE(device_.Free(bytes_).ok());
    EXPECT_TRUE(device_.StreamDestroy(copies_).ok());
  }
  void Copy() {
    device_.LaunchWhenReady(
        copies_, [this] { return may_copy_; }, [] {});
    EXPECT_TRUE(device_.MemcpyToDevice(bytes_, memory_.data(), kBytes, copies_).ok());
    EXPECT_TRUE(device_.EventRecord(copied_, copies_).ok());
  }

  // Whether what is launched behind a wait runs when the copy has arrived, and no sooner.
  void ExpectOrdered(StreamStalls& stalls, int waits) {
    may_copy_ = false;
    Copy();
    for (int i = 0; i < waits; ++i) ASSERT_TRUE(stalls.Wait(Stream(), copied_).ok());
    bool has_run = false;
    device_.Launch(Stream(), [&] { has_run = true; });
    device_.RunAll();
    EXPECT_FALSE(has_run);
    may_copy_ = true;
    device_.RunAll();
    EXPECT_TRUE(has_run);
  }

  HostAccelerator device_{{.pace = accelerator::Pace::kLate}};
  bool may_copy_ = true;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
  HostRegistration host_;
  const Stream copies_;
  std::byte* const bytes_;
  const accelerator::Event copied_;
};

TEST_F(StreamStallsTest, AStreamThatComesBeforeTheBytesWaitsForTheCopy) {
  StreamStalls stalls(&device_);
  may_copy_ = false;
  Copy();
  ASSERT_TRUE(stalls.Wait(Stream(), copied_).ok());
  device_.RunAll();
  EXPECT_EQ(stalls.Seconds(), 0) << "it still waits";
  may_copy_ = true;
  device_.RunAll();
  EXPECT_DOUBLE_EQ(stalls.Seconds(), kCopySeconds);
  EXPECT_DOUBLE_EQ(stalls.Seconds(), kCopySeconds) << "counted once";
}

TEST_F(StreamStallsTest, AStreamThatComesAfterTheBytesWaitsForNothing) {
  StreamStalls stalls(&device_);
  Copy();
  device_.RunAll();
  ASSERT_TRUE(stalls.Wait(Stream(), copied_).ok());
  device_.RunAll();
  EXPECT_EQ(stalls.Seconds(), 0);
}

TEST_F(StreamStallsTest, WhatIsNotMeasuredIsOrderedAllTheSame) {
  StreamStalls stalls(&device_);
  ASSERT_NO_FATAL_FAILURE(ExpectOrdered(stalls, /*waits=*/2000));
  EXPECT_DOUBLE_EQ(stalls.Seconds(), kCopySeconds) << "of the first wait; later ones come after it";
}

TEST_F(StreamStallsTest, ADeviceThatTellsNoTimeIsOrderedAllTheSame) {
  CarelessAccelerator without_time(&device_, {});
  StreamStalls stalls(&without_time);
  ASSERT_NO_FATAL_FAILURE(ExpectOrdered(stalls, /*waits=*/1));
  EXPECT_EQ(stalls.Seconds(), 0);
}

// Events are given back, also those of waits that have not ended.
TEST(StreamStallsEndTest, NothingIsLeft) {
  HostAccelerator device({.pace = accelerator::Pace::kLate});
  const accelerator::Event event = *device.EventCreate();
  {
    StreamStalls stalls(&device);
    ASSERT_TRUE(stalls.Wait(Stream(), event).ok());
  }
  ASSERT_TRUE(device.EventDestroy(event).ok());
  EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
}

}  // namespace
}  // namespace offload::zero3
