// zero3/torch/process_memory.h
//
// Memory of the trainer's process for what is not in `ram`: what optimizers keep and compute that
// run in it, and what has to be held while a store is laid out anew. As much as a bound says is
// ordinary memory; what is asked for beyond it is paged (zero3/paged_memory.h), so that what is
// larger than memory is slower instead of the end of the process. Nothing is lost where that cannot
// be had (a pool that this process may not write, a drive that is full): it is ordinary memory
// then, and said once.
//
// Invariants
//   * Bytes are those that torch's allocator would give: undefined, and aligned at least as well.
//   * Small tensors, and those that forward and backward passes inside of a step make, are
//   ordinary.
//
// Thread safety: any thread; a step begins and ends on one.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "zero3/paged_memory.h"
#include "zero3/torch/memory_source.h"

namespace offload::zero3 {

class ProcessMemory final : public MemorySource,
                            public std::enable_shared_from_this<ProcessMemory> {
 public:
  // `pool`: folder, of which a file is made once it is needed. `bytes_max`: of ordinary memory, and
  // of pages of the other.
  static std::shared_ptr<ProcessMemory> Make(std::string pool, uint64_t bytes_max);

  // While it lives, tensors that its thread makes come from here. The thread's last one counts.
  class Use {
   public:
    // `inside_passes`: whether the thread may run forward passes meanwhile, which are those with
    // gradients enabled; theirs are ordinary tensors.
    Use(std::shared_ptr<ProcessMemory> memory, bool inside_passes);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    friend class ProcessMemory;
    const std::shared_ptr<ProcessMemory> memory_;
    const bool former_inside_passes_;
    Use* const former_use_;
    MemorySource* const former_source_;
    std::optional<PagedMemory::Use> paged_;
  };
  // The same, for who cannot hold one (Python's hooks): until EndStep() on the same thread, or the
  // next BeginStep().
  void BeginStep(bool inside_passes);
  static void EndStep();

  c10::DataPtr Allocate(size_t size_bytes) override;

  // Whether there is more than ordinary memory.
  bool CanPage() { return paged(/*makes=*/true) != nullptr; }
  // Whether all that went to the drive has arrived.
  absl::Status Check();

 private:
  ProcessMemory(std::string pool, uint64_t bytes_max);
  std::shared_ptr<PagedMemory> paged(bool makes);
  c10::DataPtr AllocatePaged(size_t size_bytes);
  void SayOnce(const absl::Status& allocated);

  const std::string pool_;
  const uint64_t bytes_max_;
  std::atomic<uint64_t> ordinary_bytes_{0};
  std::mutex mutex_;
  std::shared_ptr<PagedMemory> paged_;
  absl::Status cannot_open_;
  bool has_said_ = false, has_warned_ = false;
};

}  // namespace offload::zero3
