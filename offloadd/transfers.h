// offloadd/transfers.h
//
// Serves puts, gets and scratch transfers of the rank's ring: bytes between its region and the
// planes of a tensor.
//
// Invariants
//   * Transfers of one tensor run in the order in which they came; a put runs alone, and none while
//   the tensor's update is pending.
//   * A put becomes part of the open epoch: the master is the written value, the residual zero, the
//   moments stay.
//   * Everything that the drive gave is verified before it reaches the rank.
//
// Thread safety: the loop's thread only; computations run on workers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mapped_region.h"
#include "offloadd/job_context.h"
#include "offloadd/resident_state.h"
#include "offloadd/update_executor.h"
#include "offloadd/weight_cache.h"
#include "proto/shm_abi.h"

namespace offload::daemon {

class Transfers {
 public:
  Transfers(JobContext* context, WeightCache* cache, ResidentState* state, UpdateExecutor* executor)
      : context_(context), cache_(cache), state_(state), executor_(executor) {}

  // Takes a checked kPut or kGet.
  void Add(const proto::SubmissionEntry& entry) { queue_.push_back(entry); }
  // Starts what can be started. True while something waits for pins or updates.
  bool Turn();
  // Answers all that have not begun with the job's failure.
  void FailQueued();
  bool idle() const { return queue_.empty() && in_flight_ == 0; }

  // Writes all bundles into the open epoch of a store that is not published. `done` runs once.
  void WriteBundles(std::function<void(absl::Status)> done);

 private:
  // A transfer under way. Its extent is a whole one of the store; the rank's elements are [begin,
  // begin + count) of it.
  struct Transfer {
    proto::SubmissionEntry entry;
    uint32_t store_tensor = 0;
    uint32_t index = 0;
    uint64_t begin = 0, count = 0;
    uint32_t elements = 0;  // of the extent
    MappedRegion buffer;    // for planes on their way; may be none
    ExtentPlanes planes;    // that are needed, wherever they are
    TieBits ties;
    uint32_t reads = 0;
    std::vector<std::pair<swap::ReadRequest, swap::Stamp>> wrong;  // not the bytes of their stamps
    absl::Status status;
    // Results of a put.
    uint32_t weight_crc = 0, residual_crc = 0;
    bool writes_residual = false;
    TieBits ties_out;
    uint64_t sequence = 0;
  };
  using TransferPointer = std::shared_ptr<Transfer>;
  struct Users {
    uint32_t puts = 0, gets = 0;
  };

  bool CanStart(const proto::SubmissionEntry& entry);
  void Start(const proto::SubmissionEntry& entry);
  void PlacePlanes(const TransferPointer& transfer);
  bool NeedsPlane(const Transfer& transfer, proto::Plane plane) const;
  void Read(const TransferPointer& transfer);
  void ReadTies(const TransferPointer& transfer);
  void FinishRead(const TransferPointer& transfer, const absl::Status& status);
  void Compute(const TransferPointer& transfer);
  void Verify(Transfer& transfer) const;
  void ReadAgain(const TransferPointer& transfer);
  void FailOne(const TransferPointer& transfer);
  void ComputeGet(Transfer& transfer) const;
  void MergeMaster(Transfer& transfer, std::byte* to) const;
  void ComputePut(Transfer& transfer) const;
  void Write(const TransferPointer& transfer);
  void Finish(const TransferPointer& transfer, const absl::Status& status);
  absl::StatusOr<MappedRegion> TakeBuffer();

  JobContext* context_;
  WeightCache* cache_;
  ResidentState* state_;
  UpdateExecutor* executor_;
  std::deque<proto::SubmissionEntry> queue_;
  std::unordered_map<uint32_t, Users> users_;  // by store tensor
  uint32_t in_flight_ = 0;
  uint32_t buffers_in_use_ = 0;
  std::vector<MappedRegion> free_buffers_;
};

}  // namespace offload::daemon
