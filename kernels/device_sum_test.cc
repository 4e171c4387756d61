// The device's sum against the daemon's, on values that round, vanish, overflow or are none.
#include "kernels/device_sum.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"

namespace offload::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Value(Random& random) {
  static const float kSpecial[] = {0.0f,       -0.0f,     1e-45f,    -1e-40f, 1.17549435e-38f,
                                   3e38f,      -3e38f,    1e19f,     1.0f,    256.0f,
                                   1.0078125f, kInfinity, -kInfinity};
  const uint64_t kind = random.Below(4);
  if (kind == 0) return kSpecial[random.Below(std::size(kSpecial))];
  if (kind == 1) return std::bit_cast<float>(static_cast<uint32_t>(random.Next()));
  return static_cast<float>(random.Unit() * 2 - 1);
}

// Elements of a dtype, as bytes.
std::vector<std::byte> Values(Dtype dtype, size_t count, Random& random) {
  std::vector<std::byte> bytes(count * DtypeBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(Value(random));
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype == Dtype::kFloat32) std::memcpy(&bytes[i * 4], &bits, 4);
    if (dtype == Dtype::kBFloat16) std::memcpy(&bytes[i * 2], &half, 2);
  }
  return bytes;
}

// All NaN of fp32 are one.
uint32_t BitsOf(Dtype dtype, const std::vector<std::byte>& bytes, size_t i) {
  if (dtype == Dtype::kFloat32) {
    float value = 0;
    std::memcpy(&value, &bytes[i * 4], 4);
    return std::isnan(value) ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
  }
  uint16_t half = 0;
  std::memcpy(&half, &bytes[i * 2], 2);
  return half;
}

TEST(DeviceSumTest, HasTheBitsOfTheDaemonsSum) {
  Random random(21);
  for (int round = 0; round < 600; ++round) {
    const Dtype dtype = random.OneIn(2) ? Dtype::kFloat32 : Dtype::kBFloat16;
    const size_t count = 1 + random.Below(300), ranks = 1 + random.Below(8);
    const double factor = random.OneIn(3) ? 1.0 : 1.0 / static_cast<double>(ranks);
    std::vector<std::vector<std::byte>> parts;
    std::vector<const void*> pointers;
    for (size_t rank = 0; rank < ranks; ++rank) parts.push_back(Values(dtype, count, random));
    for (const auto& part : parts) pointers.push_back(part.data());
    const std::vector<std::byte> before = Values(dtype, count, random);
    for (const SumStart start : {SumStart::kNothing, SumStart::kZeros, SumStart::kSum}) {
      std::vector<std::byte> expected = before, sum = before;
      AddParts({.dtype = dtype,
                .count = count,
                .sum = expected.data(),
                .start = start,
                .parts = pointers.data(),
                .part_count = ranks,
                .factor = factor});
      DeviceSum on_device{.dtype = dtype,
                          .start = start,
                          .part_count = static_cast<uint32_t>(ranks),
                          .count = count,
                          .sum = sum.data(),
                          .factor = factor};
      std::copy(pointers.begin(), pointers.end(), on_device.parts);
      AddPartsOnHost(on_device);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(BitsOf(dtype, sum, i), BitsOf(dtype, expected, i))
            << "round " << round << ", element " << i << " of " << DtypeBytes(dtype) << " bytes";
      }
    }
  }
}

// What a rank of each rank's slices is added pass by pass: the chain of all passes.
TEST(DeviceSumTest, ARunningSumGoesOnWithTheNextPass) {
  Random random(22);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    constexpr size_t kCount = 500;
    std::vector<std::byte> sum(kCount * DtypeBytes(dtype)), expected = sum;
    for (int pass = 0; pass < 3; ++pass) {
      const auto first = Values(dtype, kCount, random), second = Values(dtype, kCount, random);
      const SumStart start = pass == 0 ? SumStart::kNothing : SumStart::kSum;
      DeviceSum on_device{.dtype = dtype,
                          .start = start,
                          .part_count = 2,
                          .count = kCount,
                          .sum = sum.data(),
                          .parts = {first.data(), second.data()},
                          .factor = 0.5};
      AddPartsOnHost(on_device);
      for (const auto* part : {&first, &second}) {
        const void* const one[] = {part->data()};
        AddParts({.dtype = dtype,
                  .count = kCount,
                  .sum = expected.data(),
                  .start = pass == 0 && part == &first ? SumStart::kNothing : SumStart::kSum,
                  .parts = one,
                  .part_count = 1,
                  .factor = 0.5});
      }
      for (size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(BitsOf(dtype, sum, i), BitsOf(dtype, expected, i)) << pass << " " << i;
    }
  }
}

}  // namespace
}  // namespace offload::kernels
