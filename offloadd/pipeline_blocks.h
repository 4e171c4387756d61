// offloadd/pipeline_blocks.h
//
// The blocks of the update pipeline: memory for the state of one extent each, from its read to its
// write. Updates take them, and so does what is read or updated before a step is called for.
// Between steps their number may change (PipelineExchange).
//
// Thread safety: the loop's thread only; the bytes are lent to workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "offloadd/job_context.h"

namespace offload::daemon {

class PipelineBlocks {
 public:
  explicit PipelineBlocks(const JobContext& context)
      : count_(context.plan.pipeline_blocks), block_bytes_(context.layout.pipeline_block_bytes) {
    for (uint32_t i = count_; i > 0; --i) {
      free_.push_back(context.slab + context.layout.pipeline_offset +
                      (i - 1) * context.layout.pipeline_block_bytes);
    }
  }
  PipelineBlocks(const PipelineBlocks&) = delete;
  PipelineBlocks& operator=(const PipelineBlocks&) = delete;

  uint32_t count() const { return count_; }
  size_t free_count() const { return free_.size(); }
  uint64_t block_bytes() const { return block_bytes_; }
  uint64_t bytes_in_use() const { return (count_ - free_.size()) * block_bytes_; }

  // Requires that one is free.
  std::byte* Take() {
    OFFLOAD_CHECK(!free_.empty());
    std::byte* const block = free_.back();
    free_.pop_back();
    return block;
  }
  void Return(std::byte* block) { free_.push_back(block); }

  // One more, of block_bytes() that nobody uses.
  void Add(std::byte* block) {
    ++count_;
    Return(block);
  }
  // Gives one away for good. Requires that one is free.
  std::byte* Remove() {
    std::byte* const block = Take();
    --count_;
    return block;
  }
  const std::vector<std::byte*>& free() const { return free_; }

 private:
  uint32_t count_;
  const uint64_t block_bytes_;
  std::vector<std::byte*> free_;
};

}  // namespace offload::daemon
