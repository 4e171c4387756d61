#include "base/posix_io.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "base/random.h"
#include "base/unique_fd.h"

namespace offload {
namespace {

std::vector<std::byte> MakeBytes(size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  Random(size_bytes).Fill(bytes);
  return bytes;
}

TEST(PosixIoTest, MovesMoreThanAPipeHoldsAtOnce) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  UniqueFd reader(ends[0]), writer(ends[1]);
  const std::vector<std::byte> sent = MakeBytes(1 << 20);
  std::thread thread([&] { EXPECT_TRUE(WriteFully(writer.get(), sent).ok()); });
  std::vector<std::byte> received(sent.size());
  EXPECT_TRUE(ReadFully(reader.get(), received).ok());
  thread.join();
  EXPECT_EQ(sent, received);
}

TEST(PosixIoTest, ReadsAndWritesAtOffsets) {
  UniqueFd fd(::memfd_create("posix_io_test", MFD_CLOEXEC));
  const std::vector<std::byte> written = MakeBytes(5000);
  ASSERT_TRUE(PwriteFully(fd.get(), 100, written).ok());
  std::vector<std::byte> read(5000);
  ASSERT_TRUE(PreadFully(fd.get(), 100, read).ok());
  EXPECT_EQ(written, read);
  EXPECT_EQ(PreadFully(fd.get(), 101, read).code(), absl::StatusCode::kDataLoss);
}

TEST(PosixIoTest, RefusalsNameTheErrno) {
  const std::vector<std::byte> bytes(1);
  const absl::Status status = WriteFully(-1, bytes);
  EXPECT_NE(status.message().find("EBADF"), std::string_view::npos) << status;
}

}  // namespace
}  // namespace offload
