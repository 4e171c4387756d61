// Job's sealing: from the tensors and the plan that a rank declares to a store, reserved memory and
// the parts that work on them.

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
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

absl::Status Job::DeclareTensors(Rank&,
                                 const std::vector<proto::v1::DeclareTensorsRequest>& messages,
                                 uint64_t* tensor_count) {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kDeclareTensors));
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

void Job::ReserveScratch(uint64_t bytes, Done done) {
  if (context_.failed()) return done(context_.failure);
  if (absl::Status status = Check(JobCall::kReserveScratch); !status.ok())
    return done(std::move(status));
  if (bytes > kLimits.scratch_bytes_max) {
    return done(MakeError(ErrorId::kBadValue, absl::StrCat("scratch space of ", bytes, " bytes")));
  }
  auto made = std::make_shared<Made>();
  OffLoop([this, bytes, made] { made->status = MakeScratch(bytes, *made); },
          [this, bytes, made, done = std::move(done)] {
            TakeOver(*made);
            if (!made->status.ok()) return done(made->status);
            scratch_bytes_ = std::max(scratch_bytes_, AlignDown(bytes, proto::kSectorBytes));
            UpdateLimits();
            done(absl::OkStatus());
          });
}

void Job::Seal(Rank& rank, const std::vector<proto::v1::SealRequest>& messages, Progress progress,
               Done done) {
  absl::Status status = context_.failure;
  status.Update(Check(JobCall::kSeal));
  // Until then the rank could take away pages that are reserved here.
  if (status.ok() && rank.rings() == nullptr)
    status = MakeError(ErrorId::kProtocol, "Seal before the memory is mapped");
  if (status.ok()) status = PrepareSeal(messages);
  if (!status.ok()) return done(std::move(status));
  SetPhase(JobPhase::kSealing);
  auto made = std::make_shared<Made>();
  OffLoop([this, made, progress = std::move(progress)] { MakeWhatIsSealed(progress, *made); },
          [this, made, done = std::move(done)] { FinishSeal(*made, done); });
}

// Everything that can be told from the messages.
absl::Status Job::PrepareSeal(const std::vector<proto::v1::SealRequest>& messages) {
  OFFLOAD_ASSIGN_OR_RETURN(context_.catalogue, proto::BuildCatalogue(std::exchange(declared_, {})));
  OFFLOAD_RETURN_IF_ERROR(ReadPlan(messages));
  OFFLOAD_ASSIGN_OR_RETURN(
      context_.layout,
      proto::ComputeSlabLayout(context_.catalogue, context_.optimizer, context_.plan));
  OFFLOAD_RETURN_IF_ERROR(CheckBudget());
  return store_existed_ ? CompareCatalogue() : absl::OkStatus();
}

// Off the loop. All pages now, so that no step meets a page fault that allocates.
void Job::MakeWhatIsSealed(const Progress& progress, Made& made) {
  const auto make = [&]() -> absl::Status {
    OFFLOAD_RETURN_IF_ERROR(slab_.Allocate(0, context_.layout.total_bytes));
    OFFLOAD_RETURN_IF_ERROR(ranks_.front()->region().Allocate(0, context_.plan.region_bytes));
#ifdef MADV_POPULATE_WRITE
    madvise(slab_.data(), context_.layout.total_bytes, MADV_POPULATE_WRITE);
    madvise(ranks_.front()->region().data(), context_.plan.region_bytes, MADV_POPULATE_READ);
#endif
    if (context_.plan.scratch_bytes > 0)
      OFFLOAD_RETURN_IF_ERROR(MakeScratch(context_.plan.scratch_bytes, made));
    if (store_existed_) return absl::OkStatus();
    swap::StoreOptions options = MakeStoreOptions();
    options.progress = progress;
    options.generations = generations_;
    OFFLOAD_ASSIGN_OR_RETURN(
        made.store,
        swap::Store::Create(identity_.pool,
                            MakeStoreSpec(identity_.name, context_.catalogue, context_.optimizer),
                            options));
    return absl::OkStatus();
  };
  made.status = make();
}

void Job::FinishSeal(Made& made, const Done& done) {
  if (IsClosing(phase())) return done(MakeError(ErrorId::kSessionEnded, "the job is being closed"));
  TakeOver(made);
  if (!made.status.ok()) {
    SetPhase(JobPhase::kOpen);
    return done(made.status);
  }
  scratch_bytes_ = std::max(scratch_bytes_, context_.plan.scratch_bytes);
  RankMemory& memory = context_.ranks.front();
  memory.region_bytes = context_.plan.region_bytes;
  // The rank's map of the pins begins with zeros or with what it has pinned meanwhile: both are
  // right.
  memory.pins = reinterpret_cast<const proto::PinWord*>(memory.region + pins_offset_);
  context_.published = store_existed_;
  MakeParts();
  if (context_.published) MakeScrubber();
  SetPhase(store_existed_ ? JobPhase::kTraining : JobPhase::kSealed);
  UpdateLimits();
  UpdateHeader();
  done(absl::OkStatus());
}

absl::Status Job::ReadPlan(const std::vector<proto::v1::SealRequest>& messages) {
  OFFLOAD_ASSIGN_OR_RETURN(SealedPlan sealed, PlanFromMessages(messages));
  context_.optimizer = sealed.optimizer;
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
  const uint64_t overhead_bytes = proto::OverheadBytes(context_.catalogue, context_.optimizer);
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
  OFFLOAD_RETURN_IF_ERROR(
      CompareWithStored(identity_.name, stored, context_.catalogue, context_.optimizer));
  if (MakeStoreSpec(identity_.name, context_.catalogue, context_.optimizer).tensors !=
      store_->spec().tensors) {
    return MakeError(ErrorId::kStoreVersion,
                     absl::StrCat("job \"", identity_.name, "\" was laid out by other rules"));
  }
  return absl::OkStatus();
}

void Job::MakeParts() {
  store_->RegisterBuffer({slab_.data(), context_.layout.total_bytes});  // it has its pages by now
  cache_ = std::make_unique<WeightCache>(&context_, !store_existed_);
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
