#include "tools/report_page.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tools/chart.h"

namespace offload::tools {
namespace {

proto::v1::StepRecord Record(uint64_t first, uint64_t last, double seconds) {
  proto::v1::StepRecord record;
  record.set_first_step(first);
  record.set_last_step(last);
  record.set_seconds(seconds);
  record.set_bytes_read(3'000'000'000);
  record.set_bytes_written(1'000'000'000);
  record.set_resident_bytes(1ull << 30);
  for (const double part : {0.5, 0.4, 0.1})
    record.mutable_figures()->add_phase_seconds(part * seconds);
  for (int i = 0; i < 18; ++i) record.mutable_figures()->add_stall_seconds(seconds / 100);
  for (const uint64_t count : {90, 9, 1}) record.mutable_figures()->add_prefetches(count);
  return record;
}

proto::v1::TensorFigures Tensor(const std::string& name, double late_seconds,
                                uint32_t members = 1) {
  proto::v1::TensorFigures tensor;
  tensor.set_name(name);
  tensor.set_member_count(members);
  tensor.set_bytes_read(1000);
  for (const uint64_t waits : {0, 2, 0}) tensor.add_waits(waits);
  for (const double seconds : {0.0, late_seconds, 0.0}) tensor.add_wait_seconds(seconds);
  return tensor;
}

JobReport Sample() {
  JobReport report;
  report.job.set_job("train<script>");
  report.job.set_pool("/nvme0");
  report.job.set_step(6);
  report.steps = {Record(1, 4, 8), Record(5, 5, 2), Record(6, 6, 3)};
  report.tensors = {Tensor("model.layers.0.mlp.up.weight", 1), Tensor("model.layers.0.norm", 2),
                    Tensor("model.layers.11.mlp.up.weight", 4), Tensor("head.weight", 0),
                    Tensor("bias", 0.5, /*members=*/7)};
  return report;
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Every element is closed, in order.
void ExpectBalanced(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" /\n"));
    if (tag.back() == '/' || tag[0] == '!' || name == "meta") continue;
    if (tag[0] != '/') {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty()) << tag;
    ASSERT_EQ(tag.substr(1), open.back());
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

TEST(ReportPageTest, NeedsNothingElseAndIsWellFormed) {
  const std::string page = ReportPage(Sample(), "now");
  ExpectBalanced(page);
  for (const char* foreign : {"http:", "https:", "<script", "src=", "@import", "url("})
    EXPECT_FALSE(absl::StrContains(page, foreign)) << foreign;
  EXPECT_TRUE(absl::StrContains(page, "train&lt;script&gt;"));
  EXPECT_EQ(Count(page, "<svg"), 4u);
}

TEST(ReportPageTest, EveryChartHasEveryRecordWithItsFigures) {
  const std::string page = ReportPage(Sample(), "now");
  EXPECT_EQ(Count(page, "<title>steps 1 to 4: "), 4u);
  EXPECT_EQ(Count(page, "<title>step 6: "), 4u);
  EXPECT_TRUE(absl::StrContains(page, "<title>steps 1 to 4: 2 s, 18.0 % waited</title>"));
  EXPECT_TRUE(absl::StrContains(page, "<title>step 5: 3 GB read, 1 GB written, 2.00 GB/s</title>"));
  EXPECT_TRUE(absl::StrContains(page, "<title>step 5: 90.0 % on time</title>"));
  EXPECT_TRUE(absl::StrContains(page, "<title>step 5: 1.0 GiB</title>"));
}

TEST(ReportPageTest, AJobWithoutStepsHasAPage) {
  const std::string page = ReportPage(JobReport(), "now");
  ExpectBalanced(page);
  EXPECT_TRUE(absl::StrContains(page, "No step yet."));
}

TEST(ReportPageTest, LayersAreSumsOfTheirTensorsThoseThatCostMostFirst) {
  const std::vector<LayerFigures> layers = FiguresOfLayers(Sample());
  ASSERT_EQ(layers.size(), 4u);
  EXPECT_EQ(layers[0].layer, "model.layers.0");
  EXPECT_DOUBLE_EQ(layers[0].late_seconds, 3);
  EXPECT_EQ(layers[0].waits, 4u);
  EXPECT_EQ(layers[0].bytes_read, 2000u);
  EXPECT_EQ(layers[3].layer, "7 small tensors");
  const std::string page = ReportPage(Sample(), "now");
  EXPECT_LT(page.find("<td>model.layers.11</td>"), page.find("<td>model.layers.0</td>"));
}

TEST(ReportPageTest, TimesOfUseAreThoseOfTheLayerWhoseTensorsTheyAre) {
  JobReport report = Sample();
  EXPECT_FALSE(absl::StrContains(ReportPage(report, "now"), "backward, ms a step"));
  for (const char* name : {"model.layers.0.norm", "model.layers.0.mlp.up.weight", "new.weight"}) {
    proto::v1::TensorUse& use = report.uses.emplace_back();
    use.set_name(name);
    use.set_forward_seconds(0.6);
    use.set_backward_seconds(1.2);
  }
  const std::vector<LayerFigures> layers = FiguresOfLayers(report);
  ASSERT_EQ(layers.size(), 5u);
  EXPECT_DOUBLE_EQ(layers[0].forward_seconds, 1.2);
  EXPECT_DOUBLE_EQ(layers[0].backward_seconds, 2.4);
  EXPECT_EQ(layers[1].forward_seconds, 0);
  EXPECT_EQ(layers[4].layer, "new");
  EXPECT_EQ(DescribeReport(report)["layers"][0]["use_seconds"]["backward"], 2.4);
  const std::string page = ReportPage(report, "now");
  ExpectBalanced(page);
  EXPECT_TRUE(absl::StrContains(page, "<td>200</td><td>400</td></tr>")) << page;  // of six steps
  // Four for each element and token of a step, in 0.6 seconds.
  report.tensors[0].set_matrix_elements(1'500'000);
  const std::string with_operations = ReportPage(report, "now", {.tokens = 100});
  ExpectBalanced(with_operations);
  EXPECT_TRUE(absl::StrContains(with_operations, "<td>0.6</td><td>1</td></tr>"));
}

TEST(ReportPageTest, NumbersAreTheSameAsJson) {
  const Json report = DescribeReport(Sample());
  ASSERT_EQ(report["steps"].size(), 3u);
  EXPECT_EQ(report["steps"][0]["first_step"], 1);
  EXPECT_EQ(report["steps"][2]["bytes_read"], 3'000'000'000);
  EXPECT_EQ(report["layers"][1]["wait_seconds"]["late"], 4);
}

TEST(ReportPageTest, OperationsAreEstimatedWhereTokensAreNamed) {
  JobReport report = Sample();
  report.tensors[0].set_matrix_elements(1'000'000);
  report.tensors[0].set_trained(true);
  report.tensors[2].set_matrix_elements(500'000);
  EXPECT_TRUE(DescribeReport(report)["estimated_operations"].is_null());
  EXPECT_FALSE(absl::StrContains(ReportPage(report, "now"), "FLOP"));
  const Operations asked = {.tokens = 1000, .peak_per_second = 8e9};
  const Json described = DescribeReport(report, asked);
  // 6 and 4 for each; six steps take 13 seconds, of which 18 % are waits.
  EXPECT_DOUBLE_EQ(described["estimated_operations"]["per_step"], 8e9);
  EXPECT_NEAR(described["estimated_operations"]["per_second"], 8e9 * 6 / 13, 1);
  EXPECT_NEAR(described["estimated_operations"]["utilization"], 6.0 / 13, 1e-9);
  EXPECT_NEAR(described["estimated_operations"]["compute_utilization"], 6.0 / 13 / 0.82, 1e-9);
  EXPECT_DOUBLE_EQ(described["layers"][1]["estimated_operations"], 2e9);
  const std::string page = ReportPage(report, "now", asked);
  ExpectBalanced(page);
  EXPECT_TRUE(absl::StrContains(page, "estimated from the sizes of matrices"));
  EXPECT_TRUE(absl::StrContains(page, "46.2 % of the peak that was named"));
}

TEST(LayerOfTest, EndsWithTheFirstNumberOrBeforeTheLastPart) {
  EXPECT_EQ(LayerOf("model.layers.31.self_attn.q_proj.weight"), "model.layers.31");
  EXPECT_EQ(LayerOf("0.weight"), "0");
  EXPECT_EQ(LayerOf("transformer.wte.weight"), "transformer.wte");
  EXPECT_EQ(LayerOf("scale"), "scale");
}

TEST(ChartTest, AxesEndWithARoundNumber) {
  EXPECT_DOUBLE_EQ(RoundUp(0.93), 1);
  EXPECT_DOUBLE_EQ(RoundUp(1.13e12), 1.2e12);
  EXPECT_DOUBLE_EQ(RoundUp(850), 1000);
  EXPECT_DOUBLE_EQ(RoundUp(2), 2);
  EXPECT_DOUBLE_EQ(RoundUp(0), 1);
  EXPECT_DOUBLE_EQ(RoundUp(std::nan("")), 1);
}

TEST(ChartTest, AreasStandOnEachOtherInsideThePlot) {
  const std::string chart = StackedChart("t", "s", {{0, 1, "a"}, {1, 2, "b"}},
                                         {{"low", "#111111", {1, 0}}, {"high", "#222222", {1, 4}}});
  // From the bottom at 196 to half of the plot's 188 pixels, since the axis ends with 4.
  EXPECT_TRUE(absl::StrContains(chart, "d=\"M64.0 149.0 H456.0L456.0 196.0 H848.0")) << chart;
  EXPECT_TRUE(absl::StrContains(chart, "d=\"M64.0 102.0 H456.0L456.0 8.0 H848.0")) << chart;
}

}  // namespace
}  // namespace offload::tools
