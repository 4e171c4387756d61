#include "zero3/torch/step_announcement.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

client::Group WithRate(double rate) {
  return client::Group("sgd", {{"lr", rate}, {"momentum", 0.9}});
}

class StepAnnouncementTest : public ::testing::Test {
 protected:
  // A pass gives each a gradient.
  void Backward(const std::vector<uint32_t>& tensors) {
    for (const uint32_t tensor : tensors) announcement_.Accumulated(tensor);
  }
  void Step(std::vector<uint32_t> tensors, double rate = 1, GroupsNow groups_now = nullptr) {
    client::StepCommand command{.step = ++step_, .groups = {WithRate(rate)}};
    for (const uint32_t tensor : tensors)
      command.updates.push_back({tensor, 0, step_, /*gradient_scale=*/0.5f});
    announcement_.Stepped(command, std::move(groups_now));
    announced_.clear();
    released_.clear();
  }

  uint64_t step_ = 0;
  absl::Status answer_;
  std::vector<client::StepCommand> announced_;
  std::vector<uint32_t> released_;
  StepAnnouncement announcement_{
      {.begin_step =
           [this](const client::StepCommand& command) {
             announced_.push_back(command);
             return answer_;
           },
       .release_gradient = [this](uint32_t tensor) { released_.push_back(tensor); }},
      /*tensor_count=*/4};
};

TEST_F(StepAnnouncementTest, TheNextStepIsTheLastOneOnceMore) {
  Backward({2, 1, 0});
  EXPECT_TRUE(announced_.empty()) << "nothing is known before the first step";
  Step({0, 1, 2}, 0.25);
  Backward({2, 1, 3, 0});
  ASSERT_EQ(announced_.size(), 1u);
  EXPECT_EQ(released_, std::vector<uint32_t>({2, 1, 0})) << "tensor 3 was not stepped";
  const client::StepCommand& next = announced_.front();
  EXPECT_EQ(next.step, 2u);
  EXPECT_FALSE(next.has_trainer_state);
  ASSERT_EQ(next.groups.size(), 1u);
  EXPECT_EQ(next.groups[0].Get("lr"), 0.25);
  ASSERT_EQ(next.updates.size(), 3u);
  EXPECT_EQ(next.updates[0].update_count, 2u);
  EXPECT_EQ(next.updates[0].gradient_scale, 1.0f);
}

TEST_F(StepAnnouncementTest, UpdatesThatKeepNothingAreNotCounted) {
  client::StepCommand command{.step = 1, .groups = {client::Group("sgd", {{"lr", 1}})}};
  command.updates.push_back({0, 0, /*update_count=*/1});
  Backward({0});
  announcement_.Stepped(command, nullptr);
  Backward({0});
  ASSERT_EQ(announced_.size(), 1u);
  EXPECT_EQ(announced_.front().updates[0].update_count, 1u);
}

TEST_F(StepAnnouncementTest, AGradientIsFinalWithAsManyPassesAsBefore) {
  Backward({1, 0});
  Backward({1, 0});
  Backward({1});
  Step({0, 1});
  Backward({1, 0});
  EXPECT_TRUE(announced_.empty());
  Backward({1, 0});
  EXPECT_EQ(released_, std::vector<uint32_t>({0}));
  Backward({1});
  EXPECT_EQ(released_, std::vector<uint32_t>({0, 1}));
  Backward({1});  // more than before: the daemon finds another gradient
  EXPECT_EQ(released_, std::vector<uint32_t>({0, 1}));
  EXPECT_EQ(announced_.size(), 1u);
}

TEST_F(StepAnnouncementTest, HyperParametersAreThoseOfTheBackward) {
  double rate = 1;
  const GroupsNow now = [&rate] { return std::vector{WithRate(rate)}; };
  Backward({0});
  for (int i = 0; i < 3; ++i) {
    Step({0}, rate, now);
    rate /= 2;  // a scheduler
    Backward({0});
    ASSERT_EQ(announced_.size(), 1u);
    EXPECT_EQ(announced_[0].groups[0].Get("lr"), rate);
  }
}

TEST_F(StepAnnouncementTest, AfterASurpriseHyperParametersHaveToStayTheSameOnce) {
  Backward({0});
  Step({0}, 1);
  Backward({0});
  EXPECT_EQ(announced_.size(), 1u);
  for (const double rate : {2, 3}) {  // set between backward and step
    Step({0}, rate);
    Backward({0});
    EXPECT_TRUE(announced_.empty()) << rate;
  }
  Step({0}, 3);
  Backward({0});
  EXPECT_EQ(announced_.size(), 1u);
}

TEST_F(StepAnnouncementTest, OptimizersThatTakeTurnsAreNotForeseen) {
  for (int i = 0; i < 3; ++i) {
    Backward({0, 1});
    EXPECT_TRUE(announced_.empty()) << i;
    Step({0});
    Step({1});
  }
  Backward({0, 1});
  Step({1});
  Backward({1});
  EXPECT_EQ(released_, std::vector<uint32_t>({1})) << "the other one is done";
}

// On every core of the backward: what an update computes is taken from it.
TEST(StepAnnouncementOnAllCoresTest, StepsAreAnnouncedWhereTheForwardWaitsForMore) {
  for (const uint64_t waited : {1u, 100u}) {
    StepCosts costs;
    int announced = 0;
    StepAnnouncement announcement({.begin_step =
                                       [&](const client::StepCommand&) {
                                         ++announced;
                                         return absl::OkStatus();
                                       },
                                   .release_gradient = [](uint32_t) {},
                                   .costs = [&] { return costs; }},
                                  /*tensor_count=*/1);
    for (uint64_t step = 1; step <= 10; ++step) {
      announcement.Accumulated(0);
      costs.forward_wait_nanoseconds += waited;
      costs.computed_nanoseconds += 10;
      announcement.Stepped({.step = step, .groups = {WithRate(1)}, .updates = {{0, 0, step}}},
                           nullptr);
    }
    EXPECT_EQ(announced > 3, waited == 100);
    EXPECT_EQ(announced == 0, waited == 1);
  }
}

TEST_F(StepAnnouncementTest, NothingIsAnnouncedAfterItsEnd) {
  Backward({0, 1});
  Step({0, 1});
  announcement_.End();
  Backward({0, 1});
  EXPECT_TRUE(announced_.empty());
  EXPECT_TRUE(released_.empty());
}

TEST_F(StepAnnouncementTest, TheEndWaitsForWhoAnnounces) {
  Backward({0});
  std::thread end;
  std::atomic<bool> has_ended = false;
  Step({0}, 1, [&] {
    end = std::thread([&] {
      announcement_.End();
      has_ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(has_ended);
    return std::vector<client::Group>{WithRate(1)};
  });
  Backward({0});
  end.join();
  EXPECT_TRUE(has_ended);
}

TEST_F(StepAnnouncementTest, WhatCannotBeAnnouncedIsNot) {
  const std::vector<GroupsNow> bad = {
      [] { return std::vector<client::Group>(); },  // the optimizer is gone
      []() -> std::vector<client::Group> { throw std::runtime_error("lr is -1"); }};
  Backward({0, 1});
  for (const GroupsNow& groups_now : bad) {
    Step({0, 1}, 1, groups_now);
    Backward({0, 1});
    EXPECT_TRUE(announced_.empty());
    EXPECT_TRUE(released_.empty());
  }
  Step({0, 1});
  answer_ = absl::UnavailableError("the daemon is gone");
  Backward({0, 1});
  EXPECT_EQ(announced_.size(), 1u) << "once for a step";
  EXPECT_TRUE(released_.empty());
  Step({0, 1});
  answer_ = absl::OkStatus();
  Backward({0, 1});
  EXPECT_EQ(released_, std::vector<uint32_t>({0, 1}));
}

}  // namespace
}  // namespace offload::zero3
