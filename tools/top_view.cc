#include "tools/top_view.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "tools/plan_status.h"
#include "tools/rank_view.h"
#include "tools/step_figures.h"

namespace offload::tools {
namespace {

namespace v1 = proto::v1;

std::string Percent(double share) {
  return share < 0 ? "-" : absl::StrFormat("%.0f%%", share * 100);
}

// Of one step; the record of a job that has been running for long may be of several.
double PerStep(const v1::StepRecord& record, double value) {
  return value / static_cast<double>(record.last_step() - record.first_step() + 1);
}

std::string BytesPerStep(const v1::StepRecord& record, uint64_t bytes) {
  return FormatDecimalBytes(static_cast<uint64_t>(PerStep(record, static_cast<double>(bytes))));
}

std::string Heading() {
  return absl::StrFormat("%-14s %6s %7s %8s %6s %8s %11s %13s\n", "JOB", "STEP", "COMMIT", "S/STEP",
                         "STALL", "ON TIME", "READ/STEP", "WRITTEN/STEP");
}

std::string JobLine(const v1::JobStatus& job) {
  const std::string name = Clip(Printable(job.job()), 14);
  if (!job.has_last_step())
    return absl::StrFormat("%-14s %6d %7d  %s\n", name, job.step(), job.durable_step(),
                           Printable(job.phase()));
  const v1::StepRecord& last = job.last_step();
  return absl::StrFormat("%-14s %6d %7d %8.3g %6s %8s %11s %13s\n", name, job.step(),
                         job.durable_step(), PerStep(last, last.seconds()),
                         Percent(StallShare(last.figures())), Percent(OnTimeShare(last.figures())),
                         BytesPerStep(last, last.bytes_read()),
                         BytesPerStep(last, last.bytes_written()));
}

// The causes that cost most first, as shares of the step.
std::string StallText(const v1::StepRecord& last) {
  std::vector<std::pair<double, std::string>> causes;
  for (size_t i = 0; i < proto::kStallCauses; ++i) {
    const double seconds = StallSeconds(last.figures(), static_cast<proto::StallCause>(i));
    const double share = last.seconds() > 0 ? seconds / last.seconds() : 0;
    if (share >= 0.005) causes.emplace_back(share, std::string(proto::kStallCauseNames[i]));
  }
  std::sort(causes.rbegin(), causes.rend());
  std::string text;
  for (const auto& [share, name] : causes)
    absl::StrAppend(&text, text.empty() ? "  waits: " : "  ", name, " ", Percent(share));
  return text;
}

std::string PhaseLine(const v1::StepRecord& last) {
  std::string line = " ";
  for (size_t i = 0; i < proto::kStepPhases; ++i) {
    const double seconds = PhaseSeconds(last.figures(), static_cast<proto::StepPhase>(i));
    absl::StrAppendFormat(&line, " %s %.3g s", std::string(proto::kStepPhaseNames[i]),
                          PerStep(last, seconds));
  }
  return absl::StrCat(line, StallText(last), "\n");
}

std::string DriveLine(const v1::JobStatus& job, const Rates& rates) {
  double read_p99 = 0, write_p99 = 0;
  uint64_t in_flight = 0;
  for (const v1::DeviceStatus& device : job.devices()) {
    read_p99 = std::max(read_p99, device.read().p99_seconds());
    write_p99 = std::max(write_p99, device.write().p99_seconds());
    in_flight += device.in_flight();
  }
  return absl::StrFormat("  nvme %.2fr %.2fw GB/s  p99 %.3gr %.3gw ms  qd %d  ram %s of %s\n",
                         rates.read * 1e-9, rates.written * 1e-9, read_p99 * 1e3, write_p99 * 1e3,
                         in_flight, FormatBytes(job.resident_bytes()),
                         FormatBytes(job.ram_bytes()));
}

// Nothing before the job is sealed; what steps were of it after kStepsCompared of them.
std::string PlanLine(const v1::JobStatus& job) {
  if (!job.has_plan()) return "";
  const v1::PlanStatus& plan = job.plan();
  std::string line =
      absl::StrCat("  plan ", FormatDecimalBytes(PlannedReadBytes(plan.step())), " read ",
                   FormatDecimalBytes(PlannedWrittenBytes(plan.step())), " written");
  const std::optional<PlanComparison> compared = ComparePlan(plan);
  const auto ratio = [](const Beside& beside) {
    return beside.Ratio().has_value() ? absl::StrFormat("%.2f", *beside.Ratio()) : "-";
  };
  if (compared.has_value()) {
    absl::StrAppend(&line, "  measured ", ratio(compared->read_bytes), "r ",
                    ratio(compared->written_bytes), "w  time ", ratio(compared->seconds));
  }
  if (plan.replans() > 0) absl::StrAppend(&line, "  replans ", plan.replans());
  return line + "\n";
}

std::string RankLines(const TwoAnswers& answers, const v1::JobStatus& job) {
  std::string lines;
  for (const v1::RankStatus& rank : job.ranks()) {
    const std::string gpu = GpuText(answers, job, rank);
    absl::StrAppend(&lines, "  rank ", rank.rank(), "  pid ", rank.pid(), "  ",
                    Printable(rank.phase()), "  step ", rank.step(), "  touch ", rank.position(),
                    "\n", gpu.empty() ? "" : absl::StrCat("    ", gpu, "\n"));
  }
  return lines;
}

std::string JobLines(const TwoAnswers& answers, const v1::JobStatus& job) {
  return absl::StrCat(JobLine(job), job.has_last_step() ? PhaseLine(job.last_step()) : "",
                      DriveLine(job, RatesOf(answers, job)), PlanLine(job),
                      RankLines(answers, job));
}

Json DescribeJob(const TwoAnswers& answers, const v1::JobStatus& job) {
  const Rates rates = RatesOf(answers, job);
  return {{"job", job.job()},
          {"pool", job.pool()},
          {"phase", job.phase()},
          {"step", job.step()},
          {"durable_step", job.durable_step()},
          {"last_step", job.has_last_step() ? DescribeRecord(job.last_step()) : Json(nullptr)},
          {"figures", DescribeFigures(job.figures())},
          {"read_bytes_per_second", rates.read},
          {"written_bytes_per_second", rates.written},
          {"resident_bytes", job.resident_bytes()},
          {"ram_bytes", job.ram_bytes()},
          {"plan", DescribePlanStatus(job)},
          {"ranks", DescribeRanks(answers, job)}};
}

}  // namespace

std::string Clip(const std::string& line, size_t columns) {
  size_t characters = 0, end = 0;
  while (end < line.size()) {
    const bool continues = (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80;
    if (!continues && ++characters > columns) break;
    ++end;
  }
  return line.substr(0, end);
}

std::string TopText(const DaemonAddress& address, const TwoAnswers& answers) {
  const v1::StatusReply& reply = answers.reply;
  std::string text =
      absl::StrCat("offloadd ", Printable(reply.version()), address.is_private ? " private" : "",
                   "  pid ", reply.pid(), "  up ", FormatDuration(reply.uptime_seconds()),
                   "  jobs ", reply.jobs_size(), "  ", Printable(address.socket), "\n");
  if (!reply.jobs().empty()) text += Heading();
  for (const v1::JobStatus& job : reply.jobs()) text += JobLines(answers, job);
  std::string clipped;
  for (const auto& line : absl::StrSplit(text, '\n', absl::SkipEmpty()))
    absl::StrAppend(&clipped, Clip(std::string(line), kTopColumns), "\n");
  return clipped;
}

Json DescribeTop(const DaemonAddress& address, const TwoAnswers& answers) {
  Json jobs = Json::array();
  for (const v1::JobStatus& job : answers.reply.jobs()) jobs.push_back(DescribeJob(answers, job));
  return {{"socket", address.socket},
          {"private", address.is_private},
          {"version", answers.reply.version()},
          {"pid", answers.reply.pid()},
          {"uptime_seconds", answers.reply.uptime_seconds()},
          {"jobs", std::move(jobs)}};
}

}  // namespace offload::tools
