#include "kernels/device_update.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"
#include "kernels/adversarial.h"

namespace offload::kernels {
namespace {

// Updates a run of host memory as a device would: its tie bits are spread and packed again.
void UpdateAsDevice(const OptimizerSpec& optimizer, int64_t step, const Run& run) {
  std::vector<uint32_t> ties(TieWords(run.count) + 1, 0xFFFFFFFF);
  DeviceRun device = {
      .count = run.count,
      .begin = run.begin,
      .tensor_count = run.tensor_count,
      .weight_dtype = run.weight_dtype,
      .weight = run.weight,
      .residual = run.residual,
      .half_residual = run.half_residual,
      .state = {run.state[0], run.state[1], run.state[2]},
      .double_state = {run.double_state[0], run.double_state[1], run.double_state[2]},
      .gradient_dtype = run.gradient_dtype,
      .gradient = run.gradient,
      .gradient_scale = run.gradient_scale,
      .roots = run.roots};
  std::vector<double> norms(NormBytes(run.count) / sizeof(double) + 1, 0.1);
  if (NeedsNorms(optimizer)) device.norms = norms.data();
  const bool is_split = run.weight_dtype == Dtype::kBFloat16;
  if (is_split) {
    UnpackTies(run.residual, run.count, run.ties_in, ties.data());
    device.ties = ties.data();
  }
  UpdateOnHost(optimizer, step, device);
  if (is_split) PackTies(run.residual, run.count, ties.data(), run.ties_out);
  EXPECT_EQ(ties.back(), 0xFFFFFFFFu) << "a word behind the last one was written";
  EXPECT_EQ(norms.back(), 0.1) << "a number behind the trust ratio was written";
}

bool HasUnscale(const OptimizerSpec& optimizer) {
  const auto is_unscale = [](const Parameter& parameter) {
    return std::string_view(parameter.name) == "unscale";
  };
  return std::ranges::any_of(optimizer.row().parameters, is_unscale);
}

TEST(DeviceUpdateTest, EveryElementIsThatOfTheProcessorsKernelsBitForBit) {
  Random random(1);
  for (const Shape shape : kShapes) {
    for (const float scale : {1.0f, 0.37f}) {
      for (const size_t count : {0, 1, 7, 8, 31, 32, 33, 67, 1003}) {
        for (const OptimizerSpec& optimizer : ManyOptimizers()) {
          Tensor device(shape, count, &random);
          Tensor processor = device;
          for (const int64_t step : kStepsOfRoots) {
            const uint32_t* const roots = RootsOfStep(step);
            device.Apply({}, scale, [&](kernels::Run run) {
              run.roots = roots;
              UpdateAsDevice(optimizer, step, run);
            });
            processor.Apply({}, scale, [&](kernels::Run run) {
              run.roots = roots;
              UpdateWhole(optimizer, step, run);
            });
          }
          ASSERT_EQ(device.Bits(), processor.Bits())
              << optimizer.name() << ", " << count << " elements, scale " << scale;
        }
      }
    }
  }
}

// Of fp64 and fp16 models, these with gradients of a scaled loss.
template <class Elements>
void ExpectBitsOfTheProcessor(const OptimizerSpec& optimizer, size_t count, double scale,
                              Random* random, MakeValue value = AdversarialValue) {
  Elements device(count, random, value);
  Elements processor = device;
  for (const int64_t step : kStepsOfRoots) {
    const auto run_of = [&](Elements& elements) {
      Run run = elements.RunOf(0, count);
      run.gradient_scale = scale;
      run.roots = RootsOfStep(step);
      return run;
    };
    UpdateAsDevice(optimizer, step, run_of(device));
    UpdateWhole(optimizer, step, run_of(processor));
  }
  ASSERT_EQ(device.Bits(), processor.Bits())
      << optimizer.name() << ", " << count << " elements, scale " << scale;
}

TEST(DeviceUpdateTest, EveryDoubleIsThatOfTheProcessorsKernelsBitForBit) {
  Random random(4);
  for (const double scale : {1.0, 0.37}) {
    for (const size_t count : {1, 3, 4, 5, 31, 33, 1003}) {
      for (const OptimizerSpec& optimizer : ManyOptimizers())
        ExpectBitsOfTheProcessor<Doubles>(optimizer, count, scale, &random);
    }
  }
}

TEST(DeviceUpdateTest, EveryHalfIsThatOfTheProcessorsKernelsBitForBit) {
  Random random(5);
  for (const double scale : {1.0, static_cast<double>(0.37f)}) {
    for (const size_t count : {1, 7, 8, 9, 31, 33, 1003, 5000}) {
      for (OptimizerSpec optimizer : ManyOptimizers()) {
        ExpectBitsOfTheProcessor<Halves>(optimizer, count, scale, &random);
        if (!HasUnscale(optimizer)) continue;
        for (const double unscale : {0x1p-16, 0.3 / 65536})
          ExpectBitsOfTheProcessor<Halves>(optimizer.Set("unscale", unscale), count, scale,
                                           &random);
      }
    }
  }
}

// Sums of squares that are finite.
void ExpectNormsOfTheProcessor(const OptimizerSpec& lamb, size_t count, Random* random) {
  for (const Shape shape : kShapes) {
    Tensor device(shape, count, random, OrdinaryValue);
    Tensor processor = device;
    const auto before = device.Bits();
    device.Apply({}, 0.37f, [&](const kernels::Run& run) { UpdateAsDevice(lamb, 2, run); });
    processor.Apply({}, 0.37f, [&](const kernels::Run& run) { UpdateWhole(lamb, 2, run); });
    ASSERT_EQ(device.Bits(), processor.Bits()) << count;
    ASSERT_NE(device.Bits(), before) << count;
  }
}

TEST(DeviceUpdateTest, NormsAreThoseOfTheProcessorBitForBit) {
  Random random(6);
  for (const OptimizerSpec& lamb : FormsOf("lamb")) {
    for (const size_t count : {1, 1003}) {
      ExpectNormsOfTheProcessor(lamb, count, &random);
      ExpectBitsOfTheProcessor<Doubles>(lamb, count, 0.37, &random, OrdinaryValue);
      ExpectBitsOfTheProcessor<Halves>(lamb, count, 0.37f, &random, OrdinaryValue);
    }
  }
  // Of several blocks.
  ExpectNormsOfTheProcessor(OptimizerSpec("lamb"), Norms::kBlockElements + 1003, &random);
}

TEST(DeviceUpdateTest, AScaledLossTakesPartInFp16Alone) {
  const OptimizerSpec optimizer("sgd", {{"lr", 1}, {"unscale", 0.5}});
  float weight = 10;
  const float gradient = 3;
  UpdateOnHost(optimizer, 1,
               {.count = 1, .tensor_count = 1, .weight = &weight, .gradient = &gradient});
  EXPECT_EQ(weight, 7);
  Half half = ToHalf(10), half_gradient = ToHalf(3);
  uint32_t residual = 0;
  UpdateOnHost(optimizer, 1,
               {.count = 1,
                .tensor_count = 1,
                .weight_dtype = Dtype::kFloat16,
                .weight = &half,
                .half_residual = &residual,
                .gradient_dtype = Dtype::kFloat16,
                .gradient = &half_gradient});
  EXPECT_EQ(FromHalf(half), 8.5f);
}

TEST(DeviceUpdateTest, DoesNotDependOnWhereTheTensorIsCut) {
  Random random(2);
  const OptimizerSpec optimizer;
  for (size_t count = 1; count <= 67; ++count) {
    Tensor whole(kShapes[count % std::size(kShapes)], count, &random);
    Tensor parts = whole;
    const auto update = [&](const kernels::Run& run) { UpdateAsDevice(optimizer, 2, run); };
    whole.Apply({}, 0.9f, update);
    parts.Apply({random.Below(count)}, 0.9f, update);
    ASSERT_EQ(parts.Bits(), whole.Bits()) << count;
  }
}

TEST(DeviceUpdateTest, TheScaleMayStandOnTheDevice) {
  const float gradient = 3, scale = 0.5f;
  float weight = 10;
  const DeviceRun run = {.count = 1,
                         .tensor_count = 1,
                         .weight = &weight,
                         .gradient = &gradient,
                         .gradient_scale = 7,
                         .gradient_scale_on_device = &scale};
  UpdateOnHost(OptimizerSpec("sgd", {{"lr", 1}}), 1, run);
  EXPECT_EQ(weight, 8.5f);
}

TEST(TieBitsTest, SpreadAndPackedAreTheSame) {
  Random random(3);
  for (size_t count = 0; count < 200; ++count) {
    std::vector<int16_t> residual(count);
    std::vector<uint8_t> packed(count / 8 + 1), again(count / 8 + 1);
    TieWriter writer{packed.data()}, second_writer{again.data()};
    for (int16_t& lo : residual) {
      lo = random.OneIn(2) ? -32768 : static_cast<int16_t>(random.Next());
      if (lo == -32768) writer.Append(random.OneIn(2));
    }
    TieReader reader{packed.data()};
    std::vector<uint32_t> ties(TieWords(count));
    UnpackTies(residual.data(), count, &reader, ties.data());
    PackTies(residual.data(), count, ties.data(), &second_writer);
    EXPECT_EQ(again, packed) << count;
    EXPECT_EQ(reader.position, writer.position);
    EXPECT_EQ(second_writer.position, writer.position);
  }
}

}  // namespace
}  // namespace offload::kernels
