// The kernels with 8 lanes: AVX2 and FMA.
#include <immintrin.h>

#include "kernels/vector_update.h"

namespace offload::kernels {
namespace {

struct Avx2 {
  using Float = __m256;
  static constexpr size_t kWidth = 8;

  static Float Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Float value) { _mm256_storeu_ps(to, value); }
  static Float Broadcast(float value) { return _mm256_set1_ps(value); }
  static Float Fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float Sqrt(Float value) { return _mm256_sqrt_ps(value); }
  static Float CorrectRoot(Float value, Float nearest, const uint32_t* corrections) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i is_normal =
        _mm256_and_si256(_mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x007FFFFF)),
                         _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), bits));
    const __m256i entry = _mm256_and_si256(bits, _mm256_set1_epi32(0x00FFFFFF));
    const __m256i words = _mm256_mask_i32gather_epi32(_mm256_setzero_si256(),
                                                      reinterpret_cast<const int*>(corrections),
                                                      _mm256_srli_epi32(entry, 4), is_normal, 4);
    const __m256i place = _mm256_and_si256(entry, _mm256_set1_epi32(15));
    const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(30), _mm256_add_epi32(place, place));
    const __m256i correction = _mm256_srai_epi32(_mm256_sllv_epi32(words, left), 30);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(nearest), correction));
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

  static bool AnyNonFinite(const float* from) {
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return LaneBits(_mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent)) != 0;
  }
  static bool AnyNonFinite(const uint16_t* from) {
    const __m128i exponent = _mm_set1_epi16(0x7F80);
    const __m128i bits = LoadHalves(from);
    return _mm_movemask_epi8(_mm_cmpeq_epi16(_mm_and_si128(bits, exponent), exponent)) != 0;
  }
};

}  // namespace

constinit const Implementation kAvx2Implementation = VectorImplementation<Avx2>(Rules());

}  // namespace offload::kernels
