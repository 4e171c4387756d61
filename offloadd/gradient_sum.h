// offloadd/gradient_sum.h
//
// Adds up the gradients of several ranks: takes what they submit, adds parts on workers in the
// order that gradient_order.h says, answers, and shows the state of every sum in its gradient word.
// Slices of sums, which ranks have added themselves, are put where they belong.
// A sum is in the slab, or, when its home is the scratch file, read, added to and written back
// extent by extent through a few blocks.
//
// Invariants
//   * A part is answered when its bytes in the rank's region are not needed any more.
//   * What a gradient word says was true of the bytes before the word was stored (release).
//   * An extent is read or written by one addition at a time, and by none while an update reads it.
//   * After the job has failed nothing more is added, and everything is answered with the failure.
//
// Thread safety: the loop's thread only; additions run on workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/sum.h"
#include "offloadd/gradient_order.h"
#include "offloadd/job_context.h"
#include "proto/shm_abi.h"

namespace offload::daemon {

class GradientSum {
 public:
  // Called when parts wait for the update of a store tensor.
  using UpdateWanted = std::function<void(uint32_t store_tensor)>;
  // Collects for the step after `step`. The context outlives the object, and is sealed.
  GradientSum(JobContext* context, uint64_t step, UpdateWanted update_wanted);

  // True for the operations that Handle() takes.
  static bool Takes(proto::RingOperation operation);
  // An operation that the submission reader has checked. Ranks that differ in what they may not
  // differ in fail the job.
  void Handle(uint32_t rank, const proto::SubmissionEntry& entry);
  // The rank has called for the step. Its ring has been read up to there.
  void Step(uint32_t rank);
  // Every rank steps and everything is added: the step can be taken or refused.
  bool IsSettled() const { return order_.IsSettled(); }
  // The step is refused: ranks may go on as after a look.
  void CancelStep();
  // The step is recorded; the sums of these tensors stay until their updates are computed.
  void BeginNextStep(std::span<const uint32_t> updated);
  void UpdateComputed(std::span<const uint32_t> tensors);

  // What a step needs to know. HasSum: some rank has given a part, in this step or before.
  bool HasSum(uint32_t tensor) const { return order_.HasSum(tensor); }
  bool IsFinite(uint32_t tensor) const { return order_.IsFinite(tensor); }
  // Of ranks that wait for sums, or for ends of passes.
  bool Waits(uint32_t rank) const { return order_.Waits(rank); }
  bool IsAheadOf(uint32_t rank, uint32_t other) const { return order_.IsAheadOf(rank, other); }
  std::vector<uint32_t> WaitedFor() const { return order_.WaitedFor(); }
  std::vector<uint32_t> PartsWaitFor() const { return order_.PartsWaitFor(); }
  uint64_t said(uint32_t rank) const { return order_.said(rank); }
  bool IsBehind(uint32_t rank) const { return order_.IsBehind(rank); }

  // Answers everything that has not begun; nothing more may be handled.
  void FailQueued(const absl::Status& status);
  bool idle() const { return under_way_ == 0; }
  // Sums, their words, and blocks in use.
  uint64_t resident_bytes() const;

 private:
  // An addition on its way.
  struct Sweep {
    GradientOrder::Addition addition;
    std::byte* sum = nullptr;  // in the slab: the sum itself, or the block that it passes through
    bool is_spilled = false;
    uint64_t scratch_offset = 0;
    uint32_t elements = 0;
    proto::Dtype dtype = proto::Dtype::kFloat32;
    std::vector<const void*> parts;
    bool finite = true;
  };
  using SweepPointer = std::shared_ptr<Sweep>;

  absl::Status Submit(uint32_t rank, const proto::SubmissionEntry& entry);
  absl::Status SubmitPart(GradientOrder::Ticket ticket, const proto::SubmissionEntry& entry);
  // Does what the order says, until it says nothing.
  void Flush();
  SweepPointer MakeSweep(GradientOrder::Addition addition) const;
  void StartSpilled();
  void ReadSpilled(const SweepPointer& sweep);
  void Compute(const SweepPointer& sweep);
  void FinishCompute(const SweepPointer& sweep);
  void Finish(const SweepPointer& sweep, const absl::Status& status);
  void AnswerParts(Sweep& sweep);
  void Answer(const GradientOrder::Ticket& ticket, uint64_t value = 0);
  void StoreWords();
  proto::GradientWord* word(uint32_t tensor) const;
  void Add(Sweep& sweep) const;  // on a worker
  bool AddParts(const Sweep& sweep, size_t begin, size_t end, kernels::SumStart start) const;
  bool PutSlice(const Sweep& sweep, size_t part) const;

  JobContext* const context_;
  const UpdateWanted update_wanted_;
  const double factor_;
  GradientOrder order_;
  bool flushing_ = false;
  uint64_t sum_bytes_ = 0;
  uint64_t under_way_ = 0;               // sweeps
  std::deque<SweepPointer> for_blocks_;  // spilled ones that wait
  std::vector<std::byte*> free_blocks_;
  std::vector<bool> written_;  // per extent of spilled tensors, at first_extent_: it is in scratch
  std::vector<uint32_t> first_extent_;
};

}  // namespace offload::daemon
