// zero3/dimension_order.h
//
// Tensors whose elements do not lie row by row in memory (channels_last, a transposed matrix), and
// the way between that order, which a store's planes have, and rows, which files have.
//
// An order names the dimensions of more than one element, outermost in memory first; it is empty
// for a tensor that lies row by row (proto::Tensor::dimension_order).
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace offload::zero3 {

using DimensionOrder = std::vector<uint32_t>;
using Dimensions = std::span<const int64_t>;

// The order of a dense tensor: no gaps, no overlaps. Strides in elements.
DimensionOrder OrderOf(Dimensions sizes, Dimensions strides);
// The strides of a dense tensor of this order, in elements; those of dimensions of one element are
// as of a row.
std::vector<int64_t> StridesOf(Dimensions sizes, const DimensionOrder& order);

// Between elements [begin, begin + count) of the rows and all elements in the order of memory, of
// 2, 4 or 8 bytes each.
struct RowRange {
  uint64_t begin = 0, count = 0;
};
void CopyToRows(Dimensions sizes, const DimensionOrder& order, size_t element_bytes, RowRange range,
                const std::byte* elements, std::byte* rows);
void CopyFromRows(Dimensions sizes, const DimensionOrder& order, size_t element_bytes,
                  RowRange range, const std::byte* rows, std::byte* elements);

}  // namespace offload::zero3
