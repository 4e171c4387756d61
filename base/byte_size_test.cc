#include "base/byte_size.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace offload {
namespace {

TEST(ByteSizeTest, ReadsBinaryAndDecimalUnits) {
  const std::pair<const char*, uint64_t> cases[] = {
      {"0", 0},
      {"4096", 4096},
      {"17B", 17},
      {"512MiB", 512ull << 20},
      {"64GiB", 64ull << 30},
      {"64gib", 64ull << 30},
      {"1.5GiB", 3ull << 29},
      {"200G", 200'000'000'000},
      {"200GB", 200'000'000'000},
      {"2T", 2'000'000'000'000},
      {"1e9", 1'000'000'000},
      {"2E3k", 2'000'000},
      {"1e-3G", 1'000'000},
      {"  8 GiB ", 8ull << 30},
      {"18446744073709551615", UINT64_MAX},
      {"9007199254740993", 9007199254740993},
  };
  for (const auto& [text, bytes] : cases) {
    const absl::StatusOr<uint64_t> parsed = ParseByteSize(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(ByteSizeTest, RefusesEverythingElseAndNamesTheText) {
  for (const char* text :
       {"",         " ",    "GiB",   "-1",  "+1",    "8GIBS", "8 G iB",
        "1..5G",    "0x10", "inf",   "nan", "1e",    "1e400", "18446744073709551616",
        "20000PiB", "lots", "8GiB4", "0.5", "17.5B", "1e-9k"}) {
    const absl::Status status = ParseByteSize(text).status();
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kBadValue) << text;
    EXPECT_NE(status.message().find(text), std::string_view::npos) << status;
  }
}

TEST(ByteSizeTest, ReadsCountsOfParameters) {
  EXPECT_EQ(*ParseCount("150M"), 150'000'000u);
  EXPECT_EQ(*ParseCount("1.5B"), 1'500'000'000u);
  EXPECT_EQ(*ParseCount("7e9"), 7'000'000'000u);
  EXPECT_EQ(*ParseCount("12345"), 12345u);
  EXPECT_EQ(ErrorIdOf(ParseCount("150MiB").status()), ErrorId::kBadValue);
}

TEST(ByteSizeTest, PrintsMemoryInBinaryUnits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(3584), "3.5 KiB");
  EXPECT_EQ(FormatBytes(512ull << 20), "512.0 MiB");
  EXPECT_EQ(FormatBytes(64ull << 30), "64.0 GiB");
  EXPECT_EQ(FormatBytes(3ull << 39), "1.50 TiB");
}

TEST(ByteSizeTest, PrintsDiskSpaceInDecimalUnitsWithThreeDigits) {
  EXPECT_EQ(FormatDecimalBytes(17), "17 B");
  EXPECT_EQ(FormatDecimalBytes(4'100'000), "4.10 MB");
  EXPECT_EQ(FormatDecimalBytes(16'000'000'000), "16.0 GB");
  EXPECT_EQ(FormatDecimalBytes(282'000'000'000), "282 GB");
  EXPECT_EQ(FormatDecimalBytes(1'840'000'000'000), "1.84 TB");
}

TEST(ByteSizeTest, PrintsCounts) {
  EXPECT_EQ(FormatCount(950), "950");
  EXPECT_EQ(FormatCount(150'300'000), "150.3 M");
  EXPECT_EQ(FormatCount(70'600'000'000), "70.6 B");
}

}  // namespace
}  // namespace offload
