#include "aio/uring_ring.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/locked_memory.h"
#include "aio/test_file.h"
#include "base/mapped_region.h"
#include "base/unique_fd.h"

namespace offload::aio {
namespace {

constexpr uint64_t kFileBytes = 1 << 20;

// Uses the ring past UringRing, as code that went astray would.
class UringRingTest : public testing::Test {
 protected:
  void SetUp() override {
    absl::Status status = ring_.Init(fd_.get(), event_.get(), 8);
    if (!status.ok()) GTEST_SKIP() << status;
    absl::StatusOr<MappedRegion> memory = MappedRegion::Anonymous(1 << 20);
    ASSERT_TRUE(memory.ok());
    memory_ = *std::move(memory);
  }

  // The result of one operation.
  int Run(const std::function<void(io_uring_sqe*)>& prepare) {
    io_uring_sqe* const sqe = io_uring_get_sqe(ring_.get());
    prepare(sqe);
    EXPECT_EQ(io_uring_submit(ring_.get()), 1);
    io_uring_cqe* cqe = nullptr;
    EXPECT_EQ(io_uring_wait_cqe(ring_.get(), &cqe), 0);
    const int result = cqe->res;
    io_uring_cqe_seen(ring_.get(), cqe);
    return result;
  }

  TestFile file_{kFileBytes};
  UniqueFd fd_{file_.Open()};
  UniqueFd event_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  MappedRegion memory_;
  UringRing ring_;
};

TEST_F(UringRingTest, TransfersAndFlushesOfTheRegisteredFileWork) {
  const auto fixed = [](io_uring_sqe* sqe) { io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE); };
  EXPECT_EQ(Run([&](io_uring_sqe* sqe) {
              io_uring_prep_write(sqe, 0, memory_.data(), 4096, 0);
              fixed(sqe);
            }),
            4096);
  EXPECT_EQ(Run([&](io_uring_sqe* sqe) {
              io_uring_prep_read(sqe, 0, memory_.data(), 4096, 0);
              fixed(sqe);
            }),
            4096);
  EXPECT_EQ(Run([&](io_uring_sqe* sqe) {
              io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
              fixed(sqe);
            }),
            0);
}

TEST_F(UringRingTest, OtherFilesAreRefused) {
  std::memset(memory_.data(), 7, 4096);
  for (const int fd : {fd_.get(), event_.get(), 2}) {
    EXPECT_EQ(
        Run([&](io_uring_sqe* sqe) { io_uring_prep_write(sqe, fd, memory_.data(), 4096, 0); }),
        -EACCES);
  }
  EXPECT_EQ(::pread(fd_.get(), memory_.data() + 8192, 4096, 0), 4096);
  EXPECT_NE(std::memcmp(memory_.data(), memory_.data() + 8192, 4096), 0);
}

TEST_F(UringRingTest, OtherOperationsAreRefused) {
  const auto with_fixed_file = [](const std::function<void(io_uring_sqe*)>& prepare) {
    return [prepare](io_uring_sqe* sqe) {
      prepare(sqe);
      io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    };
  };
  const std::function<void(io_uring_sqe*)> operations[] = {
      [](io_uring_sqe* sqe) { io_uring_prep_nop(sqe); },
      [](io_uring_sqe* sqe) { io_uring_prep_openat(sqe, AT_FDCWD, "/etc/passwd", O_RDONLY, 0); },
      [](io_uring_sqe* sqe) { io_uring_prep_fallocate(sqe, 0, 0, 0, 4096); },
      [](io_uring_sqe* sqe) { io_uring_prep_unlink(sqe, "/nowhere", 0); },
      [](io_uring_sqe* sqe) { io_uring_prep_socket(sqe, 1, 1, 0, 0); },
      [](io_uring_sqe* sqe) { io_uring_prep_close(sqe, 2); },
  };
  for (const auto& operation : operations) {
    EXPECT_EQ(Run(operation), -EACCES);
    EXPECT_EQ(Run(with_fixed_file(operation)), -EACCES);
  }
}

TEST_F(UringRingTest, OtherRegistrationsAreRefused) {
  const int fd = fd_.get();
  EXPECT_EQ(io_uring_register_files_update(ring_.get(), 0, &fd, 1), -EACCES);
  EXPECT_EQ(io_uring_register_eventfd(ring_.get(), fd), -EACCES);
  EXPECT_EQ(io_uring_register_personality(ring_.get()), -EACCES);
  EXPECT_EQ(io_uring_unregister_buffers(ring_.get()), -EACCES);
  const iovec piece = {memory_.data(), 4096};
  EXPECT_EQ(io_uring_register_buffers(ring_.get(), &piece, 1), -EACCES);
}

TEST_F(UringRingTest, RegisteredBuffersAreFoundByTheBytesInside) {
  const std::span<std::byte> buffer = memory_.span().first(64 << 10);
  ring_.RegisterBuffer(buffer);
  if (ring_.registered_bytes() == 0) GTEST_SKIP() << "no buffers can be registered here";
  EXPECT_EQ(ring_.registered_bytes(), buffer.size());
  EXPECT_EQ(ring_.SlotOf(buffer.data(), buffer.size()), 0);
  EXPECT_EQ(ring_.SlotOf(buffer.data() + 4096, 4096), 0);
  EXPECT_EQ(ring_.SlotOf(buffer.data() + 4096, buffer.size()), std::nullopt);
  EXPECT_EQ(ring_.SlotOf(buffer.data() + buffer.size(), 1), std::nullopt);
  EXPECT_EQ(Run([&](io_uring_sqe* sqe) {
              io_uring_prep_read_fixed(sqe, 0, buffer.data() + 4096, 4096, 0, 0);
              io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
            }),
            4096);
}

TEST_F(UringRingTest, MoreBuffersThanSlotsAreLeftOut) {
  for (uint32_t i = 0; i < UringRing::kBufferSlots + 4; ++i) {
    ring_.RegisterBuffer(memory_.span().subspan(i * 4096, 4096));
  }
  EXPECT_LE(ring_.registered_bytes(), uint64_t{UringRing::kBufferSlots} * 4096);
  EXPECT_EQ(ring_.SlotOf(memory_.data() + uint64_t{UringRing::kBufferSlots} * 4096, 4096),
            std::nullopt);
}

// Enough for some rings, not for those that are still being given back.
constexpr size_t kLittleMemlockBytes = 64 << 10;

TEST_F(UringRingTest, RingsThatFollowEachOtherFitIntoTheLimitOfLockedMemory) {
  const bool ran = RunWithLittleMemlock(kLittleMemlockBytes, [&] {
    for (int i = 0; i < 100; ++i) {
      UringRing ring;
      const absl::Status status = ring.Init(fd_.get(), event_.get(), 64);
      ASSERT_TRUE(status.ok()) << "ring " << i << ": " << status;
    }
  });
  if (!ran) GTEST_SKIP() << "less than 64 KiB may be locked here";
}

TEST_F(UringRingTest, MemoryThatStaysInUseIsARefusalAfterABoundedWait) {
  const bool ran = RunWithLittleMemlock(kLittleMemlockBytes, [&] {
    std::vector<std::unique_ptr<UringRing>> rings;
    absl::Status status;
    while (status.ok() && rings.size() < kLittleMemlockBytes / 4096) {
      rings.push_back(std::make_unique<UringRing>());
      status = rings.back()->Init(fd_.get(), event_.get(), 64);
    }
    if (status.ok()) GTEST_SKIP() << "rings count against no limit here";
    EXPECT_TRUE(status.message().find("io_uring_setup: ENOMEM") == 0) << status;
    // One that is given back is enough for another, though not at once.
    rings.clear();
    do {
      status = UringRing().Init(fd_.get(), event_.get(), 64);
    } while (!status.ok() && status.message().find("ENOMEM") != std::string::npos);
    EXPECT_TRUE(status.ok()) << status;
  });
  if (!ran) GTEST_SKIP() << "less than 64 KiB may be locked here";
}

// They would have to fit beside what is registered already, which nobody gives back.
TEST_F(UringRingTest, BuffersThatCannotFitAreLeftOutAtOnce) {
  constexpr size_t kBytes = 48 << 10;
  bool counts = false;
  const bool ran = RunWithLittleMemlock(kLittleMemlockBytes, [&] {
    UringRing ring;
    ASSERT_TRUE(ring.Init(fd_.get(), event_.get(), 8).ok());
    ring.RegisterBuffer(memory_.span().first(kBytes));
    const uint64_t registered = ring.registered_bytes();
    rusage before{}, after{};
    ::getrusage(RUSAGE_THREAD, &before);
    ring.RegisterBuffer(memory_.span().subspan(kBytes, kBytes));
    ::getrusage(RUSAGE_THREAD, &after);
    counts = registered == kBytes && ring.registered_bytes() == kBytes;
    // Who waits sleeps.
    if (counts) {
      EXPECT_LT(after.ru_nvcsw - before.ru_nvcsw, 3);
    }
  });
  if (!ran || !counts) GTEST_SKIP() << "buffers count against no limit of 64 KiB here";
}

}  // namespace
}  // namespace offload::aio
