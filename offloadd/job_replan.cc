// Job's plan of a step, what steps have been beside it, and what is changed when the pool gives
// something else than was assumed.

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/fault_point.h"
#include "offloadd/figures.h"
#include "offloadd/job.h"
#include "offloadd/plan_depths.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {
namespace {

std::string DescribeRate(const char* verb, double now, double before) {
  return absl::StrFormat("%s %.2f GB/s (assumed: %.2f)", verb, now * 1e-9, before * 1e-9);
}

// ", 6 update threads instead of 4", or nothing.
std::string DescribeChange(const char* what, uint32_t now, uint32_t before) {
  return now == before ? "" : absl::StrCat(", ", now, " ", what, " instead of ", before);
}

std::string DescribeReplan(const proto::MachineRates& rates, const proto::MachineRates& assumed,
                           const proto::Depths& now, const proto::Depths& before) {
  const std::string changes =
      absl::StrCat(DescribeChange("update threads", now.update_threads, before.update_threads),
                   DescribeChange("blocks", now.pipeline_blocks, before.pipeline_blocks),
                   DescribeChange("loads", now.loads, before.loads),
                   DescribeChange("transfers", now.transfers, before.transfers),
                   DescribeChange("write-backs", now.write_backs, before.write_backs));
  return absl::StrCat(
      "the pool ",
      DescribeRate("reads", rates.read_bytes_per_second, assumed.read_bytes_per_second), " and ",
      DescribeRate("writes", rates.write_bytes_per_second, assumed.write_bytes_per_second),
      changes.empty() ? ", which asks for no other depths" : changes);
}

}  // namespace

void Job::PlanStep(std::span<const uint32_t> touches) {
  const proto::StepTraffic traffic = proto::PlanTraffic(context_.catalogue, context_.plan, touches);
  if (traffic == planned_) return;
  planned_ = traffic;
  comparison_.Begin();
}

// Between two steps, when no update is under way. What changes is how much is under way at a time,
// and which extents keep their state in memory, never what is computed or where it stands on the
// drive: a crash in here leaves what it would have left before.
void Job::ConsiderReplan() {
  if (executor_->TakeExchanged()) PlanStep(touches_);
  const proto::MachineRates assumed = replan_->assumed();
  const std::optional<proto::MachineRates> rates = replan_->Step(meter_.Take());
  if (!rates.has_value()) return;
  proto::Depths before = context_.depths;
  before.pipeline_blocks = context_.plan.pipeline_blocks;  // those that there are
  context_.depths = DepthsOfPlan(*rates, update_threads_asked_, context_.catalogue, context_.plan);
  FaultPoint("job.replan");
  executor_->TakeDepths();
  ++replans_;
  last_replan_ = absl::StrCat("before step ", step_, ": ",
                              DescribeReplan(*rates, assumed, context_.depths, before));
  comparison_.Begin();
  spdlog::info("job {}: replanned {}", identity_.name, last_replan_);
}

// While a rank computes the update leaves it its cores; while all wait there is nobody else to use
// them.
void Job::ShareCores() {
  context_.workers.SetWidth(cache_->AllRanksWait() ? context_.workers.thread_count()
                                                   : context_.depths.update_threads);
}

void Job::FillPlan(proto::v1::PlanStatus* plan) const {
  FillPlannedStep(planned_, context_.catalogue, plan->mutable_step());
  uint64_t memory_bytes = context_.layout.total_bytes;
  for (uint32_t rank = 0; rank < world_size(); ++rank) memory_bytes += RegionBytes(rank);
  plan->mutable_step()->set_memory_bytes(memory_bytes);
  FillDepths(context_.depths, context_.plan.pipeline_blocks, plan->mutable_depths());
  plan->mutable_assumed()->set_read_bytes_per_second(replan_->assumed().read_bytes_per_second);
  plan->mutable_assumed()->set_write_bytes_per_second(replan_->assumed().write_bytes_per_second);
  plan->mutable_measured()->set_read_bytes_per_second(replan_->found().read.value_or(0));
  plan->mutable_measured()->set_write_bytes_per_second(replan_->found().write.value_or(0));
  FillStepsOfPlan(comparison_.steps(), plan->mutable_steps());
  plan->mutable_steps()->set_peak_bytes(peak_bytes_);
  plan->set_replans(replans_);
  plan->set_last_replan(last_replan_);
}

}  // namespace offload::daemon
