// zero3/pickle.h
//
// Objects as Python's pickle writes them (protocol 2), for files that torch.load() reads: texts,
// whole numbers, lists, dictionaries, and one tensor of fp32 whose elements lie beside the pickle.
// Each function gives a piece that stands for one object; Pickle() makes a whole of it.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace offload::zero3 {

std::string PickledText(std::string_view text);
std::string PickledInteger(int64_t number);
std::string PickledList(std::span<const std::string> objects);
// Key and value, both pieces.
std::string PickledDictionary(std::span<const std::pair<std::string, std::string>> items);
// Row by row, with the elements of storage "0". No dimensions: a scalar.
std::string PickledTensor(std::span<const int64_t> shape);

std::string Pickle(std::string_view object);

}  // namespace offload::zero3
