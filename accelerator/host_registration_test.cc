#include "accelerator/host_registration.h"

#include <array>

#include "accelerator/host_accelerator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace offload::accelerator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(RegistrationPiecesTest, OnePieceWhereItFits) {
  EXPECT_THAT(RegistrationPieces(100, {}, 100), ElementsAre(Piece{0, 100}));
  const uint64_t borders[] = {10, 50};
  EXPECT_THAT(RegistrationPieces(100, borders, 1000), ElementsAre(Piece{0, 100}));
}

TEST(RegistrationPiecesTest, CutsAtBordersOnlyAndAsLateAsItMay) {
  const uint64_t borders[] = {0, 30, 60, 90, 100};
  EXPECT_THAT(RegistrationPieces(100, borders, 65), ElementsAre(Piece{0, 60}, Piece{60, 40}));
  EXPECT_THAT(RegistrationPieces(100, borders, 30),
              ElementsAre(Piece{0, 30}, Piece{30, 30}, Piece{60, 30}, Piece{90, 10}));
}

TEST(RegistrationPiecesTest, ASlotLongerThanAPieceCannotBe) {
  const uint64_t borders[] = {30, 60};
  EXPECT_THAT(RegistrationPieces(100, borders, 39), IsEmpty());
  EXPECT_THAT(RegistrationPieces(100, borders, 29), IsEmpty());
  EXPECT_THAT(RegistrationPieces(0, borders, 29), IsEmpty());
}

TEST(HostRegistrationTest, HoldsAllPiecesUntilItIsGone) {
  HostAccelerator device({});
  const std::array<std::byte, 100> memory{};
  const uint64_t borders[] = {40};
  {
    HostRegistration registration =
        *HostRegistration::Register(&device, memory, borders, HostAccess::kReadOnly, 60);
    EXPECT_TRUE(registration.held());
    EXPECT_THAT(device.Leftovers(), ElementsAre("2 registrations"));
    const HostRegistration moved = std::move(registration);
    EXPECT_TRUE(moved.held());
    EXPECT_THAT(device.Leftovers(), ElementsAre("2 registrations"));
  }
  EXPECT_THAT(device.Leftovers(), IsEmpty());
}

TEST(HostRegistrationTest, AMachineThatCannotIsNoError) {
  HostAccelerator device({.registers_read_only = false});
  const std::array<std::byte, 100> memory{};
  const auto registration = HostRegistration::Register(&device, memory, {}, HostAccess::kReadOnly);
  ASSERT_TRUE(registration.ok());
  EXPECT_FALSE(registration->held());
  EXPECT_THAT(device.Leftovers(), IsEmpty());
}

}  // namespace
}  // namespace offload::accelerator
