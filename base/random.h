// base/random.h
//
// A small deterministic generator for tests, simulators and test data: the same seed gives the same
// sequence on every machine and in every release. Not for secrets.
//
// The generator is xoshiro256** (Blackman and Vigna, 2018), its state filled by splitmix64.
//
// Thread safety: none.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

namespace offload {

// Advances `state` and returns 64 well mixed bits; also a good hash of a counter.
constexpr uint64_t SplitMix64(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

class Random {
 public:
  using result_type = uint64_t;  // a UniformRandomBitGenerator: std::shuffle takes it

  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) word = SplitMix64(seed);
  }

  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return UINT64_MAX; }
  uint64_t operator()() { return Next(); }

  uint64_t Next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // A number in [0, limit); `limit` must not be 0. The bias is below limit / 2^64.
  uint64_t Below(uint64_t limit) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * limit) >> 64);
  }

  // True once in `count` calls on average.
  bool OneIn(uint64_t count) { return Below(count) == 0; }

  // A number in [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  void Fill(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      const uint64_t word = Next();
      const size_t count = bytes.size() < sizeof(word) ? bytes.size() : sizeof(word);
      std::memcpy(bytes.data(), &word, count);
      bytes = bytes.subspan(count);
    }
  }

 private:
  uint64_t state_[4];
};

}  // namespace offload
