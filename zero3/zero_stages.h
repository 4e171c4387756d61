// zero3/zero_stages.h
//
// What the stages of ZeRO mean for one job: the bytes that its ranks would hold if each kept what
// is its own, and what a plan of each stage holds and moves here, where they share one copy.
//
// Thread safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "zero3/planner.h"

namespace offload::zero3 {

struct StageCost {
  int stage = 0;
  // Of all ranks of the node together, each with memory of its own: what the stage does not divide
  // N times, and what it divides once.
  uint64_t unshared_bytes = 0;
  uint64_t whole_bytes = 0;  // the most that a plan of this stage can use here
  // Of the plan within `ram`, per step of one micro-batch; 0 when there is none.
  uint64_t planned_bytes = 0;
  double read_bytes = 0, written_bytes = 0;
};

// Of `input`, whatever stage it asks for.
std::array<StageCost, kZeroStageMax + 1> CompareStages(const PlanInput& input);

// A table for people.
std::string DescribeStages(const PlanInput& input);

}  // namespace offload::zero3
