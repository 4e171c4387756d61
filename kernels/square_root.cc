#include "kernels/square_root.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/implementation.h"

namespace offload::kernels {
namespace {

constexpr uint32_t kOneBits = 0x3F800000;  // of 1.0, whose exponent is odd as it is stored

// How many places `root` lies above the nearest one.
int32_t PlacesOff(float value, float root) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(root) -
                              std::bit_cast<uint32_t>(std::sqrt(value)));
}

// A version of the kernels that takes roots by the sequence; null: this processor has none.
const Implementation* FindImplementation(RootSequence sequence) {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    const Implementation& implementation = ImplementationOf(isa);
    if (IsSupported(isa) && implementation.takes_roots_by(sequence)) return &implementation;
  }
  return nullptr;
}

// Numbers of every exponent, and so many subnormal ones of every magnitude that a library whose
// roots are off once in a thousand shows what it does to them.
std::vector<float> Samples() {
  constexpr uint32_t kPerExponent = 64, kExponents = 255, kSubnormal = 64 * 1024;
  std::minstd_rand random(20261122);
  const auto mantissa = [&] { return static_cast<uint32_t>(random()) & 0x007FFFFF; };
  std::vector<float> samples;
  for (uint32_t exponent = 1; exponent < kExponents; ++exponent) {
    for (uint32_t i = 0; i < kPerExponent; ++i)
      samples.push_back(std::bit_cast<float>(exponent << 23 | mantissa()));
  }
  for (uint32_t i = 0; i < kSubnormal; ++i)
    samples.push_back(std::bit_cast<float>(mantissa() >> (i % 23)));
  samples.push_back(0.0f);
  samples.push_back(INFINITY);
  return samples;
}

}  // namespace

std::optional<SquareRoots> SquareRoots::Measure(
    const std::function<void(std::span<float>)>& take_roots) {
  constexpr uint32_t kBatch = 64 * 1024;
  SquareRoots roots;
  std::vector<RootSequence> sequences = {RootSequence::kUnfused12, RootSequence::kFused14};
  std::vector<float> values(kBatch), taken(kBatch);
  for (uint32_t begin = 0; begin < kEntries; begin += kBatch) {
    for (uint32_t i = 0; i < kBatch; ++i) {
      // Entries from 2^23 on have an odd exponent, as 1.0 has; the others that of 2.0.
      const uint32_t mantissa = (begin + i) & 0x007FFFFF, odd = (begin + i) >> 23;
      values[i] = std::bit_cast<float>((kOneBits + (odd == 1 ? 0 : 1 << 23)) | mantissa);
    }
    taken = values;
    take_roots(taken);
    for (uint32_t i = 0; i < kBatch; ++i) {
      const int32_t places = PlacesOff(values[i], taken[i]);
      if (places < -1 || places > 1) return std::nullopt;
      const uint32_t entry = begin + i;
      roots.corrections_[entry / kEntriesPerWord] |= (static_cast<uint32_t>(places) & 3)
                                                     << (2 * (entry % kEntriesPerWord));
    }
    std::erase_if(sequences, [&](RootSequence sequence) {
      return !roots.SequenceFollows(sequence, values, taken);
    });
  }
  const std::vector<float> samples = Samples();
  taken = samples;
  take_roots(taken);
  for (const bool subnormals_have_entries : {false, true}) {
    roots.corrections_[kSubnormalWord] = subnormals_have_entries ? 1 : 0;
    if (!roots.Follow(samples, taken)) continue;
    for (const RootSequence sequence : sequences) {
      if (roots.SequenceFollows(sequence, samples, taken)) roots.SetSequence(sequence);
    }
    return roots;
  }
  return std::nullopt;
}

bool SquareRoots::Follow(std::span<const float> values, std::span<const float> roots) const {
  for (size_t i = 0; i < values.size(); ++i) {
    const float root = CorrectRoot(values[i], std::sqrt(values[i]), corrections());
    if (std::bit_cast<uint32_t>(root) != std::bit_cast<uint32_t>(roots[i])) return false;
  }
  return true;
}

bool SquareRoots::SequenceFollows(RootSequence sequence, std::span<const float> values,
                                  std::span<const float> roots) const {
  const Implementation* const implementation = FindImplementation(sequence);
  if (implementation == nullptr) return false;
  std::vector<float> taken(values.size());
  implementation->take_roots(sequence, corrections_[kSubnormalWord] != 0, values.data(),
                             values.size(), taken.data());
  return std::memcmp(taken.data(), roots.data(), roots.size_bytes()) == 0;
}

std::optional<SquareRoots> SquareRoots::FromBytes(std::string_view bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  SquareRoots roots;
  std::memcpy(roots.corrections_.data(), bytes.data(), kBytes);
  return roots;
}

std::string_view SquareRoots::bytes() const {
  return {reinterpret_cast<const char*>(corrections_.data()), kBytes};
}

bool SquareRoots::AreNearest() const {
  return std::all_of(corrections_.begin(), corrections_.begin() + kSubnormalWord,
                     [](uint32_t word) { return word == 0; });
}

}  // namespace offload::kernels
