#include "proto/daemon_rings.h"

#include <poll.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "proto/doorbell.h"
#include "proto/ring.h"

namespace offload::proto {
namespace {

class DaemonRingsTest : public testing::Test {
 protected:
  DaemonRingsTest()
      : region_(static_cast<std::byte*>(
            std::aligned_alloc(4096, static_cast<size_t>(kRegionFixedBytes)))) {
    std::memset(region_.get(), 0xff, kRegionFixedBytes);
    InitializeRegion(region_.get());
    auto pair = Doorbell::CreatePair();
    EXPECT_TRUE(pair.ok()) << pair.status();
    rank_bell_ = std::move(pair->second);
    rings_ = std::make_unique<DaemonRings>(region_.get(), std::move(pair->first));
  }
  RegionHeader* header() { return HeaderOf(region_.get()); }
  void SubmitNop(uint64_t tag) {
    SubmissionEntry entry{};
    entry.tag = tag;
    rank_submissions_.Push(entry);
    rank_submissions_.Publish();
  }
  bool RankIsRung() const {
    pollfd event{.fd = rank_bell_.fd(), .events = POLLIN};
    return ::poll(&event, 1, 0) == 1;
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> region_;
  Doorbell rank_bell_;
  std::unique_ptr<DaemonRings> rings_;
  SubmissionProducer rank_submissions_{SubmissionEntriesOf(region_.get()),
                                       &HeaderOf(region_.get())->submission_tail,
                                       &HeaderOf(region_.get())->submission_head};
  CompletionConsumer rank_completions_{CompletionEntriesOf(region_.get()),
                                       &HeaderOf(region_.get())->completion_tail,
                                       &HeaderOf(region_.get())->completion_head};
};

TEST_F(DaemonRingsTest, ACompletionCarriesCodeAndNumberOfItsStatus) {
  SubmitNop(41);
  ASSERT_TRUE(rings_->Next().ok());
  rings_->Complete(41, 7, MakeError(ErrorId::kWindowExhausted, "no room"));
  EXPECT_EQ(rank_completions_.Available(), 0u);
  rings_->Publish();
  ASSERT_EQ(rank_completions_.Available(), 1u);
  const CompletionEntry completion = rank_completions_.Take();
  EXPECT_EQ(completion.tag, 41u);
  EXPECT_EQ(completion.value, 7u);
  EXPECT_EQ(completion.code, static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(completion.error, 1303);
}

TEST_F(DaemonRingsTest, ARankThatReadsNoCompletionsIsNotReadAnyMore) {
  uint32_t taken = 0;
  for (uint32_t i = 0; i < kCompletionEntries + 10; ++i) {
    SubmitNop(i);
    const auto next = rings_->Next();
    ASSERT_TRUE(next.ok()) << next.status();
    if (!next->has_value()) break;
    ++taken;
    rings_->Complete(i, 0, absl::OkStatus());
    rings_->Publish();
  }
  EXPECT_EQ(taken, kCompletionEntries);
  EXPECT_TRUE(rings_->PrepareToSleep());  // nothing that the daemon could do
  rank_completions_.Take();
  rank_completions_.Publish();
  const auto next = rings_->Next();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->has_value());
}

TEST_F(DaemonRingsTest, ACompletionHeadThatRunsAheadIsAFault) {
  header()->completion_head = 5;
  EXPECT_EQ(ErrorIdOf(rings_->Next().status()), ErrorId::kProtocol);
}

TEST_F(DaemonRingsTest, DoesNotSleepWhenASubmissionCameInBetween) {
  EXPECT_TRUE(rings_->PrepareToSleep());
  EXPECT_EQ(header()->daemon_sleeping.load(), 1u);
  rings_->Awake();
  SubmitNop(1);
  EXPECT_FALSE(rings_->PrepareToSleep());
  EXPECT_EQ(header()->daemon_sleeping.load(), 0u);
}

TEST_F(DaemonRingsTest, RingsOnlyForARankThatSleeps) {
  SubmitNop(1);
  ASSERT_TRUE(rings_->Next().ok());
  rings_->Complete(1, 0, absl::OkStatus());
  rings_->Publish();
  EXPECT_FALSE(RankIsRung());
  SubmitNop(2);
  ASSERT_TRUE(rings_->Next().ok());
  rings_->Complete(2, 0, absl::OkStatus());
  header()->rank_sleeping = 1;
  rings_->Publish();
  EXPECT_TRUE(RankIsRung());
  EXPECT_EQ(header()->rank_sleeping.load(), 0u);
}

TEST(PublishFailureTest, TheFirstReasonStaysAndEndsWithZero) {
  auto header = std::make_unique<SlabHeader>();
  InitializeSlab(reinterpret_cast<std::byte*>(header.get()));
  PublishFailure(header.get(), MakeError(ErrorId::kStoreFailed, std::string(5000, 'x')));
  PublishFailure(header.get(), MakeError(ErrorId::kIo, "second"));
  EXPECT_EQ(header->failure.load(), 1210u);
  EXPECT_EQ(std::string(header->failure_text).substr(0, 12), "OFD-1210 xxx");
  EXPECT_EQ(std::strlen(header->failure_text), sizeof(header->failure_text) - 1);
}

TEST(PublishFailureTest, WhatHasNoRoomIsLeftOutByWholeCharacters) {
  for (const char* const before : {"", "x"}) {
    auto header = std::make_unique<SlabHeader>();
    InitializeSlab(reinterpret_cast<std::byte*>(header.get()));
    std::string text = before;
    for (int i = 0; i < 1000; ++i) text += "ä";
    PublishFailure(header.get(), absl::DataLossError(text));
    const std::string kept = header->failure_text;
    EXPECT_GE(kept.size(), sizeof(header->failure_text) - 2);
    EXPECT_EQ((kept.size() - std::strlen(before)) % 2, 0u);
  }
}

}  // namespace
}  // namespace offload::proto
