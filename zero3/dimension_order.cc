#include "zero3/dimension_order.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace offload::zero3 {
namespace {

// Calls `visit(row, element)` for every element of the range: where it is in the rows, counted from
// the range's begin, and where in memory.
template <typename Visit>
void ForEach(Dimensions sizes, const DimensionOrder& order, RowRange range, const Visit& visit) {
  const std::vector<int64_t> strides = StridesOf(sizes, order);
  std::vector<int64_t> index(sizes.size());
  int64_t left = static_cast<int64_t>(range.begin), element = 0;
  for (size_t dimension = sizes.size(); dimension-- > 0; left /= sizes[dimension]) {
    index[dimension] = left % sizes[dimension];
    element += index[dimension] * strides[dimension];
  }
  for (uint64_t row = 0; row < range.count; ++row) {
    visit(row, static_cast<uint64_t>(element));
    for (size_t dimension = sizes.size(); dimension-- > 0;) {
      element += strides[dimension];
      if (++index[dimension] < sizes[dimension]) break;
      element -= sizes[dimension] * strides[dimension];
      index[dimension] = 0;
    }
  }
}

template <size_t element_bytes>
void ToRows(Dimensions sizes, const DimensionOrder& order, RowRange range,
            const std::byte* elements, std::byte* rows) {
  ForEach(sizes, order, range, [&](uint64_t row, uint64_t element) {
    std::memcpy(rows + row * element_bytes, elements + element * element_bytes, element_bytes);
  });
}

template <size_t element_bytes>
void FromRows(Dimensions sizes, const DimensionOrder& order, RowRange range, const std::byte* rows,
              std::byte* elements) {
  ForEach(sizes, order, range, [&](uint64_t row, uint64_t element) {
    std::memcpy(elements + element * element_bytes, rows + row * element_bytes, element_bytes);
  });
}

}  // namespace

DimensionOrder OrderOf(Dimensions sizes, Dimensions strides) {
  DimensionOrder order;
  for (uint32_t dimension = 0; dimension < sizes.size(); ++dimension) {
    if (sizes[dimension] > 1) order.push_back(dimension);
  }
  const auto is_outer = [&](uint32_t a, uint32_t b) { return strides[a] > strides[b]; };
  if (std::is_sorted(order.begin(), order.end(), is_outer)) return {};
  std::sort(order.begin(), order.end(), is_outer);
  return order;
}

std::vector<int64_t> StridesOf(Dimensions sizes, const DimensionOrder& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dimension = sizes.size(); dimension-- > 0; stride *= sizes[dimension])
    strides[dimension] = stride;
  stride = 1;
  for (size_t i = order.size(); i-- > 0; stride *= sizes[order[i]]) strides[order[i]] = stride;
  return strides;
}

void CopyToRows(Dimensions sizes, const DimensionOrder& order, size_t element_bytes, RowRange range,
                const std::byte* elements, std::byte* rows) {
  OFFLOAD_CHECK(element_bytes == 2 || element_bytes == 4 || element_bytes == 8) << element_bytes;
  if (element_bytes == 2) return ToRows<2>(sizes, order, range, elements, rows);
  if (element_bytes == 4) return ToRows<4>(sizes, order, range, elements, rows);
  ToRows<8>(sizes, order, range, elements, rows);
}

void CopyFromRows(Dimensions sizes, const DimensionOrder& order, size_t element_bytes,
                  RowRange range, const std::byte* rows, std::byte* elements) {
  OFFLOAD_CHECK(element_bytes == 2 || element_bytes == 4 || element_bytes == 8) << element_bytes;
  if (element_bytes == 2) return FromRows<2>(sizes, order, range, rows, elements);
  if (element_bytes == 4) return FromRows<4>(sizes, order, range, rows, elements);
  FromRows<8>(sizes, order, range, rows, elements);
}

}  // namespace offload::zero3
