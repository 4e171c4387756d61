#include "tools/top_view.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace offload::tools {
namespace {

const DaemonAddress kAddress = {"/run/offloadd/offloadd.sock", false};

// A job in its 118th step: ten seconds, of which three waited.
proto::v1::JobStatus Sample() {
  proto::v1::JobStatus job;
  job.set_job("train");
  job.set_pool("/nvme0");
  job.set_step(118);
  job.set_durable_step(117);
  job.set_bytes_read(5'000'000'000);
  job.set_ram_bytes(64ull << 30);
  job.set_resident_bytes(61ull << 30);
  proto::v1::StepRecord* const last = job.mutable_last_step();
  last->set_first_step(118);
  last->set_last_step(118);
  last->set_seconds(10);
  last->set_bytes_read(1'129'000'000'000);
  last->set_bytes_written(988'000'000'000);
  for (const double seconds : {4.0, 5.0, 1.0}) last->mutable_figures()->add_phase_seconds(seconds);
  for (int i = 0; i < 18; ++i) last->mutable_figures()->add_stall_seconds(0);
  last->mutable_figures()->set_stall_seconds(1, 2);         // forward, late
  last->mutable_figures()->set_stall_seconds(6 + 1, 0.5);   // backward, late
  last->mutable_figures()->set_stall_seconds(12 + 3, 0.5);  // step, commit
  for (const int count : {98, 1, 1}) last->mutable_figures()->add_prefetches(count);
  proto::v1::RankStatus* const rank = job.add_ranks();
  rank->set_pid(4242);
  rank->set_phase("mapped");
  rank->set_step(118);
  rank->set_position(33);
  return job;
}

TwoAnswers Answers(const proto::v1::JobStatus& job) {
  TwoAnswers answers;
  proto::v1::JobStatus before = job;
  before.set_bytes_read(job.bytes_read() - 2'000'000'000);
  *answers.jobs_before.Add() = before;
  *answers.reply.add_jobs() = job;
  answers.reply.set_version("0.3.0");
  answers.seconds = 2;
  return answers;
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(TopViewTest, ShowsTheLastStepItsWaitsAndTheDrive) {
  const std::vector<std::string> lines = Lines(TopText(kAddress, Answers(Sample())));
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_EQ(lines[1],
            "JOB              STEP  COMMIT   S/STEP  STALL  ON TIME   READ/STEP  WRITTEN/STEP");
  EXPECT_EQ(lines[2],
            "train             118     117       10    30%      98%     1.13 TB        988 GB");
  EXPECT_EQ(lines[3], "  forward 4 s backward 5 s step 1 s  waits: late 25%  commit 5%");
  EXPECT_NE(lines[4].find("nvme 1.00r 0.00w GB/s"), std::string::npos) << lines[4];
  EXPECT_NE(lines[4].find("ram 61.0 GiB of 64.0 GiB"), std::string::npos) << lines[4];
  EXPECT_EQ(lines[5], "  rank 0  pid 4242  mapped  step 118  touch 33");
}

TEST(TopViewTest, ShowsThePlanBesideWhatStepsWere) {
  proto::v1::JobStatus job = Sample();
  EXPECT_TRUE(DescribeTop(kAddress, Answers(job))["jobs"][0]["plan"].is_null());
  proto::v1::PlanStatus* const plan = job.mutable_plan();
  plan->mutable_step()->set_weight_read_bytes(1'000'000'000);
  plan->mutable_step()->set_state_read_bytes(500'000'000);
  plan->mutable_step()->set_written_bytes(1'300'000'000);
  plan->mutable_steps()->set_first_step(2);
  plan->mutable_steps()->set_step_count(9);
  EXPECT_EQ(Lines(TopText(kAddress, Answers(job)))[5], "  plan 1.50 GB read 1.30 GB written");
  plan->mutable_steps()->set_step_count(10);
  plan->mutable_steps()->set_bytes_read(15'300'000'000);
  plan->mutable_steps()->set_bytes_written(12'870'000'000);
  plan->mutable_steps()->set_seconds(22);
  plan->mutable_steps()->set_compute_seconds(20);
  plan->set_replans(3);
  EXPECT_EQ(Lines(TopText(kAddress, Answers(job)))[5],
            "  plan 1.50 GB read 1.30 GB written  measured 1.02r 0.99w  time 1.10  replans 3");
  EXPECT_DOUBLE_EQ(
      DescribeTop(kAddress, Answers(job))["jobs"][0]["plan"]["comparison"]["read_bytes"]["ratio"],
      1.02);
}

TEST(TopViewTest, FitsEightyColumnsWhateverTheNumbersAre) {
  proto::v1::JobStatus job = Sample();
  job.set_job(std::string(300, 'x'));
  job.set_step(UINT64_MAX);
  job.set_durable_step(UINT64_MAX);
  job.mutable_last_step()->set_seconds(1e300);
  job.mutable_last_step()->set_bytes_read(UINT64_MAX);
  for (double& seconds : *job.mutable_last_step()->mutable_figures()->mutable_phase_seconds())
    seconds = 1e200;
  for (double& seconds : *job.mutable_last_step()->mutable_figures()->mutable_stall_seconds())
    seconds = 1e299;
  job.mutable_plan()->mutable_step()->set_state_read_bytes(UINT64_MAX);
  job.mutable_plan()->mutable_step()->set_written_bytes(UINT64_MAX);
  job.mutable_plan()->mutable_steps()->set_step_count(10);
  job.mutable_plan()->mutable_steps()->set_seconds(1e300);
  job.mutable_plan()->mutable_steps()->set_compute_seconds(1);
  job.mutable_plan()->set_replans(UINT64_MAX);
  proto::v1::GpuStatus* const gpu = job.mutable_ranks(0)->mutable_gpu();
  gpu->set_device(std::string(300, 'x'));
  gpu->set_used_bytes(UINT64_MAX);
  gpu->set_stall_seconds(1e300);
  const DaemonAddress far = {absl::StrCat("/", std::string(200, 'y')), true};
  for (const std::string& line : Lines(TopText(far, Answers(job))))
    EXPECT_LE(line.size(), kTopColumns) << line;
}

TEST(TopViewTest, AJobWithoutAStepSaysWhatItDoes) {
  proto::v1::JobStatus job;
  job.set_job("new\x1b[31m");
  job.set_phase("formatting");
  const std::string text = TopText(kAddress, Answers(job));
  EXPECT_NE(text.find("new?[31m"), std::string::npos) << text;
  EXPECT_NE(text.find("formatting"), std::string::npos) << text;
  EXPECT_TRUE(DescribeTop(kAddress, Answers(job))["jobs"][0]["last_step"].is_null());
}

// Two seconds after another look.
TwoAnswers AnswersOfADevice() {
  proto::v1::JobStatus job = Sample();
  proto::v1::GpuStatus* const gpu = job.mutable_ranks(0)->mutable_gpu();
  gpu->set_device("cuda:0");
  gpu->set_gpu_ram_bytes(20ull << 30);
  gpu->set_window_bytes(15ull << 30);
  gpu->set_used_bytes(18ull << 30);
  gpu->set_peak_bytes(19ull << 30);
  gpu->set_bytes_to_device(30'000'000'000);
  gpu->set_bytes_to_host(3'000'000'000);
  gpu->set_stall_seconds(5.5);
  gpu->set_host_waits(4);
  TwoAnswers answers = Answers(job);
  proto::v1::GpuStatus* const before =
      answers.jobs_before.Mutable(0)->mutable_ranks(0)->mutable_gpu();
  before->set_bytes_to_device(10'000'000'000);
  before->set_bytes_to_host(2'000'000'000);
  before->set_stall_seconds(5.44);
  return answers;
}

TEST(TopViewTest, ShowsTheDeviceOfARankThatHasOne) {
  const TwoAnswers answers = AnswersOfADevice();
  EXPECT_EQ(Lines(TopText(kAddress, answers))[6],
            "    cuda:0  18.0 GiB of 20.0 GiB, peak 19.0 GiB  10.00in 0.50out GB/s  stall 3%");
  const Json gpu = DescribeTop(kAddress, answers)["jobs"][0]["ranks"][0]["gpu"];
  EXPECT_EQ(gpu["window_bytes"], 15ull << 30);
  EXPECT_EQ(gpu["host_waits"], 4);
  EXPECT_DOUBLE_EQ(gpu["to_device_bytes_per_second"], 1e10);
  EXPECT_NEAR(gpu["stall_share"], 0.03, 1e-9);
  EXPECT_TRUE(DescribeTop(kAddress, Answers(Sample()))["jobs"][0]["ranks"][0]["gpu"].is_null());
}

// Its region is new, and the words in it begin at zero.
TEST(TopViewTest, ARankThatHasJoinedAgainHasNoRatesYet) {
  TwoAnswers answers = AnswersOfADevice();
  answers.jobs_before.Mutable(0)->mutable_ranks(0)->set_pid(1);
  EXPECT_EQ(Lines(TopText(kAddress, answers))[6],
            "    cuda:0  18.0 GiB of 20.0 GiB, peak 19.0 GiB  0.00in 0.00out GB/s  stall 0%");
}

TEST(TopViewTest, RecordsOfSeveralStepsAreShownPerStep) {
  proto::v1::JobStatus job = Sample();
  job.mutable_last_step()->set_first_step(109);
  const std::vector<std::string> lines = Lines(TopText(kAddress, Answers(job)));
  EXPECT_NE(lines[2].find("       1    30%"), std::string::npos) << lines[2];
  EXPECT_NE(lines[2].find("113 GB"), std::string::npos) << lines[2];
}

TEST(TopViewTest, NumbersAreTheSameAsJson) {
  const Json job = DescribeTop(kAddress, Answers(Sample()))["jobs"][0];
  EXPECT_EQ(job["step"], 118);
  EXPECT_EQ(job["read_bytes_per_second"], 1e9);
  EXPECT_DOUBLE_EQ(job["last_step"]["stall_share"], 0.3);
  EXPECT_EQ(job["last_step"]["stall_seconds"]["backward"]["late"], 0.5);
  EXPECT_EQ(job["last_step"]["phase_seconds"]["forward"], 4);
  EXPECT_EQ(job["last_step"]["prefetches"]["on_time"], 98);
  EXPECT_EQ(job["ranks"][0]["pid"], 4242);
}

TEST(TopViewTest, ClipCountsCharactersNotBytes) {
  EXPECT_EQ(Clip("abc", 5), "abc");
  EXPECT_EQ(Clip("abc", 2), "ab");
  EXPECT_EQ(Clip("äöü", 2), "äö");
}

}  // namespace
}  // namespace offload::tools
