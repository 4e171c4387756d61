#include "zero3/stored_buffers.h"

#include <cstring>
#include <utility>

#include "base/error.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kRankMax = 64;

struct Header {
  uint32_t name_bytes, type, dimensions, is_in_store;
  uint64_t data_bytes;
};

absl::Status Damaged() {
  return MakeError(ErrorId::kStoreDamaged,
                   "the buffers of the last epoch are not from this library");
}

std::string_view Take(std::string_view& from, size_t size_bytes) {
  const std::string_view taken = from.substr(0, size_bytes);
  from.remove_prefix(size_bytes);
  return taken;
}

}  // namespace

absl::StatusOr<std::vector<StoredBuffer>> DecodeStoredBuffers(std::string_view encoded) {
  std::vector<StoredBuffer> buffers;
  while (!encoded.empty()) {
    Header header;
    if (encoded.size() < sizeof(header)) return Damaged();
    std::memcpy(&header, Take(encoded, sizeof(header)).data(), sizeof(header));
    const uint64_t shape_bytes = header.dimensions * sizeof(int64_t);
    if (header.dimensions > kRankMax || shape_bytes > encoded.size() ||
        header.name_bytes > encoded.size() - shape_bytes ||
        header.data_bytes > encoded.size() - shape_bytes - header.name_bytes ||
        header.is_in_store > 1 || (header.is_in_store == 1 && header.data_bytes > 0))
      return Damaged();
    StoredBuffer buffer{.type = header.type, .is_in_store = header.is_in_store == 1};
    buffer.shape.resize(header.dimensions);
    if (shape_bytes > 0)
      std::memcpy(buffer.shape.data(), Take(encoded, shape_bytes).data(), shape_bytes);
    buffer.name = Take(encoded, header.name_bytes);
    buffer.bytes = Take(encoded, header.data_bytes);
    buffers.push_back(std::move(buffer));
  }
  return buffers;
}

std::optional<FileDtype> FileDtypeOfStored(uint32_t type) {
  switch (type) {
    case 0:
      return FileDtype::kU8;
    case 1:
      return FileDtype::kI8;
    case 2:
      return FileDtype::kI16;
    case 3:
      return FileDtype::kI32;
    case 4:
      return FileDtype::kI64;
    case 5:
      return FileDtype::kF16;
    case 6:
      return FileDtype::kF32;
    case 7:
      return FileDtype::kF64;
    case 11:
      return FileDtype::kBool;
    case 15:
      return FileDtype::kBF16;
    default:
      return std::nullopt;
  }
}

}  // namespace offload::zero3
