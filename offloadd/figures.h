// offloadd/figures.h
//
// What a job has measured, as messages for tools.
//
// Thread safety: pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "offloadd/activity_log.h"
#include "offloadd/plan_comparison.h"
#include "offloadd/step_history.h"
#include "proto/depths.h"
#include "proto/offload.pb.h"
#include "proto/planned_traffic.h"
#include "proto/slab_layout.h"
#include "proto/step_words.h"

namespace offload::daemon {

void FillFigures(const proto::StepSums& sums, proto::v1::StepFigures* figures);
void FillRecord(const StepRecord& record, proto::v1::StepRecord* message);
void FillDurations(const StepHistory::Durations& durations, proto::v1::StepDurations* message);
void FillPlannedStep(const proto::StepTraffic& traffic, const proto::Catalogue& catalogue,
                     proto::v1::PlannedStep* step);
void FillDepths(const proto::Depths& depths, uint32_t pipeline_blocks, proto::v1::Depths* message);
void FillStepsOfPlan(const PlanComparison::Steps& steps, proto::v1::StepsOfPlan* message);
void FillTransfers(const ActivityLog::Taken& taken, const proto::Catalogue& catalogue,
                   proto::v1::TakeTransfersReply* reply);
// Of a tensor of the trainer's, the mean of ranks: proto::UseTimes.
struct UseSeconds {
  double forward = 0, backward = 0;
};
// The first part has `job`; each has a bounded number of entries. `tallies`: of the store's
// tensors; `uses`: of the trainer's, or empty.
std::vector<proto::v1::ReportPart> MakeReport(proto::v1::JobStatus job, const StepHistory& history,
                                              const proto::Catalogue& catalogue,
                                              std::span<const ActivityLog::Tally> tallies,
                                              std::span<const UseSeconds> uses);

}  // namespace offload::daemon
