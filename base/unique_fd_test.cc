#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>

namespace offload {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Numbers far above those the test runner uses, so that nobody reuses one between close and check.
int OpenAt(int number) {
  UniqueFd low(::eventfd(0, EFD_CLOEXEC));
  return ::fcntl(low.get(), F_DUPFD_CLOEXEC, number);
}

TEST(UniqueFdTest, ClosesWhenItGoesAway) {
  const int raw = OpenAt(500);
  {
    UniqueFd fd(raw);
    EXPECT_TRUE(fd.valid());
    EXPECT_TRUE(IsOpen(raw));
  }
  EXPECT_FALSE(IsOpen(raw));
}

TEST(UniqueFdTest, MoveTransfersAndAssignmentClosesTheOldOne) {
  const int first = OpenAt(510), second = OpenAt(520);
  UniqueFd a(first), b(second);
  a = std::move(b);
  EXPECT_FALSE(IsOpen(first));
  EXPECT_EQ(a.get(), second);
  EXPECT_FALSE(b.valid());
  UniqueFd c(std::move(a));
  EXPECT_TRUE(IsOpen(second));
  EXPECT_FALSE(a.valid());
}

TEST(UniqueFdTest, ReleaseGivesUpWithoutClosingAndResetIsIdempotent) {
  const int raw = OpenAt(530);
  UniqueFd fd(raw);
  EXPECT_EQ(fd.release(), raw);
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(IsOpen(raw));
  fd.reset(raw);
  fd.reset();
  fd.reset();
  EXPECT_FALSE(IsOpen(raw));
}

}  // namespace
}  // namespace offload
