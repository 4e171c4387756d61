// base/environment.h
//
// The variables OFFLOADD_… that library, daemon and tools read, and what they may be. Whoever reads
// one takes what it cannot use for nothing said: they are checked where a trainer connects and
// where a daemon begins.
//
// Thread safety: pure functions.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace offload {

// What some of them may be, for flags and keys that say the same, and for those who read them.
inline constexpr char kIoChoices[] = "auto|uring|libaio|threads";
inline constexpr char kIsaChoices[] = "reference|avx2|avx512";
inline constexpr char kSandboxChoices[] = "off|on|strict";
// Each of "a|b|c".
std::vector<std::string> ChoicesIn(std::string_view choices);

// All of this process, as NAME=value.
std::vector<std::string> EnvironmentOfThisProcess();

// OFD-1002 for the first that has a value which it may not have; empty ones count as not set.
absl::Status CheckEnvironment(std::span<const std::string> entries);

// A sentence for each that nobody reads: those of the prefix, and known ones that lack one of its
// letters (OFFLOAD_RAM).
std::vector<std::string> UnknownVariables(std::span<const std::string> entries);

}  // namespace offload
