// Bytes of a fuzzer as a pickle.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "zero3/unpickle.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using offload::zero3::PickledObject;
  const auto pickle =
      offload::zero3::Unpickle(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!pickle.ok()) return 0;
  // What passed lies within its storage.
  const PickledObject& root = pickle->root();
  const PickledObject* const held = root.Find("param");
  const PickledObject& object = held != nullptr ? *held : root;
  if (object.kind != PickledObject::Kind::kTensor) return 0;
  const offload::zero3::TensorOnFile& tensor = *object.tensor;
  if (!tensor.is_row_by_row) return 0;
  OFFLOAD_CHECK(tensor.offset_elements <= tensor.storage_elements);
  OFFLOAD_CHECK(tensor.element_count <= tensor.storage_elements - tensor.offset_elements);
  return 0;
}
