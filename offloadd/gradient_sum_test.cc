#include "offloadd/gradient_sum.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/mapped_region.h"
#include "base/worker_pool.h"
#include "gtest/gtest.h"
#include "proto/gradient_slices.h"

namespace offload::daemon {
namespace {

using proto::GradientHome;
using proto::GradientStart;
using proto::RingOperation;

constexpr uint64_t kRegionBytes = 8 << 20;
// Of two tensors: a small one, and one of two extents, both too large for the loop.
constexpr int64_t kSmall = 100, kLarge = proto::kExtentElements + 20000;

// Two ranks and a loop of their own, fp32, parts averaged. Methods without a comment run on the
// loop.
class GradientSumTest : public ::testing::TestWithParam<GradientHome> {
 protected:
  GradientSumTest() : slab_(32 << 20), regions_(2, std::vector<float>(kRegionBytes / 4)) {
    auto catalogue = proto::BuildCatalogue(
        {{.name = "small", .shape = {kSmall}}, {.name = "large", .shape = {kLarge}}});
    EXPECT_TRUE(catalogue.ok());
    loop_ = *EventLoop::Create();
    context_.loop = loop_.get();
    context_.workers.Start([this](std::function<void()> work) { workers_.Post(std::move(work)); },
                           2);
    context_.catalogue = *std::move(catalogue);
    context_.slab = slab_.data();
    for (std::vector<float>& region : regions_)
      context_.ranks.push_back({.region = reinterpret_cast<std::byte*>(region.data())});
    context_.complete = [this](uint32_t, uint64_t tag, const absl::Status& status, uint64_t value) {
      EXPECT_TRUE(answers_.emplace(tag, std::make_pair(status, value)).second) << tag;
    };
    context_.fail = [this](const absl::Status& status) {
      context_.failure.Update(status);
      sum_->FailQueued(context_.failure);
    };
    MakePlan();
    sum_ = std::make_unique<GradientSum>(&context_, 0, [](uint32_t) {});
    loop_->SetTurn([this] {
      if (context_.scratch != nullptr) context_.scratch->Poll(false);
      while (!wanted_.empty() && HasAll(wanted_.begin()->first)) {
        const std::function<void(absl::Status)> done = wanted_.begin()->second;
        wanted_.erase(wanted_.begin());
        done(absl::OkStatus());
      }
      return context_.scratch == nullptr ? -1 : 1;
    });
    thread_ = std::thread([this] { loop_->Run(); });
  }
  ~GradientSumTest() override {
    loop_->Stop();
    thread_.join();
    EXPECT_EQ(context_.outstanding, 0u);
  }

  void MakePlan() {
    proto::MemoryPlan& plan = context_.plan;
    plan.world_size = 2;
    plan.weight_resident = {true, true};
    plan.state_resident = {1, 2};
    plan.region_bytes = plan.other_region_bytes = kRegionBytes;
    plan.gradients = {{.home = GradientHome::kSlab}, {.home = GetParam()}};
    if (GetParam() == GradientHome::kSlabScratch) {
      plan.pipeline_blocks = plan.sum_blocks = 1;
      plan.pipeline_gradients = true;
      plan.scratch_bytes = 4 << 20;
      const char* folder = std::getenv("TEST_TMPDIR");
      auto scratch = swap::Scratch::Create({folder == nullptr ? "/tmp" : folder}, {});
      ASSERT_TRUE(scratch.ok()) << scratch.status();
      scratch_ = *std::move(scratch);
      ASSERT_TRUE(scratch_->Reserve(plan.scratch_bytes).ok());
      context_.scratch = scratch_.get();
    }
    auto layout = proto::ComputeSlabLayout(context_.catalogue, plan);
    ASSERT_TRUE(layout.ok()) << layout.status();
    ASSERT_LE(layout->total_bytes, slab_.size());
    context_.layout = *std::move(layout);
  }

  // From the test's thread: `work` on the loop.
  void OnLoop(const std::function<void()>& work) {
    const absl::Status done =
        loop_->Call<absl::Status>([&](const std::function<void(absl::Status)>& answer) {
          work();
          answer(absl::OkStatus());
        });
    ASSERT_TRUE(done.ok());
  }
  // From the test's thread: waits until all these are answered.
  void WaitFor(const std::set<uint64_t>& tags) {
    const absl::Status done =
        loop_->Call<absl::Status>([&](std::function<void(absl::Status)> answer) {
          wanted_.emplace(tags, std::move(answer));
        });
    ASSERT_TRUE(done.ok());
  }
  bool HasAll(const std::set<uint64_t>& tags) const {
    return std::all_of(tags.begin(), tags.end(),
                       [this](uint64_t tag) { return answers_.count(tag) != 0; });
  }

  void Submit(uint32_t rank, uint64_t tag, proto::SubmissionEntry entry) {
    entry.tag = tag;
    sum_->Handle(rank, entry);
  }
  void Begin(uint64_t step) {
    for (const uint32_t rank : {0, 1}) {
      proto::SubmissionEntry entry{};
      entry.operation = RingOperation::kBeginGradients;
      entry.element_offset = step;
      Submit(rank, 1000 * step + rank, entry);
    }
  }
  // Fills the rank's place for the extent with `value`.
  void Give(uint32_t rank, uint64_t tag, uint32_t tensor, uint32_t extent, float value,
            GradientStart start = GradientStart::kNothing) {
    proto::SubmissionEntry entry{};
    entry.operation = RingOperation::kGradient;
    entry.tensor = tensor;
    entry.start = start;
    entry.element_offset = uint64_t{extent} * proto::kExtentElements;
    entry.element_count =
        proto::ExtentElements(context_.catalogue.tensors[tensor].element_count, extent);
    entry.region_offset = (tensor * 2 + extent) * (2ull << 20);
    std::fill_n(regions_[rank].begin() + static_cast<ptrdiff_t>(entry.region_offset / 4),
                entry.element_count, value);
    Submit(rank, tag, entry);
  }
  // Fills the rank's place for its slice of the extent's sum with `value`.
  void GiveSlice(uint32_t rank, uint64_t tag, uint32_t tensor, uint32_t extent, float value,
                 uint32_t pass = 0) {
    const uint64_t elements =
        proto::ExtentElements(context_.catalogue.tensors[tensor].element_count, extent);
    proto::SubmissionEntry entry{};
    entry.operation = RingOperation::kGradient;
    entry.tensor = tensor;
    entry.pass = pass;
    entry.element_offset =
        uint64_t{extent} * proto::kExtentElements + proto::SliceBegin(elements, 2, rank);
    entry.element_count = proto::SliceElements(elements, 2, rank);
    entry.region_offset = (tensor * 2 + extent) * (2ull << 20);
    std::fill_n(regions_[rank].begin() + static_cast<ptrdiff_t>(entry.region_offset / 4),
                entry.element_count, value);
    Submit(rank, tag, entry);
  }
  void End(uint32_t rank, uint64_t tag, uint32_t pass) {
    proto::SubmissionEntry entry{};
    entry.operation = RingOperation::kEndPass;
    entry.pass = pass;
    Submit(rank, tag, entry);
  }
  void Look(uint32_t rank, uint64_t tag, uint32_t tensor) {
    proto::SubmissionEntry entry{};
    entry.operation = RingOperation::kAwaitGradient;
    entry.tensor = tensor;
    Submit(rank, tag, entry);
  }
  // From the test's thread: the sum of an extent, whose elements are all alike.
  float SumOf(uint32_t tensor, uint32_t extent) {
    const uint64_t elements =
        proto::ExtentElements(context_.catalogue.tensors[tensor].element_count, extent);
    const uint64_t begin = uint64_t{extent} * proto::kExtentElements * 4;
    std::vector<float> values(proto::PaddedBytes(elements * 4) / 4);
    if (context_.plan.gradients[tensor].home == GradientHome::kSlab) {
      std::memcpy(values.data(), slab_.data() + context_.layout.sum_offset[tensor] + begin,
                  elements * 4);
    } else {
      auto memory = MappedRegion::Anonymous(values.size() * 4);
      const absl::Status read =
          loop_->Call<absl::Status>([&](std::function<void(absl::Status)> answer) {
            scratch_->Read(begin, {memory->data(), memory->size()}, std::move(answer));
          });
      EXPECT_TRUE(read.ok()) << read;
      std::memcpy(values.data(), memory->data(), memory->size());
    }
    for (uint64_t i = 1; i < elements; ++i) EXPECT_EQ(values[i], values[0]) << i;
    return values[0];
  }
  uint8_t Bits(uint32_t tensor) const {
    const auto* words = reinterpret_cast<const proto::GradientWord*>(
        slab_.data() + context_.layout.gradient_words_offset);
    return proto::GradientBitsOf(words[tensor].load(std::memory_order_acquire));
  }

  struct alignas(4096) Page {
    std::byte bytes[4096];
  };
  struct Slab {
    explicit Slab(size_t size_bytes) : pages(size_bytes / sizeof(Page)) {}
    std::byte* data() { return pages.data()->bytes; }
    const std::byte* data() const { return pages.data()->bytes; }
    size_t size() const { return pages.size() * sizeof(Page); }
    std::vector<Page> pages;
  };

  Slab slab_;
  std::vector<std::vector<float>> regions_;
  WorkerPool workers_{2, "test"};
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<swap::Scratch> scratch_;
  JobContext context_;
  std::unique_ptr<GradientSum> sum_;
  std::map<uint64_t, std::pair<absl::Status, uint64_t>> answers_;  // the loop's
  std::map<std::set<uint64_t>, std::function<void(absl::Status)>> wanted_;
  std::thread thread_;
};

TEST_P(GradientSumTest, SumsAreTheAverageOfWhatRanksGive) {
  OnLoop([this] {
    Begin(1);
    for (const uint32_t rank : {1, 0}) {
      Give(rank, 10 + rank, 0, 0, 3.0f + static_cast<float>(rank));
      Give(rank, 20 + rank, 1, 0, 5.0f + static_cast<float>(rank));
      Give(rank, 30 + rank, 1, 1, 7.0f + static_cast<float>(rank));
    }
    for (const uint32_t rank : {0, 1}) Look(rank, 40 + rank, 1);
  });
  WaitFor({10, 11, 20, 21, 30, 31, 40, 41});
  EXPECT_EQ(SumOf(0, 0), 3.5f);
  EXPECT_EQ(SumOf(1, 0), 5.5f);
  EXPECT_EQ(SumOf(1, 1), 7.5f);
  EXPECT_EQ(Bits(1), proto::kGradientExists | proto::kGradientFinal | proto::kGradientFinite);
  EXPECT_EQ(answers_[40].second, answers_[41].second);
}

// Neither scaled nor added: ranks have done so. What follows is added to them.
TEST_P(GradientSumTest, SlicesArePutInTheirPlaces) {
  OnLoop([this] {
    Begin(1);
    for (const uint32_t rank : {1, 0}) GiveSlice(rank, 10 + rank, 0, 0, 5.0f);
    for (const uint32_t rank : {0, 1}) Look(rank, 40 + rank, 0);
  });
  WaitFor({10, 11, 40, 41});
  EXPECT_EQ(SumOf(0, 0), 5.0f);
  EXPECT_EQ(Bits(0), proto::kGradientExists | proto::kGradientFinal | proto::kGradientFinite);
  OnLoop([this] {
    for (const uint32_t rank : {0, 1}) sum_->Step(rank);
    sum_->BeginNextStep({});
    Begin(2);
    for (const uint32_t rank : {0, 1}) GiveSlice(rank, 50 + rank, 0, 0, 2.0f);
    for (const uint32_t rank : {0, 1}) {
      End(rank, 60 + rank, 0);
      proto::SubmissionEntry part{};
      part.operation = RingOperation::kGradient;
      part.pass = 1;
      part.element_count = kSmall;
      part.region_offset = 4ull << 20;
      std::fill_n(regions_[rank].begin() + (1 << 20), kSmall, 8.0f);
      Submit(rank, 70 + rank, part);
    }
  });
  WaitFor({50, 51, 70, 71});
  EXPECT_EQ(SumOf(0, 0), 10.0f) << "2 + 8 / 2 + 8 / 2";
}

TEST_P(GradientSumTest, ASliceThatIsNotFiniteIsFound) {
  OnLoop([this] {
    Begin(1);
    GiveSlice(0, 10, 0, 0, 1.0f);
    GiveSlice(1, 11, 0, 0, std::numeric_limits<float>::quiet_NaN());
    for (const uint32_t rank : {0, 1}) Look(rank, 40 + rank, 0);
  });
  WaitFor({10, 11, 40, 41});
  EXPECT_EQ(Bits(0), proto::kGradientExists | proto::kGradientFinal);
}

TEST_P(GradientSumTest, ElementsThatAreNotTheRanksSliceAreRefused) {
  OnLoop([this] {
    Begin(1);
    proto::SubmissionEntry entry{};
    entry.operation = RingOperation::kGradient;
    entry.element_offset = 1;
    entry.element_count = 50;
    Submit(0, 10, entry);
  });
  WaitFor({10});
  EXPECT_EQ(ErrorIdOf(answers_[10].first), ErrorId::kProtocol) << answers_[10].first;
}

TEST_P(GradientSumTest, ASumGoesOnFromTheStepBefore) {
  OnLoop([this] {
    Begin(1);
    Give(0, 10, 1, 0, 4.0f, GradientStart::kPrevious);  // there is none: zeros
    Give(0, 11, 1, 1, 4.0f, GradientStart::kPrevious);
    for (const uint32_t rank : {0, 1}) Look(rank, 40 + rank, 1);
  });
  WaitFor({10, 11, 40, 41});
  EXPECT_EQ(SumOf(1, 0), 2.0f);
  OnLoop([this] {
    for (const uint32_t rank : {0, 1}) sum_->Step(rank);
    ASSERT_TRUE(sum_->IsSettled());
    EXPECT_TRUE(sum_->HasSum(1));
    EXPECT_FALSE(sum_->HasSum(0));
    sum_->BeginNextStep(std::vector<uint32_t>{1});
    Begin(2);
    Give(0, 50, 1, 0, 2.0f, GradientStart::kPrevious);
    Give(0, 51, 1, 1, 2.0f, GradientStart::kPrevious);
    EXPECT_EQ(answers_.count(50), 0u);
    sum_->UpdateComputed(std::vector<uint32_t>{1});
    for (const uint32_t rank : {0, 1}) Look(rank, 60 + rank, 1);
  });
  WaitFor({50, 51, 60, 61});
  EXPECT_EQ(SumOf(1, 0), 3.0f);
  EXPECT_EQ(SumOf(1, 1), 3.0f);
}

TEST_P(GradientSumTest, WhatIsNotFiniteIsFound) {
  OnLoop([this] {
    Begin(1);
    Give(0, 10, 1, 0, 1.0f);
    Give(0, 11, 1, 1, std::numeric_limits<float>::infinity());
    for (const uint32_t rank : {0, 1}) Look(rank, 40 + rank, 1);
  });
  WaitFor({10, 11, 40, 41});
  OnLoop([this] { EXPECT_FALSE(sum_->IsFinite(1)); });
  EXPECT_EQ(Bits(1), proto::kGradientExists | proto::kGradientFinal);
}

TEST_P(GradientSumTest, RanksThatDifferFailTheJobAndEverybodyIsAnswered) {
  OnLoop([this] {
    Begin(1);
    Give(1, 20, 1, 0, 1.0f, GradientStart::kZeros);
    Look(0, 30, 0);
    Give(0, 10, 1, 0, 1.0f,
         GradientStart::kNothing);  // after its look, which rank 1 does not share
  });
  WaitFor({10, 20, 30});
  for (const uint64_t tag : {10, 20, 30})
    EXPECT_EQ(ErrorIdOf(answers_[tag].first), ErrorId::kGradientOfRanks) << answers_[tag].first;
}

TEST_P(GradientSumTest, PartsOnTheirWayAreAnsweredWithTheFailure) {
  OnLoop([this] {
    Begin(1);
    for (const uint32_t extent : {0, 1}) Give(0, 10 + extent, 1, extent, 1.0f);
    context_.fail(MakeError(ErrorId::kIo, "the drive"));
  });
  WaitFor({10, 11});
  for (const uint64_t tag : {10, 11})
    EXPECT_EQ(ErrorIdOf(answers_[tag].first), ErrorId::kIo) << answers_[tag].first;
  EXPECT_EQ(Bits(1) & proto::kGradientFinal, 0);
}

INSTANTIATE_TEST_SUITE_P(Homes, GradientSumTest,
                         ::testing::Values(GradientHome::kSlab, GradientHome::kSlabScratch),
                         [](const auto& info) {
                           return info.param == GradientHome::kSlab ? "InTheSlab"
                                                                    : "InTheScratchFile";
                         });

}  // namespace
}  // namespace offload::daemon
