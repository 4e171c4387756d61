#include "accelerator/host_accelerator.h"

#include <array>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kBytes = 1024;

// A device with one allocation, two streams and a registered piece of host memory.
struct Bench {
  explicit Bench(HostAccelerator::Options options = {}) : device(options) {
    bytes = *device.Malloc(kBytes);
    EXPECT_TRUE(*device.HostRegister(host.data(), kBytes, HostAccess::kReadWrite));
    copies = *device.StreamCreate();
    event = *device.EventCreate();
  }
  ~Bench() {
    device.EventDestroy(event).IgnoreError();
    device.StreamDestroy(copies).IgnoreError();
    device.HostUnregister(host.data()).IgnoreError();
    device.Free(bytes).IgnoreError();
    EXPECT_THAT(device.Leftovers(), IsEmpty());
  }
  // Records on `from` and lets `to` wait.
  void Order(Stream from, Stream to) {
    ASSERT_TRUE(device.EventRecord(event, from).ok());
    ASSERT_TRUE(device.StreamWaitEvent(to, event).ok());
  }
  void Finish(Stream stream) {
    ASSERT_TRUE(device.EventRecord(event, stream).ok());
    ASSERT_TRUE(device.EventSynchronize(event).ok());
  }

  HostAccelerator device;
  std::array<std::byte, kBytes> host{};
  std::byte* bytes = nullptr;
  const Stream compute;
  Stream copies;
  Event event;
};

HostAccelerator::Options Paced(Pace pace, uint64_t seed = 1) {
  return {.seed = seed, .pace = pace, .queries_are_late = true};
}

TEST(HostAcceleratorTest, CopiesArriveWhenTheHostHasWaited) {
  for (const Pace pace : {Pace::kEager, Pace::kRandom, Pace::kLate}) {
    Bench bench(Paced(pace));
    bench.host.fill(std::byte{7});
    ASSERT_TRUE(
        bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
    bench.Finish(bench.copies);
    bench.host.fill(std::byte{0});
    ASSERT_TRUE(
        bench.device.MemcpyToHost(bench.host.data(), bench.bytes, kBytes, bench.copies).ok());
    bench.Finish(bench.copies);
    EXPECT_EQ(bench.host[kBytes - 1], std::byte{7});
    EXPECT_THAT(bench.device.Violations(), IsEmpty());
  }
}

TEST(HostAcceleratorTest, CopiesOfOthersAreCountedWhereTheHostsEndIsPageable) {
  Bench bench(Paced(Pace::kLate));
  std::array<std::byte, kBytes> pageable;
  bench.device.CountCopy(bench.host.data() + 1, kBytes - 1);
  EXPECT_EQ(bench.device.counters().pageable_copies, 0);
  bench.device.CountCopy(bench.host.data() + 1, kBytes);
  bench.device.CountCopy(pageable.data(), 1);
  EXPECT_EQ(bench.device.counters().pageable_copies, 2);
}

TEST(HostAcceleratorTest, AStreamRunsToItsEndWithoutTellingTheHost) {
  Bench bench(Paced(Pace::kLate));
  bench.host.fill(std::byte{7});
  ASSERT_TRUE(
      bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
  bench.Order(bench.copies, bench.compute);
  bench.device.RunStream(bench.compute);
  EXPECT_EQ(bench.bytes[kBytes - 1], std::byte{7});
  EXPECT_EQ(bench.device.counters().synchronizes, 0u);
  EXPECT_FALSE(*bench.device.EventQuery(bench.event));
  bench.Finish(bench.compute);
  EXPECT_THAT(bench.device.Violations(), IsEmpty());
}

TEST(HostAcceleratorTest, MemoryIsFreedBehindAStreamThatKnowsAllItsUses) {
  for (const bool waits : {true, false}) {
    Bench bench(Paced(Pace::kLate));
    std::byte* const bytes = *bench.device.Malloc(kBytes);
    ASSERT_TRUE(bench.device.MemcpyToDevice(bytes, bench.host.data(), kBytes, bench.copies).ok());
    if (waits) bench.Order(bench.copies, bench.compute);
    bench.device.FreeAsync(bytes, waits ? bench.compute : Stream{});
    EXPECT_EQ(bench.device.Violations().empty(), waits);
    bench.Finish(bench.copies);
  }
}

TEST(HostAcceleratorTest, AWaitOrdersTwoStreams) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Bench bench(Paced(Pace::kRandom, seed));
    bench.host.fill(std::byte{7});
    std::byte seen{};
    ASSERT_TRUE(
        bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
    bench.Order(bench.copies, bench.compute);
    bench.device.NoteUse(bench.compute, Use::kRead, bench.bytes, kBytes);
    bench.device.Launch(bench.compute, [&] { seen = bench.bytes[kBytes / 2]; });
    bench.Finish(bench.compute);
    EXPECT_EQ(seen, std::byte{7});
    EXPECT_THAT(bench.device.Violations(), IsEmpty());
  }
}

// The mistakes of which the device knows, each in every run, whatever the pace.
class MistakeTest : public testing::TestWithParam<std::tuple<Pace, uint64_t>> {
 protected:
  Bench bench_{Paced(std::get<0>(GetParam()), std::get<1>(GetParam()))};
};
INSTANTIATE_TEST_SUITE_P(EveryPace, MistakeTest,
                         testing::Combine(testing::Values(Pace::kEager, Pace::kRandom, Pace::kLate),
                                          testing::Range(uint64_t{0}, uint64_t{20})));

TEST_P(MistakeTest, AnOperatorThatDoesNotWaitForItsCopyIsFound) {
  ASSERT_TRUE(
      bench_.device.MemcpyToDevice(bench_.bytes, bench_.host.data(), kBytes, bench_.copies).ok());
  bench_.device.NoteUse(bench_.compute, Use::kRead, bench_.bytes, kBytes);
  EXPECT_THAT(bench_.device.Violations(),
              ElementsAre("a read by stream 0 that no event orders after a write by stream 1 (1)"));
  bench_.Finish(bench_.copies);
  bench_.Finish(bench_.compute);
}

TEST_P(MistakeTest, ACopyOverWhatIsStillReadIsFound) {
  bench_.device.NoteUse(bench_.compute, Use::kRead, bench_.bytes, 1);
  ASSERT_TRUE(
      bench_.device.MemcpyToDevice(bench_.bytes, bench_.host.data(), kBytes, bench_.copies).ok());
  EXPECT_THAT(bench_.device.Violations(),
              ElementsAre("a write by stream 1 that no event orders after a read by stream 0 (1)"));
  bench_.Finish(bench_.copies);
  bench_.Finish(bench_.compute);
}

TEST_P(MistakeTest, AHostThatWritesUnderACopyIsFound) {
  ASSERT_TRUE(
      bench_.device.MemcpyToDevice(bench_.bytes, bench_.host.data(), kBytes, bench_.copies).ok());
  bench_.device.NoteHostUse(Use::kWrite, bench_.host.data(), 1);
  EXPECT_THAT(bench_.device.Violations(),
              ElementsAre("a write by the host that no event orders after a read by stream 1 (1)"));
  bench_.Finish(bench_.copies);
}

TEST_P(MistakeTest, AnEventThatWasRecordedTooEarlyOrdersNothing) {
  ASSERT_TRUE(bench_.device.EventRecord(bench_.event, bench_.copies).ok());
  ASSERT_TRUE(
      bench_.device.MemcpyToDevice(bench_.bytes, bench_.host.data(), kBytes, bench_.copies).ok());
  ASSERT_TRUE(bench_.device.StreamWaitEvent(bench_.compute, bench_.event).ok());
  bench_.device.NoteUse(bench_.compute, Use::kRead, bench_.bytes, kBytes);
  EXPECT_EQ(bench_.device.Violations().size(), 1u);
  bench_.Finish(bench_.copies);
  bench_.Finish(bench_.compute);
}

TEST_P(MistakeTest, MemoryFreedInUseIsFound) {
  std::byte* const other = *bench_.device.Malloc(64);
  bench_.device.NoteUse(bench_.compute, Use::kWrite, other, 64);
  ASSERT_TRUE(bench_.device.Free(other).ok());
  EXPECT_THAT(bench_.device.Violations(), ElementsAre("memory freed in use (1)"));
}

// Of a size that the allocator always gives back to the kernel.
TEST_P(MistakeTest, ACommandThatWaitsForOthersStillFindsMemoryFreedInUse) {
  constexpr size_t kLargeBytes = 64 << 20;
  std::byte* const other = *bench_.device.Malloc(kLargeBytes);
  std::atomic<bool> is_ready = false;
  bench_.device.NoteUse(bench_.compute, Use::kWrite, other, kLargeBytes);
  bench_.device.LaunchWhenReady(
      bench_.compute, [&] { return is_ready.load(); }, [&] { *other = std::byte{1}; });
  ASSERT_TRUE(bench_.device.Free(other).ok());
  is_ready = true;
  bench_.device.RunAll();
  EXPECT_THAT(bench_.device.Violations(), ElementsAre("memory freed in use (1)"));
}

TEST_P(MistakeTest, ACopyFromUnregisteredMemoryIsFound) {
  std::array<std::byte, 8> pageable{};
  ASSERT_TRUE(bench_.device.MemcpyToDevice(bench_.bytes, pageable.data(), 8, bench_.copies).ok());
  EXPECT_THAT(bench_.device.Violations(),
              ElementsAre("a copy of host memory that is not registered (1)"));
  bench_.Finish(bench_.copies);
}

TEST_P(MistakeTest, ACommandUnderCaptureIsFound) {
  bench_.device.SetCapturing(bench_.compute, true);
  EXPECT_TRUE(*bench_.device.StreamIsCapturing(bench_.compute));
  ASSERT_TRUE(bench_.device.StreamWaitEvent(bench_.compute, bench_.event).ok());
  EXPECT_THAT(bench_.device.Violations(),
              ElementsAre("a command on a stream that is being captured (1)"));
}

TEST(HostAcceleratorTest, SourceBytesThatChangeUnderACopyAreFoundByTheirValues) {
  Bench bench(Paced(Pace::kLate));
  ASSERT_TRUE(
      bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
  bench.host[5] = std::byte{1};
  bench.Finish(bench.copies);
  EXPECT_THAT(bench.device.Violations(), ElementsAre("host memory that changed under a copy (1)"));
}

TEST(HostAcceleratorTest, AnOverlappingPartIsCheckedByItself) {
  Bench bench(Paced(Pace::kEager));
  ASSERT_TRUE(bench.device.Memset(bench.bytes, 0, kBytes, bench.copies).ok());
  bench.Order(bench.copies, bench.compute);
  bench.device.NoteUse(bench.compute, Use::kWrite, bench.bytes + 100, 100);
  // On both sides of what the other stream has written since.
  ASSERT_TRUE(bench.device.Memset(bench.bytes, 0, 100, bench.copies).ok());
  ASSERT_TRUE(bench.device.Memset(bench.bytes + 200, 0, kBytes - 200, bench.copies).ok());
  EXPECT_THAT(bench.device.Violations(), IsEmpty());
  ASSERT_TRUE(bench.device.Memset(bench.bytes, 0, 101, bench.copies).ok());
  EXPECT_EQ(bench.device.Violations().size(), 1u);
  bench.Finish(bench.copies);
  bench.Finish(bench.compute);
}

TEST(HostAcceleratorTest, AWaitIsForWhatTheEventStoodForThen) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Bench bench(Paced(Pace::kRandom, seed));
    bench.host.fill(std::byte{7});
    std::byte seen{};
    ASSERT_TRUE(
        bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
    bench.Order(bench.copies, bench.compute);
    // Recorded anew, on a stream that has nothing to do.
    const Stream idle = *bench.device.StreamCreate();
    ASSERT_TRUE(bench.device.EventRecord(bench.event, idle).ok());
    bench.device.NoteUse(bench.compute, Use::kRead, bench.bytes, kBytes);
    bench.device.Launch(bench.compute, [&] { seen = bench.bytes[0]; });
    bench.Finish(bench.compute);
    EXPECT_EQ(seen, std::byte{7});
    EXPECT_THAT(bench.device.Violations(), IsEmpty());
    ASSERT_TRUE(bench.device.StreamDestroy(idle).ok());
  }
}

TEST(HostAcceleratorTest, ALateQueryNeverHelps) {
  Bench bench(Paced(Pace::kEager));
  ASSERT_TRUE(
      bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies).ok());
  ASSERT_TRUE(bench.device.EventRecord(bench.event, bench.copies).ok());
  EXPECT_FALSE(*bench.device.EventQuery(bench.event));
  ASSERT_TRUE(bench.device.EventSynchronize(bench.event).ok());
  EXPECT_TRUE(*bench.device.EventQuery(bench.event));
}

TEST(HostAcceleratorTest, ABrokenDeviceFailsEveryLaterCall) {
  Bench bench({.pace = Pace::kEager, .failing_copy = 2});
  const auto copy = [&] {
    return bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), kBytes, bench.copies);
  };
  EXPECT_TRUE(copy().ok());
  EXPECT_TRUE(copy().ok());  // asynchronous: the next call tells
  EXPECT_EQ(ErrorIdOf(copy()), ErrorId::kGpuFailed);
  EXPECT_EQ(ErrorIdOf(bench.device.EventQuery(bench.event).status()), ErrorId::kGpuFailed);
  EXPECT_EQ(ErrorIdOf(bench.device.Malloc(8).status()), ErrorId::kGpuFailed);
}

TEST(HostAcceleratorTest, MemoryIsLimitedAndCounted) {
  HostAccelerator device({.memory_bytes = 4096});
  std::byte* const bytes = *device.Malloc(3000);  // 3072: whole units of 256
  EXPECT_EQ(device.MemGetInfo()->free_bytes, 1024u);
  EXPECT_EQ(ErrorIdOf(device.Malloc(1025).status()), ErrorId::kGpuMemory);
  EXPECT_THAT(device.Leftovers(), ElementsAre("1 allocations"));
  ASSERT_TRUE(device.Free(bytes).ok());
  EXPECT_EQ(device.counters().allocated_bytes_max, 3072u);
}

TEST(HostAcceleratorTest, AnUpdateIsACommandWhoseAccessesAreChecked) {
  Bench bench(Paced(Pace::kLate));
  auto* const weight = reinterpret_cast<float*>(bench.bytes);
  auto* const gradient = weight + 8;
  const std::array<float, 16> start = {1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1};
  std::memcpy(bench.host.data(), start.data(), sizeof(start));
  ASSERT_TRUE(
      bench.device.MemcpyToDevice(bench.bytes, bench.host.data(), sizeof(start), bench.copies)
          .ok());
  bench.Order(bench.copies, bench.compute);
  const kernels::DeviceRun run = {
      .count = 8, .tensor_count = 8, .weight = weight, .gradient = gradient};
  const kernels::OptimizerSpec sgd("sgd", {{"lr", 0.5}});
  ASSERT_TRUE(bench.device.Update(sgd, 1, run, bench.compute).ok());
  bench.Finish(bench.compute);
  EXPECT_THAT(bench.device.Violations(), IsEmpty());
  EXPECT_EQ(weight[7], 7.5f);
  // The gradient's owner overwrites it while the next update may still read it.
  ASSERT_TRUE(bench.device.Update(sgd, 2, run, bench.compute).ok());
  bench.device.NoteUse(bench.copies, Use::kWrite, bench.bytes + 32, 32);
  EXPECT_THAT(bench.device.Violations(),
              ElementsAre(HasSubstr("a write by stream 1 that no event orders after a read")));
  bench.Finish(bench.copies);
  bench.Finish(bench.compute);
}

}  // namespace
}  // namespace offload::accelerator
