#include "base/named_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace offload {
namespace {

TEST(NamedMemoryTest, AnotherProcessSeesAndWritesTheSameBytes) {
  auto made = NamedMemory::Make(4096);
  ASSERT_TRUE(made.ok()) << made.status();
  std::memcpy(made->span().data(), "here", 4);
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = NamedMemory::Open(made->name(), 4096);
    if (!opened.ok() || std::memcmp(opened->span().data(), "here", 4) != 0) _exit(1);
    std::memcpy(opened->span().data() + 100, "there", 5);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(std::memcmp(made->span().data() + 100, "there", 5), 0);
}

TEST(NamedMemoryTest, OutlivesItsMakerInThoseWhoHaveOpenedIt) {
  auto made = NamedMemory::Make(4096);
  ASSERT_TRUE(made.ok());
  const std::string name = made->name();
  const auto opened = NamedMemory::Open(name, 4096);
  ASSERT_TRUE(opened.ok()) << opened.status();
  made->span()[7] = std::byte{9};
  *made = NamedMemory();
  EXPECT_EQ(opened->span()[7], std::byte{9});
  EXPECT_EQ(NamedMemory::Open(name, 4096).status().code(), absl::StatusCode::kNotFound);
}

TEST(NamedMemoryTest, AnotherSizeIsRefused) {
  const auto made = NamedMemory::Make(4096);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(NamedMemory::Open(made->name(), 8192).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace offload
