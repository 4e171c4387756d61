// base/posix_io.h
//
// Whole transfers over blocking descriptors: EINTR and short counts are handled inside.
//
// Thread safety: as the system calls.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace offload {

// Fill or drain all of `bytes`. An end of file before that is DATA_LOSS; other refusals carry the
// kernel's code and errno.
absl::Status ReadFully(int fd, std::span<std::byte> bytes);
absl::Status WriteFully(int fd, std::span<const std::byte> bytes);

// The same at an offset, without moving the file position.
absl::Status PreadFully(int fd, uint64_t offset_bytes, std::span<std::byte> bytes);
absl::Status PwriteFully(int fd, uint64_t offset_bytes, std::span<const std::byte> bytes);

}  // namespace offload
