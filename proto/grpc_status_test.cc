#include "proto/grpc_status.h"

#include "absl/status/status.h"
#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::proto {
namespace {

TEST(GrpcStatusTest, CodeAndMessageSurviveTheWayThereAndBack) {
  EXPECT_TRUE(FromGrpc(ToGrpc(absl::OkStatus())).ok());
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "text with ü and\nlines");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
  const absl::Status error = MakeError(ErrorId::kBudgetTooSmall, "ram 1 GiB");
  EXPECT_EQ(ErrorIdOf(FromGrpc(ToGrpc(error))), ErrorId::kBudgetTooSmall);
}

TEST(GrpcStatusTest, LongTextsAreCutAtACharacter) {
  std::string text;
  while (text.size() < 100'000) text += "ü";
  const std::string cut(FromGrpc(ToGrpc(absl::InternalError("x" + text))).message());
  EXPECT_LE(cut.size(), static_cast<size_t>(kControlMetadataBytesMax) / 4);
  EXPECT_EQ(cut, ("x" + text).substr(0, cut.size()));
  EXPECT_EQ(cut.size() % 2, 1u);  // x and whole characters of two bytes
}

TEST(GrpcStatusTest, ATextWithoutAnyCharacterIsCutToNothing) {
  const std::string text(static_cast<size_t>(kControlMetadataBytesMax), '\x80');
  EXPECT_EQ(FromGrpc(ToGrpc(absl::InternalError(text))).message(), "");
}

}  // namespace
}  // namespace offload::proto
