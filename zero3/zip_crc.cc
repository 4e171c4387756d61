#include "zero3/zip_crc.h"

#include <array>
#include <cstring>

namespace offload::zero3 {
namespace {

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: the remainder of byte b followed by k bytes of zeros.
constexpr CrcTables MakeCrcTables() {
  CrcTables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t remainder = b;
    for (int bit = 0; bit < 8; ++bit)
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? 0xEDB88320u : 0u);
    tables[0][b] = remainder;
  }
  for (size_t k = 1; k < tables.size(); ++k)
    for (uint32_t b = 0; b < 256; ++b)
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xFF];
  return tables;
}

constexpr CrcTables kCrcTables = MakeCrcTables();

}  // namespace

// Eight bytes at a time.
uint32_t ZipCrc(uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kCrcTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; at < bytes.size(); ++at)
    crc = (crc >> 8) ^ kCrcTables[0][(crc ^ static_cast<uint8_t>(bytes[at])) & 0xFF];
  return ~crc;
}

}  // namespace offload::zero3
