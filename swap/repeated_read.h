// swap/repeated_read.h
//
// Reads a range again that a first read has failed or returned with wrong bytes: a drive's bad
// moment must not cost an object. Bounded: kReadTriesMax reads in all, the first one included. When
// the range still cannot be read, it is halved again and again, so that the error names the first
// bad sector.
//
// Thread safety: as the device; `done` runs inside its Poll().
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "aio/device.h"

namespace offload::swap {

inline constexpr int kReadTriesMax = 3;

// Reads [offset_bytes, + bytes.size()) until `is_good` (may be null) says true of the bytes.
// `tries_left` is how many reads may still be made. `done` gets OK, or DATA_LOSS without an
// identifier: what was seen last, and where. The device must live until then.
void ReadAgain(aio::Device* device, uint64_t offset_bytes, std::span<std::byte> bytes,
               std::function<bool(std::span<const std::byte>)> is_good, int tries_left,
               aio::Device::Done done);

}  // namespace offload::swap
