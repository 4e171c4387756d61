#include "zero3/schedule.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace offload::zero3 {
namespace {

using Tensors = std::vector<uint32_t>;

// A schedule that writes down what it asks for.
class Recorder {
 public:
  Recorder(std::vector<uint64_t> slot_bytes, uint64_t window_bytes)
      : schedule_(std::move(slot_bytes), window_bytes) {}

  Tensors Touch(uint32_t tensor) {
    Tensors asked;
    schedule_.Touch(tensor, [&](uint32_t t) { asked.push_back(t); });
    return asked;
  }
  Tensors TouchAll(const Tensors& tensors) {
    Tensors asked;
    for (const uint32_t tensor : tensors) {
      for (const uint32_t t : Touch(tensor)) asked.push_back(t);
    }
    return asked;
  }
  Tensors EndStep(bool expect_change) {
    Tensors asked;
    EXPECT_EQ(schedule_.EndStep([&](uint32_t t) { asked.push_back(t); }), expect_change);
    return asked;
  }
  Tensors order() const { return Tensors(schedule_.order().begin(), schedule_.order().end()); }
  Schedule& schedule() { return schedule_; }

 private:
  Schedule schedule_;
};

TEST(ScheduleTest, FirstStepIsRecordedAndAsksForNothing) {
  Recorder recorder({10, 10, 10}, 20);
  EXPECT_EQ(recorder.TouchAll({0, 1, 2, 1, 0}), Tensors{});
  EXPECT_EQ(recorder.order(), Tensors{});
  EXPECT_EQ(recorder.EndStep(true), (Tensors{0, 1}));
  EXPECT_EQ(recorder.order(), (Tensors{0, 1, 2, 1, 0}));
  EXPECT_EQ(recorder.schedule().position(), 0u);
}

TEST(ScheduleTest, RepetitionsOfOneTensorAreOneTouch) {
  Recorder recorder({10, 10}, 10);
  recorder.TouchAll({0, 0, 0, 1, 1, 0});
  recorder.EndStep(true);
  EXPECT_EQ(recorder.order(), (Tensors{0, 1, 0}));
}

TEST(ScheduleTest, ResidentTensorsAreNotRecorded) {
  Recorder recorder({10, 0, 10}, 10);
  recorder.TouchAll({0, 1, 2, 1, 0});
  recorder.EndStep(true);
  EXPECT_EQ(recorder.order(), (Tensors{0, 2, 0}));
}

TEST(ScheduleTest, WindowMovesWithTheCursorAndCountsDistinctTensors) {
  Recorder recorder({10, 10, 10, 10}, 20);
  recorder.TouchAll({0, 1, 2, 3, 2, 1, 0});
  EXPECT_EQ(recorder.EndStep(true), (Tensors{0, 1}));
  EXPECT_EQ(recorder.Touch(0), (Tensors{2}));
  EXPECT_EQ(recorder.Touch(1), (Tensors{3}));  // 2 3 2 are two distinct tensors
  EXPECT_EQ(recorder.Touch(2), Tensors{});     // 3 2: it is in use now, and still in the window
  EXPECT_EQ(recorder.Touch(3), (Tensors{1}));  // 2 1
  EXPECT_EQ(recorder.Touch(2), (Tensors{0}));
  EXPECT_EQ(recorder.TouchAll({1, 0}), Tensors{});
  EXPECT_EQ(recorder.schedule().mismatches(), 0u);
  EXPECT_EQ(recorder.schedule().position(), 7u);
}

TEST(ScheduleTest, SameStepAgainDoesNotChangeTheSchedule) {
  Recorder recorder({10, 10, 10}, 10);
  for (int step = 0; step < 3; ++step) {
    recorder.TouchAll({0, 1, 2, 1, 0});
    recorder.EndStep(step == 0);
  }
  EXPECT_EQ(recorder.schedule().mismatches(), 0u);
}

TEST(ScheduleTest, AnotherPathIsFollowedAndBecomesTheSchedule) {
  Recorder recorder({10, 10, 10, 10}, 10);
  recorder.TouchAll({0, 1, 2, 3, 2, 1, 0});
  recorder.EndStep(true);
  recorder.Touch(0);
  EXPECT_EQ(recorder.Touch(2), (Tensors{3}));  // 1 is skipped: the cursor stands behind the next 2
  EXPECT_EQ(recorder.schedule().mismatches(), 1u);
  EXPECT_EQ(recorder.schedule().position(), 3u);
  recorder.TouchAll({3, 2, 0});
  recorder.EndStep(true);
  EXPECT_EQ(recorder.order(), (Tensors{0, 2, 3, 2, 0}));
}

TEST(ScheduleTest, TensorThatTheScheduleDoesNotKnowLeavesTheCursor) {
  Recorder recorder({10, 10, 10}, 10);
  recorder.TouchAll({0, 1});
  recorder.EndStep(true);
  recorder.Touch(0);
  EXPECT_EQ(recorder.Touch(2), Tensors{});
  EXPECT_EQ(recorder.schedule().position(), 1u);
  recorder.Touch(1);
  EXPECT_EQ(recorder.schedule().position(), 2u);
}

TEST(ScheduleTest, EvaluationMovesTheCursorAndIsNotRecorded) {
  Recorder recorder({10, 10, 10, 10}, 10);
  recorder.TouchAll({0, 1, 2, 3, 2, 1, 0});
  recorder.EndStep(true);
  recorder.schedule().SetRecording(false);
  recorder.TouchAll({0, 1, 2, 3});
  recorder.schedule().SetRecording(true);
  recorder.TouchAll({0, 1, 2});  // found again after two touches at most
  EXPECT_EQ(recorder.schedule().position(), 3u);
  recorder.TouchAll({3, 2, 1, 0});
  recorder.EndStep(false);
}

TEST(ScheduleTest, StepWithoutTouchesKeepsTheSchedule) {
  Recorder recorder({10, 10}, 10);
  recorder.TouchAll({0, 1});
  recorder.EndStep(true);
  recorder.EndStep(false);
  EXPECT_EQ(recorder.order(), (Tensors{0, 1}));
}

TEST(ScheduleTest, TensorLargerThanTheWindowIsNeverAskedFor) {
  Recorder recorder({10, 50, 10}, 20);
  recorder.TouchAll({0, 1, 2});
  EXPECT_EQ(recorder.EndStep(true), (Tensors{0}));
  EXPECT_EQ(recorder.Touch(0), Tensors{});
  EXPECT_EQ(recorder.Touch(1), (Tensors{2}));
}

}  // namespace
}  // namespace offload::zero3
