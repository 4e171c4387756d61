#include "tools/plan_status.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "tools/chart.h"
#include "tools/daemons.h"

namespace offload::tools {
namespace {

namespace v1 = proto::v1;

std::string Traffic(double bytes) {
  return FormatDecimalBytes(static_cast<uint64_t>(std::llround(bytes)));
}
std::string Memory(double bytes) { return FormatBytes(static_cast<uint64_t>(bytes)); }
std::string Seconds(double seconds) { return absl::StrFormat("%.3g s", seconds); }
std::string RatioText(const Beside& beside) {
  return beside.Ratio().has_value() ? absl::StrFormat("%.2f", *beside.Ratio()) : "–";
}

std::string RatesText(const v1::PoolRates& rates) {
  const auto text = [](double bytes_per_second) {
    return bytes_per_second > 0 ? absl::StrFormat("%.2f", bytes_per_second * 1e-9) : "?";
  };
  return absl::StrCat(text(rates.read_bytes_per_second()), "r/",
                      text(rates.write_bytes_per_second()), "w GB/s");
}

std::string DepthsText(const v1::Depths& depths) {
  return absl::StrCat(depths.update_threads(), " update threads, ", depths.pipeline_blocks(),
                      " blocks, ", depths.loads(), " loads, ", depths.transfers(), " transfers, ",
                      depths.write_backs(), " write-backs");
}

Json Describe(const Beside& beside) {
  return {{"planned", beside.planned},
          {"measured", beside.measured},
          {"ratio", beside.Ratio().has_value() ? Json(*beside.Ratio()) : Json(nullptr)}};
}

Json Describe(const v1::PoolRates& rates) {
  return {{"read_bytes_per_second", rates.read_bytes_per_second()},
          {"write_bytes_per_second", rates.write_bytes_per_second()}};
}

std::string ComparisonLine(const PlanComparison& compared) {
  const auto beside = [](const char* what, const Beside& each, std::string (*text)(double)) {
    return absl::StrCat("  ", what, " ", text(each.measured), " of ", text(each.planned), " (",
                        RatioText(each), ")");
  };
  return absl::StrCat(
      "  ", compared.step_count, " steps from ", compared.first_step,
      " on, each, of what is planned:", beside("read", compared.read_bytes, Traffic),
      beside("written", compared.written_bytes, Traffic), "  took ",
      Seconds(compared.seconds.measured), ", at least ", Seconds(compared.drive_seconds),
      " of drive and ", Seconds(compared.compute_seconds), " of ranks (",
      RatioText(compared.seconds), ")", beside("memory", compared.memory_bytes, Memory), "\n");
}

std::string Row(const std::string& what, const std::string& planned, const std::string& measured,
                const std::string& ratio) {
  return absl::StrCat("<tr><td>", what, "</td><td>", planned, "</td><td>", measured, "</td><td>",
                      ratio, "</td></tr>\n");
}

std::string TimesOfReplans(const v1::PlanStatus& plan) {
  return plan.replans() == 1 ? "once, " : absl::StrCat(plan.replans(), " times, last ");
}

}  // namespace

uint64_t PlannedReadBytes(const v1::PlannedStep& step) {
  return step.weight_read_bytes() + step.state_read_bytes() + step.gradient_read_bytes();
}

uint64_t PlannedWrittenBytes(const v1::PlannedStep& step) {
  return step.written_bytes() + step.gradient_written_bytes();
}

std::optional<PlanComparison> ComparePlan(const v1::PlanStatus& plan) {
  const v1::StepsOfPlan& steps = plan.steps();
  if (steps.step_count() < kStepsCompared) return std::nullopt;
  const auto count = static_cast<double>(steps.step_count());
  PlanComparison compared;
  compared.first_step = steps.first_step();
  compared.step_count = steps.step_count();
  const double checkpoints = static_cast<double>(steps.checkpoints()) / count;
  compared.read_bytes = {static_cast<double>(PlannedReadBytes(plan.step())),
                         static_cast<double>(steps.bytes_read()) / count};
  compared.written_bytes = {static_cast<double>(PlannedWrittenBytes(plan.step())) +
                                checkpoints * static_cast<double>(plan.step().checkpoint_bytes()),
                            static_cast<double>(steps.bytes_written()) / count};
  const auto of_drive = [](double bytes, double bytes_per_second) {
    return bytes_per_second > 0 ? bytes / bytes_per_second : 0;
  };
  compared.drive_seconds =
      std::max(of_drive(compared.read_bytes.planned, plan.assumed().read_bytes_per_second()),
               of_drive(compared.written_bytes.planned, plan.assumed().write_bytes_per_second()));
  compared.compute_seconds = steps.compute_seconds() / count;
  compared.seconds = {std::max(compared.drive_seconds, compared.compute_seconds),
                      steps.seconds() / count};
  compared.memory_bytes = {static_cast<double>(plan.step().memory_bytes()),
                           static_cast<double>(steps.peak_bytes())};
  return compared;
}

double EstimateOperations(uint64_t matrix_elements, uint64_t trained_elements, uint64_t tokens) {
  return (4.0 * static_cast<double>(matrix_elements) +
          2.0 * static_cast<double>(trained_elements)) *
         static_cast<double>(tokens);
}

std::string PlanLines(const v1::JobStatus& job) {
  if (!job.has_plan()) return "";
  const v1::PlanStatus& plan = job.plan();
  std::string lines =
      absl::StrCat("plan    ", Printable(job.job()), "  of a step: reads ",
                   Traffic(static_cast<double>(PlannedReadBytes(plan.step()))), ", writes ",
                   Traffic(static_cast<double>(PlannedWrittenBytes(plan.step()))),
                   ", a checkpoint ", Traffic(static_cast<double>(plan.step().checkpoint_bytes())),
                   " more", plan.step().order_known() ? "" : " (order of tensors not known yet)",
                   "  pool assumed ", RatesText(plan.assumed()), ", measured ",
                   RatesText(plan.measured()), "  ", DepthsText(plan.depths()), "\n");
  if (const std::optional<PlanComparison> compared = ComparePlan(plan))
    lines += ComparisonLine(*compared);
  if (plan.replans() > 0) {
    absl::StrAppend(&lines, "  replanned ", TimesOfReplans(plan), Printable(plan.last_replan()),
                    "\n");
  }
  return lines;
}

Json DescribePlanStatus(const v1::JobStatus& job) {
  if (!job.has_plan()) return nullptr;
  const v1::PlanStatus& plan = job.plan();
  const v1::PlannedStep& step = plan.step();
  Json comparison = nullptr;
  if (const std::optional<PlanComparison> compared = ComparePlan(plan)) {
    comparison = {{"first_step", compared->first_step},
                  {"steps", compared->step_count},
                  {"checkpoints", plan.steps().checkpoints()},
                  {"read_bytes", Describe(compared->read_bytes)},
                  {"written_bytes", Describe(compared->written_bytes)},
                  {"seconds", Describe(compared->seconds)},
                  {"drive_seconds", compared->drive_seconds},
                  {"compute_seconds", compared->compute_seconds},
                  {"memory_bytes", Describe(compared->memory_bytes)}};
  }
  return {{"step",
           {{"weight_read_bytes", step.weight_read_bytes()},
            {"state_read_bytes", step.state_read_bytes()},
            {"gradient_read_bytes", step.gradient_read_bytes()},
            {"gradient_written_bytes", step.gradient_written_bytes()},
            {"written_bytes", step.written_bytes()},
            {"checkpoint_bytes", step.checkpoint_bytes()},
            {"memory_bytes", step.memory_bytes()},
            {"order_known", step.order_known()},
            {"passes", step.passes()}}},
          {"depths",
           {{"update_threads", plan.depths().update_threads()},
            {"pipeline_blocks", plan.depths().pipeline_blocks()},
            {"loads", plan.depths().loads()},
            {"transfers", plan.depths().transfers()},
            {"write_backs", plan.depths().write_backs()}}},
          {"assumed", Describe(plan.assumed())},
          {"measured", Describe(plan.measured())},
          {"comparison", std::move(comparison)},
          {"replans", plan.replans()},
          {"last_replan", plan.last_replan()}};
}

std::string PlanTable(const v1::JobStatus& job) {
  if (!job.has_plan()) return "";
  const v1::PlanStatus& plan = job.plan();
  std::string html = "<h2>Plan and reality, of a step</h2>\n";
  if (const std::optional<PlanComparison> compared = ComparePlan(plan)) {
    const auto row = [](const char* what, const Beside& each, std::string (*text)(double)) {
      return Row(what, text(each.planned), text(each.measured), RatioText(each));
    };
    absl::StrAppend(
        &html, "<table>\n<tr><th>mean of ", compared->step_count, " steps from ",
        compared->first_step, " on</th><th>planned</th><th>measured</th><th>ratio</th></tr>\n",
        row("read from the drive", compared->read_bytes, Traffic),
        row("written to it", compared->written_bytes, Traffic),
        row("time, at least", compared->seconds, Seconds),
        Row("&nbsp; of it the drive for what is planned", Seconds(compared->drive_seconds), "", ""),
        Row("&nbsp; of it the ranks, without waiting", "", Seconds(compared->compute_seconds), ""),
        row("memory, at most", compared->memory_bytes, Memory), "</table>\n");
  } else {
    absl::StrAppend(&html, "<p>Compared after ", kStepsCompared, " steps.</p>\n");
  }
  absl::StrAppend(&html, "<p class=\"note\">Pool: ", RatesText(plan.assumed()), " assumed, ",
                  RatesText(plan.measured()), " measured. ", DepthsText(plan.depths()), ".");
  if (plan.replans() > 0) {
    absl::StrAppend(&html, " Replanned ", TimesOfReplans(plan), EscapeHtml(plan.last_replan()),
                    ".");
  }
  return html + "</p>\n";
}

}  // namespace offload::tools
