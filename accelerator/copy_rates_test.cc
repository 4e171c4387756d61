// On the stand-in, and on a GPU where there is one.
#include "accelerator/copy_rates.h"

#include "accelerator/any_device.h"
#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

class CopyRatesTest : public AnyDeviceTest {};
OFFLOAD_ON_ANY_DEVICE(CopyRatesTest);

TEST_P(CopyRatesTest, EveryRateIsMeasured) {
  const auto rates = MeasureCopyRates(device_.get(), size_t{1} << 20);
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->to_device, 0);
  EXPECT_GT(rates->to_host, 0);
  EXPECT_GT(rates->both, 0);
}

// Copies are counted, in order, and everything is given back.
TEST(CopyRatesOfTheStandinTest, CopiesAsOftenAsItSays) {
  for (const bool registers_read_only : {true, false}) {
    HostAccelerator device({.registers_read_only = registers_read_only});
    const auto rates = MeasureCopyRates(&device, 4096);
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_EQ(rates->registers_slab, registers_read_only);
    EXPECT_EQ(device.counters().bytes_to_device, 10u * 4096);
    EXPECT_EQ(device.counters().bytes_to_host, 10u * 4096);
    EXPECT_THAT(device.Violations(), testing::IsEmpty());
    EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
  }
}

TEST(CopyRatesOfTheStandinTest, WhatADeviceRefusesIsReported) {
  HostAccelerator small({.memory_bytes = 4096});
  EXPECT_EQ(ErrorIdOf(MeasureCopyRates(&small, 4096).status()), ErrorId::kGpuMemory);
  EXPECT_THAT(small.Leftovers(), testing::IsEmpty());
  HostAccelerator pageable({.registers_read_write = false});
  EXPECT_EQ(ErrorIdOf(MeasureCopyRates(&pageable, 4096).status()), ErrorId::kGpuMissing);
  EXPECT_THAT(pageable.Leftovers(), testing::IsEmpty());
  HostAccelerator broken({.failing_copy = 7});
  EXPECT_FALSE(MeasureCopyRates(&broken, 4096).ok());
}

}  // namespace
}  // namespace offload::accelerator
