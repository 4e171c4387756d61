// base/bytes_digest.h
//
// 64 bits that tell whether bytes are those that were read before, or that another process has:
// their crc32c, which sees every short change, and beside it a product over their words, which is
// of another kind. Bytes that differ have the same digest once in 2^64; a crc alone would meet its
// 2^32 in the life of a long run.
//
// Thread safety: none; one owner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/crc32c.h"

namespace offload {

class BytesDigest {
 public:
  // The bytes that follow; of all calls but the last a multiple of kBlockBytes.
  void Update(const std::byte* bytes, size_t size_bytes) {
    crc_ = Crc32c(crc_, bytes, size_bytes);
    for (; size_bytes > 0; size_bytes -= std::min(size_bytes, kBlockBytes), bytes += kBlockBytes) {
      uint64_t words[kLanes] = {};
      std::memcpy(words, bytes, std::min(size_bytes, kBlockBytes));
      for (size_t lane = 0; lane < kLanes; ++lane) lanes_[lane] = Mix(lanes_[lane] ^ words[lane]);
    }
  }
  uint64_t Finish() const {
    uint64_t product = 0;
    for (const uint64_t lane : lanes_) product = Mix(product ^ lane);
    return (product & 0xffffffff00000000) | crc_;
  }

  static constexpr size_t kLanes = 4;
  static constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);

 private:
  // A bijection of the words (odd factor, shift).
  static uint64_t Mix(uint64_t word) {
    word *= 0x9e3779b97f4a7c15;
    return word ^ word >> 32;
  }

  uint32_t crc_ = 0;
  uint64_t lanes_[kLanes] = {};
};

}  // namespace offload
