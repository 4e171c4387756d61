// Two processes whose devices are connected: stand-ins everywhere, and where there is a GPU both
// share it. NCCL connects them over the loopback then, since each says that it is another host.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "accelerator/cuda_loader.h"
#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "accelerator/peers.h"
#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

constexpr uint32_t kRanks = 2;
constexpr size_t kPartBytes = 300'000, kBytes = kRanks * kPartBytes;
constexpr std::array<size_t, 3> kOffsets = {0, 123'456, kBytes};  // of slices
constexpr int kRounds = 20;
constexpr int kNoGpu = 77;

// What byte `i` of round `round` is in rank `rank`.
std::byte ByteOf(int round, uint32_t rank, size_t i) {
  return static_cast<std::byte>(7 * round + 100 * rank + i / 1000);
}

// A rank in its process: memory of the device, and of the host, of kBytes each.
struct Rank {
  uint32_t number;
  Accelerator& device;
  std::unique_ptr<Collectives>& joined;
  std::byte* bytes;
  std::byte* more_bytes;
  std::vector<std::byte>& host;
  Stream stream;
  Event event;

  void Wait() {
    ASSERT_TRUE(device.EventRecord(event, stream).ok());
    ASSERT_TRUE(device.EventSynchronize(event).ok());
  }
};
using Body = std::function<void(Rank&)>;

class PeerProcessesTest : public testing::TestWithParam<const char*> {
 protected:
  static absl::StatusOr<std::unique_ptr<Accelerator>> Open(uint32_t rank) {
    if (std::string(GetParam()) == "standin") {
      return std::make_unique<HostAccelerator>(HostAccelerator::Options{
          .seed = rank + 1, .peer_address = "standin/" + std::to_string(rank)});
    }
    setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
    return OpenCuda(0, std::string("./") + std::getenv("CUDA_PLUGIN"));
  }

  // Runs `body` in a process for each rank. No thread and no CUDA is in this one.
  void AsProcesses(const Body& body) {
    int names[2];
    ASSERT_EQ(pipe(names), 0);
    std::array<pid_t, kRanks> pids;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::cout.flush();
      pids[rank] = fork();
      ASSERT_GE(pids[rank], 0);
      if (pids[rank] > 0) continue;
      close(names[rank == 0 ? 0 : 1]);
      const int code = BeRank(rank, names[rank == 0 ? 1 : 0], body);
      std::cout.flush();
      _exit(HasFailure() ? 1 : code);
    }
    close(names[0]);
    close(names[1]);
    std::vector<int> codes;
    for (const pid_t pid : pids) {
      int status = 0;
      ASSERT_EQ(waitpid(pid, &status, 0), pid);
      codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    }
    if (codes == std::vector<int>(kRanks, kNoGpu) && std::getenv("OFFLOADD_REQUIRE_GPU") == nullptr)
      GTEST_SKIP() << "no GPU";
    EXPECT_EQ(codes, std::vector<int>(kRanks, 0));
  }

 private:
  // The connection's name goes from rank 0 to the other through `pipe`.
  static int BeRank(uint32_t rank, int pipe, const Body& body) {
    auto device = Open(rank);
    if (!device.ok()) return kNoGpu;
    Peers* const peers = PeersOf(device->get());
    if (peers == nullptr) return kNoGpu;
    std::string id;
    if (rank == 0) {
      const auto made = peers->MakeId(kRanks);
      EXPECT_TRUE(made.ok()) << made.status();
      if (!made.ok()) return 1;
      id = *made;
      EXPECT_EQ(write(pipe, id.data(), id.size()), static_cast<ssize_t>(id.size()));
    } else {
      char some[4096];
      for (ssize_t count; (count = read(pipe, some, sizeof some)) > 0;) id.append(some, count);
    }
    close(pipe);
    auto joined = peers->Join(id, rank, kRanks);
    EXPECT_TRUE(joined.ok()) << joined.status();
    if (!joined.ok()) return 1;

    std::vector<std::byte> host(kBytes);
    auto held = HostRegistration::Register(device->get(), host, {}, HostAccess::kReadWrite);
    EXPECT_TRUE(held.ok() && held->held()) << held.status();
    Rank self{rank,
              **device,
              *joined,
              *(*device)->Malloc(kBytes),
              *(*device)->Malloc(kBytes),
              host,
              *(*device)->StreamCreate(),
              *(*device)->EventCreate()};
    body(self);
    self.joined.reset();
    EXPECT_TRUE((*device)->Free(self.bytes).ok());
    EXPECT_TRUE((*device)->Free(self.more_bytes).ok());
    held = HostRegistration();
    EXPECT_TRUE((*device)->EventDestroy(self.event).ok());
    EXPECT_TRUE((*device)->StreamDestroy(self.stream).ok());
    return 0;
  }
};

TEST_P(PeerProcessesTest, GathersAndExchangesInTurn) {
  AsProcesses([](Rank& rank) {
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < kBytes; ++i) rank.host[i] = ByteOf(round, rank.number, i);
      const size_t own = rank.number * kPartBytes;
      ASSERT_TRUE(
          rank.device
              .MemcpyToDevice(rank.bytes + own, rank.host.data() + own, kPartBytes, rank.stream)
              .ok());
      const absl::Status gathered = rank.joined->AllGather(rank.bytes, kPartBytes, rank.stream);
      ASSERT_TRUE(gathered.ok()) << gathered;
      ASSERT_TRUE(rank.device.MemcpyToHost(rank.host.data(), rank.bytes, kBytes, rank.stream).ok());
      rank.Wait();
      for (size_t i = 0; i < kBytes; ++i)
        ASSERT_EQ(rank.host[i], ByteOf(round, static_cast<uint32_t>(i / kPartBytes), i)) << i;

      for (size_t i = 0; i < kBytes; ++i) rank.host[i] = ByteOf(-round, rank.number, i);
      ASSERT_TRUE(
          rank.device.MemcpyToDevice(rank.bytes, rank.host.data(), kBytes, rank.stream).ok());
      std::vector<std::byte*> to(kRanks);
      to[1 - rank.number] = rank.more_bytes;
      const std::vector<SlicedRange> ranges = {
          {rank.bytes, {kOffsets.begin(), kOffsets.end()}, to}};
      const absl::Status exchanged = rank.joined->ExchangeSlices(ranges, rank.stream);
      ASSERT_TRUE(exchanged.ok()) << exchanged;
      const size_t begin = kOffsets[rank.number], bytes = kOffsets[rank.number + 1] - begin;
      ASSERT_TRUE(
          rank.device.MemcpyToHost(rank.host.data(), rank.more_bytes, bytes, rank.stream).ok());
      rank.Wait();
      for (size_t i = 0; i < bytes; ++i)
        ASSERT_EQ(rank.host[i], ByteOf(-round, 1 - rank.number, begin + i)) << i;
      ASSERT_TRUE(rank.joined->AsyncError().ok());
    }
  });
}

// As a process that is killed: whoever notices it aborts, and then waits for nobody.
TEST_P(PeerProcessesTest, AnAbortEndsTheWaitForAProcessThatHasEnded) {
  AsProcesses([](Rank& rank) {
    if (rank.number == 1) _exit(0);
    std::thread aborts([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      rank.joined->Abort();
    });
    rank.joined->AllGather(rank.bytes, kPartBytes, rank.stream).IgnoreError();
    rank.Wait();
    aborts.join();
    EXPECT_EQ(ErrorIdOf(rank.joined->AsyncError()), ErrorId::kGpuFailed);
  });
}

INSTANTIATE_TEST_SUITE_P(On, PeerProcessesTest, testing::Values("standin", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace offload::accelerator
