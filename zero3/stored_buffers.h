// zero3/stored_buffers.h
//
// Reads the buffers of a module in the blob that is committed with every step
// (TrainerState::buffers): the small ones with their bytes, of the large ones, which are tensors of
// the store (proto/buffer_tensors.h), type and shape.
//
// Format of each, little endian: u32 length of the name, u32 type, u32 number of dimensions, u32 1
// when its bytes are in the store, else 0, u64 length of the bytes here; i64 per dimension, the
// name, the bytes. Types have torch's numbers (c10::ScalarType).
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "zero3/safetensors.h"

namespace offload::zero3 {

struct StoredBuffer {
  std::string name;
  uint32_t type = 0;
  std::vector<int64_t> shape;
  bool is_in_store = false;
  std::string_view bytes;  // row by row; none of one in the store
};

// OFD-1207 for what is not written by zero3/torch/buffers.cc. Views of `encoded`.
absl::StatusOr<std::vector<StoredBuffer>> DecodeStoredBuffers(std::string_view encoded);

// As a file has it; none for types that files do not have.
std::optional<FileDtype> FileDtypeOfStored(uint32_t type);

}  // namespace offload::zero3
