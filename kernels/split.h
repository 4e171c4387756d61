// kernels/split.h
//
// The exact 16+16 split of an fp32 master into a bf16 working weight (`hi`) and a residual (`lo`),
// in parity mode: `hi` is the round-to-nearest-even cast that a trainer would make, and nothing of
// the master is lost.
//
// With u the master's bits: lo = int16(u & 0xFFFF); hi = (u >> 16) + (lo < 0), except that for a
// finite u that lies exactly half way (lo == -32768) above an even high half, hi = u >> 16: a *tie
// that went down*. Back: u = (hi << 16) + lo, plus 65536 for such a tie. Only elements with lo ==
// -32768 can be ties, so one *tie bit* for each of those, in element order, makes the split a
// bijection on all 2^32 words; it is 1 when the tie went down. About 2^-16 of the elements have
// one. NaN masters may show as infinity or zero in hi: test finiteness on the master or the
// gradient.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/isa.h"

namespace offload::kernels {

// Tie bits in order, 8 in a byte, lowest first. Neither owns its memory. Always inlined: a copy of
// them that the compiler made in a file built for AVX-512 could be the one that the linker keeps
// for everybody.
struct TieReader {
  const uint8_t* bits = nullptr;
  size_t position = 0;
  [[gnu::always_inline]] bool Next() {
    const bool bit = (bits[position / 8] >> (position % 8)) & 1;
    ++position;
    return bit;
  }
};
struct TieWriter {
  uint8_t* bits = nullptr;  // zeroed by the caller; room for one bit per element of the extent
  size_t position = 0;
  [[gnu::always_inline]] void Append(bool bit) {
    if (bit) bits[position / 8] |= static_cast<uint8_t>(1u << (position % 8));
    ++position;
  }
};

// Splits count masters. hi, lo: count elements.
void Split(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo, TieWriter* ties);
// Merges them again.
void Merge(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master, TieReader* ties);

// The same for fp16.
void SplitHalf(const float* master, size_t count, Half* weight, uint32_t* residual);
void MergeHalf(const Half* weight, const uint32_t* residual, size_t count, float* master);

// The nearest fp16 number, ties to even; infinity from 65520 on.
Half ToHalf(float value);
float FromHalf(Half value);

// The same by a given implementation, which the processor must support: for tests and benchmarks.
void Split(Isa isa, const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo,
           TieWriter* ties);
void Merge(Isa isa, const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
           TieReader* ties);

}  // namespace offload::kernels
