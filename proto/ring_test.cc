#include "proto/ring.h"

#include <atomic>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "proto/shm_abi.h"

namespace offload::proto {
namespace {

struct Entry {
  uint64_t number;
  uint64_t inverse;
};
constexpr uint32_t kEntries = 8;

class RingTest : public testing::Test {
 protected:
  Entry entries_[kEntries] = {};
  std::atomic<uint32_t> tail_{0};
  std::atomic<uint32_t> head_{0};
  RingProducer<Entry, kEntries> producer_{entries_, &tail_, &head_};
  RingConsumer<Entry, kEntries> consumer_{entries_, &tail_, &head_};
};

TEST_F(RingTest, EntriesAreSeenInOrderAndOnlyAfterPublish) {
  producer_.Push({1, ~1ull});
  producer_.Push({2, ~2ull});
  EXPECT_EQ(consumer_.Available(), 0u);
  producer_.Publish();
  ASSERT_EQ(consumer_.Available(), 2u);
  EXPECT_EQ(consumer_.Take().number, 1u);
  EXPECT_EQ(consumer_.Take().number, 2u);
  EXPECT_EQ(consumer_.Available(), 0u);
}

TEST_F(RingTest, RoomComesBackWhenTheConsumerPublishes) {
  for (uint32_t i = 0; i < kEntries; ++i) producer_.Push({i, 0});
  producer_.Publish();
  EXPECT_EQ(producer_.Room(), 0u);
  consumer_.Take();
  EXPECT_EQ(producer_.Room(), 0u);
  consumer_.Publish();
  EXPECT_EQ(producer_.Room(), 1u);
}

TEST_F(RingTest, AProducerThatClaimsTooMuchIsAFault) {
  tail_ = kEntries + 1;
  EXPECT_EQ(consumer_.Available(), std::nullopt);
  tail_ = UINT32_MAX;  // behind the consumer
  EXPECT_EQ(consumer_.Available(), std::nullopt);
}

TEST_F(RingTest, AConsumerThatRunsAheadIsAFault) {
  head_ = 1;
  EXPECT_EQ(producer_.Room(), std::nullopt);
}

TEST_F(RingTest, OwnCursorsAreNotReadBack) {
  producer_.Push({1, 0});
  producer_.Publish();
  consumer_.Take();
  head_ = 77;  // somebody overwrites what the consumer published
  EXPECT_EQ(consumer_.Available(), 0u);
}

TEST_F(RingTest, TwoThreadsExchangeEntriesWhole) {
  constexpr uint64_t kCount = 100'000;
  std::thread thread([&] {
    for (uint64_t i = 0; i < kCount;) {
      if (producer_.Room().value_or(0) == 0) {
        std::this_thread::yield();
        continue;
      }
      producer_.Push({i, ~i});
      producer_.Publish();
      ++i;
    }
  });
  for (uint64_t i = 0; i < kCount;) {
    if (consumer_.Available().value_or(0) == 0) {
      std::this_thread::yield();
      continue;
    }
    const Entry entry = consumer_.Take();
    consumer_.Publish();
    ASSERT_EQ(entry.number, i);
    ASSERT_EQ(entry.inverse, ~i);
    ++i;
  }
  thread.join();
}

TEST(RegionTest, RingsStandBehindTheHeaderAndDoNotOverlap) {
  EXPECT_LE(sizeof(RegionHeader), kSubmissionRingOffset);
  EXPECT_EQ(kSubmissionRingOffset % alignof(SubmissionEntry), 0u);
  EXPECT_EQ(kCompletionRingOffset % alignof(CompletionEntry), 0u);
  EXPECT_GE(kCompletionEntries, kInFlightMax);
}

}  // namespace
}  // namespace offload::proto
