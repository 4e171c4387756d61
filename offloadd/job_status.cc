// What a job tells of itself: to its rank in the slab's header, and to offloadctl status.

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "offloadd/device_status.h"
#include "offloadd/figures.h"
#include "offloadd/job.h"
#include "proto/gpu_words.h"
#include "proto/step_words.h"

namespace offload::daemon {
namespace {

void FillErrors(const swap::ErrorCounts& counts, proto::v1::StoreErrors* errors) {
  errors->set_checksum_mismatches(counts.checksum_mismatches);
  errors->set_read_errors(counts.read_errors);
  errors->set_write_errors(counts.write_errors);
  errors->set_flush_errors(counts.flush_errors);
  errors->set_lost_extents(counts.lost_extents);
  errors->set_repaired_copies(counts.repaired_copies);
}

void FillScrub(const swap::Scrubber& scrubber, proto::v1::ScrubStatus* scrub) {
  scrub->set_passes(scrubber.counts().passes);
  scrub->set_extents(scrubber.counts().extents);
  scrub->set_bytes(scrubber.counts().bytes);
  scrub->set_bad_extents(scrubber.counts().bad_extents);
  for (const std::string& name : scrubber.bad_names()) scrub->add_bad_names(name);
}

std::string NameOf(Rank::State state) {
  constexpr const char* kNames[] = {"joined", "mapped", "left", "lost"};
  return kNames[static_cast<int>(state)];
}

// As the rank says, if it has mapped its memory and has a device. A text of protobuf's is UTF-8.
void FillGpu(Rank& rank, proto::v1::RankStatus* status) {
  constexpr double kNanosecond = 1e-9;
  if (rank.rings() == nullptr) return;
  const proto::GpuFigures figures = proto::ReadGpuWords(*proto::GpuWordsOf(rank.region().data()));
  if (figures.gpu_ram_bytes == 0) return;
  proto::v1::GpuStatus* const gpu = status->mutable_gpu();
  if (std::ranges::all_of(figures.device,
                          [](char letter) { return letter >= ' ' && letter <= '~'; }))
    gpu->set_device(figures.device);
  gpu->set_gpu_ram_bytes(figures.gpu_ram_bytes);
  gpu->set_window_bytes(figures.window_bytes);
  gpu->set_used_bytes(figures.used_bytes);
  gpu->set_peak_bytes(figures.peak_bytes);
  gpu->set_bytes_to_device(figures.bytes_to_device);
  gpu->set_bytes_to_host(figures.bytes_to_host);
  gpu->set_stall_seconds(kNanosecond * static_cast<double>(figures.stall_nanoseconds));
  gpu->set_host_waits(figures.host_waits);
}

void FillRank(Rank& rank, proto::v1::RankStatus* status) {
  status->set_rank(rank.number());
  status->set_pid(static_cast<uint32_t>(rank.pid()));
  status->set_phase(NameOf(rank.state));
  status->set_step(rank.step);
  status->set_position(rank.position());
  FillGpu(rank, status);
}

// Of the ranks that count; empty when none does.
std::vector<UseSeconds> MeanUseSeconds(const JobContext& context) {
  constexpr double kNanosecond = 1e-9;
  std::vector<UseSeconds> uses;
  size_t ranks = 0;
  for (const RankMemory& rank : context.ranks) {
    if (rank.region == nullptr) continue;
    const std::span<const proto::UseTimes> times =
        proto::UseTimesOf(rank.region, rank.region_bytes, context.catalogue.tensors.size());
    if (times.empty()) continue;
    uses.resize(times.size());
    ++ranks;
    for (size_t i = 0; i < times.size(); ++i) {
      const auto seconds = [&times, i](size_t phase) {
        return kNanosecond *
               static_cast<double>(times[i].nanoseconds[phase].load(std::memory_order_relaxed));
      };
      uses[i].forward += seconds(0);
      uses[i].backward += seconds(1);
    }
  }
  for (UseSeconds& use : uses) {
    use.forward /= static_cast<double>(ranks);
    use.backward /= static_cast<double>(ranks);
  }
  return uses;
}

}  // namespace

// Of its ranks the mean.
WorkDone Job::Work() const {
  WorkDone work;
  work.now_seconds = context_.clock->NowSeconds();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr) proto::AddTo(work.sums, rank->sums());
  }
  work.sums = proto::DividedBy(work.sums, std::max<size_t>(1, ranks_.size()));
  const auto scratch = scratch_ != nullptr ? scratch_->device() : nullptr;
  for (const aio::Device* device :
       {store_ != nullptr ? &store_->device() : nullptr, scratch.get()}) {
    if (device == nullptr) continue;
    work.bytes_read += device->counters().read_bytes.load(std::memory_order_relaxed);
    work.bytes_written += device->counters().written_bytes.load(std::memory_order_relaxed);
  }
  work.commits = commits_;
  return work;
}

void Job::AddToHistory() {
  history_.Add(step_, static_cast<double>(machine_.NowUnixSeconds()),
               header()->resident_bytes.load(std::memory_order_relaxed));
  comparison_.Add(history_.records().back());
}

void Job::UpdateHeader() {
  if (slab_.data() == nullptr) return;
  const WorkDone work = Work();
  uint64_t resident_bytes = proto::PaddedBytes(sizeof(proto::SlabHeader));
  for (const RankMemory& rank : context_.ranks) resident_bytes += rank.region_bytes;
  if (IsSealed()) {
    resident_bytes +=
        proto::PaddedBytes(context_.catalogue.tensors.size() * sizeof(proto::TensorWord)) +
        cache_->resident_bytes() + state_->loaded_bytes() + executor_->buffer_bytes() +
        (gradients_ != nullptr ? gradients_->resident_bytes() : 0);
  }
  peak_bytes_ = std::max(peak_bytes_, resident_bytes);
  proto::SlabHeader* words = header();
  words->bytes_read.store(work.bytes_read, std::memory_order_relaxed);
  words->bytes_written.store(work.bytes_written, std::memory_order_relaxed);
  words->resident_bytes.store(resident_bytes, std::memory_order_relaxed);
  words->computed_nanoseconds.store(static_cast<uint64_t>(context_.computed.core_nanoseconds),
                                    std::memory_order_relaxed);
  words->peak_bytes.store(peak_bytes_, std::memory_order_relaxed);
}

void Job::FillStatus(proto::v1::JobStatus* status) const {
  status->set_job(identity_.name);
  status->set_pool(identity_.pool);
  status->set_client_pid(static_cast<uint32_t>(identity_.pid));
  status->set_phase(std::string(context_.failed() ? "failed" : NameOf(phase())));
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr) FillRank(*rank, status->add_ranks());
  }
  if (slab_.data() == nullptr) return;
  status->set_step(step_);
  status->set_durable_step(header()->durable_step.load(std::memory_order_relaxed));
  status->set_ram_bytes(ram_bytes_);
  uint64_t allocated_bytes = slab_.AllocatedBytes().value_or(0);
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    // Another thread may be making it.
    if (rank == nullptr || context_.ranks[rank->number()].region == nullptr) continue;
    allocated_bytes += rank->region().AllocatedBytes().value_or(0);
  }
  status->set_allocated_bytes(allocated_bytes);
  status->set_resident_bytes(header()->resident_bytes.load(std::memory_order_relaxed));
  status->set_bytes_read(header()->bytes_read.load(std::memory_order_relaxed));
  status->set_bytes_written(header()->bytes_written.load(std::memory_order_relaxed));
  status->set_io_engine(io_engine_);
  status->set_seconds_per_step(seconds_per_step_);
  FillFigures(Work().sums, status->mutable_figures());
  if (!history_.records().empty())
    FillRecord(history_.records().back(), status->mutable_last_step());
  FillDurations(history_.durations(), status->mutable_durations());
  if (IsSealed()) {
    FillPlan(status->mutable_plan());
    constexpr double kNanosecond = 1e-9;
    proto::v1::ComputeTime* const compute = status->mutable_compute();
    compute->set_seconds(kNanosecond * static_cast<double>(context_.computed.nanoseconds));
    compute->set_core_seconds(kNanosecond *
                              static_cast<double>(context_.computed.core_nanoseconds));
    proto::v1::ResidentBytes* const resident = status->mutable_resident();
    resident->set_weights(cache_->resident_bytes());
    resident->set_state(state_->loaded_bytes());
    resident->set_gradients(gradients_ != nullptr ? gradients_->resident_bytes() : 0);
    resident->set_buffers(executor_->buffer_bytes());
    status->mutable_updates_ahead()->set_used(executor_->used_ahead());
    status->mutable_updates_ahead()->set_lost(executor_->lost_ahead());
  }
  if (store_ != nullptr) *status->add_devices() = DescribeDevice("store", store_->device());
  if (scratch_ != nullptr) *status->add_devices() = DescribeDevice("scratch", *scratch_->device());
  if (store_ != nullptr) FillErrors(store_->error_counts(), status->mutable_store_errors());
  if (scrubber_ != nullptr) FillScrub(*scrubber_, status->mutable_scrub());
  if (!removed_files_.empty()) status->mutable_scrub()->add_bad_names(removed_files_);
}

std::vector<proto::v1::ReportPart> Job::Report() const {
  proto::v1::JobStatus status;
  FillStatus(&status);
  return MakeReport(std::move(status), history_, context_.catalogue, activity_.tallies(),
                    IsSealed() ? MeanUseSeconds(context_) : std::vector<UseSeconds>());
}

void Job::TakeTransfers(proto::v1::TakeTransfersReply* reply) {
  FillTransfers(activity_.TakeTransfers(), context_.catalogue, reply);
}

}  // namespace offload::daemon
