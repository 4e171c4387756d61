#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/check.h"

namespace offload {
namespace {

// Polynomials over GF(2) are held reflected: bit 31 is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kOne = 0x80000000;

// The product of two polynomials modulo the Castagnoli polynomial.
constexpr uint32_t MultiplyModulo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;  // b times x
  }
  return product;
}

// x^exponent modulo the polynomial.
constexpr uint32_t Power(uint64_t exponent) {
  uint32_t result = kOne;
  uint32_t square = kOne >> 1;  // x
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = MultiplyModulo(result, square);
    square = MultiplyModulo(square, square);
  }
  return result;
}

// What appending that many zero bytes multiplies a register by.
constexpr uint32_t PowerOfBytes(uint64_t size_bytes) { return Power(8 * size_bytes); }

// tables[k][b]: the register after byte b and then k zero bytes.
using SliceTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr SliceTables MakeSliceTables() {
  SliceTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1) ? (value >> 1) ^ kPolynomial : value >> 1;
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xff];
    }
  }
  return tables;
}

constexpr SliceTables kSlices = MakeSliceTables();

uint64_t LoadWord(const unsigned char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

#if defined(__x86_64__)

// Appends a fixed number of zero bytes to a register by four look-ups, one for each of its bytes.
class ZeroAppender {
 public:
  constexpr explicit ZeroAppender(uint64_t size_bytes) {
    const uint32_t factor = PowerOfBytes(size_bytes);
    for (uint32_t k = 0; k < 4; ++k) {
      for (uint32_t byte = 0; byte < 256; ++byte) {
        tables_[k][byte] = MultiplyModulo(byte << (8 * k), factor);
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return tables_[0][crc & 0xff] ^ tables_[1][(crc >> 8) & 0xff] ^ tables_[2][(crc >> 16) & 0xff] ^
           tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

// Long lanes make the join free; short ones serve what is left. Both are multiples of eight.
constexpr size_t kLongLaneBytes = 4096;
constexpr size_t kShortLaneBytes = 256;

const ZeroAppender& LongAppender() {
  static const ZeroAppender appender(kLongLaneBytes);
  return appender;
}
const ZeroAppender& ShortAppender() {
  static const ZeroAppender appender(kShortLaneBytes);
  return appender;
}

// Takes as many whole blocks of three lanes as there are.
template <size_t kLaneBytes>
__attribute__((target("sse4.2"))) uint64_t ThreeLanes(uint64_t crc, const unsigned char*& bytes,
                                                      size_t& size_bytes,
                                                      const ZeroAppender& append_lane) {
  while (size_bytes >= 3 * kLaneBytes) {
    uint64_t first = crc, second = 0, third = 0;
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      first = _mm_crc32_u64(first, LoadWord(bytes + i));
      second = _mm_crc32_u64(second, LoadWord(bytes + kLaneBytes + i));
      third = _mm_crc32_u64(third, LoadWord(bytes + 2 * kLaneBytes + i));
    }
    crc = append_lane(static_cast<uint32_t>(first)) ^ second;
    crc = append_lane(static_cast<uint32_t>(crc)) ^ third;
    bytes += 3 * kLaneBytes;
    size_bytes -= 3 * kLaneBytes;
  }
  return crc;
}

// Where carry-less products of 512 bits are there, long inputs are folded (after V. Gopal et al.,
// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009), four
// registers beside each other: twice as fast as three lanes.
//
// Sixteen bytes in a register are a polynomial whose coefficient of x^127 is bit 0. A message is
// the same modulo the polynomial when its first bytes are multiplied by x^bits and added to those
// that stand so many bits behind them. Each half is multiplied on its own; since a carry-less
// product of two reflected halves stands one bit too low, its factor has one power less.
struct FoldFactors {
  int64_t low = 0, high = 0;  // for the half that comes first, and the other
};
constexpr FoldFactors FactorsOf(uint64_t bits) {
  return {.low = static_cast<int64_t>(uint64_t{Power(bits + 63)} << 32),
          .high = static_cast<int64_t>(uint64_t{Power(bits - 1)} << 32)};
}

constexpr size_t kFoldBytes = sizeof(__m512i);
constexpr size_t kFoldsBeside = 4;  // the latency of a product
constexpr size_t kFoldedBytesMin = 2 * kFoldsBeside * kFoldBytes;

#define OFFLOAD_TARGET_FOLD __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

OFFLOAD_TARGET_FOLD inline __m512i Broadcast(const FoldFactors& factors) {
  return _mm512_set_epi64(factors.high, factors.low, factors.high, factors.low, factors.high,
                          factors.low, factors.high, factors.low);
}

OFFLOAD_TARGET_FOLD inline __m512i Load(const unsigned char* bytes, size_t index) {
  return _mm512_loadu_si512(bytes + index * kFoldBytes);
}

// `bytes` times the factors, plus `next`.
OFFLOAD_TARGET_FOLD inline __m512i Fold(__m512i bytes, __m512i factors, __m512i next) {
  constexpr int kSumOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(bytes, factors, 0x00),
                                   _mm512_clmulepi64_epi128(bytes, factors, 0x11), next,
                                   kSumOfThree);
}

// Takes as many whole registers as there are, at least kFoldedBytesMin bytes; `crc` is a register,
// not inverted.
OFFLOAD_TARGET_FOLD uint64_t TakeFolded(uint64_t crc, const unsigned char*& bytes,
                                        size_t& size_bytes) {
  constexpr FoldFactors kByOne = FactorsOf(8 * kFoldBytes);
  constexpr FoldFactors kByAll = FactorsOf(8 * kFoldBytes * kFoldsBeside);
  const __m512i by_all = Broadcast(kByAll), by_one = Broadcast(kByOne);
  __m512i a = Load(bytes, 0), b = Load(bytes, 1), c = Load(bytes, 2), d = Load(bytes, 3);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi64_si128(static_cast<int64_t>(crc))));
  bytes += kFoldsBeside * kFoldBytes;
  size_bytes -= kFoldsBeside * kFoldBytes;
  for (; size_bytes >= kFoldsBeside * kFoldBytes;
       bytes += kFoldsBeside * kFoldBytes, size_bytes -= kFoldsBeside * kFoldBytes) {
    a = Fold(a, by_all, Load(bytes, 0));
    b = Fold(b, by_all, Load(bytes, 1));
    c = Fold(c, by_all, Load(bytes, 2));
    d = Fold(d, by_all, Load(bytes, 3));
  }
  __m512i sum = Fold(Fold(Fold(a, by_one, b), by_one, c), by_one, d);
  for (; size_bytes >= kFoldBytes; bytes += kFoldBytes, size_bytes -= kFoldBytes)
    sum = Fold(sum, by_one, Load(bytes, 0));
  alignas(kFoldBytes) uint64_t words[kFoldBytes / 8];
  _mm512_store_si512(words, sum);
  uint64_t value = 0;
  for (const uint64_t word : words) value = _mm_crc32_u64(value, word);
  return value;
}

#undef OFFLOAD_TARGET_FOLD

#endif

}  // namespace

namespace internal {

uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t value = ~crc;
  for (; size_bytes >= 8; bytes += 8, size_bytes -= 8) {
    const uint64_t word = LoadWord(bytes) ^ value;  // little endian
    value = 0;
    for (size_t k = 0; k < 8; ++k) value ^= kSlices[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; size_bytes > 0; ++bytes, --size_bytes) {
    value = (value >> 8) ^ kSlices[0][(value ^ *bytes) & 0xff];
  }
  return ~value;
}

#if defined(__x86_64__)

bool Crc32cHasSse42() { return __builtin_cpu_supports("sse4.2"); }

__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(uint32_t crc, const void* data,
                                                       size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t value = static_cast<uint32_t>(~crc);
  if (size_bytes >= 3 * kShortLaneBytes) {
    value = ThreeLanes<kLongLaneBytes>(value, bytes, size_bytes, LongAppender());
    value = ThreeLanes<kShortLaneBytes>(value, bytes, size_bytes, ShortAppender());
  }
  for (; size_bytes >= 8; bytes += 8, size_bytes -= 8)
    value = _mm_crc32_u64(value, LoadWord(bytes));
  auto narrow = static_cast<uint32_t>(value);
  for (; size_bytes > 0; ++bytes, --size_bytes) narrow = _mm_crc32_u8(narrow, *bytes);
  return ~narrow;
}

#else

bool Crc32cHasSse42() { return false; }

uint32_t Crc32cSse42(uint32_t crc, const void* data, size_t size_bytes) {
  OFFLOAD_CHECK(false) << "no SSE4.2 on this machine";
  return Crc32cPortable(crc, data, size_bytes);
}

#endif

}  // namespace internal

namespace {

#if defined(__x86_64__)

// `crc` as Crc32c() takes it. Where inputs are long; the rest and short ones are Crc32cSse42()'s.
uint32_t Crc32cFolded(uint32_t crc, const void* data, size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (size_bytes >= kFoldedBytesMin)
    crc = ~static_cast<uint32_t>(TakeFolded(static_cast<uint32_t>(~crc), bytes, size_bytes));
  return internal::Crc32cSse42(crc, bytes, size_bytes);
}

#endif

auto Choose() {
#if defined(__x86_64__)
  if (internal::Crc32cHasSse42() && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("vpclmulqdq"))
    return &Crc32cFolded;
#endif
  return internal::Crc32cHasSse42() ? &internal::Crc32cSse42 : &internal::Crc32cPortable;
}

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t size_bytes) {
  static const auto implementation = Choose();
  return implementation(crc, data, size_bytes);
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b_bytes) {
  return MultiplyModulo(crc_a, PowerOfBytes(size_b_bytes)) ^ crc_b;
}

}  // namespace offload
