// zero3/torch/attachment.h
//
// What the residencies of one engine share: the session with the daemon, the staging buffer, the
// schedule, address space. It outlives the engine while storages of its model live; after Close()
// every pin is refused with OFD-1802.
//
// Thread safety: Staging, EnsureSealed, Touch and the accessors from any thread; Close once, when
// no operation runs.
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/mapped_region.h"
#include "base/range_allocator.h"
#include "client/session.h"
#include "proto/slab_layout.h"
#include "zero3/planner.h"
#include "zero3/schedule.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/wait_graph.h"

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
    // It is given back by this thread, not by the one that took it. No thread at all (none of that
    // id): whoever finds no room has it given back first.
    void SetHolder(std::thread::id holder);
    explicit operator bool() const { return staging_ != nullptr; }

   private:
    friend class Staging;
    Staging* staging_ = nullptr;
    uint64_t offset_ = 0, size_bytes_ = 0;
  };

  // `give_back` has a piece given back that no thread holds; false when there is none.
  Staging(uint64_t offset, uint64_t size_bytes, std::function<bool()> give_back);

  // Has pieces given back that no thread holds, until so much is free at one place or none is left.
  void MakeRoom(uint64_t size_bytes);
  // Waits while others hold what it needs. Throws OFD-1303 when that would be for ever: the calling
  // thread holds it itself, or those who do wait for something that it has; or it never fits.
  Piece Take(uint64_t size_bytes);
  // The same, but nothing instead of the error.
  std::optional<Piece> TakeIfEver(uint64_t size_bytes);
  // Makes the buffer larger: the bytes from `end` on.
  void Grow(uint64_t end, uint64_t more_bytes);

 private:
  void Return(uint64_t offset, uint64_t size_bytes);
  std::optional<uint64_t> TakeFree(uint64_t size_bytes, std::unique_lock<std::mutex>& lock);

  const std::function<bool()> give_back_;
  std::mutex mutex_;
  WaitQueue returned_;
  RangeAllocator free_;
  std::map<uint64_t, std::thread::id> holders_;  // of lent pieces
};

// A rank's room in the scratch file before there is a plan; freed room is used again. The ranks of
// a job have the file in common: of N, each has every N-th stripe.
class ScratchSpace {
 public:
  static constexpr uint64_t kStripeBytes = 512 << 10;

  ScratchSpace(uint32_t rank, uint32_t world_size);
  uint64_t Take(client::Session& session, uint64_t size_bytes);  // throws OFD-1204
  void Return(uint64_t offset, uint64_t size_bytes);
  // Where in the file a piece of what Take() gave is, that begins at a multiple of kStripeBytes in
  // it and is not longer.
  uint64_t InFile(uint64_t offset) const;

 private:
  const uint32_t rank_, world_size_;
  std::mutex mutex_;
  RangeAllocator free_;
  uint64_t reserved_bytes_ = 0;
};

// Address space without access, from which storages that are not in memory take their pointers. One
// reservation for many: the kernel limits the number of mappings.
class HomeRanges {
 public:
  // `size_bytes` rounded up to a page. Thread safe.
  std::byte* Take(size_t size_bytes);
  // That of a storage which has one already (home_pages.h), or another.
  std::byte* TakeFor(c10::StorageImpl& storage, size_t size_bytes);
  // One that is without access again, and that nobody points to.
  void Give(std::byte* home, size_t size_bytes);

 private:
  static constexpr size_t kChunkBytes = size_t{64} << 30;
  static constexpr size_t kChunkBytesMin = size_t{64} << 20;
  void AddChunk(size_t size_bytes);

  std::mutex mutex_;
  std::vector<MappedRegion> chunks_;
  std::vector<std::shared_ptr<MappedRegion>> brought_;  // by storages
  size_t left_bytes_ = 0;
  std::multimap<size_t, std::byte*> given_;  // by size
};

// A tensor whose bytes are at its home, because a raw pointer was used (raw_access.h).
class RawUser {
 public:
  // Stores what was written and takes the bytes away; false when an operator uses them, unless
  // `wait`.
  virtual bool EndRaw(bool wait) = 0;
  virtual size_t raw_bytes() const = 0;
  virtual const std::string& raw_name() const = 0;

 protected:
  ~RawUser() = default;
};

// A weight that an operator has written, whose bytes go to the daemon behind it. One that is
// written again before its put has begun is put once.
class LatePut {
 public:
  // Does nothing when it has begun, or an operator uses the weight again.
  virtual void BeginPut() = 0;
  // Waits for its end, and gives the room back; as above. Throws what has become of it.
  virtual void EndPut() = 0;

 protected:
  ~LatePut() = default;
};

// Weights that always have a place: a pointer into one of them is of an operator that uses it.
class PlacesOwner final : public RawOwner {
 public:
  ~PlacesOwner() { End(); }
  void Begin(const std::byte* begin, size_t size_bytes);
  void End();
  void ServeRaw(bool writes) override;

 private:
  const std::byte* begin_ = nullptr;
};

class DeviceMemory;

class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  explicit Attachment(std::unique_ptr<client::Session> session);

  // OFD-1802 after Close(): Ended().
  client::Session& session();
  std::byte* region() const { return session_->region(); }
  // Of the ranks that train the model; 0 of 1 for one that is alone.
  uint32_t rank() const { return world_.rank; }
  uint32_t world_size() const { return world_.world_size; }
  Staging& staging() { return *staging_; }
  HomeRanges& homes() { return homes_; }
  // Who has room there holds it: Reopen() begins another.
  const std::shared_ptr<ScratchSpace>& scratch() { return scratch_; }

  // ---- The seal ----
  // What makes the store and loads it, run once, by the first operator that touches a parameter;
  // Close() forgets it. When it throws, so does every later call.
  void SetSealing(std::function<void()> seal) { seal_ = std::move(seal); }
  void EnsureSealed();
  // While tensors are declared, operators of other threads wait before they make the store.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> HoldSeal() {
    return std::unique_lock(seal_mutex_);
  }
  bool sealed() const { return sealed_.load(std::memory_order_acquire); }

  // ---- After the plan is made ----
  void SetPlan(PlanInput input, Plan plan);
  const PlanInput& input() const { return input_; }
  const Plan& plan() const { return plan_; }
  const proto::Tensor& tensor(uint32_t id) const { return input_.catalogue.tensors[id]; }

  // Closes the job and goes on with what `open` gives: a session with the same job, to be sealed
  // and given its plan. No operation runs; when it throws, the engine is as after Close().
  void Reopen(absl::FunctionRef<std::unique_ptr<client::Session>()> open);

  // An operation is about to use a weight: moves the schedule on and asks for what comes next.
  void Touch(uint32_t tensor);
  // The step is over: sends the schedule when it changed. Returns the tensors to ask for after the
  // step.
  std::vector<uint32_t> EndScheduleStep();
  void Prefetch(const std::vector<uint32_t>& tensors);

  // Moves a weight from the region to the daemon, in the daemon's blocks. The bytes stay as they
  // are until WaitForAll() returns. `digest`: of all of it, when it was made from the old one, for
  // ranks to be compared; 0 else.
  std::vector<client::Ticket> BeginPut(uint32_t tensor, uint64_t region_offset, uint64_t digest);
  absl::Status WaitForAll(std::span<const client::Ticket> tickets);
  // Ends the puts of a weight; of ranks after the first, whose bytes do not count: waits for those
  // of the first. Nothing for one that is alone.
  absl::Status EndPut(uint32_t tensor, uint64_t digest);

  // Reads elements of a plane in order, several blocks in flight, through the staging buffer.
  // `drain` gets them in memory that is lent for the call.
  using Drain =
      absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, const std::byte* bytes)>;
  absl::Status StreamOut(uint32_t tensor, proto::Plane plane, uint64_t element_bytes, Drain drain);
  // All of them, in order, to `target`.
  absl::Status CopyOut(uint32_t tensor, proto::Plane plane, uint64_t element_bytes,
                       std::byte* target);
  // Puts a plane whose bytes are anywhere: `fill` copies elements [begin, begin + count) of it.
  using Fill = absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, std::byte* target)>;
  absl::Status StreamIn(uint32_t tensor, proto::Plane plane, Fill fill, uint64_t digest);
  // The same of several tensors, behind each other: `fill` is told which of them.
  using FillOf = absl::FunctionRef<absl::Status(size_t index, uint64_t begin, uint64_t count,
                                                std::byte* target)>;
  absl::Status StreamInAll(std::span<const uint32_t> tensors, proto::Plane plane, FillOf fill,
                           uint64_t digest);
  // A weight. With several ranks all of them call it; `digest` as for BeginPut().
  absl::Status StreamIn(uint32_t tensor, Fill fill, uint64_t digest);
  absl::Status StreamIn(uint32_t tensor, const std::byte* bytes, uint64_t digest);
  // A weight or master is put by somebody who does it himself.
  void NotePut(uint32_t tensor);
  // Tensors whose weights or masters were put since the last EndEpoch(), which no epoch has.
  std::vector<uint32_t> PutSinceEpoch();
  // What was put is part of one (a step, the end of a load), or is gone with the session.
  void EndEpoch();

  // ---- Weights that are put behind the operator that wrote them ----
  // The newest. Returns the one whose put is to begin now, if any.
  LatePut* AddLate(LatePut* put);
  void ForgetLate(LatePut* put);
  // Those that are too many.
  void EndOldestLate();

  // ---- The device of the parameters; null for the host ----
  void SetDevice(std::shared_ptr<DeviceMemory> device) { device_ = std::move(device); }
  DeviceMemory* device() const { return device_.get(); }

  // ---- Room that operations share ----
  // Of the window, while a weight is in use; 0 for one that always has a place.
  uint64_t WindowBytes(uint32_t tensor) const;
  // See Residency::BeginHolding().
  bool BeginHolding(size_t count, uint64_t size_bytes);
  void EndHolding() { is_held_.store(false, std::memory_order_release); }

  // ---- Raw pointers ----
  void SetServesRaw(bool serves) { serves_raw_ = serves; }
  bool serves_raw() const { return serves_raw_; }
  // Makes room for the bytes of one more, which is said once; the oldest go.
  void BeginRaw(RawUser* user);
  void ForgetRaw(RawUser* user);
  // All of them, and all that is put behind operators: the step comes, or somebody reads what the
  // daemon has.
  void EndRaw();
  // Room for the masters of weights that were edited, until the step; beside `ram`, like the bytes
  // of raw pointers and as much.
  bool KeepMaster(uint64_t size_bytes);
  void DropMaster(uint64_t size_bytes) { kept_master_bytes_ -= size_bytes; }
  uint64_t raw_accesses() const { return raw_accesses_.load(std::memory_order_relaxed); }

  void Close();
  // Why it will be closed, if not because somebody asks for it.
  void SetEndReason(std::string reason) { end_reason_ = std::move(reason); }
  // The OFD-1802 of an engine that is closed.
  absl::Status Ended(const std::string& subject) const;

 private:
  // For a session that has no plan yet.
  void BeginRoom();
  bool EndOneLate();
  void EndLate();

  std::unique_ptr<client::Session> session_;
  const client::World world_;
  std::optional<Staging> staging_;  // of the session, like what follows
  std::shared_ptr<ScratchSpace> scratch_;
  HomeRanges homes_;
  std::string end_reason_;
  std::recursive_mutex seal_mutex_;
  std::function<void()> seal_;
  std::exception_ptr seal_failure_;
  std::atomic<bool> sealed_{false};
  PlanInput input_;
  Plan plan_;
  uint64_t window_bytes_ = 0, largest_slot_bytes_ = 0, raw_bytes_max_ = 0;
  std::atomic<bool> is_held_{false};
  std::atomic<uint64_t> kept_master_bytes_ = 0;
  bool serves_raw_ = true;
  std::mutex raw_mutex_;
  std::list<RawUser*> raw_users_;  // oldest first
  PlacesOwner places_;             // of the session
  std::atomic<uint64_t> raw_accesses_{0};
  std::mutex put_mutex_;
  std::set<uint32_t> put_;
  std::mutex late_mutex_;
  std::list<LatePut*> late_;    // oldest first
  LatePut* waiting_ = nullptr;  // the last of them, whose put has not begun
  std::mutex schedule_mutex_;
  std::unique_ptr<Schedule> schedule_;
  std::shared_ptr<DeviceMemory> device_;  // uses the session and the staging buffer
};

// Forward with gradients, and all of backward; evaluation is not part of a step.
bool IsTraining();

// The OFD-1802 of a closed engine.
absl::Status SessionEnded(const std::string& subject);

}  // namespace offload::zero3
