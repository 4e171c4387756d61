// zero3/zip_crc.h
//
// The checksum of ZIP archives (IEEE 802.3).
//
// Thread safety: a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace offload::zero3 {

// Goes on from the checksum of what came before; 0 at the beginning.
uint32_t ZipCrc(uint32_t crc, std::span<const std::byte> bytes);

}  // namespace offload::zero3
