#include "proto/submission_reader.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::proto {
namespace {

constexpr uint64_t kScratchBytesMax = 16ull << 20;

absl::Status Fault(std::string_view field, uint64_t value, std::string_view why) {
  return MakeError(ErrorId::kProtocol, absl::StrCat("submission with ", std::string(field), " ",
                                                    value, ": ", std::string(why)));
}

// Fields that an operation does not use are zero, so that a later version may give them a meaning.
absl::Status ExpectZero(std::string_view field, uint64_t value) {
  return value == 0 ? absl::OkStatus() : Fault(field, value, "must be 0");
}

absl::Status CheckNoTransfer(const SubmissionEntry& entry) {
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("plane", static_cast<uint32_t>(entry.plane)));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_offset", entry.element_offset));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_count", entry.element_count));
  return ExpectZero("region_offset", entry.region_offset);
}

absl::Status CheckTensor(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  if (limits.catalogue == nullptr) return Fault("tensor", entry.tensor, "the job is not sealed");
  if (entry.tensor >= limits.catalogue->tensors.size()) {
    return Fault("tensor", entry.tensor,
                 absl::StrCat("the job has ", limits.catalogue->tensors.size()));
  }
  return absl::OkStatus();
}

// The rank's buffer: page aligned, behind the rings, inside what is allocated.
absl::Status CheckBuffer(uint64_t region_offset, uint64_t size_bytes,
                         const SubmissionLimits& limits) {
  if (!IsAligned(region_offset, kSectorBytes)) {
    return Fault("region_offset", region_offset, "not a multiple of 4096");
  }
  if (region_offset < kRegionFixedBytes) {
    return Fault("region_offset", region_offset, "the rings stand there");
  }
  if (!IsInside(region_offset, size_bytes, limits.region_bytes)) {
    return Fault("region_offset", region_offset,
                 absl::StrCat(size_bytes, " bytes there end outside the ", limits.region_bytes,
                              " of the region"));
  }
  return absl::OkStatus();
}

// Bytes of one element in the plane; 0 when the tensor has no such plane.
uint32_t PlaneElementBytes(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  return limits.catalogue->planes(entry.tensor).Bits(entry.plane) / 8;  // a tie bit gives none
}

// Masters of a tensor whose weights are the masters are put as weights.
bool CanBePut(Plane plane, const PlaneSet& planes) {
  return plane == Plane::kWeight || (plane == Plane::kMaster && planes.Has(Plane::kResidual)) ||
         std::find(kStatePlanes.begin(), kStatePlanes.end(), plane) != kStatePlanes.end();
}

absl::Status CheckTransfer(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(CheckTensor(entry, limits));
  const Tensor& tensor = limits.catalogue->tensors[entry.tensor];
  if (entry.operation == RingOperation::kPut &&
      !CanBePut(entry.plane, limits.catalogue->planes(entry.tensor))) {
    return Fault("plane", static_cast<uint32_t>(entry.plane),
                 "only weights, bf16 masters and what the optimizer keeps can be put");
  }
  const uint64_t element_bytes = PlaneElementBytes(entry, limits);
  if (element_bytes == 0) {
    return Fault("plane", static_cast<uint32_t>(entry.plane),
                 absl::StrCat("tensor ", entry.tensor, " has no such plane"));
  }
  if (!IsAligned(entry.element_offset, kExtentElements)) {
    return Fault("element_offset", entry.element_offset, "not the beginning of an extent");
  }
  if (entry.operation == RingOperation::kPut && entry.element_count == 0 &&
      limits.has_several_ranks) {
    OFFLOAD_RETURN_IF_ERROR(ExpectZero("plane", static_cast<uint32_t>(entry.plane)));
    OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_offset", entry.element_offset));
    return ExpectZero("region_offset", entry.region_offset);
  }
  if (entry.element_count == 0 || entry.element_count > kExtentElements) {
    return Fault("element_count", entry.element_count,
                 absl::StrCat("between 1 and ", kExtentElements));
  }
  if (!IsInside(entry.element_offset, entry.element_count, tensor.element_count)) {
    return Fault("element_offset", entry.element_offset,
                 absl::StrCat(entry.element_count, " elements there end outside the ",
                              tensor.element_count, " of tensor ", entry.tensor));
  }
  return CheckBuffer(entry.region_offset, entry.element_count * element_bytes, limits);
}

absl::Status CheckScratch(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("tensor", entry.tensor));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("plane", static_cast<uint32_t>(entry.plane)));
  const uint64_t offset = entry.element_offset;
  const uint64_t length = entry.element_count;
  if (!IsAligned(offset, kSectorBytes)) {
    return Fault("scratch offset", offset, "not a multiple of 4096");
  }
  if (length == 0 || length > kScratchBytesMax || !IsAligned(length, kSectorBytes)) {
    return Fault("scratch length", length, "a multiple of 4096 up to 16 MiB");
  }
  if (!IsInside(offset, length, limits.scratch_bytes)) {
    return Fault("scratch offset", offset,
                 absl::StrCat(length, " bytes there end outside the ", limits.scratch_bytes,
                              " of the scratch file"));
  }
  return CheckBuffer(entry.region_offset, length, limits);
}

absl::Status CheckStepCommand(const SubmissionEntry& entry) {
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("tensor", entry.tensor));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("plane", static_cast<uint32_t>(entry.plane)));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_offset", entry.element_offset));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("region_offset", entry.region_offset));
  return entry.element_count > 0 && entry.element_count <= kStepCommandBytes
             ? absl::OkStatus()
             : Fault("element_count", entry.element_count,
                     absl::StrCat("between 1 and ", kStepCommandBytes));
}

absl::Status CheckStart(const SubmissionEntry& entry, uint32_t most) {
  const auto start = static_cast<uint32_t>(entry.start);
  return start <= most ? absl::OkStatus() : Fault("start", start, absl::StrCat("at most ", most));
}

absl::Status CheckTrainable(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(CheckTensor(entry, limits));
  return limits.catalogue->tensors[entry.tensor].trainable
             ? absl::OkStatus()
             : Fault("tensor", entry.tensor, "a frozen one, without gradient");
}

// A part of a gradient: a whole extent, or a slice of one.
absl::Status CheckPart(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(CheckTrainable(entry, limits));
  OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, static_cast<uint32_t>(GradientStart::kPrevious)));
  const Tensor& tensor = limits.catalogue->tensors[entry.tensor];
  if (entry.element_offset >= tensor.element_count) {
    return Fault("element_offset", entry.element_offset,
                 absl::StrCat("the tensor has ", tensor.element_count));
  }
  const uint64_t elements = ExtentElements(
      tensor.element_count, static_cast<uint32_t>(entry.element_offset / kExtentElements));
  if (entry.element_count == 0 ||
      !IsInside(entry.element_offset % kExtentElements, entry.element_count, elements)) {
    return Fault("element_count", entry.element_count, absl::StrCat("the extent has ", elements));
  }
  return CheckBuffer(entry.region_offset, entry.element_count * DtypeBytes(tensor.dtype), limits);
}

absl::Status CheckNorm(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(CheckTrainable(entry, limits));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("pass", entry.pass));
  OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, 0));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_count", entry.element_count));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("region_offset", entry.region_offset));
  return entry.element_offset <= UINT32_MAX
             ? absl::OkStatus()
             : Fault("element_offset", entry.element_offset, "no bits of an fp32 number");
}

absl::Status CheckGradientOperation(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  if (!limits.adds_gradients) {
    return Fault("operation", static_cast<uint32_t>(entry.operation),
                 "gradients of this job are not added up by the daemon");
  }
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("plane", static_cast<uint32_t>(entry.plane)));
  if (entry.operation == RingOperation::kGradient) return CheckPart(entry, limits);
  if (entry.operation == RingOperation::kPublishNorm) return CheckNorm(entry, limits);
  if (entry.operation == RingOperation::kAwaitGradient) {
    OFFLOAD_RETURN_IF_ERROR(CheckTrainable(entry, limits));
    OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, 0));
    return CheckNoTransfer(entry);
  }
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("tensor", entry.tensor));
  if (entry.operation == RingOperation::kEndPass) {
    OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, 1));
    return CheckNoTransfer(entry);
  }
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("pass", entry.pass));
  OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, 0));
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("element_count", entry.element_count));
  return ExpectZero("region_offset", entry.region_offset);
}

bool IsGradientOperation(RingOperation operation) {
  return operation >= RingOperation::kBeginGradients && operation <= RingOperation::kPublishNorm;
}

}  // namespace

absl::Status CheckSubmission(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("reserved1", entry.reserved1));
  if (entry.operation != RingOperation::kPut || !limits.has_several_ranks)
    OFFLOAD_RETURN_IF_ERROR(ExpectZero("digest", entry.digest));
  if (IsGradientOperation(entry.operation)) return CheckGradientOperation(entry, limits);
  OFFLOAD_RETURN_IF_ERROR(ExpectZero("pass", entry.pass));
  OFFLOAD_RETURN_IF_ERROR(CheckStart(entry, 0));
  switch (entry.operation) {
    case RingOperation::kNop:
      OFFLOAD_RETURN_IF_ERROR(ExpectZero("tensor", entry.tensor));
      return CheckNoTransfer(entry);
    case RingOperation::kAcquire:
    case RingOperation::kPrefetch:
      OFFLOAD_RETURN_IF_ERROR(CheckTensor(entry, limits));
      return CheckNoTransfer(entry);
    case RingOperation::kReleaseGradient:
      OFFLOAD_RETURN_IF_ERROR(CheckTrainable(entry, limits));
      return CheckNoTransfer(entry);
    case RingOperation::kPut:
    case RingOperation::kGet:
      return CheckTransfer(entry, limits);
    case RingOperation::kScratchWrite:
    case RingOperation::kScratchRead:
      return CheckScratch(entry, limits);
    case RingOperation::kStep:
    case RingOperation::kBeginStep:
      return CheckStepCommand(entry);
    case RingOperation::kBeginGradients:
    case RingOperation::kGradient:
    case RingOperation::kEndPass:
    case RingOperation::kAwaitGradient:
    case RingOperation::kPublishNorm:
      break;
  }
  return Fault("operation", static_cast<uint32_t>(entry.operation), "unknown");
}

uint64_t TransferBytes(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  switch (entry.operation) {
    case RingOperation::kPut:
    case RingOperation::kGet:
      return entry.element_count * PlaneElementBytes(entry, limits);
    case RingOperation::kScratchWrite:
    case RingOperation::kScratchRead:
      return entry.element_count;
    case RingOperation::kNop:
    case RingOperation::kAcquire:
    case RingOperation::kPrefetch:
    case RingOperation::kBeginGradients:
    case RingOperation::kEndPass:
    case RingOperation::kAwaitGradient:
    case RingOperation::kPublishNorm:
    case RingOperation::kReleaseGradient:
    case RingOperation::kStep:
    case RingOperation::kBeginStep:
      return 0;
    case RingOperation::kGradient:
      return entry.element_count * DtypeBytes(limits.catalogue->tensors[entry.tensor].dtype);
  }
  return 0;
}

SubmissionReader::SubmissionReader(std::byte* region)
    : ring_(SubmissionEntriesOf(region), &HeaderOf(region)->submission_tail,
            &HeaderOf(region)->submission_head) {}

bool SubmissionReader::HasNext() const {
  const std::optional<uint32_t> available = ring_.Available();
  return !fault_.ok() || !available.has_value() || *available > 0;
}

absl::StatusOr<std::optional<SubmissionEntry>> SubmissionReader::Next() {
  if (!fault_.ok()) return fault_;
  absl::StatusOr<std::optional<SubmissionEntry>> next = TakeAndCheck();
  if (!next.ok()) fault_ = next.status();
  return next;
}

absl::StatusOr<std::optional<SubmissionEntry>> SubmissionReader::TakeAndCheck() {
  const std::optional<uint32_t> available = ring_.Available();
  if (!available.has_value()) {
    return MakeError(ErrorId::kProtocol, "submission_tail claims more entries than the ring has");
  }
  if (*available == 0) return std::nullopt;
  if (in_flight_ >= kInFlightMax) {
    return Fault("in flight", in_flight_ + 1, absl::StrCat("at most ", kInFlightMax));
  }
  const SubmissionEntry entry = ring_.Take();
  ring_.Publish();
  OFFLOAD_RETURN_IF_ERROR(CheckSubmission(entry, limits_));
  ++in_flight_;
  return entry;
}

void SubmissionReader::CountCompletion() {
  OFFLOAD_CHECK(in_flight_ > 0) << "a completion without submission";
  --in_flight_;
}

}  // namespace offload::proto
