// The kernels with 16 lanes of fp32: AVX-512 F, BW, DQ, VL.
#include <immintrin.h>

#include "kernels/square_root.h"
#include "kernels/vector_update.h"

namespace offload::kernels {
namespace {

struct Avx512 {
  using Float = __m512;
  using Scalar = float;
  static constexpr size_t kWidth = 16;

  static Float Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Float value) { _mm512_storeu_ps(to, value); }
  static Float Broadcast(float value) { return _mm512_set1_ps(value); }
  static Float Fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float Sqrt(Float value) { return _mm512_sqrt_ps(value); }
  // Where the values stand in a table of roots (square_root.h).
  struct Entries {
    __mmask16 exist, are_subnormal;
    __m512i normal;   // the bits of the values, of subnormal ones times 2^64
    __m512i numbers;  // mantissa and parity of the exponent
  };
  [[gnu::always_inline]] static Entries EntriesOf(Float value, bool of_subnormals) {
    const int least = of_subnormals ? 1 : 0x00800000;
    const __m512i bits = _mm512_castps_si512(value);
    Entries entries;
    entries.exist = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(bits, _mm512_set1_epi32(least)),
                                            _mm512_set1_epi32(0x7F800000 - least));
    entries.are_subnormal =
        _mm512_mask_cmplt_epu32_mask(entries.exist, bits, _mm512_set1_epi32(0x00800000));
    entries.normal = _mm512_castps_si512(
        _mm512_mask_mul_ps(value, entries.are_subnormal, value, _mm512_set1_ps(0x1p64f)));
    entries.numbers = _mm512_and_si512(entries.normal, _mm512_set1_epi32(0x00FFFFFF));
    return entries;
  }
  static Float CorrectRoot(Float value, Float nearest, const uint32_t* corrections) {
    const Entries entries = EntriesOf(value, corrections[SquareRoots::kSubnormalWord] != 0);
    const __m512i words =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), entries.exist,
                                    _mm512_srli_epi32(entries.numbers, 4), corrections, 4);
    const __m512i place = _mm512_and_si512(entries.numbers, _mm512_set1_epi32(15));
    const __m512i left = _mm512_sub_epi32(_mm512_set1_epi32(30), _mm512_add_epi32(place, place));
    const __m512i correction = _mm512_srai_epi32(_mm512_sllv_epi32(words, left), 30);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(nearest), correction));
  }
  static constexpr bool TakesRootsBy(RootSequence sequence) {
    return sequence == RootSequence::kUnfused12 || sequence == RootSequence::kFused14;
  }
  // Of values in [1, 4).
  [[gnu::always_inline]] static Float RootOfNormalized(RootSequence sequence, Float value) {
    const Float half = Broadcast(0.5f);
    if (sequence == RootSequence::kFused14) {
      const Float estimate = _mm512_rsqrt14_ps(value);
      const Float g = value * estimate, h = estimate * half;
      return Fma(h, _mm512_fnmadd_ps(g, g, value), g);
    }
    const __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256(value));
    const __m256 high = _mm256_rsqrt_ps(_mm512_extractf32x8_ps(value, 1));
    const Float estimate = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    Float g = value * estimate, h = estimate * half;
    const Float r = half - g * h;
    g = g + g * r;
    h = h + h * r;
    return g + h * (value - g * g);
  }
  // With the exponent that makes it normalized set aside: the sequence says the mantissa.
  [[gnu::always_inline]] static Float RootBy(RootSequence sequence, bool of_subnormals,
                                             Float value) {
    const Entries entries = EntriesOf(value, of_subnormals);
    const __m512i normalized =
        _mm512_add_epi32(_mm512_xor_si512(entries.numbers, _mm512_set1_epi32(0x00800000)),
                         _mm512_set1_epi32(0x3F800000));
    const __m512i exponent = _mm512_srai_epi32(_mm512_sub_epi32(entries.normal, normalized), 1);
    const __m512i root = _mm512_add_epi32(
        _mm512_castps_si512(RootOfNormalized(sequence, _mm512_castsi512_ps(normalized))), exponent);
    const __m512i scaled =
        _mm512_mask_sub_epi32(root, entries.are_subnormal, root, _mm512_set1_epi32(32 << 23));
    if (entries.exist == 0xFFFF) [[likely]]
      return _mm512_castsi512_ps(scaled);
    return _mm512_mask_mov_ps(Sqrt(value), entries.exist, _mm512_castsi512_ps(scaled));
  }
  static Float Max(Float a, Float b) {
    const Float larger = _mm512_max_ps(a, b);  // b when either is NaN
    return _mm512_mask_mov_ps(larger, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }

  static Float Sign(Float value) {
    const Float zero = _mm512_setzero_ps();
    const __mmask16 above = _mm512_cmp_ps_mask(value, zero, _CMP_GT_OQ);
    const __mmask16 below = _mm512_cmp_ps_mask(value, zero, _CMP_LT_OQ);
    const Float positive = _mm512_maskz_mov_ps(above, _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(positive, below, _mm512_set1_ps(-1.0f));
  }

  static __m512i Widen(const uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Float LoadBFloat16(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(Widen(from), 16));
  }

  static Float RoundToBFloat16(Float value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i biased = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i rounded = _mm512_and_si512(biased, _mm512_set1_epi32(~0xFFFF));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, is_nan, bits));
  }

  static void StoreBFloat16(uint16_t* to, Float value) {
    const __m512i highs = _mm512_srli_epi32(_mm512_castps_si512(value), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i stored = _mm512_mask_mov_epi32(highs, is_nan, _mm512_set1_epi32(0xFFFF));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(stored));
  }

  static Float Merge(const uint16_t* hi, const int16_t* lo, TieReader* ties) {
    const __m256i lows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo));
    __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(Widen(hi), 16), _mm512_cvtepi16_epi32(lows));
    const uint32_t candidates = _mm256_cmpeq_epi16_mask(lows, _mm256_set1_epi16(-32768));
    if (candidates != 0) [[unlikely]] {
      const auto went_down = static_cast<__mmask16>(TakeTies<Avx512>(candidates, ties));
      bits = _mm512_mask_add_epi32(bits, went_down, bits, _mm512_set1_epi32(0x10000));
    }
    return _mm512_castsi512_ps(bits);
  }

  static void Split(Float master, uint16_t* hi, int16_t* lo, TieWriter* ties) {
    const __m512i bits = _mm512_castps_si512(master);
    const __m256i lows = _mm512_cvtepi32_epi16(bits);
    __m512i highs = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    const __mmask16 candidates = _mm256_cmpeq_epi16_mask(lows, _mm256_set1_epi16(-32768));
    if (candidates != 0) [[unlikely]] {
      const __m512i exponent = _mm512_set1_epi32(0x7F800000);
      const __mmask16 is_finite =
          _mm512_mask_cmpneq_epi32_mask(candidates, _mm512_and_si512(bits, exponent), exponent);
      const __mmask16 went_down =
          _mm512_mask_testn_epi32_mask(is_finite, bits, _mm512_set1_epi32(0x10000));
      highs = _mm512_mask_sub_epi32(highs, went_down, highs, _mm512_set1_epi32(1));
      PutTies<Avx512>(candidates, went_down, ties);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi), _mm512_cvtepi32_epi16(highs));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lo), lows);
  }

  static Float LoadHalf(const Half* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static __m256i ToHalves(Float value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Float RoundToHalf(Float value) { return _mm512_cvtph_ps(ToHalves(value)); }
  static void StoreHalf(Half* to, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), ToHalves(value));
  }
  static Float MergeHalf(const Half* weight, const uint32_t* residual) {
    const __m512i bits = _mm512_castps_si512(LoadHalf(weight));
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_loadu_si512(residual)));
  }
  static void SplitHalf(Float master, Half* weight, uint32_t* residual) {
    const __m256i halves = ToHalves(master);
    const __m512i bits = _mm512_castps_si512(_mm512_cvtph_ps(halves));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight), halves);
    _mm512_storeu_si512(residual, _mm512_sub_epi32(_mm512_castps_si512(master), bits));
  }

  static bool AnyNonFinite(const float* from) {
    const __m512i exponent = _mm512_set1_epi32(0x7F800000);
    const __m512i bits = _mm512_loadu_si512(from);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent) != 0;
  }
  static bool AnyNonFinite(const uint16_t* from) { return AnyHas(0x7F80, from); }
  static bool AnyNonFinite(const Half* from) { return AnyHas(0x7C00, from); }
  // Whether any element has all bits of the exponent.
  static bool AnyHas(int16_t exponent_bits, const void* from) {
    const __m256i exponent = _mm256_set1_epi16(exponent_bits);
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    return _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, exponent), exponent) != 0;
  }
};

// Of fp64 models, with 8 lanes.
struct Avx512Double {
  using Float = __m512d;
  using Scalar = double;
  static constexpr size_t kWidth = 8;

  static Float Load(const double* from) { return _mm512_loadu_pd(from); }
  static void Store(double* to, Float value) { _mm512_storeu_pd(to, value); }
  static Float Broadcast(double value) { return _mm512_set1_pd(value); }
  static Float Fma(Float a, Float b, Float c) { return _mm512_fmadd_pd(a, b, c); }
  static Float Sqrt(Float value) { return _mm512_sqrt_pd(value); }
  static Float Max(Float a, Float b) {
    const Float larger = _mm512_max_pd(a, b);  // b when either is NaN
    return _mm512_mask_mov_pd(larger, _mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q), a);
  }

  static Float Sign(Float value) {
    const Float zero = _mm512_setzero_pd();
    const __mmask8 above = _mm512_cmp_pd_mask(value, zero, _CMP_GT_OQ);
    const __mmask8 below = _mm512_cmp_pd_mask(value, zero, _CMP_LT_OQ);
    const Float positive = _mm512_maskz_mov_pd(above, _mm512_set1_pd(1.0));
    return _mm512_mask_mov_pd(positive, below, _mm512_set1_pd(-1.0));
  }

  static bool AnyNonFinite(const double* from) {
    const __m512i exponent = _mm512_set1_epi64(0x7FF0000000000000);
    const __m512i bits = _mm512_loadu_si512(from);
    return _mm512_cmpeq_epi64_mask(_mm512_and_si512(bits, exponent), exponent) != 0;
  }
};

}  // namespace

constinit const Implementation kAvx512Implementation =
    VectorImplementation<Avx512, Avx512Double>(Rules());

}  // namespace offload::kernels
