#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <set>

namespace offload {
namespace {

TEST(ErrorTest, RegistryIsSortedAndUnique) {
  int previous = 0;
  for (const ErrorInfo& info : AllErrors()) {
    EXPECT_GT(static_cast<int>(info.id), previous);
    previous = static_cast<int>(info.id);
  }
}

TEST(ErrorTest, EveryErrorHasItsTextsWithoutFullStopAndAFailingCode) {
  for (const ErrorInfo& info : AllErrors()) {
    SCOPED_TRACE(static_cast<int>(info.id));
    EXPECT_NE(info.code, absl::StatusCode::kOk);
    EXPECT_FALSE(info.text.empty());
    EXPECT_FALSE(info.cause.empty());
    ASSERT_FALSE(info.fix.empty());
    EXPECT_FALSE(info.text.ends_with('.'));
    EXPECT_TRUE(info.cause.ends_with('.')) << "a cause is a sentence";
    EXPECT_FALSE(info.fix.ends_with('.')) << "MakeError adds the full stop";
  }
}

TEST(ErrorTest, EveryNumberLiesInAKnownGroup) {
  const std::set<int> groups = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
  for (const ErrorInfo& info : AllErrors()) {
    EXPECT_EQ(groups.count(static_cast<int>(info.id) / 100), 1u) << static_cast<int>(info.id);
  }
}

TEST(ErrorTest, EveryErrorIsFoundByItsNumberAndReadBackFromItsStatus) {
  for (const ErrorInfo& info : AllErrors()) {
    EXPECT_EQ(FindError(static_cast<int>(info.id)), &info);
    const absl::Status status = MakeError(info.id, "thing 7");
    EXPECT_EQ(status.code(), info.code);
    EXPECT_EQ(ErrorIdOf(status), info.id);
  }
  EXPECT_EQ(FindError(1), nullptr);
}

TEST(ErrorTest, TextIsIdentifierWhatAndFix) {
  EXPECT_EQ(
      MakeError(ErrorId::kPoolNoDirectIo, "/tmp/pool is on tmpfs").message(),
      "OFD-1203 /tmp/pool is on tmpfs. Set nvme_path to a directory on an ext4 or xfs mount.");
  EXPECT_EQ(MakeError(ErrorId::kBadValue, "ram = lots", "Write a size such as 8GiB").message(),
            "OFD-1002 ram = lots. Write a size such as 8GiB.");
  EXPECT_EQ(MakeError(ErrorId::kBadValue, "ram = lots", "").message(), "OFD-1002 ram = lots.");
}

TEST(ErrorTest, IdentifierSurvivesAProcessBorderThatKeepsOnlyTheText) {
  const absl::Status sent = MakeError(ErrorId::kChecksum, "extent 4");
  const absl::Status received(sent.code(), std::string(sent.message()));
  EXPECT_EQ(ErrorIdOf(received), ErrorId::kChecksum);
}

TEST(ErrorTest, ForeignTextsHaveNoIdentifier) {
  for (const char* text : {"", "OFD-", "OFD-12", "OFD-12x3 a", "OFD-9999 a", "OFD-12030 a",
                           "ofd-1203 a", "see OFD-1203"}) {
    EXPECT_EQ(ErrorIdOf(absl::InternalError(text)), std::nullopt) << text;
  }
  EXPECT_EQ(ErrorIdOf(absl::OkStatus()), std::nullopt);
}

TEST(ErrorTest, ErrnoTextNamesTheSymbol) {
  EXPECT_EQ(ErrnoText(EIO), "EIO (Input/output error)");
  EXPECT_EQ(ErrnoText(123456), "errno 123456");
}

}  // namespace
}  // namespace offload
