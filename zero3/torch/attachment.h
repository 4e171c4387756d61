// zero3/torch/attachment.h
//
// What the records of one engine share: the session with the daemon, the staging buffer, the
// schedule, address space. It outlives the engine while storages of its model live; after Close()
// every pin is refused with OFD-1802.
//
// Thread safety: Staging, Touch and the accessors from any thread; Close once, when no operation
// runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/mapped_region.h"
#include "client/session.h"
#include "proto/slab_layout.h"
#include "zero3/planner.h"
#include "zero3/schedule.h"

namespace offload::zero3 {

// A writable buffer in the region, lent in pieces: private copies of weights that an operator
// writes, blocks for loading and gathering.
class Staging {
 public:
  class Piece {
   public:
    Piece() = default;
    Piece(Piece&& other) noexcept { *this = std::move(other); }
    Piece& operator=(Piece&& other) noexcept;
    ~Piece() { Reset(); }
    void Reset();
    uint64_t region_offset() const { return offset_; }
    uint64_t size_bytes() const { return size_bytes_; }
    explicit operator bool() const { return staging_ != nullptr; }

   private:
    friend class Staging;
    Staging* staging_ = nullptr;
    uint64_t offset_ = 0, size_bytes_ = 0;
  };

  Staging(uint64_t offset, uint64_t size_bytes) { free_[offset] = size_bytes; }

  // Waits while other threads hold what it needs. Throws OFD-1303 when the calling thread itself
  // holds it, or it never fits.
  Piece Take(uint64_t size_bytes);
  // Makes the buffer larger: the bytes from `end` on.
  void Grow(uint64_t end, uint64_t more_bytes);

 private:
  void Return(uint64_t offset, uint64_t size_bytes);

  std::mutex mutex_;
  std::condition_variable returned_;
  std::map<uint64_t, uint64_t> free_;            // offset → bytes, no two adjacent
  std::map<uint64_t, std::thread::id> holders_;  // of lent pieces
};

// Address space without access, from which storages that are not in memory take their pointers. One
// reservation for many: the kernel limits the number of mappings.
class HomeRanges {
 public:
  // `size_bytes` rounded up to a page. Thread safe. Never given back before the object goes.
  std::byte* Take(size_t size_bytes);

 private:
  static constexpr size_t kChunkBytes = size_t{64} << 30;
  std::mutex mutex_;
  std::vector<MappedRegion> chunks_;
  size_t left_bytes_ = 0;
};

class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  explicit Attachment(std::unique_ptr<client::Session> session);

  client::Session& session() { return *session_; }
  uint32_t rank() const { return session_->world().rank; }
  uint32_t world_size() const { return session_->world().world_size; }
  std::byte* region() const { return session_->region(); }
  Staging& staging() { return staging_; }
  HomeRanges& homes() { return homes_; }

  // ---- After the plan is made ----
  void SetPlan(PlanInput input, Plan plan);
  const PlanInput& input() const { return input_; }
  const Plan& plan() const { return plan_; }
  const proto::Tensor& tensor(uint32_t id) const { return input_.catalogue.tensors[id]; }

  // An operation is about to use a weight: moves the schedule on and asks for what comes next.
  void Touch(uint32_t tensor);
  // The step is over: sends the schedule when it changed. Returns the tensors to ask for after the
  // step.
  std::vector<uint32_t> EndScheduleStep();
  void Prefetch(const std::vector<uint32_t>& tensors);

  // What an operation has written in place, at `region_offset`, replaces the weight. With several
  // ranks all write, and the first rank's bytes count. Blocks; throws.
  void PutWeight(uint32_t tensor, uint64_t region_offset);

  void Close();

 private:
  std::unique_ptr<client::Session> session_;
  Staging staging_;
  HomeRanges homes_;
  PlanInput input_;
  Plan plan_;
  std::mutex schedule_mutex_;
  std::unique_ptr<Schedule> schedule_;
};

// The OFD-1802 of a closed engine.
absl::Status SessionEnded(const std::string& subject);

}  // namespace offload::zero3
