// Ranks as threads, each with a stand-in of its own.
#include "accelerator/host_collectives.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kPartBytes = 150'000;  // three pieces

std::byte ByteOf(uint32_t rank, uint32_t round, size_t i) {
  return static_cast<std::byte>((rank + 1) * 31 + round * 7 + i * 13);
}

// A rank: its device, the connection, a stream for copies and one for collectives.
struct Rank {
  Rank(uint32_t rank, uint32_t world_size, const HostAccelerator::Options& options)
      : rank(rank), world_size(world_size), device(options), host(kPartBytes) {
    EXPECT_TRUE(*device.HostRegister(host.data(), host.size(), HostAccess::kReadWrite));
    bytes = *device.Malloc(world_size * kPartBytes);
    copies = *device.StreamCreate();
    gathers = *device.StreamCreate();
    event = *device.EventCreate();
  }

  // Own bytes of a round into their part, and the parts of the others behind them.
  absl::Status Gather(uint32_t round, bool waits = true, size_t part_bytes = kPartBytes) {
    device.EventRecord(event, gathers).IgnoreError();
    device.EventSynchronize(event).IgnoreError();  // the host memory is free again
    device.NoteHostUse(Use::kWrite, host.data(), host.size());
    for (size_t i = 0; i < kPartBytes; ++i) host[i] = ByteOf(rank, round, i);
    device.StreamWaitEvent(copies, event).IgnoreError();
    device.MemcpyToDevice(bytes + rank * part_bytes, host.data(), part_bytes, copies).IgnoreError();
    device.EventRecord(event, copies).IgnoreError();
    if (waits) device.StreamWaitEvent(gathers, event).IgnoreError();
    return collectives->AllGather(bytes, part_bytes, gathers);
  }
  // Every rank's bytes to the part of each other one; slices of uneven sizes, some of several
  // pieces. `received` is by rank.
  absl::Status Exchange(uint32_t round, std::vector<std::byte*>* received) {
    const size_t size_bytes = world_size * kPartBytes;
    std::vector<size_t> offsets;
    for (uint32_t of = 0; of < world_size; ++of)
      offsets.push_back(of * of * kPartBytes / world_size);
    offsets.push_back(size_bytes);
    for (size_t i = 0; i < size_bytes; ++i) bytes[i] = ByteOf(rank, round, i);  // nothing runs yet
    received->assign(world_size, nullptr);
    for (uint32_t of = 0; of < world_size; ++of) {
      if (of != rank) (*received)[of] = *device.Malloc(size_bytes);
    }
    own_begin = offsets[rank], own_end = offsets[rank + 1];
    return collectives->ExchangeSlices(std::vector<SlicedRange>{{bytes, offsets, *received}},
                                       gathers);
  }
  void Wait() {
    device.EventRecord(event, gathers).IgnoreError();
    device.EventSynchronize(event).IgnoreError();
  }
  void ExpectAllOf(uint32_t round) {
    for (uint32_t of = 0; of < world_size; ++of) {
      for (size_t i = 0; i < kPartBytes; ++i)
        ASSERT_EQ(bytes[of * kPartBytes + i], ByteOf(of, round, i)) << of << " " << i;
    }
  }

  const uint32_t rank, world_size;
  HostAccelerator device;
  std::vector<std::byte> host;
  std::byte* bytes = nullptr;
  size_t own_begin = 0, own_end = 0;  // of the last exchange
  Stream copies, gathers;
  Event event;
  std::unique_ptr<Collectives> collectives;
};

HostAccelerator::Options OptionsOf(uint32_t rank, uint64_t seed) {
  const bool is_late = (rank + seed) % 2 == 1;
  return {.seed = seed * 10 + rank,
          .pace = is_late ? Pace::kLate : Pace::kRandom,
          .queries_are_late = is_late,
          .peer_address = "standin/" + std::to_string(rank)};
}

// Runs `body` on a thread per rank; returns what the devices found.
std::vector<std::string> RunRanks(uint32_t world_size, uint64_t seed,
                                  const std::function<void(Rank&)>& body) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t rank = 0; rank < world_size; ++rank)
    ranks.push_back(std::make_unique<Rank>(rank, world_size, OptionsOf(rank, seed)));
  const std::string id = *ranks[0]->device.peers()->MakeId(world_size);
  std::vector<std::thread> threads;
  for (const std::unique_ptr<Rank>& rank : ranks) {
    threads.emplace_back([&, rank = rank.get()] {
      auto joined = rank->device.peers()->Join(id, rank->rank, world_size);
      ASSERT_TRUE(joined.ok()) << joined.status();
      rank->collectives = *std::move(joined);
      body(*rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> found;
  for (const std::unique_ptr<Rank>& rank : ranks) {
    rank->collectives.reset();
    for (const std::string& violation : rank->device.Violations()) found.push_back(violation);
  }
  return found;
}

TEST(HostPeersTest, ADeviceWithoutAnAddressReachesNone) {
  HostAccelerator alone({});
  EXPECT_EQ(alone.peers(), nullptr);
  HostAccelerator one({.peer_address = "a"});
  EXPECT_TRUE(one.peers()->CanAccess("b"));
  EXPECT_FALSE(one.peers()->CanAccess("a")) << "two ranks with one device";
  EXPECT_FALSE(one.peers()->CanAccess(""));
}

TEST(HostCollectivesTest, EveryRankGetsEveryPartWhateverTheDevicesPace) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const uint32_t world_size = 1 + seed % 4;
    const auto found = RunRanks(world_size, seed, [](Rank& rank) {
      for (uint32_t round = 0; round < 3; ++round) {
        ASSERT_TRUE(rank.Gather(round).ok());
        rank.Wait();
        rank.ExpectAllOf(round);
      }
    });
    EXPECT_THAT(found, IsEmpty()) << "seed " << seed;
  }
}

TEST(HostCollectivesTest, SeveralUnderWayKeepTheirOrder) {
  const auto found = RunRanks(3, 5, [](Rank& rank) {
    for (uint32_t round = 0; round < 4; ++round) ASSERT_TRUE(rank.Gather(round).ok());
    rank.Wait();
    rank.ExpectAllOf(3);
  });
  EXPECT_THAT(found, IsEmpty());
}

TEST(HostCollectivesTest, AMissingWaitIsFoundInEveryRun) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const auto found = RunRanks(2, seed, [](Rank& rank) {
      ASSERT_TRUE(rank.Gather(0, /*waits=*/rank.rank == 0).ok());
      rank.Wait();
    });
    EXPECT_THAT(found, Contains(HasSubstr("no event orders"))) << "seed " << seed;
  }
}

TEST(HostCollectivesTest, RanksThatDifferAreFound) {
  const auto found = RunRanks(2, 3, [](Rank& rank) {
    ASSERT_TRUE(rank.Gather(0, /*waits=*/true, kPartBytes - 64 * rank.rank).ok());
    rank.Wait();
    EXPECT_EQ(ErrorIdOf(rank.collectives->AsyncError()), ErrorId::kGpuFailed);
    EXPECT_FALSE(rank.Gather(1).ok());
  });
  EXPECT_THAT(found, Contains(HasSubstr("collectives that differ between ranks")));
}

TEST(HostCollectivesTest, EveryRankGetsItsSliceOfEveryOtherOne) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const uint32_t world_size = 2 + seed % 3;
    const auto found = RunRanks(world_size, seed, [](Rank& rank) {
      std::vector<std::byte*> received;
      ASSERT_TRUE(rank.Exchange(4, &received).ok());
      rank.Wait();
      for (uint32_t of = 0; of < rank.world_size; ++of) {
        if (of == rank.rank) continue;
        for (size_t i = rank.own_begin; i < rank.own_end; ++i)
          ASSERT_EQ(received[of][i - rank.own_begin], ByteOf(of, 4, i)) << of << " " << i;
        ASSERT_TRUE(rank.device.Free(received[of]).ok());
      }
      ASSERT_TRUE(rank.Gather(1).ok()) << "and a gather comes behind it";
      rank.Wait();
      rank.ExpectAllOf(1);
    });
    EXPECT_THAT(found, IsEmpty()) << "seed " << seed;
  }
}

TEST(HostCollectivesTest, AGatherOfOneRankAndAnExchangeOfAnotherAreFound) {
  const auto found = RunRanks(2, 3, [](Rank& rank) {
    std::vector<std::byte*> received;
    ASSERT_TRUE((rank.rank == 0 ? rank.Gather(0) : rank.Exchange(0, &received)).ok());
    rank.Wait();
    EXPECT_EQ(ErrorIdOf(rank.collectives->AsyncError()), ErrorId::kGpuFailed);
  });
  EXPECT_THAT(found, Contains(HasSubstr("collectives that differ between ranks")));
}

TEST(HostCollectivesTest, AbortEndsTheWaitForARankThatDoesNotCome) {
  const auto found = RunRanks(2, 4, [](Rank& rank) {
    if (rank.rank == 1) return;
    ASSERT_TRUE(rank.Gather(0).ok());
    std::thread aborts([&] { rank.collectives->Abort(); });
    rank.Wait();  // for ever without it
    aborts.join();
    EXPECT_EQ(ErrorIdOf(rank.collectives->AsyncError()), ErrorId::kGpuFailed);
    EXPECT_EQ(ErrorIdOf(rank.Gather(1)), ErrorId::kGpuFailed);
  });
  EXPECT_THAT(found, IsEmpty());
}

TEST(HostCollectivesTest, ADeviceThatBreaksNeedsAnAbortOfTheOthersOnly) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    HostAccelerator::Options options = OptionsOf(rank, 1);
    options.failing_copy = rank;  // of rank 1 the first
    ranks.push_back(std::make_unique<Rank>(rank, 2, options));
  }
  const std::string id = *ranks[0]->device.peers()->MakeId(2);
  std::thread other([&] { ranks[1]->collectives = *ranks[1]->device.peers()->Join(id, 1, 2); });
  ranks[0]->collectives = *ranks[0]->device.peers()->Join(id, 0, 2);
  other.join();
  ranks[1]->Gather(0).IgnoreError();
  ranks[1]->Wait();  // a broken device keeps nobody waiting
  ASSERT_TRUE(ranks[0]->Gather(0).ok());
  ranks[0]->collectives->Abort();
  ranks[0]->Wait();
  for (const auto& rank : ranks) rank->collectives.reset();
}

}  // namespace
}  // namespace offload::accelerator
