#include "tools/plan_report.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/gpu/gpu_traffic.h"
#include "zero3/model_shapes.h"

namespace offload::tools {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

PlanReport ReportFor(uint64_t parameters, uint64_t ram_bytes) {
  PlanReport report;
  const auto shape = zero3::ShapeForParameters({.parameters = parameters});
  EXPECT_TRUE(shape.ok()) << shape.status();
  report.model = zero3::Describe(*shape);
  auto catalogue = proto::BuildCatalogue(zero3::LlamaTensors(*shape, proto::Dtype::kBFloat16));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  report.input.catalogue = *std::move(catalogue);
  report.input.ram_bytes = ram_bytes;
  return report;
}

zero3::Plan PlanFor(const PlanReport& report) {
  auto plan = zero3::MakePlan(report.input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

GpuTier TierFor(const PlanReport& report, uint64_t gpu_ram_bytes) {
  const auto tensors = zero3::GpuTensorsOf(report.input.catalogue.tensors);
  const auto plan = zero3::MakeGpuPlan(tensors, gpu_ram_bytes);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return {gpu_ram_bytes, *plan, zero3::PlanLinkTraffic(tensors, *plan, report.micro_batches),
          std::nullopt};
}

TEST(PlanReportTest, AGpuIsOneTierMore) {
  PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  EXPECT_EQ(ReportPlan(report, plan).text.find("gpu_ram"), std::string::npos);
  const uint64_t gpu_ram_bytes = 100 * kMebibyte;
  report.gpu = TierFor(report, gpu_ram_bytes);
  const Answer answer = ReportPlan(report, plan);
  EXPECT_NE(answer.text.find("gpu_ram: 100.0 MiB, window of weights "), std::string::npos)
      << answer.text;
  EXPECT_LE(answer.data["gpu"]["window_bytes"].get<uint64_t>() +
                answer.data["gpu"]["gradient_bytes"].get<uint64_t>(),
            gpu_ram_bytes);
  EXPECT_EQ(answer.text.find("weights: gathered"), std::string::npos);
  report.input.world_size = 2;
  EXPECT_NE(ReportPlan(report, PlanFor(report)).text.find("weights: gathered where the ranks'"),
            std::string::npos);
}

TEST(PlanReportTest, EachMemoryHasALineAndTheLinkItsBytes) {
  PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  report.micro_batches = 2;
  report.gpu = TierFor(report, 4096 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  const Answer answer = ReportPlan(report, plan);
  for (const char* line :
       {"\nTier      gpu_ram 4.0 GiB: all ", "\nTier      ram 256.0 MiB: ", "\nTier      drive "})
    EXPECT_NE(answer.text.find(line), std::string::npos) << line << "\n" << answer.text;
  EXPECT_EQ(answer.data["link"]["to_device_bytes"].get<uint64_t>(),
            2 * plan.parameter_count)  // bf16, once
      << "all weights stay from pass to pass";
  EXPECT_EQ(answer.data["link"]["to_host_bytes"].get<uint64_t>(), 2 * plan.gradient_bytes);
  EXPECT_FALSE(answer.data["link"].contains("seconds")) << "no rates";
  EXPECT_FALSE(answer.data.contains("bound"));
}

TEST(PlanReportTest, AStepTakesTheLongestOfComputationLinkAndDrive) {
  PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  report.gpu = TierFor(report, 4096 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  EXPECT_STREQ(BoundOf(report, plan).bound_by, "");
  report.gpu->link = Link{.to_device = 1e9, .to_host = 0.5e9, .source = "given"};
  const double link = static_cast<double>(plan.gradient_bytes) / 0.5e9;
  EXPECT_DOUBLE_EQ(*BoundOf(report, plan).link, link);
  report.gpu->link->both = 0.1e9;
  EXPECT_DOUBLE_EQ(*BoundOf(report, plan).link, 2 * static_cast<double>(plan.gradient_bytes) / 1e8);
  report.gpu->link->both = 0;
  report.drive = Drive{.read = 1e9, .write = 1e9, .mixed = 1e8, .source = "given"};
  StepBound bound = BoundOf(report, plan);
  EXPECT_STREQ(bound.bound_by, "drive");
  EXPECT_DOUBLE_EQ(bound.seconds, *bound.drive);
  EXPECT_FALSE(bound.compute.has_value());
  report.compute_seconds = 1000;
  bound = BoundOf(report, plan);
  EXPECT_STREQ(bound.bound_by, "compute");
  EXPECT_DOUBLE_EQ(bound.seconds, 1000) << "a device computes beside the stream";
  const Answer answer = ReportPlan(report, plan);
  EXPECT_EQ(answer.data["bound"]["bound_by"], "compute");
  EXPECT_NE(answer.text.find("\nStep      1000 s at least, the compute's: "), std::string::npos)
      << answer.text;
  EXPECT_NE(answer.text.find("\nLink      "), std::string::npos) << answer.text;
}

// Of one that does both with the same cores.
TEST(PlanReportTest, AProcessorComputesLongerBesideTheDrive) {
  PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  report.compute_seconds = 1000;
  EXPECT_DOUBLE_EQ(BoundOf(report, plan).seconds, 1000) << "no rates: nothing is known of a stream";
  report.drive = Drive{.read = 1e9, .write = 1e9, .source = "given"};
  EXPECT_DOUBLE_EQ(BoundOf(report, plan).seconds, 1300);
  report.drive = Drive{.read = 1e5, .write = 1e5, .source = "given"};
  EXPECT_STREQ(BoundOf(report, plan).bound_by, "drive");
}

TEST(PlanReportTest, ADriveThatDoesBothAtOnceIsBoundedByTheSlowerDirection) {
  const StepSeconds seconds =
      SecondsOf({.read_bytes = 14e9, .written_bytes = 12e9}, {.read = 7e9, .write = 4e9});
  EXPECT_DOUBLE_EQ(seconds.overlapped, 3);
  EXPECT_DOUBLE_EQ(seconds.serial, 5);
  EXPECT_FALSE(seconds.mixed.has_value());
}

TEST(PlanReportTest, TheMixedRateCountsBothDirections) {
  const StepSeconds seconds = SecondsOf({.read_bytes = 14e9, .written_bytes = 12e9},
                                        {.read = 7e9, .write = 4e9, .mixed = 6.5e9});
  EXPECT_DOUBLE_EQ(seconds.mixed.value(), 4);
}

TEST(PlanReportTest, FurtherMicroBatchesOnlyReadWhileGradientsStayInMemory) {
  const PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  ASSERT_FALSE(plan.gradients_spilled);
  const Traffic one = TrafficOf(plan, 1), three = TrafficOf(plan, 3);
  EXPECT_DOUBLE_EQ(three.written_bytes, one.written_bytes);
  EXPECT_NEAR(three.read_bytes - one.read_bytes,
              2 * plan.bytes_per_further_micro_batch * static_cast<double>(plan.parameter_count),
              1);
}

TEST(PlanReportTest, SpilledGradientsAreReadAndWrittenInEveryMicroBatch) {
  const PlanReport report = ReportFor(50'000'000, 80 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  ASSERT_TRUE(plan.gradients_spilled);
  const Traffic one = TrafficOf(plan, 1), two = TrafficOf(plan, 2);
  EXPECT_NEAR(two.written_bytes - one.written_bytes, static_cast<double>(plan.memory.scratch_bytes),
              1);
}

TEST(PlanReportTest, AdviceNamesABudgetThatKeepsItsPromise) {
  PlanReport report = ReportFor(50'000'000, 80 * kMebibyte);
  const zero3::Plan plan = PlanFor(report);
  const Answer answer = ReportPlan(report, plan);
  ASSERT_TRUE(answer.data.contains("advice")) << answer.text;
  report.input.ram_bytes = answer.data["advice"]["ram_bytes"].get<uint64_t>();
  const zero3::Plan better = PlanFor(report);
  const Traffic before = TrafficOf(plan, 1), after = TrafficOf(better, 1);
  EXPECT_NEAR(before.read_bytes + before.written_bytes - after.read_bytes - after.written_bytes,
              answer.data["advice"]["saved_bytes_per_step"].get<double>(), 2);
}

TEST(PlanReportTest, TheLifeOfADriveFollowsTheCheckpoints) {
  PlanReport report = ReportFor(50'000'000, 4096 * kMebibyte);
  const Answer every = ReportPlan(report, PlanFor(report));
  EXPECT_FALSE(every.data.contains("checkpoint"));
  report.input.durability = {.steps = 100};
  const zero3::Plan plan = PlanFor(report);
  const Answer hundredth = ReportPlan(report, plan);
  EXPECT_EQ(hundredth.data["checkpoint"]["written_bytes"], plan.checkpoint_bytes);
  EXPECT_EQ(hundredth.data["checkpoint"]["steps"], 100);
  EXPECT_NEAR(hundredth.data["per_step"]["written_bytes"].get<double>() * 100,
              every.data["per_step"]["written_bytes"].get<double>(), 100)
      << "everything stays in memory";
  report.input.durability = {.steps = 0, .seconds = 600};
  const Answer timed = ReportPlan(report, PlanFor(report));
  EXPECT_EQ(timed.data["checkpoint"]["seconds"], 600);
  EXPECT_EQ(timed.data["per_step"]["written_bytes"], 0);
  EXPECT_FALSE(timed.data.contains("advice")) << timed.text;
  EXPECT_NE(timed.text.find("0 B written per step and "), std::string::npos) << timed.text;
}

TEST(PlanReportTest, RanksAndStagesAreComparedWhereThereIsSomethingToDivide) {
  PlanReport report = ReportFor(50'000'000, 512 * kMebibyte);
  EXPECT_FALSE(ReportPlan(report, PlanFor(report)).data.contains("zero_stages"));
  report.input.world_size = 4;
  const Answer answer = ReportPlan(report, PlanFor(report));
  ASSERT_EQ(answer.data["zero_stages"].size(), 4u) << answer.text;
  EXPECT_GT(answer.data["zero_stages"][0]["unshared_bytes"],
            answer.data["zero_stages"][3]["unshared_bytes"]);
  EXPECT_NE(answer.text.find("ZeRO stages, 4 ranks of one node"), std::string::npos) << answer.text;
}

TEST(PlanReportTest, AFullDriveIsRefusedAfterTheSumsAreShown) {
  PlanReport report = ReportFor(50'000'000, 256 * kMebibyte);
  report.pool = "/nvme0";
  report.free_bytes = kMebibyte;
  const Answer answer = ReportPlan(report, PlanFor(report));
  EXPECT_EQ(answer.exit_code, kDoesNotFit);
  EXPECT_EQ(ErrorIdOf(answer.problem), ErrorId::kPoolFull);
  EXPECT_FALSE(answer.data["fits"].get<bool>());
  EXPECT_NE(answer.text.find("DOES NOT FIT"), std::string::npos);
}

TEST(PlanReportTest, ARefusalNamesFloorsThatRun) {
  PlanReport report = ReportFor(50'000'000, kMebibyte);
  const auto refused = zero3::MakePlan(report.input);
  ASSERT_FALSE(refused.ok());
  const Answer answer = ReportRefusal(report, refused.status());
  EXPECT_EQ(answer.exit_code, kDoesNotFit);
  for (const char* floor : {"floor_bytes", "floor_without_spilling_bytes"}) {
    report.input.ram_bytes = answer.data[floor].get<uint64_t>();
    EXPECT_TRUE(zero3::MakePlan(report.input).ok()) << floor;
    --report.input.ram_bytes;
    const auto below = zero3::MakePlan(report.input);
    EXPECT_TRUE(!below.ok() || below->gradients_spilled) << floor;
  }
}

}  // namespace
}  // namespace offload::tools
