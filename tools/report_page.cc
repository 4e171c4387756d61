#include "tools/report_page.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "tools/chart.h"
#include "tools/plan_status.h"
#include "tools/step_figures.h"

namespace offload::tools {
namespace {

namespace v1 = proto::v1;

constexpr size_t kLayersShown = 40;

constexpr char kStyle[] = R"(
:root { color-scheme: light dark; --text: #1b1f24; --faint: #8892a0; --line: #d8dee6; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f0; --faint: #8892a0; --line: #343c47; --back: #14181d; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 880px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 24px 0 4px; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--faint); }
.grid { stroke: var(--line); } .column { fill: transparent; } .column:hover { fill: var(--faint); fill-opacity: 0.25; }
.legend { margin: 2px 0; color: var(--faint); } .legend span { margin-right: 14px; white-space: nowrap; display: inline-block; } .legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; word-break: break-word; min-width: 9em; }
.wide { overflow-x: auto; } th { color: var(--faint); font-weight: normal; }
.bar { width: 160px; text-align: left; } .bar b { display: inline-block; height: 9px; } p.note { color: var(--faint); }
)";

// Colours that are told apart also by people who see no red or no green.
constexpr const char* kComputeColors[] = {"#4477aa", "#66aadd", "#aaccee"};
constexpr const char* kStallColors[] = {"#ccbb44", "#ee6677", "#aa3377",
                                        "#228833", "#bbbbbb", "#775533"};
constexpr const char* kReadColor = "#4477aa";
constexpr const char* kWriteColor = "#ee6677";
constexpr const char* kStateColor = "#228833";

double Steps(const v1::StepRecord& record) {
  return static_cast<double>(record.last_step() - record.first_step() + 1);
}

double StepsOf(const JobReport& report) {
  double steps = 0;
  for (const v1::StepRecord& record : report.steps) steps += Steps(record);
  return steps;
}

std::string Percent(double share) {
  return share < 0 ? "–" : absl::StrFormat("%.1f %%", share * 100);
}

std::string NameOfSteps(const v1::StepRecord& record) {
  return record.first_step() == record.last_step()
             ? absl::StrCat("step ", record.last_step())
             : absl::StrCat("steps ", record.first_step(), " to ", record.last_step());
}

template <typename Describe>
std::vector<ChartColumn> Columns(const JobReport& report, const Describe& describe) {
  std::vector<ChartColumn> columns;
  for (const v1::StepRecord& record : report.steps) {
    columns.push_back({static_cast<double>(record.first_step()) - 1,
                       static_cast<double>(record.last_step()),
                       absl::StrCat(NameOfSteps(record), ": ", describe(record))});
  }
  return columns;
}

// Of each step, or their mean.
template <typename Value>
std::vector<double> Values(const JobReport& report, const Value& value) {
  std::vector<double> values;
  for (const v1::StepRecord& record : report.steps)
    values.push_back(std::max(0.0, value(record) / Steps(record)));
  return values;
}

// A phase without what its threads waited for. Threads may have waited for longer than it took.
double ComputeSeconds(const v1::StepRecord& record, size_t phase) {
  double seconds = PhaseSeconds(record.figures(), static_cast<proto::StepPhase>(phase));
  for (size_t cause = 0; cause < proto::kStallCauses; ++cause) {
    const auto index = static_cast<int>(phase * proto::kStallCauses + cause);
    if (index < record.figures().stall_seconds_size())
      seconds -= record.figures().stall_seconds(index);
  }
  return seconds;
}

std::string TimeChart(const JobReport& report) {
  std::vector<ChartSeries> series;
  for (size_t phase = 0; phase < proto::kStepPhases; ++phase) {
    series.push_back({std::string(proto::kStepPhaseNames[phase]), kComputeColors[phase],
                      Values(report, [phase](const v1::StepRecord& record) {
                        return ComputeSeconds(record, phase);
                      })});
  }
  for (size_t cause = 0; cause < proto::kStallCauses; ++cause) {
    series.push_back({absl::StrCat("wait: ", std::string(proto::kStallCauseNames[cause])),
                      kStallColors[cause], Values(report, [cause](const v1::StepRecord& record) {
                        return StallSeconds(record.figures(),
                                            static_cast<proto::StallCause>(cause));
                      })});
  }
  const auto columns = Columns(report, [](const v1::StepRecord& record) {
    return absl::StrFormat("%.3g s, %s waited", record.seconds() / Steps(record),
                           Percent(StallShare(record.figures())));
  });
  return StackedChart("Time per step, by phase and by what was waited for", "s", columns, series);
}

std::string TrafficChart(const JobReport& report) {
  const auto gigabytes = [](uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; };
  const std::vector<ChartSeries> series = {
      {"read", kReadColor,
       Values(report,
              [&](const v1::StepRecord& record) { return gigabytes(record.bytes_read()); })},
      {"written", kWriteColor, Values(report, [&](const v1::StepRecord& record) {
         return gigabytes(record.bytes_written());
       })}};
  const auto columns = Columns(report, [&](const v1::StepRecord& record) {
    const double seconds = std::max(record.seconds(), 1e-9);
    return absl::StrFormat("%.3g GB read, %.3g GB written, %.2f GB/s",
                           gigabytes(record.bytes_read()) / Steps(record),
                           gigabytes(record.bytes_written()) / Steps(record),
                           gigabytes(record.bytes_read() + record.bytes_written()) / seconds);
  });
  return StackedChart("Bytes of the drive per step", "GB", columns, series);
}

std::string MemoryChart(const JobReport& report) {
  std::vector<double> values;
  for (const v1::StepRecord& record : report.steps)
    values.push_back(static_cast<double>(record.resident_bytes()) / (1 << 30));
  const auto columns = Columns(
      report, [](const v1::StepRecord& record) { return FormatBytes(record.resident_bytes()); });
  return StackedChart("Bytes of the job in memory", "GiB", columns,
                      {{"resident", kStateColor, values}});
}

std::string PrefetchChart(const JobReport& report) {
  std::vector<ChartSeries> series;
  constexpr const char* kColors[] = {kStateColor, kStallColors[1], kStallColors[2]};
  constexpr const char* kNames[] = {"on time", "late", "nobody had asked"};
  for (int result = 0; result < static_cast<int>(proto::kPrefetchResults); ++result) {
    series.push_back(
        {kNames[result], kColors[result], Values(report, [result](const v1::StepRecord& record) {
           return result < record.figures().prefetches_size()
                      ? static_cast<double>(record.figures().prefetches(result))
                      : 0.0;
         })});
  }
  const auto columns = Columns(report, [](const v1::StepRecord& record) {
    return absl::StrCat(Percent(OnTimeShare(record.figures())), " on time");
  });
  return StackedChart("Tensors that were not in memory, per step", "", columns, series);
}

std::string Row(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string row = "<tr>";
  for (const std::string& cell : cells) absl::StrAppend(&row, "<", tag, ">", cell, "</", tag, ">");
  return absl::StrCat(row, "</tr>\n");
}

double MedianSeconds(const JobReport& report) {
  std::vector<double> seconds;
  for (const v1::StepRecord& record : report.steps)
    seconds.push_back(record.seconds() / Steps(record));
  if (seconds.empty()) return 0;
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

std::string Summary(const JobReport& report) {
  const v1::JobStatus& job = report.job;
  const uint64_t first = report.steps.empty() ? 0 : report.steps.front().first_step();
  std::string table = "<table>\n";
  absl::StrAppend(
      &table, Row({"Pool", EscapeHtml(job.pool())}),
      Row({"Steps of this run",
           report.steps.empty() ? "none" : absl::StrCat(first, " to ", job.step())}),
      Row({"Committed", absl::StrCat(job.durable_step())}),
      Row({"Time per step, median of the records",
           absl::StrFormat("%.3g s", MedianSeconds(report))}),
      Row({"Waited, of all time", Percent(StallShare(job.figures()))}),
      Row({"Prefetches on time", Percent(OnTimeShare(job.figures()))}),
      Row({"Read from the drive, written", absl::StrCat(FormatDecimalBytes(job.bytes_read()), ", ",
                                                        FormatDecimalBytes(job.bytes_written()))}),
      Row({"Memory", absl::StrCat(FormatBytes(job.resident_bytes()), " resident, ram ",
                                  FormatBytes(job.ram_bytes()))}));
  return absl::StrCat(table, "</table>\n");
}

std::string Bar(const LayerFigures& layer, double largest_seconds) {
  std::string bar = "<td class=\"bar\">";
  const std::pair<double, const char*> parts[] = {{layer.update_seconds, kStallColors[0]},
                                                  {layer.late_seconds, kStallColors[1]},
                                                  {layer.miss_seconds, kStallColors[2]}};
  for (const auto& [seconds, color] : parts) {
    absl::StrAppendFormat(&bar, "<b style=\"width:%.1fpx;background:%s\"></b>",
                          largest_seconds > 0 ? seconds / largest_seconds * 150 : 0.0, color);
  }
  return absl::StrCat(bar, "</td>");
}

double OperationsOf(const LayerFigures& layer, const Operations& operations) {
  return EstimateOperations(layer.matrix_elements, layer.trained_matrix_elements,
                            operations.tokens);
}

// Of all records, as the mean of their steps.
struct OperationsOfStep {
  double count = 0;
  double seconds = 0, compute_seconds = 0;

  double PerSecond() const { return seconds > 0 ? count / seconds : 0; }
  double PerComputeSecond() const { return compute_seconds > 0 ? count / compute_seconds : 0; }
};
OperationsOfStep EstimateStep(const JobReport& report, const Operations& operations) {
  OperationsOfStep step;
  const double steps = StepsOf(report);
  for (const v1::StepRecord& record : report.steps) {
    step.seconds += record.seconds();
    for (size_t phase = 0; phase < proto::kStepPhases; ++phase)
      step.compute_seconds += std::max(0.0, ComputeSeconds(record, phase));
  }
  if (steps > 0) step.seconds /= steps;
  if (steps > 0) step.compute_seconds /= steps;
  for (const LayerFigures& layer : FiguresOfLayers(report))
    step.count += OperationsOf(layer, operations);
  return step;
}

std::string OperationsTable(const JobReport& report, const Operations& operations) {
  if (operations.tokens == 0) return "";
  const OperationsOfStep step = EstimateStep(report, operations);
  const auto share = [&](double per_second) {
    return operations.peak_per_second > 0
               ? absl::StrCat(", ", Percent(per_second / operations.peak_per_second),
                              " of the peak that was named")
               : "";
  };
  const auto rate = [&](double per_second) {
    return absl::StrCat(absl::StrFormat("%.4g GFLOP/s", per_second * 1e-9), share(per_second));
  };
  return absl::StrCat(
      "<h2>Operations, estimated</h2>\n<table>\n",
      Row({absl::StrCat("Of a step of ", operations.tokens, " tokens"),
           absl::StrFormat("%.4g TFLOP", step.count * 1e-12)}),
      Row({"Over the whole step", rate(step.PerSecond())}),
      Row({"Over the time in which ranks did not wait", rate(step.PerComputeSecond())}),
      "</table>\n<p class=\"note\">Not counted but estimated from the sizes of matrices: six for "
      "each trained element and token, four for each frozen one. Attention itself and what is "
      "computed anew are not in it; a table of embeddings, which is only looked up, is.</p>\n");
}

Json DescribeOperations(const JobReport& report, const Operations& operations) {
  if (operations.tokens == 0) return nullptr;
  const OperationsOfStep step = EstimateStep(report, operations);
  const auto share = [&](double per_second) {
    return operations.peak_per_second > 0 ? Json(per_second / operations.peak_per_second)
                                          : Json(nullptr);
  };
  return {{"tokens", operations.tokens},
          {"per_step", step.count},
          {"per_second", step.PerSecond()},
          {"per_compute_second", step.PerComputeSecond()},
          {"utilization", share(step.PerSecond())},
          {"compute_utilization", share(step.PerComputeSecond())}};
}

std::string Layers(const JobReport& report, const Operations& operations) {
  std::vector<LayerFigures> layers = FiguresOfLayers(report);
  std::stable_sort(layers.begin(), layers.end(), [](const LayerFigures& a, const LayerFigures& b) {
    return a.WaitSeconds() > b.WaitSeconds();
  });
  std::string html = "<h2>Layers, by what ranks waited for them</h2>\n";
  if (layers.empty()) return html + "<p>No tensor yet.</p>\n";
  const double largest = layers.front().WaitSeconds();
  std::vector<std::string> heading = {"layer", "waits",  "seconds", "update, late, miss",
                                      "read",  "written"};
  const double steps = std::max(StepsOf(report), 1.0);
  if (!report.uses.empty()) heading.insert(heading.end(), {"forward", "backward, ms a step"});
  if (operations.tokens > 0) heading.push_back("GFLOP a step, estimated");
  if (operations.tokens > 0 && !report.uses.empty()) heading.push_back("GFLOP/s");
  absl::StrAppend(&html, "<div class=\"wide\"><table>\n", Row(heading, "th"));
  for (size_t i = 0; i < std::min(layers.size(), kLayersShown); ++i) {
    const LayerFigures& layer = layers[i];
    absl::StrAppend(&html, "<tr><td>", EscapeHtml(layer.layer), "</td><td>", layer.waits,
                    "</td><td>", absl::StrFormat("%.3f", layer.WaitSeconds()), "</td>",
                    Bar(layer, largest), "<td>", FormatDecimalBytes(layer.bytes_read), "</td><td>",
                    FormatDecimalBytes(layer.bytes_written), "</td>");
    if (!report.uses.empty()) {
      absl::StrAppendFormat(&html, "<td>%.4g</td><td>%.4g</td>",
                            layer.forward_seconds / steps * 1e3,
                            layer.backward_seconds / steps * 1e3);
    }
    const double gigaoperations = OperationsOf(layer, operations) * 1e-9;
    const double use_seconds = (layer.forward_seconds + layer.backward_seconds) / steps;
    if (operations.tokens > 0) absl::StrAppendFormat(&html, "<td>%.4g</td>", gigaoperations);
    if (operations.tokens > 0 && !report.uses.empty()) {
      absl::StrAppend(&html, "<td>",
                      use_seconds > 0 ? absl::StrFormat("%.4g", gigaoperations / use_seconds) : "–",
                      "</td>");
    }
    html += "</tr>\n";
  }
  html += "</table></div>\n";
  if (!report.uses.empty()) {
    html +=
        "<p class=\"note\">A layer has the time from the use of one of its tensors, waits for it "
        "included, to that of another layer's or to step().</p>\n";
  }
  if (layers.size() > kLayersShown) {
    absl::StrAppend(&html, "<p class=\"note\">", layers.size() - kLayersShown,
                    " layers that were waited for less are left out; --json has all.</p>\n");
  }
  return html;
}

Json DescribeLayers(const JobReport& report, const Operations& operations) {
  Json layers = Json::array();
  for (const LayerFigures& layer : FiguresOfLayers(report)) {
    layers.push_back({{"layer", layer.layer},
                      {"bytes_read", layer.bytes_read},
                      {"bytes_written", layer.bytes_written},
                      {"waits", layer.waits},
                      {"wait_seconds",
                       {{"update", layer.update_seconds},
                        {"late", layer.late_seconds},
                        {"miss", layer.miss_seconds}}},
                      {"use_seconds",
                       {{"forward", layer.forward_seconds}, {"backward", layer.backward_seconds}}},
                      {"matrix_elements", layer.matrix_elements}});
    if (operations.tokens > 0)
      layers.back()["estimated_operations"] = OperationsOf(layer, operations);
  }
  return layers;
}

double WaitSeconds(const v1::TensorFigures& tensor, int cause) {
  return cause < tensor.wait_seconds_size() ? tensor.wait_seconds(cause) : 0;
}

}  // namespace

std::string LayerOf(const std::string& tensor) {
  std::vector<std::string> parts = absl::StrSplit(tensor, '.');
  for (size_t i = 0; i < parts.size(); ++i) {
    uint64_t number = 0;
    if (absl::SimpleAtoi(parts[i], &number)) {
      parts.resize(i + 1);
      return absl::StrJoin(parts, ".");
    }
  }
  if (parts.size() > 1) parts.pop_back();
  return absl::StrJoin(parts, ".");
}

std::vector<LayerFigures> FiguresOfLayers(const JobReport& report) {
  std::vector<LayerFigures> layers;
  std::map<std::string, size_t> places;
  const auto find = [&](const std::string& name) -> LayerFigures& {
    const auto [place, is_new] = places.emplace(name, layers.size());
    if (is_new) layers.push_back({.layer = name});
    return layers[place->second];
  };
  for (const v1::TensorFigures& tensor : report.tensors) {
    // Small tensors of many layers are read and written together.
    LayerFigures& layer =
        find(tensor.member_count() > 1 ? absl::StrCat(tensor.member_count(), " small tensors")
                                       : LayerOf(tensor.name()));
    layer.bytes_read += tensor.bytes_read();
    layer.bytes_written += tensor.bytes_written();
    layer.update_seconds += WaitSeconds(tensor, 0);
    layer.late_seconds += WaitSeconds(tensor, 1);
    layer.miss_seconds += WaitSeconds(tensor, 2);
    layer.matrix_elements += tensor.matrix_elements();
    if (tensor.trained()) layer.trained_matrix_elements += tensor.matrix_elements();
    for (const uint64_t waits : tensor.waits()) layer.waits += waits;
  }
  for (const v1::TensorUse& use : report.uses) {
    LayerFigures& layer = find(LayerOf(use.name()));
    layer.forward_seconds += use.forward_seconds();
    layer.backward_seconds += use.backward_seconds();
  }
  return layers;
}

std::string ReportPage(const JobReport& report, const std::string& made_at,
                       const Operations& operations) {
  const std::string title = absl::StrCat("offloadd: job ", EscapeHtml(report.job.job()));
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width\">\n<title>",
      title, "</title><style>", kStyle, "</style></head>\n<body>\n<h1>", title,
      "</h1>\n<p class=\"note\">", EscapeHtml(made_at), "</p>\n", Summary(report),
      PlanTable(report.job), OperationsTable(report, operations), TimeChart(report),
      TrafficChart(report), PrefetchChart(report), MemoryChart(report), Layers(report, operations),
      "<p class=\"note\">Phases and waits are the mean of the job's ranks. Where several threads "
      "of "
      "a rank wait at once, each counts. Old steps are shown as the mean of several.</p>\n"
      "</body></html>\n");
}

Json DescribeReport(const JobReport& report, const Operations& operations) {
  Json steps = Json::array();
  for (const v1::StepRecord& record : report.steps) steps.push_back(DescribeRecord(record));
  return {{"job", report.job.job()},
          {"pool", report.job.pool()},
          {"step", report.job.step()},
          {"durable_step", report.job.durable_step()},
          {"bytes_read", report.job.bytes_read()},
          {"bytes_written", report.job.bytes_written()},
          {"figures", DescribeFigures(report.job.figures())},
          {"plan", DescribePlanStatus(report.job)},
          {"estimated_operations", DescribeOperations(report, operations)},
          {"steps", std::move(steps)},
          {"layers", DescribeLayers(report, operations)}};
}

}  // namespace offload::tools
