// proto/cut_text.h
//
// Texts for places of a fixed size.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <string_view>

namespace offload::proto {

// The beginning of a text, which ends before a UTF-8 character that has no room: who reads it may
// take nothing else (Python).
inline std::string_view CutText(std::string_view text, size_t length_max) {
  if (text.size() <= length_max) return text;
  size_t length = length_max;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  return text.substr(0, length);
}

}  // namespace offload::proto
