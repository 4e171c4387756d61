// What a drive can do to bytes without saying so, and that none of it is ever handed out as good.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/error.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

class CorruptionTest : public testing::Test {
 protected:
  CorruptionTest()
      : memory_(Layout::Make(SmallSpec())->file_bytes()),
        faulty_(std::make_unique<BorrowedDevice>(&memory_),
                {.seed = 1, .remember_unflushed = false, .remember_previous = true}) {
    auto store = Store::CreateOn(std::make_unique<BorrowedDevice>(&faulty_), SmallSpec(), {5});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(CommitScript(*store_), absl::OkStatus());
  }

  aio::MemoryDevice memory_;
  aio::FaultyDevice faulty_;
  std::unique_ptr<Store> store_;
};

TEST_F(CorruptionTest, EveryBitOfAnExtentIsCovered) {
  const ExtentId id{2, Plane::kWeight, 0};
  const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
  Stamp stamp;
  ASSERT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus());
  ASSERT_FALSE(stamp.never_written());
  const std::span<std::byte> drive = memory_.bytes();
  const auto at = std::search(drive.begin(), drive.end(), bytes.span().begin(), bytes.span().end());
  ASSERT_NE(at, drive.end());
  uint64_t undetected = 0;
  for (uint64_t bit = 0; bit < bytes.size() * 8; ++bit) {
    const std::byte flip{static_cast<uint8_t>(1 << bit % 8)};
    at[static_cast<ptrdiff_t>(bit / 8)] ^= flip;
    ASSERT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus());
    undetected += store_->Verify(id, stamp, bytes.span());
    at[static_cast<ptrdiff_t>(bit / 8)] ^= flip;
  }
  EXPECT_EQ(undetected, 0u) << "of " << bytes.size() * 8;
}

TEST_F(CorruptionTest, EveryMisdirectedOrStaleReadIsSeen) {
  uint64_t met = 0;
  for (const aio::FaultKind kind : {aio::FaultKind::kMisdirectedRead, aio::FaultKind::kStaleRead}) {
    for (const ExtentId& id : AllExtents(*store_)) {
      if (store_->stamp(id).never_written()) continue;
      for (int round = 0; round < 5; ++round) {
        const MappedRegion right = Buffer(store_->ExtentBytes(id)),
                           got = Buffer(store_->ExtentBytes(id));
        Stamp stamp;
        ASSERT_EQ(ReadNow(*store_, id, right.span(), &stamp), absl::OkStatus());
        ASSERT_TRUE(store_->Verify(id, stamp, right.span()));
        faulty_.AddFault({kind});
        ASSERT_EQ(ReadNow(*store_, id, got.span(), &stamp), absl::OkStatus());
        faulty_.ClearFaults();
        ++met;
        const bool is_same = std::memcmp(right.data(), got.data(), got.size()) == 0;
        EXPECT_EQ(store_->Verify(id, stamp, got.span()), is_same)
            << aio::FaultName(kind) << " of " << NameOf(id);
      }
    }
  }
  EXPECT_EQ(faulty_.faults_met(), met);
}

// OK when everything that verifies is what the script has written.
absl::Status CheckNothingWrongVerifies(Store& store, uint64_t sequence) {
  for (const ExtentId& id : AllExtents(store)) {
    uint64_t written = sequence;
    while (written > 0 && !IsWrittenIn(id, written)) --written;
    const MappedRegion expected = Buffer(store.ExtentBytes(id)),
                       got = Buffer(store.ExtentBytes(id));
    if (written > 0) FillExtent(id, written, expected.span());
    Stamp stamp;
    if (!ReadNow(store, id, got.span(), &stamp).ok()) continue;
    if (!store.Verify(id, stamp, got.span())) continue;
    if (std::memcmp(expected.data(), got.data(), got.size()) != 0)
      return absl::InternalError(absl::StrCat(NameOf(id), " verifies with wrong bytes"));
  }
  return absl::OkStatus();
}

// Each write of a commit, data, table, blob and superblocks, meets each silent fault.
TEST_F(CorruptionTest, ASilentFaultOfAnyWriteOfACommitNeverVerifies) {
  const std::vector<std::byte> kept(memory_.bytes().begin(), memory_.bytes().end());
  for (const aio::FaultKind kind : {aio::FaultKind::kMisdirectedWrite, aio::FaultKind::kLostWrite,
                                    aio::FaultKind::kTornWriteSilent}) {
    uint64_t met = 1;
    for (uint64_t nth = 1; met > 0; ++nth) {
      SCOPED_TRACE(absl::StrCat(std::string(aio::FaultName(kind)), " ", nth));
      store_.reset();
      std::copy(kept.begin(), kept.end(), memory_.bytes().begin());
      aio::FaultyDevice faulty(std::make_unique<BorrowedDevice>(&memory_),
                               {.seed = nth, .remember_unflushed = false});
      auto store = Store::OpenOn(std::make_unique<BorrowedDevice>(&faulty));
      ASSERT_TRUE(store.ok()) << store.status();
      faulty.AddFault({kind, nth});
      ASSERT_EQ(CommitScript(**store), absl::OkStatus());
      met = faulty.faults_met();
      EXPECT_EQ(CheckNothingWrongVerifies(**store, 4), absl::OkStatus());
      store->reset();
      auto again = Store::OpenOn(std::make_unique<BorrowedDevice>(&memory_));
      if (!again.ok()) {
        EXPECT_EQ(ErrorIdOf(again.status()), ErrorId::kStoreDamaged) << again.status();
        continue;
      }
      EXPECT_EQ((*again)->committed().sequence, 4u);
      EXPECT_EQ(CheckNothingWrongVerifies(**again, 4), absl::OkStatus());
    }
  }
}

}  // namespace
}  // namespace offload::swap
