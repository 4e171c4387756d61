#include "swap/fsck.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/error.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

using Part = FsckFinding::Part;

// A store in memory after three commits of the script, with its bytes to spoil.
class FsckTest : public testing::Test {
 protected:
  FsckTest() : layout_(*Layout::Make(SmallSpec())), device_(layout_.file_bytes()) {
    const absl::StatusOr<std::unique_ptr<Store>> store =
        Store::CreateOn(std::make_unique<BorrowedDevice>(&device_), SmallSpec(), {1, 2, 3});
    EXPECT_TRUE(store.ok()) << store.status();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(CommitScript(**store), absl::OkStatus());
  }

  FsckReport Check(bool repair = false) { return CheckOn(&device_, repair); }
  static FsckReport CheckOn(aio::Device* device, bool repair = false) {
    FsckOptions options;
    options.repair = repair;
    absl::StatusOr<FsckReport> report = CheckDevice(device, "the store", options);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : FsckReport{};
  }
  void Flip(uint64_t offset_bytes) { device_.bytes()[offset_bytes] ^= std::byte{4}; }
  std::string Bytes() {
    return {reinterpret_cast<const char*>(device_.bytes().data()), device_.bytes().size()};
  }
  // Where the last commit has an extent.
  uint64_t OffsetOf(const ExtentId& id) {
    const absl::StatusOr<std::unique_ptr<Store>> store =
        Store::OpenOn(std::make_unique<BorrowedDevice>(&device_));
    EXPECT_TRUE(store.ok()) << store.status();
    const MappedRegion bytes = Buffer((*store)->ExtentBytes(id));
    Stamp stamp;
    EXPECT_EQ(ReadNow(**store, id, bytes.span(), &stamp), absl::OkStatus());
    const size_t at = Bytes().find({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    EXPECT_NE(at, std::string::npos);
    return at;
  }

  const Layout layout_;
  aio::MemoryDevice device_;
};

TEST_F(FsckTest, AWholeStoreIsCleanAndEverythingWasLookedAt) {
  const FsckReport report = Check();
  EXPECT_TRUE(report.is_clean()) << report.findings.front().what;
  EXPECT_EQ(report.job, "job");
  EXPECT_EQ(report.committed.sequence, 3u);
  EXPECT_EQ(report.copies_checked, 2u + kSuperblockCount + 2 + 2 * layout_.table_page_count() + 2);
  EXPECT_EQ(report.extents_checked + report.extents_never_written, layout_.entry_count());
  EXPECT_GT(report.extents_checked, 0u);
}

TEST_F(FsckTest, ADamagedCopyIsFoundKeptWithoutRepairAndTakenFromItsTwinWithIt) {
  const uint64_t spec_bytes = EncodeSpec(SmallSpec()).size();
  const struct {
    uint64_t offset_bytes;
    Part part;
  } copies[] = {{Layout::HeaderOffset(0), Part::kHeader},
                {Layout::HeaderOffset(1), Part::kHeader},
                {Layout::SuperblockOffset(0), Part::kSuperblock},
                {Layout::SuperblockOffset(1), Part::kSuperblock},
                {Layout::SuperblockOffset(2), Part::kSuperblock},
                {Layout::SuperblockOffset(3), Part::kSuperblock},
                {Layout::SpecOffset(0, spec_bytes), Part::kSpec},
                {Layout::SpecOffset(1, spec_bytes), Part::kSpec},
                {layout_.TableOffset(1, 0), Part::kTable},
                {layout_.TableOffset(1, 1), Part::kTable},
                {layout_.BlobOffset(1, 0), Part::kState},
                {layout_.BlobOffset(1, 1), Part::kState}};
  const std::string whole = Bytes();
  for (const auto& copy : copies) {
    SCOPED_TRACE(copy.offset_bytes);
    Flip(copy.offset_bytes + 9);
    const std::string damaged = Bytes();
    const FsckReport found = Check();
    EXPECT_EQ(Bytes(), damaged);
    ASSERT_EQ(found.findings.size(), 1u);
    EXPECT_EQ(found.findings[0].part, copy.part);
    EXPECT_TRUE(found.has_open_repairs());
    EXPECT_FALSE(found.has_loss());
    const FsckReport repaired = Check(/*repair=*/true);
    EXPECT_EQ(repaired.findings.size(), 1u);
    EXPECT_FALSE(repaired.has_open_repairs());
    EXPECT_EQ(Bytes(), whole);
    EXPECT_TRUE(Check().is_clean());
  }
}

// Superblocks as a run leaves them that ends in a commit, and as none does.
TEST_F(FsckTest, ACommitThatEndedBetweenItsSuperblocksIsNoDamageAndALostWriteIs) {
  const auto page = [this](uint32_t copy) {
    return std::span(device_.bytes()).subspan(Layout::SuperblockOffset(copy), kPageBytes);
  };
  for (uint64_t sequence = 4; sequence <= 5; ++sequence) {  // into each pair
    const uint32_t lower = sequence % 2 * 2;
    SCOPED_TRACE(lower);
    std::string before[2], after[2];
    const auto keep = [&](std::string* kept) {
      for (uint32_t i = 0; i < 2; ++i)
        kept[i].assign(reinterpret_cast<const char*>(page(lower + i).data()), kPageBytes);
    };
    const auto put = [&](uint32_t i, const std::string& bytes) {
      std::memcpy(page(lower + i).data(), bytes.data(), kPageBytes);
    };
    keep(before);
    {
      const auto store = Store::OpenOn(std::make_unique<BorrowedDevice>(&device_));
      ASSERT_TRUE(store.ok()) << store.status();
      ASSERT_EQ(CommitScript(**store), absl::OkStatus());
      ASSERT_EQ((*store)->committed().sequence, sequence);
    }
    keep(after);

    put(1, before[1]);
    const FsckReport unfinished = Check();
    ASSERT_EQ(unfinished.findings.size(), 1u);
    EXPECT_EQ(unfinished.committed.sequence, sequence);
    EXPECT_TRUE(unfinished.findings[0].is_unfinished);
    EXPECT_TRUE(unfinished.is_clean());
    EXPECT_FALSE(unfinished.has_loss() || unfinished.has_open_repairs());
    EXPECT_NE(unfinished.findings[0].what.find("between the two writes"), std::string::npos);
    EXPECT_TRUE(Check(/*repair=*/true).findings[0].repaired);
    EXPECT_TRUE(Check().findings.empty());
    keep(before);
    EXPECT_EQ(before[1], after[1]);

    put(1, "torn" + after[1].substr(4));  // by a loss of power, or by the drive
    const FsckReport torn = Check();
    ASSERT_EQ(torn.findings.size(), 1u);
    EXPECT_TRUE(torn.has_open_repairs());
    EXPECT_NE(torn.findings[0].what.find("loss of power"), std::string::npos);
    put(1, after[1]);
    put(0, "torn" + after[0].substr(4));  // it was durable before the other was written
    const FsckReport damaged = Check();
    ASSERT_EQ(damaged.findings.size(), 1u);
    EXPECT_TRUE(damaged.has_open_repairs());
    EXPECT_EQ(damaged.findings[0].what.find("loss of power"), std::string::npos);
    put(0, after[0]);
  }
}

// The lower one is written and durable first.
TEST_F(FsckTest, ASuperblockBehindItsTwinThatNoCommitLeavesSoIsALostWrite) {
  const auto at = [this](uint32_t copy) {
    return device_.bytes().data() + Layout::SuperblockOffset(copy);
  };
  std::string second(reinterpret_cast<const char*>(at(0)), kPageBytes);
  for (uint64_t sequence = 4; sequence <= 5; ++sequence) {
    const auto store = Store::OpenOn(std::make_unique<BorrowedDevice>(&device_));
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    std::string fourth(reinterpret_cast<const char*>(at(0)), kPageBytes);
    std::memcpy(at(0), second.data(), kPageBytes);  // of the last commit, then of the one before
    const FsckReport report = Check();
    std::memcpy(at(0), fourth.data(), kPageBytes);
    ASSERT_EQ(report.findings.size(), 1u);
    EXPECT_FALSE(report.is_clean());
    EXPECT_TRUE(report.has_open_repairs());
    EXPECT_NE(report.findings[0].what.find("a write was lost"), std::string::npos)
        << report.findings[0].what;
  }
}

TEST_F(FsckTest, ALostExtentIsNamedAndNeverWritten) {
  const ExtentId id{0, Plane::kState0, 1};
  Flip(OffsetOf(id) + 77);
  const std::string damaged = Bytes();
  const FsckReport report = Check(/*repair=*/true);
  EXPECT_EQ(Bytes(), damaged);
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].part, Part::kExtent);
  EXPECT_NE(report.findings[0].what.find("tensor 0, plane state0, index 1"), std::string::npos);
  EXPECT_TRUE(report.has_loss());
  EXPECT_FALSE(report.has_open_repairs());
}

TEST_F(FsckTest, AStoreThatRecoveryRefusesIsOneFindingAndIsNotTouched) {
  for (uint32_t mirror = 0; mirror < 2; ++mirror) Flip(layout_.TableOffset(1, mirror) + 100);
  Flip(Layout::HeaderOffset(1) + 20);  // could be repaired, and yet is not
  const std::string damaged = Bytes();
  const FsckReport report = Check(/*repair=*/true);
  EXPECT_EQ(Bytes(), damaged);
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].part, Part::kStore);
  EXPECT_TRUE(report.has_loss());
}

TEST_F(FsckTest, AReadThatFailsOnceOrReturnsAWrongBitOnceIsNoFinding) {
  for (const aio::FaultKind kind :
       {aio::FaultKind::kReadError, aio::FaultKind::kBitFlip, aio::FaultKind::kMisdirectedRead}) {
    uint64_t met = 1;
    for (uint64_t nth = 1; met > 0; ++nth) {
      aio::FaultyDevice faulty(std::make_unique<BorrowedDevice>(&device_), {.seed = nth});
      faulty.AddFault({kind, nth});
      const FsckReport report = CheckOn(&faulty);
      // A copy that was read once with a wrong bit looks damaged; nothing is ever lost.
      EXPECT_FALSE(report.has_loss()) << nth;
      if (kind == aio::FaultKind::kReadError) {
        EXPECT_TRUE(report.is_clean()) << nth << ": " << report.findings.front().what;
      }
      met = faulty.faults_met();
    }
  }
}

TEST_F(FsckTest, ASectorThatCannotBeReadIsNamed) {
  const ExtentId id{0, Plane::kState1, 0};
  const uint64_t at = OffsetOf(id);
  // The drive ends in the middle of the extent.
  const std::string whole = Bytes();
  device_.Truncate(at + 5 * kPageBytes + 100);
  const FsckReport report = CheckOn(&device_);
  ASSERT_FALSE(report.is_clean());
  bool named = false;
  for (const FsckFinding& finding : report.findings) {
    named |= finding.what.find(absl::StrCat("tensor 0, plane state1, index 0: cannot be read "
                                            "at byte ",
                                            at + 5 * kPageBytes)) != std::string::npos;
  }
  EXPECT_TRUE(named) << report.findings.front().what;
}

TEST(FsckFileTest, LooksAtClosedStoresOnlyAndNamesTheHolder) {
  TemporaryPool pool;
  auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(CommitScript(**store), absl::OkStatus());
  ASSERT_EQ((*store)->Publish(), absl::OkStatus());
  const auto held = CheckStore(pool.path(), "job", {});
  EXPECT_EQ(ErrorIdOf(held.status()), ErrorId::kStoreLocked);
  EXPECT_NE(held.status().message().find(absl::StrCat("process ", getpid())), std::string::npos)
      << held.status();
  store->reset();
  const auto closed = CheckStore(pool.path(), "job", {});
  ASSERT_TRUE(closed.ok()) << closed.status();
  EXPECT_TRUE(closed->is_clean());
  EXPECT_EQ(closed->committed.epoch, EpochOf(1));
  EXPECT_TRUE(absl::IsNotFound(CheckStore(pool.path(), "other", {}).status()));
}

}  // namespace
}  // namespace offload::swap
