// zero3/torch/supported_model.h
//
// Which parameters can be attached, said of all of them at once: somebody who has to change a model
// wants to hear of everything that is wrong with it, not of one thing after the other.
//
// Thread safety: pure functions of tensors that nobody changes meanwhile.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <span>

#include "zero3/torch/weights_io.h"

namespace offload::zero3 {

// What a parameter's memory may be. A tensor of a Python program is often over a mapped file.
enum class Memory { kOfTorch, kAny };

// Throws OFD-1601 when some are sparse, of a type that is not trained here, with gaps or overlaps,
// parts of larger tensors, on a device that nothing here drives, on several devices, or in memory
// that the program gave them. Parts that do not overlap, of memory that only parameters of the list
// use, are no such parts: nobody sees whether they lie there. Those of the host go to
// `destination`, where there is one.
void CheckSupported(std::span<const NamedTensor> parameters, Memory memory,
                    std::optional<c10::Device> destination);
// The types alone, which is all that training in memory asks.
void CheckSupportedTypes(std::span<const NamedTensor> parameters);

// Whether its memory is the program's own, and no allocator's of torch (from_blob, a mapped file):
// a parameter's is given back when the bytes are in the daemon, and this would stay behind with old
// values.
bool IsMemoryOfProgram(const at::Tensor& tensor);

// Whether its memory has room for more than it.
bool IsPart(const at::Tensor& tensor);

// A frozen parameter of whole numbers (a table, a permutation): stays in memory, like a buffer.
bool IsTable(const at::Tensor& parameter);

}  // namespace offload::zero3
