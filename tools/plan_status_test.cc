#include "tools/plan_status.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace offload::tools {
namespace {

// Of twenty steps with four checkpoints: each reads 2 GB, as planned, and writes a tenth more.
proto::v1::JobStatus Sample() {
  proto::v1::JobStatus job;
  job.set_job("train");
  proto::v1::PlanStatus& plan = *job.mutable_plan();
  plan.mutable_step()->set_weight_read_bytes(500'000'000);
  plan.mutable_step()->set_state_read_bytes(1'400'000'000);
  plan.mutable_step()->set_gradient_read_bytes(100'000'000);
  plan.mutable_step()->set_gradient_written_bytes(100'000'000);
  plan.mutable_step()->set_written_bytes(700'000'000);
  plan.mutable_step()->set_checkpoint_bytes(1'000'000'000);
  plan.mutable_step()->set_memory_bytes(1ull << 30);
  plan.mutable_step()->set_order_known(true);
  plan.mutable_depths()->set_update_threads(4);
  plan.mutable_assumed()->set_read_bytes_per_second(2e9);
  plan.mutable_assumed()->set_write_bytes_per_second(5e8);
  plan.mutable_measured()->set_read_bytes_per_second(1.9e9);
  plan.mutable_steps()->set_first_step(3);
  plan.mutable_steps()->set_step_count(20);
  plan.mutable_steps()->set_checkpoints(4);
  plan.mutable_steps()->set_bytes_read(40'000'000'000);
  plan.mutable_steps()->set_bytes_written(22'000'000'000);
  plan.mutable_steps()->set_seconds(50);
  plan.mutable_steps()->set_compute_seconds(30);
  plan.mutable_steps()->set_peak_bytes(1ull << 29);
  return job;
}

TEST(PlanStatusTest, StepsAreComparedWithThePlanAndTheCheckpointsThatThereWere) {
  const auto compared = ComparePlan(Sample().plan());
  ASSERT_TRUE(compared.has_value());
  EXPECT_DOUBLE_EQ(*compared->read_bytes.Ratio(), 1);
  EXPECT_DOUBLE_EQ(compared->written_bytes.planned, 1e9);  // 0.8 and a fifth of a checkpoint
  EXPECT_DOUBLE_EQ(*compared->written_bytes.Ratio(), 1.1);
  EXPECT_DOUBLE_EQ(compared->drive_seconds, 2);  // of writes
  EXPECT_DOUBLE_EQ(compared->compute_seconds, 1.5);
  EXPECT_DOUBLE_EQ(*compared->seconds.Ratio(), 1.25);
  EXPECT_DOUBLE_EQ(*compared->memory_bytes.Ratio(), 0.5);
}

TEST(PlanStatusTest, NineStepsAreNotCompared) {
  proto::v1::JobStatus job = Sample();
  job.mutable_plan()->mutable_steps()->set_step_count(9);
  EXPECT_FALSE(ComparePlan(job.plan()).has_value());
  EXPECT_TRUE(DescribePlanStatus(job)["comparison"].is_null());
  EXPECT_TRUE(absl::StrContains(PlanTable(job), "Compared after 10 steps"));
  EXPECT_TRUE(DescribePlanStatus(proto::v1::JobStatus()).is_null());
  EXPECT_EQ(PlanLines(proto::v1::JobStatus()), "");
  EXPECT_EQ(PlanTable(proto::v1::JobStatus()), "");
}

TEST(PlanStatusTest, PeopleSeePlannedAndMeasuredWithTheirRatio) {
  const std::string lines = PlanLines(Sample());
  EXPECT_TRUE(absl::StrContains(lines, "reads 2.00 GB, writes 800 MB, a checkpoint 1.00 GB more"))
      << lines;
  EXPECT_TRUE(absl::StrContains(lines, "pool assumed 2.00r/0.50w GB/s, measured 1.90r/?w GB/s"))
      << lines;
  EXPECT_TRUE(absl::StrContains(lines, "20 steps from 3 on")) << lines;
  EXPECT_TRUE(absl::StrContains(lines, "read 2.00 GB of 2.00 GB (1.00)")) << lines;
  EXPECT_TRUE(absl::StrContains(lines, "written 1.10 GB of 1.00 GB (1.10)")) << lines;
  EXPECT_TRUE(
      absl::StrContains(lines, "took 2.5 s, at least 2 s of drive and 1.5 s of ranks (1.25)"))
      << lines;
  EXPECT_FALSE(absl::StrContains(lines, "replanned"));
  const std::string table = PlanTable(Sample());
  EXPECT_TRUE(absl::StrContains(
      table, "<tr><td>written to it</td><td>1.00 GB</td><td>1.10 GB</td><td>1.10</td></tr>"))
      << table;
}

TEST(PlanStatusTest, ReplansAreShownAsText) {
  proto::v1::JobStatus job = Sample();
  job.mutable_plan()->set_replans(2);
  job.mutable_plan()->set_last_replan("before step 40: the <pool> is slow");
  EXPECT_TRUE(absl::StrContains(PlanLines(job), "replanned 2 times, last before step 40"));
  job.mutable_plan()->set_replans(1);
  EXPECT_TRUE(absl::StrContains(PlanLines(job), "replanned once, before step 40"));
  EXPECT_TRUE(absl::StrContains(PlanTable(job), "Replanned once, before step 40"));
  EXPECT_TRUE(absl::StrContains(PlanTable(job), "the &lt;pool&gt; is slow"));
  EXPECT_EQ(DescribePlanStatus(job)["replans"], 1);
}

// With everything in memory nothing is planned for the drive.
TEST(PlanStatusTest, NothingPlannedHasNoRatio) {
  proto::v1::JobStatus job = Sample();
  job.mutable_plan()->mutable_step()->Clear();
  job.mutable_plan()->mutable_assumed()->Clear();
  const auto compared = ComparePlan(job.plan());
  ASSERT_TRUE(compared.has_value());
  EXPECT_FALSE(compared->read_bytes.Ratio().has_value());
  EXPECT_EQ(compared->drive_seconds, 0);
  EXPECT_TRUE(DescribePlanStatus(job)["comparison"]["read_bytes"]["ratio"].is_null());
}

TEST(PlanStatusTest, OperationsAreSixForEachTrainedElementAndTokenAndFourForAFrozenOne) {
  EXPECT_DOUBLE_EQ(EstimateOperations(100, 100, 7), 6.0 * 100 * 7);
  EXPECT_DOUBLE_EQ(EstimateOperations(100, 0, 7), 4.0 * 100 * 7);
}

}  // namespace
}  // namespace offload::tools
