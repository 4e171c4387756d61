#include "base/failing_call.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"

namespace offload {
namespace {

TEST(FailingCallTest, OnlyTheCallsThatWereNamedFailAndAreCounted) {
  {
    const FailingCall failing("dup", EMFILE, {.after = 1, .times = 2});
    const int first = dup(1);
    EXPECT_GE(first, 0);
    close(first);
    EXPECT_EQ(dup(1), -1);
    EXPECT_EQ(errno, EMFILE);
    EXPECT_EQ(dup(1), -1);
    const int socket_fd = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_GE(socket_fd, 0) << "another function";
    close(socket_fd);
    const int last = dup(1);
    EXPECT_GE(last, 0);
    close(last);
    EXPECT_EQ(failing.failures(), 2);
  }
  const int after = dup(1);
  EXPECT_GE(after, 0);
  close(after);
}

}  // namespace
}  // namespace offload
