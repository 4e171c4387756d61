// proto/shm_abi.h
//
// Every word of the two shared memories of a session: the job's slab (written by the daemon,
// read-only to ranks) and the rank's region (written by the rank, read by the daemon after
// copying). proto/DESIGN.md explains the protocol.
//
// Rules: plain data with fixed offsets, little endian; one writer per word; sizes and offsets are
// agreed in messages and kept privately, never read back from shared memory; the daemon copies an
// entry once, validates the copy, uses only the copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "proto/plane_set.h"

namespace offload::proto {

inline constexpr uint32_t kProtocolVersion = 5;

// ---- The slab -----------------------------------------------------------------------------------
inline constexpr uint32_t kSlabMagic = 0x534c464f;  // "OFLS"

// At offset 0 of the slab. The daemon writes; relaxed loads, except `failure`, which is published
// with release.
struct SlabHeader {
  uint32_t magic;
  uint32_t version;
  std::atomic<uint64_t> bytes_read;  // from the drive, by this daemon for this job
  std::atomic<uint64_t> bytes_written;
  std::atomic<uint64_t> resident_bytes;  // of tensors and buffers in use in slab and region
  std::atomic<uint64_t> peak_bytes;
  std::atomic<uint64_t> computed_nanoseconds;  // processor time that computations for it took
  std::atomic<uint64_t> durable_step;          // the last committed epoch
  std::atomic<uint64_t> updated_step;          // the last step all of whose updates are computed
  std::atomic<uint32_t> failure;  // ≠ 0: the job has failed with this OFD number; text below
  char failure_text[1024];
};
static_assert(std::is_standard_layout_v<SlabHeader> && sizeof(SlabHeader) <= 4096);

// Of the tensor words in every slab (SlabLayout::tensor_words_offset).
inline constexpr uint64_t kTensorWordsOffset = 4096;

// One word per tensor, at SlabLayout::tensor_words_offset: state in the low 8 bits, above it the
// slab offset of the weights / 64.
//   kAbsent    not in the slab: submit kAcquire.
//   kResident  the bytes at the offset are the tensor's, and stay so while its pin word is not
//              zero.
//   kPending   an update (or a load) is outstanding: submit kAcquire, which completes when the
//              tensor is resident again.
//
// The daemon evicts in three moves: store kAbsent, look at the pin words of all ranks, and put
// kResident back if one is not zero. A rank acquires in three moves: pin, load the word, use the
// bytes if kResident, else submit kAcquire *keeping the pin*. Both use sequentially consistent
// operations on both words, so one of the two sees the other.
enum TensorState : uint8_t { kAbsent = 0, kResident = 1, kPending = 2 };
using TensorWord = std::atomic<uint64_t>;
inline constexpr uint64_t MakeTensorWord(TensorState state, uint64_t offset_bytes) {
  return (offset_bytes / 64) << 8 | state;
}
inline constexpr TensorState StateOf(uint64_t word) {
  return static_cast<TensorState>(word & 0xff);
}
inline constexpr uint64_t OffsetOf(uint64_t word) { return (word >> 8) * 64; }

// With several ranks, one word per tensor at SlabLayout::gradient_words_offset, written by the
// daemon (release): bits in the low 4, the pass of the first part (modulo 16) above them, then the
// number of the step (modulo 2^24), and torch's 2-norm of the sum as the bits of an fp32 number in
// the upper half.
enum GradientBits : uint8_t {
  kGradientExists = 1,  // some rank has delivered a part for this step
  kGradientFinal = 2,   // no rank adds to it any more
  kGradientFinite = 4,  // when final: no NaN, no infinity
  kGradientNorm = 8,    // the upper half is valid
};
using GradientWord = std::atomic<uint64_t>;
// Of the gradient words of a job with several ranks: a page behind the tensor words.
inline constexpr uint64_t GradientWordsOffset(uint64_t tensor_count) {
  return kTensorWordsOffset + (tensor_count * sizeof(TensorWord) + 4095) / 4096 * 4096;
}
inline constexpr uint64_t MakeGradientWord(uint8_t bits, uint64_t step, uint32_t norm_bits,
                                           uint32_t first_pass = 0) {
  return uint64_t{norm_bits} << 32 | (step & 0xffffff) << 8 | (first_pass & 15) << 4 | bits;
}
inline constexpr uint8_t GradientBitsOf(uint64_t word) { return word & 15; }
// Whether the first part is of pass `pass` or of one of the seven before it, rather than of one of
// the eight behind it: a rank that has ended `pass` may read the word after others have gone on.
inline constexpr bool HasBegunBy(uint64_t word, uint32_t pass) {
  return ((pass - static_cast<uint32_t>(word >> 4)) & 15) < 8;
}
inline constexpr uint32_t GradientStepOf(uint64_t word) {
  return static_cast<uint32_t>(word >> 8) & 0xffffff;
}
inline constexpr uint32_t GradientNormOf(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

// ---- The region ---------------------------------------------------------------------------------
inline constexpr uint32_t kRegionMagic = 0x524c464f;  // "OFLR"
inline constexpr uint32_t kSubmissionEntries = 1024;  // powers of two
inline constexpr uint32_t kCompletionEntries = 2048;  // ≥ what a rank may have in flight
inline constexpr uint32_t kInFlightMax = 1024;        // submitted and not completed, per session

// At offset 0 of the region. Cursors run freely (modulo 2^32); index = cursor mod entries.
struct RegionHeader {
  uint32_t magic;
  uint32_t version;
  // Who writes each, with release: entries before a tail are written, those before a head may be
  // reused.
  alignas(64) std::atomic<uint32_t> submission_tail;  // rank
  alignas(64) std::atomic<uint32_t> submission_head;  // daemon
  alignas(64) std::atomic<uint32_t> completion_tail;  // daemon
  alignas(64) std::atomic<uint32_t> completion_head;  // rank
  // Set (seq_cst) by a side before it sleeps on its doorbell, after which it looks at the ring once
  // more; the other side rings only when it finds the word set, and clears it.
  alignas(64) std::atomic<uint32_t> daemon_sleeping;
  alignas(64) std::atomic<uint32_t> rank_sleeping;
  // Where the rank is in the schedule that it last sent (index of the next touch). A hint for
  // eviction and update order.
  alignas(64) std::atomic<uint32_t> schedule_position;
};
static_assert(std::is_standard_layout_v<RegionHeader> && sizeof(RegionHeader) <= 4096);

// Pin words: one 32-bit count per tensor at the offset agreed in Seal (0 before). Written by the
// rank only.
using PinWord = std::atomic<uint32_t>;

enum class RingOperation : uint32_t {
  kNop = 0,
  // tensor: completes when it is resident and up to date; the rank holds a pin. value: the tensor
  // word.
  kAcquire = 1,
  // tensor: as kAcquire without pin, and only if that evicts nothing needed sooner; completes at
  // once.
  kPrefetch = 2,
  // tensor, plane, element_offset, element_count, region_offset: values of the plane replace the
  // stored ones. kWeight (working dtype): the master becomes the value, residual zero, moments
  // kept. kMaster (fp32, of a bf16 or fp16 tensor that is trained): weight and residual, moments
  // kept. kState… (fp32, of an fp64 tensor fp64): that plane alone. Waits for the commit of the
  // last step. Completes when the bytes are taken; durable with the next Step or EndLoad
  // (offload.proto), else dropped when the job ends. With several ranks, digest: of the whole
  // tensor as it is put, when it was made from the old one; a sequence of puts is refused when
  // another rank, which follows it with a put of no elements, has another digest or none.
  kPut = 3,
  // As kPut, the other way: bytes of any plane as of the last step; plane kMaster: masters, in fp32
  // (of an fp64 tensor fp64).
  kGet = 4,
  // scratch_offset, length_bytes, region_offset, all multiples of 4096.
  kScratchWrite = 5,
  kScratchRead = 6,

  // With several ranks, the sum of a tensor's gradient is the daemon's (proto/DESIGN.md, "Gradients
  // of several ranks").
  //
  // element_offset: the number of the step that begins. The rank has let go of the sums of the step
  // before; completes at once.
  kBeginGradients = 7,
  // tensor, pass, start, element_offset, element_count, region_offset: a part of the rank's
  // gradient of backward pass `pass`. Completes when it has been added.
  kGradient = 8,
  // pass, start = 1: wait. The rank's backward pass has ended: what it has not delivered for this
  // pass does not exist. Completes at once, or, with wait, when every other rank has ended the
  // pass, too, or has no more passes.
  kEndPass = 9,
  // tensor, pass: the passes that the rank has made. The rank looks: it makes no further pass
  // before it has an answer. Completes when no rank adds to the sum any more. value: the gradient
  // word.
  kAwaitGradient = 10,
  // tensor, element_offset: the bits of torch's 2-norm of the sum, as fp32. Completes at once.
  kPublishNorm = 11,

  // tensor: its gradient is probably the one that the step takes that BeginStep (offload.proto) has
  // announced, and its update may begin. A hint: what is taken is what the step says. Completes at
  // once.
  kReleaseGradient = 12,

  // element_count: the bytes of the step command (kStepCommandOffset), a StepRequest
  // (offload.proto). The call of the same name without a message: it is made for every step, and a
  // command is nearly always short. kStep completes when Step would answer; value: the durable
  // step. kBeginStep completes at once, and the next command is written after that.
  kStep = 13,
  kBeginStep = 14,
};
// kGradient: what the gradient of a step begins with.
enum class GradientStart : uint32_t {
  kNothing = 0,   // with the first part (`.grad` was not defined)
  kZeros = 1,     // with zeros, to which the first part is added (zero_() was called)
  kPrevious = 2,  // with the sum of the step before (nothing was called)
};
struct SubmissionEntry {
  uint64_t tag;  // the rank's, returned with the completion
  RingOperation operation;
  uint32_t tensor;
  Plane plane;
  uint32_t pass;  // kGradient, kEndPass, kAwaitGradient: counted from 0 in every step
  // kPut, kGet: a multiple of kExtentElements; kScratch…: scratch offset in bytes.
  uint64_t element_offset;
  // kPut, kGet: ≤ kExtentElements, up to the tensor's end; kScratch…: length in bytes, ≤ 16 MiB;
  // kStep, kBeginStep: length in bytes, ≤ kStepCommandBytes.
  uint64_t element_count;
  uint64_t region_offset;  // multiple of 4096; the buffer ends inside the region
  GradientStart start;     // kGradient; kEndPass: 1 to wait
  uint32_t reserved1;      // 0
  uint64_t digest;         // kPut of several ranks; 0: not made from the old values
};
static_assert(std::is_trivially_copyable_v<SubmissionEntry> && sizeof(SubmissionEntry) == 64);

struct CompletionEntry {
  uint64_t tag;
  uint64_t value;
  int32_t code;   // absl::StatusCode; 0: done. The text is to be had by Control.ExplainFailure(tag)
  int32_t error;  // OFD number, 0 when there is none
  uint64_t reserved;
};
static_assert(std::is_trivially_copyable_v<CompletionEntry> && sizeof(CompletionEntry) == 32);

// Offsets of the region's fixed part; the rest (pins, staging, gradients) is the planner's.
inline constexpr uint64_t kSubmissionRingOffset = 4096;
inline constexpr uint64_t kCompletionRingOffset =
    kSubmissionRingOffset + kSubmissionEntries * sizeof(SubmissionEntry);
// What kStep and kBeginStep say; a command that is longer goes by gRPC.
inline constexpr uint64_t kStepCommandOffset =
    kCompletionRingOffset + kCompletionEntries * sizeof(CompletionEntry);
inline constexpr uint64_t kStepCommandBytes = 16 << 10;
inline constexpr uint64_t kRegionFixedBytes = kStepCommandOffset + kStepCommandBytes;
static_assert(kRegionFixedBytes % 4096 == 0);
// Allocated at open, before there is a plan: staging for loading and building a model, right after
// the fixed part.
inline constexpr uint64_t kLoadingStagingBytes = 8ull << 20;

}  // namespace offload::proto
