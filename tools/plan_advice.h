// tools/plan_advice.h
//
// What each of a row of budgets buys: the plans of `offloadctl plan --advise`, from the least that
// trains to the one that keeps everything in memory. Pure functions of the model and the drive's
// rates.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/plan_report.h"

namespace offload::tools {

struct BudgetOffer {
  uint64_t ram_bytes = 0;  // whole MiB
  zero3::Plan plan;
};

// By ascending `ram_bytes`: both floors, some between them and all of it, and, unless it is 0, the
// budget that `report` has. OFD-1301 for one that does not train.
absl::StatusOr<std::vector<BudgetOffer>> OfferBudgets(const PlanReport& report);

// A line for each budget: bytes of a step, the drive's time, and, where that of the computation is
// known (and on a device that of the link), the step's.
absl::StatusOr<Answer> ReportOffers(const PlanReport& report);

}  // namespace offload::tools
