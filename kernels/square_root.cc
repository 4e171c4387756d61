#include "kernels/square_root.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace offload::kernels {
namespace {

constexpr uint32_t kOneBits = 0x3F800000;  // of 1.0, whose exponent is odd as it is stored

// The entries of a word's values; nothing when a root is more than one place off.
std::optional<uint32_t> WordOf(std::span<const float, SquareRoots::kEntriesPerWord> values,
                               std::span<const float, SquareRoots::kEntriesPerWord> roots) {
  constexpr uint32_t kEntries = SquareRoots::kEntriesPerWord;
  // How many places each root lies above the nearest one; few do.
  uint32_t places[kEntries], any = 0;
  for (uint32_t i = 0; i < kEntries; ++i) {
    places[i] = std::bit_cast<uint32_t>(roots[i]) - std::bit_cast<uint32_t>(std::sqrt(values[i]));
  }
  for (uint32_t i = 0; i < kEntries; ++i) any |= places[i];
  if (any == 0) return 0;
  uint32_t word = 0;
  for (uint32_t i = 0; i < kEntries; ++i) {
    if (places[i] + 1 > 2) return std::nullopt;
    word |= (places[i] & 3) << (2 * i);
  }
  return word;
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
  constexpr uint32_t kBatch = 64 * 1024, kPerWord = kEntriesPerWord;
  SquareRoots roots;
  std::vector<float> values(kBatch), taken(kBatch);
  for (uint32_t begin = 0; begin < kEntries; begin += kBatch) {
    for (uint32_t i = 0; i < kBatch; ++i) {
      // Entries from 2^23 on have an odd exponent, as 1.0 has; the others that of 2.0.
      const uint32_t mantissa = (begin + i) & 0x007FFFFF, odd = (begin + i) >> 23;
      values[i] = std::bit_cast<float>((kOneBits + (odd == 1 ? 0 : 1 << 23)) | mantissa);
    }
    taken = values;
    take_roots(taken);
    for (uint32_t i = 0; i < kBatch; i += kPerWord) {
      const std::optional<uint32_t> word = WordOf(std::span(values).subspan(i).first<kPerWord>(),
                                                  std::span(taken).subspan(i).first<kPerWord>());
      if (!word.has_value()) return std::nullopt;
      roots.corrections_[(begin + i) / kPerWord] = *word;
    }
  }
  const std::vector<float> samples = Samples();
  taken = samples;
  take_roots(taken);
  for (const bool subnormals_have_entries : {false, true}) {
    roots.corrections_[kSubnormalWord] = subnormals_have_entries ? 1 : 0;
    if (roots.Follow(samples, taken)) return roots;
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
  return std::ranges::all_of(corrections_, [](uint32_t word) { return word == 0; });
}

}  // namespace offload::kernels
