#include "tools/gpu_probe.h"

#include <filesystem>
#include <fstream>
#include <utility>

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

TEST(GpuFindingsTest, ALinkIsShownAndOneThatIsNarrowIsPointedAt) {
  EXPECT_THAT(Lines({.has_driver = true,
                     .driver_version = 13000,
                     .devices = {{"Wide", 1 << 30, PciLink{"32.0 GT/s", 16, 16}},
                                 {"Narrow", 1 << 30, PciLink{"16.0 GT/s", 4, 16}}}}),
              ElementsAre("cuda:0 | Wide, 1.0 GiB, PCIe 32.0 GT/s x16, driver for CUDA 13.0 | ",
                          "cuda:1 | Narrow, 1.0 GiB, PCIe 16.0 GT/s x4 of x16, driver for CUDA "
                          "13.0 | a slot with more lanes: weights and gradients go over this "
                          "link"));
}

TEST(GpuFindingsTest, AnInstanceOfADividedGpuIsExplained) {
  EXPECT_THAT(Lines({.has_driver = true,
                     .driver_version = 13000,
                     .devices = {{"NVIDIA H100 80GB HBM3 MIG 1g.10gb", uint64_t{10} << 30}}}),
              ElementsAre("cuda:0 | NVIDIA H100 80GB HBM3 MIG 1g.10gb, 10.0 GiB, driver for CUDA "
                          "13.0; an instance of a divided GPU (MIG): it shares the link with the "
                          "others, reaches none of them, and is the only one that a process sees "
                          "| "));
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
  // As the kernel shows the second one.
  const std::string pci = testing::TempDir() + "/pci";
  std::filesystem::create_directories(pci + "/0000:2a:00.0");
  for (const auto& [name, text] :
       {std::pair{"max_link_speed", "32.0 GT/s PCIe\n"},
        std::pair{"current_link_speed", "2.5 GT/s PCIe\n"}, std::pair{"max_link_width", "16\n"},
        std::pair{"current_link_width", "8\n"}})
    std::ofstream(pci + "/0000:2a:00.0/" + name) << text;
  const GpuProbe probe = ProbeGpus(pci);
  ASSERT_TRUE(probe.has_driver);
  EXPECT_EQ(probe.trouble, "");
  EXPECT_EQ(probe.driver_version, 13020);
  ASSERT_EQ(probe.devices.size(), 2u);
  EXPECT_EQ(probe.devices[1].name, "Fake GPU 1");
  EXPECT_EQ(probe.devices[1].memory_bytes, uint64_t{2} << 30);
  EXPECT_FALSE(probe.devices[0].link.has_value());
  ASSERT_TRUE(probe.devices[1].link.has_value());
  EXPECT_EQ(probe.devices[1].link->speed, "32.0 GT/s");
  EXPECT_EQ(probe.devices[1].link->lanes, 8);
  EXPECT_EQ(probe.devices[1].link->lanes_at_most, 16);
}

}  // namespace
}  // namespace offload::tools
