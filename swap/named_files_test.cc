// Files of an open store that somebody removes: that is told, and they are written anew.

#include "swap/named_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "swap/fsck.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

class NamedFilesTest : public testing::Test {
 protected:
  // A published store of two commits.
  std::unique_ptr<Store> MakeStore(const std::string& pools) const {
    StoreOptions options = QuickOptions();
    options.stripe_weights = {1, 1};
    absl::StatusOr<std::unique_ptr<Store>> store = Store::Create(pools, SmallSpec(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    if (!store.ok()) return nullptr;
    EXPECT_EQ(CommitScript(**store), absl::OkStatus());
    EXPECT_EQ((*store)->CheckFiles(), absl::OkStatus()) << "it is not published";
    EXPECT_EQ((*store)->Publish(), absl::OkStatus());
    EXPECT_EQ(CommitScript(**store), absl::OkStatus());
    EXPECT_EQ((*store)->CheckFiles(), absl::OkStatus());
    return *std::move(store);
  }
  // After a third commit.
  static void ExpectSaved(const std::string& pools) {
    const auto report = CheckStore(pools, "job", {});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->findings.empty());
    const auto store = Store::Open(pools, "job", QuickOptions());
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ(CheckScript(**store, 3), absl::OkStatus());
  }

  TemporaryPool pool_;
  const std::string path_ = pool_.path() + "/job.offload";
};

TEST_F(NamedFilesTest, ARemovedStoreIsToldGoesOnAndIsWrittenAnew) {
  for (const bool is_made : {true, false}) {  // or opened
    SCOPED_TRACE(is_made);
    std::unique_ptr<Store> store = MakeStore(pool_.path());
    ASSERT_NE(store, nullptr);
    if (!is_made) {
      store.reset();
      store = *Store::Open(pool_.path(), "job", QuickOptions());
    }
    std::filesystem::remove(path_);
    const absl::Status told = store->CheckFiles();
    EXPECT_EQ(ErrorIdOf(told), ErrorId::kStoreDamaged);
    EXPECT_NE(told.message().find(absl::StrCat(path_, " was removed")), std::string::npos) << told;
    EXPECT_EQ(CommitScript(*store), absl::OkStatus());
    EXPECT_EQ(store->SaveRemovedFiles(), absl::OkStatus());
    store.reset();
    ExpectSaved(pool_.path());
    EXPECT_EQ(pool_.Files().size(), 1u);
    std::filesystem::remove(path_);
  }
}

TEST_F(NamedFilesTest, AFolderThatIsGoneWithItIsNotMade) {
  for (const bool is_made_again : {false, true}) {
    SCOPED_TRACE(is_made_again);
    std::unique_ptr<Store> store = MakeStore(pool_.path());
    ASSERT_NE(store, nullptr);
    std::filesystem::remove_all(pool_.path());
    const absl::Status told = store->CheckFiles();
    EXPECT_NE(told.message().find(absl::StrCat("Make the folder ", pool_.path(), " again")),
              std::string::npos)
        << told;
    EXPECT_EQ(CommitScript(*store), absl::OkStatus());
    if (is_made_again) std::filesystem::create_directory(pool_.path());
    const absl::Status saved = store->SaveRemovedFiles();
    store.reset();
    EXPECT_EQ(std::filesystem::exists(pool_.path()), is_made_again);
    if (is_made_again) {
      EXPECT_EQ(saved, absl::OkStatus());
      ExpectSaved(pool_.path());
    } else {
      EXPECT_EQ(ErrorIdOf(saved), ErrorId::kPoolMissing);
      std::filesystem::create_directory(pool_.path());
    }
  }
}

TEST_F(NamedFilesTest, OfSeveralPoolsWhatIsRemovedIsWrittenAnew) {
  const TemporaryPool second;
  const std::string pools = absl::StrCat(pool_.path(), ",", second.path());
  const std::string member = second.path() + "/job.offload.member-1";
  for (const std::string& removed : {path_, member}) {
    std::unique_ptr<Store> store = MakeStore(pools);
    ASSERT_NE(store, nullptr);
    std::filesystem::remove(removed);
    EXPECT_NE(store->CheckFiles().message().find(removed), std::string::npos);
    EXPECT_EQ(CommitScript(*store), absl::OkStatus());
    EXPECT_EQ(store->SaveRemovedFiles(), absl::OkStatus());
    store.reset();
    ExpectSaved(pools);
    EXPECT_EQ(RemoveStore(pools, "job"), absl::OkStatus());
  }
}

TEST_F(NamedFilesTest, AnotherFileThatHasTheNameByNowIsLeftAlone) {
  std::unique_ptr<Store> store = MakeStore(pool_.path());
  ASSERT_NE(store, nullptr);
  std::filesystem::remove(path_);
  std::ofstream(path_) << "another";
  EXPECT_EQ(CommitScript(*store), absl::OkStatus());
  EXPECT_EQ(store->SaveRemovedFiles(), absl::OkStatus());
  store.reset();
  EXPECT_EQ(std::filesystem::file_size(path_), 7u);
  std::filesystem::rename(path_ + ".saved", path_);
  ExpectSaved(pool_.path());
}

}  // namespace
}  // namespace offload::swap
