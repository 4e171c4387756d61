// offloadd/gradient_order.h
//
// In which order the gradients of several ranks are added, and when: pure policy. Who calls feeds
// it with what ranks say, adds what it says may be added, and answers whom it says.
//
// Words
//   * A *part* is one extent of one tensor's gradient from backward pass m of rank r. The sum of an
//   extent is the chain of its parts in the order (m, r): it depends on neither arrival nor memory.
//   * A *slice* is what ranks deliver in place of parts when they have added these themselves, on
//   their devices: rank r's slice of the sum up to and with pass m. It stands where the part of
//   (m, r) would. Of a pass and an extent all ranks deliver slices, or none.
//   * A *round* is what happens between two looks by all ranks: ranks enter it, make passes, and
//   close it by looking at a sum, by stepping, or by beginning anew. A round is *under way* when
//   every rank has entered it: only then have all let go of what the sums were before, and only
//   then is anything added.
//   * A *beginning* is a round in which sums begin with what their first part says (`start`): the
//   first of each step, and those in which trainers zeroed gradients without a step. Rounds that
//   follow because ranks went on after a look add to what is there.
//
// Invariants
//   * Of an extent at most one addition is under way, and its parts are added in the order of
//   (round, pass, rank).
//   * A part waits only for parts and ends of passes that stand before it in that order, for ranks
//   to enter its round, and for the update of its tensor. So it is always possible to add the
//   first, whatever ranks may hold back until others are added: no size of their rings leads to a
//   deadlock.
//   * A sum does not change between the moment when it is final and the moment when every rank has
//   entered the next round.
//
// Errors say which ranks differ in what. After one the sums mean nothing any more: the job fails.
//
// Thread safety: none; one owner.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::daemon {

class GradientOrder {
 public:
  // A submission of a rank, as whoever calls knows it.
  struct Ticket {
    uint32_t rank = 0;
    uint64_t tag = 0;
    uint64_t region_offset = 0;  // of a part; not looked at here
    bool is_slice = false;       // of a part: of the sum
  };
  // Parts that are added now, in one sweep.
  struct Addition {
    uint32_t tensor = 0, extent = 0;
    proto::GradientStart start = proto::GradientStart::kPrevious;  // of the sweep
    std::vector<Ticket> parts;                                     // in order
  };
  struct Answer {
    Ticket ticket;
    uint64_t value = 0;  // of a look: the gradient word
  };

  // Collects gradients for the step after `step`. The catalogue outlives the object.
  GradientOrder(const proto::Catalogue* catalogue, uint32_t world_size, uint64_t step);

  // ---- What ranks say. Each is answered by the next calls of Take…().
  absl::Status Begin(uint32_t rank, uint64_t step);
  absl::Status Deliver(uint32_t tensor, uint32_t extent, uint32_t pass, proto::GradientStart start,
                       const Ticket& ticket);
  // Answered at once, or, with `waits`, when the pass has ended for every other rank, too.
  absl::Status EndPass(uint32_t pass, bool waits, const Ticket& ticket);
  // Answered when the sum is final.
  absl::Status Look(uint32_t tensor, uint32_t passes, const Ticket& ticket);
  void PublishNorm(uint32_t tensor, uint32_t norm_bits);
  // The rank steps: it adds nothing more.
  void Step(uint32_t rank);

  // The step is refused. Ranks stand as after a look, and begin anew or go on.
  void CancelStep();

  // ---- What was done.
  // An addition that TakeAdditions() gave. `finite`: its new sum is.
  void Added(uint32_t tensor, uint32_t extent, bool finite);
  // The step that all ranks have called for is recorded, and will read the sums of these tensors
  // until UpdateComputed(). Requires IsSettled().
  void BeginNextStep(std::span<const uint32_t> updated);
  void UpdateComputed(uint32_t tensor);

  // ---- What is to be done. Each is handed out once.
  std::vector<Addition> TakeAdditions() { return std::exchange(additions_, {}); }
  std::vector<Answer> TakeAnswers() { return std::exchange(answers_, {}); }
  // Tensors whose parts wait for nothing but the update of the step before.
  std::vector<uint32_t> TakeWanted() { return std::exchange(wanted_, {}); }
  // Everybody who waits for anything: nothing more will be added.
  std::vector<Ticket> TakeTickets();
  // Tensors whose words are others than before.
  std::vector<uint32_t> TakeChanged();

  // ---- What is known.
  // What ranks differ in, where only the order of their parts shows it, or a step.
  const absl::Status& fault() const { return fault_; }
  // Every rank steps and everything is added.
  bool IsSettled() const;
  uint64_t word(uint32_t tensor) const;
  // The tensor has been given a gradient by some rank, now or in an earlier step.
  bool HasSum(uint32_t tensor) const { return tensors_[tensor].beginning != 0; }
  bool IsFinite(uint32_t tensor) const { return tensors_[tensor].finite; }
  // A look of the rank, or the end of a pass that it waits for, is not answered.
  bool Waits(uint32_t rank) const;
  // The rank waits so, or has given a part that cannot be added, for want of what `other` says: it
  // is further in its program.
  bool IsAheadOf(uint32_t rank, uint32_t other) const;
  // Ranks without which these are not answered; none when nobody waits.
  std::vector<uint32_t> WaitedFor() const;
  // Ranks without whose parts, or ends of passes, one that was delivered cannot be added; none when
  // there is no such part.
  std::vector<uint32_t> PartsWaitFor() const;
  // The rank has made passes for this step, but none since others have begun anew.
  bool IsBehind(uint32_t rank) const {
    return ranks_[rank].gave != 0 && ranks_[rank].gave < rounds_.back().beginning;
  }
  // How much a rank has said so far.
  uint64_t said(uint32_t rank) const { return ranks_[rank].said; }

 private:
  // Where a part stands in the chain of its extent.
  struct Position {
    uint64_t round = 0;
    uint32_t pass = 0, rank = 0;
    friend auto operator<=>(const Position&, const Position&) = default;
  };
  struct Part {
    Position position;
    uint64_t beginning = 0;  // of its round
    proto::GradientStart start = proto::GradientStart::kNothing;
    Ticket ticket;
  };
  struct Extent {
    Position last;        // that was added, or is being added
    uint32_t adding = 0;  // parts in the addition that is under way
    uint32_t slices = 0;  // of the pass of `last`, as long as some are missing
  };
  struct Tensor {
    uint32_t first_extent = 0, extent_count = 0;
    uint32_t held = 0;         // parts in parts_
    uint32_t unsettled = 0;    // these, and the ones that are being added
    uint64_t beginning = 0;    // in which it was given a gradient last; 0: never
    uint64_t step = 0;         // of that
    uint32_t first_pass = 0;   // of that, as far as parts have come
    uint32_t amid_slices = 0;  // extents of which some are missing
    uint8_t bits = 0;          // GradientBits
    uint32_t norm_bits = 0;
    bool finite = true;
    bool update_pending = false, update_wanted = false;
    // The first part of the beginning.
    struct {
      uint64_t beginning = 0;
      uint32_t pass = 0, rank = 0;
      proto::GradientStart start = proto::GradientStart::kNothing;
    } first;
  };
  // How a rank stands in a round.
  struct Stand {
    bool entered = false, closed = false;
    uint32_t ended = 0;  // passes, counted from the beginning
  };
  struct Round {
    uint64_t number = 0;
    uint64_t beginning = 0;  // the number of the round in which the sums begin
    std::vector<Stand> stands;
  };
  // What a rank has delivered of a tensor in its latest pass of it.
  struct Delivery {
    uint64_t round = 0;
    uint32_t pass = 0, next_extent = 0;
  };
  struct Rank {
    uint64_t round = 0;  // that it is in, or will enter
    bool steps = false;
    uint64_t said = 0;        // parts and ends
    uint64_t gave = 0;        // the beginning of its last pass of this step; 0: none
    uint32_t unfinished = 0;  // tensors of which it has delivered a part, but not all
    std::vector<Delivery> deliveries;
  };
  struct Wait {
    Ticket ticket;
    uint64_t round = 0;
    uint32_t pass = 0;    // of an end
    uint32_t tensor = 0;  // of a look
  };

  Round* FindRound(uint64_t number);
  const Round* FindRound(uint64_t number) const;
  Stand& StandOf(uint32_t rank) { return FindRound(ranks_[rank].round)->stands[rank]; }
  void AddRound(uint64_t beginning, uint32_t passes);
  absl::Status BeginAnew(uint32_t rank);
  absl::Status EnterForPass(uint32_t rank, uint32_t pass);
  absl::Status GoOn(uint32_t rank);
  void CompareStart(uint32_t tensor, const Part& part, bool is_first);
  void CountSlice(uint32_t tensor, const Part& part, Extent& extent);
  absl::Status CountExtent(uint32_t tensor, uint32_t extent, const Position& position);
  absl::Status PassesDiffer(uint32_t rank, const Round& round) const;

  bool HasEntered(const Round& round, uint32_t rank) const {
    return ranks_[rank].steps || round.stands[rank].entered;
  }
  bool HasClosed(const Round& round, uint32_t rank) const {
    return ranks_[rank].steps || round.stands[rank].closed;
  }
  bool HasPassed(uint64_t round, uint32_t rank, uint32_t pass) const;
  // A look, and the end of a pass, that is not answered before `rank` has said more.
  bool HoldsUpLook(uint32_t rank, const Wait& look) const;
  bool HoldsUpEnd(uint32_t rank, const Wait& end) const;
  bool IsBefore(uint32_t rank, const Position& last, const Position& position) const;
  bool IsNext(const Position& last, const Position& position) const;
  bool IsAddedUpTo(uint32_t tensor, uint64_t round) const;

  // The first pass of a round that has a part of the tensor.
  std::optional<uint32_t> FirstPassIn(uint32_t tensor, uint64_t round) const;

  // After anything that may let parts be added or waits end.
  void Advance();
  void StartRounds();
  void CloseRounds();
  void DropRounds();
  void AdvanceTensor(uint32_t tensor);
  void AdvanceExtent(uint32_t tensor, uint32_t extent);
  void MarkExisting(uint32_t tensor, uint64_t beginning, uint32_t pass);
  void MarkFinal(uint32_t tensor);
  void AnswerWaits();
  void SetBits(uint32_t tensor, uint8_t bits);

  const proto::Catalogue* catalogue_;
  uint64_t step_;             // that gradients are collected for
  std::deque<Round> rounds_;  // that some rank is in or will enter; never empty
  uint64_t under_way_ = 0;    // the last round that all ranks have entered
  uint64_t closed_ = 0;       // the last round that all ranks have closed
  std::vector<Rank> ranks_;
  std::vector<Tensor> tensors_;
  std::vector<Extent> extents_;
  absl::flat_hash_map<uint32_t, std::vector<Part>> parts_;  // by extent, in order; not being added
  std::set<uint32_t> waiting_;                              // tensors with parts in there
  uint64_t unsettled_ = 0;
  std::vector<Wait> ends_, looks_;
  std::vector<Addition> additions_;
  std::vector<Answer> answers_;
  std::vector<uint32_t> wanted_, changed_;
  absl::Status fault_;
};

}  // namespace offload::daemon
