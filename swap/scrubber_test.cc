#include "swap/scrubber.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/error.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"
#include "swap/syscall_faults.h"

namespace offload::swap {
namespace {

class ScrubberTest : public testing::Test {
 protected:
  ScrubberTest() {
    const Layout layout = *Layout::Make(SmallSpec());
    auto memory = std::make_unique<aio::MemoryDevice>(layout.file_bytes());
    memory_ = memory.get();
    auto faulty = std::make_unique<aio::FaultyDevice>(std::move(memory),
                                                      aio::FaultyDevice::Options{.seed = 3});
    device_ = faulty.get();
    auto store = Store::CreateOn(std::move(faulty), SmallSpec(), {1});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(CommitScript(*store_), absl::OkStatus());
  }

  // Runs until one more pass has ended; time is what the scrubber asks for.
  void RunPass(Scrubber& scrubber) {
    const uint64_t passes = scrubber.counts().passes;
    while (scrubber.counts().passes == passes) {
      const double wait_seconds = scrubber.Turn(now_seconds_);
      if (std::isfinite(wait_seconds)) now_seconds_ += wait_seconds;
      while (!scrubber.idle()) store_->Poll(/*wait=*/true);
    }
  }
  uint64_t WrittenExtents() const {
    uint64_t count = 0;
    for (const ExtentId& id : AllExtents(*store_)) count += !store_->stamp(id).never_written();
    return count;
  }
  // Spoils the extent's bytes on the drive, wherever they are.
  void Spoil(const ExtentId& id) {
    const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
    Stamp stamp;
    ASSERT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus());
    const std::span<std::byte> drive = memory_->bytes();
    const auto at =
        std::search(drive.begin(), drive.end(), bytes.span().begin(), bytes.span().end());
    ASSERT_NE(at, drive.end());
    at[100] ^= std::byte{1};
  }

  aio::MemoryDevice* memory_ = nullptr;
  aio::FaultyDevice* device_ = nullptr;
  std::unique_ptr<Store> store_;
  double now_seconds_ = 1000;
};

TEST_F(ScrubberTest, APassReadsEveryWrittenExtentOnceAtTheRate) {
  Scrubber scrubber(store_.get(), {.bytes_per_second = 1e6, .pause_seconds = 50});
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().extents, WrittenExtents());
  EXPECT_EQ(scrubber.counts().bad_extents, 0u);
  // The first read is free, the last one's time is waited for before the pass ends.
  EXPECT_NEAR(scrubber.counts().last_pass_seconds,
              static_cast<double>(scrubber.counts().bytes) / 1e6, 1e-6);
  EXPECT_GT(scrubber.Turn(now_seconds_), 0) << "a pause between two passes";
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().extents, 2 * WrittenExtents());
}

TEST_F(ScrubberTest, ABadExtentIsNamedAndCountedOnceAndOthersGoOn) {
  const ExtentId id{0, Plane::kState0, 1};
  Spoil(id);
  Scrubber scrubber(store_.get(), {});
  RunPass(scrubber);
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().bad_extents, 1u);
  ASSERT_EQ(scrubber.bad_names().size(), 1u);
  EXPECT_EQ(scrubber.bad_names()[0], "tensor 0, plane state0, index 1");
  EXPECT_EQ(scrubber.counts().extents, 2 * WrittenExtents());
  EXPECT_EQ(store_->error_counts().lost_extents, 2u);
  EXPECT_FALSE(store_->failed());
}

TEST_F(ScrubberTest, AReadThatGoesWrongOnceIsNoFinding) {
  for (const aio::FaultKind kind :
       {aio::FaultKind::kReadError, aio::FaultKind::kBitFlip, aio::FaultKind::kMisdirectedRead}) {
    device_->AddFault({kind, 3});
    Scrubber scrubber(store_.get(), {});
    RunPass(scrubber);
    EXPECT_EQ(device_->faults_met(kind), 1u);
    EXPECT_EQ(scrubber.counts().bad_extents, 0u);
  }
  EXPECT_EQ(store_->error_counts().checksum_mismatches, 2u);
  EXPECT_EQ(store_->error_counts().read_errors, 1u);
  EXPECT_EQ(store_->error_counts().lost_extents, 0u);
}

TEST_F(ScrubberTest, AnExtentThatIsWrittenWhileItIsReadIsNotJudged) {
  const ExtentId id{0, Plane::kWeight, 0};
  Spoil(id);  // what the read returns is wrong anyhow
  Scrubber scrubber(store_.get(), {});
  scrubber.Turn(now_seconds_);  // begins with the first extent, which is `id`
  ASSERT_FALSE(scrubber.idle());
  const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
  Checksum checksum = store_->StartChecksum(id, store_->open_sequence());
  checksum.Update(bytes.span());
  const WriteRequest request{id, bytes.data(), checksum.Finish()};
  ASSERT_EQ(WriteNow(*store_, {&request, 1}), absl::OkStatus());
  while (!scrubber.idle()) store_->Poll(/*wait=*/true);
  EXPECT_EQ(scrubber.counts().overtaken, 1u);
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().bad_extents, 0u);
}

TEST_F(ScrubberTest, GoesOnOverAFailedStoreAndNotAtRateZero) {
  device_->AddFault({aio::FaultKind::kFlushError});
  EXPECT_FALSE(CommitNow(*store_, 9, "").ok());
  ASSERT_TRUE(store_->failed());
  Scrubber scrubber(store_.get(), {});
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().extents, WrittenExtents());
  EXPECT_EQ(store_->error_counts().flush_errors, 1u);
  Scrubber never(store_.get(), {.bytes_per_second = 0});
  EXPECT_FALSE(std::isfinite(never.Turn(now_seconds_)));
  EXPECT_TRUE(never.idle());
}

// P8: at most three reads in all, then that extent is lost, by name, and others go on.
TEST_F(ScrubberTest, ReadsThatFailAreTriedThreeTimesAndCostTheirExtentOnly) {
  const ExtentId id{0, Plane::kState1, 0}, other{0, Plane::kState0, 0};
  const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
  Stamp stamp;
  for (uint64_t failures : {1, 2}) {
    for (uint64_t nth = 1; nth <= failures; ++nth)
      device_->AddFault({aio::FaultKind::kReadError, nth});
    EXPECT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus()) << failures;
    EXPECT_TRUE(store_->Verify(id, stamp, bytes.span()));
    device_->ClearFaults();
  }
  device_->AddFault({aio::FaultKind::kReadError, 1, /*persistent=*/true});
  const absl::Status status = ReadNow(*store_, id, bytes.span(), &stamp);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kIo);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_NE(status.message().find("tensor 0, plane state1, index 0 cannot be read at byte"),
            std::string::npos)
      << status;
  device_->ClearFaults();
  EXPECT_EQ(ReadNow(*store_, other, bytes.span(), &stamp), absl::OkStatus());
  EXPECT_FALSE(store_->failed());
}

TEST_F(ScrubberTest, ReadAgainReturnsTheRightBytesOrTheName) {
  const ExtentId id{0, Plane::kState0, 0};
  const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
  Stamp stamp;
  device_->AddFault({aio::FaultKind::kBitFlip, 1});
  device_->AddFault({aio::FaultKind::kBitFlip, 2});
  ASSERT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus());
  ASSERT_FALSE(store_->Verify(id, stamp, bytes.span()));
  const auto again = [&] {
    std::optional<absl::Status> result;
    store_->ReadAgain({id, bytes.data()}, stamp, [&](absl::Status status) { result = status; });
    while (!result) store_->Poll(/*wait=*/true);
    return *result;
  };
  EXPECT_EQ(again(), absl::OkStatus());
  EXPECT_TRUE(store_->Verify(id, stamp, bytes.span()));
  Spoil(id);
  const absl::Status lost = again();
  EXPECT_EQ(ErrorIdOf(lost), ErrorId::kChecksum);
  EXPECT_NE(lost.message().find("tensor 0, plane state0, index 0"), std::string::npos) << lost;
}

TEST_F(ScrubberTest, ReadsNothingOnceItIsStoppedOrWhereThereIsNothing) {
  Scrubber scrubber(store_.get(), {.bytes_per_second = 1e6});
  scrubber.Stop();
  EXPECT_TRUE(std::isinf(scrubber.Turn(now_seconds_)));
  EXPECT_TRUE(scrubber.idle());
  StoreSpec empty = SmallSpec();
  empty.tensors.clear();
  const auto store =
      Store::CreateOn(std::make_unique<aio::MemoryDevice>(FormattedBytes(empty)), empty, {2});
  ASSERT_TRUE(store.ok()) << store.status();
  Scrubber of_nothing(store->get(), {.bytes_per_second = 1e6});
  EXPECT_TRUE(std::isinf(of_nothing.Turn(now_seconds_)));
}

TEST_F(ScrubberTest, ComparesWhereItIsToldTo) {
  std::vector<std::function<void()>> works, dones;
  Scrubber scrubber(store_.get(),
                    {.bytes_per_second = 1e9,
                     .compute = [&](std::function<void()> work, std::function<void()> done) {
                       works.push_back(std::move(work));
                       dones.push_back(std::move(done));
                     }});
  scrubber.Turn(now_seconds_);
  while (works.empty()) store_->Poll(/*wait=*/true);
  EXPECT_FALSE(scrubber.idle());
  works.front()();
  dones.front()();
  EXPECT_TRUE(scrubber.idle());
  EXPECT_EQ(scrubber.counts().extents, 1u);
  EXPECT_EQ(scrubber.counts().bad_extents, 0u);
}

TEST_F(ScrubberTest, LeavesOutWhatIsNotCommitted) {
  const uint64_t written = WrittenExtents();
  const uint64_t sequence = store_->open_sequence();
  ASSERT_EQ(WriteScript(*store_), absl::OkStatus());
  uint64_t open = 0;
  for (const ExtentId& id : AllExtents(*store_)) open += store_->stamp(id).sequence == sequence;
  ASSERT_GT(open, 0u);
  Scrubber scrubber(store_.get(), {.bytes_per_second = 1e9});
  RunPass(scrubber);
  EXPECT_LE(scrubber.counts().extents, written - open + (WrittenExtents() - written));
  EXPECT_EQ(scrubber.counts().extents, WrittenExtents() - open);
}

TEST_F(ScrubberTest, WithoutMemoryItComesBackAfterItsPause) {
  Scrubber scrubber(store_.get(), {.bytes_per_second = 1e9, .pause_seconds = 50});
  SyscallFaults faults(SyscallFault::kExhausted, 1);
  faults.Arm();
  const double wait_seconds = scrubber.Turn(now_seconds_);
  faults.Disarm();
  EXPECT_EQ(faults.failed_call(), "mmap");
  EXPECT_EQ(wait_seconds, 50);
  now_seconds_ += wait_seconds;
  RunPass(scrubber);
  EXPECT_EQ(scrubber.counts().extents, WrittenExtents());
}

}  // namespace
}  // namespace offload::swap
