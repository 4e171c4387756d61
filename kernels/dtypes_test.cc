// What models of fp64 and fp16 are trained with: every implementation computes what the scalar
// references say.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"
#include "kernels/adversarial.h"
#include "kernels/dtype.h"
#include "kernels/split.h"
#include "kernels/sum.h"
#include "kernels/update.h"

namespace offload::kernels {
namespace {

class DtypesTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsSupported(GetParam())) GTEST_SKIP() << "this processor lacks " << IsaName(GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(EveryVectorIsa, DtypesTest, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

template <class Tensor>
void ExpectReferenceBits(Isa isa) {
  Random random(11);
  for (const OptimizerSpec& optimizer : ManyOptimizers()) {
    for (const size_t count : {1, 4, 7, 8, 16, 33, 203}) {
      for (const int64_t step : {1, 3}) {
        Tensor tensor(count, &random);
        Tensor expected = tensor;
        const size_t cut = random.Below(count + 1);
        for (Run run : {tensor.RunOf(0, cut), tensor.RunOf(cut, count)})
          Update(isa, optimizer, step, run);
        Update(Isa::kReference, optimizer, step, expected.RunOf(0, count));
        ASSERT_EQ(tensor.Bits(), expected.Bits())
            << optimizer.name() << ", " << count << " elements cut at " << cut;
      }
    }
  }
}

TEST_P(DtypesTest, Fp64IsTheReferenceBitForBit) { ExpectReferenceBits<Doubles>(GetParam()); }
TEST_P(DtypesTest, Fp16IsTheReferenceBitForBit) { ExpectReferenceBits<Halves>(GetParam()); }

template <class Tensor>
void ExpectReferenceNorms(Isa isa) {
  Random random(12);
  const OptimizerSpec lamb("lamb");
  for (const size_t count : {1, 8, 19, 77}) {
    Tensor tensor(count, &random);
    const auto before = tensor.Bits();
    Norms norms, expected;
    AddNorms(isa, lamb, 2, tensor.RunOf(0, count), &norms);
    AddNorms(Isa::kReference, lamb, 2, tensor.RunOf(0, count), &expected);
    EXPECT_EQ(tensor.Bits(), before);
    for (size_t i = 0; i < Norms::kLanes; ++i) {
      const auto same = [](double a, double b) { return a == b || (a != a && b != b); };
      EXPECT_TRUE(same(norms.weight[i], expected.weight[i]) &&
                  same(norms.update[i], expected.update[i]));
    }
  }
}

TEST_P(DtypesTest, NormsAreThoseOfTheReference) {
  ExpectReferenceNorms<Doubles>(GetParam());
  ExpectReferenceNorms<Halves>(GetParam());
}

// The only update that computes in fp32 what it computes in fp64.
TEST(DtypesUpdateTest, Fp64KeepsWhatFp32WouldRoundAway) {
  double weight = 1;
  const double gradient = 0x1p-40;
  Update(OptimizerSpec("sgd", {{"lr", 1}}), 1,
         {.count = 1,
          .tensor_count = 1,
          .weight_dtype = Dtype::kFloat64,
          .weight = &weight,
          .gradient_dtype = Dtype::kFloat64,
          .gradient = &gradient});
  EXPECT_EQ(weight, 1 - 0x1p-40);
}

TEST_P(DtypesTest, OneNonFiniteElementIsFoundAnywhere) {
  std::vector<double> doubles(300, 1.7976931348623157e308);
  std::vector<Half> halves(300, Half{0x7BFF});
  const auto are_finite = [&](size_t begin) {
    return std::pair(AllFinite(GetParam(), Dtype::kFloat64, doubles.data() + begin, 300 - begin),
                     AllFinite(GetParam(), Dtype::kFloat16, halves.data() + begin, 300 - begin));
  };
  EXPECT_EQ(are_finite(0), std::pair(true, true));
  for (const uint64_t bad : {0x7FF0000000000000u, 0xFFF0000000000000u, 0x7FF8000000000000u}) {
    for (size_t i = 1; i < 300; ++i) {
      doubles[i] = std::bit_cast<double>(bad);
      halves[i] = Half{static_cast<uint16_t>(0xFC00 | (i & 0x3FF))};
      ASSERT_EQ(are_finite(1), std::pair(false, false)) << i;
      doubles[i] = -0.0;
      halves[i] = Half{0x8000};
    }
  }
}

// Sums of numbers, NaN being one value.
template <class T>
void ExpectReferenceSums(Isa isa, Dtype dtype, const std::vector<std::vector<T>>& parts) {
  const auto bits_of = [](const std::vector<T>& values) {
    std::vector<uint64_t> bits(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if constexpr (sizeof(T) == sizeof(double)) {
        bits[i] = std::isnan(values[i]) ? 1 : std::bit_cast<uint64_t>(values[i]);
      } else {
        bits[i] = std::isnan(FromHalf(values[i])) ? 1 : values[i].bits;
      }
    }
    return bits;
  };
  for (const SumStart start : {SumStart::kNothing, SumStart::kZeros, SumStart::kSum}) {
    for (const double factor : {1.0, 1.0 / 3}) {
      std::vector<T> sum = parts[0], expected = parts[0];
      const void* const pointers[] = {parts[1].data(), parts[2].data()};
      SumRun run{.dtype = dtype,
                 .count = sum.size(),
                 .sum = sum.data(),
                 .start = start,
                 .parts = pointers,
                 .part_count = 2,
                 .factor = factor};
      const bool finite = AddParts(isa, run);
      run.sum = expected.data();
      EXPECT_EQ(finite, AddParts(Isa::kReference, run));
      EXPECT_EQ(bits_of(sum), bits_of(expected));
    }
  }
}

TEST_P(DtypesTest, SumsAreThoseOfTheReference) {
  Random random(13);
  for (const size_t count : {1, 7, 16, 67}) {
    std::vector<std::vector<double>> doubles(3, std::vector<double>(count));
    std::vector<std::vector<Half>> halves(3, std::vector<Half>(count));
    for (size_t part = 0; part < 3; ++part) {
      for (size_t i = 0; i < count; ++i) {
        doubles[part][i] = AdversarialValue(&random) * (1 + random.Unit());
        halves[part][i] = ToHalf(AdversarialValue(&random));
      }
    }
    ExpectReferenceSums(GetParam(), Dtype::kFloat64, doubles);
    ExpectReferenceSums(GetParam(), Dtype::kFloat16, halves);
  }
}

// ---- fp16 --------------------------------------------------------------------------------------

TEST(HalfTest, EveryNumberIsItsOwnCast) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = FromHalf(Half{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(FromHalf(ToHalf(value))));
    } else {
      ASSERT_EQ(ToHalf(value).bits, bits);
    }
  }
}

// Between neighbours the middle goes to the even one, and what lies beside it to the nearer.
TEST(HalfTest, RoundsToTheNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const Half low{static_cast<uint16_t>(bits)}, high{static_cast<uint16_t>(bits + 1)};
    const float middle = (FromHalf(low) + FromHalf(high)) / 2;
    ASSERT_EQ(ToHalf(middle).bits, bits % 2 == 0 ? low.bits : high.bits);
    ASSERT_EQ(ToHalf(std::nextafter(middle, 0.0f)).bits, low.bits);
    ASSERT_EQ(ToHalf(std::nextafter(middle, 1e9f)).bits, high.bits);
    ASSERT_EQ(ToHalf(-middle).bits, 0x8000 | ToHalf(middle).bits);
  }
  EXPECT_EQ(ToHalf(65519.996f).bits, 0x7BFF);
  EXPECT_EQ(ToHalf(65520.0f).bits, 0x7C00);
  EXPECT_EQ(ToHalf(-INFINITY).bits, 0xFC00);
  EXPECT_EQ(ToHalf(1e-40f).bits, 0);
}

// A step of nothing casts the master again: by the instructions what ToHalf() says.
TEST_P(DtypesTest, CastsAsTheReferenceDoes) {
  constexpr uint32_t kCount = 1 << 16;
  std::vector<float> masters(kCount);
  std::vector<Half> weight(kCount), gradient(kCount);
  std::vector<uint32_t> residual(kCount);
  for (uint32_t low : {0u, 1u, 0x0FFFu, 0x1000u, 0x1001u, 0x2FFFu, 0x3000u, 0x8000u, 0xFFFFu}) {
    for (uint32_t i = 0; i < kCount; ++i) {
      const float master = std::bit_cast<float>(i << 16 | low);
      masters[i] = std::isnan(master) ? 0 : master;
      weight[i] = Half{};
      residual[i] = std::bit_cast<uint32_t>(masters[i]);
    }
    Update(GetParam(), OptimizerSpec("sgd", {{"lr", 0}}), 1,
           {.count = kCount,
            .tensor_count = kCount,
            .weight_dtype = Dtype::kFloat16,
            .weight = weight.data(),
            .half_residual = residual.data(),
            .gradient_dtype = Dtype::kFloat16,
            .gradient = gradient.data()});
    std::vector<float> merged(kCount);
    MergeHalf(weight.data(), residual.data(), kCount, merged.data());
    for (uint32_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(weight[i].bits, ToHalf(masters[i]).bits) << masters[i];
      ASSERT_EQ(merged[i], masters[i]);
    }
  }
}

// A loss scale is taken out of a gradient in fp32: fp16 would lose what the scale has saved.
// `scale` is a clipping factor, and rounds to fp16 before.
void ExpectUnscaledInFp32(Isa isa, float scale) {
  constexpr double kUnscale = 0.37 / 65536;
  constexpr size_t kCount = 4133;  // several pieces, and a tail
  for (const std::string_view name : {"adamw", "adam", "sgd", "adagrad", "rmsprop"}) {
    Random random(15);
    std::vector<Half> weight(kCount), gradient(kCount);
    std::vector<uint32_t> residual(kCount);
    std::vector<float> masters(kCount), wide(kCount), merged(kCount);
    std::vector<std::vector<float>> states(kStatePlanesMax, std::vector<float>(kCount));
    for (size_t i = 0; i < kCount; ++i) {
      masters[i] = static_cast<float>(random.Unit());
      gradient[i] = ToHalf(static_cast<float>(random.Unit() * (i % 3 == 0 ? 1e-5 : 100)));
      const float scaled =
          scale == 1 ? FromHalf(gradient[i]) : FromHalf(ToHalf(FromHalf(gradient[i]) * scale));
      wide[i] = scaled * static_cast<float>(kUnscale);
      for (auto& plane : states) plane[i] = static_cast<float>(random.Unit());
    }
    SplitHalf(masters.data(), kCount, weight.data(), residual.data());
    auto expected_states = states;
    kernels::Run run{.count = kCount,
                     .tensor_count = kCount,
                     .weight_dtype = Dtype::kFloat16,
                     .weight = weight.data(),
                     .half_residual = residual.data(),
                     .gradient_dtype = Dtype::kFloat16,
                     .gradient = gradient.data(),
                     .gradient_scale = scale};
    kernels::Run expected{
        .count = kCount, .tensor_count = kCount, .weight = masters.data(), .gradient = wide.data()};
    for (size_t i = 0; i < kStatePlanesMax; ++i) {
      run.state[i] = states[i].data();
      expected.state[i] = expected_states[i].data();
    }
    const OptimizerSpec optimizer(name, {{"unscale", kUnscale}});
    Update(isa, optimizer, 2, run);
    Update(Isa::kReference, optimizer, 2, expected);  // of fp32: no effect
    MergeHalf(weight.data(), residual.data(), kCount, merged.data());
    EXPECT_EQ(merged, masters) << name;
    EXPECT_EQ(states, expected_states) << name;
  }
}
TEST(HalfTest, UnscalesInFp32) {
  for (const float scale : {1.0f, 0.3f}) ExpectUnscaledInFp32(Isa::kReference, scale);
}
TEST_P(DtypesTest, UnscalesFp16InFp32) {
  for (const float scale : {1.0f, 0.3f}) ExpectUnscaledInFp32(GetParam(), scale);
}

TEST(HalfTest, NothingOfAMasterIsLost) {
  Random random(14);
  for (int i = 0; i < 1000000; ++i) {
    const auto master = std::bit_cast<float>(static_cast<uint32_t>(random.Next()));
    Half weight;
    uint32_t residual;
    float merged;
    SplitHalf(&master, 1, &weight, &residual);
    MergeHalf(&weight, &residual, 1, &merged);
    ASSERT_EQ(std::bit_cast<uint32_t>(merged), std::bit_cast<uint32_t>(master));
    if (FromHalf(ToHalf(master)) == master && master != 0) {
      ASSERT_EQ(residual, 0u);
    }
  }
}

}  // namespace
}  // namespace offload::kernels
