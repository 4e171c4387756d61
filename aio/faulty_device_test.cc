#include "aio/faulty_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "base/error.h"

namespace offload::aio {
namespace {

constexpr size_t kSectorBytes = 512;
constexpr size_t kBlockBytes = 4096;
constexpr size_t kSectorCount = kBlockBytes / kSectorBytes;

// Blocks of one letter, written and read through a FaultyDevice over memory.
class FaultyDeviceTest : public testing::Test {
 protected:
  explicit FaultyDeviceTest(uint64_t seed = 1) { Reset(seed); }

  void Reset(uint64_t seed) {
    auto memory = std::make_unique<MemoryDevice>(64 << 10);
    memory_ = memory.get();
    device_ =
        std::make_unique<FaultyDevice>(std::move(memory), FaultyDevice::Options{.seed = seed});
  }

  absl::Status Finish() {
    while (device_->in_flight() > 0) device_->Poll(/*wait=*/true);
    return status_;
  }
  void StartWrite(uint64_t block, char letter) {
    std::memset(out_, letter, kBlockBytes);
    const iovec piece = {out_, kBlockBytes};
    device_->Write(block * kBlockBytes, {&piece, 1}, [this](absl::Status s) { status_ = s; });
  }
  absl::Status Write(uint64_t block, char letter) {
    StartWrite(block, letter);
    return Finish();
  }
  absl::Status Read(uint64_t block) {
    std::memset(in_, '?', kBlockBytes);
    const iovec piece = {in_, kBlockBytes};
    device_->Read(block * kBlockBytes, {&piece, 1}, [this](absl::Status s) { status_ = s; });
    return Finish();
  }
  absl::Status Flush() {
    device_->Flush([this](absl::Status s) { status_ = s; });
    return Finish();
  }

  // One letter for each sector of a block as the drive holds it; '.' for zero.
  std::string OnDrive(uint64_t block) {
    std::string letters;
    for (size_t i = 0; i < kSectorCount; ++i) {
      const auto* bytes = memory_->bytes().data() + block * kBlockBytes + i * kSectorBytes;
      const char letter = static_cast<char>(bytes[0]);
      for (size_t k = 0; k < kSectorBytes; ++k) EXPECT_EQ(bytes[k], bytes[0]) << "torn sector";
      letters += letter == 0 ? '.' : letter;
    }
    return letters;
  }

  alignas(4096) std::byte out_[kBlockBytes];
  alignas(4096) std::byte in_[kBlockBytes];
  absl::Status status_;
  MemoryDevice* memory_ = nullptr;
  std::unique_ptr<FaultyDevice> device_;
};

TEST_F(FaultyDeviceTest, WithoutFaultsItIsTheDeviceBehind) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  EXPECT_EQ(Flush(), absl::OkStatus());
  EXPECT_EQ(Read(1), absl::OkStatus());
  EXPECT_EQ(std::memcmp(in_, out_, kBlockBytes), 0);
  EXPECT_EQ(device_->faults_met(), 0u);
}

TEST_F(FaultyDeviceTest, TransientFaultHitsTheNthOperationOfItsClassOnly) {
  device_->AddFault({FaultKind::kWriteError, 2});
  EXPECT_EQ(Write(0, 'a'), absl::OkStatus());
  EXPECT_EQ(Read(0), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(Write(1, 'b')));
  EXPECT_EQ(Write(2, 'c'), absl::OkStatus());
  EXPECT_EQ(OnDrive(1), "........");
  EXPECT_EQ(device_->faults_met(), 1u);
}

TEST_F(FaultyDeviceTest, PersistentFaultHitsAllFromTheNth) {
  device_->AddFault({FaultKind::kReadError, 2, /*persistent=*/true});
  EXPECT_EQ(Read(0), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(Read(0)));
  EXPECT_TRUE(absl::IsDataLoss(Read(0)));
  device_->ClearFaults();
  EXPECT_EQ(Read(0), absl::OkStatus());
}

TEST_F(FaultyDeviceTest, CodesAreThoseOfTheTable) {
  device_->AddFault({FaultKind::kNoSpace, 1});
  EXPECT_TRUE(absl::IsResourceExhausted(Write(0, 'a')));
  EXPECT_EQ(ErrorIdOf(status_), ErrorId::kPoolFull);
  device_->AddFault({FaultKind::kAgain, 1});
  EXPECT_TRUE(absl::IsUnavailable(Write(0, 'a')));
  device_->AddFault({FaultKind::kFlushError, 1});
  EXPECT_TRUE(absl::IsDataLoss(Flush()));
  device_->AddFault({FaultKind::kShortRead, 1});
  EXPECT_TRUE(absl::IsDataLoss(Read(0)));
}

TEST_F(FaultyDeviceTest, TornWritesLeaveEveryProperPrefixOfSectors) {
  for (const FaultKind kind : {FaultKind::kTornWrite, FaultKind::kTornWriteSilent}) {
    std::set<std::string> seen;
    for (uint64_t seed = 0; seed < 200; ++seed) {
      Reset(seed);
      device_->AddFault({kind, 1});
      EXPECT_EQ(Write(0, 'a').ok(), kind == FaultKind::kTornWriteSilent);
      seen.insert(OnDrive(0));
    }
    EXPECT_EQ(seen, (std::set<std::string>{"........", "a.......", "aa......", "aaa.....",
                                           "aaaa....", "aaaaa...", "aaaaaa..", "aaaaaaa."}));
  }
}

TEST_F(FaultyDeviceTest, SilentFaultsAreSilentAndWrong) {
  device_->AddFault({FaultKind::kLostWrite, 1});
  EXPECT_EQ(Write(0, 'a'), absl::OkStatus());
  EXPECT_EQ(OnDrive(0), "........");

  device_->AddFault({FaultKind::kMisdirectedWrite, 1});
  EXPECT_EQ(Write(3, 'm'), absl::OkStatus());
  EXPECT_NE(OnDrive(3), "mmmmmmmm");
  EXPECT_EQ(std::count(memory_->bytes().begin(), memory_->bytes().end(), std::byte{'m'}), 4096);

  device_->ClearFaults();
  ASSERT_EQ(Write(5, 'b'), absl::OkStatus());
  device_->AddFault({FaultKind::kBitFlip, 1});
  EXPECT_EQ(Read(5), absl::OkStatus());
  int flipped_bits = 0;
  for (size_t i = 0; i < kBlockBytes; ++i) {
    flipped_bits += std::popcount(static_cast<unsigned>(in_[i] ^ out_[i]));
  }
  EXPECT_EQ(flipped_bits, 1);
}

TEST_F(FaultyDeviceTest, MisdirectedReadIsThatOfAnotherPlace) {
  ASSERT_EQ(Write(5, 'b'), absl::OkStatus());
  for (uint64_t seed = 0; seed < 20; ++seed) {
    device_->AddFault({FaultKind::kMisdirectedRead, 1});
    EXPECT_EQ(Read(5), absl::OkStatus());
    EXPECT_NE(std::memcmp(in_, out_, kBlockBytes), 0);
    EXPECT_EQ(Read(5), absl::OkStatus());
    EXPECT_EQ(std::memcmp(in_, out_, kBlockBytes), 0) << "once";
  }
  EXPECT_EQ(device_->faults_met(FaultKind::kMisdirectedRead), 20u);
}

TEST_F(FaultyDeviceTest, StaleReadIsWhatEachSectorWasBeforeItsLastWrite) {
  auto memory = std::make_unique<MemoryDevice>(64 << 10);
  memory_ = memory.get();
  device_ = std::make_unique<FaultyDevice>(std::move(memory),
                                           FaultyDevice::Options{.remember_previous = true});
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  ASSERT_EQ(Flush(), absl::OkStatus());
  ASSERT_EQ(Write(0, 'b'), absl::OkStatus());
  ASSERT_EQ(Flush(), absl::OkStatus());
  device_->AddFault({FaultKind::kStaleRead, 1});
  EXPECT_EQ(Read(0), absl::OkStatus());
  EXPECT_EQ(static_cast<char>(in_[0]), 'a');
  EXPECT_EQ(static_cast<char>(in_[kBlockBytes - 1]), 'a');
  EXPECT_EQ(Read(0), absl::OkStatus());
  EXPECT_EQ(static_cast<char>(in_[0]), 'b');
}

TEST_F(FaultyDeviceTest, WhatSurvivedACutIsDurableWhenThePowerIsBack) {
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kAll);
  device_->RestorePower();
  EXPECT_EQ(Read(0), absl::OkStatus());
  ASSERT_EQ(Write(1, 'b'), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kFlushedOnly);
  EXPECT_EQ(OnDrive(0), "aaaaaaaa");
  EXPECT_EQ(OnDrive(1), "........");
}

TEST_F(FaultyDeviceTest, PowerCutKeepsWhatWasFlushed) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Reset(seed);
    ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
    ASSERT_EQ(Flush(), absl::OkStatus());
    ASSERT_EQ(Write(1, 'b'), absl::OkStatus());
    device_->PowerCut();
    EXPECT_EQ(OnDrive(0), "aaaaaaaa");
    EXPECT_TRUE(absl::IsUnavailable(Read(0)));
    EXPECT_TRUE(absl::IsUnavailable(Flush()));
  }
}

TEST_F(FaultyDeviceTest, PowerCutLeavesAnyVersionOfUnflushedSectors) {
  std::set<char> seen;
  bool mixed = false;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Reset(seed);
    ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
    ASSERT_EQ(Flush(), absl::OkStatus());
    ASSERT_EQ(Write(0, 'b'), absl::OkStatus());
    ASSERT_EQ(Write(0, 'c'), absl::OkStatus());
    StartWrite(0, 'd');  // in flight
    device_->PowerCut();
    EXPECT_TRUE(absl::IsUnavailable(Finish()));
    const std::string letters = OnDrive(0);
    seen.insert(letters.begin(), letters.end());
    mixed |= letters != std::string(kSectorCount, letters[0]);
  }
  EXPECT_EQ(seen, (std::set<char>{'a', 'b', 'c', 'd'}));
  EXPECT_TRUE(mixed);
}

TEST_F(FaultyDeviceTest, PowerCutSurvivorsMayBeChosen) {
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kFlushedOnly);
  EXPECT_EQ(OnDrive(0), "........");
  Reset(1);
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kAll);
  EXPECT_EQ(OnDrive(0), "aaaaaaaa");
}

TEST_F(FaultyDeviceTest, FlushCoversOnlyWritesThatCompletedBeforeItsCall) {
  StartWrite(0, 'a');
  device_->Flush([](absl::Status status) { EXPECT_EQ(status, absl::OkStatus()); });
  ASSERT_EQ(Finish(), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kFlushedOnly);
  EXPECT_EQ(OnDrive(0), "........");
}

TEST_F(FaultyDeviceTest, WritesOfAFailedFlushAreNotSavedByTheNextOne) {
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  device_->AddFault({FaultKind::kFlushError, 1});
  ASSERT_TRUE(absl::IsDataLoss(Flush()));
  ASSERT_EQ(Write(1, 'b'), absl::OkStatus());
  ASSERT_EQ(Flush(), absl::OkStatus());
  device_->PowerCut(FaultyDevice::Survivors::kFlushedOnly);
  EXPECT_EQ(OnDrive(0), "........");
  EXPECT_EQ(OnDrive(1), "bbbbbbbb");
}

TEST_F(FaultyDeviceTest, ScriptedPowerCutComesAtItsOperation) {
  device_->AddFault({FaultKind::kPowerCut, 3});
  ASSERT_EQ(Write(0, 'a'), absl::OkStatus());
  ASSERT_EQ(Flush(), absl::OkStatus());
  EXPECT_FALSE(device_->is_cut());
  EXPECT_TRUE(absl::IsUnavailable(Write(0, 'b')));
  EXPECT_TRUE(device_->is_cut());
  for (const char letter : OnDrive(0)) EXPECT_TRUE(letter == 'a' || letter == 'b');
}

TEST_F(FaultyDeviceTest, SameSeedSameDrive) {
  const auto drive_of = [this](uint64_t seed) {
    Reset(seed);
    for (uint64_t block = 0; block < 8; ++block) (void)Write(block, static_cast<char>('a' + block));
    device_->PowerCut();
    return std::vector<std::byte>(memory_->bytes().begin(), memory_->bytes().end());
  };
  EXPECT_EQ(drive_of(11), drive_of(11));
  EXPECT_NE(drive_of(11), drive_of(12));
}

}  // namespace
}  // namespace offload::aio
