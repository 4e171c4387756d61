// tools/plan_status.h
//
// What the plan of a job says of a step beside what its steps have been, and what its operations
// are estimated to be, for people and as JSON.
//
// Thread safety: pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "proto/offload.pb.h"
#include "tools/answer.h"

namespace offload::tools {

// Fewer steps say little.
inline constexpr uint64_t kStepsCompared = 10;

struct Beside {
  double planned = 0, measured = 0;

  // Missing where nothing is planned.
  std::optional<double> Ratio() const {
    return planned > 0 ? std::optional(measured / planned) : std::nullopt;
  }
};
// Of a step, on average.
struct PlanComparison {
  uint64_t first_step = 0, step_count = 0;
  Beside read_bytes, written_bytes;  // of the drive; written: with the checkpoints that there were
  // Planned is the least time that the planned bytes take at the pool's rates, both directions at
  // once, and that the ranks took for everything but waiting (compute_seconds), whichever is more.
  Beside seconds;
  double drive_seconds = 0, compute_seconds = 0;
  Beside memory_bytes;  // measured: the most that there were
};
// Missing before the job has made kStepsCompared steps under its plan.
std::optional<PlanComparison> ComparePlan(const proto::v1::PlanStatus& plan);

// Planned bytes of a step that is no checkpoint.
uint64_t PlannedReadBytes(const proto::v1::PlannedStep& step);
uint64_t PlannedWrittenBytes(const proto::v1::PlannedStep& step);

// Operations of a step on `tokens` tokens, all micro-batches and ranks together, as people estimate
// them: two for each element of a matrix and token in the forward, two for the gradient of its
// input, two for that of a trained one. Attention itself and activations that are computed anew are
// not in it, and a table of embeddings, which is only looked up, is.
double EstimateOperations(uint64_t matrix_elements, uint64_t trained_elements, uint64_t tokens);

// Of a sealed job, some lines, the first beginning with "plan"; of others none.
std::string PlanLines(const proto::v1::JobStatus& job);
// Null before the job is sealed; its "comparison" is null before there is one.
Json DescribePlanStatus(const proto::v1::JobStatus& job);
// The same as a table of HTML under a heading; empty before the job is sealed.
std::string PlanTable(const proto::v1::JobStatus& job);

}  // namespace offload::tools
