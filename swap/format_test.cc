#include "swap/format.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/crc32c.h"
#include "base/random.h"
#include "swap/layout.h"

namespace offload::swap {
namespace {

constexpr StoreUuid kUuid = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr StoreUuid kOtherUuid = {2};

template <typename Page>
ConstPageBytes BytesOf(const Page& page) {
  return ConstPageBytes(reinterpret_cast<const std::byte*>(&page), kPageBytes);
}

template <typename Page>
void FlipBit(Page* page, size_t bit) {
  reinterpret_cast<uint8_t*>(page)[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
}

HeaderPage GoodHeader() {
  HeaderPage page{
      .uuid = kUuid, .copy = 1, .spec_crc = 7, .spec_bytes = 100, .file_bytes = 1 << 20};
  SealHeader(&page);
  return page;
}

SuperblockPage GoodSuperblock() {
  SuperblockPage page{.uuid = kUuid,
                      .copy = 3,
                      .parent_crc = 9,
                      .sequence = 11,
                      .epoch = 5,
                      .table_copy = 1,
                      .table_page_count = 1};
  SealSuperblock(&page);
  return page;
}

TablePage GoodTablePage() {
  TablePage page{.copy = 1, .page = 2, .sequence = 11, .uuid = kUuid};
  for (TableEntry& entry : page.entries)
    entry = {11, 77, 0xABCD, 1u << TableEntry::kPlaceShift | kFlagTiesPlane};
  SealTablePage(&page);
  return page;
}

constexpr uint64_t kManyEntries = 3 * kEntriesPerTablePage;

StoreSpec TwoTensors() {
  return {.job = "job",
          .extent_elements = 32768,
          .tensors = {{100000, {{Plane::kWeight, 16}, {Plane::kState0, 32}, {Plane::kTies, 1}}},
                      {5, {{Plane::kWeight, 32}}}},
          .catalogue = std::string("opaque\0bytes", 12)};
}

TEST(FormatTest, PagesComeBackAsTheyWere) {
  EXPECT_EQ(DecodeHeader(BytesOf(GoodHeader()), 1)->spec_bytes, 100u);
  EXPECT_EQ(DecodeSuperblock(BytesOf(GoodSuperblock()), 3, kUuid)->epoch, 5u);
  EXPECT_TRUE(CheckTablePage(GoodTablePage(), kUuid, 1, 2, 11, kManyEntries, 2).ok());
}

TEST(FormatTest, EveryFlippedBitOfEveryPageIsDetected) {
  HeaderPage header = GoodHeader();
  SuperblockPage superblock = GoodSuperblock();
  TablePage table = GoodTablePage();
  for (size_t bit = 0; bit < kPageBytes * 8; ++bit) {
    FlipBit(&header, bit), FlipBit(&superblock, bit), FlipBit(&table, bit);
    EXPECT_FALSE(DecodeHeader(BytesOf(header), 1).ok()) << bit;
    EXPECT_FALSE(DecodeSuperblock(BytesOf(superblock), 3, kUuid).ok()) << bit;
    EXPECT_FALSE(CheckTablePage(table, kUuid, 1, 2, 11, kManyEntries, 2).ok()) << bit;
    FlipBit(&header, bit), FlipBit(&superblock, bit), FlipBit(&table, bit);
  }
}

TEST(FormatTest, MisplacedForeignAndFuturePagesAreRefused) {
  EXPECT_FALSE(DecodeHeader(BytesOf(GoodHeader()), 0).ok());
  for (uint32_t copy : {0, 1, 2})
    EXPECT_FALSE(DecodeSuperblock(BytesOf(GoodSuperblock()), copy, kUuid).ok());
  EXPECT_FALSE(DecodeSuperblock(BytesOf(GoodSuperblock()), 3, kOtherUuid).ok());
  EXPECT_FALSE(CheckTablePage(GoodTablePage(), kOtherUuid, 1, 2, 11, kManyEntries, 2).ok());
  EXPECT_FALSE(CheckTablePage(GoodTablePage(), kUuid, 0, 2, 11, kManyEntries, 2).ok());
  EXPECT_FALSE(CheckTablePage(GoodTablePage(), kUuid, 1, 1, 11, kManyEntries, 2).ok());
  EXPECT_FALSE(CheckTablePage(GoodTablePage(), kUuid, 1, 2, 10, kManyEntries, 2).ok())
      << "of a later commit";
  EXPECT_FALSE(CheckTablePage(GoodTablePage(), kUuid, 1, 2, 11, kManyEntries - 1, 2).ok())
      << "an entry that no extent has";
}

TEST(FormatTest, PagesWithAGoodChecksumAndBadFieldsAreRefused) {
  const auto superblock = [](void (*spoil)(SuperblockPage*)) {
    SuperblockPage page = GoodSuperblock();
    spoil(&page);
    SealSuperblock(&page);
    return DecodeSuperblock(BytesOf(page), 3, kUuid).ok();
  };
  EXPECT_TRUE(superblock([](SuperblockPage*) {}));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->sequence = 0; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->sequence = 12; }))
      << "an even sequence in an odd pair";
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->table_copy = 2; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->blob_area = 2; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->blob_bytes = (1 << 20) + 1; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->zeros[100] = 1; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->generation_count = 15; }));
  EXPECT_FALSE(superblock([](SuperblockPage* page) { page->reserved = 1; }));
  SuperblockPage never = GoodSuperblock();
  never.copy = never.sequence = 0;
  SealSuperblock(&never);
  EXPECT_FALSE(DecodeSuperblock(BytesOf(never), 0, kUuid).ok()) << "commits count from 1";
  HeaderPage header = GoodHeader();
  header.zeros[0] = 1;
  SealHeader(&header);
  EXPECT_FALSE(DecodeHeader(BytesOf(header), 1).ok());
  TablePage table = GoodTablePage();
  table.sequence = 0;
  for (TableEntry& each : table.entries) each = {};
  SealTablePage(&table);
  EXPECT_FALSE(CheckTablePage(table, kUuid, 1, 2, 11, kManyEntries, 2).ok());
  const auto entry = [](void (*spoil)(TableEntry*)) {
    TablePage page = GoodTablePage();
    spoil(&page.entries[168]);
    SealTablePage(&page);
    return CheckTablePage(page, kUuid, 1, 2, 11, kManyEntries, 2).ok();
  };
  EXPECT_TRUE(entry([](TableEntry* e) { *e = {}; }));
  EXPECT_FALSE(entry([](TableEntry* e) { e->sequence = 12; }));
  EXPECT_FALSE(entry([](TableEntry* e) { e->sequence = 0; }))
      << "never written, yet it has a checksum";
  EXPECT_FALSE(entry([](TableEntry* e) { *e = {.word = 1}; }));
  EXPECT_FALSE(entry([](TableEntry* e) { *e = {.crc = 1}; }));
  EXPECT_FALSE(entry([](TableEntry* e) { *e = {.flags = kFlagTiesPlane}; }));
  EXPECT_FALSE(entry([](TableEntry* e) { e->flags |= 1 << 20; }));
}

TEST(FormatTest, AnotherVersionOfAHeaderIsToldAndOneOfASuperblockIsDamage) {
  const auto reseal = [](auto* page) {
    page->prefix.version += 1;
    const auto* bytes = reinterpret_cast<const char*>(page);
    const size_t at = offsetof(PagePrefix, crc), after = at + sizeof(uint32_t);
    page->prefix.crc = Crc32c(Crc32c(0, bytes, at), bytes + after, kPageBytes - after);
  };
  HeaderPage header = GoodHeader();
  reseal(&header);
  EXPECT_TRUE(absl::IsFailedPrecondition(DecodeHeader(BytesOf(header), 1).status()));
  SuperblockPage superblock = GoodSuperblock();
  reseal(&superblock);
  EXPECT_TRUE(absl::IsDataLoss(DecodeSuperblock(BytesOf(superblock), 3, kUuid).status()));
}

TEST(FormatTest, SpecsOfMorePlanesOrOthersThanThereAreAreRefused) {
  const StoreSpec spec = TwoTensors();
  const std::string good = EncodeSpec(spec);
  const size_t plane_count_at = 20 + spec.job.size() + sizeof(uint64_t);
  for (const size_t at : {plane_count_at, plane_count_at + sizeof(uint32_t)}) {
    std::string bad = good;
    bad[at] = kPlaneCount + 1;
    EXPECT_TRUE(absl::IsDataLoss(DecodeSpec(bad).status())) << at;
  }
}

TEST(FormatTest, SpecsAndExtentsAreTheSameOnlyInAllTheirParts) {
  const ExtentId id{1, Plane::kState0, 2};
  EXPECT_EQ(id, (ExtentId{1, Plane::kState0, 2}));
  EXPECT_NE(id, (ExtentId{0, Plane::kState0, 2}));
  EXPECT_NE(id, (ExtentId{1, Plane::kWeight, 2}));
  EXPECT_NE(id, (ExtentId{1, Plane::kState0, 3}));
  const TensorSpec tensor{5, {{Plane::kWeight, 16}}};
  EXPECT_EQ(tensor, (TensorSpec{5, {{Plane::kWeight, 16}}}));
  EXPECT_NE(tensor, (TensorSpec{6, {{Plane::kWeight, 16}}}));
  EXPECT_NE(tensor, (TensorSpec{5, {{Plane::kWeight, 32}}}));
  EXPECT_NE(tensor, (TensorSpec{5, {{Plane::kState0, 16}}}));
  EXPECT_NE(tensor, (TensorSpec{5, {}}));
}

TEST(FormatTest, IdentityIsThatOfBothCopies) {
  SuperblockPage first = GoodSuperblock(), second = first;
  second.copy = 2;
  SealSuperblock(&second);
  EXPECT_EQ(IdentityCrc(first), IdentityCrc(second));
  second.epoch = 6;
  EXPECT_NE(IdentityCrc(first), IdentityCrc(second));
}

TEST(FormatTest, SpecComesBackAsItWas) {
  const StoreSpec spec = TwoTensors();
  const absl::StatusOr<StoreSpec> decoded = DecodeSpec(EncodeSpec(spec));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->job, spec.job);
  EXPECT_EQ(decoded->extent_elements, spec.extent_elements);
  EXPECT_EQ(decoded->tensors, spec.tensors);
  EXPECT_EQ(decoded->catalogue, spec.catalogue);
}

TEST(FormatTest, HostileSpecsNeverCrash) {
  const std::string good = EncodeSpec(TwoTensors());
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_FALSE(DecodeSpec(std::string_view(good).substr(0, size)).ok());
  EXPECT_FALSE(DecodeSpec(good + "x").ok());
  Random random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string bad = good;
    for (uint64_t edits = 1 + random.Below(4); edits > 0; --edits)
      bad[random.Below(bad.size())] = static_cast<char>(random.Next());
    const absl::StatusOr<StoreSpec> decoded = DecodeSpec(bad);
    if (!decoded.ok()) continue;
    EXPECT_TRUE(ValidateSpec(*decoded).ok());
    const absl::StatusOr<Layout> layout =
        Layout::Make(*decoded);  // may refuse a size, must not overflow
    EXPECT_TRUE(!layout.ok() || layout->file_bytes() <= Limits::kFileBytesMax);
  }
}

// swap/DESIGN.md shows these bytes: whoever changes them changes the format.
TEST(FormatTest, TheWorkedExampleOfTheDesignPage) {
  const StoreSpec spec{.job = "tiny",
                       .extent_elements = 32768,
                       .tensors = {{40000, {{Plane::kWeight, 16}, {Plane::kState0, 32}}}},
                       .catalogue = "abc"};
  const std::string encoded = EncodeSpec(spec);
  EXPECT_EQ(encoded.size(), 55u);
  EXPECT_EQ(Crc32c(0, encoded.data(), encoded.size()), 0x8453e370u);
  const Layout layout = *Layout::Make(spec);
  EXPECT_EQ(layout.TableOffset(0, 0), 32768u);
  EXPECT_EQ(layout.BlobOffset(0, 0), 49152u);
  EXPECT_EQ(layout.PlaceOffset(0), 4243456u);
  EXPECT_EQ(layout.PlaceOffset(1), 4489216u);
  EXPECT_EQ(layout.file_bytes(), 4734976u);
  EXPECT_EQ(layout.SnapshotTableOffset(0, 1), 4739072u);
  EXPECT_EQ(layout.SnapshotBlobOffset(0, 0), 4743168u);
  EXPECT_EQ(layout.PlaceOffset(2), 6840320u);
  EXPECT_EQ(layout.file_bytes(1), 7086080u);
  EXPECT_EQ(layout.ExtentBytes({0, Plane::kWeight, 1}), 16384u);
  EXPECT_EQ(layout.ExtentBytes({0, Plane::kState0, 1}), 32768u);

  StoreUuid uuid;
  for (uint8_t i = 0; i < uuid.size(); ++i) uuid[i] = i;
  HeaderPage header{
      .uuid = uuid, .copy = 0, .spec_crc = 0x8453e370, .spec_bytes = 55, .file_bytes = 4734976};
  SealHeader(&header);
  EXPECT_EQ(header.prefix.crc, 0x8db696feu);
  SuperblockPage superblock{.uuid = uuid,
                            .copy = 2,
                            .sequence = 1,
                            .epoch = 1,
                            .table_copy = 1,
                            .table_root_crc = 0x11223344,
                            .table_page_count = 1,
                            .blob_area = 1,
                            .generation_count = 1};
  SealSuperblock(&superblock);
  EXPECT_EQ(superblock.prefix.crc, 0x004e80e0u);
  EXPECT_EQ(ExtentSeed(uuid, {0, Plane::kState0, 1}, 1), 0x0e0475e1u);

  superblock.copy = 0;
  superblock.parent_crc = IdentityCrc(superblock);
  superblock.sequence = 2;
  superblock.table_copy = superblock.blob_area = 0;
  superblock.snapshots[0] = {.sequence = 1,
                             .epoch = 1,
                             .created_unix_seconds = 1'800'000'000,
                             .table_root_crc = 0x55667788,
                             .name = "best"};
  SealSuperblock(&superblock);
  EXPECT_TRUE(DecodeSuperblock(BytesOf(superblock), 0, uuid).ok());
  EXPECT_EQ(offsetof(SuperblockPage, snapshots), 0x58u);
  EXPECT_EQ(superblock.prefix.crc, 0xc9e9da0eu);
}

TEST(FormatTest, SnapshotRecordsWithBadFieldsAreRefused) {
  const auto record = [](void (*spoil)(SnapshotRecord*)) {
    SuperblockPage page = GoodSuperblock();
    page.generation_count = 2;
    for (SnapshotRecord* each : {&page.snapshots[0], &page.snapshots[1]}) {
      *each = {.sequence = 10, .epoch = 4, .created_unix_seconds = 1, .name = "one"};
      if (each != page.snapshots) each->name[0] = 't';
    }
    spoil(page.snapshots);
    SealSuperblock(&page);
    return DecodeSuperblock(BytesOf(page), 3, kUuid).ok();
  };
  EXPECT_TRUE(record([](SnapshotRecord*) {}));
  EXPECT_TRUE(record([](SnapshotRecord* r) { r[0] = {}; }));
  EXPECT_TRUE(record([](SnapshotRecord* r) { r->lost = 1; }));
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->lost = 2; }));
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->sequence = 0; })) << "free, and not blank";
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->sequence = 11; })) << "of the commit itself";
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->blob_bytes = (1 << 20) + 1; }));
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->name[0] = 0; }));
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->name[0] = '/'; }));
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->name[0] = 't'; })) << "the other's name";
  EXPECT_FALSE(record([](SnapshotRecord* r) { r->name[5] = 'x'; })) << "after the end of the name";
  EXPECT_FALSE(record([](SnapshotRecord* r) { r[2] = r[0], r[2].name[0] = 'z'; }))
      << "no such generation";
}

TEST(FormatTest, PlacesThatTheStoreDoesNotHaveAreRefused) {
  TablePage page = GoodTablePage();
  page.entries[0].flags = 2u << TableEntry::kPlaceShift;
  SealTablePage(&page);
  EXPECT_FALSE(CheckTablePage(page, kUuid, 1, 2, 11, kManyEntries, 2).ok());
  EXPECT_TRUE(CheckTablePage(page, kUuid, 1, 2, 11, kManyEntries, 3).ok());
}

TEST(LayoutTest, ExtentsTileBothPlacesWithoutGapOrOverlap) {
  const StoreSpec spec = TwoTensors();
  const Layout layout = *Layout::Make(spec);
  uint64_t at = 0, entry = 0;
  for (uint32_t tensor = 0; tensor < spec.tensors.size(); ++tensor) {
    for (uint32_t index = 0; index < layout.tensors()[tensor].index_count; ++index) {
      for (const PlaneSpec& plane : spec.tensors[tensor].planes) {
        Layout::Where where;
        ASSERT_TRUE(layout.Find({tensor, plane.plane, index}, &where));
        EXPECT_EQ(where.area_offset_bytes, at);
        EXPECT_EQ(where.entry, entry++);
        EXPECT_EQ(where.size_bytes % kPageBytes, 0u);
        EXPECT_GT(where.size_bytes, 0u);
        at += where.size_bytes;
      }
    }
  }
  EXPECT_EQ(at, layout.place_bytes());
  EXPECT_EQ(entry, layout.entry_count());
  EXPECT_EQ(layout.PlaceOffset(1), layout.PlaceOffset(0) + at);
  EXPECT_EQ(layout.file_bytes(), layout.PlaceOffset(1) + at);
  EXPECT_EQ(layout.SnapshotTableOffset(0, 0), layout.file_bytes());
  EXPECT_EQ(layout.PlaceOffset(2),
            layout.file_bytes() + 2 * (layout.table_bytes() + Limits::kBlobBytesMax));
  EXPECT_EQ(layout.file_bytes(1), layout.PlaceOffset(2) + at);
  EXPECT_EQ(layout.SnapshotTableOffset(1, 0), layout.file_bytes(1));
  EXPECT_EQ(layout.ExtentBytes({0, Plane::kWeight, 3}), 4096u) << "1696 elements of 2 bytes";
  EXPECT_EQ(layout.TableOffset(0, 0), Layout::SpecOffset(1, EncodeSpec(spec).size()) + kPageBytes);
}

TEST(LayoutTest, RefusesSpecsOutsideTheLimits) {
  const auto refused = [](void (*spoil)(StoreSpec*)) {
    StoreSpec spec = TwoTensors();
    spoil(&spec);
    return !Layout::Make(spec).ok();
  };
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->job = "../x"; }));
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->extent_elements = 0; }));
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->extent_elements = 32769; }));
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->extent_elements = static_cast<uint32_t>(Limits::kExtentElementsMax + 32768);
  }));
  EXPECT_TRUE(
      refused([](StoreSpec* spec) { spec->catalogue.resize(Limits::kCatalogueBytesMax + 1); }));
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->tensors[1].planes.assign(kPlaneCount + 1, {Plane::kWeight, 32});
  }));
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->tensors[0].planes[0].bits_per_element = 0; }));
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->extent_elements = Limits::kExtentElementsMax;
    spec->tensors.assign(80, {Limits::kElementsMax, {{Plane::kWeight, 64}}});
  })) << "more bytes than a file may have";
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->tensors[0].planes.clear(); }));
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->tensors[0].planes.push_back({Plane::kResidual, 16});
  })) << "ties not last";
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->tensors[0].planes[1] = {Plane::kWeight, 16};
  })) << "twice";
  EXPECT_TRUE(refused([](StoreSpec* spec) {
    spec->tensors[0].planes[1] = {static_cast<Plane>(9), 16};
  }));
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->tensors[0].planes[0].bits_per_element = 65; }));
  EXPECT_TRUE(refused([](StoreSpec* spec) { spec->tensors[0].element_count = UINT64_MAX; }));
  EXPECT_TRUE(
      refused([](StoreSpec* spec) { spec->tensors.resize((1 << 20) + 1, spec->tensors[1]); }));
  EXPECT_FALSE(refused([](StoreSpec* spec) { spec->tensors.clear(); })) << "no tensors is fine";
  StoreSpec empty = TwoTensors();
  empty.tensors[0].element_count = 0;
  const absl::StatusOr<Layout> layout = Layout::Make(empty);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->tensors()[0].index_count, 0u);
  EXPECT_EQ(layout->entry_count(), 1u) << "of the other tensor";
}

}  // namespace
}  // namespace offload::swap
