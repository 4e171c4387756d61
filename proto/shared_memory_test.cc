#include "proto/shared_memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/failing_call.h"
#include "base/mapped_region.h"
#include "base/numa.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace offload::proto {
namespace {

constexpr uint64_t kVirtualBytes = 1ull << 40;  // far beyond any memory

SharedMemory Create(uint64_t size_bytes) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("test", size_bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

TEST(SharedMemoryTest, HasTheWholeSizeButOnlyThePagesThatWereAllocated) {
  SharedMemory memory = Create(kVirtualBytes);
  EXPECT_EQ(memory.size_bytes(), kVirtualBytes);
  ASSERT_TRUE(memory.Allocate(0, 4096).ok());
  ASSERT_TRUE(memory.Allocate(kVirtualBytes - 8192, 8192).ok());
  const auto allocated = memory.AllocatedBytes();
  ASSERT_TRUE(allocated.ok()) << allocated.status();
  EXPECT_EQ(*allocated, 3u * 4096);
  std::memset(memory.data() + kVirtualBytes - 8192, 1, 8192);
}

// The policy is the memory's, not the map's: another map has it, too.
TEST(SharedMemoryTest, LiesOnTheNodesThatItIsPlacedOn) {
  const std::vector<NumaNode> nodes = UsableNumaNodes();
  if (nodes.empty()) GTEST_SKIP() << "the kernel tells of no nodes";
  SharedMemory memory = Create(1 << 20);
  ASSERT_TRUE(memory.PlaceOn({nodes[0].number, 900}).ok());
  ASSERT_TRUE(memory.Allocate(0, 8192).ok());
  const auto map = MapFromDaemon(memory.fd(), 1 << 20, /*writable=*/false);
  ASSERT_TRUE(map.ok()) << map.status();
  for (const std::byte* const place : {memory.data() + 4096, map->data() + 4096}) {
    int mode = -1;
    ASSERT_EQ(::syscall(SYS_get_mempolicy, &mode, nullptr, 0, place, MPOL_F_ADDR), 0);
    EXPECT_EQ(mode, MPOL_INTERLEAVE);
  }
  EXPECT_EQ(ErrorIdOf(memory.PlaceOn({900})), ErrorId::kSharedMemory);
}

TEST(SharedMemoryTest, CanStillBeAllocatedAfterItWasSealed) {
  SharedMemory memory = Create(1 << 20);
  ASSERT_TRUE(memory.SealForWriting().ok());
  const absl::Status status = memory.Allocate(4096, 65536);
  ASSERT_TRUE(status.ok()) << status;
  memory.data()[4096] = std::byte{7};  // the old map stays writable
  EXPECT_EQ(*memory.AllocatedBytes(), 65536u);
}

TEST(SharedMemoryTest, NobodyCanResizePunchOrWriteWhatIsSealed) {
  SharedMemory memory = Create(1 << 20);
  ASSERT_TRUE(memory.Allocate(0, 8192).ok());
  EXPECT_EQ(::ftruncate(memory.fd(), 4096), -1);
  EXPECT_EQ(::ftruncate(memory.fd(), 2 << 20), -1);
  ASSERT_TRUE(memory.SealForWriting().ok());
  EXPECT_EQ(::fallocate(memory.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::pwrite(memory.fd(), "x", 1, 0), -1);
  EXPECT_EQ(::fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_FALSE(MapFromDaemon(memory.fd(), 1 << 20, /*writable=*/true).ok());
}

TEST(SharedMemoryTest, ARankThatMappedBeforeTheSealGoesOnWriting) {
  SharedMemory memory = Create(1 << 20);
  ASSERT_TRUE(memory.Allocate(0, 4096).ok());
  const auto region = MapFromDaemon(memory.fd(), 1 << 20, /*writable=*/true);
  ASSERT_TRUE(region.ok()) << region.status();
  ASSERT_TRUE(memory.SealForWriting().ok());
  region->data()[17] = std::byte{42};
  EXPECT_EQ(memory.data()[17], std::byte{42});
  const auto late = MapFromDaemon(memory.fd(), 1 << 20, /*writable=*/false);
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->data()[17], std::byte{42});
}

TEST(SharedMemoryTest, RefusesRangesOutside) {
  SharedMemory memory = Create(8192);
  EXPECT_EQ(ErrorIdOf(memory.Allocate(4096, 8192)), ErrorId::kProtocol);
  EXPECT_EQ(ErrorIdOf(memory.Allocate(UINT64_MAX, 1)), ErrorId::kProtocol);
  EXPECT_EQ(ErrorIdOf(memory.Allocate(1, UINT64_MAX)), ErrorId::kProtocol);
  EXPECT_TRUE(memory.Allocate(8192, 0).ok());
}

TEST(SharedMemoryTest, RefusesMoreThanTheMachineHasBeforeItTakesAnything) {
  const auto bytes = 2 * static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * 4096;
  SharedMemory memory = Create(bytes);
  EXPECT_EQ(ErrorIdOf(memory.Allocate(0, bytes)), ErrorId::kSharedMemory);
  EXPECT_EQ(*memory.AllocatedBytes(), 0u);
}

TEST(SharedMemoryTest, RefusesSizesThatNoFileHas) {
  EXPECT_EQ(ErrorIdOf(SharedMemory::Create("test", 0).status()), ErrorId::kSharedMemory);
  EXPECT_EQ(ErrorIdOf(SharedMemory::Create("test", UINT64_MAX).status()), ErrorId::kSharedMemory);
  EXPECT_EQ(ErrorIdOf(SharedMemory::Create("test", 1ull << 63).status()), ErrorId::kSharedMemory);
}

TEST(MapFromDaemonTest, RefusesMemoryThatCouldShrinkOrHasAnotherSize) {
  const UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  EXPECT_EQ(ErrorIdOf(MapFromDaemon(unsealed.get(), 8192, true).status()), ErrorId::kProtocol);
  SharedMemory memory = Create(8192);
  EXPECT_EQ(ErrorIdOf(MapFromDaemon(memory.fd(), 4096, true).status()), ErrorId::kProtocol);
}

TEST(MapFromDaemonTest, RefusesWhatIsNoMemoryAndWhatIsEmpty) {
  EXPECT_EQ(ErrorIdOf(MapFromDaemon(-1, 4096, true).status()), ErrorId::kSharedMemory);
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  const UniqueFd in(pipe_fds[0]), out(pipe_fds[1]);
  EXPECT_EQ(ErrorIdOf(MapFromDaemon(in.get(), 4096, true).status()), ErrorId::kProtocol);
  const UniqueFd empty(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::fcntl(empty.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_EQ(ErrorIdOf(MapFromDaemon(empty.get(), 0, true).status()), ErrorId::kProtocol);
}

// ---- System calls that fail --------------------------------------------------------------------

TEST(SharedMemoryFailureTest, EveryCallOfCreateIsChecked) {
  for (const char* call : {"memfd_create", "ftruncate", "fcntl", "madvise"}) {
    const FailingCall failing(call, ENOMEM);
    EXPECT_EQ(ErrorIdOf(SharedMemory::Create("test", 8192).status()), ErrorId::kSharedMemory)
        << call;
    EXPECT_EQ(failing.failures(), 1) << call;
  }
  EXPECT_EQ(ErrorIdOf(SharedMemory::Create("test", 1ull << 62).status()), ErrorId::kSharedMemory)
      << "more than an address space";
}

TEST(SharedMemoryFailureTest, ALimitOfTheSizeOfFilesIsNamed) {
  const FailingCall failing("ftruncate", EFBIG);
  const absl::Status status = SharedMemory::Create("test", 8192).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kSharedMemory);
  EXPECT_NE(status.message().find("ulimit -f"), std::string::npos) << status;
}

TEST(SharedMemoryFailureTest, ALimitOfAddressSpaceIsNamed) {
  const absl::Status status = SharedMemory::Create("test", 1ull << 62).status();
  EXPECT_NE(status.message().find("ulimit -v"), std::string::npos) << status;
}

TEST(SharedMemoryFailureTest, AKernelThatKnowsNoSealAgainstExecutionMakesMemoryWithoutIt) {
  const FailingCall failing("memfd_create", EINVAL);
  EXPECT_TRUE(SharedMemory::Create("test", 8192).ok());
  EXPECT_EQ(failing.failures(), 1);
}

TEST(SharedMemoryFailureTest, AllocatingIsTriedAgainWhenInterruptedAndToldWhenThereIsNoRoom) {
  SharedMemory memory = Create(8192);
  {
    const FailingCall failing("fallocate", EINTR, {.times = 3});
    EXPECT_TRUE(memory.Allocate(0, 4096).ok());
    EXPECT_EQ(failing.failures(), 3);
  }
  const FailingCall failing("fallocate", ENOSPC);
  EXPECT_EQ(ErrorIdOf(memory.Allocate(4096, 4096)), ErrorId::kSharedMemory);
}

TEST(SharedMemoryFailureTest, WhatCannotBeSealedOrMeasuredIsTold) {
  SharedMemory memory = Create(8192);
  {
    const FailingCall failing("fcntl", EPERM);
    EXPECT_EQ(ErrorIdOf(memory.SealForWriting()), ErrorId::kSharedMemory);
  }
  const FailingCall failing("fstat", EIO);
  EXPECT_EQ(ErrorIdOf(memory.AllocatedBytes().status()), ErrorId::kSharedMemory);
}

}  // namespace
}  // namespace offload::proto
