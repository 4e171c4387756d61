#include "zero3/trainer_state.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "base/error.h"

namespace offload::zero3 {
namespace {

std::string Encode(const TrainerState& state) {
  auto bytes = EncodeTrainerState(state);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return bytes.ok() ? *bytes : "";
}

TEST(TrainerStateTest, ComesBackAsItWas) {
  const TrainerState state = {.update_counts = {3, 3, 3, 0, 7, 7},
                              .trainer = std::string("a\0b", 3)};
  const auto back = DecodeTrainerState(Encode(state));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->update_counts, state.update_counts);
  EXPECT_EQ(back->trainer, state.trainer);
}

TEST(TrainerStateTest, BuffersStandBesideTheTrainersBytes) {
  const TrainerState state = {
      .update_counts = {1, 2}, .trainer = "trainer", .buffers = std::string("b\0c", 3)};
  const auto back = DecodeTrainerState(Encode(state));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->trainer, state.trainer);
  EXPECT_EQ(back->buffers, state.buffers);
}

TEST(TrainerStateTest, ScalesStandBesideBothOrAlone) {
  for (const std::string& buffers : {std::string("b\0c", 3), std::string()}) {
    const TrainerState state = {.update_counts = {1, 2},
                                .trainer = "trainer",
                                .buffers = buffers,
                                .loss_scales = {{65536.0f, 1999}, {0.25f, 0}}};
    const auto back = DecodeTrainerState(Encode(state));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->trainer, state.trainer);
    EXPECT_EQ(back->buffers, state.buffers);
    ASSERT_EQ(back->loss_scales.size(), 2u);
    EXPECT_EQ(back->loss_scales[0].scale, 65536.0f);
    EXPECT_EQ(back->loss_scales[0].growth_tracker, 1999);
    EXPECT_EQ(back->loss_scales[1].scale, 0.25f);
  }
}

TEST(TrainerStateTest, SuccessionsThatAreNotCountedAreNotNone) {
  for (const auto& successions :
       {std::optional<uint64_t>(), std::optional<uint64_t>(0), std::optional<uint64_t>(7)}) {
    const auto back = DecodeTrainerState(
        Encode({.update_counts = {1, 2}, .trainer = "trainer", .successions = successions}));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->successions, successions);
    EXPECT_EQ(back->trainer, "trainer");
  }
}

TEST(TrainerStateTest, ALayoutStandsBesideTheRest) {
  for (const auto& successions : {std::optional<uint64_t>(), std::optional<uint64_t>(7)}) {
    const TrainerState state = {
        .update_counts = {1, 2},
        .trainer = "trainer",
        .buffers = "buffers",
        .loss_scales = {{2.0f, 1}},
        .successions = successions,
        .layout = {{.name = "a"}, {.name = "b", .is_new = true}, {"c", false, "former"}}};
    const std::string bytes = Encode(state);
    const auto back = DecodeTrainerState(bytes);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->layout, state.layout);
    EXPECT_EQ(back->successions, successions);
    EXPECT_EQ(back->buffers, "buffers");
    EXPECT_EQ(back->trainer, "trainer");
    for (size_t size = 1; size < bytes.size() - state.trainer.size(); ++size) {
      EXPECT_EQ(ErrorIdOf(DecodeTrainerState(bytes.substr(0, size)).status()),
                ErrorId::kStoreDamaged)
          << size;
    }
  }
}

TEST(TrainerStateTest, WhatForeignOptimizersKeepStandsBesideTheRest) {
  const TrainerState state = {
      .update_counts = {1, 2},
      .trainer = "trainer",
      .layout = {{.name = "a"}},
      .slot_bytes = {4096, 17},
      .foreign = {
          {.optimizer = "LBFGS"},
          {.optimizer = "Mine", .is_kept = false, .described = "a lock"},
          {.optimizer = "Lookahead",
           .described = std::string("{\0}", 3),
           .pieces = {{.slot = 1, .size_bytes = 16},
                      {.continues = true, .size_bytes = 3, .bytes = std::string("b\0c", 3)}}}}};
  const std::string bytes = Encode(state);
  const auto back = DecodeTrainerState(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->slot_bytes, state.slot_bytes);
  EXPECT_EQ(back->foreign, state.foreign);
  EXPECT_EQ(back->layout, state.layout);
  EXPECT_EQ(back->trainer, "trainer");
  for (size_t size = 1; size < bytes.size() - state.trainer.size(); ++size) {
    EXPECT_EQ(ErrorIdOf(DecodeTrainerState(bytes.substr(0, size)).status()), ErrorId::kStoreDamaged)
        << size;
  }
}

TEST(TrainerStateTest, APieceInNoSlotOfTheStoreIsDamage) {
  for (const ForeignState::Piece& piece :
       {ForeignState::Piece{.slot = 1, .size_bytes = 4}, {.slot = 0, .size_bytes = 9}}) {
    const auto back = DecodeTrainerState(
        Encode({.slot_bytes = {8}, .foreign = {{.optimizer = "Mine", .pieces = {piece}}}}));
    EXPECT_EQ(ErrorIdOf(back.status()), ErrorId::kStoreDamaged);
  }
}

TEST(TrainerStateTest, NoBytesAreAStateWithoutTensors) {
  const auto state = DecodeTrainerState("");
  ASSERT_TRUE(state.ok());
  EXPECT_TRUE(state->update_counts.empty());
}

TEST(TrainerStateTest, EqualCountsTakeNoRoom) {
  EXPECT_LT(Encode({.update_counts = std::vector<uint64_t>(1000000, 5)}).size(), 64u);
}

TEST(TrainerStateTest, TooLongATrainerStateIsRefusedWithTheLimit) {
  const auto bytes = EncodeTrainerState(
      {.update_counts = {1}, .trainer = std::string(kTrainerStateBytesMax, 'x')});
  EXPECT_EQ(ErrorIdOf(bytes.status()), ErrorId::kBadValue);
}

TEST(TrainerStateTest, WhatIsTooLongBesideATrainerStateIsNamed) {
  const auto bytes = EncodeTrainerState(
      {.trainer = "small", .layout = {{.name = std::string(kTrainerStateBytesMax, 'x')}}});
  EXPECT_NE(bytes.status().message().find("names of tensors"), std::string::npos);
}

TEST(TrainerStateTest, EveryTruncationAndBitFlipIsRefusedOrHarmless) {
  const std::string bytes = Encode(
      {.update_counts = {1, 2, 3, 3},
       .buffers = "buffers",
       .loss_scales = {{2.0f, 1}},
       .successions = 3,
       .slot_bytes = {64},
       .foreign = {
           {.optimizer = "Mine", .described = "{}", .pieces = {{.slot = 0, .size_bytes = 64}}}}});
  for (size_t length = 1; length < bytes.size(); ++length) {
    EXPECT_EQ(ErrorIdOf(DecodeTrainerState(bytes.substr(0, length)).status()),
              ErrorId::kStoreDamaged)
        << length;
  }
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << bit % 8);
    const auto state = DecodeTrainerState(flipped);
    if (state.ok()) {
      EXPECT_LE(state->update_counts.size(), 4u) << bit;
    }
  }
}

}  // namespace
}  // namespace offload::zero3
