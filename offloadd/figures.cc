#include "offloadd/figures.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace offload::daemon {
namespace {

constexpr size_t kEntriesPerPart = 4096;  // of at most a few hundred bytes

double Seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

proto::v1::Transfer::Kind KindOf(swap::Transfer::Kind kind) {
  switch (kind) {
    case swap::Transfer::Kind::kRead:
      return proto::v1::Transfer::READ;
    case swap::Transfer::Kind::kWrite:
      return proto::v1::Transfer::WRITE;
    case swap::Transfer::Kind::kCommit:
      return proto::v1::Transfer::COMMIT;
    case swap::Transfer::Kind::kScratchRead:
      return proto::v1::Transfer::SCRATCH_READ;
    case swap::Transfer::Kind::kScratchWrite:
      break;
  }
  return proto::v1::Transfer::SCRATCH_WRITE;
}

bool IsMatrix(const proto::Tensor& tensor) {
  return std::ranges::count_if(tensor.shape, [](int64_t size) { return size > 1; }) >= 2;
}

void FillTensor(const proto::Catalogue& catalogue, uint32_t store_tensor,
                const ActivityLog::Tally& tally, proto::v1::TensorFigures* figures) {
  const std::vector<uint32_t>& members = catalogue.store_tensors[store_tensor].members;
  figures->set_name(catalogue.tensors[members.front()].name);
  figures->set_member_count(static_cast<uint32_t>(members.size()));
  uint64_t matrix_elements = 0;
  for (const uint32_t member : members) {
    const proto::Tensor& tensor = catalogue.tensors[member];
    if (IsMatrix(tensor)) matrix_elements += tensor.element_count;
  }
  figures->set_matrix_elements(matrix_elements);
  figures->set_trained(catalogue.store_tensors[store_tensor].trainable);
  figures->set_bytes_read(tally.bytes_read);
  figures->set_bytes_written(tally.bytes_written);
  for (size_t cause = 0; cause < ActivityLog::kWaitCauses; ++cause) {
    figures->add_waits(tally.waits[cause]);
    figures->add_wait_seconds(static_cast<double>(tally.wait_nanoseconds[cause]) * 1e-9);
  }
}

}  // namespace

void FillFigures(const proto::StepSums& sums, proto::v1::StepFigures* figures) {
  for (const uint64_t phase : sums.phase_nanoseconds) figures->add_phase_seconds(Seconds(phase));
  for (const auto& phase : sums.stall_nanoseconds) {
    for (const uint64_t stall : phase) figures->add_stall_seconds(Seconds(stall));
  }
  for (const uint64_t count : sums.prefetches) figures->add_prefetches(count);
}

void FillRecord(const StepRecord& record, proto::v1::StepRecord* message) {
  message->set_first_step(record.first_step);
  message->set_last_step(record.last_step);
  message->set_end_unix_seconds(record.end_unix_seconds);
  message->set_seconds(record.seconds);
  FillFigures(record.sums, message->mutable_figures());
  message->set_bytes_read(record.bytes_read);
  message->set_bytes_written(record.bytes_written);
  message->set_resident_bytes(record.resident_bytes);
  message->set_commits(record.commits);
}

void FillDurations(const StepHistory::Durations& durations, proto::v1::StepDurations* message) {
  for (const double bound : StepHistory::kDurationBounds) message->add_upper_seconds(bound);
  for (const uint64_t count : durations.counts) message->add_counts(count);
  message->set_count(durations.count);
  message->set_sum_seconds(durations.sum_seconds);
}

void FillPlannedStep(const proto::StepTraffic& traffic, const proto::Catalogue& catalogue,
                     proto::v1::PlannedStep* step) {
  uint64_t elements = 0, trained = 0;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    if (!IsMatrix(tensor)) continue;
    elements += tensor.element_count;
    trained += tensor.trainable ? tensor.element_count : 0;
  }
  step->set_matrix_elements(elements);
  step->set_trained_matrix_elements(trained);
  step->set_weight_read_bytes(traffic.weight_read_bytes);
  step->set_state_read_bytes(traffic.state_read_bytes);
  step->set_gradient_read_bytes(traffic.gradient_read_bytes);
  step->set_gradient_written_bytes(traffic.gradient_written_bytes);
  step->set_written_bytes(traffic.written_bytes);
  step->set_checkpoint_bytes(traffic.checkpoint_bytes);
  step->set_order_known(traffic.order_known);
  step->set_passes(traffic.passes);
}

void FillDepths(const proto::Depths& depths, uint32_t pipeline_blocks, proto::v1::Depths* message) {
  message->set_update_threads(depths.update_threads);
  message->set_pipeline_blocks(pipeline_blocks);
  message->set_loads(depths.loads);
  message->set_transfers(depths.transfers);
  message->set_write_backs(depths.write_backs);
}

void FillStepsOfPlan(const PlanComparison::Steps& steps, proto::v1::StepsOfPlan* message) {
  message->set_first_step(steps.first_step);
  message->set_step_count(steps.step_count);
  message->set_checkpoints(steps.checkpoints);
  message->set_bytes_read(steps.bytes_read);
  message->set_bytes_written(steps.bytes_written);
  message->set_seconds(steps.seconds);
  message->set_compute_seconds(steps.compute_seconds);
}

void FillTransfers(const ActivityLog::Taken& taken, const proto::Catalogue& catalogue,
                   proto::v1::TakeTransfersReply* reply) {
  for (const ActivityLog::TimedTransfer& timed : taken.transfers) {
    proto::v1::Transfer* const message = reply->add_transfers();
    message->set_kind(KindOf(timed.transfer.kind));
    if (timed.transfer.tensor < catalogue.store_tensors.size())
      message->set_tensor(catalogue.store_tensors[timed.transfer.tensor].members.front());
    message->set_extent(timed.transfer.index);
    message->set_bytes(timed.transfer.bytes);
    message->set_begin_nanoseconds(timed.begin_nanoseconds);
    message->set_end_nanoseconds(timed.end_nanoseconds);
  }
  reply->set_dropped(taken.dropped);
  reply->set_more(taken.more);
}

std::vector<proto::v1::ReportPart> MakeReport(proto::v1::JobStatus job, const StepHistory& history,
                                              const proto::Catalogue& catalogue,
                                              std::span<const ActivityLog::Tally> tallies,
                                              std::span<const UseSeconds> uses) {
  std::vector<proto::v1::ReportPart> parts(1);
  *parts.front().mutable_job() = std::move(job);
  for (const StepRecord& record : history.records()) FillRecord(record, parts.front().add_steps());
  for (size_t begin = 0; begin < tallies.size(); begin += kEntriesPerPart) {
    proto::v1::ReportPart& part = parts.emplace_back();
    const size_t end = std::min(tallies.size(), begin + kEntriesPerPart);
    for (size_t i = begin; i < end; ++i)
      FillTensor(catalogue, static_cast<uint32_t>(i), tallies[i], part.add_tensors());
  }
  for (size_t begin = 0; begin < uses.size(); begin += kEntriesPerPart) {
    proto::v1::ReportPart& part = parts.emplace_back();
    const size_t end = std::min(uses.size(), begin + kEntriesPerPart);
    for (size_t i = begin; i < end; ++i) {
      proto::v1::TensorUse* const use = part.add_uses();
      use->set_name(catalogue.tensors[i].name);
      use->set_forward_seconds(uses[i].forward);
      use->set_backward_seconds(uses[i].backward);
    }
  }
  return parts;
}

}  // namespace offload::daemon
