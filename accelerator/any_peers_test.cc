// Two devices that reach each other: stand-ins everywhere, and GPUs where there are two
// (tools/gpu_test).
#include <chrono>
#include <cstdlib>
#include <cstring>
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
constexpr size_t kPartBytes = 1 << 20;

class AnyPeersTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      absl::StatusOr<std::unique_ptr<Accelerator>> device = Open(static_cast<int>(rank));
      if (!device.ok()) GTEST_SKIP() << "no second GPU: " << device.status();
      devices_.push_back(*std::move(device));
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const Peers* const peers = PeersOf(devices_[rank].get());
      if (peers == nullptr || !peers->CanAccess(PeersOf(devices_[1 - rank].get())->Address()))
        GTEST_SKIP() << "the GPUs do not reach each other";
    }
  }

  static absl::StatusOr<std::unique_ptr<Accelerator>> Open(int device) {
    if (std::string(GetParam()) == "standin") {
      return std::make_unique<HostAccelerator>(
          HostAccelerator::Options{.seed = static_cast<uint64_t>(device) + 1,
                                   .peer_address = "standin/" + std::to_string(device)});
    }
    return OpenCuda(device, std::string("./") + std::getenv("CUDA_PLUGIN"));
  }

  // Calls `body` in a thread for each rank, with its number, device and end of the connection.
  template <typename Body>
  void AsJoinedRanks(const Body& body) {
    const absl::StatusOr<std::string> id = PeersOf(devices_[0].get())->MakeId(kRanks);
    ASSERT_TRUE(id.ok()) << id.status();
    const auto run = [&](uint32_t rank) {
      Accelerator& device = *devices_[rank];
      auto joined = PeersOf(&device)->Join(*id, rank, kRanks);
      ASSERT_TRUE(joined.ok()) << joined.status();
      body(rank, device, *joined);
    };
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      threads.emplace_back([&run, rank] { run(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<Accelerator>> devices_;
};

TEST_P(AnyPeersTest, GatherInPlace) {
  AsJoinedRanks([](uint32_t rank, Accelerator& device, std::unique_ptr<Collectives>& joined) {
    std::vector<std::byte> host(kRanks * kPartBytes, static_cast<std::byte>(rank + 1));
    auto held = HostRegistration::Register(&device, host, {}, HostAccess::kReadWrite);
    ASSERT_TRUE(held.ok() && held->held()) << held.status();
    std::byte* const bytes = *device.Malloc(host.size());
    const Stream stream = *device.StreamCreate();
    const Event event = *device.EventCreate();
    const size_t own = rank * kPartBytes;
    ASSERT_TRUE(device.MemcpyToDevice(bytes + own, host.data() + own, kPartBytes, stream).ok());
    const absl::Status gathered = joined->AllGather(bytes, kPartBytes, stream);
    ASSERT_TRUE(gathered.ok()) << gathered;
    ASSERT_TRUE(device.MemcpyToHost(host.data(), bytes, host.size(), stream).ok());
    ASSERT_TRUE(device.EventRecord(event, stream).ok());
    ASSERT_TRUE(device.EventSynchronize(event).ok());
    EXPECT_TRUE(joined->AsyncError().ok());
    for (size_t i = 0; i < host.size(); ++i)
      ASSERT_EQ(host[i], static_cast<std::byte>(i / kPartBytes + 1)) << i;
    joined.reset();
    ASSERT_TRUE(device.Free(bytes).ok());
    held = HostRegistration();
    ASSERT_TRUE(device.EventDestroy(event).ok());
    ASSERT_TRUE(device.StreamDestroy(stream).ok());
  });
}

// Two ranges of uneven slices; the bytes say of which rank, and for which, they are.
TEST_P(AnyPeersTest, ExchangeSlices) {
  AsJoinedRanks([](uint32_t rank, Accelerator& device, std::unique_ptr<Collectives>& joined) {
    constexpr size_t kBytes = 100'000, kCuts[] = {33'333, 99'999};
    const auto byte_of = [](uint32_t from, size_t slice) {
      return static_cast<std::byte>(16 * (from + 1) + slice);
    };
    std::vector<std::byte> host(2 * kBytes);
    auto held = HostRegistration::Register(&device, host, {}, HostAccess::kReadWrite);
    ASSERT_TRUE(held.ok() && held->held()) << held.status();
    std::byte* const sent = *device.Malloc(2 * kBytes);
    std::byte* const received = *device.Malloc(2 * kBytes);
    const Stream stream = *device.StreamCreate();
    const Event event = *device.EventCreate();
    std::vector<SlicedRange> ranges;
    for (size_t range = 0; range < 2; ++range) {
      for (size_t i = 0; i < kBytes; ++i)
        host[range * kBytes + i] = byte_of(rank, 2 * range + (i < kCuts[range] ? 0 : 1));
      std::vector<std::byte*> to(kRanks);
      to[1 - rank] = received + range * kBytes;
      ranges.push_back({sent + range * kBytes, {0, kCuts[range], kBytes}, to});
    }
    ASSERT_TRUE(device.MemcpyToDevice(sent, host.data(), host.size(), stream).ok());
    const absl::Status exchanged = joined->ExchangeSlices(ranges, stream);
    ASSERT_TRUE(exchanged.ok()) << exchanged;
    ASSERT_TRUE(device.MemcpyToHost(host.data(), received, host.size(), stream).ok());
    ASSERT_TRUE(device.EventRecord(event, stream).ok());
    ASSERT_TRUE(device.EventSynchronize(event).ok());
    EXPECT_TRUE(joined->AsyncError().ok());
    for (size_t range = 0; range < 2; ++range) {
      const size_t own_bytes = rank == 0 ? kCuts[range] : kBytes - kCuts[range];
      for (size_t i = 0; i < own_bytes; ++i)
        ASSERT_EQ(host[range * kBytes + i], byte_of(1 - rank, 2 * range + rank)) << i;
    }
    joined.reset();
    ASSERT_TRUE(device.Free(sent).ok());
    ASSERT_TRUE(device.Free(received).ok());
    held = HostRegistration();
    ASSERT_TRUE(device.EventDestroy(event).ok());
    ASSERT_TRUE(device.StreamDestroy(stream).ok());
  });
}

// Rank 1 does not come.
TEST_P(AnyPeersTest, AnAbortEndsTheWaitForTheOtherRank) {
  AsJoinedRanks([](uint32_t rank, Accelerator& device, std::unique_ptr<Collectives>& joined) {
    if (rank == 1) return joined->Abort();
    std::byte* const bytes = *device.Malloc(kRanks * kPartBytes);
    const Stream stream = *device.StreamCreate();
    const Event event = *device.EventCreate();
    std::thread aborts([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      joined->Abort();
    });
    joined->AllGather(bytes, kPartBytes, stream).IgnoreError();
    ASSERT_TRUE(device.EventRecord(event, stream).ok());
    ASSERT_TRUE(device.EventSynchronize(event).ok());
    aborts.join();
    EXPECT_EQ(ErrorIdOf(joined->AsyncError()), ErrorId::kGpuFailed);
    ASSERT_TRUE(device.Free(bytes).ok());
    ASSERT_TRUE(device.EventDestroy(event).ok());
    ASSERT_TRUE(device.StreamDestroy(stream).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(On, AnyPeersTest, testing::Values("standin", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace offload::accelerator
