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

#include "tools/answer.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_traffic.h"
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

// Bytes per second of copies to a device and back; both counts the two directions at once, 0: not
// known.
struct Link {
  double to_device = 0, to_host = 0, both = 0;
  std::string source;  // "measured" or "given"
};

// How long the link takes for a step, both directions at once.
double LinkSeconds(const zero3::LinkTraffic& traffic, const Link& link);

// The tier above ram, where a budget of it was given.
struct GpuTier {
  uint64_t ram_bytes = 0;
  zero3::GpuPlan plan;
  zero3::LinkTraffic traffic;  // of a step, all its micro-batches
  std::optional<Link> link;
  std::string why_no_tier;  // zero3/gpu/gpu_tensors.h
};

struct PlanReport {
  std::string model;
  zero3::PlanInput input;
  int64_t micro_batches = 1;
  std::string pool;         // "" when none was named
  uint64_t free_bytes = 0;  // of the pool
  std::optional<Drive> drive;
  std::optional<GpuTier> gpu;
  double compute_seconds = 0;  // of a step in memory; 0: not known
  bool compute_is_estimated = false;
};

// How long the drive takes for a step, at the rate of the mix if that is known; nothing without
// rates.
std::optional<double> DriveSeconds(const PlanReport& report, const zero3::Plan& plan);

// What a step takes at least: the longest of what goes on at once. A machine whose cores do both
// computes 1.3 times as long beside the stream of a drive; a device does not.
struct StepBound {
  std::optional<double> compute, link, drive;  // seconds; nothing where it is not known
  double seconds = 0;                          // the longest
  const char* bound_by = "";                   // "compute", "link" or "drive"
};
StepBound BoundOf(const PlanReport& report, const zero3::Plan& plan);

// The answer for a plan that memory allows. Exit code 3 with OFD-1204 when the pool has no room.
Answer ReportPlan(const PlanReport& report, const zero3::Plan& plan);

// The answer for one that it does not: `refusal` is what MakePlan said.
Answer ReportRefusal(const PlanReport& report, const absl::Status& refusal);

}  // namespace offload::tools
