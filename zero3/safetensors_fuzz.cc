// Bytes of a fuzzer as the header of a safetensors file. The first two bytes are the length of the
// data, the rest is JSON.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "zero3/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint16_t data_bytes = 0;
  if (size < sizeof(data_bytes)) return 0;
  std::memcpy(&data_bytes, data, sizeof(data_bytes));
  const std::string_view json(reinterpret_cast<const char*>(data) + sizeof(data_bytes),
                              size - sizeof(data_bytes));
  constexpr uint64_t kDataBegin = 4096;
  const auto header = offload::zero3::ParseHeader(json, kDataBegin, data_bytes, "file");
  if (!header.ok()) return 0;
  // What passed fills the data exactly.
  uint64_t end = kDataBegin;
  for (const auto& entry : header->entries) {
    OFFLOAD_CHECK(entry.offset_bytes == end);
    end += entry.size_bytes;
  }
  OFFLOAD_CHECK(end == kDataBegin + data_bytes);
  return 0;
}
