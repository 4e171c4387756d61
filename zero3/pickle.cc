#include "zero3/pickle.h"

namespace offload::zero3 {
namespace {

template <typename T>
void Put(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

std::string PickledTuple(std::span<const int64_t> numbers) {
  std::string piece = "(";
  for (const int64_t number : numbers) piece += PickledInteger(number);
  return piece + 't';
}

}  // namespace

std::string PickledText(std::string_view text) {
  std::string piece = "X";
  Put(piece, static_cast<uint32_t>(text.size()));
  return piece.append(text);
}

std::string PickledInteger(int64_t number) {
  std::string piece("\x8a\x08", 2);
  Put(piece, number);
  return piece;
}

std::string PickledList(std::span<const std::string> objects) {
  std::string piece = "](";
  for (const std::string& object : objects) piece += object;
  return piece + 'e';
}

std::string PickledDictionary(std::span<const std::pair<std::string, std::string>> items) {
  std::string piece = "}(";
  for (const auto& [key, value] : items) piece.append(key).append(value);
  return piece + 'u';
}

// _rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)
std::string PickledTensor(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t element_count = 1;
  for (size_t n = shape.size(); n-- > 0; element_count *= shape[n]) strides[n] = element_count;
  std::string piece = "ctorch._utils\n_rebuild_tensor_v2\n((" + PickledText("storage");
  piece += "ctorch\nFloatStorage\n" + PickledText("0") + PickledText("cpu");
  piece += PickledInteger(element_count) + "tQ" + PickledInteger(0);
  piece += PickledTuple(shape) + PickledTuple(strides);
  return piece +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}

std::string Pickle(std::string_view object) { return std::string("\x80\x02").append(object) + '.'; }

}  // namespace offload::zero3
