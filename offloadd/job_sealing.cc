// Job's sealing: from the tensors and the plan that a rank declares to a store, reserved memory and
// the parts that work on them.

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "offloadd/environment.h"
#include "offloadd/job.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/limits.h"

namespace offload::daemon {

absl::Status Job::DeclareTensors(const std::vector<proto::v1::DeclareTensorsRequest>& messages,
                                 uint64_t* tensor_count) {
  if (sealed_) return MakeError(ErrorId::kProtocol, "DeclareTensors after Seal");
  for (const proto::v1::DeclareTensorsRequest& message : messages) {
    for (const proto::v1::Tensor& tensor : message.tensors()) {
      if (declared_.size() >= proto::kTensorsMax)
        return MakeError(ErrorId::kProtocol, "too many tensors");
      OFFLOAD_ASSIGN_OR_RETURN(proto::Tensor declared, TensorFromMessage(tensor));
      declared_.push_back(std::move(declared));
    }
  }
  *tensor_count = declared_.size();
  return absl::OkStatus();
}

absl::Status Job::ReserveScratch(uint64_t bytes) {
  if (context_.failed()) return context_.failure;
  if (bytes > kLimits.scratch_bytes_max) {
    return MakeError(ErrorId::kBadValue, absl::StrCat("scratch space of ", bytes, " bytes"));
  }
  OFFLOAD_RETURN_IF_ERROR(SetScratch());
  OFFLOAD_RETURN_IF_ERROR(scratch_->Reserve(bytes));
  scratch_bytes_ = std::max(scratch_bytes_, AlignDown(bytes, proto::kSectorBytes));
  UpdateLimits();
  return absl::OkStatus();
}

absl::Status Job::Seal(const std::vector<proto::v1::SealRequest>& messages,
                       const Progress& progress) {
  if (sealed_ || closing_) return MakeError(ErrorId::kProtocol, "Seal for the second time");
  // Until then the rank could take away pages that are reserved here.
  if (!rings_.has_value()) return MakeError(ErrorId::kProtocol, "Seal before the memory is mapped");
  OFFLOAD_RETURN_IF_ERROR(ReadPlan(messages));
  OFFLOAD_ASSIGN_OR_RETURN(context_.layout,
                           proto::ComputeSlabLayout(context_.catalogue, context_.plan));
  OFFLOAD_RETURN_IF_ERROR(CheckBudget());
  if (exists_) OFFLOAD_RETURN_IF_ERROR(CompareCatalogue());
  OFFLOAD_RETURN_IF_ERROR(ReserveMemory());
  if (context_.plan.scratch_bytes > 0)
    OFFLOAD_RETURN_IF_ERROR(ReserveScratch(context_.plan.scratch_bytes));
  if (!exists_) OFFLOAD_RETURN_IF_ERROR(CreateStore(progress));
  context_.published = exists_;
  MakeParts();
  if (context_.published) MakeScrubber();
  sealed_ = true;
  UpdateLimits();
  UpdateHeader();
  return absl::OkStatus();
}

absl::Status Job::ReadPlan(const std::vector<proto::v1::SealRequest>& messages) {
  OFFLOAD_ASSIGN_OR_RETURN(SealedPlan sealed, PlanFromMessages(messages));
  context_.optimizer = sealed.optimizer;
  OFFLOAD_ASSIGN_OR_RETURN(context_.catalogue,
                           proto::BuildCatalogue(std::move(declared_), context_.optimizer));
  context_.plan = std::move(sealed.plan);
  pins_offset_ = sealed.pins_offset;
  const proto::Catalogue& catalogue = context_.catalogue;
  const uint64_t pins_bytes = catalogue.tensors.size() * sizeof(proto::PinWord);
  if (context_.plan.pipeline_blocks > kLimits.pipeline_blocks_max ||
      context_.plan.region_bytes > ram_bytes_ ||
      !IsAligned(context_.plan.region_bytes, proto::kSectorBytes) || !IsAligned(pins_offset_, 64) ||
      pins_offset_ < proto::kRegionFixedBytes ||
      !IsInside(pins_offset_, pins_bytes, context_.plan.region_bytes)) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan with ", context_.plan.pipeline_blocks,
                                  " pipeline blocks, a region of ", context_.plan.region_bytes,
                                  " bytes and pins at ", pins_offset_));
  }
  for (size_t i = 0; i < catalogue.tensors.size() && i < context_.plan.gradients.size(); ++i) {
    const bool bundled = catalogue.store_tensors[catalogue.placements[i].store_tensor].bundle;
    if (bundled && context_.plan.gradients[i].home == proto::GradientHome::kScratch) {
      return MakeError(ErrorId::kProtocol,
                       absl::StrCat("a plan that spills the gradient of \"",
                                    catalogue.tensors[i].name, "\", which is bundled"));
    }
  }
  return absl::OkStatus();
}

absl::Status Job::CheckBudget() const {
  const uint64_t overhead_bytes = proto::OverheadBytes(context_.catalogue);
  const std::optional<uint64_t> memories =
      CheckedAdd(context_.layout.total_bytes, context_.plan.region_bytes);
  const std::optional<uint64_t> sum =
      memories.has_value() ? CheckedAdd(*memories, overhead_bytes) : std::nullopt;
  if (sum.has_value() && *sum <= ram_bytes_) return absl::OkStatus();
  return MakeError(
      ErrorId::kBudgetTooSmall,
      absl::StrCat("the plan needs ", FormatBytes(context_.layout.total_bytes),
                   " for weights and updates, ", FormatBytes(context_.plan.region_bytes),
                   " for the rank and ", FormatBytes(overhead_bytes),
                   " overhead, more than ram of ", FormatBytes(ram_bytes_)));
}

absl::Status Job::CompareCatalogue() const {
  OFFLOAD_ASSIGN_OR_RETURN(const StoredCatalogue stored, DecodeCatalogue(store_->spec().catalogue));
  OFFLOAD_RETURN_IF_ERROR(CompareWithStored(name_, stored, context_.catalogue, context_.optimizer));
  if (MakeStoreSpec(name_, context_.catalogue, context_.optimizer).tensors !=
      store_->spec().tensors) {
    return MakeError(ErrorId::kStoreVersion,
                     absl::StrCat("job \"", name_, "\" was laid out by other rules"));
  }
  return absl::OkStatus();
}

absl::Status Job::CreateStore(const Progress& progress) {
  swap::StoreOptions options = MakeStoreOptions();
  options.progress = progress;
  options.generations = generations_;
  OFFLOAD_ASSIGN_OR_RETURN(
      store_, swap::Store::Create(
                  pool_, MakeStoreSpec(name_, context_.catalogue, context_.optimizer), options));
  context_.store = store_.get();
  loop_->Watch(store_->event_fd(), [] {});
  return absl::OkStatus();
}

// All pages now, so that no step meets a page fault that allocates.
absl::Status Job::ReserveMemory() {
  OFFLOAD_RETURN_IF_ERROR(slab_.Allocate(0, context_.layout.total_bytes));
  OFFLOAD_RETURN_IF_ERROR(region_.Allocate(0, context_.plan.region_bytes));
  context_.region_bytes = context_.plan.region_bytes;
#ifdef MADV_POPULATE_WRITE
  madvise(slab_.data(), context_.layout.total_bytes, MADV_POPULATE_WRITE);
  madvise(region_.data(), context_.plan.region_bytes, MADV_POPULATE_READ);
#endif
  return absl::OkStatus();
}

void Job::MakeParts() {
  store_->RegisterBuffer({slab_.data(), context_.layout.total_bytes});  // it has its pages by now
  // The rank's map of the pins begins with zeros or with what it has pinned meanwhile: both are
  // right.
  context_.pins = reinterpret_cast<const proto::PinWord*>(region_.data() + pins_offset_);
  cache_ = std::make_unique<WeightCache>(&context_, !exists_);
  state_ = std::make_unique<ResidentState>(&context_);
  executor_ = std::make_unique<UpdateExecutor>(
      &context_, cache_.get(), state_.get(),
      UpdateExecutor::Events{.on_updated =
                                 [this](uint64_t step) {
                                   header()->updated_step.store(step, std::memory_order_relaxed);
                                 },
                             .on_written = [this](uint64_t) { OnStepDone(); },
                             .on_committed = [this](uint64_t step) { OnCommitted(step); }});
  cache_->SetOnDemand([this](uint32_t store_tensor) { executor_->Demand(store_tensor); });
  transfers_ = std::make_unique<Transfers>(&context_, cache_.get(), state_.get(), executor_.get());
}

// OFFLOADD_SCRUB: bytes per second that are read back in the background, from the beginning; 0:
// none.
void Job::MakeScrubber() {
  swap::ScrubberOptions options;
  if (std::getenv("OFFLOADD_SCRUB") == nullptr) options.delay_seconds = kLimits.scrub_delay_seconds;
  options.bytes_per_second = NumberFrom("OFFLOADD_SCRUB", kLimits.scrub_bytes_per_second);
  options.compute = [this](std::function<void()> work, std::function<void()> done) {
    context_.Compute(std::move(work), std::move(done));
  };
  scrubber_ = std::make_unique<swap::Scrubber>(store_.get(), std::move(options));
}

}  // namespace offload::daemon
