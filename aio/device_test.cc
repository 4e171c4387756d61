#include "aio/device.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "aio/locked_memory.h"
#include "aio/memory_device.h"
#include "aio/sector_4096_mount.h"
#include "aio/test_file.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "base/unique_fd.h"

namespace offload::aio {
namespace {

constexpr uint64_t kFileBytes = 16 << 20;
constexpr int kGuardMs = 60'000;  // a wake-up that never comes must fail the test, not hang it

enum class Kind {
  kUring,
  kLibaio,
  kThreads,
  kMemory,
  kScrambledMemory,
  kMemoryOf4KibSectors,
  kUringOn4KibSectors,
  kLibaioOn4KibSectors,
  kThreadsOn4KibSectors
};

Engine EngineOf(Kind kind) {
  switch (kind) {
    case Kind::kUring:
    case Kind::kUringOn4KibSectors:
      return Engine::kUring;
    case Kind::kLibaio:
    case Kind::kLibaioOn4KibSectors:
      return Engine::kLibaio;
    default:
      return Engine::kThreads;
  }
}

class DeviceTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    absl::StatusOr<MappedRegion> memory = MappedRegion::Anonymous(2 * kFileBytes);
    ASSERT_TRUE(memory.ok());
    memory_ = *std::move(memory);
    switch (GetParam()) {
      case Kind::kMemory:
        device_ = std::make_unique<MemoryDevice>(kFileBytes);
        break;
      case Kind::kScrambledMemory:
        device_ = std::make_unique<MemoryDevice>(kFileBytes, /*seed=*/7);
        break;
      case Kind::kMemoryOf4KibSectors:
        device_ = std::make_unique<MemoryDevice>(kFileBytes, std::nullopt,
                                                 /*offset_alignment=*/4096);
        break;
      case Kind::kUringOn4KibSectors:
      case Kind::kLibaioOn4KibSectors:
      case Kind::kThreadsOn4KibSectors: {
        const absl::StatusOr<std::string>& folder = Sector4096Mount::Folder();
        if (!folder.ok()) GTEST_SKIP() << folder.status();
        OpenFile(*folder);
        break;
      }
      default:
        OpenFile("");
    }
  }

  // Opens a device over a fresh file of its own.
  void OpenFile(const std::string& folder) {
    file_.emplace(kFileBytes, folder);
    const OpenOptions options = {
        .engine = EngineOf(GetParam()), .queue_depth = 8, .thread_count = 4};
    absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice(file_->Open(), options);
    if (options.engine != Engine::kThreads &&
        ErrorIdOf(device.status()) == ErrorId::kEngineUnavailable) {
      GTEST_SKIP() << device.status();
    }
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  std::byte* out() { return memory_.data(); }
  std::byte* in() { return memory_.data() + kFileBytes; }

  absl::Status Wait(absl::Status* status) {
    while (device_->in_flight() > 0) device_->Poll(/*wait=*/true);
    return *status;
  }
  absl::Status Write(uint64_t offset, std::vector<iovec> pieces) {
    absl::Status status = absl::UnknownError("not called");
    device_->Write(offset, pieces, [&](absl::Status outcome) { status = std::move(outcome); });
    return Wait(&status);
  }
  absl::Status Read(uint64_t offset, std::vector<iovec> pieces) {
    absl::Status status = absl::UnknownError("not called");
    device_->Read(offset, pieces, [&](absl::Status outcome) { status = std::move(outcome); });
    return Wait(&status);
  }
  absl::Status Flush() {
    absl::Status status = absl::UnknownError("not called");
    device_->Flush([&](absl::Status outcome) { status = std::move(outcome); });
    return Wait(&status);
  }

  std::optional<TestFile> file_;
  MappedRegion memory_;
  std::unique_ptr<Device> device_;  // last: its destructor may still use the memory
};

TEST_P(DeviceTest, ReturnsWhatWasWrittenForSizesFromOneBlockToFourMebibytes) {
  Random(1).Fill({out(), kFileBytes});
  uint64_t offset = 0;
  for (size_t size = 4096; size <= (4 << 20); size *= 4) {
    ASSERT_EQ(Write(offset, {{out() + offset, size}}), absl::OkStatus());
    ASSERT_EQ(Read(offset, {{in() + offset, size}}), absl::OkStatus());
    EXPECT_EQ(std::memcmp(in() + offset, out() + offset, size), 0) << size;
    offset += size;
  }
  EXPECT_EQ(Flush(), absl::OkStatus());
}

TEST_P(DeviceTest, GathersAndScattersPieces) {
  Random(2).Fill({out(), kFileBytes});
  const auto stride = 3 * 4096;
  std::vector<iovec> source, target;
  for (size_t i = 0; i < Device::kMaxPieces; ++i) {
    source.push_back({out() + i * stride, 8192});
    target.push_back({in() + (Device::kMaxPieces - 1 - i) * stride, 8192});
  }
  ASSERT_EQ(Write(1 << 20, source), absl::OkStatus());
  ASSERT_EQ(Read(1 << 20, target), absl::OkStatus());
  for (size_t i = 0; i < source.size(); ++i) {
    ASSERT_EQ(std::memcmp(source[i].iov_base, target[i].iov_base, 8192), 0) << i;
  }
}

TEST_P(DeviceTest, TakesManyMoreOperationsThanTheQueueIsDeep) {
  Random(3).Fill({out(), kFileBytes});
  const size_t size = 64 << 10, count = kFileBytes / size;
  std::vector<int> calls(count, 0);
  for (size_t i = 0; i < count; ++i) {
    const iovec piece = {out() + i * size, size};
    device_->Write(i * size, {&piece, 1}, [&, i](absl::Status status) {
      EXPECT_EQ(status, absl::OkStatus());
      // Started inside a callback, beyond the depth again.
      const iovec back = {in() + i * size, size};
      device_->Read(i * size, {&back, 1}, [&, i](absl::Status outcome) {
        EXPECT_EQ(outcome, absl::OkStatus());
        ++calls[i];
      });
    });
  }
  EXPECT_EQ(device_->in_flight(), count);
  size_t run_count = 0;
  while (device_->in_flight() > 0) run_count += device_->Poll(/*wait=*/true);
  EXPECT_EQ(run_count, 2 * count);
  EXPECT_EQ(calls, std::vector<int>(count, 1));
  EXPECT_EQ(std::memcmp(in(), out(), kFileBytes), 0);
}

TEST_P(DeviceTest, RefusesWhatIsMisalignedOrOutsideInTheNextPoll) {
  const Geometry& geometry = device_->geometry();
  const size_t sector = geometry.offset_alignment;
  const std::vector<std::pair<uint64_t, std::vector<iovec>>> cases = {
      {0, {}},
      {0, {{out(), 0}}},
      {0, {{nullptr, sector}}},
      {1, {{out(), sector}}},
      {sector / 2, {{out(), sector}}},
      {0, {{out(), sector - 1}}},
      {0, {{out(), sector / 2}}},
      {0, {{out() + 1, sector}}},
      {0, {{out(), sector}, {out() + 4096, 100}}},
      {kFileBytes, {{out(), sector}}},
      {kFileBytes - sector, {{out(), 2 * sector}}},
      {kFileBytes - sector, {{out(), sector}, {out() + 4096, sector}}},
      {UINT64_MAX - sector + 1, {{out(), sector}}},
      {sector, {{out(), size_t{0} - sector}}},
      {0, std::vector<iovec>(Device::kMaxPieces + 1, {out(), sector})},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    int calls = 0;
    const auto done = [&](absl::Status status) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << i << ": " << status;
      ++calls;
    };
    device_->Read(cases[i].first, cases[i].second, done);
    device_->Write(cases[i].first, cases[i].second, done);
    EXPECT_EQ(calls, 0) << "callbacks run only inside Poll";
    EXPECT_EQ(device_->in_flight(), 2u);
    EXPECT_EQ(device_->Poll(/*wait=*/true), 2u);
    EXPECT_EQ(calls, 2);
  }
  EXPECT_EQ(device_->counters().refusals, 2 * cases.size());
  EXPECT_EQ(device_->counters().read_errors, 0u);
  EXPECT_EQ(device_->counters().write_latency.count(), 0u);
  EXPECT_EQ(device_->counters().writes, 0u);
}

TEST_P(DeviceTest, ReadBehindTheEndOfATruncatedFileIsDataLoss) {
  if (file_.has_value()) {
    ASSERT_EQ(::truncate(file_->path.c_str(), 8192 + 512), 0);
  } else {
    static_cast<MemoryDevice&>(*device_).Truncate(8192 + 512);
  }
  EXPECT_EQ(Read(4096, {{in(), 4096}}), absl::OkStatus());
  for (const uint64_t offset : {uint64_t{4096}, uint64_t{8192}, uint64_t{1 << 20}}) {
    const absl::Status status = Read(offset, {{in(), 8192}});
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kIo);
  }
  EXPECT_EQ(device_->counters().read_errors, 3u);
  EXPECT_EQ(device_->counters().write_errors, 0u);
  EXPECT_GE(device_->counters().short_transfers, file_.has_value() ? 3u : 0u);
}

// The rest of a short transfer is found by the collecting part of Poll, after the submitting one.
TEST_P(DeviceTest, WaitingPollContinuesAShortTransferThatIsAlreadyBack) {
  if (!file_.has_value()) GTEST_SKIP() << "no file behind this device";
  ASSERT_EQ(::truncate(file_->path.c_str(), 8192), 0);
  for (int round = 0; round < 20; ++round) {
    absl::Status status;
    const iovec piece = {in(), 16384};
    device_->Read(0, {&piece, 1}, [&](absl::Status outcome) { status = std::move(outcome); });
    device_->Poll(/*wait=*/false);
    pollfd waiter = {device_->event_fd(), POLLIN, 0};
    if (device_->in_flight() > 0) {
      ASSERT_EQ(::poll(&waiter, 1, kGuardMs), 1);
    }
    EXPECT_TRUE(absl::IsDataLoss(Wait(&status))) << status;
  }
}

TEST_P(DeviceTest, DestructorCompletesWhatIsInFlightAndRefusesWhatCallbacksStart) {
  int written = 0, refused = 0;
  for (size_t i = 0; i < 100; ++i) {
    const iovec piece = {out() + i * 4096, 4096};
    device_->Write(i * 4096, {&piece, 1}, [&, piece](absl::Status status) {
      EXPECT_EQ(status, absl::OkStatus());
      ++written;
      device_->Read(0, {&piece, 1}, [&](absl::Status outcome) {
        EXPECT_TRUE(absl::IsCancelled(outcome)) << outcome;
        ++refused;
      });
    });
  }
  delete device_.get();  // not reset(), which clears the pointer that the callbacks use
  (void)device_.release();
  EXPECT_EQ(written, 100);
  EXPECT_EQ(refused, 100);
}

TEST_P(DeviceTest, PollWithNothingInFlightReturnsAtOnce) {
  EXPECT_EQ(device_->Poll(/*wait=*/true), 0u);
  EXPECT_EQ(device_->Poll(/*wait=*/false), 0u);
}

// A loop that sleeps only on the descriptor must always be woken, whatever became ready, and
// however.
TEST_P(DeviceTest, WaiterOnTheEventDescriptorIsAlwaysWoken) {
  if (device_->event_fd() < 0) {
    GTEST_SKIP() << "this device completes only in Poll, by contract";
  }
  Random random(5);
  int outstanding = 0;
  for (int round = 0; round < 300; ++round) {
    const uint64_t count = 1 + random.Below(20);  // queue depth is 8
    for (uint64_t i = 0; i < count; ++i) {
      ++outstanding;
      const auto done = [&](absl::Status) { --outstanding; };
      const iovec piece = {out() + i * 4096, 4096};
      const uint64_t choice = random.Below(8);
      if (choice == 0) {
        device_->Flush(done);
      } else if (choice == 1) {
        device_->Read(1, {&piece, 1}, done);  // refused
      } else if (choice < 4) {
        device_->Write(random.Below(4096) * 4096, {&piece, 1}, done);
      } else {
        device_->Read(random.Below(4096) * 4096, {&piece, 1}, done);
      }
    }
    device_->Poll(/*wait=*/false);
    while (outstanding > 0) {
      pollfd waiter = {device_->event_fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&waiter, 1, kGuardMs), 1) << outstanding << " outstanding";
      device_->Poll(/*wait=*/false);
    }
  }
}

TEST_P(DeviceTest, MayBeUsedAndClosedOnAnotherThread) {
  std::thread([&] { EXPECT_EQ(Write(0, {{out(), 1 << 20}}), absl::OkStatus()); }).join();
  EXPECT_EQ(Read(0, {{in(), 1 << 20}}), absl::OkStatus());
  std::thread([&] { device_.reset(); }).join();
}

TEST_P(DeviceTest, CountsOperationsAndBytes) {
  ASSERT_EQ(Write(0, {{out(), 8192}, {out(), 4096}}), absl::OkStatus());
  const uint64_t reads_of_probe = device_->counters().reads;
  ASSERT_EQ(Read(0, {{in(), 4096}}), absl::OkStatus());
  ASSERT_EQ(Flush(), absl::OkStatus());
  EXPECT_EQ(device_->counters().writes, 1u);
  EXPECT_EQ(device_->counters().written_bytes, 12288u);
  EXPECT_EQ(device_->counters().reads, reads_of_probe + 1);
  EXPECT_EQ(device_->counters().flushes, 1u);
  EXPECT_EQ(device_->counters().read_latency.count(), device_->counters().reads);
  EXPECT_EQ(device_->counters().write_latency.count(), 1u);
  EXPECT_EQ(device_->counters().flush_latency.count(), 1u);
  EXPECT_EQ(device_->counters().read_errors + device_->counters().write_errors +
                device_->counters().flush_errors + device_->counters().refusals,
            0u);
}

// A hint changes no result, whatever part of it a transfer uses, and whatever it tells of.
TEST_P(DeviceTest, RegisteredBuffersReadAndWriteTheSameBytes) {
  Random(4).Fill({out(), kFileBytes});
  const size_t half = kFileBytes / 2;
  device_->RegisterBuffer({out(), half});
  device_->RegisterBuffer({in(), half});
  device_->RegisterBuffer({});
  EXPECT_TRUE(device_->registered_bytes() == 0 || device_->registered_bytes() == 2 * half);
  EXPECT_EQ(device_->registered_bytes() != 0, device_->engine() == "uring" && MayLock(2 * half));
  const std::pair<size_t, size_t> cases[] = {
      {0, half}, {4096, 8192}, {half - 4096, 4096}, {half - 4096, 8192}, {half, 1 << 20}};
  for (const auto& [at, size] : cases) {
    ASSERT_EQ(Write(at, {{out() + at, size}}), absl::OkStatus()) << at;
    ASSERT_EQ(Read(at, {{in() + at, size}}), absl::OkStatus()) << at;
    EXPECT_EQ(std::memcmp(in() + at, out() + at, size), 0) << at << " " << size;
  }
}

TEST_P(DeviceTest, BuffersBeyondTheLimitOfLockedMemoryAreUsedUnregistered) {
  if (device_->engine() != "uring") GTEST_SKIP() << "only io_uring registers buffers";
  const int fd = file_->Open();  // the other user may not
  const bool ran = RunWithLittleMemlock(1 << 20, [&] {
    auto device = OpenDevice(fd, {.engine = Engine::kUring});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    device_->RegisterBuffer({out(), kFileBytes});
    EXPECT_EQ(device_->registered_bytes(), 0u);
    EXPECT_EQ(Write(0, {{out(), 1 << 20}}), absl::OkStatus());
    device_->RegisterBuffer({out(), 64 << 10});
    EXPECT_EQ(device_->registered_bytes(), uint64_t{64} << 10) << "what fits is registered";
    EXPECT_EQ(Read(0, {{in(), 1 << 20}}), absl::OkStatus());
  });
  if (!ran) {
    ::close(fd);
    GTEST_SKIP() << "less than 1 MiB may be locked here";
  }
}

TEST_P(DeviceTest, LockOnTheFileIsFreeAsSoonAsTheDeviceIsGone) {
  if (!file_.has_value()) GTEST_SKIP() << "no file behind this device";
  OpenOptions options;
  options.engine = EngineOf(GetParam());
  for (int round = 0; round < 20; ++round) {
    const int fd = file_->Open();
    ASSERT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0) << "round " << round << ": " << ErrnoText(errno);
    auto device = OpenDevice(fd, options);
    ASSERT_TRUE(device.ok()) << device.status();
  }
}

std::string NameOf(const testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::kUring:
      return "Uring";
    case Kind::kLibaio:
      return "Libaio";
    case Kind::kThreads:
      return "Threads";
    case Kind::kMemory:
      return "Memory";
    case Kind::kScrambledMemory:
      return "ScrambledMemory";
    case Kind::kMemoryOf4KibSectors:
      return "MemoryOf4KibSectors";
    case Kind::kUringOn4KibSectors:
      return "UringOn4KibSectors";
    case Kind::kLibaioOn4KibSectors:
      return "LibaioOn4KibSectors";
    case Kind::kThreadsOn4KibSectors:
      return "ThreadsOn4KibSectors";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(Engines, DeviceTest,
                         testing::Values(Kind::kUring, Kind::kLibaio, Kind::kThreads, Kind::kMemory,
                                         Kind::kScrambledMemory, Kind::kMemoryOf4KibSectors,
                                         Kind::kUringOn4KibSectors, Kind::kLibaioOn4KibSectors,
                                         Kind::kThreadsOn4KibSectors),
                         &NameOf);

// A drive of 4 KiB sectors says so, and refuses less instead of reading, merging and writing back.
TEST(Sector4096Test, FileTellsItsAlignmentsAndSmallerTransfersAreRefused) {
  const absl::StatusOr<std::string>& folder = Sector4096Mount::Folder();
  if (!folder.ok()) GTEST_SKIP() << folder.status();
  TestFile file(kFileBytes, *folder);
  auto device = OpenDevice(file.Open(), {});
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->geometry().offset_alignment, 4096u);
  EXPECT_LE((*device)->geometry().memory_alignment, 4096u);
  EXPECT_EQ((*device)->geometry().write_alignment(), 4096u);
  auto memory = MappedRegion::Anonymous(4096);
  ASSERT_TRUE(memory.ok());
  const iovec piece = {memory->data(), 512};
  absl::Status status;
  (*device)->Read(0, {&piece, 1}, [&](absl::Status outcome) { status = std::move(outcome); });
  while ((*device)->in_flight() > 0) (*device)->Poll(/*wait=*/true);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST(MemoryDeviceTest, SeedChangesTheOrderAndOnlyTheSeed) {
  const auto order_of = [](std::optional<uint64_t> seed) {
    MemoryDevice device(1 << 20, seed);
    std::vector<int> order;
    for (int i = 0; i < 50; ++i) device.Flush([&order, i](absl::Status) { order.push_back(i); });
    while (device.in_flight() > 0) device.Poll(/*wait=*/true);
    return order;
  };
  const std::vector<int> in_order = order_of(std::nullopt);
  EXPECT_TRUE(std::is_sorted(in_order.begin(), in_order.end()));
  EXPECT_EQ(order_of(1), order_of(1));
  EXPECT_NE(order_of(1), order_of(2));
  EXPECT_NE(order_of(1), in_order);
}

TEST(OpenDeviceTest, AutoFindsAnEngineAndSaysWhy) {
  TestFile file(kFileBytes);
  std::string reason;
  const auto device = OpenDevice(file.Open(), {}, &reason);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_NE(EngineOfName((*device)->engine()), std::nullopt);
  EXPECT_FALSE(reason.empty());
  EXPECT_EQ((*device)->geometry().size_bytes, kFileBytes);
  EXPECT_GE((*device)->geometry().offset_alignment, 512u);
}

TEST(OpenDeviceTest, EveryEngineIsFoundByItsName) {
  for (const Engine engine : {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads}) {
    EXPECT_EQ(EngineOfName(EngineName(engine)), engine);
    EXPECT_NE(kEngineNames.find(EngineName(engine)), std::string_view::npos);
  }
  for (const std::string& name : ChoicesIn(kIoChoices))
    EXPECT_NE(EngineOfName(name), std::nullopt) << name;
  EXPECT_EQ(EngineOfName("URING"), std::nullopt);
  EXPECT_EQ(EngineOfName(""), std::nullopt);
}

TEST(OpenDeviceTest, EnvironmentNamesTheEngine) {
  TestFile file(kFileBytes);
  for (const char* name : {"libaio", "threads"}) {
    ::setenv("OFFLOADD_IO", name, 1);
    const auto device = OpenDevice(file.Open(), {});
    ASSERT_TRUE(device.ok()) << device.status();
    EXPECT_EQ((*device)->engine(), name);
  }
  ::setenv("OFFLOADD_IO", "libfast", 1);
  EXPECT_EQ(ErrorIdOf(OpenDevice(file.Open(), {}).status()), ErrorId::kBadValue);
  ::unsetenv("OFFLOADD_IO");
}

TEST(OpenDeviceTest, RefusesWhatIsNoRegularFileAndClosesIt) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  UniqueFd writer(ends[1]);
  const int reader = ::fcntl(ends[0], F_DUPFD_CLOEXEC, 700);
  ::close(ends[0]);
  EXPECT_FALSE(OpenDevice(reader, {}).ok());
  EXPECT_EQ(::fcntl(reader, F_GETFD), -1);
}

}  // namespace
}  // namespace offload::aio
