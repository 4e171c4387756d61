// zero3/torch/gradient_stream.h
//
// One rank's end of the ordered stream of gradients: what its backward passes give goes to the
// daemon, which adds the parts of all ranks in the order (pass, rank). Counts passes, knows when a
// step begins, looks at sums, and shares the work of taking norms. Knows nothing of torch.
//
// Words
//   * A pass is what the outermost backward of a thread delivers; backwards inside it (checkpoints
//   that compute again) belong to it. A tensor that comes a second time begins another pass.
//   * A generation is what accumulates until the next step, or until the trainer zeroes gradients
//   that passes have given already (a skipped step). It begins with its first pass, and the
//   daemon's sums begin with it.
//   * A look waits until no rank adds to a sum any more. Between looks by all ranks further passes
//   may follow.
//
// Invariants
//   * Operations of a backward reach the daemon in this order: BeginGradients, parts of pass 0,
//   EndPass 0, parts of pass 1, …: one thread at a time is in the stream.
//   * A tensor is looked at once per pass; its norm is taken or read once.
//   * A rank that has given a part of a tensor and cannot give the rest says nothing any more:
//   every call returns why.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/session.h"
#include "proto/shm_abi.h"
#include "zero3/torch/delivery_ring.h"

namespace offload::zero3 {

// The calls of the session that the stream makes.
class GradientChannel {
 public:
  virtual ~GradientChannel() = default;
  virtual client::Ticket BeginGradients(uint64_t step) = 0;
  virtual client::Ticket DeliverGradient(uint32_t tensor, uint32_t pass, proto::GradientStart start,
                                         uint64_t element_offset, uint64_t element_count,
                                         uint64_t region_offset) = 0;
  virtual client::Ticket EndPass(uint32_t pass, bool wait) = 0;
  virtual absl::StatusOr<uint64_t> AwaitGradient(uint32_t tensor, uint32_t passes) = 0;
  virtual client::Ticket PublishNorm(uint32_t tensor, float norm) = 0;
  virtual uint64_t GradientWord(uint32_t tensor) const = 0;
  virtual absl::Status Wait(client::Ticket ticket) = 0;
};

// What the stream asks of the gradients of its rank. May throw; then the call throws, and the
// stream is as before it.
class GradientOwner {
 public:
  virtual ~GradientOwner() = default;
  // Whether the trainer has zeroed a gradient since the passes of this generation gave it.
  virtual bool HasZeroed() = 0;
  // The sums change from now on: what somebody keeps of them becomes a copy.
  virtual absl::Status LetGoOfSums() = 0;
  // Sees to it that LeaveBackward() is called when this backward ends.
  virtual void WatchEnd(int64_t backward) = 0;
  // torch's 2-norm of a sum that is final; nothing when the tensor has no gradient here.
  virtual absl::StatusOr<std::optional<float>> ComputeNorm(uint32_t tensor) = 0;
};

class GradientStream {
 public:
  struct Tensor {
    std::string name;
    uint64_t element_count = 0;
    uint32_t element_bytes = 0;
    bool trainable = false;
  };
  struct Options {
    uint32_t rank = 0, world_size = 1;
    uint64_t step = 1;            // the number of the step that is accumulated first
    std::byte* region = nullptr;  // mapped
    uint64_t ring_offset = 0, ring_bytes = 0;
    std::vector<Tensor> tensors;  // by id
    // How long one step waits, in all, for norms that other ranks are taking, before it takes them
    // itself.
    std::chrono::microseconds norm_patience = std::chrono::milliseconds(20);
  };
  // Both outlive the object.
  GradientStream(GradientChannel* channel, GradientOwner* owner, Options options);

  // ---- Backward ----
  // A gradient is about to be accumulated by this backward (the number of its graph task).
  absl::Status EnterBackward(int64_t backward);
  // What this rank's pass gave for a tensor: copied, and on its way. `start` is what `.grad` was
  // before; it counts for the first part of a generation. Waits while the ring is full. Without
  // `bytes` the channel brings them to the ring, from a device.
  absl::Status Deliver(uint32_t tensor, proto::GradientStart start, const std::byte* bytes);
  // The backward has ended. When the pass has, and some trainable tensor got nothing from it, waits
  // until other ranks have ended theirs, and returns those tensors to which one of them has given a
  // gradient by then. A backward that failed ends its pass, too, but waits for nothing.
  absl::StatusOr<std::vector<uint32_t>> LeaveBackward(int64_t backward, bool failed);

  // ---- Looking ----
  // Waits until the sum is final; its word. OFD-1605 while a pass runs.
  absl::StatusOr<uint64_t> Look(uint32_t tensor);
  // Whether a rank has given a part in this generation, or before the next has begun, in the last.
  bool Exists(uint32_t tensor) const;
  // The 2-norm of the sum. Of the tensors that are this rank's share, the norms are taken first.
  absl::StatusOr<float> Norm(uint32_t tensor);

  // ---- The step ----
  // Begins the generation of a rank that has made no pass: now it can look.
  absl::Status EnterStep();
  uint32_t passes() const;
  uint64_t step() const;
  // The daemon has taken the step.
  absl::Status Stepped();

  // Memory of the rank for gradients that the trainer has written.
  DeliveryRing& ring() { return ring_; }

 private:
  // Of one tensor in this generation.
  struct Progress {
    uint32_t delivered = 0;  // the pass that gave it last, counted from 1
    uint32_t looked = 0;     // the number of passes when it was looked at, plus one
    bool given = false;      // by this rank; then start is set
    proto::GradientStart start = proto::GradientStart::kNothing;
    std::optional<float> norm;
  };

  absl::Status BeginGeneration() ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_mutex_);
  void OpenPass();
  // Enters a part of the pass that runs, or of another when this one has given the tensor already;
  // its number.
  uint32_t EnterPart(uint32_t tensor, proto::GradientStart& start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_mutex_);
  std::vector<uint32_t> MissingTensors() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsOfThisStep(uint64_t word) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeShare();
  absl::StatusOr<std::optional<float>> TakeNorm(uint32_t tensor, uint64_t word);
  std::optional<float> WaitForNorm(uint32_t tensor);
  // A ticket that nobody has to wait for now.
  void Keep(client::Ticket ticket) { ring_.Deliver(0, 0, ticket); }

  GradientChannel* const channel_;
  GradientOwner* const owner_;
  const Options options_;
  std::vector<uint32_t> share_;  // of norms, this rank's
  DeliveryRing ring_;

  absl::Mutex order_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // who has it submits
  mutable absl::Mutex mutex_;
  std::set<int64_t> backwards_ ABSL_GUARDED_BY(mutex_);  // that run
  uint64_t step_ ABSL_GUARDED_BY(mutex_);                // that is accumulated
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;           // the generation
  bool pass_runs_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t passes_ ABSL_GUARDED_BY(mutex_) = 0;      // that have ended
  uint32_t pass_begin_ ABSL_GUARDED_BY(mutex_) = 0;  // passes_ when the outermost backward began
  uint32_t shared_ ABSL_GUARDED_BY(mutex_) = 0;  // the number of passes at TakeShare(), plus one
  std::chrono::microseconds patience_left_ ABSL_GUARDED_BY(mutex_);
  std::vector<Progress> progress_ ABSL_GUARDED_BY(mutex_);
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);  // amid a tensor
};

}  // namespace offload::zero3
