#include "base/bytes_digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace offload {
namespace {

std::vector<std::byte> SomeBytes(size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 251);
  return bytes;
}

uint64_t DigestOf(const std::vector<std::byte>& bytes) {
  BytesDigest digest;
  digest.Update(bytes.data(), bytes.size());
  return digest.Finish();
}

TEST(BytesDigestTest, IsTheSameInHoweverManyPieces) {
  const std::vector<std::byte> bytes = SomeBytes(10 * BytesDigest::kBlockBytes + 5);
  BytesDigest pieces;
  pieces.Update(bytes.data(), 3 * BytesDigest::kBlockBytes);
  pieces.Update(bytes.data() + 3 * BytesDigest::kBlockBytes, 7 * BytesDigest::kBlockBytes + 5);
  EXPECT_EQ(pieces.Finish(), DigestOf(bytes));
}

TEST(BytesDigestTest, SeesEveryBitInBothHalves) {
  const std::vector<std::byte> bytes = SomeBytes(2 * BytesDigest::kBlockBytes + 3);
  const uint64_t whole = DigestOf(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<std::byte> changed = bytes;
    changed[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const uint64_t other = DigestOf(changed);
    EXPECT_NE(other >> 32, whole >> 32) << bit;
    EXPECT_NE(static_cast<uint32_t>(other), static_cast<uint32_t>(whole)) << bit;
  }
}

TEST(BytesDigestTest, SeesAnotherOrder) {
  std::vector<std::byte> bytes = SomeBytes(2 * BytesDigest::kBlockBytes);
  const uint64_t before = DigestOf(bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + BytesDigest::kBlockBytes,
                   bytes.begin() + BytesDigest::kBlockBytes);
  EXPECT_NE(DigestOf(bytes), before);
}

}  // namespace
}  // namespace offload
