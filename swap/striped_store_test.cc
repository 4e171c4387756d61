// Stores over several pools: their files, and what is refused.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "swap/fork.h"
#include "swap/fsck.h"
#include "swap/member_page.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

namespace fs = std::filesystem;

class StripedStoreTest : public testing::Test {
 protected:
  std::string Pools() const { return absl::StrCat(first_.path(), ",", second_.path()); }
  static StoreOptions Options() {
    StoreOptions options = QuickOptions();
    options.lock_timeout_seconds = 0.3;
    options.stripe_weights = {1, 2};
    return options;
  }
  void MakeStore(const std::string& pools, uint64_t commits, const std::string& job = "job") {
    auto store = Store::Create(pools, SmallSpec(job), Options());
    ASSERT_TRUE(store.ok()) << store.status();
    for (uint64_t i = 0; i < commits; ++i) ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ((*store)->Publish(), absl::OkStatus());
  }
  absl::Status OpenStatus(const std::string& pools) const {
    return Store::Open(pools, "job", Options()).status();
  }
  void ExpectRefused(const std::string& pools, std::string_view named) const {
    const absl::Status status = OpenStatus(pools);
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolsDiffer) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), std::string(named))) << status;
  }
  std::string Main() const { return first_.path() + "/job.offload"; }
  std::string Member() const { return second_.path() + "/job.offload.member-1"; }

  TemporaryPool first_, second_;
};

TEST_F(StripedStoreTest, CommittedEpochsSurviveReopeningOverTwoPools) {
  MakeStore(Pools(), 1);
  for (uint64_t sequence = 1; sequence <= 4; ++sequence) {
    auto store = Store::Open(Pools(), "job", Options());
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ(CheckScript(**store, sequence), absl::OkStatus());
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    EXPECT_EQ(CheckScript(**store, sequence + 1), absl::OkStatus());
  }
  EXPECT_EQ(first_.Files(), std::vector<std::string>{"job.offload"});
  EXPECT_EQ(second_.Files(), std::vector<std::string>{"job.offload.member-1"});
  // The places, of which two thirds lie on the second, but for one unit.
  const auto places_bytes = static_cast<int64_t>(FormattedBytes(SmallSpec()));
  EXPECT_GT(fs::file_size(Member()), kMemberHeadBytes);
  EXPECT_EQ(static_cast<int64_t>(fs::file_size(Main()) + fs::file_size(Member())),
            places_bytes + static_cast<int64_t>(2 * kMemberHeadBytes));
}

TEST_F(StripedStoreTest, MeasuresThePoolsWhenNoWeightsAreGivenAndKeepsWhatItDecided) {
  StoreOptions options = Options();
  options.stripe_weights.clear();
  {
    auto store = Store::Create(Pools(), SmallSpec(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ((*store)->Publish(), absl::OkStatus());
  }
  auto store = Store::Open(Pools(), "job", options);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
}

TEST_F(StripedStoreTest, ListKnowsThePoolsAndRemoveClearsAllOfThem) {
  MakeStore(Pools(), 2);
  const auto stores = ListStores(first_.path());
  ASSERT_TRUE(stores.ok());
  ASSERT_EQ(stores->size(), 1u);
  EXPECT_EQ(stores->front().damage, absl::OkStatus());
  EXPECT_EQ(stores->front().committed.sequence, 2u);
  EXPECT_EQ(stores->front().file_bytes, FormattedBytes(SmallSpec()));
  EXPECT_EQ(stores->front().pools.size(), 2u);
  EXPECT_TRUE(ListStores(second_.path())->empty()) << "a member is no job";
  EXPECT_EQ(RemoveStore(first_.path(), "job"), absl::OkStatus());
  EXPECT_TRUE(first_.Files().empty());
  EXPECT_TRUE(second_.Files().empty());
}

TEST_F(StripedStoreTest, KeepsSnapshotsInSpareGenerationsAndForksThemAndCannotGrow) {
  StoreOptions options = Options();
  options.generations = 1;
  const auto snapshot = [](Store& store, const std::string& name) {
    return RunToEnd(store,
                    [&](Store::Done done) { store.CreateSnapshot(name, 0, std::move(done)); });
  };
  {
    auto store = Store::Create(Pools(), SmallSpec(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ((*store)->Publish(), absl::OkStatus());
    ASSERT_EQ(snapshot(**store, "kept"), absl::OkStatus());
    const absl::Status grown =
        RunToEnd(**store, [&](Store::Done done) { (*store)->Grow(nullptr, std::move(done)); });
    EXPECT_EQ(ErrorIdOf(grown), ErrorId::kSnapshot);
    EXPECT_NE(grown.message().find("over several pools"), absl::string_view::npos) << grown;
    EXPECT_FALSE((*store)->failed());
    EXPECT_EQ(ErrorIdOf(snapshot(**store, "another")), ErrorId::kSnapshot);
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
  }
  const auto stores = ListStores(first_.path());
  ASSERT_TRUE(stores.ok() && stores->size() == 1);
  EXPECT_EQ(stores->front().damage, absl::OkStatus());
  ASSERT_EQ(stores->front().snapshots.size(), 1u);
  EXPECT_EQ(stores->front().snapshots[0].damage, absl::OkStatus());

  auto kept = Store::OpenSnapshot(Pools(), "job", "kept", Options());
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(CheckScript(**kept, 1), absl::OkStatus());
  ASSERT_EQ(Fork(**kept, first_.path(), "fork", QuickOptions()), absl::OkStatus());
  auto fork = Store::Open(first_.path(), "fork", QuickOptions());
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ((*fork)->committed().epoch, EpochOf(1));
}

TEST_F(StripedStoreTest, AMissingPoolIsNamedAndNothingIsMadeInItsPlace) {
  MakeStore(Pools(), 1);
  const std::string away = second_.path() + ".away";
  fs::rename(second_.path(), away);
  EXPECT_EQ(ErrorIdOf(OpenStatus(Pools())), ErrorId::kPoolMissing);
  EXPECT_FALSE(ListStores(first_.path())->front().damage.ok());
  EXPECT_EQ(ErrorIdOf(RemoveStore(first_.path(), "job")), ErrorId::kPoolsDiffer);
  fs::create_directory(second_.path());  // the mount point without its drive
  ExpectRefused(Pools(), absl::StrCat("pool ", second_.path(), " does not hold"));
  fs::remove(second_.path());
  fs::rename(away, second_.path());
  EXPECT_EQ(OpenStatus(Pools()), absl::OkStatus());
}

TEST_F(StripedStoreTest, AFirstPoolThatIsNotMountedDoesNotLookLikeANewJob) {
  MakeStore(Pools(), 1);
  fs::rename(Main(), first_.path() + "/elsewhere");
  ExpectRefused(Pools(), "job.offload.member-1 is a member of a store");
  EXPECT_EQ(ErrorIdOf(Store::Create(Pools(), SmallSpec(), Options()).status()),
            ErrorId::kPoolsDiffer);
  EXPECT_EQ(ErrorIdOf(Store::Create(second_.path(), SmallSpec(), Options()).status()),
            ErrorId::kPoolsDiffer);
  EXPECT_TRUE(fs::exists(Member()));
  EXPECT_EQ(first_.Files(), std::vector<std::string>{"elsewhere"});
}

TEST_F(StripedStoreTest, OtherPoolsThanTheJobWasMadeWithAreRefusedWithTheRightOnes) {
  MakeStore(Pools(), 1);
  TemporaryPool third;
  ExpectRefused(first_.path(), "name its pools in that order");
  ExpectRefused(absl::StrCat(second_.path(), ",", first_.path()), "is a member of a store");
  ExpectRefused(absl::StrCat(first_.path(), ",", third.path()), third.path());
  ExpectRefused(absl::StrCat(Pools(), ",", third.path()), "lies in 2 pools");
  MakeStore(third.path(), 1);
  ExpectRefused(absl::StrCat(third.path(), ",", first_.path()), "alone");
  EXPECT_EQ(ErrorIdOf(OpenStatus(absl::StrCat(first_.path(), ",", first_.path()))),
            ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(OpenStatus(first_.path() + ",")), ErrorId::kBadValue);
}

TEST_F(StripedStoreTest, SwappedMembersAndMembersOfOtherStoresAreRefused) {
  TemporaryPool third;
  StoreOptions options = Options();
  options.stripe_weights = {1, 1, 1};
  const std::string pools = absl::StrCat(Pools(), ",", third.path());
  {
    auto store = Store::Create(pools, SmallSpec(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ((*store)->Publish(), absl::OkStatus());
  }
  const std::string other = third.path() + "/job.offload.member-2";
  fs::rename(Member(), Member() + ".kept");
  fs::rename(other, Member());
  fs::rename(Member() + ".kept", other);
  ExpectRefused(pools, "is member 2 of 3, not 1 of 3");
  fs::rename(Member(), Member() + ".kept");
  fs::rename(other, Member());
  fs::rename(Member() + ".kept", other);
  EXPECT_EQ(OpenStatus(pools), absl::OkStatus());

  TemporaryPool fourth, fifth;
  const std::string strange = absl::StrCat(fourth.path(), ",", fifth.path());
  MakeStore(strange, 1);
  fs::copy_file(fifth.path() + "/job.offload.member-1", Member(),
                fs::copy_options::overwrite_existing);
  ExpectRefused(pools, "is of another store");
}

TEST_F(StripedStoreTest, AMemberFromAnotherTimeIsRefused) {
  MakeStore(Pools(), 1);
  fs::copy_file(Member(), second_.path() + "/old");
  fs::copy_file(Main(), first_.path() + "/old");
  {
    auto store = Store::Open(Pools(), "job", Options());
    ASSERT_TRUE(store.ok());
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
  }
  fs::rename(Member(), second_.path() + "/new");
  fs::copy_file(second_.path() + "/old", Member());
  ExpectRefused(Pools(), "is of another time");
  fs::rename(second_.path() + "/new", Member());
  EXPECT_EQ(OpenStatus(Pools()), absl::OkStatus());
  fs::copy_file(first_.path() + "/old", Main(), fs::copy_options::overwrite_existing);
  ExpectRefused(Pools(), "is of another time");
  fs::copy_file(second_.path() + "/old", Member(), fs::copy_options::overwrite_existing);
  EXPECT_EQ(OpenStatus(Pools()), absl::OkStatus()) << "copies of all members fit each other";
}

TEST_F(StripedStoreTest, AnyMembersLockKeepsOthersOut) {
  MakeStore(Pools(), 1);
  const UniqueFd holder(open(Member().c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(holder.get(), LOCK_EX), 0);
  EXPECT_EQ(ErrorIdOf(OpenStatus(Pools())), ErrorId::kStoreLocked);
  EXPECT_EQ(ErrorIdOf(RemoveStore(first_.path(), "job")), ErrorId::kStoreLocked);
  ASSERT_EQ(flock(holder.get(), LOCK_UN), 0);
  EXPECT_EQ(OpenStatus(Pools()), absl::OkStatus());
}

TEST_F(StripedStoreTest, AMemberThatIsTooShortOrHasMoreNamesIsRefused) {
  MakeStore(Pools(), 1);
  fs::create_hard_link(Member(), second_.path() + "/link");
  EXPECT_EQ(ErrorIdOf(OpenStatus(Pools())), ErrorId::kPoolNotUsable);
  fs::remove(second_.path() + "/link");
  fs::resize_file(Member(), fs::file_size(Member()) - 4096);
  EXPECT_EQ(ErrorIdOf(OpenStatus(Pools())), ErrorId::kStoreDamaged);
}

TEST_F(StripedStoreTest, OneDamagedCopyOfAMemberPageIsEnoughToOpen) {
  MakeStore(Pools(), 1);
  for (const std::string& path : {Main(), Member()}) {
    for (const uint64_t copy : {0, 1}) {
      const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
      ASSERT_EQ(pwrite(file.get(), "x", 1, static_cast<off_t>(copy * 4096 + 50)), 1);
      ASSERT_EQ(fsync(file.get()), 0);
      EXPECT_EQ(OpenStatus(Pools()), absl::OkStatus());  // which writes both again
    }
  }
}

TEST_F(StripedStoreTest, FsckReadsAllMembersAndSaysWhichExtentsOneLost) {
  MakeStore(Pools(), 1);
  FsckOptions options;
  const auto clean = CheckStore(Pools(), "job", options);
  ASSERT_TRUE(clean.ok()) << clean.status();
  EXPECT_TRUE(clean->is_clean());
  const UniqueFd file(open(Member().c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(pwrite(file.get(), "lost", 4, static_cast<off_t>(kMemberHeadBytes + 10)), 4);
  ASSERT_EQ(fsync(file.get()), 0);
  const auto damaged = CheckStore(Pools(), "job", options);
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  EXPECT_TRUE(damaged->has_loss());
}

TEST_F(StripedStoreTest, AFormatThatIsGivenUpLeavesNothingInAnyPool) {
  bool ended = false;
  for (uint64_t stop_at = 0; !ended; ++stop_at) {  // also the one that ends and is not published
    StoreOptions options = Options();
    options.stripe_weights.clear();
    uint64_t asked = 0;
    options.cancelled = [&] { return ++asked > stop_at; };
    ended = Store::Create(Pools(), SmallSpec(), options).ok();
    EXPECT_TRUE(first_.Files().empty());
    EXPECT_TRUE(second_.Files().empty());
    EXPECT_TRUE(!ended || stop_at > 2);
  }
}

// A small file system in a file; needs root.
class SmallFileSystem {
 public:
  explicit SmallFileSystem(const TemporaryPool& where)
      : image_(where.path() + "/image"), path_(where.path() + "/mount") {
    fs::create_directory(path_);
    const std::string make = absl::StrCat("truncate -s 24M '", image_, "' && mkfs.ext4 -q -F '",
                                          image_, "' >/dev/null 2>&1 && ", "mount -o loop '",
                                          image_, "' '", path_, "' >/dev/null 2>&1");
    mounted_ = geteuid() == 0 && std::system(make.c_str()) == 0;
  }
  ~SmallFileSystem() {
    if (mounted_ && std::system(absl::StrCat("umount '", path_, "'").c_str()) != 0)
      ADD_FAILURE() << "umount " << path_;
  }
  bool mounted() const { return mounted_; }
  const std::string& path() const { return path_; }

 private:
  std::string image_, path_;
  bool mounted_ = false;
};

TEST_F(StripedStoreTest, APoolThatIsTooSmallIsNamedAndNothingIsLeftInAnyPool) {
  TemporaryPool where;
  const SmallFileSystem small(where);
  if (!small.mounted()) GTEST_SKIP() << "a loop file system cannot be mounted (needs root)";
  StoreSpec spec = SmallSpec();
  spec.tensors = {{uint64_t{32768} * 200, {{Plane::kWeight, 32}}}};  // 2 × 26 MB of places
  const auto files_of = [](const std::string& pool) {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(pool))
      count += entry.path().filename() != "lost+found";
    return count;
  };
  for (const std::string& pools : {absl::StrCat(first_.path(), ",", small.path()),
                                   absl::StrCat(small.path(), ",", first_.path()), small.path()}) {
    for (const bool measured : {false, true}) {
      StoreOptions options = Options();
      options.stripe_weights = {1, 1};
      if (measured) options.stripe_weights.clear();
      const absl::Status status = Store::Create(pools, spec, options).status();
      EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), small.path())) << status;
      EXPECT_TRUE(first_.Files().empty());
      EXPECT_EQ(files_of(small.path()), 0u);
    }
  }
  EXPECT_TRUE(Store::Create(small.path(), SmallSpec(), Options()).ok()) << "what fits still does";
}

// Rewrites both copies of a file's member page, under good checksums.
void EditPage(const std::string& path, const std::function<void(MemberPage*)>& edit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  for (uint32_t copy = 0; copy < kMemberPageCopies; ++copy) {
    MemberPage page;
    file.seekg(copy * kPageBytes);
    file.read(reinterpret_cast<char*>(&page), sizeof(page));
    edit(&page);
    if (page.prefix.magic != 0) SealMemberPage(&page);
    file.seekp(copy * kPageBytes);
    file.write(reinterpret_cast<const char*>(&page), sizeof(page));
  }
  EXPECT_TRUE(file.good());
}

TEST_F(StripedStoreTest, MemberPagesThatContradictTheStoresAreRefused) {
  MakeStore(Pools(), 1);
  const auto refusal = [&](const std::string& path, const std::function<void(MemberPage*)>& edit) {
    const std::string saved = path + ".saved";
    fs::copy_file(path, saved);
    EditPage(path, edit);
    const absl::Status status = OpenStatus(Pools());
    fs::rename(saved, path);
    fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
    return ErrorIdOf(status);
  };
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { *page = {}; }), ErrorId::kStoreDamaged);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->uuid[3] ^= 1; }), ErrorId::kPoolsDiffer);
  EXPECT_EQ(refusal(Member(),
                    [](MemberPage* page) {
                      page->member_count = 3;
                      page->weights[2] = 1;
                      std::vector<std::string> paths = PathsOf(*page);
                      paths.push_back("/third");
                      EXPECT_EQ(SetPaths(paths, page), absl::OkStatus());
                    }),
            ErrorId::kPoolsDiffer);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->age += 1; }), ErrorId::kPoolsDiffer);
  EXPECT_EQ(refusal(Main(),
                    [](MemberPage* page) {
                      page->opening = 1;
                      page->age += 2;
                    }),
            ErrorId::kPoolsDiffer);
  EXPECT_EQ(refusal(Main(), [](MemberPage* page) { page->member = 1; }), ErrorId::kPoolsDiffer);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->weights[1] = 3; }),
            ErrorId::kStoreDamaged);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->head_bytes += kPageBytes; }),
            ErrorId::kStoreDamaged);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->unit_bytes *= 2; }),
            ErrorId::kStoreDamaged);
  EXPECT_EQ(refusal(Member(), [](MemberPage* page) { page->store_bytes -= kPageBytes; }),
            ErrorId::kStoreDamaged);
  const auto store = Store::Open(Pools(), "job", Options());
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
}

TEST_F(StripedStoreTest, AMainFileThatWasCutOffIsDamaged) {
  MakeStore(Pools(), 1);
  fs::resize_file(Main(), fs::file_size(Main()) / 2);
  EXPECT_EQ(ErrorIdOf(OpenStatus(Pools())), ErrorId::kStoreDamaged);
}

TEST_F(StripedStoreTest, RemoveLeavesFilesOfOthersThatStandInAMembersPlace) {
  for (const bool is_member : {false, true}) {
    MakeStore(Pools(), 1);
    EditPage(Member(), [&](MemberPage* page) {
      page->uuid[0] ^= 1;
      if (!is_member) *page = {};
    });
    EXPECT_EQ(RemoveStore(Pools(), "job"), absl::OkStatus());
    EXPECT_TRUE(first_.Files().empty());
    EXPECT_EQ(second_.Files(), std::vector<std::string>{"job.offload.member-1"});
    // And nothing is made over it.
    EXPECT_EQ(ErrorIdOf(Store::Create(Pools(), SmallSpec(), Options()).status()),
              ErrorId::kPoolsDiffer);
    fs::remove(Member());
  }
}

TEST_F(StripedStoreTest, MoreThanSixteenPoolsAreRefused) {
  std::string pools;
  for (int i = 0; i <= 16; ++i) {
    const std::string pool = absl::StrCat(first_.path(), "/", i);
    fs::create_directory(pool);
    absl::StrAppend(&pools, i == 0 ? "" : ",", pool);
  }
  EXPECT_EQ(ErrorIdOf(Store::Create(pools, SmallSpec(), Options()).status()), ErrorId::kBadValue);
  EXPECT_TRUE(fs::is_empty(first_.path() + "/0"));
}

}  // namespace
}  // namespace offload::swap
