#include "zero3/gpu/gradients_ahead.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Five gradients of a byte each, of which passes add to the last first.
class GradientsAheadTest : public testing::Test {
 protected:
  static constexpr uint32_t kCount = 5;

  struct Gradient final : GradientsAhead::Awaited {
    explicit Gradient(GradientsAheadTest* test, uint32_t number) : test(test), number(number) {}
    bool ReadAhead() override {
      if (!test->has_room_) return false;
      test->read_.push_back(number);
      return true;
    }
    bool ComeAhead() override {
      if (!test->has_room_) return false;
      test->asked_.push_back(number);
      return true;
    }
    GradientsAheadTest* const test;
    const uint32_t number;
  };

  void SetUp() override {
    for (uint32_t i = 0; i < kCount; ++i) {
      gradients_.push_back(std::make_unique<Gradient>(this, i));
      ahead_.Join(i, gradients_.back().get());
    }
  }

  // Who was asked when one was added to.
  std::vector<uint32_t> AskedBy(uint32_t tensor) {
    asked_.clear();
    ahead_.Added(tensor);
    return asked_;
  }
  void Pass() {
    for (uint32_t i = kCount; i-- > 0;) ahead_.Added(i);
  }

  bool has_room_ = true;
  std::vector<uint32_t> asked_, read_;
  std::vector<std::unique_ptr<Gradient>> gradients_;
  // The first is never on the drive.
  GradientsAhead ahead_{std::vector<uint64_t>(kCount, 1), /*ahead_bytes=*/2,
                        /*read_bytes=*/{0, 1, 1, 1, 1}, /*read_ahead_bytes=*/3};
};

TEST_F(GradientsAheadTest, TheFirstStepRecordsAndLaterOnesAskAhead) {
  Pass();
  Pass();
  EXPECT_THAT(asked_, IsEmpty());
  ahead_.EndStep();
  EXPECT_THAT(asked_, IsEmpty());  // there is nothing to add to yet
  EXPECT_THAT(AskedBy(4), ElementsAre(2));
  EXPECT_THAT(AskedBy(3), ElementsAre(1));
  EXPECT_THAT(AskedBy(2), ElementsAre(0));
  EXPECT_THAT(AskedBy(1), ElementsAre(4));  // of the second pass
  EXPECT_THAT(AskedBy(0), ElementsAre(3));
  EXPECT_THAT(AskedBy(4), ElementsAre(2));
}

TEST_F(GradientsAheadTest, AfterTheLastPassNobodyIsAsked) {
  Pass();
  ahead_.EndStep();
  for (const uint32_t tensor : {4, 3, 2}) ahead_.Added(tensor);
  EXPECT_THAT(AskedBy(1), IsEmpty());
  EXPECT_THAT(AskedBy(0), IsEmpty());
}

TEST_F(GradientsAheadTest, WhoFindsNoRoomIsAskedAgainUntilItIsUsed) {
  Pass();
  ahead_.EndStep();
  has_room_ = false;
  EXPECT_THAT(AskedBy(4), IsEmpty());
  EXPECT_THAT(AskedBy(3), IsEmpty());
  has_room_ = true;
  EXPECT_THAT(AskedBy(2), ElementsAre(1, 0));  // 3 and 2 were used without
}

TEST_F(GradientsAheadTest, ThoseBehindThemAreReadFromTheDrive) {
  Pass();
  Pass();
  EXPECT_THAT(read_, IsEmpty());
  ahead_.EndStep();
  const auto read_by = [&](uint32_t tensor) {
    read_.clear();
    ahead_.Added(tensor);
    return read_;
  };
  EXPECT_THAT(read_by(4), ElementsAre(1));
  EXPECT_THAT(read_by(3), ElementsAre(4));  // of the second pass
  has_room_ = false;
  EXPECT_THAT(read_by(2), IsEmpty());
  EXPECT_THAT(read_by(1), IsEmpty());
  has_room_ = true;
  EXPECT_THAT(read_by(0), ElementsAre(3, 2));  // 0 is another's, whose turn goes on with room
}

TEST_F(GradientsAheadTest, WhoHasLeftIsNotAsked) {
  Pass();
  ahead_.EndStep();
  ahead_.Leave(2, gradients_[2].get());
  ahead_.Leave(1, gradients_[0].get());  // another one has its number
  EXPECT_THAT(AskedBy(4), IsEmpty());
  EXPECT_THAT(AskedBy(3), ElementsAre(1));
}

}  // namespace
}  // namespace offload::zero3
