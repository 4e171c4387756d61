// base/checked.h
//
// Arithmetic on sizes and offsets that may come from outside: an overflow is a missing value, never
// a wrong number.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>

namespace offload {

constexpr std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

constexpr std::optional<uint64_t> CheckedMultiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

constexpr bool IsPowerOfTwo(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// The alignment of the functions below must be a power of two.
constexpr bool IsAligned(uint64_t value, uint64_t alignment) {
  return (value & (alignment - 1)) == 0;
}
constexpr uint64_t AlignDown(uint64_t value, uint64_t alignment) {
  return value & ~(alignment - 1);
}

// For values that are known to be far below 2^64; CheckedAlignUp for all others.
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return AlignDown(value + alignment - 1, alignment);
}

constexpr std::optional<uint64_t> CheckedAlignUp(uint64_t value, uint64_t alignment) {
  const std::optional<uint64_t> sum = CheckedAdd(value, alignment - 1);
  if (!sum.has_value()) return std::nullopt;
  return AlignDown(*sum, alignment);
}

// Rounds up without overflow. `divisor` must not be 0.
constexpr uint64_t CeilDivide(uint64_t value, uint64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// True when [offset, offset + size) lies inside [0, limit), without computing the sum.
constexpr bool IsInside(uint64_t offset, uint64_t size, uint64_t limit) {
  return offset <= limit && size <= limit - offset;
}

}  // namespace offload
