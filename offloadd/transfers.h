// offloadd/transfers.h
//
// Serves puts and gets of the ranks' rings: bytes between a rank's region and the planes of a
// tensor.
//
// Invariants
//   * Transfers of one tensor run in the order in which they came, but for gets of a rank that has
//   yet to follow a put: those come before it. A put runs alone, and none while the tensor's update
//   is pending.
//   * A put becomes part of the open epoch. One of weights makes the written value the master, the
//   residual zero, and leaves what the optimizer keeps; one of bf16 masters replaces weight and
//   residual; one of a state plane replaces that alone. It is unsettled until the next step or the
//   end of a load, and dropped if neither comes; so it begins only after the commit of every step
//   before it, which has nothing of it. After partial steps, which no commit has either, it is of
//   tensors that those have not updated.
//   * Everything that the drive gave is verified before it reaches the rank.
//   * Of several ranks the first one's puts count. They come in sequences, each ended by a put of
//   no elements, and the k-th sequence of a tensor begins when every other rank has put no elements
//   of it for the k-th time (it follows: it does not read the old bytes any more), or waits in an
//   exchange; those are answered when the sequence has ended. What ranks have made of the old value
//   is the same on all of them, or nothing of the sequence is put (OFD-1606).
//   * Whoever puts or follows what another rank will not come to is told so (OFD-1805): at once
//   when that one takes a step, else when it has waited for this one for room_timeout_seconds.
//
// Thread safety: the loop's thread only; computations run on workers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
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
  void Add(uint32_t rank, const proto::SubmissionEntry& entry);
  // Starts what can be started. True while something waits for pins or updates.
  bool Turn();
  // Answers all that have not begun with why the job ends.
  void FailQueued(const absl::Status& status);
  bool idle() const { return queue_.empty() && in_flight_ == 0; }
  // True while a put waits or is under way.
  bool putting() const { return puts_ > 0; }
  // The rank has a transfer that has not begun, perhaps because others have to follow.
  bool Waits(uint32_t rank) const;

  // Writes all bundles into the open epoch of a store that is not published. `done` runs once.
  void WriteBundles(std::function<void(absl::Status)> done);

 private:
  struct Request {
    uint32_t rank;
    proto::SubmissionEntry entry;
  };
  // A transfer under way. Its extent is a whole one of the store; the rank's elements are those of
  // it that begin at BeginOf(entry).
  struct Transfer {
    uint32_t rank = 0;
    proto::SubmissionEntry entry;
    uint32_t store_tensor = 0;
    uint32_t index = 0;
    // Further puts of its plane into its bundle, in their order: the extent is written once for
    // all.
    std::vector<proto::SubmissionEntry> more;
    uint32_t elements = 0;  // of the extent
    MappedRegion buffer;    // for planes on their way; may be none
    ExtentPlanes planes;    // that are needed, wherever they are
    TieBits ties;           // as read; of a put what it makes of them
    uint32_t reads = 0;
    std::vector<std::pair<swap::ReadRequest, swap::Stamp>> wrong;  // not the bytes of their stamps
    absl::Status status;
    // Results of a put.
    ByPlane<uint32_t> crc;
    bool writes_residual = false;
    uint64_t sequence = 0;
  };
  using TransferPointer = std::shared_ptr<Transfer>;
  struct Users {
    uint32_t puts = 0, gets = 0;
  };
  // Of a tensor that several ranks have overwritten: how often.
  struct Follows {
    uint64_t ended = 0;                  // sequences of the first rank
    std::vector<uint64_t> counts;        // per rank
    std::vector<uint64_t> digests;       // per rank, of the last it follows
    std::optional<double> passed_since;  // when a put's missing rank was seen to wait for the first
  };
  // A call that waits for the first rank.
  struct Follower {
    uint32_t rank;
    uint64_t tag;
    uint32_t tensor;
    uint64_t sequence;
    std::optional<double> passed_since;  // when the first rank was seen to wait for this one
  };

  bool IsFollow(const proto::SubmissionEntry& entry) const;
  Follows& FollowsOf(uint32_t tensor);
  void Follow(uint32_t rank, const proto::SubmissionEntry& entry);
  void EndSequence(const Request& request, const absl::Status& status);
  void Refuse(const Request& request, const absl::Status& status);
  bool ReadsBeforeFollowing(const Request& request);
  absl::StatusOr<bool> IsFollowed(const Request& request);
  std::vector<std::pair<Follower, absl::Status>> FindLeftAlone(bool& may);
  void Refuse(const Follower& refused, const absl::Status& status);
  std::string PassesBy(uint32_t rank, uint32_t writer, std::optional<double>& since);
  absl::Status PassedBy(uint32_t writer, uint32_t tensor, uint32_t rank,
                        std::string_view instead) const;
  std::string WaitOf(uint32_t rank, uint32_t other);
  bool FirstPuts(uint32_t tensor) const;
  std::optional<uint32_t> FirstPutsWithout(uint32_t rank);
  const std::string& NameOf(uint32_t tensor) const;
  bool CanStart(const proto::SubmissionEntry& entry);
  bool CanPut();
  void Start(const Request& request);
  void TakeMore(Transfer& transfer);
  uint64_t BeginOf(const proto::SubmissionEntry& entry) const;
  bool IsWhole(const proto::SubmissionEntry& entry) const;
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
  void TakeFromRank(Transfer& transfer, const proto::SubmissionEntry& entry) const;
  void PutZeroResidual(Transfer& transfer, const proto::SubmissionEntry& entry) const;
  static void KeepTies(Transfer& transfer, absl::StatusOr<TieBits> ties);
  void TakeChecksum(Transfer& transfer, proto::Plane plane) const;
  void Write(const TransferPointer& transfer);
  void Finish(const TransferPointer& transfer, const absl::Status& status);
  absl::StatusOr<MappedRegion> TakeBuffer();

  JobContext* context_;
  WeightCache* cache_;
  ResidentState* state_;
  UpdateExecutor* executor_;
  std::deque<Request> queue_;
  std::unordered_map<uint32_t, Users> users_;      // by store tensor
  std::unordered_map<uint32_t, Follows> follows_;  // by tensor
  std::vector<Follower> followers_;
  uint32_t in_flight_ = 0;
  uint32_t puts_ = 0;  // queued and in flight
  uint32_t buffers_in_use_ = 0;
  std::vector<MappedRegion> free_buffers_;
};

}  // namespace offload::daemon
