#include "examples/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace offload::examples {
namespace {

StepReport SomeStep() {
  StepReport report;
  report.step = 118;
  report.steps = 2000;
  report.loss = 2.1130000352859497;
  report.grad_norm = 1.02;
  report.tokens = 4000;
  report.seconds = {.forward = 5, .backward = 12, .step = 3, .wait = 5};
  report.bytes_read = 270'000'000'000;
  report.bytes_written = 160'000'000'000;
  return report;
}

TEST(ReportTest, LossKeepsAllItsDigits) {
  std::ostringstream out;
  Reporter(true, out).Step(SomeStep());
  const auto line = nlohmann::json::parse(out.str());
  EXPECT_EQ(line.at("event"), "step");
  EXPECT_EQ(line.at("loss").get<double>(), SomeStep().loss);
  EXPECT_EQ(line.at("seconds").at("wait").get<double>(), 5.0);
  EXPECT_EQ(out.str().find('\n'), out.str().size() - 1) << "one object, one line";
}

TEST(ReportTest, StartLineHasTheFieldsThatProgramsReadFirst) {
  std::ostringstream out;
  StartReport report;
  report.parameters = 5;
  report.resumed_step = 3;
  Reporter(true, out).Start(report);
  const auto line = nlohmann::json::parse(out.str());
  EXPECT_EQ(line.at("parameters"), 5);
  EXPECT_EQ(line.at("resumed_step"), 3);
  EXPECT_TRUE(line.contains("state_bytes"));
  EXPECT_TRUE(line.contains("ram_bytes"));
}

TEST(ReportTest, ProgressLineSaysShareRateStallAndEta) {
  EXPECT_EQ(ProgressLine(SomeStep()),
            "step 118/2000 [ 5.9%] | 20.00 s | loss 2.1130 | norm 1.02 | 200 tok/s | stall 25% | "
            "nvme 13.50r/8.00w GB/s | eta 10h27m");
}

TEST(ReportTest, ThePlanStandsBesideWhatWasMeasured) {
  const PlanComparison comparison = {.steps = 10,
                                     .planned_read_bytes = 1.5e9,
                                     .planned_write_bytes = 1.25e9,
                                     .read_bytes = 1.501e9,
                                     .written_bytes = 1.26e9,
                                     .planned_memory_bytes = 300 << 20,
                                     .peak_bytes = 280 << 20};
  EXPECT_EQ(PlanLine(comparison),
            "the first 10 steps: read 1.501 GB a step (planned 1.500), wrote 1.260 GB (planned "
            "1.250), at most 280.0 MiB of 300.0 MiB planned in memory");
  std::ostringstream out;
  Reporter(true, out).Plan(comparison);
  const auto line = nlohmann::json::parse(out.str());
  EXPECT_EQ(line.at("event"), "plan");
  EXPECT_EQ(line.at("planned").at("write_bytes_per_step"), 1.25e9);
  EXPECT_EQ(line.at("measured").at("write_bytes_per_step"), 1.26e9);
}

TEST(ReportTest, EndHasTheChecksumsThatWereAskedFor) {
  std::ostringstream with, without;
  Reporter(true, with).End(3, 2, {{"weight", 7}});
  EXPECT_EQ(nlohmann::json::parse(with.str()).at("checksums").at("weight"), 7);
  Reporter(true, without).End(3, 2, {});
  EXPECT_FALSE(nlohmann::json::parse(without.str()).contains("checksums"));
}

TEST(ReportTest, SampleOfArbitraryBytesIsStillJson) {
  std::ostringstream out;
  Reporter(true, out).Sample(1, "a\xff\x1b\"\n");
  EXPECT_EQ(nlohmann::json::parse(out.str()).at("text"), "a..\"\n");
}

}  // namespace
}  // namespace offload::examples
