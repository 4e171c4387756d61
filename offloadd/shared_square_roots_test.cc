#include "offloadd/shared_square_roots.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace offload::daemon {
namespace {

using kernels::SquareRoots;

std::string Table(char content) { return std::string(SquareRoots::kBytes, content); }

TEST(SharedSquareRootsTest, EqualTablesAreOne) {
  SharedSquareRoots shared;
  const auto first = shared.Share(Table(1));
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->bytes(), Table(1));
  EXPECT_EQ(shared.Share(Table(1)), first);
  EXPECT_NE(shared.Share(Table(2)), first);
}

TEST(SharedSquareRootsTest, ATableEndsWithItsLastJob) {
  SharedSquareRoots shared;
  const std::weak_ptr<const SquareRoots> table = shared.Share(Table(1));
  EXPECT_TRUE(table.expired());
  EXPECT_NE(shared.Share(Table(1)), nullptr);
}

TEST(SharedSquareRootsTest, BytesOfAnotherLengthAreNoTable) {
  SharedSquareRoots shared;
  EXPECT_EQ(shared.Share(""), nullptr);
  EXPECT_EQ(shared.Share(Table(1) + "1"), nullptr);
}

}  // namespace
}  // namespace offload::daemon
