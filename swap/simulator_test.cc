#include "swap/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "aio/memory_device.h"
#include "base/error.h"
#include "spdlog/spdlog.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

using aio::FaultKind;

// A sanitizer looks for other mistakes, ten times as slowly: a part is enough for it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

// Stores that fail and are repaired, by the thousand: the log would be all there is to see.
class Quiet : public testing::Environment {
 public:
  void SetUp() override { spdlog::set_level(spdlog::level::off); }
};
[[maybe_unused]] const testing::Environment* const kQuiet =
    testing::AddGlobalTestEnvironment(new Quiet);

// The seeds are parts of one range, so that a failing one is known by its number.
class SimulatorTest : public testing::TestWithParam<uint64_t> {
 protected:
  static constexpr uint64_t kSeedsPerPart = kIsSanitized ? 60 : 250;
};

// What would make a trace another one when it is run again (an address, a clock) does so for any
// seed: every eighth is run twice.
constexpr uint64_t kOnceOf = 8;

TEST_P(SimulatorTest, EverySeedHoldsWithTheTraceThatItHasAgainAndMeetsEveryClassOfFault) {
  SimulationResult sum;
  for (uint64_t seed = GetParam(); seed < GetParam() + kSeedsPerPart; ++seed) {
    const SimulationResult result = Simulate({.seed = seed});
    ASSERT_EQ(result.violation, "") << "seed " << seed;
    sum.Add(result);
    if (seed % kOnceOf == 0) {
      ASSERT_EQ(Simulate({.seed = seed}).trace_hash, result.trace_hash) << "seed " << seed;
    }
  }
  for (size_t kind = 0; kind < aio::kFaultKindCount; ++kind) {
    if (static_cast<FaultKind>(kind) == FaultKind::kPowerCut) continue;  // by call, not by script
    EXPECT_GT(sum.faults[kind], 0u) << aio::FaultName(static_cast<FaultKind>(kind));
  }
  EXPECT_GT(sum.rotten_bits, 0u);
  EXPECT_GT(sum.power_cuts, 0u);
  EXPECT_GT(sum.kills, 0u);
  EXPECT_GT(sum.next_epochs_found, 0u);
  EXPECT_GT(sum.mismatches_seen, 0u);
  EXPECT_GT(sum.growths, 0u);
  EXPECT_GT(sum.snapshots_read, 100u);
}
INSTANTIATE_TEST_SUITE_P(Seeds, SimulatorTest, testing::Range<uint64_t>(1, 2001, 250));

TEST(SimulatorSelfTest, DifferentSeedsHaveDifferentTraces) {
  EXPECT_NE(Simulate({.seed = 1}).trace_hash, Simulate({.seed = 2}).trace_hash);
}

// A fault at the first, second, … operation of its class, until the script meets none.
class EveryFaultTest : public testing::TestWithParam<FaultKind> {};

TEST_P(EveryFaultTest, AtEveryPositionLeavesAWholeEpochAndADocumentedCode) {
  for (const bool persistent : {false, true}) {
    uint64_t positions = 0;
    const SimulationResult result =
        SimulateEveryFault(/*seed=*/7, /*operation_count=*/kIsSanitized ? 50 : 200, GetParam(),
                           persistent, &positions);
    EXPECT_EQ(result.violation, "");
    EXPECT_GT(positions, kIsSanitized ? 10u : 40u);
    RecordProperty(persistent ? "positions_persistent" : "positions_once",
                   std::to_string(positions));
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, EveryFaultTest,
                         testing::Values(FaultKind::kReadError, FaultKind::kShortRead,
                                         FaultKind::kWriteError, FaultKind::kNoSpace,
                                         FaultKind::kTornWrite, FaultKind::kFlushError,
                                         FaultKind::kAgain));

// A store over memory, of the fixture's script, and what a crash leaves of it.
class MemoryStoreTest : public testing::Test {
 protected:
  static constexpr std::array<uint8_t, 16> kUuid = {1, 2, 3};

  // A drive that outlives its store, so that what is left on it can be seen; until the next one.
  std::unique_ptr<aio::Device> Drive(uint64_t seed, const std::vector<std::byte>& image,
                                     std::optional<aio::Fault> fault = std::nullopt) {
    auto memory = std::make_unique<aio::MemoryDevice>(FormattedBytes(SmallSpec()));
    memory_ = memory.get();
    if (!image.empty()) std::copy(image.begin(), image.end(), memory->bytes().begin());
    drive_ = std::make_unique<aio::FaultyDevice>(std::move(memory),
                                                 aio::FaultyDevice::Options{.seed = seed});
    if (fault) drive_->AddFault(*fault);
    return std::make_unique<BorrowedDevice>(drive_.get());
  }
  std::vector<std::byte> Image() const {
    return {memory_->bytes().begin(), memory_->bytes().end()};
  }

  // What a power cut at the nth operation after two commits leaves. `last`: the cut came too late.
  std::vector<std::byte> CrashedImage(uint64_t nth, bool* last) {
    auto store = Store::CreateOn(Drive(nth, {}), SmallSpec(), kUuid);
    EXPECT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE(CommitScript(**store).ok() && CommitScript(**store).ok());
    drive_->AddFault({FaultKind::kPowerCut, nth});
    *last = CommitScript(**store).ok();
    return Image();
  }

  aio::MemoryDevice* memory_ = nullptr;
  std::unique_ptr<aio::FaultyDevice> drive_;
};

TEST_F(MemoryStoreTest, RecoveryInterruptedAtEveryOperationAndRunAgainGivesTheSameState) {
  uint64_t interruptions = 0;
  bool last = false;
  for (uint64_t crash = 1; !last; ++crash) {
    const std::vector<std::byte> image = CrashedImage(crash, &last);
    uint64_t sequence = 0;
    {
      auto whole = Store::OpenOn(Drive(1, image));
      ASSERT_TRUE(whole.ok()) << whole.status();
      sequence = (*whole)->committed().sequence;
      ASSERT_EQ(CheckScript(**whole, sequence), absl::OkStatus());
    }
    for (uint64_t nth = 1;; ++nth) {
      {
        auto cut = Store::OpenOn(Drive(nth, image, aio::Fault{FaultKind::kPowerCut, nth}));
        if (cut.ok() && !drive_->is_cut()) break;  // the recovery has fewer operations
        EXPECT_FALSE(cut.ok()) << "crash " << crash << ", cut " << nth;
        ++interruptions;
      }
      const std::vector<std::byte> left = Image();
      auto again = Store::OpenOn(Drive(1, left));
      ASSERT_TRUE(again.ok()) << again.status();
      ASSERT_EQ((*again)->committed().sequence, sequence);
      ASSERT_EQ(CheckScript(**again, sequence), absl::OkStatus());
    }
  }
  EXPECT_GT(interruptions, 200u);
}

TEST_F(MemoryStoreTest, ABitThatRotsInASuperblockThatWasNeverWrittenLosesNothing) {
  std::vector<std::byte> image;
  {
    auto store = Store::CreateOn(Drive(1, {}), SmallSpec(), kUuid);
    ASSERT_TRUE(store.ok() && CommitScript(**store).ok());
    image = Image();
  }
  for (const uint32_t copy : {0, 1}) {
    std::vector<std::byte> rotten = image;
    rotten[Layout::SuperblockOffset(copy) + 77] ^= std::byte{4};
    auto store = Store::OpenOn(Drive(1, rotten));
    ASSERT_TRUE(store.ok()) << copy << ": " << store.status();
    EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
    EXPECT_EQ(CommitScript(**store), absl::OkStatus());
  }
}

TEST_F(MemoryStoreTest, RecoveryWritesNothingButTheTwinOfTheSuperblockThatItChose) {
  bool last = false;
  uint64_t twins = 0;
  for (uint64_t crash = 1; !last; ++crash) {
    const std::vector<std::byte> image = CrashedImage(crash, &last);
    const absl::Status first = Store::OpenOn(Drive(1, image)).status();
    ASSERT_TRUE(first.ok()) << first;
    const uint64_t written = memory_->counters().writes;
    EXPECT_LE(written, last ? 0u : 1u) << "crash " << crash;
    twins += written;
    const std::vector<std::byte> healed = Image();
    ASSERT_TRUE(Store::OpenOn(Drive(1, healed)).ok());
    EXPECT_EQ(memory_->counters().writes, 0u) << "crash " << crash;
  }
  EXPECT_GT(twins, 0u);
}

TEST_F(MemoryStoreTest, AFaultAtEveryOperationOfAFormatIsAnErrorOrNoFault) {
  for (const FaultKind kind : {FaultKind::kWriteError, FaultKind::kNoSpace, FaultKind::kTornWrite,
                               FaultKind::kAgain, FaultKind::kFlushError, FaultKind::kPowerCut}) {
    for (const bool persistent : {false, true}) {
      for (uint64_t nth = 1;; ++nth) {
        auto store =
            Store::CreateOn(Drive(nth, {}, aio::Fault{kind, nth, persistent}), SmallSpec(), kUuid);
        if (store.ok()) {
          EXPECT_EQ(drive_->faults_met(), 0u) << aio::FaultName(kind) << " at " << nth;
          break;
        }
        EXPECT_FALSE(absl::IsInternal(store.status())) << store.status();
      }
    }
  }
}

}  // namespace
}  // namespace offload::swap
