// kernels/adversarial.h
//
// For tests: tensors full of what breaks kernels, and every optimizer of the table in many forms.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "kernels/library_roots.h"
#include "kernels/split.h"
#include "kernels/square_root.h"
#include "kernels/update.h"

namespace offload::kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline uint16_t BFloat16Of(float value) { return std::bit_cast<uint32_t>(value) >> 16; }

// Ordinary numbers for the most part; the rest is what breaks kernels.
inline float AdversarialValue(Random* random) {
  static const float kSpecial[] = {0.0f,
                                   -0.0f,
                                   kInfinity,
                                   -kInfinity,
                                   std::bit_cast<float>(0x7FC00000u),
                                   std::bit_cast<float>(0xFFFF8000u),  // a NaN that ends in a tie
                                   std::bit_cast<float>(0x7F812345u),  // a signalling NaN
                                   1e-45f,
                                   -1e-40f,
                                   1.17549435e-38f,
                                   3.4028235e38f,
                                   -3.4028235e38f,
                                   1e19f,
                                   1e-20f,
                                   std::bit_cast<float>(0x3F808000u),  // a tie that goes down
                                   std::bit_cast<float>(0x3F818000u),  // a tie that goes up
                                   std::bit_cast<float>(0x00008000u)};
  const uint64_t kind = random->Below(8);
  if (kind == 0) return kSpecial[random->Below(std::size(kSpecial))];
  if (kind == 1) return std::bit_cast<float>(static_cast<uint32_t>(random->Next()));
  if (kind == 2) return std::bit_cast<float>(static_cast<uint32_t>(random->Next()) & 0x007FFFFF);
  return static_cast<float>(random->Unit() * 2 - 1);
}

// Of which norms are finite.
inline float OrdinaryValue(Random* random) { return static_cast<float>(random->Unit() * 2 - 1); }

using MakeValue = float (*)(Random* random);

struct Shape {
  Dtype weight_dtype;
  Dtype gradient_dtype;
};
inline constexpr Shape kShapes[] = {{Dtype::kFloat32, Dtype::kFloat32},
                                    {Dtype::kFloat32, Dtype::kBFloat16},
                                    {Dtype::kBFloat16, Dtype::kFloat32},
                                    {Dtype::kBFloat16, Dtype::kBFloat16}};

// A whole tensor with its state, one element off alignment.
class Tensor {
 public:
  Tensor(Shape shape, size_t count, Random* random, MakeValue value = AdversarialValue)
      : shape_(shape),
        count_(count),
        master_(count + 1),
        hi_(count + 1),
        lo_(count + 1),
        state_(kStatePlanesMax, std::vector<float>(count + 1)),
        gradient_(count + 1),
        gradient_bf16_(count + 1),
        ties_(count / 8 + 1) {
    for (size_t i = 1; i <= count; ++i) {
      master_[i] = value(random);
      state_[0][i] = value(random);
      for (size_t plane = 1; plane < kStatePlanesMax; ++plane)
        state_[plane][i] = std::abs(value(random));
      gradient_[i] = value(random);
      gradient_bf16_[i] = BFloat16Of(gradient_[i]);
    }
    TieWriter writer{ties_.data()};
    Split(Isa::kReference, reinterpret_cast<const uint32_t*>(master_.data()) + 1, count,
          hi_.data() + 1, lo_.data() + 1, &writer);
  }

  // Applies update(run) to the pieces that the cuts make; positions of the tie bits run through.
  template <class Update>
  void Apply(std::vector<size_t> cuts, float gradient_scale, const Update& update) {
    std::vector<uint8_t> ties(ties_.size());
    TieReader reader{ties_.data()};
    TieWriter writer{ties.data()};
    cuts.push_back(count_);
    size_t begin = 0;
    for (const size_t end : cuts) {
      Run run = RunOf(begin, end);
      run.ties_in = &reader;
      run.ties_out = &writer;
      run.gradient_scale = gradient_scale;
      update(run);
      begin = end;
    }
    ties_ = ties;
  }

  // Masters, state: all bits, NaN being one value, because an instruction may pick either of two
  // payloads.
  std::vector<uint32_t> Bits() const {
    std::vector<uint32_t> bits(count_);
    if (shape_.weight_dtype == Dtype::kBFloat16) {
      TieReader reader{ties_.data()};
      Merge(Isa::kReference, hi_.data() + 1, lo_.data() + 1, count_, bits.data(), &reader);
    } else {
      for (size_t i = 0; i < count_; ++i) bits[i] = std::bit_cast<uint32_t>(master_[i + 1]);
    }
    for (const std::vector<float>& plane : state_) {
      for (size_t i = 1; i <= count_; ++i) bits.push_back(std::bit_cast<uint32_t>(plane[i]));
    }
    for (uint32_t& word : bits) {
      if (std::isnan(std::bit_cast<float>(word))) word = 0x7FC00000;
    }
    return bits;
  }

 private:
  Run RunOf(size_t begin, size_t end) {
    const bool is_split = shape_.weight_dtype == Dtype::kBFloat16;
    const bool is_half = shape_.gradient_dtype == Dtype::kBFloat16;
    Run run;
    run.count = end - begin;
    run.begin = begin;
    run.tensor_count = count_;
    run.weight_dtype = shape_.weight_dtype;
    run.weight = is_split ? static_cast<void*>(&hi_[1] + begin) : &master_[1] + begin;
    run.residual = is_split ? &lo_[1] + begin : nullptr;
    for (size_t i = 0; i < kStatePlanesMax; ++i) run.state[i] = &state_[i][1] + begin;
    run.gradient_dtype = shape_.gradient_dtype;
    run.gradient =
        is_half ? static_cast<const void*>(&gradient_bf16_[1] + begin) : &gradient_[1] + begin;
    return run;
  }

  Shape shape_;
  size_t count_;
  std::vector<float> master_;
  std::vector<uint16_t> hi_;
  std::vector<int16_t> lo_;
  std::vector<std::vector<float>> state_;
  std::vector<float> gradient_;
  std::vector<uint16_t> gradient_bf16_;
  std::vector<uint8_t> ties_;
};

// An fp64 tensor with what an optimizer keeps of it.
struct Doubles {
  Doubles(size_t count, Random* random, MakeValue value = AdversarialValue)
      : weight(count), gradient(count), state(kStatePlanesMax, std::vector<double>(count)) {
    const auto any = [&] { return value(random) * (1 + random->Unit()); };
    for (size_t i = 0; i < count; ++i) {
      weight[i] = any(), gradient[i] = any();
      state[0][i] = any();
      for (size_t plane = 1; plane < kStatePlanesMax; ++plane) state[plane][i] = std::abs(any());
    }
  }

  Run RunOf(size_t begin, size_t end) {
    Run run{.count = end - begin,
            .begin = begin,
            .tensor_count = weight.size(),
            .weight_dtype = Dtype::kFloat64,
            .weight = weight.data() + begin,
            .gradient_dtype = Dtype::kFloat64,
            .gradient = gradient.data() + begin};
    for (size_t i = 0; i < kStatePlanesMax; ++i) run.double_state[i] = state[i].data() + begin;
    return run;
  }

  // NaN being one value.
  std::vector<uint64_t> Bits() const {
    std::vector<uint64_t> bits;
    const auto add = [&](const std::vector<double>& values) {
      for (const double value : values)
        bits.push_back(std::isnan(value) ? 1 : std::bit_cast<uint64_t>(value));
    };
    add(weight);
    for (const auto& plane : state) add(plane);
    return bits;
  }

  std::vector<double> weight, gradient;
  std::vector<std::vector<double>> state;
};

// The same in fp16.
struct Halves {
  Halves(size_t count, Random* random, MakeValue value = AdversarialValue)
      : weight(count),
        gradient(count),
        residual(count),
        state(kStatePlanesMax, std::vector<float>(count)) {
    std::vector<float> masters(count);
    for (size_t i = 0; i < count; ++i) {
      masters[i] = value(random);
      gradient[i] = ToHalf(value(random));
      state[0][i] = value(random);
      for (size_t plane = 1; plane < kStatePlanesMax; ++plane)
        state[plane][i] = std::abs(value(random));
    }
    SplitHalf(masters.data(), count, weight.data(), residual.data());
  }

  Run RunOf(size_t begin, size_t end) {
    Run run{.count = end - begin,
            .begin = begin,
            .tensor_count = weight.size(),
            .weight_dtype = Dtype::kFloat16,
            .weight = weight.data() + begin,
            .half_residual = residual.data() + begin,
            .gradient_dtype = Dtype::kFloat16,
            .gradient = gradient.data() + begin,
            .gradient_scale = 0.37f};
    for (size_t i = 0; i < kStatePlanesMax; ++i) run.state[i] = state[i].data() + begin;
    return run;
  }

  std::vector<uint64_t> Bits() const {
    std::vector<float> masters(weight.size());
    MergeHalf(weight.data(), residual.data(), weight.size(), masters.data());
    std::vector<uint64_t> bits;
    const auto add = [&](const std::vector<float>& values) {
      for (const float value : values)
        bits.push_back(std::isnan(value) ? 1 : std::bit_cast<uint32_t>(value));
    };
    add(masters);
    for (const auto& plane : state) add(plane);
    for (size_t i = 0; i < masters.size(); ++i)
      bits.push_back(std::isnan(masters[i]) ? 1 : weight[i].bits);
    return bits;
  }

  std::vector<Half> weight, gradient;
  std::vector<uint32_t> residual;
  std::vector<std::vector<float>> state;
};

// Elements [begin, begin + count) of a run, with its tie bits.
inline Run PartOf(Run run, size_t begin, size_t count) {
  const auto advance = [begin](auto* array) { return array == nullptr ? array : array + begin; };
  run.count = count;
  run.begin += begin;
  run.weight = static_cast<char*>(run.weight) + begin * DtypeBytes(run.weight_dtype);
  run.residual = advance(run.residual);
  run.half_residual = advance(run.half_residual);
  for (float*& state : run.state) state = advance(state);
  for (double*& state : run.double_state) state = advance(state);
  run.gradient = static_cast<const char*>(run.gradient) + begin * DtypeBytes(run.gradient_dtype);
  return run;
}

// The processor's update of a whole tensor, with its norms where they are needed.
inline void UpdateWhole(const OptimizerSpec& optimizer, int64_t step, Run run) {
  std::vector<Norms> blocks;
  TieReader ties = run.ties_in == nullptr ? TieReader() : *run.ties_in;
  for (size_t begin = 0; NeedsNorms(optimizer) && begin < run.count;
       begin += Norms::kBlockElements) {
    Run block = PartOf(run, begin, std::min<size_t>(run.count - begin, Norms::kBlockElements));
    if (run.ties_in != nullptr) block.ties_in = &ties;
    AddNorms(optimizer, step, block, &blocks.emplace_back());
  }
  run.trust_ratio = TrustRatio(blocks);
  Update(optimizer, step, run);
}

inline std::vector<OptimizerSpec> ManyAdamW() {
  std::vector<OptimizerSpec> many;
  for (const double flavour : {0, 1, 2}) {
    for (const double maximize : {0, 1}) {
      for (const double amsgrad : {0, 1}) {
        const OptimizerSpec spec(
            "adamw", {{"flavour", flavour}, {"maximize", maximize}, {"amsgrad", amsgrad}});
        many.push_back(spec);
        many.push_back(spec);
        many.back().Set("lr", 0.7).Set("beta1", 0.3).Set("beta2", 0.5).Set("eps", 0);
        many.back().Set("weight_decay", 0);
      }
    }
  }
  return many;
}

inline std::vector<OptimizerSpec> ManySgd() {
  std::vector<OptimizerSpec> many;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const double maximize : {0, 1}) {
      const OptimizerSpec plain(
          "sgd", {{"lr", 0.1}, {"weight_decay", weight_decay}, {"maximize", maximize}});
      many.push_back(plain);
      many.push_back(OptimizerSpec(plain).Set("momentum", 0.9).Set("dampening", 0.3));
      many.push_back(OptimizerSpec(plain).Set("momentum", 0.9).Set("nesterov", 1));
      many.push_back(OptimizerSpec(plain).Set("momentum", 0.9).Set("dampening", 0.3));
      many.back().Set("fused", 1);
    }
  }
  return many;
}

// Another value for a parameter than most have by default.
inline double OtherValue(const Parameter& parameter) {
  switch (parameter.range) {
    case Range::kFlag:
    case Range::kFlavour:
      return 1;
    case Range::kFinite:
    case Range::kNotNegative:
    case Range::kRate:
    case Range::kFraction:
      break;
  }
  return 0.3;
}

// With each parameter changed by itself, and with all of them, as far as that can be.
inline std::vector<OptimizerSpec> FormsOf(std::string_view name) {
  std::vector<OptimizerSpec> forms = {OptimizerSpec(name)};
  OptimizerSpec all(name);
  for (const Parameter& parameter : all.row().parameters) {
    forms.push_back(OptimizerSpec(name).Set(parameter.name, OtherValue(parameter)));
    if (parameter.range == Range::kFinite || parameter.range == Range::kRate ||
        parameter.range == Range::kFraction)
      forms.push_back(OptimizerSpec(name).Set(parameter.name, -OtherValue(parameter)));
    all.Set(parameter.name, OtherValue(parameter));
  }
  forms.push_back(all);
  std::erase_if(forms, [](const OptimizerSpec& form) { return !form.Violation().empty(); });
  return forms;
}

// Every optimizer of the table in many forms.
inline std::vector<OptimizerSpec> ManyOptimizers() {
  std::vector<OptimizerSpec> many = ManyAdamW();
  const std::vector<OptimizerSpec> sgd = ManySgd();
  many.insert(many.end(), sgd.begin(), sgd.end());
  for (const std::string_view name : OptimizerNames()) {
    const std::vector<OptimizerSpec> forms = FormsOf(name);
    many.insert(many.end(), forms.begin(), forms.end());
  }
  return many;
}

// Corrections of every kind in no order: what a library could have, and more. At step 1 none, at
// step 3 those of normal numbers, at step 4 of subnormal ones, too. At steps 5 to 8 those of the
// sequences that are known, by which vectors take them: of normal numbers, and of subnormal ones,
// too. (Of a sequence that this processor lacks, nearest ones.)
inline const uint32_t* RootsOfStep(int64_t step) {
  static const auto corrections = [] {
    Random random(7);
    std::vector<uint32_t> words(SquareRoots::kWords);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random.Next());
    words[SquareRoots::kSequenceWord] = 0;
    std::vector<std::vector<uint32_t>> all = {words, words};
    for (const RootSequence sequence : {RootSequence::kUnfused12, RootSequence::kFused14}) {
      const auto roots = SquareRoots::Measure([&](std::span<float> values) {
        if (HasRootsOf(sequence)) return TakeRootsBy(sequence, values);
        for (float& value : values) value = std::sqrt(value);
      });
      const uint32_t* const begin = roots->corrections();
      all.insert(all.end(), 2, std::vector<uint32_t>(begin, begin + SquareRoots::kWords));
    }
    for (size_t i = 0; i < all.size(); ++i) all[i][SquareRoots::kSubnormalWord] = i % 2;
    return all;
  }();
  return step < 3 ? nullptr : corrections[step - 3].data();
}
inline constexpr int64_t kStepsOfRoots[] = {1, 3, 4, 5, 6, 7, 8};

}  // namespace offload::kernels
