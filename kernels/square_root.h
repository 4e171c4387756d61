// kernels/square_root.h
//
// Square roots as a vector library takes them. IEEE 754 asks for the nearest fp32 number; the
// libraries that tensors are rooted with give up the last place for speed, each in a way of its
// own that depends on the processor. Optimizers that are to be bit-equal to somebody who calls such
// a library have to take the same roots. No formula is needed for that: the root of m * 2^e is that
// of m * 2^(e mod 2) with another exponent, so 2^24 numbers say everything, and each differs from
// the nearest root by one place at most. SquareRoots measures them once (some 0.1 s) and keeps two
// bits for each.
//
// To look 4 MiB up for every root takes several times as long as the rest of an update. The
// libraries that exist take a root in a handful of operations that begin with the processor's own
// estimate of 1 / sqrt(value). Where one of the sequences below gives all 2^24 roots that were
// measured, vectors of roots are computed by it: the same bits. Where none does, or the instruction
// set lacks one of its instructions, they come from the table, as those of scalar code always do.
//
// Subnormal numbers have the nearest root, or that of the normal number which is 2^64 times as
// large: that, too, depends on the processor. Zeros, infinities and NaN have the nearest one.
//
// Thread safety: a value; const methods may be called by any thread.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace offload::kernels {

// Both begin with an estimate e of 1 / sqrt(value), and go on with g = value * e and h = e / 2.
enum class RootSequence : uint32_t {
  kNone,  // no sequence that is known
  // e of 12 bits (rsqrtps). r = 1/2 - g*h, g += g*r, h += h*r, and then the root is
  // g + h * (value - g*g). Every operation rounds.
  kUnfused12,
  // e of 14 bits (vrsqrt14ps), and the root is g + h * (value - g*g), each product and sum fused.
  kFused14,
};

class SquareRoots {
 public:
  static constexpr size_t kEntries = size_t{1} << 24;
  static constexpr size_t kEntriesPerWord = 16;
  // The word behind the entries: not zero when subnormal numbers have roots as normal ones have.
  static constexpr size_t kSubnormalWord = kEntries / kEntriesPerWord;
  // The next: a RootSequence.
  static constexpr size_t kSequenceWord = kSubnormalWord + 1;
  static constexpr size_t kWords = kSequenceWord + 1;
  static constexpr size_t kBytes = kWords * sizeof(uint32_t);

  // Asks `take_roots`, which replaces values by their roots, for the roots that tell all others.
  // Nothing when it does otherwise than said above: then there is no way to follow it.
  static std::optional<SquareRoots> Measure(
      const std::function<void(std::span<float>)>& take_roots);

  // From bytes() of another process of this machine; nothing when the size is wrong. Any content
  // gives roots that are at most two places off.
  static std::optional<SquareRoots> FromBytes(std::string_view bytes);
  std::string_view bytes() const;

  // No entry is needed: the library rounds correctly.
  bool AreNearest() const;
  RootSequence sequence() const { return static_cast<RootSequence>(corrections_[kSequenceWord]); }
  // What Run::roots takes; good as long as this.
  const uint32_t* corrections() const { return corrections_.data(); }

  bool operator==(const SquareRoots&) const = default;

 private:
  SquareRoots() : corrections_(kWords) {}
  bool Follow(std::span<const float> values, std::span<const float> roots) const;
  void SetSequence(RootSequence sequence) {
    corrections_[kSequenceWord] = static_cast<uint32_t>(sequence);
  }
  bool SequenceFollows(RootSequence sequence, std::span<const float> values,
                       std::span<const float> roots) const;

  // The two bits of entry i, a number of two's complement, begin at bit 2 * (i mod 16) of word
  // i / 16. The entry of a normal value is its lowest 24 bits: mantissa and parity of the exponent.
  std::vector<uint32_t> corrections_;
};

// The root of `value`, whose nearest one is `nearest`, from the table.
inline float CorrectRoot(float value, float nearest, const uint32_t* corrections) {
  const uint32_t least = corrections[SquareRoots::kSubnormalWord] != 0 ? 1 : 0x00800000;
  const auto bits = std::bit_cast<uint32_t>(value);
  if (bits - least >= 0x7F800000 - least) return nearest;  // not a positive number with an entry
  const auto normal = bits >= 0x00800000 ? bits : std::bit_cast<uint32_t>(value * 0x1p64f);
  const uint32_t entry = normal & 0x00FFFFFF;
  const uint32_t word = corrections[entry / SquareRoots::kEntriesPerWord];
  const uint32_t places = word << (30 - 2 * (entry % SquareRoots::kEntriesPerWord));
  const int32_t correction = static_cast<int32_t>(places) >> 30;
  return std::bit_cast<float>(std::bit_cast<int32_t>(nearest) + correction);
}

}  // namespace offload::kernels
