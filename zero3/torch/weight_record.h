// zero3/torch/weight_record.h
//
// A parameter whose weights are in the daemon: read from the job's slab, written in a private copy
// that is put back.
//
// Thread safety: as Record.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>

#include "zero3/torch/attachment.h"
#include "zero3/torch/record.h"

namespace offload::zero3 {

class WeightRecord final : public Record {
 public:
  WeightRecord(std::shared_ptr<Attachment> attachment, uint32_t tensor, size_t size_bytes);

  uint32_t tensor() const { return tensor_; }
  const Attachment* attachment() const { return attachment_.get(); }

  // Takes the storage of the parameter over; its bytes are freed.
  using Record::Manage;
  void Pin(Access access) override;
  void Unpin() override;
  // Waits until nobody uses it; from then on Pin() throws OFD-1802. The attachment's session may
  // end after it.
  void Close();

 private:
  enum class State : uint8_t { kHome, kMoving, kReading, kWriting };

  ~WeightRecord() override = default;
  std::byte* FetchForWriting(Access access);
  void PutBack(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Attachment> attachment_;
  const uint32_t tensor_;
  std::condition_variable changed_;
  State state_ = State::kHome;
  bool closed_ = false;
  int pins_ = 0;
  bool acquired_ = false;   // the session's pin is ours
  Staging::Piece staging_;  // kWriting
};

}  // namespace offload::zero3
