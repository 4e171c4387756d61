#include "tools/plan_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "zero3/zero_stages.h"

namespace offload::tools {
namespace {

// Written bytes that a common drive of 1 TB is rated for; gives wear a scale.
constexpr double kRatedBytes = 600e12;
constexpr uint64_t kUnlimitedRam = uint64_t{1} << 60;
constexpr double kComputeBesideStream = 1.3;

uint64_t Rounded(double value) { return static_cast<uint64_t>(std::llround(value)); }
std::string Traffic10(double bytes) { return FormatDecimalBytes(Rounded(bytes)); }

// A value for --ram that is not below `bytes`.
std::string RamFlag(uint64_t bytes) {
  return absl::StrCat("--ram ", (bytes + (1 << 20) - 1) >> 20, "MiB");
}

std::string Seconds(double seconds) {
  return absl::StrFormat("%.*f", seconds < 10 ? 2 : 0, seconds);
}

// The next larger budget worth naming, and what it saves.
struct Saving {
  uint64_t ram_bytes = 0;
  double bytes_per_step = 0;
};
std::optional<Saving> FindSaving(const PlanReport& report, const zero3::Plan& plan) {
  zero3::PlanInput more = report.input;
  more.ram_bytes =
      plan.gradients_spilled ? plan.floor_without_spilling_bytes : 2 * report.input.ram_bytes;
  const auto better = zero3::MakePlan(more);
  if (!better.ok()) return std::nullopt;
  const Traffic now = TrafficOf(plan, report.micro_batches);
  const Traffic then = TrafficOf(*better, report.micro_batches);
  const double saved = now.read_bytes + now.written_bytes - then.read_bytes - then.written_bytes;
  if (saved <= 0.01 * (now.read_bytes + now.written_bytes)) return std::nullopt;
  return Saving{more.ram_bytes, saved};
}

Json Base(const PlanReport& report) {
  return {{"model", report.model}, {"ram_bytes", report.input.ram_bytes}};
}

void AddMemory(const zero3::Plan& plan, Answer& answer) {
  answer.data["parameters"] = plan.parameter_count;
  answer.data["state_bytes"] = plan.state_bytes;
  answer.data["gradient_bytes"] = plan.gradient_bytes;
  answer.data["store_bytes"] = plan.store_bytes;
  answer.data["scratch_bytes"] = plan.memory.scratch_bytes;
  answer.data["memory"] = {
      {"sum_bytes", plan.total_bytes},
      {"slab_bytes", plan.slab.total_bytes},
      {"region_bytes",
       plan.memory.region_bytes + (plan.memory.world_size - 1) * plan.memory.other_region_bytes},
      {"overhead_bytes", plan.overhead_bytes},
      {"window_bytes", plan.memory.window_bytes},
      {"pipeline_blocks", plan.memory.pipeline_blocks},
      {"resident_weight_bytes", plan.resident_weight_bytes},
      {"resident_state_bytes", plan.resident_state_bytes}};
  answer.data["gradients_spilled"] = plan.gradients_spilled;
  answer.data["floor_bytes"] = plan.floor_bytes;
  answer.data["floor_without_spilling_bytes"] = plan.floor_without_spilling_bytes;
}

Json RateOf(double bytes_per_second) {
  return bytes_per_second > 0 ? Json(bytes_per_second) : Json(nullptr);
}

void AddGpu(const PlanReport& report, Answer& answer) {
  if (!report.gpu.has_value()) return;
  const zero3::GpuPlan& plan = report.gpu->plan;
  answer.data["gpu"] = {{"gpu_ram_bytes", report.gpu->ram_bytes},
                        {"window_bytes", plan.window_bytes},
                        {"weight_bytes", plan.weight_bytes},
                        {"gradient_bytes", plan.gradient_bytes},
                        {"updated_weight_bytes", plan.tier_weight_bytes},
                        {"updated_state_bytes", plan.tier_state_bytes},
                        {"floor_bytes", plan.floor_bytes}};
  answer.text += zero3::DescribeGpuPlan(plan, report.gpu->ram_bytes, report.gpu->why_no_tier);
  if (report.input.world_size > 1) {
    answer.text +=
        "weights: gathered where the ranks' devices reach each other, else copied by each rank\n";
  }
}

// What of all there is a tier holds.
std::string Part(uint64_t part_bytes, uint64_t all_bytes, const char* of) {
  const std::string part = FormatBytes(part_bytes), all = FormatBytes(all_bytes);
  const bool is_all = part_bytes >= all_bytes || part == all;
  return absl::StrCat(is_all ? "all " : part + " of ", all, " of ", of);
}

// One line per memory, from the device down.
void AddTiers(const PlanReport& report, const zero3::Plan& plan, Answer& answer) {
  if (!report.gpu.has_value() || report.input.world_size > 1) return;
  const zero3::GpuPlan& gpu = report.gpu->plan;
  const zero3::LinkTraffic& traffic = report.gpu->traffic;
  const uint64_t all_weights = gpu.weight_bytes;
  const uint64_t state_bytes = plan.state_bytes - std::min(plan.state_bytes, all_weights);
  const uint64_t spilled_bytes = plan.memory.scratch_bytes;
  const uint64_t kept_bytes = plan.gradient_bytes - std::min(plan.gradient_bytes, spilled_bytes);
  const uint64_t ram_weights = plan.resident_weight_bytes + plan.memory.window_bytes;
  absl::StrAppend(
      &answer.text, "Tier      gpu_ram ", FormatBytes(report.gpu->ram_bytes), ": ",
      Part(gpu.window_bytes + gpu.tier_weight_bytes, all_weights, "weights"), ", ",
      Part(gpu.gradient_bytes, plan.gradient_bytes, "gradients"),
      gpu.stays.empty()
          ? ""
          : absl::StrCat(", ", Part(gpu.tier_state_bytes, state_bytes, "optimizer state")),
      "; a step copies ", Traffic10(static_cast<double>(traffic.ToDeviceBytes())), " there and ",
      Traffic10(static_cast<double>(traffic.ToHostBytes())), " back",
      traffic.checkpoint_bytes == 0
          ? ""
          : absl::StrCat(", and ", FormatDecimalBytes(traffic.checkpoint_bytes),
                         " back at a checkpoint"),
      "\n", "Tier      ram ", FormatBytes(report.input.ram_bytes), ": ",
      Part(ram_weights, all_weights, "weights"), ", ",
      Part(kept_bytes, plan.gradient_bytes, "gradients"), ", ",
      Part(plan.resident_state_bytes, state_bytes, "optimizer state"), "\n", "Tier      drive ",
      FormatDecimalBytes(plan.store_bytes + spilled_bytes), ": everything, in two places",
      spilled_bytes > 0 ? absl::StrCat(", and ", FormatBytes(spilled_bytes), " of gradients") : "",
      "\n");
}

void AddLink(const PlanReport& report, Answer& answer) {
  if (!report.gpu.has_value() || report.input.world_size > 1) return;
  const zero3::LinkTraffic& traffic = report.gpu->traffic;
  Json link = {{"to_device_bytes", traffic.ToDeviceBytes()},
               {"to_host_bytes", traffic.ToHostBytes()},
               {"weight_bytes", traffic.weight_bytes},
               {"fetched_gradient_bytes", traffic.fetched_bytes},
               {"checkpoint_bytes", traffic.checkpoint_bytes}};
  if (report.gpu->link.has_value()) {
    const Link& rates = *report.gpu->link;
    const double seconds = LinkSeconds(traffic, rates);
    link["source"] = rates.source;
    link["to_device_bytes_per_second"] = rates.to_device;
    link["to_host_bytes_per_second"] = rates.to_host;
    link["both_bytes_per_second"] = RateOf(rates.both);
    link["seconds"] = seconds;
    absl::StrAppendFormat(
        &answer.text, "Link      %s to the device, %s back, at %.2f / %.2f GB/s (%s): %s s\n",
        Traffic10(static_cast<double>(traffic.ToDeviceBytes())),
        Traffic10(static_cast<double>(traffic.ToHostBytes())), rates.to_device * 1e-9,
        rates.to_host * 1e-9, rates.source, Seconds(seconds));
  }
  answer.data["link"] = std::move(link);
}

Json SecondsOrNull(std::optional<double> seconds) {
  return seconds.has_value() ? Json(*seconds) : Json(nullptr);
}

// Where more is known than the drive's part, which has a line of its own.
void AddBound(const PlanReport& report, const zero3::Plan& plan, Answer& answer) {
  const StepBound bound = BoundOf(report, plan);
  if (!bound.compute.has_value() && !bound.link.has_value()) return;
  answer.data["bound"] = {{"compute_seconds", SecondsOrNull(bound.compute)},
                          {"link_seconds", SecondsOrNull(bound.link)},
                          {"drive_seconds", SecondsOrNull(bound.drive)},
                          {"compute_is_estimated", report.compute_is_estimated},
                          {"seconds", bound.seconds},
                          {"bound_by", bound.bound_by}};
  const auto part = [](const char* name, std::optional<double> seconds) {
    return absl::StrCat(name, " ", seconds.has_value() ? Seconds(*seconds) + " s" : "not known");
  };
  absl::StrAppend(&answer.text, "Step      ", Seconds(bound.seconds), " s at least, the ",
                  bound.bound_by, "'s: ", part("compute", bound.compute),
                  report.compute_is_estimated ? " (estimated)" : "",
                  report.gpu.has_value() ? ", " + part("link", bound.link) : "", ", ",
                  part("drive", bound.drive), "\n");
}

void AddSpace(const PlanReport& report, const zero3::Plan& plan, Answer& answer) {
  if (report.pool.empty()) return;
  const uint64_t needed_bytes = plan.store_bytes + plan.memory.scratch_bytes;
  answer.data["pool"] = {{"path", report.pool}, {"free_bytes", report.free_bytes}};
  const std::string sum =
      absl::StrCat(FormatDecimalBytes(needed_bytes), " of ", FormatDecimalBytes(report.free_bytes),
                   " free in ", report.pool);
  const bool fits = needed_bytes <= report.free_bytes;
  absl::StrAppend(&answer.text, "Drive     ", sum, fits ? "  fits\n" : "  DOES NOT FIT\n");
  if (fits) return;
  answer.data["fits"] = false;
  answer.exit_code = kDoesNotFit;
  answer.problem = MakeError(ErrorId::kPoolFull, absl::StrCat("the job needs ", sum));
}

void AddStep(const PlanReport& report, const zero3::Plan& plan, Answer& answer) {
  const Traffic traffic = TrafficOf(plan, report.micro_batches);
  Json step = {{"micro_batches", report.micro_batches},
               {"read_bytes", Rounded(traffic.read_bytes)},
               {"written_bytes", Rounded(traffic.written_bytes)}};
  absl::StrAppend(&answer.text, "Per step  reads ", Traffic10(traffic.read_bytes), "  writes ",
                  Traffic10(traffic.written_bytes));
  if (report.micro_batches > 1) {
    absl::StrAppend(&answer.text, "  (", report.micro_batches, " micro-batches)");
  }
  if (report.drive.has_value()) {
    const Drive& drive = *report.drive;
    const StepSeconds seconds = SecondsOf(traffic, drive);
    step["drive"] = {{"source", drive.source},
                     {"read_bytes_per_second", drive.read},
                     {"write_bytes_per_second", drive.write},
                     {"mixed_bytes_per_second", RateOf(drive.mixed)}};
    step["seconds"] = {{"overlapped", seconds.overlapped},
                       {"serial", seconds.serial},
                       {"mixed", SecondsOrNull(seconds.mixed)}};
    absl::StrAppend(&answer.text,
                    absl::StrFormat("  at %.2f r / %.2f w GB/s (%s): disk %s-%s s",
                                    drive.read * 1e-9, drive.write * 1e-9, drive.source,
                                    Seconds(seconds.overlapped), Seconds(seconds.serial)));
    if (seconds.mixed.has_value()) {
      absl::StrAppend(&answer.text, absl::StrFormat(", %s s at the mixed rate of %.2f GB/s",
                                                    Seconds(*seconds.mixed), drive.mixed * 1e-9));
    }
  }
  answer.text += "\n";
  answer.data["per_step"] = std::move(step);
}

// How far the rated writes of a drive reach.
void AddLife(const PlanReport& report, const zero3::Plan& plan, Answer& answer) {
  const double written = TrafficOf(plan, report.micro_batches).written_bytes;
  const auto times = [](double bytes) {
    return FormatCount(Rounded(std::min(kRatedBytes / std::max(bytes, 1.0), 1e15)));
  };
  const Durability& durability = report.input.durability;
  if (durability.has_intervals()) {
    Json checkpoint = {{"written_bytes", plan.checkpoint_bytes}};
    if (durability.steps > 0) checkpoint["steps"] = durability.steps;
    if (durability.steps == 0) checkpoint["seconds"] = durability.seconds;
    answer.data["checkpoint"] = std::move(checkpoint);
  }
  if (durability.steps > 0) {
    absl::StrAppend(&answer.text, "Life      ", Traffic10(written),
                    " written per step: a drive rated for 600 TB lasts ", times(written),
                    " steps\n");
    return;
  }
  const auto checkpoint_bytes = static_cast<double>(plan.checkpoint_bytes);
  absl::StrAppend(&answer.text, "Life      ", Traffic10(written), " written per step and ",
                  Traffic10(checkpoint_bytes), " per checkpoint: a drive rated for 600 TB lasts ",
                  written > 0 ? absl::StrCat(times(written), " of the one or ") : "",
                  times(checkpoint_bytes), written > 0 ? " of the other\n" : " of them\n");
}

// What each stage saves, where there is something to divide or somebody asks.
void AddStages(const PlanReport& report, Answer& answer) {
  if (report.input.world_size == 1 && !report.input.policy.stage.has_value()) return;
  answer.data["zero_stages"] = Json::array();
  for (const zero3::StageCost& cost : zero3::CompareStages(report.input)) {
    answer.data["zero_stages"].push_back({{"stage", cost.stage},
                                          {"unshared_bytes", cost.unshared_bytes},
                                          {"whole_bytes", cost.whole_bytes},
                                          {"planned_bytes", cost.planned_bytes},
                                          {"read_bytes", Rounded(cost.read_bytes)},
                                          {"written_bytes", Rounded(cost.written_bytes)}});
  }
  answer.text += zero3::DescribeStages(report.input);
}

}  // namespace

Traffic TrafficOf(const zero3::Plan& plan, int64_t micro_batches) {
  const double parameters = static_cast<double>(plan.parameter_count);
  const double more = static_cast<double>(micro_batches - 1);
  const double written = plan.further_write_bytes_per_parameter();
  const double read = plan.bytes_per_further_micro_batch - written;
  return {parameters * (plan.read_bytes_per_parameter + more * read),
          parameters * (plan.write_bytes_per_parameter + more * written)};
}

StepSeconds SecondsOf(const Traffic& traffic, const Drive& drive) {
  const double read = traffic.read_bytes / drive.read;
  const double written = traffic.written_bytes / drive.write;
  StepSeconds seconds{std::max(read, written), read + written, std::nullopt};
  if (drive.mixed > 0) seconds.mixed = (traffic.read_bytes + traffic.written_bytes) / drive.mixed;
  return seconds;
}

double LinkSeconds(const zero3::LinkTraffic& traffic, const Link& link) {
  const auto to_device = static_cast<double>(traffic.ToDeviceBytes());
  const auto to_host = static_cast<double>(traffic.ToHostBytes());
  return std::max({to_device / link.to_device, to_host / link.to_host,
                   link.both > 0 ? (to_device + to_host) / link.both : 0});
}

std::optional<double> DriveSeconds(const PlanReport& report, const zero3::Plan& plan) {
  if (!report.drive.has_value()) return std::nullopt;
  const StepSeconds seconds = SecondsOf(TrafficOf(plan, report.micro_batches), *report.drive);
  return seconds.mixed.value_or(seconds.overlapped);
}

StepBound BoundOf(const PlanReport& report, const zero3::Plan& plan) {
  StepBound bound;
  bound.drive = DriveSeconds(report, plan);
  if (report.gpu.has_value() && report.gpu->link.has_value())
    bound.link = LinkSeconds(report.gpu->traffic, *report.gpu->link);
  if (report.compute_seconds > 0) {
    const bool is_slowed = !report.gpu.has_value() && bound.drive.value_or(0) > 0;
    bound.compute = report.compute_seconds * (is_slowed ? kComputeBesideStream : 1);
  }
  for (const auto& [part, name] :
       {std::pair{bound.compute, "compute"}, {bound.link, "link"}, {bound.drive, "drive"}}) {
    if (part.value_or(0) < bound.seconds || !part.has_value()) continue;
    bound.seconds = *part;
    bound.bound_by = name;
  }
  return bound;
}

Answer ReportPlan(const PlanReport& report, const zero3::Plan& plan) {
  Answer answer;
  answer.data = Base(report);
  answer.data["fits"] = true;
  answer.text =
      absl::StrCat("Model     ", report.model, "\n", zero3::DescribePlan(report.input, plan));
  AddMemory(plan, answer);
  AddGpu(report, answer);
  AddTiers(report, plan, answer);
  AddSpace(report, plan, answer);
  AddStep(report, plan, answer);
  AddLink(report, answer);
  AddBound(report, plan, answer);
  AddLife(report, plan, answer);
  AddStages(report, answer);
  if (const std::optional<Saving> saving = FindSaving(report, plan); saving.has_value()) {
    answer.data["advice"] = {{"ram_bytes", saving->ram_bytes},
                             {"saved_bytes_per_step", Rounded(saving->bytes_per_step)}};
    absl::StrAppend(&answer.text, "Advice    ", RamFlag(saving->ram_bytes), " saves ",
                    Traffic10(saving->bytes_per_step), " per step\n");
  }
  return answer;
}

// Both floors come from a plan with memory without end.
Answer ReportRefusal(const PlanReport& report, const absl::Status& refusal) {
  Answer answer;
  answer.data = Base(report);
  answer.data["fits"] = false;
  answer.problem = refusal;
  answer.exit_code = ExitCodeOf(refusal);
  zero3::PlanInput endless = report.input;
  endless.ram_bytes = kUnlimitedRam;
  if (const auto plan = zero3::MakePlan(endless); plan.ok()) {
    answer.data["parameters"] = plan->parameter_count;
    answer.data["state_bytes"] = plan->state_bytes;
    answer.data["gradient_bytes"] = plan->gradient_bytes;
    answer.data["floor_bytes"] = plan->floor_bytes;
    answer.data["floor_without_spilling_bytes"] = plan->floor_without_spilling_bytes;
    answer.advice =
        absl::StrCat("Next: offloadctl plan with ", RamFlag(plan->floor_bytes),
                     " (gradients spilled) or ", RamFlag(plan->floor_without_spilling_bytes));
  }
  return answer;
}

}  // namespace offload::tools
