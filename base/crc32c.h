// base/crc32c.h
//
// CRC-32C (Castagnoli; reflected polynomial 0x82f63b78), as in iSCSI and ext4: Crc32c(0,
// "123456789", 9) is 0xe3069283.
//
// On x86 the crc32 instruction has a latency of three cycles and a throughput of one, so three
// independent lanes run beside each other and are joined at the end of a block (after V. Gopal et
// al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011). Elsewhere,
// slicing by eight tables. The choice is made once, at run time.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Extends `crc`, the checksum of what came before (0 for nothing), by `size_bytes` bytes.
uint32_t Crc32c(uint32_t crc, const void* data, size_t size_bytes);

// The checksum of A followed by B, from those of A and of B alone, so that parts can be computed on
// several threads.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b_bytes);

namespace internal {

// The two implementations, for tests. Crc32cSse42 needs Crc32cHasSse42().
uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t size_bytes);
uint32_t Crc32cSse42(uint32_t crc, const void* data, size_t size_bytes);
bool Crc32cHasSse42();

}  // namespace internal
}  // namespace offload
