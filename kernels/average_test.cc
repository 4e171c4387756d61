#include "kernels/average.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "kernels/split.h"

namespace offload::kernels {
namespace {

using Kind = AverageStep::Kind;

constexpr Isa kIsas[] = {Isa::kReference, Isa::kAvx2, Isa::kAvx512};
constexpr AverageStep kSteps[] = {
    {.kind = Kind::kTake},
    {.kind = Kind::kLerp, .value = 1 - 0.999},
    {.kind = Kind::kLerp, .value = 0.5},
    {.kind = Kind::kLerp, .value = 1 - 0.1},
    {.kind = Kind::kMean, .value = 2},
    {.kind = Kind::kMean, .value = 1000003},
    {.kind = Kind::kKeep},
};

// Ordinary numbers, and ones that vanish, overflow or are half way between two bf16 numbers.
float Number(Random& random) {
  constexpr float kSpecial[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 3e38f, -3e38f, 1.00390625f};
  if (random.Below(8) == 0) return kSpecial[random.Below(std::size(kSpecial))];
  return static_cast<float>(random.Unit() * 2 - 1);
}

template <class T>
std::vector<T> Numbers(size_t count, Random& random) {
  std::vector<T> numbers(count);
  for (T& number : numbers) number = Number(random);
  return numbers;
}

// What torch's operators give for one element (torch 2.11, ATen/native/Lerp.h and BinaryOps).
template <class T>
T Moved(const AverageStep& step, T average, T master) {
  const T value = static_cast<T>(step.value);
  switch (step.kind) {
    case Kind::kKeep:
      return average;
    case Kind::kTake:
      return master;
    case Kind::kMean:
      return average + (master - average) / value;
    case Kind::kLerp:
      break;
  }
  const T distance = master - average;
  return value < T{0.5} ? std::fma(value, distance, average)
                        : std::fma(value - T{1}, distance, master);
}

template <class T>
void ExpectSameBits(const std::vector<T>& got, const std::vector<T>& wanted, const char* what) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::isnan(wanted[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::memcmp(&got[i], &wanted[i], sizeof(T)), 0)
        << what << ", element " << i << ": " << got[i] << " for " << wanted[i];
  }
}

// Calls test(isa, step, count) for all of them that the processor has.
template <class Test>
void ForEach(const Test& test) {
  for (const Isa isa : kIsas) {
    if (!IsSupported(isa)) continue;
    for (const AverageStep& step : kSteps) {
      for (const size_t count : {0, 1, 7, 8, 15, 16, 33, 2047, 2048, 2049, 5003}) {
        SCOPED_TRACE(testing::Message() << IsaName(isa) << ", step " << static_cast<int>(step.kind)
                                        << " " << step.value << ", " << count << " elements");
        test(isa, step, count);
      }
    }
  }
}

template <class T>
std::vector<T> Wanted(const AverageStep& step, std::vector<T> average,
                      const std::vector<T>& master) {
  for (size_t i = 0; i < average.size(); ++i) average[i] = Moved(step, average[i], master[i]);
  return average;
}

template <class T>
void TestPlain(Dtype dtype) {
  Random random(7);
  ForEach([&](Isa isa, const AverageStep& step, size_t count) {
    const std::vector<T> master = Numbers<T>(count, random);
    std::vector<T> average = Numbers<T>(count, random);
    const std::vector<T> wanted = Wanted(step, average, master);
    MoveAverage(isa, step,
                {.count = count,
                 .weight_dtype = dtype,
                 .weight = master.data(),
                 .average = average.data()});
    ExpectSameBits(average, wanted, DtypeName(dtype));
  });
}

TEST(Average, OfMastersThatAreTheWeights) {
  TestPlain<float>(Dtype::kFloat32);
  TestPlain<double>(Dtype::kFloat64);
}

TEST(Average, OfMastersInBfloat16AndWhatItLeavesFromATieOn) {
  Random random(11);
  ForEach([&](Isa isa, const AverageStep& step, size_t count) {
    constexpr size_t kBefore = 5;  // elements of another tensor, all of them ties
    std::vector<float> all = Numbers<float>(kBefore + count, random);
    for (size_t i = 0; i < kBefore; ++i) all[i] = std::bit_cast<float>(0x3F808000u);
    std::vector<uint16_t> weight(all.size());
    std::vector<int16_t> residual(all.size());
    std::vector<uint8_t> bits(all.size() / 8 + 1);
    TieWriter ties{bits.data()};
    Split(isa, reinterpret_cast<const uint32_t*>(all.data()), kBefore, weight.data(),
          residual.data(), &ties);
    const size_t first_tie = ties.position;
    ASSERT_EQ(first_tie, kBefore);
    Split(isa, reinterpret_cast<const uint32_t*>(all.data()) + kBefore, count,
          weight.data() + kBefore, residual.data() + kBefore, &ties);
    const std::vector<float> master(all.begin() + kBefore, all.end());
    std::vector<float> average = Numbers<float>(count, random);
    const std::vector<float> wanted = Wanted(step, average, master);
    MoveAverage(isa, step,
                {.count = count,
                 .weight_dtype = Dtype::kBFloat16,
                 .weight = weight.data() + kBefore,
                 .residual = residual.data() + kBefore,
                 .ties = {bits.data(), first_tie},
                 .average = average.data()});
    ExpectSameBits(average, wanted, "bf16");
  });
}

TEST(Average, OfMastersInFloat16AndWhatItLeaves) {
  Random random(13);
  ForEach([&](Isa isa, const AverageStep& step, size_t count) {
    const std::vector<float> master = Numbers<float>(count, random);
    std::vector<Half> weight(count);
    std::vector<uint32_t> residual(count);
    SplitHalf(master.data(), count, weight.data(), residual.data());
    std::vector<float> average = Numbers<float>(count, random);
    const std::vector<float> wanted = Wanted(step, average, master);
    MoveAverage(isa, step,
                {.count = count,
                 .weight_dtype = Dtype::kFloat16,
                 .weight = weight.data(),
                 .half_residual = residual.data(),
                 .average = average.data()});
    ExpectSameBits(average, wanted, "fp16");
  });
}

}  // namespace
}  // namespace offload::kernels
