// base/string_view.h
//
// Debian builds Abseil with a string_view of its own, which does not convert to and from the
// standard one by itself. Our headers use std::string_view; these two cross over where Abseil is
// called.
//
// Thread safety: pure functions.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace offload {

inline absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }
inline std::string_view ToStd(absl::string_view text) { return {text.data(), text.size()}; }

}  // namespace offload
