#include "base/residency.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace offload {
namespace {

WeightWindow::Look LookAt(const std::map<uint32_t, Occupant>& occupants) {
  return [&occupants](uint32_t tensor) { return occupants.at(tensor); };
}

TEST(UseOrderTest, NextUseIsCyclic) {
  const std::vector<uint32_t> touches = {0, 1, 2, 1, 0};
  const UseOrder order(touches, 4);
  EXPECT_EQ(order.NextUse(0, 0), 0u);
  EXPECT_EQ(order.NextUse(0, 1), 3u);
  EXPECT_EQ(order.NextUse(1, 2), 1u);
  EXPECT_EQ(order.NextUse(2, 3), 4u);
  EXPECT_EQ(order.NextUse(1, 9), 2u) << "position 9 is position 4";
  EXPECT_EQ(order.NextUse(3, 0), kNeverUsed);
  EXPECT_EQ(UseOrder().NextUse(0, 0), kNeverUsed);
}

TEST(WeightWindowTest, TakesTheFirstHoleThatFitsBeforeEvictingAnything) {
  WeightWindow window(100);
  window.Occupy(1, 0, 10);
  window.Occupy(2, 15, 10);
  const std::map<uint32_t, Occupant> occupants = {{1, {true, 5}}, {2, {true, 9}}};
  const auto place = window.Find(20, std::nullopt, LookAt(occupants));
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->offset_bytes, 25u);
  EXPECT_TRUE(place->evicted.empty());
}

TEST(WeightWindowTest, EvictsWhatIsNeededLast) {
  WeightWindow window(30);
  window.Occupy(1, 0, 10);
  window.Occupy(2, 10, 10);
  window.Occupy(3, 20, 10);
  const std::map<uint32_t, Occupant> occupants = {{1, {true, 3}}, {2, {true, 8}}, {3, {true, 5}}};
  const auto one = window.Find(10, std::nullopt, LookAt(occupants));
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->evicted, std::vector<uint32_t>{2});
  const auto two = window.Find(15, std::nullopt, LookAt(occupants));
  ASSERT_TRUE(two.has_value());
  EXPECT_EQ(two->evicted, (std::vector<uint32_t>{2, 3}))
      << "the earliest use of {2,3} is 5, of {1,2} 3";
}

TEST(WeightWindowTest, HolesJoinTheirNeighbours) {
  WeightWindow window(30);
  window.Occupy(1, 5, 10);
  window.Occupy(2, 20, 10);
  const std::map<uint32_t, Occupant> occupants = {{1, {true, 3}}, {2, {false, 8}}};
  const auto place = window.Find(20, std::nullopt, LookAt(occupants));
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->offset_bytes, 0u);
  EXPECT_EQ(place->evicted, std::vector<uint32_t>{1});
}

TEST(WeightWindowTest, NeverEvictsPinnedOrBusySlots) {
  WeightWindow window(20);
  window.Occupy(1, 0, 10);
  window.Occupy(2, 10, 10);
  const std::map<uint32_t, Occupant> occupants = {{1, {false, 3}}, {2, {true, 1}}};
  const auto place = window.Find(10, std::nullopt, LookAt(occupants));
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->evicted, std::vector<uint32_t>{2});
  EXPECT_FALSE(window.Find(11, std::nullopt, LookAt(occupants)).has_value());
}

TEST(WeightWindowTest, PrefetchEvictsOnlyWhatIsNeededLater) {
  WeightWindow window(20);
  window.Occupy(1, 0, 10);
  window.Occupy(2, 10, 10);
  const std::map<uint32_t, Occupant> occupants = {{1, {true, 3}}, {2, {true, 6}}};
  EXPECT_TRUE(window.Find(10, 5, LookAt(occupants)).has_value());
  EXPECT_FALSE(window.Find(10, 6, LookAt(occupants)).has_value());
  EXPECT_FALSE(window.Find(20, 5, LookAt(occupants)).has_value());
}

TEST(WeightWindowTest, RefusesWhatIsLargerThanTheWindow) {
  EXPECT_FALSE(WeightWindow(10).Find(11, std::nullopt, LookAt({})).has_value());
}

// The best earliest use of any contiguous run that fits, by trying all.
std::optional<uint64_t> BestByForce(const std::vector<std::pair<uint64_t, Occupant>>& row,
                                    uint64_t bytes) {
  std::optional<uint64_t> best;
  for (size_t first = 0; first < row.size(); ++first) {
    uint64_t run = 0, use = kNeverUsed;
    for (size_t last = first; last < row.size() && row[last].second.evictable; ++last) {
      run += row[last].first;
      use = std::min(use, row[last].second.next_use);
      if (run < bytes) continue;
      if (!best.has_value() || use > *best) best = use;
      break;
    }
  }
  return best;
}

TEST(WeightWindowTest, RandomWindowsAgreeWithTryingEveryRun) {
  std::mt19937 random(20240607);
  for (int round = 0; round < 2000; ++round) {
    WeightWindow window(200);
    std::map<uint32_t, Occupant> occupants;
    std::vector<std::pair<uint64_t, Occupant>> row;
    uint64_t offset = 0;
    for (uint32_t tensor = 0; offset < 190; ++tensor) {
      const uint64_t bytes = std::min<uint64_t>(1 + random() % 30, 200 - offset);
      const Occupant hole{true, kNeverUsed};
      const Occupant occupant{random() % 4 != 0, random() % 50};
      if (random() % 4 == 0) {
        if (row.empty() || row.back().second.next_use != kNeverUsed) {
          row.push_back({bytes, hole});
        } else {
          row.back().first += bytes;
        }
      } else {
        window.Occupy(tensor, offset, bytes);
        occupants[tensor] = occupant;
        row.push_back({bytes, occupant});
      }
      offset += bytes;
    }
    if (offset < 200) row.push_back({200 - offset, Occupant{true, kNeverUsed}});
    const uint64_t wanted = 1 + random() % 60;
    const auto place = window.Find(wanted, std::nullopt, LookAt(occupants));
    const std::optional<uint64_t> best = BestByForce(row, wanted);
    ASSERT_EQ(place.has_value(), best.has_value()) << "round " << round;
    if (!place.has_value()) continue;
    uint64_t use = kNeverUsed;
    for (const uint32_t tensor : place->evicted) {
      ASSERT_TRUE(occupants.at(tensor).evictable) << "round " << round;
      use = std::min(use, occupants.at(tensor).next_use);
      window.Release(tensor);
    }
    EXPECT_EQ(use, *best) << "round " << round;
    window.Occupy(1000, place->offset_bytes, wanted);  // dies if the place is not free
  }
}

}  // namespace
}  // namespace offload
