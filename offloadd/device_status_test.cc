#include "offloadd/device_status.h"

#include <gtest/gtest.h>

#include <cstddef>

#include "aio/faulty_device.h"
#include "aio/memory_device.h"

namespace offload::daemon {
namespace {

alignas(4096) std::byte page[4096];

TEST(DeviceStatusTest, TellsOperationsBytesLatenciesAndEachKindOfTrouble) {
  aio::FaultyDevice device(std::make_unique<aio::MemoryDevice>(1 << 20), {});
  device.AddFault({.kind = aio::FaultKind::kReadError, .nth = 2});
  device.AddFault({.kind = aio::FaultKind::kFlushError, .nth = 1});
  const iovec piece = {page, sizeof(page)};
  for (int i = 0; i < 3; ++i) device.Read(0, {&piece, 1}, [](absl::Status) {});
  device.Read(1, {&piece, 1}, [](absl::Status) {});
  device.Write(0, {&piece, 1}, [](absl::Status) {});
  device.Flush([](absl::Status) {});
  while (device.in_flight() > 0) device.Poll(/*wait=*/true);

  const proto::v1::DeviceStatus status = DescribeDevice("store", device);
  EXPECT_EQ(status.file(), "store");
  EXPECT_EQ(status.engine(), "memory");
  EXPECT_EQ(status.read().count(), 2u);
  EXPECT_EQ(status.read().bytes(), 8192u);
  EXPECT_EQ(status.read().errors(), 1u);
  EXPECT_GT(status.read().p50_seconds(), 0);
  EXPECT_GE(status.read().max_seconds(), status.read().p99_seconds());
  EXPECT_EQ(status.write().count(), 1u);
  EXPECT_EQ(status.write().errors(), 0u);
  EXPECT_EQ(status.flush().count(), 0u);
  EXPECT_EQ(status.flush().errors(), 1u);
  EXPECT_EQ(status.flush().p99_seconds(), 0);
  EXPECT_EQ(status.refusals(), 1u);
  EXPECT_EQ(status.in_flight(), 0u);
  ASSERT_EQ(status.read().latency_counts_size(), status.latency_bounds_seconds_size());
  for (int i = 1; i < status.latency_bounds_seconds_size(); ++i) {
    EXPECT_NEAR(status.latency_bounds_seconds(i) / status.latency_bounds_seconds(i - 1), 4, 1e-9);
    EXPECT_GE(status.read().latency_counts(i), status.read().latency_counts(i - 1));
  }
  EXPECT_EQ(status.read().latency_counts(status.read().latency_counts_size() - 1), 2u);
  EXPECT_GT(status.read().sum_seconds(), 0);
}

}  // namespace
}  // namespace offload::daemon
