#include "zero3/paged_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/unique_fd.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kMiB = 1 << 20;

std::string Folder() { return ::testing::TempDir(); }

std::shared_ptr<PagedMemory> Open(uint64_t resident_bytes_max = 64 * kMiB) {
  auto memory = PagedMemory::Open(Folder(), resident_bytes_max);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *memory;
}

// Pages of files that this process has in memory.
uint64_t FileBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssFile:")) return std::strtoull(line.c_str() + 8, nullptr, 10) << 10;
  }
  return 0;
}

std::vector<uint64_t> Values(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<uint64_t> values(count);
  std::ranges::generate(values, [&] { return random.Next(); });
  return values;
}

TEST(PagedMemoryTest, BlocksHoldWhatIsWritten) {
  const auto memory = Open();
  std::vector<std::pair<std::byte*, std::vector<uint64_t>>> blocks;
  for (const size_t count : {1, 511, 512, 513, 100000}) {
    std::byte* const block = *memory->Allocate(count * 8);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 4096, 0);
    blocks.emplace_back(block, Values(count, count));
    std::memcpy(block, blocks.back().second.data(), count * 8);
  }
  EXPECT_GT(memory->allocated_bytes(), 100000 * 8);
  for (const auto& [block, values] : blocks) {
    EXPECT_EQ(std::memcmp(block, values.data(), values.size() * 8), 0);
    memory->Free(block);
  }
  EXPECT_EQ(memory->allocated_bytes(), 0);
  EXPECT_TRUE(memory->Check().ok());
}

TEST(PagedMemoryTest, WhatIsUsedStaysNearTheBound) {
  constexpr uint64_t kBlock = 4 * kMiB, kBlocks = 64, kMax = 16 * kMiB;
  const auto memory = Open(kMax);
  const uint64_t before = FileBytes();
  std::vector<std::byte*> blocks;
  {
    const PagedMemory::Use use(memory);
    for (uint64_t i = 0; i < kBlocks; ++i) {
      blocks.push_back(*memory->Allocate(kBlock));
      const std::vector<uint64_t> values = Values(i, kBlock / 8);
      std::memcpy(blocks.back(), values.data(), kBlock);
    }
    while (FileBytes() > before + 2 * kMax)  // a test's time, else
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (uint64_t i = 0; i < kBlocks; ++i) {
      const std::vector<uint64_t> values = Values(i, kBlock / 8);
      ASSERT_EQ(std::memcmp(blocks[i], values.data(), kBlock), 0) << i;
    }
  }
  EXPECT_LT(FileBytes(), before + kMiB);
  for (std::byte* const block : blocks) memory->Free(block);
}

TEST(PagedMemoryTest, UsesOfSeveralThreadsMayEndInAnyOrder) {
  constexpr uint64_t kMax = 4 * kMiB;
  const auto memory = Open(kMax);
  const uint64_t before = FileBytes();
  std::byte* const block = *memory->Allocate(64 * kMiB);
  {
    auto first = std::make_unique<PagedMemory::Use>(memory);
    const PagedMemory::Use second(memory);
    first.reset();
    std::memset(block, 1, 64 * kMiB);
    while (FileBytes() > before + 2 * kMax)  // a test's time, else
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  memory->Free(block);
}

TEST(PagedMemoryTest, IsUsedWhereNoThreadCanBeMade) {
  const auto memory = Open();
  std::byte* const block = *memory->Allocate(kMiB);
  pthread_attr_t usual, too_large;
  ASSERT_EQ(::pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(::pthread_attr_init(&too_large), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&too_large, size_t{1} << 50), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&too_large), 0);
  {
    const PagedMemory::Use use(memory);
    std::memset(block, 1, kMiB);
  }
  ASSERT_EQ(::pthread_setattr_default_np(&usual), 0);
  const PagedMemory::Use use(memory);
  EXPECT_EQ(static_cast<int>(block[0]), 1);
  memory->Free(block);
}

TEST(PagedMemoryTest, AFreeBlockFollowsAnotherWhileItIsUsed) {
  const auto memory = Open();
  const PagedMemory::Use use(memory);
  std::byte* const first = *memory->Allocate(kMiB);
  memory->Free(first);
  std::byte* const second = *memory->Allocate(kMiB);
  EXPECT_EQ(second, first);
  std::byte* const third = *memory->Allocate(kMiB);
  EXPECT_NE(third, second);
  memory->Free(second);
  memory->Free(third);
}

TEST(PagedMemoryTest, AFullDriveIsAnErrorAndLosesNoRoom) {
  struct statfs drive {};
  ASSERT_EQ(::statfs(Folder().c_str(), &drive), 0);
  const auto memory = Open();
  const uint64_t too_much = (uint64_t{drive.f_blocks} + 1) * drive.f_bsize;
  const auto refused = memory->Allocate(too_much);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(memory->Allocate(UINT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  std::byte* const block = *memory->Allocate(kMiB);
  std::memset(block, 1, kMiB);
  memory->Free(block);
}

TEST(PagedMemoryTest, TheLimitOfFileSizesIsAnErrorAndNoSignal) {
  struct rlimit usual {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &usual), 0);
  const struct rlimit limit = {8 * kMiB, usual.rlim_max};
  const auto memory = Open();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto refused = memory->Allocate(9 * kMiB);
  const auto block = memory->Allocate(8 * kMiB);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &usual), 0);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  ASSERT_TRUE(block.ok()) << block.status();
  std::memset(*block, 1, 8 * kMiB);
  memory->Free(*block);
}

TEST(PagedMemoryTest, AFolderThatCannotBeWrittenIsAnError) {
  EXPECT_FALSE(PagedMemory::Open("/proc", kMiB).ok());
  EXPECT_FALSE(PagedMemory::Open(Folder() + "/there/is/none", kMiB).ok());
}

// Whether the kernel can read it for this process.
bool IsReadable(const std::byte* byte) {
  const UniqueFd file(::open(Folder().c_str(), O_TMPFILE | O_WRONLY, 0600));
  return ::write(file.get(), byte, 1) == 1;
}

TEST(PagedMemoryTest, AChildHasNoBlocks) {
  const auto memory = Open();
  std::byte* const block = *memory->Allocate(kMiB);
  std::memset(block, 7, kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    if (IsReadable(block)) ::_exit(1);
    // Nothing else comes to be there.
    if (::mmap(block, kMiB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) !=
        MAP_FAILED)
      ::_exit(2);
    memory->Free(block);
    if (memory->Allocate(kMiB).ok()) ::_exit(3);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(IsReadable(block));
  EXPECT_EQ(static_cast<int>(block[kMiB - 1]), 7);
  memory->Free(block);
}

// A child that was forked within a use has nobody to wait for.
TEST(PagedMemoryTest, AChildLeavesTheUsesOfItsParent) {
  auto memory = Open();
  auto use = std::make_unique<PagedMemory::Use>(memory);
  const pid_t child = ::fork();
  if (child == 0) {
    use.reset();
    memory.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(PagedMemoryTest, ThreadsAllocateAndFree) {
  const auto memory = Open(kMiB);
  const PagedMemory::Use use(memory);
  std::vector<std::jthread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&memory, seed] {
      Random random(seed);
      std::vector<std::pair<std::byte*, size_t>> mine;
      for (int i = 0; i < 200; ++i) {
        const size_t bytes = 4096 * (1 + random.Next() % 64);
        std::byte* const block = *memory->Allocate(bytes);
        std::memset(block, static_cast<int>(seed), bytes);
        mine.emplace_back(block, bytes);
        if (mine.size() < 8) continue;
        const auto [oldest, its_bytes] = mine.front();
        for (size_t at = 0; at < its_bytes; at += 512)
          ASSERT_EQ(static_cast<uint64_t>(oldest[at]), seed);
        memory->Free(oldest);
        mine.erase(mine.begin());
      }
      for (const auto& [block, bytes] : mine) memory->Free(block);
    });
  }
  threads.clear();
  EXPECT_EQ(memory->allocated_bytes(), 0);
}

}  // namespace
}  // namespace offload::zero3
