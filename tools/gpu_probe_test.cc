#include "tools/gpu_probe.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Lines(const GpuProbe& probe) {
  std::vector<std::string> lines;
  for (const GpuFinding& finding : GpuFindings(probe))
    lines.push_back(finding.name + " | " + finding.detail + " | " + finding.fix);
  return lines;
}

TEST(GpuFindingsTest, AMachineWithoutADriverIsNoTrouble) {
  EXPECT_THAT(Lines({}), ElementsAre("none | no NVIDIA driver (libcuda.so.1) | "));
}

TEST(GpuFindingsTest, DevicesAreShownWithTheirMemory) {
  EXPECT_THAT(Lines({.has_driver = true,
                     .driver_version = 13010,
                     .devices = {{"NVIDIA H200", uint64_t{141} << 30}, {"Other", 1 << 20}}}),
              ElementsAre("cuda:0 | NVIDIA H200, 141.0 GiB, driver for CUDA 13.1 | ",
                          "cuda:1 | Other, 1.0 MiB, driver for CUDA 13.1 | "));
}

TEST(GpuFindingsTest, AnOldDriverHasAWayOut) {
  EXPECT_THAT(Lines({.has_driver = true, .driver_version = 12040, .devices = {{"Any", 1 << 30}}}),
              ElementsAre("driver | driver for CUDA 12.4, and CUDA 13 is needed | install NVIDIA "
                          "driver 580 or newer",
                          "cuda:0 | Any, 1.0 GiB, driver for CUDA 12.4 | "));
}

TEST(GpuFindingsTest, ADriverThatDoesNotStartIsNamed) {
  EXPECT_THAT(
      Lines(
          {.has_driver = true, .trouble = "cuInit fails with error 802", .driver_version = 13000}),
      ElementsAre(HasSubstr("cuInit fails with error 802")));
}

// tools/fake_gpu_driver.cc stands in for the driver: it is found by its name.
TEST(ProbeGpusTest, AsksTheDriver) {
  const GpuProbe probe = ProbeGpus();
  ASSERT_TRUE(probe.has_driver);
  EXPECT_EQ(probe.trouble, "");
  EXPECT_EQ(probe.driver_version, 13020);
  ASSERT_EQ(probe.devices.size(), 2u);
  EXPECT_EQ(probe.devices[1].name, "Fake GPU 1");
  EXPECT_EQ(probe.devices[1].memory_bytes, uint64_t{2} << 30);
}

}  // namespace
}  // namespace offload::tools
