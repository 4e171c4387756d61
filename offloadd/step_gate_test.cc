#include "offloadd/step_gate.h"

#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using proto::v1::StepRequest;

StepMessages StepOf(const std::vector<uint32_t>& tensors,
                    const std::function<void(StepRequest&)>& change = {}) {
  StepRequest message;
  message.set_step(7);
  message.add_groups()->set_name("sgd");
  message.mutable_groups(0)->add_parameters(0.5);
  message.set_tensor_count(static_cast<uint32_t>(tensors.size()));
  for (const uint32_t tensor : tensors) {
    message.add_tensors(tensor);
    message.add_group_of(0);
    message.add_update_count(7);
    message.add_gradient_scale(0.25f);
    message.add_own_gradient_offset(0);
    message.add_own_gradient_crc(0);
  }
  if (change) change(message);
  return {message};
}

class StepGateTest : public testing::Test {
 protected:
  static StepGate MakeGate(uint32_t world_size, bool compares_gradients = false) {
    return StepGate(world_size, compares_gradients,
                    [](uint32_t tensor) { return absl::StrCat("weight.", tensor); });
  }
  static absl::StatusOr<StepMessages> Take(StepGate gate, const std::vector<StepMessages>& all) {
    for (uint32_t rank = 0; rank < all.size(); ++rank) EXPECT_TRUE(gate.Add(rank, all[rank]).ok());
    return gate.Take();
  }
  static void ExpectDifference(const StepMessages& other, const std::string& text,
                               bool compares_gradients = false) {
    const auto step =
        Take(MakeGate(3, compares_gradients), {StepOf({1, 2}), StepOf({1, 2}), other});
    EXPECT_EQ(ErrorIdOf(step.status()), ErrorId::kRanksDiffer) << step.status();
    EXPECT_NE(step.status().message().find(text), absl::string_view::npos) << step.status();
  }
};

TEST_F(StepGateTest, AStepBeginsWhenAllRanksHaveCalledForIt) {
  StepGate gate = MakeGate(3);
  EXPECT_TRUE(gate.empty());
  EXPECT_TRUE(gate.Add(1, StepOf({1})).ok());
  EXPECT_FALSE(gate.empty());
  EXPECT_EQ(gate.Missing(), (std::vector<uint32_t>{0, 2}));
  EXPECT_TRUE(gate.Add(0, StepOf({1})).ok());
  EXPECT_FALSE(gate.IsComplete());
  EXPECT_TRUE(gate.Add(2, StepOf({1})).ok());
  EXPECT_TRUE(gate.IsComplete());
  EXPECT_TRUE(gate.Take().ok());
  EXPECT_TRUE(gate.empty());
}

TEST_F(StepGateTest, ARankCallsForOneStepAtATime) {
  StepGate gate = MakeGate(2);
  EXPECT_TRUE(gate.Add(1, StepOf({1})).ok());
  EXPECT_EQ(ErrorIdOf(gate.Add(1, StepOf({1}))), ErrorId::kProtocol);
  EXPECT_EQ(ErrorIdOf(gate.Add(0, {})), ErrorId::kProtocol) << "without messages";
  EXPECT_FALSE(gate.IsComplete());
}

TEST_F(StepGateTest, OneRanksStepIsWhatItSaid) {
  const auto step = Take(MakeGate(1), {StepOf({3, 1})});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->front().SerializeAsString(), StepOf({3, 1}).front().SerializeAsString());
}

TEST_F(StepGateTest, ATensorThatOnlySomeNameIsUpdatedOnce) {
  StepMessages in_two = StepOf({4});
  in_two.push_back(StepOf({2}).front());
  in_two.front().set_tensor_count(2);
  const auto step = Take(MakeGate(3), {StepOf({1, 2}), in_two, StepOf({})});
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ(step->size(), 1u);
  const StepRequest& request = step->front();
  EXPECT_EQ(std::vector<uint32_t>(request.tensors().begin(), request.tensors().end()),
            (std::vector<uint32_t>{1, 2, 4}));
  EXPECT_EQ(request.tensor_count(), 3u);
  EXPECT_EQ(request.step(), 7u);
  EXPECT_EQ(request.update_count_size(), 3);
  EXPECT_EQ(request.gradient_scale(2), 0.25f);
}

TEST_F(StepGateTest, TheFirstDifferenceIsNamedWithItsRanks) {
  ExpectDifference(StepOf({1, 2}, [](auto& step) { step.set_step(8); }),
                   "rank 0 is at step 7 and rank 2 at step 8");
  ExpectDifference(StepOf({1, 2}, [](auto& step) { step.add_groups(); }), "1 groups in rank 0");
  ExpectDifference(
      StepOf({1, 2}, [](auto& step) { step.mutable_groups(0)->set_parameters(0, 0.25); }),
      "the optimizer of group 0 of step 7: lr is 0.5 in rank 0 and 0.25 in rank 2");
  ExpectDifference(StepOf({1, 2}, [](auto& step) { step.set_group_of(1, 1); }),
                   "the group of \"weight.2\" differs between ranks 0 and 2: 0 and 1");
  ExpectDifference(StepOf({1, 2}, [](auto& step) { step.set_update_count(0, 6); }),
                   "the number of updates of \"weight.1\"");
}

// Also by a rounding, or by the sign of a zero: the norm came from the same bytes.
TEST_F(StepGateTest, ScalesAreComparedBitByBit) {
  ExpectDifference(
      StepOf({1, 2}, [](auto& step) { step.set_gradient_scale(1, std::nextafter(0.25f, 1.0f)); }),
      "the gradient's scale of \"weight.2\"");
  const auto zero = [](float value) {
    return StepOf({1}, [value](auto& step) { step.set_gradient_scale(0, value); });
  };
  EXPECT_FALSE(Take(MakeGate(2), {zero(0.0f), zero(-0.0f)}).ok());
  EXPECT_TRUE(Take(MakeGate(2), {zero(NAN), zero(NAN)}).ok());
}

TEST_F(StepGateTest, AGradientThatTheTrainerWroteIsWrittenByAllAndTheFirstOnesIsUsed) {
  const auto written = [](uint64_t offset, uint32_t crc) {
    return StepOf({1}, [=](auto& step) {
      step.set_own_gradient_offset(0, offset);
      step.set_own_gradient_crc(0, crc);
    });
  };
  const auto step = Take(MakeGate(2), {written(4096, 5), written(8192, 5)});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->front().own_gradient_offset(0), 4096u);
  const auto other = Take(MakeGate(2), {written(4096, 5), written(4096, 6)});
  EXPECT_NE(other.status().message().find("the gradient of \"weight.1\""), absl::string_view::npos)
      << other.status();
  const auto one = Take(MakeGate(2), {written(0, 0), written(4096, 6)});
  EXPECT_NE(one.status().message().find("only rank 1 has written it"), absl::string_view::npos)
      << one.status();
  EXPECT_FALSE(Take(MakeGate(2), {StepOf({}), written(4096, 6)}).ok());
}

TEST_F(StepGateTest, GradientsThatTheTrainerReducesAreComparedByTheirChecksums) {
  ExpectDifference(StepOf({1, 2}, [](auto& step) { step.set_own_gradient_crc(1, 9); }),
                   "the gradient of \"weight.2\" differs between ranks 0 and 2", true);
  ExpectDifference(StepOf({1}), "\"weight.2\" has a gradient in rank 0 and not in all", true);
}

TEST_F(StepGateTest, ListsThatDifferInLengthOrNameATensorTwiceAreTheRanksFault) {
  const StepMessages kBad[] = {
      StepOf({1}, [](auto& step) { step.add_group_of(0); }),
      StepOf({1}, [](auto& step) { step.add_own_gradient_crc(0); }),
      StepOf({1, 1}),
      StepOf({1}, [](auto& step) { step.set_tensor_count(2); }),
  };
  for (const StepMessages& bad : kBad) {
    EXPECT_EQ(ErrorIdOf(Take(MakeGate(2), {StepOf({1}), bad}).status()), ErrorId::kProtocol);
  }
}

}  // namespace
}  // namespace offload::daemon
