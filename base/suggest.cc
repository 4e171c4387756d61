#include "base/suggest.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace offload {

// Three rows of the table of distances between prefixes; the oldest serves the swaps.
size_t EditDistance(std::string_view from, std::string_view to) {
  std::vector<size_t> oldest(to.size() + 1), older(to.size() + 1), row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    std::swap(oldest, older);
    std::swap(older, row);
    row[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = older[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, older[j] + 1, row[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
      if (swapped) row[j] = std::min(row[j], oldest[j - 2] + 1);
    }
  }
  return row.back();
}

std::string NearestWord(std::string_view word, std::span<const std::string> known) {
  std::string nearest;
  size_t nearest_distance = word.size() / 2 + 1;
  for (const std::string& candidate : known) {
    const size_t distance = EditDistance(word, candidate);
    if (distance >= nearest_distance) continue;
    nearest_distance = distance;
    nearest = candidate;
  }
  return nearest;
}

}  // namespace offload
