// The kernels with 8 lanes of fp32: AVX2 and FMA.
#include <immintrin.h>

#include "kernels/square_root.h"
#include "kernels/vector_update.h"

namespace offload::kernels {
namespace {

struct Avx2 {
  using Float = __m256;
  using Scalar = float;
  static constexpr size_t kWidth = 8;

  static Float Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Float value) { _mm256_storeu_ps(to, value); }
  static Float Broadcast(float value) { return _mm256_set1_ps(value); }
  static Float Fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float Sqrt(Float value) { return _mm256_sqrt_ps(value); }
  // Where the values stand in a table of roots (square_root.h).
  struct Entries {
    __m256i exist, are_normal;  // lanes of ones
    __m256i normal;             // the bits of the values, of subnormal ones times 2^64
    __m256i numbers;            // mantissa and parity of the exponent
  };
  [[gnu::always_inline]] static Entries EntriesOf(Float value, bool of_subnormals) {
    const int least = of_subnormals ? 1 : 0x00800000;
    const __m256i bits = _mm256_castps_si256(value);
    Entries entries;
    entries.exist = _mm256_and_si256(_mm256_cmpgt_epi32(bits, _mm256_set1_epi32(least - 1)),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), bits));
    entries.are_normal = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x007FFFFF));
    entries.normal =
        _mm256_blendv_epi8(_mm256_castps_si256(_mm256_mul_ps(value, _mm256_set1_ps(0x1p64f))), bits,
                           entries.are_normal);
    entries.numbers = _mm256_and_si256(entries.normal, _mm256_set1_epi32(0x00FFFFFF));
    return entries;
  }
  static Float CorrectRoot(Float value, Float nearest, const uint32_t* corrections) {
    const Entries entries = EntriesOf(value, corrections[SquareRoots::kSubnormalWord] != 0);
    const __m256i words = _mm256_mask_i32gather_epi32(
        _mm256_setzero_si256(), reinterpret_cast<const int*>(corrections),
        _mm256_srli_epi32(entries.numbers, 4), entries.exist, 4);
    const __m256i place = _mm256_and_si256(entries.numbers, _mm256_set1_epi32(15));
    const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(30), _mm256_add_epi32(place, place));
    const __m256i correction = _mm256_srai_epi32(_mm256_sllv_epi32(words, left), 30);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(nearest), correction));
  }
  static constexpr bool TakesRootsBy(RootSequence sequence) {
    return sequence == RootSequence::kUnfused12;
  }
  // Of values in [1, 4).
  [[gnu::always_inline]] static Float RootOfNormalized(Float value) {
    const Float half = Broadcast(0.5f), estimate = _mm256_rsqrt_ps(value);
    Float g = value * estimate, h = estimate * half;
    const Float r = half - g * h;
    g = g + g * r;
    h = h + h * r;
    return g + h * (value - g * g);
  }
  // With the exponent that makes it normalized set aside: the sequence says the mantissa.
  [[gnu::always_inline]] static Float RootBy(RootSequence, bool of_subnormals, Float value) {
    const Entries entries = EntriesOf(value, of_subnormals);
    const __m256i normalized =
        _mm256_add_epi32(_mm256_xor_si256(entries.numbers, _mm256_set1_epi32(0x00800000)),
                         _mm256_set1_epi32(0x3F800000));
    const __m256i exponent = _mm256_srai_epi32(_mm256_sub_epi32(entries.normal, normalized), 1);
    const __m256i root = _mm256_add_epi32(
        _mm256_castps_si256(RootOfNormalized(_mm256_castsi256_ps(normalized))), exponent);
    const __m256i scaled = _mm256_sub_epi32(
        root, _mm256_andnot_si256(entries.are_normal, _mm256_set1_epi32(32 << 23)));
    if (_mm256_movemask_epi8(entries.exist) == -1) [[likely]]
      return _mm256_castsi256_ps(scaled);
    return _mm256_blendv_ps(Sqrt(value), _mm256_castsi256_ps(scaled),
                            _mm256_castsi256_ps(entries.exist));
  }
  static Float Max(Float a, Float b) {
    const Float larger = _mm256_max_ps(a, b);  // b when either is NaN
    return _mm256_blendv_ps(larger, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  static Float Sign(Float value) {
    const Float zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
    return _mm256_sub_ps(_mm256_and_ps(_mm256_cmp_ps(value, zero, _CMP_GT_OQ), one),
                         _mm256_and_ps(_mm256_cmp_ps(value, zero, _CMP_LT_OQ), one));
  }

  static __m128i LoadHalves(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
  // Stores the low halves of 8 words whose high halves are zero.
  static void StoreHalves(void* to, __m256i words) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  static Float LoadBFloat16(const uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(LoadHalves(from)), 16));
  }

  static Float RoundToBFloat16(Float value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i biased = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i rounded = _mm256_and_si256(biased, _mm256_set1_epi32(~0xFFFF));
    const Float is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), value, is_nan);
  }

  static void StoreBFloat16(uint16_t* to, Float value) {
    const __m256i highs = _mm256_srli_epi32(_mm256_castps_si256(value), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    StoreHalves(to, _mm256_or_si256(highs, _mm256_srli_epi32(is_nan, 16)));
  }

  static uint32_t LaneBits(__m256i lanes) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
  }

  static Float Merge(const uint16_t* hi, const int16_t* lo, TieReader* ties) {
    const __m256i lows = _mm256_cvtepi16_epi32(LoadHalves(lo));
    const __m256i highs = _mm256_cvtepu16_epi32(LoadHalves(hi));
    const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(highs, 16), lows);
    const uint32_t candidates = LaneBits(_mm256_cmpeq_epi32(lows, _mm256_set1_epi32(-32768)));
    if (candidates == 0) [[likely]]
      return _mm256_castsi256_ps(bits);
    alignas(32) uint32_t words[kWidth];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), bits);
    const uint32_t went_down = TakeTies<Avx2>(candidates, ties);
    for (size_t i = 0; i < kWidth; ++i) words[i] += ((went_down >> i) & 1) << 16;
    return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(words)));
  }

  static void Split(Float master, uint16_t* hi, int16_t* lo, TieWriter* ties) {
    const __m256i bits = _mm256_castps_si256(master);
    const __m256i lows = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
    const __m256i tie = _mm256_set1_epi32(0x8000);
    __m256i highs = _mm256_srli_epi32(_mm256_add_epi32(bits, tie), 16);
    const __m256i is_tie = _mm256_cmpeq_epi32(lows, tie);
    if (LaneBits(is_tie) != 0) [[unlikely]] {
      const __m256i exponent = _mm256_set1_epi32(0x7F800000);
      const __m256i is_nonfinite = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent);
      const __m256i is_even = _mm256_cmpeq_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x10000)),
                                                 _mm256_setzero_si256());
      const __m256i went_down =
          _mm256_andnot_si256(is_nonfinite, _mm256_and_si256(is_tie, is_even));
      highs = _mm256_add_epi32(highs, went_down);  // a set lane is -1
      PutTies<Avx2>(LaneBits(is_tie), LaneBits(went_down), ties);
    }
    StoreHalves(hi, highs);
    StoreHalves(lo, lows);
  }

  static Float LoadHalf(const Half* from) { return _mm256_cvtph_ps(LoadHalves(from)); }
  static __m128i ToHalves(Float value) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Float RoundToHalf(Float value) { return _mm256_cvtph_ps(ToHalves(value)); }
  static void StoreHalf(Half* to, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), ToHalves(value));
  }
  static Float MergeHalf(const Half* weight, const uint32_t* residual) {
    const __m256i bits = _mm256_castps_si256(LoadHalf(weight));
    const __m256i rest = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual));
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, rest));
  }
  static void SplitHalf(Float master, Half* weight, uint32_t* residual) {
    const __m128i halves = ToHalves(master);
    const __m256i bits = _mm256_castps_si256(_mm256_cvtph_ps(halves));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weight), halves);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(residual),
                        _mm256_sub_epi32(_mm256_castps_si256(master), bits));
  }

  static bool AnyNonFinite(const float* from) {
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return LaneBits(_mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent)) != 0;
  }
  static bool AnyNonFinite(const uint16_t* from) { return AnyHas(0x7F80, from); }
  static bool AnyNonFinite(const Half* from) { return AnyHas(0x7C00, from); }
  // Whether any element has all bits of the exponent.
  static bool AnyHas(int16_t exponent_bits, const void* from) {
    const __m128i exponent = _mm_set1_epi16(exponent_bits);
    const __m128i bits = LoadHalves(from);
    return _mm_movemask_epi8(_mm_cmpeq_epi16(_mm_and_si128(bits, exponent), exponent)) != 0;
  }
};

// Of fp64 models, with 4 lanes.
struct Avx2Double {
  using Float = __m256d;
  using Scalar = double;
  static constexpr size_t kWidth = 4;

  static Float Load(const double* from) { return _mm256_loadu_pd(from); }
  static void Store(double* to, Float value) { _mm256_storeu_pd(to, value); }
  static Float Broadcast(double value) { return _mm256_set1_pd(value); }
  static Float Fma(Float a, Float b, Float c) { return _mm256_fmadd_pd(a, b, c); }
  static Float Sqrt(Float value) { return _mm256_sqrt_pd(value); }
  static Float Max(Float a, Float b) {
    const Float larger = _mm256_max_pd(a, b);  // b when either is NaN
    return _mm256_blendv_pd(larger, a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
  }

  static Float Sign(Float value) {
    const Float zero = _mm256_setzero_pd(), one = _mm256_set1_pd(1.0);
    return _mm256_sub_pd(_mm256_and_pd(_mm256_cmp_pd(value, zero, _CMP_GT_OQ), one),
                         _mm256_and_pd(_mm256_cmp_pd(value, zero, _CMP_LT_OQ), one));
  }

  static bool AnyNonFinite(const double* from) {
    const __m256i exponent = _mm256_set1_epi64x(0x7FF0000000000000);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i found = _mm256_cmpeq_epi64(_mm256_and_si256(bits, exponent), exponent);
    return _mm256_movemask_pd(_mm256_castsi256_pd(found)) != 0;
  }
};

}  // namespace

constinit const Implementation kAvx2Implementation =
    VectorImplementation<Avx2, Avx2Double>(Rules());

}  // namespace offload::kernels
