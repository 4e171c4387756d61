// tools/report_page.h
//
// What offloadctl report writes: one page of HTML with charts, which needs nothing else: no
// network, no script.
//
// Thread safety: pure.
#pragma once

#include <string>
#include <vector>

#include "tools/answer.h"
#include "tools/daemons.h"

namespace offload::tools {

// The layer of a tensor by its name: up to the first number ("model.layers.3.mlp.up.weight" is in
// "model.layers.3"), else without its last part ("embedding.weight" is in "embedding").
std::string LayerOf(const std::string& tensor);

// Sums over the tensors of a layer, in the order of the first of each.
struct LayerFigures {
  std::string layer;
  uint64_t bytes_read = 0, bytes_written = 0;
  double update_seconds = 0, late_seconds = 0, miss_seconds = 0;  // ranks waited, by cause
  uint64_t waits = 0;
  double forward_seconds = 0, backward_seconds = 0;  // in use, waits included
  uint64_t matrix_elements = 0, trained_matrix_elements = 0;

  double WaitSeconds() const { return update_seconds + late_seconds + miss_seconds; }
};
std::vector<LayerFigures> FiguresOfLayers(const JobReport& report);

// What the estimate of operations takes from who asks for it (plan_status.h, EstimateOperations).
struct Operations {
  uint64_t tokens = 0;         // of a step, all micro-batches and ranks together; 0: no estimate
  double peak_per_second = 0;  // that the processors could do; 0: not known
};

// `made_at`: when it was made, as the page says it.
std::string ReportPage(const JobReport& report, const std::string& made_at,
                       const Operations& operations = {});
// The same as numbers.
Json DescribeReport(const JobReport& report, const Operations& operations = {});

}  // namespace offload::tools
