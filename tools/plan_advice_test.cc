#include "tools/plan_advice.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/strings/match.h"
#include "base/error.h"
#include "proto/slab_layout.h"
#include "zero3/model_shapes.h"

namespace offload::tools {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

PlanReport Report(bool has_drive = true) {
  PlanReport report;
  const auto shape = zero3::ShapeForParameters({.parameters = 50'000'000});
  EXPECT_TRUE(shape.ok()) << shape.status();
  report.model = zero3::Describe(*shape);
  auto catalogue = proto::BuildCatalogue(zero3::LlamaTensors(*shape, proto::Dtype::kBFloat16));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  report.input.catalogue = *std::move(catalogue);
  if (has_drive) report.drive = Drive{.read = 2e9, .write = 1e9, .mixed = 1.5e9, .source = "given"};
  return report;
}

TEST(PlanAdviceTest, BudgetsGoFromTheFloorToEverythingAndMoreIsNeverSlower) {
  for (const uint64_t interval : {1, 100}) {
    PlanReport report = Report();
    report.input.durability.steps = interval;
    report.input.write_cost = 2;
    const auto offers = OfferBudgets(report);
    ASSERT_TRUE(offers.ok()) << offers.status();
    ASSERT_GE(offers->size(), 10u);
    EXPECT_TRUE(offers->front().plan.gradients_spilled);
    const zero3::Plan& all = offers->back().plan;
    EXPECT_EQ(all.resident_weight_bytes + all.resident_state_bytes, all.state_bytes);
    double last = 1e9;
    for (const BudgetOffer& offer : *offers) {
      EXPECT_EQ(offer.ram_bytes % kMebibyte, 0u);
      EXPECT_LE(offer.plan.total_bytes, offer.ram_bytes);
      const double seconds = *SecondsOf(TrafficOf(offer.plan, 1), *report.drive).mixed;
      EXPECT_LE(seconds, last) << offer.ram_bytes;
      last = seconds;
    }
  }
}

TEST(PlanAdviceTest, ABudgetThatWasNamedIsAmongThem) {
  PlanReport report = Report();
  report.input.ram_bytes = 300 * kMebibyte + 4096;
  report.compute_seconds = 0.5;
  const auto answer = ReportOffers(report);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(absl::StrContains(answer->text, "<- --ram")) << answer->text;
  int named = 0;
  for (const Json& row : answer->data["budgets"]) {
    named += row["ram_bytes"] == report.input.ram_bytes;
    EXPECT_GE(row["step_seconds"].get<double>(), 0.5);
    EXPECT_GE(row["step_seconds"].get<double>(), row["drive_seconds"].get<double>());
  }
  EXPECT_EQ(named, 1);
  report.input.ram_bytes = kMebibyte;
  EXPECT_EQ(ErrorIdOf(ReportOffers(report).status()), ErrorId::kBudgetTooSmall);
}

// The link's time is that of gpu_ram, whatever ram is.
TEST(PlanAdviceTest, OnADeviceAStepTakesTheLinkToo) {
  PlanReport report = Report();
  report.compute_seconds = 0.001;
  report.gpu = GpuTier{.traffic = {.weight_bytes = 50'000'000'000}};
  const auto unknown = ReportOffers(report);
  ASSERT_TRUE(unknown.ok()) << unknown.status();
  report.gpu->link = Link{.to_device = 1e9, .to_host = 1e9};
  const auto known = ReportOffers(report);
  ASSERT_TRUE(known.ok()) << known.status();
  for (const Json& row : unknown->data["budgets"]) EXPECT_TRUE(row["step_seconds"].is_null());
  for (const Json& row : known->data["budgets"]) EXPECT_EQ(row["step_seconds"], 50);
}

TEST(PlanAdviceTest, WithoutRatesThereAreBytesAndNoTimes) {
  PlanReport report = Report(/*has_drive=*/false);
  report.compute_seconds = 1;
  const auto answer = ReportOffers(report);
  ASSERT_TRUE(answer.ok()) << answer.status();
  for (const Json& row : answer->data["budgets"]) {
    EXPECT_TRUE(row["drive_seconds"].is_null());
    EXPECT_TRUE(row["step_seconds"].is_null());
  }
  EXPECT_GT(answer->data["budgets"][0]["written_bytes"], 0);
  EXPECT_TRUE(absl::StrContains(answer->text, "--pool DIR measures it")) << answer->text;
}

}  // namespace
}  // namespace offload::tools
