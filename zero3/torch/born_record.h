// zero3/torch/born_record.h
//
// Storages that are born outside memory, while a model that is larger than it is constructed: a CPU
// allocator hands out big storages without bytes, the dispatch key in the thread's included set
// makes every operation pin what it touches, and between operations the bytes lie in the scratch
// file of the pool. Attaching moves them on into the store.
//
// A storage that a kernel allocates for its own result has bytes until that operation ends; one
// made by empty() and its like has none, and no value, until an operation writes it.
//
// Thread safety: one construction at a time, on one thread; records as Record.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "base/mapped_region.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/record.h"

namespace offload::zero3 {

// Smaller tensors are ordinary ones.
inline constexpr size_t kBornBytesMin = 64 << 10;

// Room in the scratch file before there is a plan; freed room is used again.
class ScratchSpace {
 public:
  explicit ScratchSpace(client::Session& session) : session_(session) {}
  uint64_t Take(uint64_t size_bytes);  // throws OFD-1204
  void Return(uint64_t offset, uint64_t size_bytes);

 private:
  client::Session& session_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;
  uint64_t reserved_bytes_ = 0;
};

class BornRecord final : public Record {
 public:
  BornRecord(std::shared_ptr<Attachment> attachment, std::shared_ptr<ScratchSpace> scratch,
             size_t size_bytes);

  // For the allocator; with `resident` it has bytes, and a pin that the caller owes.
  c10::DataPtr Bear(bool resident);

  void Pin(Access access) override;
  void Unpin() override;
  // Copies bytes [begin, begin + length) to the region; both as in the daemon's extents.
  absl::Status ReadInto(uint64_t begin, uint64_t length, uint64_t region_offset);
  // Makes it an ordinary storage again.
  void BringHome();

 private:
  ~BornRecord() override;
  void Move(bool write);
  void OnStorageDeath() override;

  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<ScratchSpace> scratch_;
  MappedRegion bytes_;
  int pins_ = 0;
  bool written_ = false;    // bytes_ are newer than the scratch file
  bool has_value_ = false;  // the scratch file has one
  bool dead_ = false;
  uint64_t place_ = 0;
  bool has_place_ = false;
};

// Ends the construction that runs in this process, if any; InitGuard's destructor calls it, too.
void EndConstruction();
// Tensors that were born outside memory and did not become parameters (buffers, say) become
// ordinary ones.
void BringHome(torch::nn::Module& module);

}  // namespace offload::zero3
