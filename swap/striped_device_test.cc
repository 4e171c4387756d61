#include "swap/striped_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/random.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

constexpr uint64_t kOffset = 8192;  // in front of each member's part

struct Parts {
  std::unique_ptr<StripedDevice> device;
  std::vector<aio::FaultyDevice*> members;
};

Parts MakeParts(const StripeNumbers& numbers, uint64_t size_bytes, bool reorders = false) {
  Parts parts;
  const StripeMap map = *StripeMap::Make(numbers);
  std::vector<StripeMember> members;
  for (uint32_t index = 0; index < map.member_count(); ++index) {
    auto faulty = std::make_unique<aio::FaultyDevice>(
        std::make_unique<aio::MemoryDevice>(kOffset + map.MemberBytes(index, size_bytes)),
        aio::FaultyDevice::Options{.seed = index + 1, .reorders = reorders});
    parts.members.push_back(faulty.get());
    members.push_back({std::move(faulty), absl::StrCat("pool", index), kOffset});
  }
  auto device = StripedDevice::Make(std::move(members), map, size_bytes);
  EXPECT_TRUE(device.ok()) << device.status();
  parts.device = *std::move(device);
  return parts;
}

absl::Status RunNow(aio::Device& device, const std::function<void(aio::Device::Done)>& start) {
  std::optional<absl::Status> result;
  start([&](absl::Status status) { result = std::move(status); });
  while (!result) device.Poll(/*wait=*/true);
  return *result;
}

// Any sequence of transfers reads what a flat array would hold, whatever map and cuts.
TEST(StripedDeviceTest, BehavesAsOneArray) {
  for (const StripeNumbers& numbers :
       {StripeNumbers{0, 4096, {1, 1}}, StripeNumbers{20480, 8192, {3, 1, 2}},
        StripeNumbers{4096, 16384, {1}}, StripeNumbers{40960, 4096, {16, 5}}}) {
    constexpr uint64_t kPages = 200;
    const Parts parts = MakeParts(numbers, kPages * 4096, /*reorders=*/true);
    const MappedRegion flat = Buffer(kPages * 4096), memory = Buffer(kPages * 4096);
    Random random(numbers.weights.size() + numbers.unit_bytes);
    for (int round = 0; round < 400; ++round) {
      const uint64_t begin = random.Below(kPages), count = 1 + random.Below(kPages - begin);
      std::vector<iovec> pieces;
      for (uint64_t page = begin; page < begin + count;) {
        const uint64_t pages = pieces.size() + 1 == aio::Device::kMaxPieces
                                   ? begin + count - page
                                   : 1 + random.Below(std::min<uint64_t>(begin + count - page, 9));
        pieces.push_back({memory.data() + page * 4096, pages * 4096});
        page += pages;
      }
      std::byte* const bytes = memory.data() + begin * 4096;
      if (random.OneIn(2)) {
        random.Fill({bytes, count * 4096});
        std::memcpy(flat.data() + begin * 4096, bytes, count * 4096);
        ASSERT_EQ(RunNow(*parts.device,
                         [&](auto done) { parts.device->Write(begin * 4096, pieces, done); }),
                  absl::OkStatus());
      } else {
        std::memset(bytes, 0xEE, count * 4096);
        ASSERT_EQ(RunNow(*parts.device,
                         [&](auto done) { parts.device->Read(begin * 4096, pieces, done); }),
                  absl::OkStatus());
        ASSERT_EQ(std::memcmp(bytes, flat.data() + begin * 4096, count * 4096), 0) << round;
      }
    }
  }
}

TEST(StripedDeviceTest, ALongTransferIsOneRunPerMember) {
  const Parts parts = MakeParts({4096, 4096, {1, 1}}, 4096 * 33);
  const MappedRegion memory = Buffer(4096 * 32);
  const iovec piece{memory.data(), memory.size()};
  ASSERT_TRUE(RunNow(*parts.device, [&](auto done) {
                parts.device->Write(4096, {&piece, 1}, done);
              }).ok());
  for (const aio::FaultyDevice* member : parts.members) EXPECT_EQ(member->started_count(), 1u);
  EXPECT_EQ(parts.device->counters().writes, 1u);
  EXPECT_EQ(parts.device->counters().written_bytes, memory.size());
}

TEST(StripedDeviceTest, AFlushThatFailsOnAnyMemberFailsAndNamesIt) {
  for (uint32_t bad = 0; bad < 3; ++bad) {
    const Parts parts = MakeParts({0, 4096, {1, 1, 1}}, 4096 * 6);
    parts.members[bad]->AddFault({aio::FaultKind::kFlushError});
    const absl::Status status =
        RunNow(*parts.device, [&](auto done) { parts.device->Flush(std::move(done)); });
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("pool", bad, ": "))) << status;
    for (const aio::FaultyDevice* member : parts.members) EXPECT_EQ(member->started_count(), 1u);
  }
}

TEST(StripedDeviceTest, AnErrorOfOneMemberIsTheTransfersErrorAfterAllPartsHaveEnded) {
  const Parts parts = MakeParts({0, 4096, {1, 1}}, 4096 * 4);
  parts.members[1]->AddFault({aio::FaultKind::kReadError});
  const MappedRegion memory = Buffer(4096 * 4);
  const iovec piece{memory.data(), memory.size()};
  const absl::Status status = RunNow(*parts.device, [&](auto done) {
    parts.device->Read(0, {&piece, 1}, done);
  });
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_TRUE(absl::StrContains(status.message(), "pool1")) << status;
  EXPECT_EQ(parts.members[0]->in_flight() + parts.members[1]->in_flight(), 0u);
}

TEST(StripedDeviceTest, RefusesMembersThatAreTooShort) {
  std::vector<StripeMember> members;
  members.push_back({std::make_unique<aio::MemoryDevice>(8192), "a", 0});
  members.push_back({std::make_unique<aio::MemoryDevice>(4096), "b", 0});
  const StripeMap map = *StripeMap::Make({0, 4096, {1, 1}});
  EXPECT_TRUE(
      absl::IsInvalidArgument(StripedDevice::Make(std::move(members), map, 4096 * 4).status()));
}

// Whichever member and whichever flush of a commit: the store has failed for good.
TEST(StripedDeviceTest, AFailedFlushOfAnyMemberFailsTheStoreOverIt) {
  const Layout layout = *Layout::Make(SmallSpec());
  for (uint64_t nth = 1; nth <= 4; ++nth) {
    for (uint32_t bad = 0; bad < 3; ++bad) {
      Parts parts = MakeParts({layout.PlaceOffset(0), 16384, {2, 1, 3}}, layout.file_bytes());
      const std::vector<aio::FaultyDevice*> members = parts.members;
      const auto store = Store::CreateOn(std::move(parts.device), SmallSpec(), {7});
      ASSERT_TRUE(store.ok()) << store.status();
      ASSERT_EQ(CommitScript(**store), absl::OkStatus());
      members[bad]->AddFault({aio::FaultKind::kFlushError, nth});
      EXPECT_FALSE(CommitScript(**store).ok());
      EXPECT_TRUE((*store)->failed());
      EXPECT_FALSE(CommitScript(**store).ok()) << "the next flush would succeed";
      EXPECT_EQ((*store)->committed().sequence, 1u);
    }
  }
}

TEST(StripedDeviceTest, RefusesAnotherNumberOfMembersThanItsMapHas) {
  std::vector<StripeMember> members;
  members.push_back({std::make_unique<aio::MemoryDevice>(8192), "a", 0});
  EXPECT_TRUE(absl::IsInvalidArgument(
      StripedDevice::Make(std::move(members), *StripeMap::Make({0, 4096, {1, 1}}), 8192).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      StripeMap::Make({kStripedBytesMax + kPageBytes, 4096, {1, 1}}).status()));
}

TEST(StripedDeviceTest, TheFirstOfTwoErrorsIsTheTransfersAndMembersSumUpWhatTheyRegister) {
  const Parts parts = MakeParts({0, 4096, {1, 1}}, 4096 * 4);
  for (aio::FaultyDevice* member : parts.members) member->AddFault({aio::FaultKind::kFlushError});
  const absl::Status status =
      RunNow(*parts.device, [&](auto done) { parts.device->Flush(std::move(done)); });
  EXPECT_TRUE(absl::StrContains(status.message(), "pool0: ")) << status;
  EXPECT_FALSE(absl::StrContains(status.message(), "pool1: ")) << status;
  const MappedRegion memory = Buffer(4096);
  parts.device->RegisterBuffer(memory.span());
  EXPECT_EQ(parts.device->registered_bytes(), 0u) << "memory needs no registration";
}

}  // namespace
}  // namespace offload::swap
