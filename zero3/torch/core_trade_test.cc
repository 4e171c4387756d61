#include "zero3/torch/core_trade.h"

#include <string>

#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// A trainer whose updates take `computed`, beside which its forward waits `waited` when nothing is
// begun in the backward, and `waited_after` when it is.
class Trainer {
 public:
  explicit Trainer(double waited, double computed, double waited_after = 0)
      : waited_(waited), computed_(computed), waited_after_(waited_after) {}

  // Steps, each as '+' when the next one is begun, else '-'.
  std::string Train(int steps) {
    std::string text;
    for (int i = 0; i < steps; ++i) {
      // The update of the step before is here unless it was begun; what is begun for the next, too.
      costs_.forward_wait_nanoseconds += Nanoseconds(was_begun_ ? waited_after_ : waited_);
      costs_.computed_nanoseconds += Nanoseconds((!was_begun_ + begins_) * computed_);
      was_begun_ = begins_;
      begins_ = trade_.Judge(costs_);
      text += begins_ ? '+' : '-';
    }
    return text;
  }
  void Change(double waited, double computed) { waited_ = waited, computed_ = computed; }

 private:
  static uint64_t Nanoseconds(double seconds) {
    return static_cast<uint64_t>(seconds * static_cast<double>(kSecond));
  }

  double waited_, computed_, waited_after_;
  StepCosts costs_;
  bool begins_ = false, was_begun_ = false;
  CoreTrade trade_;
};

TEST(CoreTradeTest, WhereTheForwardWaitsForMoreThanIsComputedStepsAreBegun) {
  EXPECT_EQ(Trainer(/*waited=*/1.2, /*computed=*/0.4).Train(12), "----++++++++");
}

TEST(CoreTradeTest, WhereItDoesNotNothingIs) {
  EXPECT_EQ(Trainer(0.08, 0.2).Train(200), std::string(200, '-'));
  EXPECT_EQ(Trainer(0.39, 0.2).Train(200), std::string(200, '-')) << "not by the margin";
  EXPECT_EQ(Trainer(0, 0).Train(200), std::string(200, '-'));
}

TEST(CoreTradeTest, TheFirstStepsDoNotCount) {
  Trainer trainer(/*waited=*/100, 0.1);  // weights are loaded
  EXPECT_EQ(trainer.Train(2), "--");
  trainer.Change(0.1, 0.1);
  EXPECT_EQ(trainer.Train(100), std::string(100, '-'));
}

TEST(CoreTradeTest, SomeStepsAreNotBegunToLookAgain) {
  const std::string taken(62, '+');
  Trainer trainer(1.2, 0.4);
  EXPECT_EQ(trainer.Train(4), "----");
  EXPECT_EQ(trainer.Train(3 * 64), taken + "--" + taken + "--" + taken + "--")
      << "what is begun meanwhile is no sample";
  trainer.Change(0.1, 0.4);  // more memory, a faster drive, larger batches
  trainer.Train(3 * 64);
  EXPECT_EQ(trainer.Train(100), std::string(100, '-'));
  trainer.Change(1.2, 0.4);
  EXPECT_EQ(trainer.Train(8), "-+++++++");
}

}  // namespace
}  // namespace offload::zero3
