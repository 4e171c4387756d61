// zero3/torch/gradient_sums.h
//
// The gradients of one rank of several, together: the hooks that tell the stream when a backward
// begins and ends, the session as the stream calls it, and where the daemon's sums are.
//
// Hooks hold gradients, gradients hold this; Close() lets go of the gradients.
//
// Thread safety: Add and Close on one thread while no operation runs; the rest from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "zero3/torch/attachment.h"
#include "zero3/torch/gradient_stream.h"

namespace offload::zero3 {

class SummedGradient;

class GradientSums final : public GradientOwner, public std::enable_shared_from_this<GradientSums> {
 public:
  // `step`: the number of the step that is accumulated first.
  GradientSums(std::shared_ptr<Attachment> attachment, uint64_t step);

  void Add(uint32_t tensor, SummedGradient* gradient);
  void Close();

  GradientStream& stream() { return stream_; }
  // Where the daemon adds, for sums in the slab.
  const std::byte* SumOf(uint32_t tensor) const;

  // A gradient is about to be accumulated by the backward of the calling thread. Throws.
  void EnterBackward();

 private:
  class Channel;
  class BackwardEnd;

  bool HasZeroed() override;
  absl::Status LetGoOfSums() override;
  void WatchEnd(int64_t backward) override;
  absl::StatusOr<std::optional<float>> ComputeNorm(uint32_t tensor) override;
  void EndBackward(int64_t backward, bool failed);

  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<GradientChannel> channel_;
  GradientStream stream_;
  std::vector<SummedGradient*> gradients_;  // by id, null when frozen
};

}  // namespace offload::zero3
