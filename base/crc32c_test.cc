#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/random.h"

namespace offload {
namespace {

using Implementation = uint32_t (*)(uint32_t, const void*, size_t);

// The definition, one bit at a time.
uint32_t Reference(uint32_t crc, const unsigned char* bytes, size_t size_bytes) {
  crc = ~crc;
  for (size_t i = 0; i < size_bytes; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ 0x82f63b78 : crc >> 1;
  }
  return ~crc;
}

std::vector<unsigned char> MakeBytes(size_t size_bytes) {
  std::vector<unsigned char> bytes(size_bytes);
  Random(size_bytes + 1).Fill(std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

class Crc32cTest : public testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    if (GetParam() == &internal::Crc32cSse42 && !internal::Crc32cHasSse42()) {
      GTEST_SKIP() << "this processor has no SSE4.2";
    }
  }
};

TEST_P(Crc32cTest, GivesThePublishedVectors) {  // RFC 3720, B.4
  EXPECT_EQ(GetParam()(0, "", 0), 0u);
  EXPECT_EQ(GetParam()(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(GetParam()(0, std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(GetParam()(0, std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  std::string rising(32, '\0');
  for (size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<char>(i);
  EXPECT_EQ(GetParam()(0, rising.data(), rising.size()), 0x46dd794eu);
}

TEST_P(Crc32cTest, AgreesWithTheDefinitionAroundEveryLaneBorder) {
  const std::vector<unsigned char> bytes = MakeBytes(40000);
  for (const size_t border :
       {0, 8, 64, 256, 512, 576, 768, 832, 1536, 2048, 4096, 12288, 12288 + 768, 24576, 36864}) {
    for (size_t size = border < 9 ? 0 : border - 9; size <= border + 9; ++size) {
      ASSERT_EQ(GetParam()(7, bytes.data() + 1, size), Reference(7, bytes.data() + 1, size))
          << size;
    }
  }
}

TEST_P(Crc32cTest, ExtendsWhatCameBefore) {
  const std::vector<unsigned char> bytes = MakeBytes(20000);
  const uint32_t whole = GetParam()(0, bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 13, 511, 512, 4096, 12288, 19488, 19999, 20000}) {
    const uint32_t first = GetParam()(0, bytes.data(), cut);
    EXPECT_EQ(GetParam()(first, bytes.data() + cut, bytes.size() - cut), whole) << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Implementations, Crc32cTest,
    testing::Values(&internal::Crc32cPortable, &internal::Crc32cSse42, &Crc32c),
    [](const auto& info) {
      return std::string(info.index == 0 ? "Portable" : info.index == 1 ? "Sse42" : "Dispatched");
    });

TEST(Crc32cCombineTest, JoinsChecksumsOfParts) {
  const std::vector<unsigned char> bytes = MakeBytes(10000);
  for (const size_t cut : {0, 1, 4096, 9999, 10000}) {
    const uint32_t a = Crc32c(0, bytes.data(), cut);
    const uint32_t b = Crc32c(0, bytes.data() + cut, bytes.size() - cut);
    EXPECT_EQ(Crc32cCombine(a, b, bytes.size() - cut), Crc32c(0, bytes.data(), bytes.size()))
        << cut;
  }
}

}  // namespace
}  // namespace offload
