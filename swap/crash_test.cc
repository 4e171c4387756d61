// Real processes, really killed: this binary runs itself as a writer, kills it at a named point or
// at a random moment, and looks at what is left. The writer tells over a pipe what was
// acknowledged, so the oracle outlives it.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "base/unique_fd.h"
#include "swap/fsck.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

constexpr uint64_t kEpochsMax = 400;
constexpr int kPipeFd = 9;  // not standard output, where the log goes

// Commits the script until it is killed; one number per acknowledged commit goes to standard
// output.
int RunWriter(const std::string& pool) {
  auto store = Store::Open(pool, "job", QuickOptions());
  const bool create = !store.ok() && absl::IsNotFound(store.status());
  if (create) store = Store::Create(pool, SmallSpec(), QuickOptions());
  if (!store.ok()) return 1;
  bool published = !create;
  while ((*store)->committed().sequence < kEpochsMax) {
    if (!CommitScript(**store).ok()) return 2;
    if (!published && !(*store)->Publish().ok()) return 3;
    published = true;
    const uint64_t acknowledged = (*store)->committed().sequence;
    if (write(kPipeFd, &acknowledged, sizeof(acknowledged)) != sizeof(acknowledged)) return 4;
  }
  return 0;
}

int RunOpener(const std::string& pool) {
  StoreOptions options = QuickOptions();
  options.lock_timeout_seconds = 0;
  const auto store = Store::Open(pool, "job", options);
  if (!store.ok() && ErrorIdOf(store.status()) != ErrorId::kStoreLocked) return 1;
  if (write(kPipeFd, store.ok() ? "y" : "n", 1) != 1) return 1;
  for (;;) pause();
}

// Of a child: nothing but `fault`, if it is not empty, and where coverage is counted.
std::vector<std::string> EnvironmentOf(const std::string& fault) {
  std::vector<std::string> environment;
  if (!fault.empty()) environment.push_back("OFFLOADD_FAULT_POINT=" + fault);
  if (const char* profile = std::getenv("LLVM_PROFILE_FILE"))
    environment.push_back(std::string("LLVM_PROFILE_FILE=") + profile);
  return environment;
}

// Runs this program anew with `flag` and `pool`, and `to_parent` as kPipeFd.
pid_t Spawn(std::string flag, std::string pool, const std::string& fault, int to_parent) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_parent, kPipeFd);
  std::string self = "/proc/self/exe";
  char* arguments[] = {self.data(), flag.data(), pool.data(), nullptr};
  std::vector<std::string> environment = EnvironmentOf(fault);
  std::vector<char*> pointers;
  for (std::string& each : environment) pointers.push_back(each.data());
  pointers.push_back(nullptr);
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, self.c_str(), &actions, nullptr, arguments, pointers.data()), 0);
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

class Writer {
 public:
  Writer(const std::string& pool, const std::string& fault_point, std::string flag = "--writer") {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    from_child_.reset(ends[0]);
    const UniqueFd to_parent(ends[1]);
    pid_ = Spawn(std::move(flag), pool, fault_point, to_parent.get());
  }
  ~Writer() {
    if (pid_ > 0) Kill();
  }
  // Waits for one more acknowledgement; false when the writer has ended.
  bool WaitForAcknowledgement() {
    uint64_t sequence;
    if (read(from_child_.get(), &sequence, sizeof(sequence)) != sizeof(sequence)) return false;
    acknowledged_ = sequence;
    return true;
  }
  void Kill() {
    kill(pid_, SIGKILL);
    Join();
  }
  // Reads what was acknowledged to the end and reaps.
  int Join() {
    while (WaitForAcknowledgement()) {
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  uint64_t acknowledged() const { return acknowledged_; }

 private:
  pid_t pid_ = -1;
  UniqueFd from_child_;
  uint64_t acknowledged_ = 0;
};

// A process that tries to open the store at once, says whether it has, and holds it until it is
// killed.
class Opener {
 public:
  explicit Opener(const std::string& pool) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    from_child_.reset(ends[0]);
    const UniqueFd to_parent(ends[1]);
    pid_ = Spawn("--opener", pool, /*fault=*/"", to_parent.get());
  }
  ~Opener() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  // True when it owns the store; waits for its answer.
  bool Outcome() {
    char answer = 0;
    EXPECT_EQ(read(from_child_.get(), &answer, 1), 1);
    return answer == 'y';
  }

 private:
  pid_t pid_ = -1;
  UniqueFd from_child_;
};

// A whole epoch is there: the last acknowledged one or the one in flight.
// Nothing is called damaged, although at most the second superblock is behind.
void ExpectWholeEpoch(const std::string& pool, uint64_t acknowledged) {
  FsckOptions waits;  // until the kernel has let go of the killed one's lock
  waits.store.lock_timeout_seconds = 30;
  const auto report = CheckStore(pool, "job", waits);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->is_clean()) << report->findings.front().what;
  EXPECT_LE(report->findings.size(), 1u);
  const auto listed = ListStores(pool);
  ASSERT_TRUE(listed.ok() && listed->size() == 1u);
  EXPECT_EQ(listed->front().damage, absl::OkStatus());
  const auto store = Store::Open(pool, "job", QuickOptions());
  ASSERT_TRUE(store.ok()) << store.status();
  const uint64_t found = (*store)->committed().sequence;
  EXPECT_TRUE(found == acknowledged || found == acknowledged + 1)
      << found << " after " << acknowledged;
  EXPECT_EQ(CheckScript(**store, found), absl::OkStatus());
  EXPECT_TRUE((*store)->repairs().empty()) << (*store)->repairs().front();
}

// Makes a snapshot of the first commit, growing for it, and deletes it after another commit.
int RunKeeper(const std::string& pool) {
  const auto store = Store::Open(pool, "job", QuickOptions());
  if (!store.ok()) return 1;
  const auto run = [&](const std::function<void(Store::Done)>& start) {
    std::optional<absl::Status> result;
    start([&](absl::Status status) { result = std::move(status); });
    while (!result) (*store)->Poll(/*wait=*/true);
    return result->ok();
  };
  const bool kept = run([&](auto done) { (*store)->Grow(nullptr, std::move(done)); }) &&
                    run([&](auto done) { (*store)->CreateSnapshot("kept", 1, std::move(done)); }) &&
                    CommitScript(**store).ok();
  return kept && run([&](auto done) { (*store)->DeleteSnapshot("kept", std::move(done)); }) ? 0 : 2;
}

bool WasKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

TEST(CrashTest, AKillAtEachPointOfACommitLeavesAWholeEpoch) {
  TemporaryPool pool;
  uint64_t at_least = 0;
  for (const char* point :
       {"store.after_data_flush", "store.after_table", "store.after_first_superblock",
        "store.after_superblocks", "store.after_commit"}) {
    for (int count : {2, 3, 5}) {  // the store goes on from what the kill before left
      Writer writer(pool.path(), absl::StrCat(point, ":", count));
      EXPECT_TRUE(WasKilled(writer.Join())) << point;
      EXPECT_GT(writer.acknowledged(), at_least) << point;
      at_least = writer.acknowledged();
      ExpectWholeEpoch(pool.path(), at_least);
      if (testing::Test::HasFailure()) FAIL() << point << ":" << count;
    }
  }
}

TEST(CrashTest, AKillAtEachPointOfAFormatLeavesNoStoreOrAWholeOne) {
  for (const char* point : {"store.format_allocated", "store.format_zeroed", "store.formatted",
                            "store.after_data_flush", "store.after_superblocks",
                            "store.before_publish", "store.after_rename"}) {
    TemporaryPool pool;
    Writer writer(pool.path(), absl::StrCat(point, ":1"));
    EXPECT_TRUE(WasKilled(writer.Join())) << point;
    EXPECT_EQ(pool.Files().size(), 1u) << point;
    const auto store = Store::Open(pool.path(), "job", QuickOptions());
    const bool named = std::strcmp(point, "store.after_rename") == 0;
    EXPECT_EQ(store.ok(), named) << point << ": " << store.status();
    if (store.ok()) {
      EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
    } else {
      EXPECT_TRUE(absl::IsNotFound(store.status())) << store.status();
      // Waits, if it must, until the kernel has let go of the killed one's lock.
      EXPECT_TRUE(Store::Create(pool.path(), SmallSpec(), QuickOptions()).ok());
      EXPECT_TRUE(pool.Files().empty()) << point;
    }
  }
}

TEST(CrashTest, AKillWhileASnapshotIsMadeOrDeletedLeavesTheStateBeforeOrAfter) {
  // Of the three commits: that of the snapshot, that of the script, that of its deletion.
  for (const char* point :
       {"store.growth_allocated:1", "store.growth_formatted:1", "store.after_snapshot_table:1",
        "store.after_table:1", "store.after_first_superblock:1", "store.after_commit:1",
        "store.after_data_flush:2", "store.after_first_superblock:2", "store.after_table:3",
        "store.after_first_superblock:3", "store.after_commit:3"}) {
    TemporaryPool pool;
    {
      auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
      ASSERT_TRUE(store.ok() && CommitScript(**store).ok() && (*store)->Publish().ok());
    }
    const std::string path = pool.path() + "/job.offload";
    const uint64_t before = std::filesystem::file_size(path);
    Writer keeper(pool.path(), point, "--keeper");
    EXPECT_TRUE(WasKilled(keeper.Join())) << point;
    auto store = Store::Open(pool.path(), "job", QuickOptions());
    ASSERT_TRUE(store.ok()) << point << ": " << store.status();
    const uint64_t sequence = (*store)->committed().sequence;
    EXPECT_EQ(std::filesystem::file_size(path),
              before + (*store)->generation_count() * (*store)->generation_bytes())
        << point;
    EXPECT_EQ((*store)->snapshots().size(), sequence == 2 || sequence == 3 ? 1u : 0u) << point;
    if (sequence == 1) {
      EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus()) << point;
    }
    if ((*store)->snapshots().empty()) continue;
    auto kept = Store::OpenSnapshot(pool.path(), "job", "kept", QuickOptions());
    ASSERT_TRUE(kept.ok()) << point << ": " << kept.status();
    EXPECT_EQ(CheckScript(**kept, 1), absl::OkStatus()) << point;
  }
}

// Over two pools, at each point and each time it is reached.
TEST(CrashTest, AKillDuringAFormatOverTwoPoolsLeavesNoStoreOrAWholeOne) {
  for (const char* point :
       {"store.member_page:1", "store.members_made:1", "store.format_allocated:1",
        "store.format_zeroed:1", "store.formatted:1", "store.before_publish:1",
        "store.after_member_rename:1", "store.after_member_rename:2", "store.after_rename:1"}) {
    TemporaryPool first, second, third;
    const std::string pools = absl::StrCat(first.path(), ",", second.path(), ",", third.path());
    Writer writer(pools, point);
    EXPECT_TRUE(WasKilled(writer.Join())) << point;
    const auto store = Store::Open(pools, "job", QuickOptions());
    const bool named = std::strcmp(point, "store.after_rename:1") == 0;
    EXPECT_EQ(store.ok(), named) << point << ": " << store.status();
    if (store.ok()) {
      EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
      continue;
    }
    EXPECT_TRUE(absl::IsNotFound(store.status()) && !ErrorIdOf(store.status()).has_value())
        << point << ": " << store.status();
    EXPECT_TRUE(Store::Create(pools, SmallSpec(), QuickOptions()).ok()) << point;
    EXPECT_TRUE(first.Files().empty() && second.Files().empty() && third.Files().empty()) << point;
  }
}

TEST(CrashTest, WhatAKilledFormatLeftInAPoolThatIsGoneIsRemovedWhenItIsBack) {
  TemporaryPool first, second;
  const std::string pools = absl::StrCat(first.path(), ",", second.path());
  {
    Writer writer(pools, "store.after_member_rename:1");
    EXPECT_TRUE(WasKilled(writer.Join()));
  }
  const std::string away = second.path() + ".away";
  std::filesystem::rename(second.path(), away);
  // Create waits, if it must, until the kernel has let go of the killed one's lock.
  EXPECT_TRUE(Store::Create(first.path(), SmallSpec(), QuickOptions()).ok());
  ASSERT_EQ(first.Files().size(), 1u) << "what leads to the rest is kept";
  EXPECT_EQ(std::filesystem::file_size(first.path() + "/" + first.Files()[0]), 8192u);
  std::filesystem::rename(away, second.path());
  EXPECT_TRUE(absl::IsNotFound(Store::Open(pools, "job", QuickOptions()).status()));
  EXPECT_TRUE(first.Files().empty() && second.Files().empty());
}

TEST(CrashTest, AKillAtARandomMomentOverTwoPoolsLeavesAWholeEpoch) {
  const uint64_t seed = static_cast<uint64_t>(getpid()) + 1;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  TemporaryPool first, second;
  const std::string pools = absl::StrCat(first.path(), ",", second.path());
  for (int kills = 0; kills < 8; ++kills) {
    Writer writer(pools, "");
    for (uint64_t epochs = 1 + random.Below(4); epochs > 0; --epochs)
      ASSERT_TRUE(writer.WaitForAcknowledgement());
    usleep(static_cast<useconds_t>(random.Below(4000)));
    writer.Kill();
    ExpectWholeEpoch(pools, writer.acknowledged());
    if (testing::Test::HasFailure()) FAIL() << "kill " << kills;
  }
}

// reliability.md, P11: whoever starts at the same moment, exactly one owns the store.
TEST(CrashTest, OfAHundredDoubleStartsExactlyOneOwnsTheStore) {
  TemporaryPool pool;
  {
    auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
    ASSERT_TRUE(store.ok() && CommitScript(**store).ok() && (*store)->Publish().ok());
  }
  const std::string path = pool.path() + "/job.offload";
  for (int start = 0; start < 100; ++start) {
    {  // the kernel lets go of a killed one's lock only when its ring is gone
      const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
      ASSERT_EQ(flock(file.get(), LOCK_EX), 0);
    }
    Opener first(pool.path()), second(pool.path());
    const bool first_owns = first.Outcome(), second_owns = second.Outcome();
    ASSERT_NE(first_owns, second_owns) << "start " << start;
  }
}

TEST(CrashTest, AKillAtARandomMomentLeavesAWholeEpoch) {
  const uint64_t seed = static_cast<uint64_t>(getpid());
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  TemporaryPool pool;
  for (int kills = 0; kills < 15; ++kills) {
    Writer writer(pool.path(), "");
    for (uint64_t epochs = 1 + random.Below(5); epochs > 0; --epochs)
      ASSERT_TRUE(writer.WaitForAcknowledgement());
    usleep(static_cast<useconds_t>(
        random.Below(4000)));  // any moment will do: what is checked does not depend on it
    writer.Kill();
    ExpectWholeEpoch(pool.path(), writer.acknowledged());
    if (testing::Test::HasFailure()) FAIL() << "kill " << kills;
  }
}

TEST(CrashTest, OfTwoThatOpenAtOnceOneWins) {
  TemporaryPool pool;
  {
    auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
    ASSERT_TRUE(store.ok() && CommitScript(**store).ok() && (*store)->Publish().ok());
  }
  Writer first(pool.path(), "");
  ASSERT_TRUE(first.WaitForAcknowledgement());
  StoreOptions impatient = QuickOptions();
  impatient.lock_timeout_seconds = 0.2;
  const auto second = Store::Open(pool.path(), "job", impatient);
  EXPECT_EQ(ErrorIdOf(second.status()), ErrorId::kStoreLocked) << second.status();
  first.Kill();
  ExpectWholeEpoch(pool.path(), first.acknowledged());
}

}  // namespace
}  // namespace offload::swap

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--writer") == 0) return offload::swap::RunWriter(argv[2]);
  if (argc == 3 && std::strcmp(argv[1], "--opener") == 0) return offload::swap::RunOpener(argv[2]);
  if (argc == 3 && std::strcmp(argv[1], "--keeper") == 0) return offload::swap::RunKeeper(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
