// What a job tells of itself: to its rank in the slab's header, and to offloadctl status.

#include <algorithm>

#include "offloadd/device_status.h"
#include "offloadd/job.h"

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

}  // namespace

void Job::UpdateHeader() {
  if (slab_.data() == nullptr) return;
  uint64_t bytes_read = 0, bytes_written = 0;
  for (const aio::Device* device : {store_ != nullptr ? &store_->device() : nullptr,
                                    scratch_ != nullptr ? &scratch_->device() : nullptr}) {
    if (device == nullptr) continue;
    bytes_read += device->counters().read_bytes.load(std::memory_order_relaxed);
    bytes_written += device->counters().written_bytes.load(std::memory_order_relaxed);
  }
  uint64_t resident_bytes = context_.region_bytes + proto::PaddedBytes(sizeof(proto::SlabHeader));
  if (sealed_) {
    resident_bytes +=
        proto::PaddedBytes(context_.catalogue.tensors.size() * sizeof(proto::TensorWord)) +
        cache_->resident_bytes() + state_->loaded_bytes() + executor_->buffer_bytes();
  }
  peak_bytes_ = std::max(peak_bytes_, resident_bytes);
  proto::SlabHeader* words = header();
  words->bytes_read.store(bytes_read, std::memory_order_relaxed);
  words->bytes_written.store(bytes_written, std::memory_order_relaxed);
  words->resident_bytes.store(resident_bytes, std::memory_order_relaxed);
  words->peak_bytes.store(peak_bytes_, std::memory_order_relaxed);
}

void Job::FillStatus(proto::v1::JobStatus* status) const {
  status->set_job(name_);
  status->set_pool(pool_);
  status->set_step(step_);
  status->set_durable_step(header()->durable_step.load(std::memory_order_relaxed));
  status->set_ram_bytes(ram_bytes_);
  status->set_allocated_bytes(slab_.AllocatedBytes().value_or(0) +
                              region_.AllocatedBytes().value_or(0));
  status->set_resident_bytes(header()->resident_bytes.load(std::memory_order_relaxed));
  status->set_bytes_read(header()->bytes_read.load(std::memory_order_relaxed));
  status->set_bytes_written(header()->bytes_written.load(std::memory_order_relaxed));
  status->set_io_engine(io_engine_);
  status->set_phase(context_.failed()    ? "failed"
                    : context_.published ? "training"
                    : sealed_            ? "sealed"
                                         : "open");
  status->set_seconds_per_step(seconds_per_step_);
  if (store_ != nullptr) *status->add_devices() = DescribeDevice("store", store_->device());
  if (scratch_ != nullptr) *status->add_devices() = DescribeDevice("scratch", scratch_->device());
  if (store_ != nullptr) FillErrors(store_->error_counts(), status->mutable_store_errors());
  if (scrubber_ != nullptr) FillScrub(*scrubber_, status->mutable_scrub());
}

}  // namespace offload::daemon
