#include "tools/chart.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace offload::tools {
namespace {

constexpr double kWidth = 860, kHeight = 220;  // of a chart, in pixels
constexpr double kLeft = 64, kRight = 12, kTop = 8, kBottom = 24;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;
constexpr int kLines = 4;

struct Axes {
  double begin = 0, end = 1, top = 1;
  double X(double step) const { return kLeft + (step - begin) / (end - begin) * kPlotWidth; }
  double Y(double value) const { return kTop + (1 - value / top) * kPlotHeight; }
};

Axes MakeAxes(const std::vector<ChartColumn>& columns, const std::vector<ChartSeries>& series) {
  Axes axes;
  axes.begin = columns.front().begin;
  axes.end = std::max(columns.back().end, axes.begin + 1);
  double largest = 0;
  for (size_t column = 0; column < columns.size(); ++column) {
    double sum = 0;
    for (const ChartSeries& each : series) sum += each.values[column];
    largest = std::max(largest, sum);
  }
  axes.top = RoundUp(largest);
  return axes;
}

std::string Grid(const Axes& axes, const std::string& unit) {
  std::string grid;
  for (int i = 0; i <= kLines; ++i) {
    const double value = axes.top * i / kLines;
    absl::StrAppendFormat(&grid,
                          "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>",
                          kLeft, kWidth - kRight, axes.Y(value), axes.Y(value));
    absl::StrAppendFormat(&grid, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.3g %s</text>",
                          kLeft - 6, axes.Y(value) + 4, value, EscapeHtml(unit));
  }
  absl::StrAppendFormat(&grid, "<text x=\"%.1f\" y=\"%.1f\">step %.0f</text>", kLeft, kHeight - 6,
                        axes.begin + 1);
  absl::StrAppendFormat(&grid, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n",
                        kWidth - kRight, kHeight - 6, axes.end);
  return grid;
}

// The area between two heights per column, as steps.
std::string Area(const Axes& axes, const std::vector<ChartColumn>& columns,
                 const std::vector<double>& lower, const std::vector<double>& upper,
                 const char* color) {
  std::string path;
  for (size_t i = 0; i < columns.size(); ++i) {
    absl::StrAppendFormat(&path, "%s%.1f %.1f H%.1f", i == 0 ? "M" : "L", axes.X(columns[i].begin),
                          axes.Y(upper[i]), axes.X(columns[i].end));
  }
  for (size_t i = columns.size(); i > 0; --i) {
    absl::StrAppendFormat(&path, "L%.1f %.1f H%.1f", axes.X(columns[i - 1].end),
                          axes.Y(lower[i - 1]), axes.X(columns[i - 1].begin));
  }
  return absl::StrCat("<path fill=\"", color, "\" d=\"", path, "Z\"/>\n");
}

// What the pointer finds: all of a column's height.
std::string Titles(const Axes& axes, const std::vector<ChartColumn>& columns) {
  std::string titles;
  for (const ChartColumn& column : columns) {
    absl::StrAppendFormat(
        &titles,
        "<rect class=\"column\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s"
        "</title></rect>\n",
        axes.X(column.begin), kTop, std::max(0.5, axes.X(column.end) - axes.X(column.begin)),
        kPlotHeight, EscapeHtml(column.title));
  }
  return titles;
}

std::string Legend(const std::vector<ChartSeries>& series) {
  std::string legend = "<p class=\"legend\">";
  for (const ChartSeries& each : series) {
    absl::StrAppend(&legend, "<span><i style=\"background:", each.color, "\"></i>",
                    EscapeHtml(each.name), "</span>");
  }
  return absl::StrCat(legend, "</p>\n");
}

}  // namespace

std::string StackedChart(const std::string& title, const std::string& unit,
                         const std::vector<ChartColumn>& columns,
                         const std::vector<ChartSeries>& series) {
  std::string html = absl::StrCat("<h2>", EscapeHtml(title), "</h2>\n");
  if (columns.empty()) return absl::StrCat(html, "<p>No step yet.</p>\n");
  const Axes axes = MakeAxes(columns, series);
  absl::StrAppendFormat(&html, "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n",
                        kWidth, kHeight, EscapeHtml(title));
  html += Grid(axes, unit);
  std::vector<double> lower(columns.size(), 0.0);
  for (const ChartSeries& each : series) {
    std::vector<double> upper = lower;
    for (size_t i = 0; i < columns.size(); ++i) upper[i] += each.values[i];
    html += Area(axes, columns, lower, upper, each.color);
    lower = std::move(upper);
  }
  return absl::StrCat(html, Titles(axes, columns), "</svg>\n", Legend(series));
}

double RoundUp(double value) {
  if (!(value > 0) || !std::isfinite(value)) return 1;
  const double decade = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0}) {
    if (factor * decade >= value * (1 - 1e-12)) return factor * decade;
  }
  return 10 * decade;
}

std::string EscapeHtml(const std::string& text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

}  // namespace offload::tools
