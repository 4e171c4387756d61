#include "offloadd/event_loop.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/error.h"

namespace offload::daemon {
namespace {

TEST(EventLoopTest, ALimitOfOpenFilesIsTold) {
  rlimit usual{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit none{0, usual.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status refused = EventLoop::Create().status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
  EXPECT_EQ(ErrorIdOf(refused), ErrorId::kOpenFiles) << refused;
  EXPECT_TRUE(EventLoop::Create().ok());
}

}  // namespace
}  // namespace offload::daemon
