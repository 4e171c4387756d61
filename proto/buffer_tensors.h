// proto/buffer_tensors.h
//
// Large buffers of a module, such as running statistics, are tensors of the job beside its
// parameters: bytes whose type only the trainer knows. Their names tell them apart.
#pragma once

#include <string>
#include <string_view>

namespace offload::proto {

inline constexpr std::string_view kBufferTensorPrefix =
    "buffer ";  // no parameter's name has a space

// `name`: the buffer's in its module.
inline std::string BufferTensorName(std::string_view name) {
  return std::string(kBufferTensorPrefix).append(name);
}

inline bool IsBufferTensor(std::string_view tensor) {
  return tensor.starts_with(kBufferTensorPrefix);
}

}  // namespace offload::proto
