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
#include "base/fault_point.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "offloadd/agreement.h"
#include "offloadd/environment.h"
#include "offloadd/job.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/limits.h"
#include "offloadd/plan_depths.h"
#include "offloadd/relayout.h"
#include "proto/trainer_states.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {

absl::Status Job::DeclareTensors(Rank& rank,
                                 const std::vector<proto::v1::DeclareTensorsRequest>& messages,
                                 uint64_t* tensor_count) {
  OFFLOAD_RETURN_IF_ERROR(Check(JobCall::kDeclareTensors));
  for (const proto::v1::DeclareTensorsRequest& message : messages) {
    for (const proto::v1::Tensor& tensor : message.tensors()) {
      if (rank.declared.size() >= proto::kTensorsMax)
        return MakeError(ErrorId::kProtocol, "too many tensors");
      OFFLOAD_ASSIGN_OR_RETURN(proto::Tensor declared, TensorFromMessage(tensor));
      rank.declared.push_back(std::move(declared));
    }
  }
  *tensor_count = rank.declared.size();
  return absl::OkStatus();
}

void Job::ReserveScratch(uint64_t bytes, Done done) {
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

// ---- Seal --------------------------------------------------------------------------------------

void Job::Seal(Rank& rank, std::vector<proto::v1::SealRequest> messages, Progress progress,
               Done done) {
  absl::Status status = Check(JobCall::kSeal);
  if (status.ok()) status = CheckAllAreHere();
  if (status.ok() && rank.calls.seal != nullptr)
    status = MakeError(ErrorId::kProtocol, "Seal for the second time");
  // Until then the rank could take away pages that are reserved here.
  if (status.ok() && rank.rings() == nullptr)
    status = MakeError(ErrorId::kProtocol, "Seal before the memory is mapped");
  if (!status.ok()) return done(std::move(status));
  rank.plan = std::move(messages);
  rank.calls.seal = std::move(done);
  seal_progress_.push_back(std::move(progress));
  if (All([](const Rank& each) { return each.calls.seal != nullptr; })) StartSealing();
}

// All ranks have said what they have and want: nothing is formatted before they agree.
void Job::StartSealing() {
  absl::Status status = CompareRanks();
  if (status.ok()) status = PrepareSeal(ranks_.front()->plan);
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    rank->declared = {};
    rank->plan = {};
  }
  if (!status.ok()) return AnswerSeal(status);
  SetPhase(JobPhase::kSealing);
  auto made = std::make_shared<Made>();
  OffLoop([this, made] { MakeWhatIsSealed(*made); }, [this, made] { FinishSeal(*made); });
}

absl::Status Job::CompareRanks() const {
  const Rank& first = *ranks_.front();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    OFFLOAD_RETURN_IF_ERROR(CompareTensors({0, first.declared}, {rank->number(), rank->declared}));
    OFFLOAD_RETURN_IF_ERROR(ComparePlans({0, first.plan}, {rank->number(), rank->plan}));
  }
  return absl::OkStatus();
}

void Job::AnswerSeal(const absl::Status& status) {
  seal_progress_.clear();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->calls.seal == nullptr) continue;
    std::exchange(rank->calls.seal, nullptr)(status);
  }
}

// Everything that can be told from the messages.
absl::Status Job::PrepareSeal(const std::vector<proto::v1::SealRequest>& messages) {
  OFFLOAD_RETURN_IF_ERROR(ReadPlan(messages));
  OFFLOAD_ASSIGN_OR_RETURN(context_.layout,
                           proto::ComputeSlabLayout(context_.catalogue, context_.plan));
  OFFLOAD_RETURN_IF_ERROR(CheckBudget());
  return store_existed_ ? CompareCatalogue() : absl::OkStatus();
}

// ---- Off the loop ------------------------------------------------------------------------------

// All pages now, so that no step meets a page fault that allocates.
void Job::MakeWhatIsSealed(Made& made) {
  const auto make = [&]() -> absl::Status {
    OFFLOAD_RETURN_IF_ERROR(slab_.Allocate(0, context_.layout.total_bytes));
#ifdef MADV_POPULATE_WRITE
    madvise(slab_.data(), context_.layout.total_bytes, MADV_POPULATE_WRITE);
#endif
    for (const std::unique_ptr<Rank>& rank : ranks_)
      OFFLOAD_RETURN_IF_ERROR(ReserveRegion(*rank, RegionBytes(rank->number())));
    if (context_.plan.scratch_bytes > 0)
      OFFLOAD_RETURN_IF_ERROR(MakeScratch(context_.plan.scratch_bytes, made));
    if (store_existed_ && !outgrown_.has_value()) return absl::OkStatus();
    OFFLOAD_ASSIGN_OR_RETURN(made.store, store_existed_ ? LayOutAnew() : FormatStore());
    return absl::OkStatus();
  };
  made.status = make();
}

absl::StatusOr<std::unique_ptr<swap::Store>> Job::FormatStore() {
  swap::StoreOptions options = MakeStoreOptions();
  options.progress = [this](uint64_t bytes_formatted, uint64_t bytes_total) {
    for (const Progress& progress : seal_progress_) progress(bytes_formatted, bytes_total);
  };
  options.generations = store_existed_ ? store_->generation_count() : generations_;
  options.replaces = store_existed_;
  return machine_.CreateStore(identity_.pool,
                              MakeStoreSpec(identity_.name, context_.catalogue, context_.optimizer),
                              options);
}

// The last epoch in a store with room for all that is trained now, which takes the place of the one
// before.
absl::StatusOr<std::unique_ptr<swap::Store>> Job::LayOutAnew() {
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> grown, FormatStore());
  store_->SetWatch(nullptr);  // which counts on the loop
  const absl::Status copied =
      CopyEpoch({store_.get(), &outgrown_->catalogue}, {grown.get(), &context_.catalogue},
                outgrown_->moves, MakeStoreOptions().cancelled);
  store_->SetWatch(meter_.Watch(activity_.Watch()));
  OFFLOAD_RETURN_IF_ERROR(copied);
  FaultPoint("job.laid_out_anew");
  OFFLOAD_RETURN_IF_ERROR(machine_.PublishStore(*grown));
  spdlog::info("job {}: laid out anew for what is trained now: {} instead of {}", identity_.name,
               FormatDecimalBytes(grown->device().geometry().size_bytes),
               FormatDecimalBytes(store_->device().geometry().size_bytes));
  return grown;
}

absl::Status Job::ReserveRegion(Rank& rank, uint64_t bytes) const {
  OFFLOAD_RETURN_IF_ERROR(rank.region().Allocate(0, bytes));
#ifdef MADV_POPULATE_WRITE
  madvise(rank.region().data(), bytes, MADV_POPULATE_READ);
#endif
  return absl::OkStatus();
}

// ---- Back on the loop --------------------------------------------------------------------------

void Job::FinishSeal(Made& made) {
  TakeOver(made);  // in any case: a store that was replaced is none that somebody has removed
  if (IsClosing(phase())) return AnswerSeal(Ending());
  if (!made.status.ok()) {
    SetPhase(JobPhase::kOpen);
    return AnswerSeal(made.status);
  }
  scratch_bytes_ = std::max(scratch_bytes_, context_.plan.scratch_bytes);
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    RankMemory& memory = context_.ranks[rank->number()];
    memory.region_bytes = RegionBytes(rank->number());
    // The rank's map of the pins begins with zeros or with what it has pinned meanwhile: both are
    // right.
    if (rank->is_here())
      memory.pins = reinterpret_cast<const proto::PinWord*>(memory.region + pins_offset_);
  }
  context_.published = store_existed_;
  context_.depths =
      DepthsOfPlan(opened_rates_, update_threads_asked_, context_.catalogue, context_.plan);
  MakeParts();
  replan_.emplace(machine_.replan_options(), opened_rates_);
  PlanStep(/*touches=*/{});
  if (context_.published) MakeScrubber();
  SetPhase(store_existed_ ? JobPhase::kTraining : JobPhase::kSealed);
  UpdateLimits();
  UpdateHeader();
  AnswerSeal(absl::OkStatus());
}

absl::Status Job::ReadPlan(const std::vector<proto::v1::SealRequest>& messages) {
  OFFLOAD_ASSIGN_OR_RETURN(SealedPlan sealed, PlanFromMessages(messages));
  context_.optimizer = sealed.optimizer;
  OFFLOAD_ASSIGN_OR_RETURN(
      context_.catalogue,
      proto::BuildCatalogue(std::exchange(ranks_.front()->declared, {}), context_.optimizer));
  context_.plan = std::move(sealed.plan);
  other_tensors_ = std::move(sealed.other_tensors);
  context_.gradient_sum = membership_.gradient_sum();
  pins_offset_ = sealed.pins_offset;
  const proto::Catalogue& catalogue = context_.catalogue;
  const uint64_t pins_bytes = catalogue.tensors.size() * sizeof(proto::PinWord);
  if (context_.plan.pipeline_blocks > kLimits.pipeline_blocks_max ||
      !IsGoodRegion(context_.plan.region_bytes, pins_bytes) ||
      (world_size() > 1 && !IsGoodRegion(context_.plan.other_region_bytes, pins_bytes))) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("a plan with ", context_.plan.pipeline_blocks, " pipeline blocks, regions of ",
                     context_.plan.region_bytes, " and ", context_.plan.other_region_bytes,
                     " bytes and pins at ", pins_offset_));
  }
  if (context_.plan.world_size != world_size()) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("a plan for ", context_.plan.world_size,
                                                      " ranks of ", world_size()));
  }
  for (size_t i = 0; i < catalogue.tensors.size() && i < context_.plan.gradients.size(); ++i)
    OFFLOAD_RETURN_IF_ERROR(CheckHome(static_cast<uint32_t>(i)));
  return CheckOtherTensors();
}

absl::Status Job::CheckOtherTensors() const {
  if (!other_tensors_.has_value()) return absl::OkStatus();
  const uint64_t state_bytes = other_tensors_->trainer_state.size();
  if (world_size() == 1 && store_existed_ &&
      state_bytes <= proto::TrainerStateBytesMax(1, kLimits.trainer_state_bytes_max))
    return absl::OkStatus();
  return MakeError(ErrorId::kProtocol,
                   absl::StrCat("other tensors in a ", store_existed_ ? "" : "new ", "job of ",
                                world_size(), " ranks, with a state of ", state_bytes, " bytes"));
}

absl::Status Job::CheckHome(uint32_t tensor) const {
  using proto::GradientHome;
  const proto::Catalogue& catalogue = context_.catalogue;
  const GradientHome home = context_.plan.gradients[tensor].home;
  const bool is_summed = home == GradientHome::kSlab || home == GradientHome::kSlabScratch;
  const bool is_spilled = home == GradientHome::kScratch || home == GradientHome::kSlabScratch;
  const auto refuse = [&](const char* plan, const char* because) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan that ", plan, " the gradient of \"",
                                  catalogue.tensors[tensor].name, "\", ", because));
  };
  if (is_spilled && catalogue.store_tensors[catalogue.placements[tensor].store_tensor].bundle)
    return refuse("spills", "which is bundled");
  if (home == GradientHome::kNone || is_summed == AddsGradients()) return absl::OkStatus();
  return is_summed ? refuse("sums", "which the trainer reduces")
                   : refuse("does not sum", "which several ranks give");
}

uint64_t Job::RegionBytes(uint32_t rank) const {
  return rank == 0 ? context_.plan.region_bytes : context_.plan.other_region_bytes;
}

bool Job::IsGoodRegion(uint64_t region_bytes, uint64_t pins_bytes) const {
  return region_bytes <= ram_bytes_ && IsAligned(region_bytes, proto::kSectorBytes) &&
         IsAligned(pins_offset_, 64) && pins_offset_ >= proto::kRegionFixedBytes &&
         IsInside(pins_offset_, pins_bytes, region_bytes);
}

absl::Status Job::CheckBudget() const {
  const uint64_t overhead_bytes = proto::OverheadBytes(context_.catalogue);
  // Each is at most ram, and there are few.
  uint64_t region_bytes = 0;
  for (uint32_t rank = 0; rank < world_size(); ++rank) region_bytes += RegionBytes(rank);
  const std::optional<uint64_t> memories = CheckedAdd(context_.layout.total_bytes, region_bytes);
  const std::optional<uint64_t> sum =
      memories.has_value() ? CheckedAdd(*memories, overhead_bytes) : std::nullopt;
  if (sum.has_value() && *sum <= ram_bytes_) return absl::OkStatus();
  return MakeError(ErrorId::kBudgetTooSmall,
                   absl::StrCat("the plan needs ", FormatBytes(context_.layout.total_bytes),
                                " for weights and updates, ", FormatBytes(region_bytes),
                                world_size() == 1 ? " for the rank and " : " for the ranks and ",
                                FormatBytes(overhead_bytes), " overhead, more than ram of ",
                                FormatBytes(ram_bytes_)));
}

absl::Status Job::CompareCatalogue() {
  OFFLOAD_ASSIGN_OR_RETURN(StoredCatalogue stored, DecodeCatalogue(store_->spec().catalogue));
  const bool has_others = other_tensors_.has_value();
  Moves moves;
  if (has_others) {
    OFFLOAD_ASSIGN_OR_RETURN(
        moves.sources, FindSources(identity_.name, stored, context_.catalogue, context_.optimizer,
                                   other_tensors_->stored_names));
    trainer_states_[0] = std::move(other_tensors_->trainer_state);
    moves.blob = proto::EncodeTrainerStates(trainer_states_);
  } else {
    OFFLOAD_RETURN_IF_ERROR(
        CompareWithStored(identity_.name, stored, context_.catalogue, context_.optimizer));
    for (uint32_t i = 0; i < context_.catalogue.tensors.size(); ++i) moves.sources.push_back(i);
  }
  const bool has_thawed = !has_others && HasThawed(stored, context_.catalogue);
  OFFLOAD_ASSIGN_OR_RETURN(proto::Catalogue before,
                           proto::BuildCatalogue(std::move(stored.tensors), context_.optimizer));
  if (MakeStoreSpec(identity_.name, before, context_.optimizer).tensors != store_->spec().tensors) {
    return MakeError(ErrorId::kStoreVersion,
                     absl::StrCat("job \"", identity_.name, "\" was laid out by other rules"));
  }
  outgrown_.reset();
  if (!has_thawed && !has_others) return absl::OkStatus();
  outgrown_ = {std::move(before), std::move(moves)};
  return CheckMayOutgrow(has_others);
}

// Snapshots have the layout of their store, and files of several pools do not get their names at
// once.
absl::Status Job::CheckMayOutgrow(bool has_others) const {
  const std::string what = absl::StrCat(
      has_others ? "the model has other parameters than job \""
                 : "more of the model is trained than when job \"",
      identity_.name, has_others ? "\", and its store " : "\" was made, and its store ");
  const absl::StatusOr<std::vector<std::string>> pools = SplitPools(identity_.pool);
  if (pools.ok() && pools->size() > 1) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat(what, "lies over several pools, where it cannot be laid out anew"),
        has_others
            ? "Attach all that is trained at some time before the first step, or keep the job "
              "in one pool"
            : "Freeze those parameters again, or set may_thaw when a job is made over "
              "several pools");
  }
  if (!store_->snapshots().empty()) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat(what,
                     "has snapshots, which would be lost when it is laid out "
                     "anew (\"",
                     store_->snapshots().front().name, "\")"),
        "Go on in a fork of the job (offloadctl snapshot fork), or delete its snapshots "
        "(offloadctl snapshot rm)");
  }
  return absl::OkStatus();
}

void Job::MakeParts() {
  store_->RegisterBuffer({slab_.data(), context_.layout.total_bytes});  // it has its pages by now
  activity_.SetTensorCount(context_.catalogue.store_tensors.size());
  cache_ = std::make_unique<WeightCache>(&context_, !store_existed_);
  state_ = std::make_unique<ResidentState>(&context_);
  executor_ = std::make_unique<UpdateExecutor>(
      &context_, cache_.get(), state_.get(),
      UpdateExecutor::Events{.on_computed =
                                 [this](std::span<const uint32_t> tensors) {
                                   if (gradients_ != nullptr) gradients_->UpdateComputed(tensors);
                                 },
                             .on_updated =
                                 [this](uint64_t step) {
                                   header()->updated_step.store(step, std::memory_order_relaxed);
                                 },
                             .on_written = [this](uint64_t) { OnStepDone(); },
                             .on_committed = [this](uint64_t step) { OnCommitted(step); }});
  cache_->SetOnDemand([this](uint32_t store_tensor) { executor_->Demand(store_tensor); });
  transfers_ = std::make_unique<Transfers>(&context_, cache_.get(), state_.get(), executor_.get());
  if (AddsGradients()) {
    gradients_ = std::make_unique<GradientSum>(
        &context_, step_, [this](uint32_t store_tensor) { executor_->Demand(store_tensor); });
  }
  gate_.emplace(world_size(), membership_.gradients_reduced(), [this](uint32_t tensor) {
    const auto& tensors = context_.catalogue.tensors;
    return tensor < tensors.size() ? tensors[tensor].name : absl::StrCat("tensor ", tensor);
  });
}

// OFFLOADD_SCRUB: bytes per second that are read back in the background, from the beginning; 0:
// none.
void Job::MakeScrubber() {
  swap::ScrubberOptions options;
  if (std::getenv("OFFLOADD_SCRUB") == nullptr) options.delay_seconds = kLimits.scrub_delay_seconds;
  options.bytes_per_second = NumberFrom("OFFLOADD_SCRUB", kLimits.scrub_bytes_per_second);
  options.compute = [this](std::function<void()> work, std::function<void()> done) {
    ++context_.scrubbing;
    context_.Compute(std::move(work), [this, done = std::move(done)] {
      --context_.scrubbing;
      done();
    });
  };
  scrubber_ = std::make_unique<swap::Scrubber>(store_.get(), std::move(options));
}

}  // namespace offload::daemon
