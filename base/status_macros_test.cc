#include "base/status_macros.h"

#include <gtest/gtest.h>

#include <memory>

namespace offload {
namespace {

absl::Status PassOn(absl::Status status, bool* reached) {
  OFFLOAD_RETURN_IF_ERROR(status);
  *reached = true;
  return absl::OkStatus();
}

absl::StatusOr<int> AddOne(absl::StatusOr<std::unique_ptr<int>> input) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, std::move(input));
  OFFLOAD_ASSIGN_OR_RETURN(int one, absl::StatusOr<int>(1));
  return *value + one;
}

TEST(StatusMacrosTest, ReturnIfErrorReturnsOnlyErrors) {
  bool reached = false;
  EXPECT_EQ(PassOn(absl::AbortedError("x"), &reached), absl::AbortedError("x"));
  EXPECT_FALSE(reached);
  EXPECT_TRUE(PassOn(absl::OkStatus(), &reached).ok());
  EXPECT_TRUE(reached);
}

TEST(StatusMacrosTest, AssignOrReturnMovesTheValueOrReturnsTheError) {
  EXPECT_EQ(*AddOne(std::make_unique<int>(41)), 42);
  EXPECT_EQ(AddOne(absl::NotFoundError("y")).status(), absl::NotFoundError("y"));
}

}  // namespace
}  // namespace offload
