#include "zero3/gpu/gather_agreement.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/named_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "zero3/gpu/peer_watch.h"

namespace offload::zero3 {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr size_t kTensors = 16;

struct Shared {
  explicit Shared(uint32_t world_size)
      : memory(*NamedMemory::Make(GatherAgreement::MemoryBytes(kTensors))) {
    GatherAgreement::Format(memory.span(), kTensors, world_size);
    for (uint32_t rank = 0; rank < world_size; ++rank)
      ranks.push_back(std::make_unique<GatherAgreement>(memory.span(), rank));
  }
  GatherAgreement& operator[](size_t rank) { return *ranks[rank]; }

  NamedMemory memory;
  std::vector<std::unique_ptr<GatherAgreement>> ranks;
};

std::vector<uint32_t> TakeAll(GatherAgreement& rank) {
  std::vector<uint32_t> taken;
  while (const auto next = rank.TakeNext()) taken.push_back(*next);
  return taken;
}

TEST(GatherAgreementTest, WhatAllHaveOfferedIsAgreedInOneOrder) {
  Shared shared(3);
  for (const uint32_t tensor : {4, 2, 9}) EXPECT_TRUE(shared[0].Offer(tensor, 100));
  for (const uint32_t tensor : {9, 4}) EXPECT_TRUE(shared[1].Offer(tensor, 100));
  EXPECT_THAT(TakeAll(shared[0]), IsEmpty());
  EXPECT_TRUE(shared[2].Offer(9, 100));
  EXPECT_TRUE(shared[2].Offer(4, 100));
  for (uint32_t rank = 0; rank < 3; ++rank)
    EXPECT_THAT(TakeAll(shared[rank]), ElementsAre(9, 4)) << rank;
}

TEST(GatherAgreementTest, AnOfferIsTakenBackUntilItIsAgreed) {
  Shared shared(2);
  EXPECT_TRUE(shared[0].Offer(1, 0));
  EXPECT_TRUE(shared[0].Withdraw(1));
  EXPECT_TRUE(shared[1].Offer(1, 0));
  EXPECT_EQ(shared[1].TakeNext(), std::nullopt);
  EXPECT_TRUE(shared[0].Offer(1, 0));
  EXPECT_FALSE(shared[0].Withdraw(1));
  EXPECT_FALSE(shared[1].Withdraw(1));
  EXPECT_THAT(shared[0].TakeNext(), Optional(1));
  EXPECT_THAT(shared[1].TakeNext(), Optional(1));
}

TEST(GatherAgreementTest, OtherBytesAreNotGathered) {
  Shared shared(2);
  EXPECT_TRUE(shared[0].Offer(1, 4096));
  EXPECT_FALSE(shared[1].Offer(1, 8192));
  EXPECT_TRUE(shared[1].Offer(1, 4096));
}

TEST(GatherAgreementTest, NothingIsAgreedWithWhoHasLeft) {
  Shared shared(2);
  EXPECT_TRUE(shared[0].Offer(1, 0));
  shared[1].Leave();
  EXPECT_TRUE(shared[0].HasLeft(1));
  EXPECT_FALSE(shared[0].Offer(2, 0));
  EXPECT_TRUE(shared[0].Withdraw(1));
}

TEST(GatherAgreementTest, WhatARankDeclinesOrHasPassedIsNotWaitedFor) {
  Shared shared(3);
  EXPECT_TRUE(shared[0].MayBeAgreed(1, 7));
  const uint32_t seen = shared[0].news();
  shared[2].Decline(1, 7);
  EXPECT_NE(shared[0].news(), seen);
  EXPECT_FALSE(shared[0].MayBeAgreed(1, 7));
  EXPECT_FALSE(shared[0].MayBeAgreed(1, 6)) << "nor what came before";
  EXPECT_TRUE(shared[0].MayBeAgreed(1, 8));
  EXPECT_TRUE(shared[0].MayBeAgreed(2, 7));
  shared[1].Pass(9);
  EXPECT_FALSE(shared[0].MayBeAgreed(2, 9));
  EXPECT_TRUE(shared[0].MayBeAgreed(2, 10));
  EXPECT_TRUE(shared[1].MayBeAgreed(2, 9)) << "its own passes are not others'";
  shared[2].Leave();
  EXPECT_FALSE(shared[0].MayBeAgreed(2, 10));
}

TEST(GatherAgreementTest, AFailureIsNewsForWhoWaits) {
  Shared shared(2);
  const uint32_t seen = shared[0].news();
  std::thread fails([&] { shared[1].Fail(); });
  while (shared[0].news() == seen) shared[0].WaitForNews(seen, std::chrono::seconds(10));
  fails.join();
  EXPECT_THAT(shared[0].FailedRank(), Optional(1));
  EXPECT_FALSE(shared[0].Offer(2, 0));
}

// Ranks that offer, take back and issue as chance has it: all see one list, and each weight in it
// was offered by all.
TEST(GatherAgreementTest, ManyThreadsSeeOneList) {
  constexpr uint32_t kWorldSize = 3;
  Shared shared(kWorldSize);
  std::vector<std::vector<uint32_t>> issued(kWorldSize);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kWorldSize; ++rank) {
    threads.emplace_back([&, rank] {
      std::minstd_rand random(rank + 1);
      std::vector<bool> offered(kTensors);
      const auto issue = [&] {
        for (const uint32_t tensor : TakeAll(shared[rank])) {
          ASSERT_TRUE(offered[tensor]) << tensor;
          offered[tensor] = false;
          issued[rank].push_back(tensor);
        }
      };
      for (int i = 0; i < 20'000; ++i) {
        const uint32_t tensor = random() % kTensors;
        if (!offered[tensor]) {
          offered[tensor] = shared[rank].Offer(tensor, tensor);
        } else if (shared[rank].Withdraw(tensor)) {
          offered[tensor] = false;
        }
        issue();
      }
      for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
        if (offered[tensor] && shared[rank].Withdraw(tensor)) offered[tensor] = false;
      }
      issue();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < kWorldSize; ++rank) {
    for (const uint32_t tensor : TakeAll(shared[rank])) issued[rank].push_back(tensor);
    EXPECT_EQ(issued[rank], issued[0]) << rank;
  }
}

TEST(GatherAgreementTest, AProcessThatEndsAmidACallIsAFailure) {
  Shared shared(2);
  const pid_t child = fork();
  if (child == 0) {
    // Killed sooner or later with the lock held: in one of many calls.
    for (;;) {
      shared[1].Offer(1, 0);
      shared[1].Withdraw(1);
    }
  }
  // Whether the kill hits a call is chance; that the others can go on is not.
  usleep(10'000);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  const bool can_offer = shared[0].Offer(3, 0);
  EXPECT_EQ(can_offer, !shared[0].FailedRank().has_value());
}

TEST(PeerWatchTest, SeesAProcessThatWasKilledAndNobodyHasWaitedFor) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  const auto watch = PeerWatch::Open(std::vector<int>{getpid(), child});
  ASSERT_TRUE(watch.ok()) << watch.status();
  EXPECT_THAT(watch->Ended(), IsEmpty());
  kill(child, SIGKILL);
  while (watch->Ended().empty()) usleep(1000);
  EXPECT_THAT(watch->Ended(), ElementsAre(1));
  waitpid(child, nullptr, 0);
  EXPECT_THAT(watch->Ended(), ElementsAre(1));
}

TEST(PeerWatchTest, AProcessThatIsNotThereIsRefused) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(PeerWatch::Open(std::vector<int>{child}).ok());
}

}  // namespace
}  // namespace offload::zero3
