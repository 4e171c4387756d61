#include "swap/member_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "swap/store.h"

namespace offload::swap {
namespace {

const std::vector<std::string> kPaths = {"/nvme0", "/nvme1/pool", "/nvme2"};

MemberPage GoodPage() {
  MemberPage page{.uuid = {1, 2, 3},
                  .revision = 4,
                  .age = 5,
                  .head_bytes = 8 * kPageBytes,
                  .store_bytes = uint64_t{1} << 30,
                  .copy = 1,
                  .member = 2,
                  .member_count = 3,
                  .unit_bytes = kStripeUnitBytes,
                  .weights = {1, 2, 16}};
  EXPECT_EQ(SetPaths(kPaths, &page), absl::OkStatus());
  SealMemberPage(&page);
  return page;
}

absl::StatusOr<MemberPage> Decode(const MemberPage& page, uint32_t copy = 1) {
  return DecodeMemberPage(ConstPageBytes(reinterpret_cast<const std::byte*>(&page), kPageBytes),
                          copy);
}

TEST(MemberPageTest, ComesBackAsItWasWrittenWithItsMapAndItsPaths) {
  const absl::StatusOr<MemberPage> page = Decode(GoodPage());
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->age, 5u);
  EXPECT_EQ(PathsOf(*page), kPaths);
  const StripeNumbers numbers = NumbersOf(*page);
  EXPECT_EQ(numbers.head_bytes, 8 * kPageBytes);
  EXPECT_EQ(numbers.weights, (std::vector<uint32_t>{1, 2, 16}));
}

TEST(MemberPageTest, EveryFlippedBitIsDetected) {
  MemberPage page = GoodPage();
  auto* const bytes = reinterpret_cast<uint8_t*>(&page);
  for (size_t bit = 0; bit < kPageBytes * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    EXPECT_FALSE(Decode(page).ok()) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
  }
  EXPECT_TRUE(Decode(page).ok());
}

TEST(MemberPageTest, FieldsOutsideTheirLimitsAreRefusedAlsoUnderAGoodChecksum) {
  const auto accepted = [](void (*spoil)(MemberPage*)) {
    MemberPage page = GoodPage();
    spoil(&page);
    SealMemberPage(&page);
    const absl::StatusOr<MemberPage> decoded = Decode(page);
    EXPECT_TRUE(decoded.ok() || absl::IsDataLoss(decoded.status())) << decoded.status();
    return decoded.ok();
  };
  EXPECT_TRUE(accepted([](MemberPage* page) { page->opening = 1; }));
  EXPECT_TRUE(accepted([](MemberPage* page) { page->store_bytes = 0; })) << "while it is built";
  EXPECT_FALSE(accepted([](MemberPage* page) { page->copy = 0; })) << "read from the other's place";
  EXPECT_FALSE(accepted([](MemberPage* page) { page->revision = 0; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->member_count = 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->member_count = kMembersMax + 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->member_count = UINT32_MAX; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->member = 3; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->opening = 2; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->store_bytes = kStripedBytesMax + 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->zero = 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->zeros[17] = 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->head_bytes = 1; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->unit_bytes = 0; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->weights[1] = 0; }));
  EXPECT_FALSE(accepted([](MemberPage* page) { page->paths[0] = 0; }))
      << "fewer paths than members";
  EXPECT_FALSE(accepted([](MemberPage* page) {
    std::fill(std::begin(page->paths), std::end(page->paths), 'x');
  })) << "a path without an end";
  EXPECT_FALSE(accepted([](MemberPage* page) {
    std::memset(page->paths, 'x', sizeof(page->paths) - 1);
  })) << "one path that fills the page, for three members";
}

TEST(MemberPageTest, AnotherVersionIsToldFromDamage) {
  MemberPage page = GoodPage();
  page.prefix.version += 1;
  EXPECT_TRUE(absl::IsDataLoss(Decode(page).status())) << "the checksum denies it";
  page.prefix.crc = 0;
  page.prefix.crc = Crc32c(0, &page, sizeof(page));
  EXPECT_TRUE(absl::IsFailedPrecondition(Decode(page).status())) << Decode(page).status();
}

TEST(MemberPageTest, PathsThatDoNotFitAreRefused) {
  MemberPage page = GoodPage();
  const std::string half(MemberPage::kPathsBytes / 2, 'x');
  const absl::Status status = SetPaths({half, half + "y"}, &page);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kBadValue) << status;
  EXPECT_EQ(ErrorIdOf(SetPaths({"/nvme0", ""}, &page)), ErrorId::kBadValue);
  const std::string longest(MemberPage::kPathsBytes - 2, 'x');
  EXPECT_EQ(SetPaths({longest}, &page), absl::OkStatus());
  EXPECT_EQ(PathsOf(page), std::vector<std::string>{longest});
  EXPECT_NE(SetPaths({longest + "x"}, &page), absl::OkStatus());
}

}  // namespace
}  // namespace offload::swap
