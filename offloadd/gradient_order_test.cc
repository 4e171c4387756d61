#include "offloadd/gradient_order.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using proto::GradientStart;
using Ticket = GradientOrder::Ticket;

// Tensors of 1, 2 and 3 extents.
proto::Catalogue MakeCatalogue() {
  std::vector<proto::Tensor> tensors;
  for (const int64_t elements : {1000, 300000, 700000}) {
    tensors.push_back({.name = absl::StrCat("t", tensors.size()), .shape = {elements}});
  }
  auto catalogue = proto::BuildCatalogue(std::move(tensors));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return *std::move(catalogue);
}

class GradientOrderTest : public ::testing::Test {
 protected:
  void Begin(std::initializer_list<uint32_t> ranks, uint64_t step = 1) {
    for (const uint32_t rank : ranks) ASSERT_TRUE(order_.Begin(rank, step).ok());
  }
  absl::Status Give(uint32_t rank, uint32_t tensor, uint32_t pass,
                    GradientStart start = GradientStart::kNothing, uint32_t extent = 0) {
    return order_.Deliver(tensor, extent, pass, start,
                          {.rank = rank, .tag = pass, .region_offset = 0});
  }
  absl::Status GiveSlice(uint32_t rank, uint32_t tensor, uint32_t pass) {
    return order_.Deliver(tensor, 0, pass, GradientStart::kNothing,
                          {.rank = rank, .tag = pass, .region_offset = 0, .is_slice = true});
  }
  absl::Status End(uint32_t rank, uint32_t pass, bool waits = false) {
    return order_.EndPass(pass, waits, {.rank = rank, .tag = 1000 + pass, .region_offset = 0});
  }
  absl::Status Look(uint32_t rank, uint32_t tensor, uint32_t passes) {
    return order_.Look(tensor, passes, {.rank = rank, .tag = 2000 + tensor, .region_offset = 0});
  }
  // "pass.rank pass.rank …" of the additions that are due, one after the other; all are done.
  std::string Add(bool finite = true) {
    std::string text;
    for (std::vector<GradientOrder::Addition> due = order_.TakeAdditions(); !due.empty();
         due = order_.TakeAdditions()) {
      for (const GradientOrder::Addition& addition : due) {
        for (const Ticket& part : addition.parts)
          absl::StrAppend(&text, text.empty() || text.back() == ';' ? "" : " ", part.tag, ".",
                          part.rank);
        absl::StrAppend(&text, ";");
        order_.Added(addition.tensor, addition.extent, finite);
      }
    }
    return text;
  }
  // "rank:tag …" of who is answered.
  std::string Answered() {
    std::string text;
    for (const GradientOrder::Answer& answer : order_.TakeAnswers()) {
      absl::StrAppend(&text, text.empty() ? "" : " ", answer.ticket.rank, ":", answer.ticket.tag);
      value_ = answer.value;
    }
    return text;
  }
  uint8_t bits(uint32_t tensor) const { return proto::GradientBitsOf(order_.word(tensor)); }

  const proto::Catalogue catalogue_ = MakeCatalogue();
  GradientOrder order_{&catalogue_, 3, /*step=*/0};
  uint64_t value_ = 0;
};

void ExpectError(const absl::Status& status, ErrorId id, std::vector<std::string> parts) {
  EXPECT_EQ(ErrorIdOf(status), id) << status;
  for (const std::string& part : parts)
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in " << status;
}

TEST_F(GradientOrderTest, PartsAreAddedInTheOrderOfRanksWhateverTheirArrival) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(2, 0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_EQ(Add(), "0.0 0.1 0.2;");
}

TEST_F(GradientOrderTest, ThePartThatIsNextIsAddedWithoutWaitingForOthers) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_EQ(Add(), "0.0;");
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_EQ(Add(), "0.1;");
}

TEST_F(GradientOrderTest, WhatARankDidNotGiveDoesNotExistOnceItsPassHasEnded) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(2, 0, 0).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_TRUE(End(1, 0).ok());
  EXPECT_EQ(Add(), "0.2;");
}

TEST_F(GradientOrderTest, ALaterPassWaitsForTheEarlierOfEveryRank) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_TRUE(Give(0, 0, 1).ok());
  EXPECT_EQ(Add(), "0.0;");
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_EQ(Add(), "0.1;");
  EXPECT_TRUE(Give(2, 0, 0).ok());
  EXPECT_EQ(Add(), "0.2 1.0;");
}

TEST_F(GradientOrderTest, ARankThatHasEndedAPassSeesWhatBeganInItAndNotWhatOthersDidSince) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  EXPECT_TRUE(Give(0, 0, 1).ok());  // rank 1 looks at the words of pass 0 only now
  EXPECT_EQ(bits(0), proto::kGradientExists);
  EXPECT_FALSE(proto::HasBegunBy(order_.word(0), 0));
  EXPECT_TRUE(proto::HasBegunBy(order_.word(0), 1));
  EXPECT_TRUE(proto::HasBegunBy(order_.word(0), 2));
}

TEST_F(GradientOrderTest, SlicesOfAllRanksStandWhereTheirPartsWould) {
  Begin({0, 1, 2});
  EXPECT_TRUE(GiveSlice(2, 0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_TRUE(GiveSlice(0, 0, 0).ok());
  EXPECT_TRUE(GiveSlice(1, 0, 0).ok());
  EXPECT_EQ(Add(), "0.0;0.1 0.2;");
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  for (const uint32_t rank : {0, 1, 2})
    EXPECT_TRUE(Give(rank, 0, 1).ok());  // whole ones may follow
  EXPECT_EQ(Add(), "1.0;1.1 1.2;");
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 1).ok());
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(GiveSlice(rank, 0, 2).ok());
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 2).ok());
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(Look(rank, 0, 3).ok());
  EXPECT_EQ(Add(), "2.0;2.1 2.2;");
  EXPECT_TRUE(order_.fault().ok()) << order_.fault();
  EXPECT_EQ(bits(0), proto::kGradientExists | proto::kGradientFinal | proto::kGradientFinite);
}

TEST_F(GradientOrderTest, ASliceAmongPartsOrAPartAmongSlicesIsAFault) {
  for (const bool part_comes_first : {true, false}) {
    GradientOrder order(&catalogue_, 3, /*step=*/0);
    for (const uint32_t rank : {0, 1, 2}) ASSERT_TRUE(order.Begin(rank, 1).ok());
    for (const uint32_t rank : {0, 1, 2}) {
      const bool is_slice = part_comes_first == (rank > 0);
      ASSERT_TRUE(
          order.Deliver(0, 0, 0, GradientStart::kNothing, {.rank = rank, .is_slice = is_slice})
              .ok());
      order.TakeAdditions();
      order.Added(0, 0, true);
    }
    ExpectError(order.fault(), ErrorId::kProtocol,
                {part_comes_first ? "a slice" : "a part", "\"t0\" in pass 0"});
  }
}

TEST_F(GradientOrderTest, ARankThatEndsItsPassWithoutItsSliceIsAFault) {
  Begin({0, 1, 2});
  EXPECT_TRUE(GiveSlice(0, 0, 0).ok());
  EXPECT_TRUE(GiveSlice(1, 0, 0).ok());
  EXPECT_EQ(Add(), "0.0;0.1;");
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  ExpectError(order_.fault(), ErrorId::kProtocol, {"slices of \"t0\", and others nothing"});
}

TEST_F(GradientOrderTest, APartOfASlowerRankIsTheFirstThoughItComesLater) {
  Begin({0, 1, 2});
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_TRUE(Give(0, 0, 1).ok());
  EXPECT_FALSE(proto::HasBegunBy(order_.word(0), 0));
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_TRUE(proto::HasBegunBy(order_.word(0), 0));
  EXPECT_EQ(order_.TakeChanged(), std::vector<uint32_t>{0});
}

TEST_F(GradientOrderTest, NothingIsAddedBeforeEveryRankHasLetGoOfTheOldSums) {
  Begin({0, 1});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_EQ(bits(0), 0);
  Begin({2});
  EXPECT_EQ(bits(0), proto::kGradientExists);
  EXPECT_EQ(Add(), "0.0;");
}

TEST_F(GradientOrderTest, ARankThatStepsWithoutPassesHasLetGo) {
  Begin({0, 1});
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_TRUE(End(0, 0).ok());
  order_.Step(2);
  EXPECT_EQ(Add(), "0.1;");
}

TEST_F(GradientOrderTest, ASumIsNotTouchedWhileItsUpdateReadsIt) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  EXPECT_EQ(Add(), "0.0;");
  ASSERT_TRUE(order_.IsSettled());
  order_.BeginNextStep(std::vector<uint32_t>{0});
  Begin({0, 1, 2}, 2);
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_EQ(order_.TakeWanted(), std::vector<uint32_t>{0});
  order_.UpdateComputed(0);
  EXPECT_EQ(Add(), "0.0;");
}

TEST_F(GradientOrderTest, ASweepSaysWhatTheSumBeginsWith) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0, GradientStart::kZeros).ok());
  std::vector<GradientOrder::Addition> due = order_.TakeAdditions();
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].start, GradientStart::kZeros);
  EXPECT_TRUE(Give(1, 0, 0, GradientStart::kZeros).ok());
  EXPECT_TRUE(order_.TakeAdditions().empty());  // one at a time
  order_.Added(0, 0, true);
  due = order_.TakeAdditions();
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].start, GradientStart::kPrevious);
}

TEST_F(GradientOrderTest, RanksThatBeginDifferentlyAreNamed) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(2, 1, 0, GradientStart::kZeros).ok());
  EXPECT_TRUE(Give(0, 1, 0, GradientStart::kPrevious).ok());
  EXPECT_TRUE(End(1, 0).ok());
  Add();
  ExpectError(order_.fault(), ErrorId::kGradientOfRanks,
              {"\"t1\"", "rank 0 has kept it", "rank 2 has zeros"});
}

TEST_F(GradientOrderTest, ARankThatGivesATensorLaterHasSeenTheSumOfTheOthers) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  EXPECT_TRUE(Give(1, 0, 1, GradientStart::kPrevious).ok());
  EXPECT_TRUE(Give(0, 0, 0, GradientStart::kNothing).ok());
  EXPECT_TRUE(Give(2, 0, 1, GradientStart::kPrevious).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_TRUE(End(0, 1).ok());
  EXPECT_EQ(Add(), "0.0;1.1 1.2;");
}

TEST_F(GradientOrderTest, ALookEndsWhenEveryRankHasClosedAndAllIsAdded) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_EQ(Answered(), "0:1000");
  EXPECT_TRUE(Look(0, 0, 1).ok());
  order_.Step(1);
  EXPECT_TRUE(Look(2, 1, 0).ok());
  EXPECT_EQ(Answered(), "2:2001");  // nobody gave t1
  EXPECT_EQ(proto::GradientBitsOf(value_), proto::kGradientFinal);
  EXPECT_EQ(Add(), "0.0;");
  EXPECT_EQ(Answered(), "0:2000");
  EXPECT_EQ(value_,
            proto::MakeGradientWord(
                proto::kGradientExists | proto::kGradientFinal | proto::kGradientFinite, 1, 0));
}

TEST_F(GradientOrderTest, RanksThatLookedAfterAsManyPassesMayGoOn) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {0, 1, 2}) {
    EXPECT_TRUE(Give(rank, 0, 0).ok());
    EXPECT_TRUE(End(rank, 0).ok());
    EXPECT_TRUE(Look(rank, 0, 1).ok());
  }
  EXPECT_EQ(Add(), "0.0;0.1 0.2;");
  order_.PublishNorm(0, 77);
  EXPECT_TRUE(Give(1, 0, 1).ok());
  // The others may still be reading what they looked at.
  EXPECT_EQ(Add(), "");
  EXPECT_EQ(proto::GradientNormOf(order_.word(0)), 77u);
  EXPECT_TRUE(End(0, 1).ok());
  order_.Step(2);
  EXPECT_EQ(bits(0), proto::kGradientExists);
  EXPECT_EQ(Add(), "1.1;");
}

TEST_F(GradientOrderTest, ARankThatGoesOnAfterALookThatOthersDoNotShareIsToldTheCounts) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  EXPECT_TRUE(End(2, 1).ok());
  for (const uint32_t rank : {0, 1}) EXPECT_TRUE(Look(rank, 0, 1).ok());
  EXPECT_TRUE(Look(2, 0, 2).ok());
  ExpectError(
      Give(0, 0, 1), ErrorId::kGradientOfRanks,
      {"rank 0 has looked after 1", "rank 1 has looked after 1", "rank 2 has looked after 2"});
}

TEST_F(GradientOrderTest, ARankThatGoesOnAfterALookIsToldWhoStepsWithoutOne) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  for (const uint32_t rank : {0, 2}) EXPECT_TRUE(Look(rank, 0, 1).ok());
  order_.Step(1);
  ExpectError(End(0, 1), ErrorId::kGradientOfRanks, {"rank 1 steps after 1"});
}

TEST_F(GradientOrderTest, GradientsThatWereZeroedWithoutAStepBeginAnew) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_TRUE(Give(0, 1, 0, GradientStart::kNothing, 0).ok());
  EXPECT_TRUE(Give(0, 1, 0, GradientStart::kNothing, 1).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_EQ(Add(), "0.0;0.0;0.0;");
  Begin({0});
  EXPECT_TRUE(Give(0, 0, 0, GradientStart::kZeros).ok());
  EXPECT_EQ(Add(), "");
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_EQ(Add(), "0.1;");
  Begin({1, 2});
  const std::vector<GradientOrder::Addition> due = order_.TakeAdditions();
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].start, GradientStart::kZeros);
  EXPECT_EQ(bits(0), proto::kGradientExists);
  EXPECT_EQ(bits(1), 0);
}

TEST_F(GradientOrderTest, ZeroingOnSomeRanksOnlyIsAnError) {
  Begin({0, 1, 2});
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(End(rank, 0).ok());
  for (const uint32_t rank : {0, 1, 2}) EXPECT_TRUE(Look(rank, 0, 1).ok());
  Begin({0});
  ExpectError(End(1, 1), ErrorId::kGradientOfRanks, {"rank 1 goes on", "zeroed without a step"});
}

// It had no pass before that: what it gave went to the sum that the others have left.
TEST_F(GradientOrderTest, ARankThatDoesNotBeginAnewIsBehind) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_FALSE(order_.IsBehind(0));
  Begin({0});  // has zeroed it
  EXPECT_FALSE(order_.IsBehind(0));
  for (const uint32_t rank : {0, 1}) {
    EXPECT_TRUE(Give(rank, 0, 0).ok());
    EXPECT_TRUE(End(rank, 0).ok());
  }
  EXPECT_FALSE(order_.IsBehind(0));
  EXPECT_TRUE(order_.IsBehind(1));
  EXPECT_FALSE(order_.IsBehind(2)) << "it has given nothing";
}

TEST_F(GradientOrderTest, AnEndThatWaitsTellsWhatOthersGave) {
  Begin({0, 1, 2});
  EXPECT_TRUE(End(0, 0, /*waits=*/true).ok());
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_TRUE(End(1, 0).ok());
  EXPECT_EQ(Answered(), "1:1000");
  order_.Step(2);
  EXPECT_EQ(Answered(), "0:1000");
  EXPECT_EQ(bits(0), proto::kGradientExists);
  EXPECT_EQ(bits(1), 0);
}

TEST_F(GradientOrderTest, ASumThatIsNotFiniteIsNotFinite) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  Add(/*finite=*/false);
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  EXPECT_EQ(bits(0), proto::kGradientExists | proto::kGradientFinal);
  EXPECT_FALSE(order_.IsFinite(0));
  order_.BeginNextStep({});
  Begin({0, 1, 2}, 2);
  EXPECT_TRUE(Give(0, 0, 0).ok());
  Add();
  EXPECT_TRUE(order_.IsFinite(0));
}

TEST_F(GradientOrderTest, ANormIsOfASumThatIsFinal) {
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  order_.PublishNorm(0, 5);
  EXPECT_EQ(bits(0) & proto::kGradientNorm, 0);
  Add();
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  order_.PublishNorm(0, 5);
  EXPECT_EQ(proto::GradientNormOf(order_.word(0)), 5u);
  EXPECT_EQ(order_.TakeChanged(), std::vector<uint32_t>{0});
}

TEST_F(GradientOrderTest, ARefusedStepLetsRanksGoOnOrBeginAnew) {
  Begin({0, 1});
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_TRUE(End(1, 0).ok());
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  EXPECT_EQ(Add(), "0.1;");
  ASSERT_TRUE(order_.IsSettled());
  order_.CancelStep();
  EXPECT_FALSE(order_.IsSettled());
  Begin({0, 1, 2});
  EXPECT_TRUE(Give(2, 0, 0).ok());
  for (const uint32_t rank : {0, 1, 2}) order_.Step(rank);
  const std::vector<GradientOrder::Addition> due = order_.TakeAdditions();
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].start, GradientStart::kNothing);
}

TEST_F(GradientOrderTest, WhoeverWaitsIsKnown) {
  Begin({0, 1});
  EXPECT_TRUE(Give(0, 0, 0).ok());
  EXPECT_TRUE(End(0, 0, /*waits=*/true).ok());
  EXPECT_TRUE(Look(1, 0, 0).ok());
  EXPECT_EQ(order_.TakeTickets().size(), 3u);
  EXPECT_TRUE(order_.TakeTickets().empty());
}

TEST_F(GradientOrderTest, RanksThatOthersWaitForAreKnown) {
  using Ranks = std::vector<uint32_t>;
  Begin({0, 1});
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_EQ(order_.WaitedFor(), Ranks()) << "nobody looks";
  EXPECT_TRUE(Look(0, 0, 1).ok());
  EXPECT_EQ(order_.WaitedFor(), Ranks({1, 2}));
  EXPECT_TRUE(order_.Waits(0));
  EXPECT_TRUE(order_.IsAheadOf(0, 1) && order_.IsAheadOf(0, 2));
  EXPECT_FALSE(order_.IsAheadOf(1, 0) || order_.IsAheadOf(1, 2));
  order_.Step(1);
  EXPECT_EQ(order_.WaitedFor(), Ranks({2}));
  EXPECT_FALSE(order_.IsAheadOf(0, 1));
  Begin({2});
  EXPECT_TRUE(End(2, 0).ok());
  EXPECT_EQ(order_.WaitedFor(), Ranks({2})) << "it may make another pass";
  EXPECT_TRUE(Look(2, 1, 1).ok());
  EXPECT_EQ(order_.WaitedFor(), Ranks());
  EXPECT_FALSE(order_.Waits(0));
}

TEST_F(GradientOrderTest, RanksThatPartsWaitForAreKnown) {
  using Ranks = std::vector<uint32_t>;
  Begin({0, 1});
  EXPECT_TRUE(Give(1, 0, 0).ok());
  EXPECT_EQ(order_.PartsWaitFor(), Ranks({0, 2})) << "one has not begun";
  EXPECT_TRUE(order_.IsAheadOf(1, 0) && order_.IsAheadOf(1, 2));
  EXPECT_FALSE(order_.IsAheadOf(0, 1) || order_.IsAheadOf(2, 0));
  Begin({2});
  EXPECT_EQ(order_.PartsWaitFor(), Ranks({0})) << "one comes behind it";
  EXPECT_EQ(order_.said(0), 0u);
  EXPECT_TRUE(End(0, 0).ok());
  EXPECT_EQ(order_.said(0), 1u);
  EXPECT_EQ(order_.PartsWaitFor(), Ranks()) << "it is being added";
  EXPECT_EQ(Add(), "0.1;");
  EXPECT_TRUE(End(1, 0).ok());
  EXPECT_TRUE(Give(0, 1, 1).ok());
  EXPECT_EQ(order_.PartsWaitFor(), Ranks({2}));
}

TEST_F(GradientOrderTest, ARankThatOthersWaitForAtTheEndOfAPassIsKnown) {
  Begin({0, 1, 2});
  EXPECT_TRUE(End(0, 0, /*waits=*/true).ok());
  EXPECT_TRUE(End(1, 0).ok());
  EXPECT_EQ(order_.WaitedFor(), std::vector<uint32_t>({2}));
  EXPECT_TRUE(order_.Waits(0));
  EXPECT_FALSE(order_.Waits(1));
  EXPECT_TRUE(order_.IsAheadOf(0, 2));
  EXPECT_FALSE(order_.IsAheadOf(0, 1));
}

TEST_F(GradientOrderTest, RanksThatBreakTheOrderAreNamed) {
  ExpectError(Give(1, 0, 0), ErrorId::kProtocol, {"rank 1", "before it has begun"});
  ExpectError(Look(1, 0, 0), ErrorId::kProtocol, {"rank 1 looks at \"t0\""});
  ExpectError(order_.Begin(1, 7), ErrorId::kProtocol, {"step 7 of step 1"});
  Begin({1});
  ExpectError(Give(1, 0, 1), ErrorId::kProtocol, {"pass 1, and 0 runs"});
  EXPECT_TRUE(End(1, 0).ok());
  ExpectError(Give(1, 0, 0), ErrorId::kProtocol, {"pass 0, and 1 runs"});
  ExpectError(Look(1, 0, 2), ErrorId::kProtocol, {"after 2 passes, it has ended 1"});
  ExpectError(Give(1, 1, 1, GradientStart::kNothing, 1), ErrorId::kProtocol,
              {"extent 1 of \"t1\""});
  EXPECT_TRUE(Give(1, 1, 1).ok());
  ExpectError(End(1, 1), ErrorId::kProtocol, {"amid a tensor"});
  EXPECT_TRUE(Give(1, 1, 1, GradientStart::kNothing, 1).ok());
  ExpectError(Give(1, 1, 1), ErrorId::kProtocol, {"the next is 2 of 2"});
  EXPECT_TRUE(order_.fault().ok());
  EXPECT_TRUE(Give(1, 2, 1).ok());
  order_.Step(1);
  ExpectError(order_.fault(), ErrorId::kProtocol, {"rank 1 steps amid a tensor"});
  ExpectError(Give(1, 0, 1), ErrorId::kProtocol, {"after its step"});
  ExpectError(order_.Begin(1, 1), ErrorId::kProtocol, {"after it has called for step 1"});
}

// ---- Any schedule ------------------------------------------------------------------------------

// What happens to the sum of an extent: each part is mixed in, so the order shows.
uint64_t Mix(uint64_t sum, uint64_t part) {
  uint64_t state = sum * 3 + part;
  return SplitMix64(state);
}

// One operation of a rank.
struct Operation {
  enum Kind { kBegin, kPart, kEnd, kLook, kStep } kind = kStep;
  uint64_t step = 0;
  uint32_t tensor = 0, extent = 0, pass = 0;
  GradientStart start = GradientStart::kNothing;
  bool waits = false;
  uint64_t part = 0;               // identity
  std::vector<uint64_t> expected;  // of a look: the sums of the extents
  bool exists = false;             // of a look
};

// Programs of all ranks, and what one process makes of them.
class Script {
 public:
  Script(Random& random, const proto::Catalogue& catalogue, uint32_t ranks, uint64_t steps)
      : random_(random), catalogue_(catalogue), programs(ranks) {
    for (const proto::Tensor& tensor : catalogue.tensors)
      sums_.emplace_back(proto::ExtentCount(tensor.element_count), 0);
    for (uint64_t step = 1; step <= steps; ++step) AddStep(step);
  }

  uint32_t ranks() const { return static_cast<uint32_t>(programs.size()); }

 private:
  uint32_t tensors() const { return static_cast<uint32_t>(sums_.size()); }

  void AddStep(uint64_t step) {
    const uint32_t beginnings = random_.OneIn(4) ? 2 : 1;
    for (uint32_t i = 0; i < beginnings; ++i) AddBeginning(step, i + 1 == beginnings);
    for (uint32_t rank = 0; rank < ranks(); ++rank)
      programs[rank].push_back({.kind = Operation::kStep, .step = step});
    expected_of_step.push_back(sums_);
  }

  void AddBeginning(uint64_t step, bool is_last) {
    given_.assign(tensors(), std::nullopt);
    starts_.clear();
    for (uint32_t i = 0; i < tensors(); ++i)
      starts_.push_back(static_cast<GradientStart>(random_.Below(3)));
    const uint32_t rounds = random_.OneIn(3) ? 2 : 1;
    for (uint32_t rank = 0; rank < ranks(); ++rank)
      programs[rank].push_back({.kind = Operation::kBegin, .step = step});
    uint32_t base = 0;
    for (uint32_t round = 0; round < rounds; ++round) {
      sums_before_ = sums_;
      given_before_ = given_;
      const bool goes_on = round + 1 < rounds;
      const uint32_t common = base + 1 + static_cast<uint32_t>(random_.Below(2));
      std::vector<uint32_t> passes(ranks(), common);
      if (!goes_on) {
        for (uint32_t& count : passes) {
          if (random_.OneIn(3)) count = base + static_cast<uint32_t>(random_.Below(3));
        }
        // A round that goes on from a look is entered by a pass, or by the step that follows.
        if (round > 0 && !is_last) std::replace(passes.begin(), passes.end(), base, base + 1);
      }
      for (uint32_t pass = base; pass < *std::max_element(passes.begin(), passes.end()); ++pass)
        AddPass(pass, passes);
      AddLooks(passes, goes_on, round > 0 ? base : 0);
      base = common;
    }
  }

  void AddPass(uint32_t pass, const std::vector<uint32_t>& passes) {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (pass >= passes[rank]) continue;
      std::vector<uint32_t> order(tensors());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
      for (const uint32_t tensor : order) {
        if (!random_.OneIn(4)) AddParts(rank, tensor, pass);
      }
      programs[rank].push_back({.kind = Operation::kEnd, .pass = pass, .waits = random_.OneIn(3)});
    }
  }

  void AddParts(uint32_t rank, uint32_t tensor, uint32_t pass) {
    const bool is_first = !given_[tensor].has_value();
    if (is_first) given_[tensor] = pass;
    const bool says = *given_[tensor] == pass;  // later nobody asks
    const GradientStart start =
        says ? starts_[tensor] : static_cast<GradientStart>(random_.Below(3));
    for (uint32_t extent = 0; extent < sums_[tensor].size(); ++extent) {
      const uint64_t part = random_.Next();
      programs[rank].push_back({.kind = Operation::kPart,
                                .tensor = tensor,
                                .extent = extent,
                                .pass = pass,
                                .start = start,
                                .part = part});
      uint64_t& sum = sums_[tensor][extent];
      if (is_first && start != GradientStart::kPrevious)
        sum = start == GradientStart::kZeros ? 1 : 2;
      sum = Mix(sum, part);
    }
  }

  // A rank that makes no pass in a round that follows a look is still in the one before.
  void AddLooks(const std::vector<uint32_t>& passes, bool everybody, uint32_t base) {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (!everybody && random_.OneIn(2)) continue;
      for (uint64_t i = 1 + random_.Below(3); i > 0; --i) {
        const auto tensor = static_cast<uint32_t>(random_.Below(tensors()));
        const bool is_behind = base > 0 && passes[rank] == base;
        programs[rank].push_back(
            {.kind = Operation::kLook,
             .tensor = tensor,
             .pass = passes[rank],
             .expected = (is_behind ? sums_before_ : sums_)[tensor],
             .exists = (is_behind ? given_before_ : given_)[tensor].has_value()});
      }
    }
  }

  Random& random_;
  const proto::Catalogue& catalogue_;
  std::vector<std::vector<uint64_t>> sums_, sums_before_;      // before: the round
  std::vector<std::optional<uint32_t>> given_, given_before_;  // the first pass that gave it
  std::vector<GradientStart> starts_;

 public:
  std::vector<std::vector<Operation>> programs;
  std::vector<std::vector<std::vector<uint64_t>>> expected_of_step;
};

// Runs the programs against an order, choosing at random who does the next thing.
class Schedule {
 public:
  Schedule(Random& random, const proto::Catalogue& catalogue, const Script& script)
      : random_(random),
        script_(script),
        order_(&catalogue, script.ranks(), /*step=*/0),
        ranks_(script.ranks()) {
    for (const proto::Tensor& tensor : catalogue.tensors)
      sums_.emplace_back(proto::ExtentCount(tensor.element_count), 0);
    for (Rank& rank : ranks_) rank.ring = 1 + random_.Below(random_.OneIn(2) ? 3 : 40);
  }

  void Run() {
    while (!::testing::Test::HasFailure()) {
      std::vector<std::function<void()>> possible;
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (CanGo(rank)) possible.push_back([this, rank] { Go(rank); });
      }
      if (!running_.empty()) possible.push_back([this] { FinishAddition(); });
      if (!updates_.empty()) possible.push_back([this] { FinishUpdate(); });
      if (order_.IsSettled() && updates_.empty()) possible.push_back([this] { RecordStep(); });
      if (possible.empty()) break;
      possible[random_.Below(possible.size())]();
      ExpectOk(order_.fault());
      Take();
    }
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      EXPECT_EQ(ranks_[rank].next, script_.programs[rank].size()) << "rank " << rank << " is stuck";
    }
  }

 private:
  struct Rank {
    size_t next = 0;
    size_t in_flight = 0, ring = 0;
    bool waits = false;
    const Operation* looked = nullptr;  // the sum may not change before the rank goes on
  };

  bool CanGo(uint32_t rank) const {
    const Rank& r = ranks_[rank];
    if (r.waits || r.next == script_.programs[rank].size()) return false;
    return script_.programs[rank][r.next].kind != Operation::kPart || r.in_flight < r.ring;
  }

  void Go(uint32_t rank) {
    Rank& r = ranks_[rank];
    const Operation& operation = script_.programs[rank][r.next];
    const Ticket ticket{.rank = rank, .tag = r.next, .region_offset = operation.part};
    ++r.next;
    if (r.looked != nullptr) ExpectSums(*r.looked, "looked at");
    r.looked = nullptr;
    switch (operation.kind) {
      case Operation::kBegin:
        return ExpectOk(order_.Begin(rank, operation.step));
      case Operation::kPart:
        ++r.in_flight;
        return ExpectOk(order_.Deliver(operation.tensor, operation.extent, operation.pass,
                                       operation.start, ticket));
      case Operation::kEnd:
        r.waits = true;
        return ExpectOk(order_.EndPass(operation.pass, operation.waits, ticket));
      case Operation::kLook:
        r.waits = true;
        return ExpectOk(order_.Look(operation.tensor, operation.pass, ticket));
      case Operation::kStep:
        r.waits = true;
        return order_.Step(rank);
    }
  }

  void Take() {
    for (GradientOrder::Addition& addition : order_.TakeAdditions()) {
      for (const GradientOrder::Addition& other : running_) {
        EXPECT_FALSE(other.tensor == addition.tensor && other.extent == addition.extent);
      }
      EXPECT_TRUE(updates_.find(addition.tensor) == updates_.end()) << "its update reads it";
      running_.push_back(std::move(addition));
    }
    for (const GradientOrder::Answer& answer : order_.TakeAnswers()) {
      Rank& r = ranks_[answer.ticket.rank];
      r.waits = false;
      const Operation& operation = script_.programs[answer.ticket.rank][answer.ticket.tag];
      if (operation.kind != Operation::kLook) continue;
      EXPECT_EQ((proto::GradientBitsOf(answer.value) & proto::kGradientExists) != 0,
                operation.exists);
      EXPECT_NE(proto::GradientBitsOf(answer.value) & proto::kGradientFinal, 0);
      ExpectSums(operation, "answered");
      r.looked = &operation;
    }
  }

  void FinishAddition() {
    const size_t chosen = random_.Below(running_.size());
    const GradientOrder::Addition addition = running_[chosen];
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(chosen));
    uint64_t& sum = sums_[addition.tensor][addition.extent];
    if (addition.start != GradientStart::kPrevious)
      sum = addition.start == GradientStart::kZeros ? 1 : 2;
    for (const Ticket& part : addition.parts) {
      sum = Mix(sum, part.region_offset);
      --ranks_[part.rank].in_flight;
    }
    order_.Added(addition.tensor, addition.extent, true);
  }

  void RecordStep() {
    EXPECT_TRUE(running_.empty());
    EXPECT_EQ(sums_, script_.expected_of_step[step_]) << "at step " << step_ + 1;
    std::vector<uint32_t> updated;
    for (uint32_t tensor = 0; tensor < sums_.size(); ++tensor) {
      if (!order_.HasSum(tensor) || random_.OneIn(4)) continue;
      updated.push_back(tensor);
      updates_[tensor] = sums_[tensor];
    }
    ++step_;
    order_.BeginNextStep(updated);
    for (Rank& rank : ranks_) rank.waits = false;
  }

  void FinishUpdate() {
    auto update = updates_.begin();
    std::advance(update, random_.Below(updates_.size()));
    EXPECT_EQ(update->second, sums_[update->first]);
    order_.UpdateComputed(update->first);
    updates_.erase(update);
  }

  void ExpectSums(const Operation& look, const char* when) {
    EXPECT_EQ(sums_[look.tensor], look.expected) << "tensor " << look.tensor << ", " << when;
  }
  void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

  Random& random_;
  const Script& script_;
  GradientOrder order_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<uint64_t>> sums_;
  std::vector<GradientOrder::Addition> running_;
  std::map<uint32_t, std::vector<uint64_t>> updates_;
  size_t step_ = 0;
};

TEST(GradientOrderSimulation, EveryScheduleEndsWithTheSumsOfOneProcess) {
  const proto::Catalogue catalogue = MakeCatalogue();
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Random random(seed);
    const Script script(random, catalogue, 1 + static_cast<uint32_t>(random.Below(5)),
                        1 + random.Below(4));
    Schedule(random, catalogue, script).Run();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace offload::daemon
