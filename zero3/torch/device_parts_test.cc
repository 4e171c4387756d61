#include "zero3/torch/device_parts.h"

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostAccess;
using accelerator::Pace;
using accelerator::Stream;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr uint64_t kPartBytes = 1024;

// Gradients of a few parts each, written by a stream of the trainer's, and what the daemon is told.
class DevicePartsTest : public testing::Test {
 protected:
  explicit DevicePartsTest(HostAccelerator::Options options = {.pace = Pace::kLate,
                                                               .queries_are_late = true})
      : device_(options), ring_(64 * kPartBytes) {
    writer_ = *device_.StreamCreate();
    EXPECT_TRUE(*device_.HostRegister(ring_.data(), ring_.size(), HostAccess::kReadWrite));
  }
  ~DevicePartsTest() override {
    parts_.reset();
    if (is_broken_) return;  // the device has let go of everything
    for (std::byte* bytes : allocated_) EXPECT_TRUE(device_.Free(bytes).ok());
    EXPECT_TRUE(device_.HostUnregister(ring_.data()).ok());
    EXPECT_TRUE(device_.StreamDestroy(writer_).ok());
    EXPECT_EQ(device_.Violations().empty(), !has_violations_);
    EXPECT_THAT(device_.Leftovers(), IsEmpty());
  }

  void Make(uint64_t bytes_max, uint64_t ring_bytes) {
    parts_ = *DeviceParts::Make(&device_, bytes_max, ring_bytes);
  }

  // A gradient of `count` parts, all of whose bytes are `value` when the stream gets there.
  void Give(uint32_t tensor, size_t count, uint8_t value) {
    std::byte* const bytes = *device_.Malloc(count * kPartBytes);
    allocated_.push_back(bytes);
    EXPECT_TRUE(device_.Memset(bytes, value, count * kPartBytes, writer_).ok());
    parts_->Give(tensor, bytes,
                 std::shared_ptr<const void>(bytes, [this](const void*) { ++dropped_; }));
  }
  // Its next part, to the next place of the ring.
  client::Ticket Start(uint32_t tensor, size_t part) {
    std::byte* const host = ring_.data() + started_++ * kPartBytes;
    return parts_->Start(tensor, part * kPartBytes, kPartBytes, host, writer_, [=, this] {
      told_.push_back(static_cast<int>(tensor * 100 + part));
      first_bytes_.push_back(std::to_integer<int>(host[0]));
      return client::Ticket{1000 + told_.size()};
    });
  }

  HostAccelerator device_;
  std::vector<std::byte> ring_;
  Stream writer_;
  std::vector<std::byte*> allocated_;
  std::unique_ptr<DeviceParts> parts_;
  size_t started_ = 0;
  int dropped_ = 0;
  bool is_broken_ = false, has_violations_ = false;
  std::vector<int> told_, first_bytes_;
};

TEST_F(DevicePartsTest, TheDaemonIsToldInOrderWhenTheBytesAreThere) {
  Make(64 * kPartBytes, 64 * kPartBytes);
  Give(1, 2, 11);
  Start(1, 0);
  Start(1, 1);
  parts_->Forget(1);
  Give(2, 1, 22);
  Start(2, 0);
  parts_->Forget(2);
  EXPECT_THAT(told_, IsEmpty());
  EXPECT_EQ(dropped_, 0);
  ASSERT_TRUE(parts_->Flush().ok());
  EXPECT_THAT(told_, ElementsAre(100, 101, 200));
  EXPECT_THAT(first_bytes_, ElementsAre(11, 11, 22));
  EXPECT_EQ(dropped_, 2);
}

TEST_F(DevicePartsTest, ATicketStandsForTheDaemons) {
  Make(64 * kPartBytes, 8 * kPartBytes);  // buckets of two parts
  Give(1, 4, 5);
  std::vector<client::Ticket> tickets;
  for (size_t part = 0; part < 4; ++part) tickets.push_back(Start(1, part));
  parts_->Forget(1);
  for (const client::Ticket ticket : tickets) EXPECT_TRUE(DeviceParts::IsOwn(ticket));
  EXPECT_EQ(*parts_->TicketOf(tickets[1]), 1002u);
  EXPECT_THAT(told_, ElementsAre(100, 101));  // its bucket, and no more
  EXPECT_EQ(*parts_->TicketOf(tickets[3]), 1004u);
  EXPECT_EQ(*parts_->TicketOf(tickets[0]), 1001u);
  EXPECT_FALSE(DeviceParts::IsOwn(1001));
}

TEST_F(DevicePartsTest, NoMoreIsOnItsWayThanFits) {
  Make(4 * kPartBytes, 64 * kPartBytes);
  for (uint32_t tensor = 0; tensor < 5; ++tensor) {
    Give(tensor, 3, 7);
    for (size_t part = 0; part < 3; ++part) Start(tensor, part);
    parts_->Forget(tensor);
  }
  EXPECT_GT(told_.size(), 0u);
  EXPECT_LE(parts_->bytes_max_ever(), 4 * kPartBytes);
  EXPECT_GT(parts_->bytes_max_ever(), kPartBytes);
  ASSERT_TRUE(parts_->Flush().ok());
  EXPECT_EQ(told_.size(), 15u);
  EXPECT_EQ(dropped_, 5);
}

// The checker of the stand-in judges all tests of this file: it finds what it should.
TEST_F(DevicePartsTest, ACopyThatDoesNotWaitForItsWriterIsFound) {
  Make(64 * kPartBytes, 64 * kPartBytes);
  Give(1, 1, 3);
  parts_->Start(1, 0, kPartBytes, ring_.data(), /*stream=*/{}, [] { return client::Ticket{1}; });
  parts_->Forget(1);
  ASSERT_TRUE(parts_->Flush().ok());
  has_violations_ = true;
}

class BrokenDeviceTest : public DevicePartsTest {
 protected:
  BrokenDeviceTest() : DevicePartsTest({.pace = Pace::kLate, .failing_copy = 2}) {
    is_broken_ = true;
  }
};

TEST_F(BrokenDeviceTest, NothingIsToldAfterAFailure) {
  Make(64 * kPartBytes, 64 * kPartBytes);
  Give(1, 3, 9);
  const client::Ticket first = Start(1, 0);
  Start(1, 1);
  Start(1, 2);
  parts_->Forget(1);
  EXPECT_FALSE(parts_->Flush().ok());
  EXPECT_FALSE(parts_->TicketOf(first).ok());
  EXPECT_THAT(told_, IsEmpty());
  EXPECT_EQ(dropped_, 1);
}

}  // namespace
}  // namespace offload::zero3
