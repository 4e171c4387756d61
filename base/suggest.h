// base/suggest.h
//
// "Did you mean": finds the known word that a mistyped one is nearest to.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace offload {

// Counts the insertions, deletions, replacements and swaps of neighbours that turn one word into
// the other.
size_t EditDistance(std::string_view from, std::string_view to);

// The known word that is nearest to `word`; the first of equals; "" when all are farther away than
// half of its letters.
std::string NearestWord(std::string_view word, std::span<const std::string> known);

}  // namespace offload
