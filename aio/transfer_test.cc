#include "aio/transfer.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "aio/errno_status.h"
#include "base/error.h"

namespace offload::aio {
namespace {

using Kind = Device::Kind;

alignas(4096) std::byte buffer[16384];

Transfer MakeRead() {
  return Transfer(Kind::kRead, 65536, {{buffer, 4096}, {buffer + 8192, 8192}}, 512);
}

TEST(TransferTest, AllBytesAreDone) { EXPECT_EQ(MakeRead().Advance(12288), absl::OkStatus()); }

TEST(TransferTest, ShortCountGoesOnInsideAPieceAndAtABorder) {
  Transfer transfer = MakeRead();
  EXPECT_EQ(transfer.Advance(512), std::nullopt);
  EXPECT_EQ(transfer.offset_bytes(), 66048u);
  ASSERT_EQ(transfer.pieces().size(), 2u);
  EXPECT_EQ(transfer.pieces()[0].iov_base, buffer + 512);
  EXPECT_EQ(transfer.pieces()[0].iov_len, 3584u);
  EXPECT_EQ(transfer.Advance(3584), std::nullopt);
  ASSERT_EQ(transfer.pieces().size(), 1u);
  EXPECT_EQ(transfer.pieces()[0].iov_base, buffer + 8192);
  EXPECT_EQ(transfer.Advance(8192), absl::OkStatus());
}

TEST(TransferTest, NeighboursInMemoryBecomeOnePiece) {
  Transfer transfer(Kind::kWrite, 0,
                    {{buffer, 4096}, {buffer + 4096, 4096}, {buffer + 12288, 4096}}, 512);
  ASSERT_EQ(transfer.pieces().size(), 2u);
  EXPECT_EQ(transfer.pieces()[0].iov_len, 8192u);
  EXPECT_EQ(transfer.Advance(12288), absl::OkStatus());
}

TEST(TransferTest, EndOfFileIsDataLoss) {
  for (const int64_t result : {0, 100}) {
    Transfer transfer = MakeRead();
    EXPECT_EQ(transfer.Advance(4096), std::nullopt);
    const std::optional<absl::Status> status = transfer.Advance(result);
    ASSERT_TRUE(status.has_value());
    EXPECT_TRUE(absl::IsDataLoss(*status)) << *status;
    EXPECT_EQ(ErrorIdOf(*status), ErrorId::kIo);
  }
}

TEST(TransferTest, RetriesAreBoundedAndProgressStartsAnew) {
  for (const int64_t result : {-EAGAIN, -EINTR}) {
    Transfer transfer = MakeRead();
    for (int round = 0; round < 2; ++round) {
      for (uint32_t i = 0; i < Transfer::kRetriesMax; ++i) {
        ASSERT_EQ(transfer.Advance(result), std::nullopt);
      }
      if (round == 0) {
        ASSERT_EQ(transfer.Advance(4096), std::nullopt);
      }
    }
    const std::optional<absl::Status> status = transfer.Advance(result);
    ASSERT_TRUE(status.has_value());
    EXPECT_TRUE(absl::IsUnavailable(*status)) << *status;
  }
}

TEST(TransferTest, ErrorsNameTheWholeOperation) {
  Transfer transfer = MakeRead();
  EXPECT_EQ(transfer.Advance(4096), std::nullopt);
  const std::optional<absl::Status> status = transfer.Advance(-EIO);
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(status->message().find("read of 12288 bytes at offset 65536: EIO") !=
              absl::string_view::npos)
      << *status;
}

TEST(TransferTest, FlushIsDoneAtZeroAndEveryErrorOfItIsDataLoss) {
  EXPECT_EQ(Transfer(Kind::kFlush, 0, {}, 512).Advance(0), absl::OkStatus());
  for (const int64_t result : {-EIO, -ENOSPC, -EINVAL}) {
    EXPECT_TRUE(absl::IsDataLoss(*Transfer(Kind::kFlush, 0, {}, 512).Advance(result)));
  }
}

TEST(ErrnoStatusTest, AThreadThatTheKernelCouldNotStartIsNamed) {
  const absl::Status status = IoErrorStatus(ECANCELED, Device::Kind::kFlush, 0, 0);
  EXPECT_NE(status.message().find("ulimit -u"), absl::string_view::npos) << status;
}

TEST(ErrnoStatusTest, CodesFollowTheTable) {
  const std::pair<int, absl::StatusCode> cases[] = {
      {EIO, absl::StatusCode::kDataLoss},
      {ENODEV, absl::StatusCode::kDataLoss},
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EFBIG, absl::StatusCode::kResourceExhausted},
      {ENOMEM, absl::StatusCode::kResourceExhausted},
      {EAGAIN, absl::StatusCode::kUnavailable},
      {EINVAL, absl::StatusCode::kInvalidArgument},
      {EOPNOTSUPP, absl::StatusCode::kUnimplemented},
      {EACCES, absl::StatusCode::kPermissionDenied},
      {EBADF, absl::StatusCode::kFailedPrecondition},
      {ECANCELED, absl::StatusCode::kCancelled},
  };
  for (const auto& [error_number, code] : cases) {
    EXPECT_EQ(IoErrorStatus(error_number, Kind::kWrite, 0, 512).code(), code) << error_number;
  }
  EXPECT_EQ(ErrorIdOf(IoErrorStatus(ENOSPC, Kind::kWrite, 0, 512)), ErrorId::kPoolFull);
  const absl::Status limited = IoErrorStatus(EFBIG, Kind::kWrite, 0, 512);
  EXPECT_NE(limited.message().find("ulimit -f"), absl::string_view::npos) << limited;
  EXPECT_EQ(ErrorIdOf(IoErrorStatus(ENOMEM, Kind::kWrite, 0, 512)), ErrorId::kIo);
}

}  // namespace
}  // namespace offload::aio
