// zero3/torch/born_residency.h
//
// Storages that are born outside memory, while a model that is larger than it is constructed: a CPU
// allocator hands out big storages without bytes, the dispatch key in the thread's included set
// makes every operation pin what it touches, and between operations the bytes lie in the scratch
// file of the pool. Attaching moves them on into the store.
//
// A storage that a kernel allocates for its own result has bytes until that operation ends; one
// made by empty() and its like has none, and no value, until an operation writes it.
//
// Thread safety: a construction runs on one thread, several of different threads and engines at a
// time; residencies as Residency.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "base/mapped_region.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/residency.h"

namespace offload::zero3 {

// Smaller tensors are ordinary ones.
inline constexpr size_t kBornBytesMin = 64 << 10;

class BornResidency final : public Residency {
 public:
  BornResidency(std::shared_ptr<Attachment> attachment, size_t size_bytes);

  const Attachment* attachment() const { return attachment_.get(); }

  // For the allocator; with `resident` it has bytes, and a pin that the caller owes.
  c10::DataPtr Bear(bool resident);

  void Pin(Access access) override;
  void Unpin(Completion* done) override;
  void Abandon() override;
  // Copies bytes [begin, begin + length) to the region; both as in the daemon's extents.
  absl::Status ReadInto(uint64_t begin, uint64_t length, uint64_t region_offset);
  // Makes it an ordinary storage again.
  void BringHome();

 private:
  ~BornResidency() override;
  void Move(bool write);
  // What an operation has made on the way: nobody looks at it any more, though the operation may go
  // on, and with it the pin.
  void ForgetStorage() override {
    dead_ = true;
    bytes_.Unmap();
  }

  const std::shared_ptr<Attachment> attachment_;
  MappedRegion bytes_;
  int pins_ = 0;
  bool written_ = false;    // bytes_ are newer than the scratch file
  bool is_fresh_ = false;   // bytes_ were made to be overwritten, and never had the value
  bool has_value_ = false;  // the scratch file has one
  bool dead_ = false;
  uint64_t scratch_offset_ = 0;
  std::shared_ptr<ScratchSpace> space_;  // once it has room there
};

// Ends the construction that runs on this thread, if any. After that of an InitGuard operations of
// the thread have bytes of what was constructed until this is called.
void EndConstruction();
// As EndConstruction(), where the one that this thread has made last was for that engine.
void ForgetConstructed(const Attachment* attachment);
// Tensors of an engine that were born outside memory and did not become parameters (buffers, say)
// become ordinary ones.
void BringHome(const Attachment* attachment);
// Tells a tensor's residency which storage it has, when no operation has touched it so far.
void LearnStorage(const at::Tensor& tensor);

}  // namespace offload::zero3
