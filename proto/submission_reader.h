// proto/submission_reader.h
//
// Reads a rank's submissions: copies each entry once, checks every field of the copy against what
// daemon and rank agreed in messages, and hands out only values that passed. Nobody else in the
// daemon reads the submission ring.
//
// Invariants
//   * A returned entry is within all limits of proto/shm_abi.h: tensor, plane, ranges, alignment;
//   its fields can be used as they
//     are, its buffer lies in the allocated part of the region behind the rings.
//   * After the first fault every call returns that fault.
//
// A fault is OFD-1503 and names the field; it ends the session, never the daemon. What is well
// formed but cannot be done (a scratch file that is full, a job that has failed) is the daemon's to
// answer, with a completion.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/ring.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::proto {

// What a rank may name. The daemon's private knowledge, never read from shared memory.
struct SubmissionLimits {
  // The allocated part of the region, from its beginning; a multiple of 4096.
  uint64_t region_bytes = kRegionFixedBytes + kLoadingStagingBytes;
  uint64_t scratch_bytes = 0;
  // Null until Seal: operations on tensors are faults before. Outlives the reader.
  const Catalogue* catalogue = nullptr;
  // Puts of no elements end and follow sequences of them (offloadd/transfers.h).
  bool has_several_ranks = false;
  // The daemon adds up the gradients of several ranks; else operations on them are faults.
  bool adds_gradients = false;
};

// Checks one copied entry: known operation, ids, ranges, alignment, unused and reserved fields
// zero. Pure.
//
// kPut may cover a part of an extent (from its first element); kGet the same. Planes that the
// tensor does not have (PlaneSet) are refused, and so are tie bits, which are nobody's to see.
// kGradient covers a whole extent of a trainable tensor, or a slice of one; whose slice it is the
// reader does not know.
absl::Status CheckSubmission(const SubmissionEntry& entry, const SubmissionLimits& limits);

// Bytes that a checked kPut, kGet, kGradient or kScratch… moves; 0 for the other operations.
uint64_t TransferBytes(const SubmissionEntry& entry, const SubmissionLimits& limits);

class SubmissionReader {
 public:
  // `region` is the mapped region of a new session; not owned.
  explicit SubmissionReader(std::byte* region);

  const SubmissionLimits& limits() const { return limits_; }
  void SetLimits(const SubmissionLimits& limits) { limits_ = limits; }

  // Takes the next submission; missing when there is none. Errors: the fault of the rank.
  absl::StatusOr<std::optional<SubmissionEntry>> Next();

  // True when Next() would return something else than a missing value.
  bool HasNext() const;

  // Taken and not completed; more than kInFlightMax is a fault.
  uint32_t in_flight() const { return in_flight_; }
  // Tells that one taken submission was answered.
  void CountCompletion();

 private:
  absl::StatusOr<std::optional<SubmissionEntry>> TakeAndCheck();

  SubmissionConsumer ring_;
  SubmissionLimits limits_;
  uint32_t in_flight_ = 0;
  absl::Status fault_;
};

}  // namespace offload::proto
