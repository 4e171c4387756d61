#include "client/step_log.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"

namespace offload::client {
namespace {

using Json = nlohmann::json;

class StepLogTest : public testing::Test {
 protected:
  StepLogTest() { std::filesystem::remove(path_); }
  std::unique_ptr<StepLog> Open() {
    auto log = StepLog::Open(path_, words_.get(), gpu_.get(), header_.get());
    EXPECT_TRUE(log.ok()) << log.status();
    return log.ok() ? *std::move(log) : nullptr;
  }
  std::vector<Json> Lines() const {
    std::vector<Json> lines;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
    return lines;
  }

  const std::string path_ = testing::TempDir() + "/run.jsonl";
  const std::unique_ptr<proto::StepWords> words_{new proto::StepWords()};
  const std::unique_ptr<proto::GpuWords> gpu_{new proto::GpuWords()};
  const std::unique_ptr<proto::SlabHeader> header_{new proto::SlabHeader()};
};

TEST_F(StepLogTest, ALineHasWhatItsStepAdded) {
  const auto log = Open();
  for (uint64_t step = 1; step <= 3; ++step) {
    words_->phase_nanoseconds[1] += step * 1'000'000'000;
    words_->stall_nanoseconds[1][2] += step * 500'000'000;
    words_->prefetches[0] += step;
    header_->bytes_read += step * 1000;
    header_->bytes_written += step * 2000;
    header_->resident_bytes = 77;
    header_->durable_step = step - 1;
    log->Add(step);
  }
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 3u);
  for (uint64_t step = 1; step <= 3; ++step) {
    const Json& line = lines[step - 1];
    EXPECT_EQ(line["step"], step);
    EXPECT_EQ(line["committed_step"], step - 1);
    EXPECT_EQ(line["phase_seconds"]["backward"], step * 1.0);
    EXPECT_EQ(line["phase_seconds"]["forward"], 0.0);
    EXPECT_EQ(line["stall_seconds"]["backward"]["miss"], step * 0.5);
    EXPECT_EQ(line["prefetches"]["on_time"], step);
    EXPECT_EQ(line["bytes_read"], step * 1000);
    EXPECT_EQ(line["bytes_written"], step * 2000);
    EXPECT_EQ(line["resident_bytes"], 77);
    EXPECT_GE(line["seconds"].get<double>(), 0);
    EXPECT_GT(line["end_unix_seconds"].get<double>(), 1e9);
  }
}

TEST_F(StepLogTest, OfADeviceALineHasWhatItsStepAdded) {
  const auto log = Open();
  log->Add(1);
  for (const uint64_t step : {2, 3}) {
    proto::StoreGpuWords({.device = "cuda:0",
                          .gpu_ram_bytes = 900,
                          .used_bytes = 500,
                          .bytes_to_device = 1000 * step,
                          .stall_nanoseconds = 250'000'000 * step},
                         *gpu_);
    log->Add(step);
  }
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_FALSE(lines[0].contains("gpu"));
  EXPECT_EQ(lines[1]["gpu"]["bytes_to_device"], 2000);
  EXPECT_EQ(lines[2]["gpu"]["bytes_to_device"], 1000);
  EXPECT_EQ(lines[2]["gpu"]["stall_seconds"], 0.25);
  EXPECT_EQ(lines[2]["gpu"]["used_bytes"], 500);
}

TEST_F(StepLogTest, ARunThatIsResumedGoesOnInTheSameFile) {
  Open()->Add(1);
  Open()->Add(2);
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1]["step"], 2);
}

TEST_F(StepLogTest, AFileThatCannotBeWrittenIsAnError) {
  const auto log = StepLog::Open(testing::TempDir() + "/missing/run.jsonl", words_.get(),
                                 gpu_.get(), header_.get());
  EXPECT_EQ(ErrorIdOf(log.status()), ErrorId::kBadValue);
}

TEST_F(StepLogTest, ADriveWithoutRoomEndsTheLogAndNothingElse) {
  auto log = StepLog::Open("/dev/full", words_.get(), gpu_.get(), header_.get());
  ASSERT_TRUE(log.ok()) << log.status();
  testing::internal::CaptureStderr();
  (*log)->Add(1);
  (*log)->Add(2);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("/dev/full ends at step 1: "), std::string::npos) << said;
  EXPECT_EQ(said.find("step 2"), std::string::npos) << said;
}

}  // namespace
}  // namespace offload::client
