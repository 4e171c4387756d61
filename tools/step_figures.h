// tools/step_figures.h
//
// What jobs measure of their steps, for people and as JSON. Lists of a message that are shorter
// than they should be count as zeros.
//
// Thread safety: pure.
#pragma once

#include <string>

#include "proto/offload.pb.h"
#include "proto/step_words.h"
#include "tools/answer.h"

namespace offload::tools {

double PhaseSeconds(const proto::v1::StepFigures& figures, proto::StepPhase phase);
// Of all phases.
double StallSeconds(const proto::v1::StepFigures& figures, proto::StallCause cause);
double StallSeconds(const proto::v1::StepFigures& figures);
// Part of the time of all phases, 0 to 1; more where several threads wait at once. 0 without time.
double StallShare(const proto::v1::StepFigures& figures);
// Part of the prefetches that were on time, 0 to 1; negative when there were none.
double OnTimeShare(const proto::v1::StepFigures& figures);

// By the names of proto/step_words.h.
Json DescribeFigures(const proto::v1::StepFigures& figures);
Json DescribeRecord(const proto::v1::StepRecord& record);

}  // namespace offload::tools
