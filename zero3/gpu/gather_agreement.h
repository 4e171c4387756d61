// zero3/gpu/gather_agreement.h
//
// Which weights the ranks of a node gather, and in which order. A gather needs all ranks, and no
// rank may wait for one that takes another path, evaluates alone or is at its end; so a rank offers
// to gather a weight and may take that back until all others have offered it, too. Who offers last
// puts it into the list of what is agreed, which every rank then issues, whole and in its order.
//
// Gradients whose slices are exchanged (slice_exchange.h) are items of the same list, since all
// collectives of a connection have one order; what has to be the same in all ranks is then a stamp
// of the pass in place of an offset. A rank that will not offer one says so, which spares the
// others a wait.
//
// The agreement lies in memory that the ranks share.
//
// Invariants
//   * All ranks see the same list. A weight is in it once for each time that all have offered it.
//   * Who offers holds a lease on the weight's bytes until it has copied its part of them, or has
//   taken the offer back. So when all have offered all hold leases, on one place of one slab
//   (`source_offset`): the parts are of one value.
//   * After Leave() or Fail() of any rank nothing more is agreed.
//
// Thread safety: all methods may be called from any thread of any rank's process. A process that
// ends amid one of them counts as Fail().
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace offload::zero3 {

class GatherAgreement {
 public:
  static constexpr uint32_t kRanksMax = 64;

  static size_t MemoryBytes(size_t tensor_count);
  // Makes an agreement in zeroed memory, before anybody opens it. All ranks map the same memory,
  // which outlives them.
  static void Format(std::span<std::byte> memory, size_t tensor_count, uint32_t world_size);

  GatherAgreement(std::span<std::byte> memory, uint32_t rank);
  GatherAgreement(const GatherAgreement&) = delete;
  GatherAgreement& operator=(const GatherAgreement&) = delete;

  // Offers a tensor that this rank has no offer of. False when it cannot be: somebody has left, or
  // has offered other bytes.
  bool Offer(uint32_t tensor, uint64_t source_offset);
  // This rank will not offer the tensor at `position` or before, which only grows.
  void Decline(uint32_t tensor, uint64_t position);
  // The same of all tensors.
  void Pass(uint64_t position);
  // Whether all ranks may yet offer it at `position`.
  bool MayBeAgreed(uint32_t tensor, uint64_t position) const;
  // Takes an offer back; false when it is agreed: it has to be issued.
  bool Withdraw(uint32_t tensor);
  // What this rank has to issue next; none when it has issued all that is agreed. Each is returned
  // once.
  std::optional<uint32_t> TakeNext();

  // This rank takes part no more, having issued all that is agreed (which the call does not undo).
  void Leave();
  bool HasLeft(uint32_t rank) const;
  // This rank cannot issue what is agreed.
  void Fail();
  // Who said so first; kRanksMax for one that ended amid a call.
  std::optional<uint32_t> FailedRank() const;

  // Counts what concerns others: agreements, failures, and what is declined or passed.
  uint32_t news() const;
  // Returns when it differs from `seen`, after `patience`, or sooner.
  void WaitForNews(uint32_t seen, std::chrono::milliseconds patience) const;

 private:
  struct Header;
  struct Entry;
  class Lock;

  bool IsOpen() const;
  void Announce();

  Header* const header_;
  Entry* const entries_;    // by tensor
  uint32_t* const agreed_;  // a ring of tensors
  const uint32_t rank_;
};

}  // namespace offload::zero3
