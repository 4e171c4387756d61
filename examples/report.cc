#include "examples/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "base/byte_size.h"

namespace offload::examples {
namespace {

using Json = nlohmann::ordered_json;

std::string Eta(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
}

Json StartLine(const StartReport& report) {
  return Json{{"event", "start"},
              {"model", report.model},
              {"parameters", report.parameters},
              {"state_bytes", report.state_bytes},
              {"gradient_bytes", report.gradient_bytes},
              {"ram_bytes", report.ram_bytes},
              {"resumed_step", report.resumed_step},
              {"steps", report.steps},
              {"planned",
               {{"read_bytes_per_step", report.planned_read_bytes},
                {"write_bytes_per_step", report.planned_write_bytes},
                {"memory_bytes", report.planned_memory_bytes}}}};
}

Json StepLine(const StepReport& report) {
  return Json{{"event", "step"},
              {"step", report.step},
              {"loss", report.loss},
              {"grad_norm", report.grad_norm},
              {"learning_rate", report.learning_rate},
              {"seconds",
               {{"forward", report.seconds.forward},
                {"backward", report.seconds.backward},
                {"step", report.seconds.step},
                {"wait", report.seconds.wait}}},
              {"bytes_read", report.bytes_read},
              {"bytes_written", report.bytes_written},
              {"resident_bytes", report.resident_bytes},
              {"peak_bytes", report.peak_bytes},
              {"durable_epoch", report.durable_epoch}};
}

}  // namespace

// Every line is flushed: a reader may act on it, and a kill must not take it back.
void Reporter::Start(const StartReport& report) {
  if (json_) {
    out_ << StartLine(report).dump() << std::endl;
    return;
  }
  out_ << report.model << ", state " << FormatBytes(report.state_bytes);
  if (report.ram_bytes > 0) out_ << ", ram " << FormatBytes(report.ram_bytes);
  if (report.resumed_step > 0) out_ << ", resumed at step " << report.resumed_step;
  out_ << std::endl;
}

void Reporter::Step(const StepReport& report) {
  out_ << (json_ ? StepLine(report).dump() : ProgressLine(report)) << std::endl;
}

void Reporter::Plan(const PlanComparison& comparison) {
  if (!json_) {
    out_ << PlanLine(comparison) << std::endl;
    return;
  }
  out_ << Json{{"event", "plan"},
               {"steps", comparison.steps},
               {"planned",
                {{"read_bytes_per_step", comparison.planned_read_bytes},
                 {"write_bytes_per_step", comparison.planned_write_bytes},
                 {"memory_bytes", comparison.planned_memory_bytes}}},
               {"measured",
                {{"read_bytes_per_step", comparison.read_bytes},
                 {"write_bytes_per_step", comparison.written_bytes},
                 {"memory_bytes", comparison.peak_bytes}}}}
              .dump()
       << std::endl;
}

void Reporter::Evaluation(int64_t step, double loss) {
  if (json_) {
    out_ << Json{{"event", "evaluation"}, {"step", step}, {"loss", loss}}.dump() << std::endl;
    return;
  }
  out_ << absl::StrFormat("step %d: loss on held-out text %.4f", step, loss) << std::endl;
}

void Reporter::Sample(int64_t step, const std::string& text) {
  const std::string printable = Printable(text);
  if (json_) {
    out_ << Json{{"event", "sample"}, {"step", step}, {"text", printable}}.dump() << std::endl;
    return;
  }
  out_ << "sample:\n" << printable << std::endl;
}

void Reporter::End(int64_t step, int64_t durable_epoch,
                   const std::map<std::string, uint32_t>& checksums) {
  if (!json_) {
    for (const auto& [name, checksum] : checksums)
      out_ << absl::StrFormat("checksum of %s %08x", name, checksum) << std::endl;
    return;
  }
  Json line{{"event", "end"}, {"step", step}, {"durable_epoch", durable_epoch}};
  if (!checksums.empty()) line["checksums"] = checksums;
  out_ << line.dump() << std::endl;
}

std::string PlanLine(const PlanComparison& comparison) {
  return absl::StrFormat(
      "the first %d steps: read %.3f GB a step (planned %.3f), wrote %.3f GB (planned %.3f), at "
      "most "
      "%s of %s planned in memory",
      comparison.steps, comparison.read_bytes * 1e-9, comparison.planned_read_bytes * 1e-9,
      comparison.written_bytes * 1e-9, comparison.planned_write_bytes * 1e-9,
      FormatBytes(comparison.peak_bytes), FormatBytes(comparison.planned_memory_bytes));
}

std::string ProgressLine(const StepReport& report) {
  const double seconds = std::max(report.seconds.Total(), 1e-9);
  const double share = 100.0 * static_cast<double>(report.step) /
                       static_cast<double>(std::max<int64_t>(report.steps, 1));
  return absl::StrFormat(
      "step %d/%d [%4.1f%%] | %.2f s | loss %.4f | norm %.2f | %.0f tok/s | stall %.0f%% | "
      "nvme %.2fr/%.2fw GB/s | eta %s",
      report.step, report.steps, share, seconds, report.loss, report.grad_norm,
      static_cast<double>(report.tokens) / seconds, 100.0 * report.seconds.wait / seconds,
      static_cast<double>(report.bytes_read) / seconds * 1e-9,
      static_cast<double>(report.bytes_written) / seconds * 1e-9,
      Eta(static_cast<double>(report.steps - report.step) * seconds));
}

std::string Printable(const std::string& bytes) {
  std::string text = bytes;
  for (char& byte : text) {
    const auto value = static_cast<unsigned char>(byte);
    if ((value < 0x20 && byte != '\n' && byte != '\t') || value >= 0x7f) byte = '.';
  }
  return text;
}

}  // namespace offload::examples
