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

inline constexpr std::string_view kOptimizerSlotPrefix = "optimizer slot ";

// As a buffer's: bytes of what an optimizer of the trainer's process keeps, of which the trainer's
// state says what they are.
inline std::string OptimizerSlotName(size_t slot) {
  return std::string(kOptimizerSlotPrefix).append(std::to_string(slot));
}

inline bool IsOptimizerSlot(std::string_view tensor) {
  return IsBufferTensor(tensor) &&
         tensor.substr(kBufferTensorPrefix.size()).starts_with(kOptimizerSlotPrefix);
}

inline constexpr std::string_view kReplacedTensorPrefix = "replaced ";

// Of a parameter whose place in the model another one has taken, for which the job was laid out
// anew after `step`.
inline std::string ReplacedTensorName(std::string_view name, uint64_t step) {
  return std::string(kReplacedTensorPrefix).append(std::to_string(step)).append(" ").append(name);
}

inline bool IsReplacedTensor(std::string_view tensor) {
  return tensor.starts_with(kReplacedTensorPrefix);
}

}  // namespace offload::proto
