// zero3/torch/memory_source.h
//
// Where the storages of tensors come from that a thread makes, when not from torch's CPU allocator:
// a source takes part in the allocations of the threads that have set it.
//
// Thread safety: a source is asked by the threads that have it, by several at once.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <functional>

namespace offload::zero3 {

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // Null where torch's allocator is to give it.
  virtual c10::DataPtr Allocate(size_t size_bytes) = 0;
};

// Of the calling thread, from now on; null: torch's allocator alone. Returns the one before.
MemorySource* SetMemorySource(MemorySource* source);

// For a source: memory at `data`, and what frees it, also when it was asked for as raw memory.
c10::DataPtr MakeDataPtr(void* data, std::function<void()> free);

// From torch's allocator, whatever source the thread has.
c10::DataPtr AllocateOrdinary(size_t size_bytes);

}  // namespace offload::zero3
