// tools/chart.h
//
// Charts over the steps of a run, as SVG inside a page of HTML.
//
// Thread safety: pure.
#pragma once

#include <string>
#include <vector>

namespace offload::tools {

struct ChartSeries {
  std::string name;
  const char* color = "";      // of CSS
  std::vector<double> values;  // one per column, not negative
};
// A column is a step, or some steps that follow each other.
struct ChartColumn {
  double begin = 0, end = 0;  // on the axis of steps; ascending, without overlap
  std::string title;          // shown while the pointer is over it
};

// Areas on top of each other, from 0 up; `unit` is that of the values.
std::string StackedChart(const std::string& title, const std::string& unit,
                         const std::vector<ChartColumn>& columns,
                         const std::vector<ChartSeries>& series);

// A round number not below `value`, for the end of an axis; 1 for what is not positive.
double RoundUp(double value);

// For HTML text and attributes.
std::string EscapeHtml(const std::string& text);

}  // namespace offload::tools
