// offloadd/replan_policy.h
//
// When what a job assumes of its pool is not true any more: pure policy. A pool is measured in some
// hundredths of a second when it is opened; its drives may give something else to a training run,
// beside its processors, when they are full, hot, or shared.
//
// Measurements of some steps are put together until they are worth a judgement. Two judgements that
// follow each other have to find a rate off by more than a quarter, to the same side; the rates of
// both together are what is assumed then. Between two changes lies a number of steps that doubles
// with each.
//
// Thread safety: none; one owner.
#pragma once

#include <cstdint>
#include <optional>

#include "offloadd/rate_meter.h"
#include "proto/depths.h"

namespace offload::daemon {

struct ReplanOptions {
  uint32_t steps = 4;                       // of a judgement, at least
  double bytes = 128.0 * (1 << 20);         // that a judgement needs, of a load; 0: there is none
  uint64_t busy_bytes = uint64_t{4} << 20;  // under way: the drives have enough to do (RateMeter)
  uint32_t gap_steps = 16;                  // between the first change and the second, at least
};

// Bytes per second, where the measurements say something.
struct RatesFound {
  std::optional<double> read, write;
};

// What the drives must give, for `measured` to be so. Where they only read or only wrote for
// `bytes`, it is what they gave. Times with both in both directions show bounds only, since drives
// differ in what one direction takes from the other: less than `assumed` is found when they were
// slower than if they had done one after the other, more when a direction alone went faster.
RatesFound FindRates(const RateMeter::Measured& measured, const proto::MachineRates& assumed,
                     double bytes);

class ReplanPolicy {
 public:
  // Of a pool without known rates nothing is judged.
  ReplanPolicy(const ReplanOptions& options, const proto::MachineRates& assumed)
      : options_(options), assumed_(assumed), gap_(options.gap_steps) {}

  const proto::MachineRates& assumed() const { return assumed_; }
  // By the last judgement; what there was no evidence of is missing.
  const RatesFound& found() const { return found_; }

  // A step has ended that measured this. The rates that are to be assumed from now on, when they
  // are others.
  std::optional<proto::MachineRates> Step(const RateMeter::Measured& measured);

 private:
  // Of a rate: -1 less than assumed by more than a quarter, 1 more, 0 neither.
  static int SideOf(const std::optional<double>& found, double assumed);
  std::optional<proto::MachineRates> Judge();

  const ReplanOptions options_;
  proto::MachineRates assumed_;
  RateMeter::Measured now_, before_;  // of this judgement, and of the last one that found something
  RatesFound found_;
  uint32_t steps_ = 0;                  // of this judgement
  int read_side_ = 0, write_side_ = 0;  // as the last judgement found
  uint32_t gap_;                        // after the next change
  uint32_t pause_ = 0;                  // steps until there may be one
};

}  // namespace offload::daemon
