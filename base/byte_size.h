// base/byte_size.h
//
// Reads and prints sizes and counts. Memory is printed in GiB, disks and traffic in decimal GB; the
// unit is always there.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace offload {

// Reads "512MiB", "64GiB", "200G", "200GB", "2T", "1e9", "1.5GiB" or plain bytes: a decimal number,
// then an optional unit in any case. K M G T P, with or without B, are powers of 1000; KiB and so
// on are powers of 1024. Spaces may surround the number and the unit. OFD-1002 with the text when
// it is anything else, negative, not a whole number of bytes after rounding down, or 2^64 or more.
absl::StatusOr<uint64_t> ParseByteSize(std::string_view text);

// Reads a count of things: "150M", "1.5B", "7e9", "12345". K, M, B or G, T are powers of 1000.
// OFD-1002 otherwise.
absl::StatusOr<uint64_t> ParseCount(std::string_view text);

// Prints memory: "1.50 TiB", "64.0 GiB", "512.0 MiB", "3.5 KiB", "17 B".
std::string FormatBytes(uint64_t bytes);

// Prints disk space and traffic: "1.84 TB", "282 GB", "4.10 MB", "17 B" (three digits).
std::string FormatDecimalBytes(uint64_t bytes);

// Prints a count: "150.3 M", "70.6 B", "950".
std::string FormatCount(uint64_t count);

}  // namespace offload
