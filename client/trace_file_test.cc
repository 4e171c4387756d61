#include "client/trace_file.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::client {
namespace {

using Json = nlohmann::json;

class TraceFileTest : public testing::Test {
 protected:
  TraceFileTest() {
    std::string name = testing::TempDir() + "/trace-XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~TraceFileTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<TraceFile> Create() const {
    auto trace = TraceFile::Create(path());
    EXPECT_TRUE(trace.ok()) << trace.status();
    return *std::move(trace);
  }
  std::string path() const { return folder_ + "/run.json"; }
  // What a viewer reads; fails the test when it is not JSON.
  Json Read() const {
    std::ifstream file(path());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(json.is_object() && json["traceEvents"].is_array()) << text.substr(0, 1000);
    return json;
  }
  static TraceEvent Span(int64_t begin) {
    return {.category = "wait",
            .name = "wait",
            .begin_nanoseconds = begin,
            .duration_nanoseconds = 2500};
  }

  std::string folder_;
};

TEST_F(TraceFileTest, IsValidJsonAfterEveryPieceWithWhatWasWritten) {
  const auto trace = Create();
  ASSERT_TRUE(trace->Write().ok());
  EXPECT_EQ(Read()["traceEvents"].size(), 0u);
  trace->NameProcess(7, "trainer \"1\"");
  for (int piece = 1; piece <= 3; ++piece) {
    for (int i = 0; i < 10; ++i) trace->Add(Span(i));
    ASSERT_TRUE(trace->Write().ok());
    EXPECT_EQ(Read()["traceEvents"].size(), 1u + 10 * piece);
  }
  EXPECT_EQ(Read()["traceEvents"][0]["args"]["name"], "trainer \"1\"");
  EXPECT_EQ(Read()["otherData"]["dropped_events"], 0);
}

TEST_F(TraceFileTest, EventsHaveWhatTheirKindNeeds) {
  const std::vector<std::string> names = {"a", "w\"\\\n"};
  const Json span = Json::parse(ToJson({.category = "use",
                                        .process = 1,
                                        .thread = 2,
                                        .begin_nanoseconds = 1'234'567,
                                        .duration_nanoseconds = 89,
                                        .tensor = 1},
                                       names));
  EXPECT_EQ(span["ph"], "X");
  EXPECT_EQ(span["name"], "w\"\\\n");
  EXPECT_DOUBLE_EQ(span["ts"], 1234.567);
  EXPECT_DOUBLE_EQ(span["dur"], 0.089);
  EXPECT_EQ(span["args"]["tensor"], "w\"\\\n");
  EXPECT_FALSE(span.contains("id"));
  const Json read = Json::parse(ToJson(
      {.type = 'b', .category = "io", .name = "read", .id = 5, .extent = 3, .bytes = 4096}, names));
  EXPECT_EQ(read["id"], 5);
  EXPECT_EQ(read["args"], (Json{{"extent", 3}, {"bytes", 4096}}));
  const Json end = Json::parse(ToJson({.type = 'f', .name = "prefetch", .id = 9}, names));
  EXPECT_EQ(end["bp"], "e") << "the arrow ends in the span that is there";
  const Json counter = Json::parse(ToJson({.type = 'C', .name = "resident", .bytes = 12}, names));
  EXPECT_EQ(counter["args"]["bytes"], 12);
}

TEST_F(TraceFileTest, WhatThereIsNoRoomForIsDroppedAndCounted) {
  const auto trace = Create();
  for (size_t i = 0; i < TraceFile::kEventsMax + 5; ++i) trace->Add(Span(0));
  trace->AddDropped(2);
  ASSERT_TRUE(trace->Write().ok());
  EXPECT_EQ(Read()["traceEvents"].size(), TraceFile::kEventsMax);
  EXPECT_EQ(Read()["otherData"]["dropped_events"], 7);
  trace->Add(Span(0));
  ASSERT_TRUE(trace->Write().ok());
  EXPECT_EQ(Read()["traceEvents"].size(), TraceFile::kEventsMax + 1) << "there is room again";
}

TEST_F(TraceFileTest, AReaderFindsItWholeWhileItIsWritten) {
  const auto trace = Create();
  ASSERT_TRUE(trace->Write().ok());
  std::atomic<bool> is_written = false;
  std::thread writer([&] {
    for (int piece = 0; piece < 100; ++piece) {
      for (int i = 0; i < 100; ++i) trace->Add(Span(i));
      EXPECT_TRUE(trace->Write().ok());
    }
    is_written = true;
  });
  // What a killed trainer leaves is what some reader might have seen.
  size_t seen = 0;
  while (!is_written && !HasFailure()) {
    const std::string copy = folder_ + "/copy.json";
    std::filesystem::copy_file(path(), copy, std::filesystem::copy_options::overwrite_existing);
    std::ifstream file(copy);
    const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) continue;  // the copy was taken inside a write
    EXPECT_GE(json["traceEvents"].size(), seen);
    seen = json["traceEvents"].size();
  }
  writer.join();
  EXPECT_EQ(Read()["traceEvents"].size(), 10000u);
}

TEST_F(TraceFileTest, AFullDriveEndsTheTraceWithOneError) {
  const auto trace = TraceFile::Create("/dev/full");
  ASSERT_TRUE(trace.ok()) << trace.status();
  (*trace)->Add(Span(0));
  EXPECT_FALSE((*trace)->Write().ok());
  (*trace)->Add(Span(0));
  EXPECT_TRUE((*trace)->Write().ok()) << "it was said";
}

TEST_F(TraceFileTest, AFileThatCannotBeMadeIsNamed) {
  const auto trace = TraceFile::Create(folder_ + "/missing/run.json");
  EXPECT_EQ(ErrorIdOf(trace.status()), ErrorId::kBadValue);
  EXPECT_NE(trace.status().message().find("missing/run.json"), std::string::npos);
}

TEST(TracePathTest, RanksAndFurtherSessionsHaveFilesOfTheirOwn) {
  EXPECT_EQ(TracePath("/tmp/run.json", 0, 1), "/tmp/run.json");
  EXPECT_EQ(TracePath("/tmp/run.json", 3, 1), "/tmp/run.rank3.json");
  EXPECT_EQ(TracePath("run.json", 0, 2), "run.2.json");
  EXPECT_EQ(TracePath("a.b/run", 1, 2), "a.b/run.rank1.2");
}

}  // namespace
}  // namespace offload::client
