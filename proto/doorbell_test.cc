#include "proto/doorbell.h"

#include <fcntl.h>
#include <poll.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "absl/status/status.h"
#include "base/failing_call.h"
#include "gtest/gtest.h"

namespace offload::proto {
namespace {

bool IsReadable(const Doorbell& bell) {
  pollfd event{.fd = bell.fd(), .events = POLLIN};
  return ::poll(&event, 1, 0) == 1;
}

TEST(DoorbellTest, ARingIsHeardOnceAtTheOtherEndOnly) {
  const auto pair = Doorbell::CreatePair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const auto& [daemon, rank] = *pair;
  EXPECT_FALSE(IsReadable(rank));
  daemon.Ring();
  daemon.Ring();
  EXPECT_TRUE(IsReadable(rank));
  EXPECT_FALSE(IsReadable(daemon));
  EXPECT_TRUE(rank.Drain());
  EXPECT_FALSE(IsReadable(rank));
}

TEST(DoorbellTest, AFullBellNeverBlocksEvenWhenTheOtherEndIsMadeBlocking) {
  auto pair = Doorbell::CreatePair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  const auto& [daemon, rank] = *pair;
  ASSERT_EQ(::fcntl(rank.fd(), F_SETFL, 0), 0);
  for (int i = 0; i < 1'000'000; ++i) daemon.Ring();
  EXPECT_TRUE(daemon.Drain());  // nothing to take: returns
  EXPECT_TRUE(rank.Drain());
}

TEST(DoorbellTest, TheEndOfTheOtherSideIsToldAndRaisesNoSignal) {
  auto pair = Doorbell::CreatePair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  pair->second = Doorbell();
  EXPECT_TRUE(IsReadable(pair->first));
  EXPECT_FALSE(pair->first.Drain());
  pair->first.Ring();
}

TEST(DoorbellTest, InterruptedCallsAreMadeAgainAndAnErrorIsTheEnd) {
  auto pair = Doorbell::CreatePair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  {
    const FailingCall failing("send", EINTR, {.times = 3});
    pair->first.Ring();
    EXPECT_EQ(failing.failures(), 3);
  }
  EXPECT_TRUE(IsReadable(pair->second));
  {
    const FailingCall failing("recv", EINTR, {.times = 3});
    EXPECT_TRUE(pair->second.Drain());
    EXPECT_EQ(failing.failures(), 3);
  }
  const FailingCall failing("recv", ECONNRESET);
  EXPECT_FALSE(pair->second.Drain());
}

TEST(DoorbellTest, WithoutDescriptorsThereIsNoBell) {
  const FailingCall failing("socketpair", EMFILE);
  EXPECT_TRUE(absl::IsResourceExhausted(Doorbell::CreatePair().status()));
}

// A lost wake-up would leave the consumer asleep for ever with work in sight.
TEST(SleepFlagTest, NoWakeUpIsLost) {
  constexpr uint32_t kItems = 20'000;
  auto pair = Doorbell::CreatePair();
  ASSERT_TRUE(pair.ok()) << pair.status();
  std::atomic<uint32_t> flag{0};
  std::atomic<uint32_t> published{0};
  const SleepFlag sleep(&flag);
  std::thread consumer([&] {
    uint32_t consumed = 0;
    while (consumed < kItems) {
      consumed = published.load(std::memory_order_acquire);
      sleep.Announce();
      if (published.load(std::memory_order_acquire) == consumed && consumed < kItems) {
        pollfd event{.fd = pair->second.fd(), .events = POLLIN};
        ::poll(&event, 1, -1);
        pair->second.Drain();
      }
      sleep.Awake();
    }
  });
  for (uint32_t i = 1; i <= kItems; ++i) {
    published.store(i, std::memory_order_release);
    if (sleep.MustWake()) pair->first.Ring();
  }
  consumer.join();
}

}  // namespace
}  // namespace offload::proto
