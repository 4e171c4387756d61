#include "proto/trainer_states.h"

#include "gtest/gtest.h"

namespace offload::proto {
namespace {

using States = std::vector<std::string>;

TEST(TrainerStatesTest, OneRanksStateIsKeptAsItWasGiven) {
  EXPECT_EQ(EncodeTrainerStates({"state"}), "state");
  EXPECT_EQ(DecodeTrainerStates("state"), States{"state"});
  EXPECT_EQ(DecodeTrainerStates(""), States{""});
}

TEST(TrainerStatesTest, EveryRankGetsItsOwnBack) {
  const States states = {"zero", "", std::string("with\0zero", 9), std::string(100'000, 'x')};
  const States decoded = DecodeTrainerStates(EncodeTrainerStates(states));
  ASSERT_EQ(decoded, states);
  EXPECT_EQ(StateOfRank(decoded, 2).state, states[2]);
  EXPECT_TRUE(StateOfRank(decoded, 2).is_own);
}

TEST(TrainerStatesTest, ARankThatTheRunBeforeHadNotGetsTheFirstOnesAndIsTold) {
  const States states = {"zero", ""};
  for (const uint32_t rank : {1u, 2u, 7u}) {
    EXPECT_EQ(StateOfRank(states, rank).state, "zero") << rank;
    EXPECT_FALSE(StateOfRank(states, rank).is_own) << rank;
  }
  EXPECT_TRUE(StateOfRank({""}, 0).is_own) << "rank 0 gave none";
}

TEST(TrainerStatesTest, WhatIsNoWholeContainerIsTheStateOfOneRank) {
  const std::string blob = EncodeTrainerStates({"zero", "one", "two"});
  for (size_t size = 0; size < blob.size(); ++size) {
    const std::string part = blob.substr(0, size);
    EXPECT_EQ(DecodeTrainerStates(part), States{part}) << size;
  }
  EXPECT_EQ(DecodeTrainerStates(blob + "x"), States{blob + "x"});
  std::string many = blob.substr(0, 16) + std::string(4, '\xff') + blob.substr(20);
  EXPECT_EQ(DecodeTrainerStates(many), States{many});
}

TEST(TrainerStatesTest, StatesOfTheLargestSizeFitIntoABlob) {
  constexpr uint64_t kBlobBytes = 1 << 20;
  EXPECT_EQ(TrainerStateBytesMax(1, kBlobBytes), kBlobBytes);
  for (const uint32_t world_size : {2u, 3u, 64u}) {
    const uint64_t bytes = TrainerStateBytesMax(world_size, kBlobBytes);
    EXPECT_LE(EncodeTrainerStates(States(world_size, std::string(bytes, 'x'))).size(), kBlobBytes);
    EXPECT_GT(EncodeTrainerStates(States(world_size, std::string(bytes + 1, 'x'))).size(),
              kBlobBytes);
  }
}

}  // namespace
}  // namespace offload::proto
