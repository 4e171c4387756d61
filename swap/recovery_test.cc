#include "swap/recovery.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/random.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

// The bytes of a store after three commits, in memory.
class RecoveryTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    TemporaryPool pool;
    auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
    ASSERT_TRUE(store.ok()) << store.status();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(CommitScript(**store).ok());
    ASSERT_TRUE((*store)->Publish().ok());
    store->reset();
    std::ifstream file(pool.path() + "/job.offload", std::ios::binary);
    image_ = new std::string(std::istreambuf_iterator<char>(file), {});
  }
  static void TearDownTestSuite() { delete image_; }

  absl::StatusOr<RecoveredStore> Run(RecoveryDepth depth = RecoveryDepth::kWhole) {
    return Run(image_->size(), depth);
  }
  absl::StatusOr<RecoveredStore> Run(uint64_t file_bytes, RecoveryDepth depth) {
    return Recover(
        "image", file_bytes,
        [&](uint64_t offset_bytes, std::span<std::byte> bytes) {
          if (offset_bytes == unreadable_) return absl::DataLossError("EIO");
          if (offset_bytes + bytes.size() > file_bytes) return absl::DataLossError("end of file");
          std::memcpy(bytes.data(), image_->data() + offset_bytes, bytes.size());
          return absl::OkStatus();
        },
        depth);
  }
  void Flip(uint64_t offset_bytes, int bit) {
    (*image_)[offset_bytes] = static_cast<char>((*image_)[offset_bytes] ^ (1 << bit));
  }
  void ExpectDamaged() {
    EXPECT_EQ(ErrorIdOf(Run().status()), ErrorId::kStoreDamaged) << Run().status();
  }

  // Flips each bit of a page in turn: each is seen, and recovery ends as if nothing had happened.
  void ExpectEveryBitIsRepaired(uint64_t page_offset_bytes, RecoveryDepth depth) {
    const absl::StatusOr<RecoveredStore> good = Run(depth);
    ASSERT_TRUE(good.ok()) << good.status();
    ASSERT_TRUE(good->repairs.empty());
    for (uint64_t bit = 0; bit < kPageBytes * 8; ++bit) {
      Flip(page_offset_bytes + bit / 8, bit % 8);
      const absl::StatusOr<RecoveredStore> found = Run(depth);
      Flip(page_offset_bytes + bit / 8, bit % 8);
      ASSERT_TRUE(found.ok()) << "bit " << bit << ": " << found.status();
      ASSERT_EQ(found->repairs.size(), 1u) << "bit " << bit;
      ASSERT_EQ(found->committed.sequence, 3u) << "bit " << bit;
      ASSERT_EQ(IdentityCrc(found->superblock), IdentityCrc(good->superblock)) << "bit " << bit;
      if (depth == RecoveryDepth::kSummary) continue;
      ASSERT_EQ(std::memcmp(found->table.data(), good->table.data(), good->table.size()), 0)
          << "bit " << bit;
    }
  }

  static std::string* image_;
  uint64_t unreadable_ = UINT64_MAX;
};
std::string* RecoveryTest::image_ = nullptr;

TEST_F(RecoveryTest, FindsTheLastCommit) {
  const absl::StatusOr<RecoveredStore> found = Run();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->committed.sequence, 3u);
  EXPECT_EQ(found->committed.epoch, EpochOf(3));
  EXPECT_EQ(found->committed.blob, BlobOf(3));
  EXPECT_EQ(found->spec.tensors, SmallSpec().tensors);
}

TEST_F(RecoveryTest, EveryBitOfEitherSuperblockCopyIsTakenFromItsTwin) {
  ExpectEveryBitIsRepaired(Layout::SuperblockOffset(2),
                           RecoveryDepth::kSummary);  // sequence 3 is odd
  ExpectEveryBitIsRepaired(Layout::SuperblockOffset(3), RecoveryDepth::kSummary);
}

TEST_F(RecoveryTest, EveryBitOfATablePageIsTakenFromItsTwin) {
  const Layout layout = *Layout::Make(SmallSpec());
  ExpectEveryBitIsRepaired(layout.TableOffset(1, 0), RecoveryDepth::kWhole);
}

TEST_F(RecoveryTest, EveryBitOfAHeaderIsTakenFromItsTwin) {
  ExpectEveryBitIsRepaired(Layout::HeaderOffset(0), RecoveryDepth::kSummary);
}

TEST_F(RecoveryTest, SpecAndBlobAreTakenFromTheirTwins) {
  const Layout layout = *Layout::Make(SmallSpec());
  for (const uint64_t offset : {kSpecAreaOffset, layout.BlobOffset(1, 0)}) {
    Flip(offset + 5, 2);
    const absl::StatusOr<RecoveredStore> found = Run();
    Flip(offset + 5, 2);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->repairs.size(), 1u);
    EXPECT_EQ(found->committed.blob, BlobOf(3));
  }
}

TEST_F(RecoveryTest, BothTwinsBadIsDamageAndNeverAnOlderCommit) {
  const Layout layout = *Layout::Make(SmallSpec());
  const std::pair<uint64_t, uint64_t> twins[] = {
      {Layout::HeaderOffset(0), Layout::HeaderOffset(1)},
      {Layout::SpecOffset(0, EncodeSpec(SmallSpec()).size()),
       Layout::SpecOffset(1, EncodeSpec(SmallSpec()).size())},
      {layout.TableOffset(1, 0), layout.TableOffset(1, 1)},
      {layout.BlobOffset(1, 0), layout.BlobOffset(1, 1)}};
  for (const auto& [first, second] : twins) {
    Flip(first + 50, 0), Flip(second + 60, 0);
    ExpectDamaged();
    Flip(first + 50, 0), Flip(second + 60, 0);
  }
}

TEST_F(RecoveryTest, ATornSuperblockLeavesTheCommitBefore) {
  // As a crash leaves it: the lower copy is torn, the higher one still of commit 1.
  const std::string kept = *image_;
  Flip(Layout::SuperblockOffset(2) + 600, 0);
  SuperblockPage page;
  std::memcpy(&page, kept.data() + Layout::SuperblockOffset(0), sizeof(page));
  page.sequence = 1, page.copy = 3, page.table_copy = 1;
  SealSuperblock(&page);
  std::memcpy(image_->data() + Layout::SuperblockOffset(3), &page, sizeof(page));
  for (uint32_t copy : {0, 1}) {
    std::memcpy(&page, kept.data() + Layout::SuperblockOffset(copy), sizeof(page));
    SuperblockPage parent;
    std::memcpy(&parent, image_->data() + Layout::SuperblockOffset(3), sizeof(parent));
    page.parent_crc = IdentityCrc(parent);
    SealSuperblock(&page);
    std::memcpy(image_->data() + Layout::SuperblockOffset(copy), &page, sizeof(page));
  }
  const absl::StatusOr<RecoveredStore> found = Run();
  *image_ = kept;
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->committed.sequence, 2u);
  EXPECT_EQ(found->committed.blob, BlobOf(2));
}

TEST_F(RecoveryTest, ASuperblockPairOfWhichNoneIsIntactIsDamageAndNeverTheCommitBefore) {
  for (int pair : {0, 2}) {
    for (int copy : {pair, pair + 1}) Flip(Layout::SuperblockOffset(copy) + 600, 0);
    ExpectDamaged();
    for (int copy : {pair, pair + 1}) Flip(Layout::SuperblockOffset(copy) + 600, 0);
  }
}

TEST_F(RecoveryTest, ALostWriteOfOneTableMirrorIsSeen) {
  // The mirror still holds what commit 1 wrote there: intact, of the right copy, but older.
  const Layout layout = *Layout::Make(SmallSpec());
  const uint64_t at = layout.TableOffset(1, 0);
  const std::string kept = image_->substr(at, kPageBytes);
  TablePage page;
  std::memcpy(&page, kept.data(), sizeof(page));
  page.sequence = 1;
  for (TableEntry& entry : page.entries) entry = {};
  SealTablePage(&page);
  std::memcpy(image_->data() + at, &page, sizeof(page));
  const absl::StatusOr<RecoveredStore> found = Run();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->repaired_table_pages, std::vector<uint32_t>{0});
  // In both mirrors it is the root checksum that tells.
  std::memcpy(image_->data() + layout.TableOffset(1, 1), &page, sizeof(page));
  ExpectDamaged();
  for (uint32_t mirror : {0, 1}) image_->replace(layout.TableOffset(1, mirror), kPageBytes, kept);
  EXPECT_TRUE(Run().ok());
}

TEST_F(RecoveryTest, OfTwoTableMirrorsOfOneSequenceTheOneThatHasTheRootIsTaken) {
  // A commit that a crash abandoned left its page in one mirror; the write of the second is lost.
  const std::string kept = *image_;
  const Layout layout = *Layout::Make(SmallSpec());
  for (uint32_t mirror : {0, 1}) {
    const uint64_t at = layout.TableOffset(1, mirror);
    TablePage page;
    std::memcpy(&page, kept.data() + at, sizeof(page));
    page.entries[0].word ^= 1;
    SealTablePage(&page);
    std::memcpy(image_->data() + at, &page, sizeof(page));
    const absl::StatusOr<RecoveredStore> found = Run();
    *image_ = kept;
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->repaired_table_pages, std::vector<uint32_t>{0});
    EXPECT_EQ(std::memcmp(found->table.data(), kept.data() + at, kPageBytes), 0);
  }
}

TEST_F(RecoveryTest, UnreadablePagesCountAsDamagedOnes) {
  const Layout layout = *Layout::Make(SmallSpec());
  for (const uint64_t offset :
       {Layout::HeaderOffset(0), Layout::SuperblockOffset(2), kSpecAreaOffset,
        layout.TableOffset(1, 0), layout.BlobOffset(1, 1)}) {
    unreadable_ = offset;
    const absl::StatusOr<RecoveredStore> found = Run();
    ASSERT_TRUE(found.ok()) << offset << ": " << found.status();
    EXPECT_EQ(found->committed.sequence, 3u);
  }
}

TEST_F(RecoveryTest, TruncationAtEverySectorIsDamage) {
  for (uint64_t size = 0; size < image_->size(); size += 512) {
    const absl::StatusOr<RecoveredStore> found = Run(size, RecoveryDepth::kWhole);
    ASSERT_EQ(ErrorIdOf(found.status()), ErrorId::kStoreDamaged) << size;
  }
}

TEST_F(RecoveryTest, ContradictingSuperblocksAreDamage) {
  const auto with_epoch = [&](uint32_t copy, uint64_t epoch) {
    SuperblockPage page;
    std::memcpy(&page, image_->data() + Layout::SuperblockOffset(copy), sizeof(page));
    page.epoch = epoch;
    SealSuperblock(&page);
    std::memcpy(image_->data() + Layout::SuperblockOffset(copy), &page, sizeof(page));
  };
  with_epoch(3, 9999);
  ExpectDamaged();
  with_epoch(3, EpochOf(3));
  with_epoch(0, 9999);  // of the commit before: the last one is not its child
  ExpectDamaged();
  with_epoch(0, EpochOf(2));
  EXPECT_TRUE(Run().ok());
}

TEST_F(RecoveryTest, RandomDamageNeverCrashesAndNeverInventsACommit) {
  const std::string kept = *image_;
  const Layout layout = *Layout::Make(SmallSpec());
  Random random(7);
  for (int round = 0; round < 3000; ++round) {
    for (uint64_t edits = 1 + random.Below(6); edits > 0; --edits) {
      const uint64_t from = random.Below(layout.PlaceOffset(0) / 512) * 512,
                     to = random.Below(24) * 4096;
      if (random.OneIn(2)) {
        Flip(from + random.Below(512), static_cast<int>(random.Below(8)));
      } else {
        std::memcpy(image_->data() + to, kept.data() + from, 512);  // misdirected
      }
    }
    const absl::StatusOr<RecoveredStore> found = Run();
    if (found.ok()) {
      EXPECT_TRUE(found->committed.sequence == 3 || found->committed.sequence == 2);
      EXPECT_EQ(found->committed.blob, BlobOf(found->committed.sequence));
    } else {
      EXPECT_EQ(ErrorIdOf(found.status()), ErrorId::kStoreDamaged) << found.status();
    }
    if (round % 50 == 0) {
      *image_ = kept;
    } else {
      image_->replace(0, layout.PlaceOffset(0), kept, 0, layout.PlaceOffset(0));
    }
  }
  *image_ = kept;
}

// Pages whose checksums are right and that contradict each other, or the file.
class ContradictionTest : public RecoveryTest {
 protected:
  ContradictionTest() : saved_(*image_) {}
  ~ContradictionTest() override { *image_ = saved_; }

  template <typename Page>
  Page At(uint64_t offset_bytes) const {
    Page page;
    std::memcpy(&page, image_->data() + offset_bytes, sizeof(page));
    return page;
  }
  void Put(uint64_t offset_bytes, const void* bytes, size_t size_bytes) {
    std::memcpy(image_->data() + offset_bytes, bytes, size_bytes);
  }
  void EditHeader(uint32_t copy, const std::function<void(HeaderPage*)>& edit) {
    auto page = At<HeaderPage>(Layout::HeaderOffset(copy));
    edit(&page);
    SealHeader(&page);
    Put(Layout::HeaderOffset(copy), &page, sizeof(page));
  }
  void EditSuperblock(uint32_t copy, const std::function<void(SuperblockPage*)>& edit) {
    auto page = At<SuperblockPage>(Layout::SuperblockOffset(copy));
    edit(&page);
    SealSuperblock(&page);
    Put(Layout::SuperblockOffset(copy), &page, sizeof(page));
  }
  // Puts another spec in place of both copies, under headers that name it.
  void PutSpec(std::string spec) {
    for (const uint32_t copy : {0, 1}) {
      EditHeader(copy, [&](HeaderPage* page) {
        page->spec_bytes = spec.size();
        page->spec_crc = Crc32c(0, spec.data(), spec.size());
      });
      Put(Layout::SpecOffset(copy, spec.size()), spec.data(), spec.size());
    }
  }
  void ExpectDamagedAndRestore(std::string_view why) {
    const absl::Status status = Run().status();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kStoreDamaged) << why;
    EXPECT_TRUE(absl::StrContains(status.message(), std::string(why))) << status;
    *image_ = saved_;
  }

  const std::string saved_;
};

TEST_F(ContradictionTest, HeadersThatDifferAreRefused) {
  EditHeader(1, [](HeaderPage* page) { page->uuid[0] ^= 1; });
  ExpectDamagedAndRestore("contradict");
  EditHeader(1, [](HeaderPage* page) { page->spec_crc ^= 1; });
  ExpectDamagedAndRestore("contradict");
  EditHeader(1, [](HeaderPage* page) { page->spec_bytes += 1; });
  ExpectDamagedAndRestore("contradict");
  EditHeader(1, [](HeaderPage* page) { page->file_bytes -= kPageBytes; });
  ExpectDamagedAndRestore("contradict");
}

TEST_F(ContradictionTest, ImpossibleSpecsAreRefused) {
  for (const uint64_t spec_bytes :
       {uint64_t{0}, uint64_t{image_->size() / 2}, uint64_t{image_->size()}, UINT64_MAX}) {
    for (const uint32_t copy : {0, 1})
      EditHeader(copy, [&](HeaderPage* page) { page->spec_bytes = spec_bytes; });
    ExpectDamagedAndRestore("impossible spec length");
  }
  PutSpec("no spec at all");
  ExpectDamagedAndRestore("spec section");
  StoreSpec spec = SmallSpec();
  spec.tensors[1].element_count = Limits::kElementsMax;
  PutSpec(EncodeSpec(spec));
  ExpectDamagedAndRestore("too many extents");
  spec.tensors[1].element_count = 1;
  spec.tensors[2].element_count = 70000;
  PutSpec(EncodeSpec(spec));
  ExpectDamagedAndRestore("header says");
}

TEST_F(ContradictionTest, SuperblocksThatDoNotFitTheFileAreRefused) {
  // Three commits: the third in 2 and 3, the second in 0 and 1.
  for (const uint32_t copy : {2, 3})
    EditSuperblock(copy, [](SuperblockPage* page) { page->table_page_count = 2; });
  ExpectDamagedAndRestore("table pages");
  for (const uint32_t copy : {2, 3})
    EditSuperblock(copy, [](SuperblockPage* page) { page->generation_count = 3; });
  ExpectDamagedAndRestore("the file has");
  // The first commit, were the other pair neither empty nor intact.
  for (const uint32_t copy : {2, 3})
    EditSuperblock(copy, [](SuperblockPage* page) { page->sequence = 1; });
  for (const uint32_t copy : {0, 1}) Flip(Layout::SuperblockOffset(copy) + 1000, 3);
  ExpectDamagedAndRestore("neither superblock");
}

}  // namespace
}  // namespace offload::swap
