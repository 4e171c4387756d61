#include "tools/plan_advice.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "base/status_macros.h"

namespace offload::tools {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;
constexpr uint64_t kUnlimitedRam = uint64_t{1} << 60;
constexpr int kParts = 8;  // between the floor that keeps gradients and everything

uint64_t UpToMebibyte(uint64_t bytes) { return (bytes + kMebibyte - 1) / kMebibyte * kMebibyte; }

std::string Share(uint64_t part_bytes, uint64_t all_bytes) {
  return absl::StrFormat("%3.0f%%", 100.0 * static_cast<double>(part_bytes) /
                                        static_cast<double>(std::max<uint64_t>(all_bytes, 1)));
}

std::string SecondsText(std::optional<double> seconds) {
  return seconds.has_value() ? absl::StrFormat("%8.2f s", *seconds) : "         -";
}

// `all`: the budget that keeps everything.
std::string Line(const PlanReport& report, const BudgetOffer& offer, const zero3::Plan& all,
                 std::optional<double> drive_seconds, std::optional<double> step_seconds) {
  const zero3::Plan& plan = offer.plan;
  const Traffic traffic = TrafficOf(plan, report.micro_batches);
  return absl::StrFormat("%7s  %9s  %9s  %s  %s     %s    %s%s%s\n",
                         absl::StrCat(UpToMebibyte(offer.ram_bytes) / kMebibyte, "MiB"),
                         FormatDecimalBytes(static_cast<uint64_t>(traffic.read_bytes)),
                         FormatDecimalBytes(static_cast<uint64_t>(traffic.written_bytes)),
                         SecondsText(drive_seconds), SecondsText(step_seconds),
                         Share(plan.resident_weight_bytes, all.resident_weight_bytes),
                         Share(plan.resident_state_bytes, all.resident_state_bytes),
                         plan.gradients_spilled ? "  gradients spilled" : "",
                         offer.ram_bytes == report.input.ram_bytes ? "  <- --ram" : "");
}

std::string Rates(const PlanReport& report) {
  if (!report.drive.has_value())
    return "Drive     not known: --pool DIR measures it, --read-gbps and --write-gbps say it\n";
  const Drive& drive = *report.drive;
  std::string text = absl::StrFormat("Drive     %.2f r / %.2f w GB/s (%s)", drive.read * 1e-9,
                                     drive.write * 1e-9, drive.source);
  if (drive.mixed > 0) absl::StrAppendFormat(&text, ", %.2f GB/s mixed", drive.mixed * 1e-9);
  return text + "\n";
}

}  // namespace

absl::StatusOr<std::vector<BudgetOffer>> OfferBudgets(const PlanReport& report) {
  zero3::PlanInput input = report.input;
  input.ram_bytes = kUnlimitedRam;
  OFFLOAD_ASSIGN_OR_RETURN(const zero3::Plan all, zero3::MakePlan(input));
  const uint64_t spans = all.floor_without_spilling_bytes;
  std::set<uint64_t> budgets = {UpToMebibyte(all.floor_bytes)};
  for (uint64_t part = 0; part <= kParts && !input.always_spill_gradients; ++part) {
    const uint64_t more = (std::max(all.total_bytes, spans) - spans) * part / kParts;
    budgets.insert(UpToMebibyte(spans + more));
  }
  if (report.input.ram_bytes > 0) budgets.insert(report.input.ram_bytes);
  std::vector<BudgetOffer> offers;
  for (const uint64_t ram_bytes : budgets) {
    input.ram_bytes = ram_bytes;
    OFFLOAD_ASSIGN_OR_RETURN(zero3::Plan plan, zero3::MakePlan(input));
    offers.push_back({ram_bytes, std::move(plan)});
  }
  return offers;
}

absl::StatusOr<Answer> ReportOffers(const PlanReport& report) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<BudgetOffer> offers, OfferBudgets(report));
  Answer answer;
  answer.data = {{"model", report.model}, {"micro_batches", report.micro_batches}};
  if (report.drive.has_value()) {
    answer.data["drive"] = {{"source", report.drive->source},
                            {"read_bytes_per_second", report.drive->read},
                            {"write_bytes_per_second", report.drive->write},
                            {"mixed_bytes_per_second", report.drive->mixed}};
  }
  answer.text = absl::StrCat("Model     ", report.model, "\n", Rates(report),
                             "    ram       read    written       drive        step  weights  "
                             "state\n");
  Json& rows = answer.data["budgets"] = Json::array();
  for (const BudgetOffer& offer : offers) {
    const StepBound bound = BoundOf(report, offer.plan);
    const std::optional<double> drive_seconds = bound.drive;
    std::optional<double> step_seconds;
    if (bound.drive.has_value() && bound.compute.has_value() &&
        (bound.link.has_value() || !report.gpu.has_value()))
      step_seconds = bound.seconds;
    const Traffic traffic = TrafficOf(offer.plan, report.micro_batches);
    rows.push_back({{"ram_bytes", offer.ram_bytes},
                    {"read_bytes", traffic.read_bytes},
                    {"written_bytes", traffic.written_bytes},
                    {"drive_seconds", drive_seconds.has_value() ? Json(*drive_seconds) : Json()},
                    {"step_seconds", step_seconds.has_value() ? Json(*step_seconds) : Json()},
                    {"resident_weight_bytes", offer.plan.resident_weight_bytes},
                    {"resident_state_bytes", offer.plan.resident_state_bytes},
                    {"gradients_spilled", offer.plan.gradients_spilled},
                    {"checkpoint_bytes", offer.plan.checkpoint_bytes}});
    answer.text += Line(report, offer, offers.back().plan, drive_seconds, step_seconds);
  }
  if (report.compute_seconds == 0)
    answer.advice =
        "Next: --compute-seconds, what a step takes in memory, for the time of a step; or --tokens "
        "and --gflops, for an estimate";
  return answer;
}

}  // namespace offload::tools
