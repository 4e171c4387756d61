#include "base/mapped_region.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/unique_fd.h"

namespace offload {
namespace {

bool IsMapped(const void* address) {
  unsigned char resident = 0;
  return ::mincore(const_cast<void*>(address), 4096, &resident) == 0;
}

TEST(MappedRegionTest, AnonymousMemoryIsZeroAndWritable) {
  absl::StatusOr<MappedRegion> region = MappedRegion::Anonymous(8192);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(region->size(), 8192u);
  EXPECT_EQ(region->span().size(), 8192u);
  for (const std::byte value : region->span()) ASSERT_EQ(value, std::byte{0});
  region->data()[8191] = std::byte{7};
}

TEST(MappedRegionTest, TwoMapsOfOneMemfdShareTheirBytes) {
  UniqueFd fd(::memfd_create("mapped_region_test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  auto writer = MappedRegion::Map(fd.get(), 0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED);
  auto reader = MappedRegion::Map(fd.get(), 4096, 4096, PROT_READ, MAP_SHARED);
  ASSERT_TRUE(writer.ok() && reader.ok());
  writer->data()[4096] = std::byte{9};
  EXPECT_EQ(reader->data()[0], std::byte{9});
}

TEST(MappedRegionTest, ALargeMapBeginsAtAHugePageAndKeepsItsBytesInOne) {
  constexpr size_t kSizeBytes = 3 * kHugePageBytes + 4096;
  UniqueFd fd(::memfd_create("mapped_region_test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), kSizeBytes), 0);
  auto region = MappedRegion::Map(fd.get(), 0, kSizeBytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(region->data()) % kHugePageBytes, 0u);
  region->data()[kHugePageBytes + 5] = std::byte{9};

  const size_t huge_bytes = region->UseHugePages(4096, 2 * kHugePageBytes);
  EXPECT_EQ(region->data()[kHugePageBytes + 5], std::byte{9});
  EXPECT_EQ(region->data()[kHugePageBytes + 6], std::byte{0});
  struct stat status;
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  if (huge_bytes == 0) GTEST_SKIP() << "this kernel gives no huge pages";
  EXPECT_EQ(huge_bytes, kHugePageBytes);  // the only whole one inside
  EXPECT_EQ(static_cast<size_t>(status.st_blocks) * 512, kHugePageBytes);
}

TEST(MappedRegionTest, MoveKeepsTheMapAndDestructionUnmapsIt) {
  MappedRegion kept;
  EXPECT_FALSE(kept.valid());
  {
    auto region = MappedRegion::Anonymous(4096);
    ASSERT_TRUE(region.ok());
    kept = *std::move(region);
  }
  const std::byte* address = kept.data();
  EXPECT_TRUE(IsMapped(address));
  kept.Unmap();
  kept.Unmap();
  EXPECT_FALSE(kept.valid());
}

TEST(MappedRegionTest, RefusalsAreStatuses) {
  EXPECT_EQ(MappedRegion::Anonymous(0).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = MappedRegion::Map(-1, 0, 4096, PROT_READ, MAP_SHARED).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("EBADF"), std::string_view::npos) << status;
}

TEST(MappedRegionTest, ReservationTakesMoreThanMemoryHolds) {
  auto region = MappedRegion::Reserve(size_t{1} << 42);
  ASSERT_TRUE(region.ok()) << region.status();
}

}  // namespace
}  // namespace offload
