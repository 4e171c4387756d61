// aio/test_file.h
//
// A file for the tests of devices.
//
// Thread safety: none.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"

namespace offload::aio {

// A fresh file of zeros on a real file system, gone with the object.
struct TestFile {
  // In `folder`, or else where tests may write.
  explicit TestFile(uint64_t size_bytes, const std::string& folder = "") {
    const char* scratch = std::getenv("TEST_TMPDIR");
    path = (!folder.empty() ? folder : scratch == nullptr ? "." : scratch) + "/device_test_XXXXXX";
    UniqueFd created(::mkstemp(path.data()));
    EXPECT_TRUE(created.valid()) << ErrnoText(errno);
    EXPECT_EQ(::posix_fallocate(created.get(), 0, static_cast<off_t>(size_bytes)), 0);
  }
  ~TestFile() { ::unlink(path.c_str()); }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;

  // A new descriptor, for one device.
  int Open() const { return ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC); }
  std::string path;
};

}  // namespace offload::aio
