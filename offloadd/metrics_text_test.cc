#include "offloadd/metrics_text.h"

#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

proto::v1::StatusReply Sample() {
  proto::v1::StatusReply status;
  status.set_version("1.2.3");
  status.set_uptime_seconds(12.5);
  proto::v1::JobStatus* const job = status.add_jobs();
  job->set_job("train#1");
  job->set_pool("/nvme \"0\"\\\n");
  job->set_step(118);
  job->set_durable_step(117);
  job->add_ranks();
  proto::v1::GpuStatus* const gpu = job->mutable_ranks(0)->mutable_gpu();
  gpu->set_device("cuda:1");
  gpu->set_gpu_ram_bytes(20ull << 30);
  gpu->set_bytes_to_device(123456);
  gpu->set_stall_seconds(0.25);
  for (int i = 0; i < 3; ++i) job->mutable_figures()->add_phase_seconds(i + 0.5);
  for (int i = 0; i < 18; ++i) job->mutable_figures()->add_stall_seconds(i);
  for (int i = 0; i < 3; ++i) job->mutable_figures()->add_prefetches(i + 10);
  job->mutable_updates_ahead()->set_used(41);
  job->mutable_updates_ahead()->set_lost(2);
  job->mutable_plan()->mutable_step()->set_weight_read_bytes(30);
  job->mutable_plan()->mutable_step()->set_state_read_bytes(12);
  job->mutable_plan()->set_replans(3);
  job->mutable_durations()->add_upper_seconds(0.1);
  job->mutable_durations()->add_upper_seconds(1);
  job->mutable_durations()->add_counts(2);
  job->mutable_durations()->add_counts(5);
  job->mutable_durations()->set_count(7);
  job->mutable_durations()->set_sum_seconds(9);
  job->mutable_resident()->set_weights(1ull << 53);
  proto::v1::DeviceStatus* const device = job->add_devices();
  device->set_file("store");
  device->set_in_flight(3);
  device->add_latency_bounds_seconds(0.001);
  device->mutable_read()->set_bytes(4096);
  device->mutable_read()->set_count(1);
  device->mutable_read()->add_latency_counts(1);
  proto::v1::JobStatus* const busy = status.add_jobs();
  busy->set_job("busy");
  busy->set_phase("busy");
  return status;
}

// Sample line → value; fails the test where the text is not in Prometheus' format.
std::map<std::string, double> Parse(const std::string& text) {
  static const std::regex kSample(
      R"re(([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\S+))re");
  std::map<std::string, double> samples;
  std::map<std::string, std::string> types;
  EXPECT_TRUE(absl::EndsWith(text, "\n"));
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(text, '\n', absl::SkipEmpty()))) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "# TYPE ")) {
      EXPECT_TRUE(types.emplace(words[2], words[3]).second) << line << ": once per metric";
    }
    if (absl::StartsWith(line, "#")) continue;
    std::smatch match;
    if (!std::regex_match(line, match, kSample)) {
      ADD_FAILURE() << line;
      continue;
    }
    std::string family = match[1];
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      const std::string base = family.substr(0, family.rfind(suffix));
      if (absl::EndsWith(family, suffix) && types.count(base) != 0 && types[base] == "histogram")
        family = base;
    }
    EXPECT_EQ(types.count(family), 1u) << line << ": its type comes first";
    EXPECT_TRUE(types[family] != "counter" || absl::EndsWith(family, "_total")) << line;
    double value = 0;
    EXPECT_TRUE(absl::SimpleAtod(match[3].str(), &value)) << line;
    EXPECT_TRUE(samples.emplace(absl::StrCat(match[1].str(), match[2].str()), value).second)
        << line << ": twice";
  }
  return samples;
}

TEST(MetricsTextTest, EveryLineIsInTheFormatAndEverySampleIsThereOnce) {
  auto samples = Parse(MetricsText(Sample(), {{"/nvme0", 5}}));
  EXPECT_EQ(samples["offloadd_build_info{version=\"1.2.3\"}"], 1);
  EXPECT_EQ(samples["offloadd_uptime_seconds"], 12.5);
  EXPECT_EQ(samples["offloadd_clients"], 1);
  EXPECT_EQ(samples["offloadd_pool_free_bytes{pool=\"/nvme0\"}"], 5);
  EXPECT_EQ(samples["offloadd_step_total{job=\"train#1\"}"], 118);
  EXPECT_EQ(samples["offloadd_committed_step{job=\"train#1\"}"], 117);
  EXPECT_EQ(samples["offloadd_phase_seconds_total{job=\"train#1\",phase=\"backward\"}"], 1.5);
  EXPECT_EQ(
      samples["offloadd_stall_seconds_total{job=\"train#1\",phase=\"backward\",cause=\"commit\"}"],
      9);
  EXPECT_EQ(samples["offloadd_prefetch_total{job=\"train#1\",result=\"miss\"}"], 12);
  EXPECT_EQ(samples["offloadd_updates_ahead_total{job=\"train#1\",result=\"used\"}"], 41);
  EXPECT_EQ(samples["offloadd_updates_ahead_total{job=\"train#1\",result=\"lost\"}"], 2);
  EXPECT_EQ(samples["offloadd_planned_step_bytes{job=\"train#1\",op=\"read\"}"], 42);
  EXPECT_EQ(samples["offloadd_replans_total{job=\"train#1\"}"], 3);
  EXPECT_EQ(samples["offloadd_resident_bytes{job=\"train#1\",tier=\"ram\",class=\"weights\"}"],
            static_cast<double>(1ull << 53));
  const auto of_gpu = [&](const char* name) {
    return samples[absl::StrCat("offloadd_gpu_", name,
                                "{job=\"train#1\",rank=\"0\",device=\"cuda:1\"}")];
  };
  EXPECT_EQ(of_gpu("ram_bytes"), static_cast<double>(20ull << 30));
  EXPECT_EQ(of_gpu("copied_to_device_bytes_total"), 123456);
  EXPECT_EQ(of_gpu("stall_seconds_total"), 0.25);
}

TEST(MetricsTextTest, ARankWithoutADeviceHasNoSamplesOfOne) {
  proto::v1::StatusReply status = Sample();
  status.mutable_jobs(0)->mutable_ranks(0)->clear_gpu();
  for (const auto& [sample, value] : Parse(MetricsText(status, {})))
    EXPECT_FALSE(absl::StartsWith(sample, "offloadd_gpu")) << sample;
}

TEST(MetricsTextTest, HistogramsAreCumulativeAndEndWithAll) {
  auto samples = Parse(MetricsText(Sample(), {}));
  const auto bucket = [&](const char* bound) {
    return samples[absl::StrCat("offloadd_step_duration_seconds_bucket{job=\"train#1\",le=\"",
                                bound, "\"}")];
  };
  EXPECT_EQ(bucket("0.1"), 2);
  EXPECT_EQ(bucket("1"), 5);
  EXPECT_EQ(bucket("+Inf"), 7);
  EXPECT_EQ(samples["offloadd_step_duration_seconds_sum{job=\"train#1\"}"], 9);
  EXPECT_EQ(samples["offloadd_step_duration_seconds_count{job=\"train#1\"}"], 7);
}

TEST(MetricsTextTest, LabelsAreEscaped) {
  auto samples = Parse(MetricsText(Sample(), {}));
  EXPECT_EQ(samples[R"(offloadd_io_bytes_total{job="train#1",pool="/nvme \"0\"\\\n",)"
                    R"(file="store",op="read"})"],
            4096);
}

TEST(MetricsTextTest, ABusyJobHasNoFigures) {
  EXPECT_EQ(MetricsText(Sample(), {}).find("job=\"busy\""), std::string::npos);
  Parse(MetricsText(proto::v1::StatusReply(), {}));
}

}  // namespace
}  // namespace offload::daemon
