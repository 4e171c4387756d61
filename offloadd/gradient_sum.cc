#include "offloadd/gradient_sum.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "proto/gradient_slices.h"

namespace offload::daemon {
namespace {

using proto::GradientHome;
using proto::GradientStart;
using proto::RingOperation;

// So little is added on the loop: a worker would take longer to begin.
constexpr uint64_t kElementsOnLoopMax = 8192;

kernels::SumStart KernelStart(GradientStart start) {
  switch (start) {
    case GradientStart::kNothing:
      return kernels::SumStart::kNothing;
    case GradientStart::kZeros:
      return kernels::SumStart::kZeros;
    case GradientStart::kPrevious:
      break;
  }
  return kernels::SumStart::kSum;
}

uint64_t SizeBytes(uint64_t elements, proto::Dtype dtype) {
  return elements * proto::DtypeBytes(dtype);
}

}  // namespace

GradientSum::GradientSum(JobContext* context, uint64_t step, UpdateWanted update_wanted)
    : context_(context),
      update_wanted_(std::move(update_wanted)),
      factor_(context->gradient_sum ? 1.0 : 1.0 / context->plan.world_size),
      order_(&context->catalogue, context->plan.world_size, step) {
  for (uint32_t i = context->plan.sum_blocks; i > 0; --i) {
    free_blocks_.push_back(context->slab + context->layout.sum_blocks_offset +
                           (i - 1) * context->layout.sum_block_bytes);
  }
  sum_bytes_ = proto::PaddedBytes(context->catalogue.tensors.size() * sizeof(proto::GradientWord));
  uint32_t extents = 0;
  for (size_t i = 0; i < context->catalogue.tensors.size(); ++i) {
    const proto::Tensor& tensor = context->catalogue.tensors[i];
    const GradientHome home = context->plan.gradients[i].home;
    first_extent_.push_back(extents);
    if (home == GradientHome::kSlab)
      sum_bytes_ += proto::PaddedBytes(SizeBytes(tensor.element_count, tensor.dtype));
    if (home == GradientHome::kSlabScratch) extents += proto::ExtentCount(tensor.element_count);
  }
  written_.resize(extents, false);
}

uint64_t GradientSum::resident_bytes() const {
  const uint64_t blocks = context_->plan.sum_blocks - free_blocks_.size();
  return sum_bytes_ + blocks * context_->layout.sum_block_bytes;
}

// ---- What ranks say ----------------------------------------------------------------------------

bool GradientSum::Takes(RingOperation operation) {
  return operation >= RingOperation::kBeginGradients && operation <= RingOperation::kPublishNorm;
}

void GradientSum::Handle(uint32_t rank, const proto::SubmissionEntry& entry) {
  if (const absl::Status status = Submit(rank, entry); !status.ok()) {
    context_->complete(rank, entry.tag, status, 0);
    return context_->fail(status);
  }
  Flush();
}

absl::Status GradientSum::Submit(uint32_t rank, const proto::SubmissionEntry& entry) {
  const GradientOrder::Ticket ticket{
      .rank = rank, .tag = entry.tag, .region_offset = entry.region_offset};
  switch (entry.operation) {
    case RingOperation::kBeginGradients: {
      absl::Status status = order_.Begin(rank, entry.element_offset);
      if (status.ok()) Answer(ticket);
      return status;
    }
    case RingOperation::kGradient:
      return SubmitPart(ticket, entry);
    case RingOperation::kEndPass:
      return order_.EndPass(entry.pass, entry.start != GradientStart::kNothing, ticket);
    case RingOperation::kAwaitGradient:
      return order_.Look(entry.tensor, entry.pass, ticket);
    case RingOperation::kPublishNorm:
      order_.PublishNorm(entry.tensor, static_cast<uint32_t>(entry.element_offset));
      Answer(ticket);
      return absl::OkStatus();
    default:
      break;
  }
  OFFLOAD_CHECK(false) << "operation " << static_cast<uint32_t>(entry.operation);
  return absl::OkStatus();
}

// Fewer elements than the extent has are the rank's slice of the sum.
absl::Status GradientSum::SubmitPart(GradientOrder::Ticket ticket,
                                     const proto::SubmissionEntry& entry) {
  const auto extent = static_cast<uint32_t>(entry.element_offset / proto::kExtentElements);
  const uint64_t elements =
      proto::ExtentElements(context_->catalogue.tensors[entry.tensor].element_count, extent);
  ticket.is_slice = entry.element_count != elements;
  if (ticket.is_slice) {
    const uint32_t ranks = context_->plan.world_size;
    const bool is_own = proto::CanBeSliced(elements, ranks) &&
                        entry.element_offset % proto::kExtentElements ==
                            proto::SliceBegin(elements, ranks, ticket.rank) &&
                        entry.element_count == proto::SliceElements(elements, ranks, ticket.rank);
    if (!is_own || context_->plan.gradients[entry.tensor].home != GradientHome::kSlab) {
      return MakeError(
          ErrorId::kProtocol,
          absl::StrCat(
              "rank ", ticket.rank, " delivers ", entry.element_count, " elements at ",
              entry.element_offset, " of \"", context_->catalogue.tensors[entry.tensor].name,
              is_own ? "\", whose sum is not in the slab" : "\", which are not its slice"));
    }
  }
  return order_.Deliver(entry.tensor, extent, entry.pass, entry.start, ticket);
}

void GradientSum::Step(uint32_t rank) {
  order_.Step(rank);
  Flush();
}

void GradientSum::CancelStep() {
  order_.CancelStep();
  Flush();
}

void GradientSum::BeginNextStep(std::span<const uint32_t> updated) {
  order_.BeginNextStep(updated);
}

void GradientSum::UpdateComputed(std::span<const uint32_t> tensors) {
  for (const uint32_t tensor : tensors) order_.UpdateComputed(tensor);
  Flush();
}

// The ones that are on their way answer when they come back.
void GradientSum::FailQueued(const absl::Status& status) {
  for (const SweepPointer& sweep : std::exchange(for_blocks_, {})) {
    --under_way_;
    for (const GradientOrder::Ticket& part : sweep->addition.parts)
      context_->complete(part.rank, part.tag, status, 0);
  }
  for (const GradientOrder::Ticket& ticket : order_.TakeTickets())
    context_->complete(ticket.rank, ticket.tag, status, 0);
}

void GradientSum::Answer(const GradientOrder::Ticket& ticket, uint64_t value) {
  context_->complete(ticket.rank, ticket.tag, context_->failure, value);
}

void GradientSum::AnswerParts(Sweep& sweep) {
  for (const GradientOrder::Ticket& part : sweep.addition.parts) Answer(part);
  sweep.addition.parts.clear();
}

// ---- Doing what the order says -----------------------------------------------------------------

// Additions that are done on the spot may lead to further ones: a loop, not a recursion.
void GradientSum::Flush() {
  if (flushing_ || context_->failed()) return;
  flushing_ = true;
  StartSpilled();  // a block may be free again
  for (std::vector<GradientOrder::Addition> additions = order_.TakeAdditions();
       !additions.empty() && !context_->failed(); additions = order_.TakeAdditions()) {
    for (GradientOrder::Addition& addition : additions) {
      ++under_way_;
      const SweepPointer sweep = MakeSweep(std::move(addition));
      if (sweep->is_spilled) {
        for_blocks_.push_back(sweep);
      } else {
        Compute(sweep);
      }
    }
    StartSpilled();
  }
  flushing_ = false;
  if (context_->failed())
    return FailQueued(context_->failure);  // also what the order gave meanwhile
  if (!order_.fault().ok()) return context_->fail(order_.fault());
  StoreWords();
  for (const GradientOrder::Answer& answer : order_.TakeAnswers())
    Answer(answer.ticket, answer.value);
  for (const uint32_t tensor : order_.TakeWanted())
    update_wanted_(context_->catalogue.placements[tensor].store_tensor);
}

GradientSum::SweepPointer GradientSum::MakeSweep(GradientOrder::Addition addition) const {
  auto sweep = std::make_shared<Sweep>();
  const proto::Tensor& tensor = context_->catalogue.tensors[addition.tensor];
  const proto::GradientPlacement& home = context_->plan.gradients[addition.tensor];
  const uint64_t begin_bytes =
      SizeBytes(uint64_t{addition.extent} * proto::kExtentElements, tensor.dtype);
  sweep->elements = proto::ExtentElements(tensor.element_count, addition.extent);
  sweep->dtype = tensor.dtype;
  sweep->is_spilled = home.home == GradientHome::kSlabScratch;
  sweep->scratch_offset = home.offset_bytes + begin_bytes;
  if (!sweep->is_spilled) {
    sweep->sum = context_->slab + context_->layout.sum_offset[addition.tensor] + begin_bytes;
  }
  for (const GradientOrder::Ticket& part : addition.parts)
    sweep->parts.push_back(context_->ranks[part.rank].region + part.region_offset);
  sweep->addition = std::move(addition);
  return sweep;
}

// Slices have begun with what the start says already.
void GradientSum::Add(Sweep& sweep) const {
  const std::vector<GradientOrder::Ticket>& tickets = sweep.addition.parts;
  kernels::SumStart start = KernelStart(sweep.addition.start);
  for (size_t part = 0; part < tickets.size();) {
    size_t end = part + 1;
    bool finite = true;
    if (tickets[part].is_slice) {
      finite = PutSlice(sweep, part);
    } else {
      while (end < tickets.size() && !tickets[end].is_slice) ++end;
      finite = AddParts(sweep, part, end, start);
    }
    sweep.finite = sweep.finite && finite;
    start = kernels::SumStart::kSum;
    part = end;
  }
}

bool GradientSum::AddParts(const Sweep& sweep, size_t begin, size_t end,
                           kernels::SumStart start) const {
  return kernels::AddParts({.dtype = sweep.dtype,
                            .count = sweep.elements,
                            .sum = sweep.sum,
                            .start = start,
                            .parts = sweep.parts.data() + begin,
                            .part_count = end - begin,
                            .factor = factor_});
}

bool GradientSum::PutSlice(const Sweep& sweep, size_t part) const {
  const uint32_t ranks = context_->plan.world_size, rank = sweep.addition.parts[part].rank;
  const uint64_t begin = proto::SliceBegin(sweep.elements, ranks, rank);
  return kernels::AddParts({.dtype = sweep.dtype,
                            .count = proto::SliceElements(sweep.elements, ranks, rank),
                            .sum = sweep.sum + SizeBytes(begin, sweep.dtype),
                            .start = kernels::SumStart::kNothing,
                            .parts = sweep.parts.data() + part,
                            .part_count = 1});
}

void GradientSum::Compute(const SweepPointer& sweep) {
  if (!sweep->is_spilled && sweep->elements * sweep->parts.size() <= kElementsOnLoopMax) {
    Add(*sweep);
    return FinishCompute(sweep);
  }
  context_->Compute([this, sweep] { Add(*sweep); }, [this, sweep] { FinishCompute(sweep); });
}

void GradientSum::FinishCompute(const SweepPointer& sweep) {
  AnswerParts(*sweep);  // the regions' bytes are not needed any more
  if (!sweep->is_spilled || context_->failed()) return Finish(sweep, absl::OkStatus());
  context_->scratch->Write(
      sweep->scratch_offset,
      {sweep->sum, proto::PaddedBytes(SizeBytes(sweep->elements, sweep->dtype))},
      context_->Counted([this, sweep](const absl::Status& status) { Finish(sweep, status); }));
}

void GradientSum::Finish(const SweepPointer& sweep, const absl::Status& status) {
  --under_way_;
  if (sweep->is_spilled) free_blocks_.push_back(sweep->sum);
  if (!status.ok()) context_->fail(status);
  if (context_->failed()) return AnswerParts(*sweep);
  const GradientOrder::Addition& addition = sweep->addition;
  if (sweep->is_spilled) written_[first_extent_[addition.tensor] + addition.extent] = true;
  order_.Added(addition.tensor, addition.extent, sweep->finite);
  if (!flushing_) Flush();
}

// ---- Sums in the scratch file ------------------------------------------------------------------

void GradientSum::StartSpilled() {
  while (!for_blocks_.empty() && !free_blocks_.empty()) {
    const SweepPointer sweep = for_blocks_.front();
    for_blocks_.pop_front();
    sweep->sum = free_blocks_.back();
    free_blocks_.pop_back();
    ReadSpilled(sweep);
  }
}

// A sum that was never written is zeros, as in the slab.
void GradientSum::ReadSpilled(const SweepPointer& sweep) {
  GradientOrder::Addition& addition = sweep->addition;
  if (addition.start == GradientStart::kPrevious &&
      !written_[first_extent_[addition.tensor] + addition.extent])
    addition.start = GradientStart::kZeros;
  if (addition.start != GradientStart::kPrevious) return Compute(sweep);
  context_->scratch->Read(
      sweep->scratch_offset,
      {sweep->sum, proto::PaddedBytes(SizeBytes(sweep->elements, sweep->dtype))},
      context_->Counted([this, sweep](const absl::Status& status) {
        if (!status.ok() || context_->failed()) return Finish(sweep, status);
        Compute(sweep);
      }));
}

// ---- Words -------------------------------------------------------------------------------------

proto::GradientWord* GradientSum::word(uint32_t tensor) const {
  return reinterpret_cast<proto::GradientWord*>(context_->slab +
                                                context_->layout.gradient_words_offset) +
         tensor;
}

void GradientSum::StoreWords() {
  for (const uint32_t tensor : order_.TakeChanged())
    word(tensor)->store(order_.word(tensor), std::memory_order_release);
}

}  // namespace offload::daemon
