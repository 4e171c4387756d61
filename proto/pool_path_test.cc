#include "proto/pool_path.h"

#include <filesystem>

#include "gtest/gtest.h"

namespace offload::proto {
namespace {

TEST(PoolPathTest, EachOfSeveralPoolsBecomesAbsoluteAndNoneStaysNone) {
  const std::string here = std::filesystem::current_path();
  EXPECT_EQ(AbsolutePools("/nvme0"), "/nvme0");
  EXPECT_EQ(AbsolutePools("pool"), here + "/pool");
  EXPECT_EQ(AbsolutePools("pool,/nvme1,other"), here + "/pool,/nvme1," + here + "/other");
  EXPECT_EQ(AbsolutePools(""), "");
}

}  // namespace
}  // namespace offload::proto
