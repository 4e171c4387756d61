#include "offloadd/update_order.h"

#include <map>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

Readiness AlwaysReady(uint32_t) { return Readiness::kReady; }
Readiness AlwaysNeedsRoom(uint32_t) { return Readiness::kNeedsRoom; }
bool NeverRoom(uint32_t, std::optional<uint64_t>) { return false; }

TEST(ExtentAtTurnTest, ExtentsInMemoryAndOthersTakeTurnsEvenly) {
  for (const uint32_t count : {1u, 2u, 7u, 64u}) {
    for (uint32_t resident = 0; resident <= count; ++resident) {
      std::vector<uint32_t> in_memory, others;
      for (uint32_t turn = 0; turn < count; ++turn) {
        const uint32_t index = ExtentAtTurn(turn, count, resident);
        (index < resident ? in_memory : others).push_back(index);
        // So many as their share of the turns, but for less than one.
        EXPECT_EQ(in_memory.size(), (turn + 1) * resident / count) << count << " " << resident;
      }
      ASSERT_EQ(in_memory.size() + others.size(), count);
      for (uint32_t i = 0; i < in_memory.size(); ++i) EXPECT_EQ(in_memory[i], i);
      for (uint32_t i = 0; i < others.size(); ++i) EXPECT_EQ(others[i], resident + i);
    }
  }
}

TEST(UpdateOrderTest, FollowsTheNextForward) {
  UpdateOrder order;
  order.Reset({{7, 20}, {3, 5}, {9, 5}, {1, 0}});
  std::vector<uint32_t> handed_out;
  while (const auto next = order.Next(true, AlwaysReady, NeverRoom)) handed_out.push_back(*next);
  EXPECT_EQ(handed_out, (std::vector<uint32_t>{1, 3, 9, 7}));
  EXPECT_TRUE(order.empty());
}

TEST(UpdateOrderTest, DemandComesFirstAndMayEvictAnything) {
  UpdateOrder order;
  order.Reset({{1, 0}, {2, 10}, {3, 20}});
  order.Demand(3);
  std::optional<uint64_t> asked = 1;
  const auto next =
      order.Next(true, AlwaysNeedsRoom, [&asked](uint32_t, std::optional<uint64_t> needed) {
        asked = needed;
        return true;
      });
  EXPECT_EQ(next, 3u);
  EXPECT_FALSE(asked.has_value());
  order.Demand(3);  // is gone already
  EXPECT_EQ(order.Next(true, AlwaysReady, NeverRoom), 1u);
}

TEST(UpdateOrderTest, PoliteUpdateEvictsOnlyWhatIsNeededLater) {
  UpdateOrder order;
  order.Reset({{1, 4}});
  std::vector<std::optional<uint64_t>> asked;
  const auto refuse = [&asked](uint32_t, std::optional<uint64_t> needed) {
    asked.push_back(needed);
    return false;
  };
  EXPECT_FALSE(order.Next(true, AlwaysNeedsRoom, refuse).has_value());
  EXPECT_FALSE(order.Next(false, AlwaysNeedsRoom, refuse).has_value());
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0], 4u);
  EXPECT_FALSE(asked[1].has_value());
}

TEST(UpdateOrderTest, AfterARefusalOnlyTensorsThatNeedNoRoomGoOn) {
  UpdateOrder order;
  order.Reset({{1, 0}, {2, 1}, {3, 2}});
  const std::map<uint32_t, Readiness> readiness = {
      {1, Readiness::kNeedsRoom}, {2, Readiness::kNeedsRoom}, {3, Readiness::kReady}};
  std::set<uint32_t> asked;
  const auto next = order.Next(
      true, [&](uint32_t tensor) { return readiness.at(tensor); },
      [&asked](uint32_t tensor, std::optional<uint64_t>) {
        asked.insert(tensor);
        return false;
      });
  EXPECT_EQ(next, 3u);
  EXPECT_EQ(asked, std::set<uint32_t>{1});
}

TEST(UpdateOrderTest, BusyTensorsAreOvertaken) {
  UpdateOrder order;
  order.Reset({{1, 0}, {2, 1}});
  const auto look = [](uint32_t tensor) {
    return tensor == 1 ? Readiness::kBusy : Readiness::kReady;
  };
  EXPECT_EQ(order.Next(true, look, NeverRoom), 2u);
  EXPECT_FALSE(order.Next(true, look, NeverRoom).has_value());
  EXPECT_EQ(order.size(), 1u);
}

TEST(UpdateOrderTest, ReorderKeepsDemandsInFront) {
  UpdateOrder order;
  order.Reset({{1, 0}, {2, 1}, {3, 2}});
  order.Demand(2);
  order.Reorder([](uint32_t tensor) { return 10 - tensor; });
  EXPECT_EQ(order.Next(true, AlwaysReady, NeverRoom), 2u);
  EXPECT_EQ(order.Next(true, AlwaysReady, NeverRoom), 3u);
}

TEST(PaceTest, WaitsForTheForwardOnlyWhileItMoves) {
  Pace pace(0.2);
  pace.Begin(0, 10.0);
  EXPECT_TRUE(pace.Polite(false, true, 0, 10.1));
  EXPECT_FALSE(pace.Polite(false, true, 0, 10.3));
  EXPECT_TRUE(pace.Polite(false, true, 1, 10.4)) << "it moved";
  EXPECT_FALSE(pace.Polite(true, true, 2, 10.41)) << "in a hurry";
  EXPECT_FALSE(pace.Polite(false, false, 3, 10.42))
      << "without a schedule there is nothing to wait for";
}

TEST(PaceTest, SlowForwardIsGivenThreeOfItsPauses) {
  Pace pace(0.2);
  pace.Begin(0, 0.0);
  EXPECT_TRUE(pace.Polite(false, true, 1, 0.5)) << "a pause of half a second";
  EXPECT_TRUE(pace.Polite(false, true, 1, 1.9));
  EXPECT_FALSE(pace.Polite(false, true, 1, 2.1));
  pace.Begin(0, 10.0);
  EXPECT_TRUE(pace.Polite(false, true, 0, 11.4)) << "remembered from the step before";
  pace.Begin(0, 20.0);
  EXPECT_FALSE(pace.Polite(false, true, 0, 20.3)) << "forgotten after two";
}

TEST(PaceTest, PatienceHasAnEnd) {
  Pace pace(0.2);
  pace.Begin(0, 0.0);
  EXPECT_TRUE(pace.Polite(false, true, 1, 100.0));
  EXPECT_FALSE(pace.Polite(false, true, 1, 105.1));
}

}  // namespace
}  // namespace offload::daemon
