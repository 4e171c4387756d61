#include "swap/scratch.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/random.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

std::unique_ptr<Scratch> MustCreate(const TemporaryPool& pool) {
  auto scratch = Scratch::Create({pool.path()}, {});
  EXPECT_TRUE(scratch.ok()) << scratch.status();
  return scratch.ok() ? *std::move(scratch) : nullptr;
}

absl::Status Wait(Scratch& scratch, const std::function<void(Scratch::Done)>& start) {
  std::optional<absl::Status> result;
  start([&](absl::Status status) { result = status; });
  while (!result) scratch.Poll(true);
  return *result;
}

absl::Status Write(Scratch& scratch, uint64_t offset_bytes, std::span<const std::byte> bytes) {
  return Wait(scratch,
              [&](Scratch::Done done) { scratch.Write(offset_bytes, bytes, std::move(done)); });
}
absl::Status Read(Scratch& scratch, uint64_t offset_bytes, std::span<std::byte> bytes) {
  return Wait(scratch,
              [&](Scratch::Done done) { scratch.Read(offset_bytes, bytes, std::move(done)); });
}

TEST(ScratchTest, WhatWasWrittenComesBackAlsoAfterGrowing) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  EXPECT_TRUE(pool.Files().empty()) << "the file has no name";
  const MappedRegion written = Buffer(1 << 20), got = Buffer(1 << 20);
  Random(1).Fill(written.span());
  ASSERT_EQ(Write(*scratch, 0, written.span().first(8192)), absl::OkStatus());
  ASSERT_EQ(Write(*scratch, 8192, written.span().subspan(8192, 4096)), absl::OkStatus());
  const int event_fd = scratch->event_fd();
  ASSERT_EQ(scratch->Reserve(4 << 20), absl::OkStatus());
  EXPECT_EQ(scratch->event_fd(), event_fd);
  EXPECT_EQ(scratch->size_bytes(), uint64_t{4} << 20);
  ASSERT_EQ(scratch->Reserve(1 << 20), absl::OkStatus()) << "never shrinks";
  EXPECT_EQ(scratch->size_bytes(), uint64_t{4} << 20);
  ASSERT_EQ(Write(*scratch, 3 << 20, written.span()), absl::OkStatus());
  ASSERT_EQ(Read(*scratch, 3 << 20, got.span()), absl::OkStatus());
  EXPECT_EQ(std::memcmp(got.data(), written.data(), got.size()), 0);
  ASSERT_EQ(Read(*scratch, 0, got.span().first(12288)), absl::OkStatus()) << "a run of two writes";
  EXPECT_EQ(std::memcmp(got.data(), written.data(), 12288), 0);
}

TEST(ScratchTest, ReadsThatDoNotMatchWritesAreRefused) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(16384);
  ASSERT_TRUE(Write(*scratch, 0, bytes.span()).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*scratch, 0, bytes.span().first(4096))));
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*scratch, 4096, bytes.span().first(4096))));
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*scratch, 16384, bytes.span().first(4096))));
  // A write into the middle of another makes the rest of that one unreadable.
  ASSERT_TRUE(Write(*scratch, 4096, bytes.span().first(4096)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*scratch, 0, bytes.span())));
  EXPECT_TRUE(Read(*scratch, 4096, bytes.span().first(4096)).ok());
}

TEST(ScratchTest, BytesThatChangedDuringTheirWriteAreSeen) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(4096);
  std::optional<absl::Status> result;
  scratch->Write(0, bytes.span(), [&](absl::Status status) { result = status; });
  bytes.data()[7] =
      std::byte{1};  // after its checksum was taken, before it went to the drive or not
  while (!result) scratch->Poll(true);
  ASSERT_TRUE(result->ok());
  const absl::Status status = Read(*scratch, 0, bytes.span());
  EXPECT_TRUE(status.ok() ? bytes.data()[7] == std::byte{0}
                          : ErrorIdOf(status) == ErrorId::kChecksum)
      << status;
}

TEST(ScratchTest, TheDescriptorTellsOfCompletions) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(4096);
  bool done = false;
  scratch->Write(0, bytes.span(), [&](absl::Status) { done = true; });
  scratch->Poll(false);
  while (!done) {
    pollfd waiting{scratch->event_fd(), POLLIN, 0};
    ASSERT_EQ(poll(&waiting, 1, 10000), 1);
    scratch->Poll(false);
  }
}

TEST(ScratchTest, WhatDoesNotFitIsRefusedAndTheRestStays) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(4096);
  ASSERT_TRUE(Write(*scratch, 0, bytes.span()).ok());
  struct statvfs info {};
  ASSERT_EQ(statvfs(pool.path().c_str(), &info), 0);
  const absl::Status status = scratch->Reserve(uint64_t{info.f_blocks} * info.f_frsize * 2);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
  EXPECT_TRUE(Read(*scratch, 0, bytes.span()).ok());
  EXPECT_EQ(ErrorIdOf(Scratch::Create({pool.path() + "/missing"}, {}).status()),
            ErrorId::kPoolMissing);
}

TEST(ScratchTest, ALimitOfFileSizesIsTold) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  rlimit usual{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &usual), 0);
  const rlimit little{1 << 20, usual.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
  const absl::Status status = scratch->Reserve(4 << 20);
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &usual), 0);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
  EXPECT_NE(status.message().find("ulimit -f"), absl::string_view::npos) << status;
  EXPECT_TRUE(scratch->Reserve(4 << 20).ok());
}

TEST(ScratchTest, RefusedTransfersAreToldAndRecordNothing) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(8192);
  EXPECT_TRUE(absl::IsInvalidArgument(Write(*scratch, 0, {})));
  EXPECT_TRUE(absl::IsInvalidArgument(Write(*scratch, 100, bytes.span().first(4096))));
  EXPECT_FALSE(Read(*scratch, 100, bytes.span().first(4096)).ok()) << "it was not written";
  ASSERT_EQ(Write(*scratch, 0, bytes.span().first(4096)), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*scratch, 0, bytes.span().subspan(1, 4096))))
      << "memory that is not aligned";
  // Two that end at once end in one Poll.
  int refused = 0;
  for (int i = 0; i < 2; ++i)
    scratch->Write(0, {}, [&](absl::Status status) { refused += !status.ok(); });
  EXPECT_EQ(scratch->Poll(/*wait=*/true), 2u);
  EXPECT_EQ(refused, 2);
}

TEST(ScratchTest, NeighboursKeepTheirChecksumsAndAreReadOneByOne) {
  TemporaryPool pool;
  auto scratch = MustCreate(pool);
  const MappedRegion bytes = Buffer(4096);
  for (const uint64_t offset : {0, 4096, 16384})
    ASSERT_EQ(Write(*scratch, offset, bytes.span()), absl::OkStatus());
  EXPECT_EQ(Read(*scratch, 0, bytes.span()), absl::OkStatus());
  ASSERT_EQ(Write(*scratch, 4096, bytes.span()), absl::OkStatus());
  EXPECT_EQ(Read(*scratch, 0, bytes.span()), absl::OkStatus());
  EXPECT_EQ(Read(*scratch, 16384, bytes.span()), absl::OkStatus());
}

// As a job's status asks for it.
TEST(ScratchTest, ItsDeviceIsThereWhileAnotherThreadMakesRoom) {
  const TemporaryPool pool;
  auto scratch = Scratch::Create({pool.path()}, {});
  ASSERT_TRUE(scratch.ok()) << scratch.status();
  std::atomic<bool> has_room = false;
  std::thread grows([&] {
    for (uint64_t mib = 1; mib <= 64; ++mib)
      EXPECT_EQ((*scratch)->Reserve(mib << 20), absl::OkStatus());
    has_room = true;
  });
  while (!has_room) {
    const auto device = (*scratch)->device();
    EXPECT_NE(device, nullptr);
    if (device == nullptr) break;
    EXPECT_EQ(device->counters().written_bytes.load(), 0u);
  }
  grows.join();
}

TEST(ScratchTest, GoesRoundAllPools) {
  const TemporaryPool first, second, third;
  auto scratch = Scratch::Create({first.path(), second.path(), third.path()}, {});
  ASSERT_TRUE(scratch.ok()) << scratch.status();
  ASSERT_EQ((*scratch)->Reserve(uint64_t{6} << 20), absl::OkStatus());
  const MappedRegion written = Buffer(5 << 20), got = Buffer(5 << 20);
  Random(2).Fill(written.span());
  ASSERT_EQ(Write(**scratch, 1 << 19, written.span()), absl::OkStatus());
  EXPECT_EQ((*scratch)->device()->counters().written_bytes.load(), uint64_t{5} << 20);
  ASSERT_EQ((*scratch)->Reserve(uint64_t{20} << 20), absl::OkStatus()) << "and keeps what it has";
  ASSERT_EQ(Read(**scratch, 1 << 19, got.span()), absl::OkStatus());
  EXPECT_EQ(std::memcmp(got.data(), written.data(), got.size()), 0);
  const absl::Status missing =
      Scratch::Create({first.path(), second.path() + "/missing"}, {}).status();
  EXPECT_EQ(ErrorIdOf(missing), ErrorId::kPoolMissing) << missing;
}

// A transfer whose checksum is taken elsewhere ends when both are done, whichever is first.
TEST(ScratchTest, ChecksumsTakenElsewhereAreWaitedFor) {
  TemporaryPool pool;
  std::vector<std::pair<std::function<void()>, std::function<void()>>> computations;
  ScratchOptions options;
  options.compute = [&](std::function<void()> work, std::function<void()> done) {
    computations.emplace_back(std::move(work), std::move(done));
  };
  auto scratch = Scratch::Create({pool.path()}, options);
  ASSERT_TRUE(scratch.ok()) << scratch.status();
  const auto compute = [&] {
    ASSERT_EQ(computations.size(), 1u);
    const auto [work, done] = std::move(computations.front());
    computations.clear();
    work();
    done();
  };
  MappedRegion bytes = Buffer(4096);
  std::optional<absl::Status> result;
  const auto note = [&](absl::Status status) { result = status; };
  (*scratch)->Write(0, bytes.span(), note);
  while ((*scratch)->Poll(true) == 0) {
  }
  EXPECT_FALSE(result.has_value()) << "the checksum is missing";
  compute();
  ASSERT_EQ(result, absl::OkStatus());
  (*scratch)->Write(4096, bytes.span(), note);
  result.reset();
  compute();
  EXPECT_FALSE(result.has_value()) << "the bytes are on their way";
  while (!result) (*scratch)->Poll(true);
  ASSERT_EQ(result, absl::OkStatus());
  result.reset();
  (*scratch)->Read(0, bytes.span(), note);
  while ((*scratch)->Poll(true) == 0) {
  }
  EXPECT_FALSE(result.has_value()) << "the bytes are not verified";
  bytes.data()[9] ^= std::byte{1};
  compute();
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(ErrorIdOf(*result), ErrorId::kChecksum) << *result;
}

TEST(ScratchTest, WhatIsUnderWayIsToldBeforeTheSpaceGoes) {
  TemporaryPool pool;
  const MappedRegion bytes = Buffer(4096);
  std::vector<absl::Status> told;
  auto scratch = MustCreate(pool);
  scratch->Write(0, bytes.span(), [&](absl::Status status) { told.push_back(status); });
  scratch->Write(0, {}, [&](absl::Status status) { told.push_back(status); });
  scratch.reset();
  EXPECT_EQ(told.size(), 2u);
}

}  // namespace
}  // namespace offload::swap
