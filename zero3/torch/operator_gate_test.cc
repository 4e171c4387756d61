#include "zero3/torch/operator_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

namespace offload::zero3 {
namespace {

using Pass = OperatorGate::Pass;
using Passage = OperatorGate::Passage;

TEST(OperatorGateTest, OperatorsPassTogetherAndAStepAlone) {
  OperatorGate gate;
  std::optional<Pass> reader(std::in_place, Passage::kTogether, gate);
  std::thread([&] { const Pass other(Passage::kTogether, gate); }).join();

  std::atomic<bool> has_passed = false;
  std::thread step([&] {
    const Pass alone(Passage::kAlone, gate);
    has_passed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(has_passed);
  { const Pass nested(Passage::kAlone, gate); }
  reader.reset();
  step.join();
}

TEST(OperatorGateTest, WhoComesBehindAStepWaitsForIt) {
  OperatorGate gate;
  std::atomic<bool> is_over = false;
  std::atomic<int> running = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!is_over) {
        const Pass pass(Passage::kTogether, gate);
        ++running;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        --running;
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const Pass alone(Passage::kAlone, gate);
    EXPECT_EQ(running, 0);
  }
  is_over = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(OperatorGateTest, WhoIsAloneForLongIsAwaitedBeyondPatience) {
  OperatorGate gate(std::chrono::milliseconds(20));
  std::optional<Pass> alone(std::in_place, Passage::kAloneForLong, gate);
  std::atomic<bool> is_over = false;
  std::thread reader([&] {
    const Pass pass(Passage::kTogether, gate);
    EXPECT_TRUE(is_over);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  is_over = true;
  alone.reset();
  reader.join();
}

TEST(OperatorGateTest, WhoUsesGradientsOnlyPassesBesideAStepButNotBesideALayout) {
  OperatorGate gate;
  {
    const Pass step(Passage::kAlone, gate);
    std::thread([&] { const Pass beside(Passage::kBesideSteps, gate); }).join();
  }
  std::optional<Pass> beside(std::in_place, Passage::kBesideSteps, gate);
  std::thread([&] { const Pass step(Passage::kAlone, gate); }).join();
  std::atomic<bool> lays_out = false, is_over = false;
  std::thread layout([&] {
    const Pass alone(Passage::kAloneForLong, gate);
    lays_out = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    is_over = true;
  });
  while (!gate.is_laying_out()) std::this_thread::yield();
  std::thread later([&] {
    const Pass pass(Passage::kBesideSteps, gate);
    EXPECT_TRUE(is_over);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(lays_out);
  beside.reset();
  layout.join();
  later.join();
}

TEST(OperatorGateTest, AnOperatorThatWaitsForAStepIsPassedInTheEnd) {
  OperatorGate gate(std::chrono::milliseconds(20));
  const Pass reader(Passage::kTogether, gate);
  std::thread([&] { const Pass alone(Passage::kAlone, gate); }).join();
}

}  // namespace
}  // namespace offload::zero3
