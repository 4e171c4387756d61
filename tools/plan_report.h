// tools/plan_report.h
//
// What `offloadctl plan` says about a plan: bytes and seconds of a step, space, and what more
// memory would save. Pure functions of the plan and the drive's rates.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/command.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/planner.h"

namespace offload::tools {

// Bytes of one step, all its micro-batches.
struct Traffic {
  double read_bytes = 0, written_bytes = 0;
};
Traffic TrafficOf(const zero3::Plan& plan, int64_t micro_batches);

// Bytes per second. Mixed counts both directions, in a step's proportion; 0: not known.
struct Drive {
  double read = 0, write = 0, mixed = 0;
  std::string source;  // "measured" or "given"
};

// How long the drive takes for a step: both directions at full rate at once, one after the other,
// and at the rate of the mix, if that is known.
struct StepSeconds {
  double overlapped = 0, serial = 0;
  std::optional<double> mixed;
};
StepSeconds SecondsOf(const Traffic& traffic, const Drive& drive);

// The tier above ram, where a budget of it was given.
struct GpuTier {
  uint64_t ram_bytes = 0;
  zero3::GpuPlan plan;
};

struct PlanReport {
  std::string model;
  zero3::PlanInput input;
  int64_t micro_batches = 1;
  std::string pool;         // "" when none was named
  uint64_t free_bytes = 0;  // of the pool
  std::optional<Drive> drive;
  std::optional<GpuTier> gpu;
};

// The answer for a plan that memory allows. Exit code 3 with OFD-1204 when the pool has no room.
Answer ReportPlan(const PlanReport& report, const zero3::Plan& plan);

// The answer for one that it does not: `refusal` is what MakePlan said.
Answer ReportRefusal(const PlanReport& report, const absl::Status& refusal);

}  // namespace offload::tools
