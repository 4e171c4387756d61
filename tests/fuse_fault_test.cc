// The store over the real I/O engines, on a file system whose calls fail when they are told to.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "spdlog/spdlog.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

// The file system in a process of its own, told what to do over a pipe.
class FaultFs {
 public:
  FaultFs(const std::string& folder, const std::string& mount_point) : mount_point_(mount_point) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
    const UniqueFd child_in(in[0]), child_out(out[1]);
    to_.reset(in[1]);
    from_.reset(out[0]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, child_in.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, child_out.get(), STDOUT_FILENO);
    std::string program = std::getenv("FAULT_FS"), source = folder, target = mount_point;
    char* arguments[] = {program.data(), source.data(), target.data(), nullptr};
    if (posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
  }
  ~FaultFs() {
    to_.reset();
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  bool ready() { return pid_ > 0 && ReadLine() == "ready"; }

  // Arms a fault in place of the one before, and returns how often that was met.
  int64_t Tell(const std::string& order) {
    const std::string line = order + "\n";
    EXPECT_TRUE(WriteFully(to_.get(), std::as_bytes(std::span(line))).ok());
    return std::atoll(ReadLine().c_str());
  }
  int64_t Clear() { return Tell("clear"); }

 private:
  std::string ReadLine() {
    std::string line;
    for (char byte; read(from_.get(), &byte, 1) == 1 && byte != '\n';) line += byte;
    return line;
  }
  const std::string mount_point_;
  pid_t pid_ = -1;
  UniqueFd to_, from_;
};

class FuseFaultTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "not root";
    if (!UniqueFd(open("/dev/fuse", O_RDWR | O_CLOEXEC)).valid())
      GTEST_SKIP() << "/dev/fuse: " << ErrnoText(errno);
    std::filesystem::create_directory(Folder());
    std::filesystem::create_directory(Mounted());
    file_system_ = std::make_unique<FaultFs>(Folder(), Mounted());
    if (!file_system_->ready()) GTEST_SKIP() << "FUSE cannot be mounted here";
    pool_ = Mounted() + "/pool";
    std::filesystem::create_directory(pool_);
    std::filesystem::permissions(pool_, std::filesystem::perms::owner_all);
    setenv("OFFLOADD_IO", GetParam(), /*replace=*/1);
    auto store = Store::Create(pool_, SmallSpec(), QuickOptions());
    if (ErrorIdOf(store.status()) == ErrorId::kBadValue)
      GTEST_SKIP() << "this build has no engine " << GetParam();
    if (ErrorIdOf(store.status()) == ErrorId::kEngineUnavailable)
      GTEST_SKIP() << store.status().message();
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    ASSERT_EQ(store_->device().engine(), GetParam());
    ASSERT_EQ(CommitScript(*store_), absl::OkStatus());
    ASSERT_EQ(store_->Publish(), absl::OkStatus());
  }
  void TearDown() override {
    store_.reset();
    unsetenv("OFFLOADD_IO");
    file_system_.reset();
    std::error_code error;
    EXPECT_TRUE(std::filesystem::remove(Mounted(), error)) << "left mounted: " << error.message();
  }

  std::string Folder() const { return base_.path() + "/folder"; }
  std::string Mounted() const { return base_.path() + "/mounted"; }
  absl::Status Reopen() {
    store_.reset();
    auto store = Store::Open(pool_, "job", QuickOptions());
    if (store.ok()) store_ = *std::move(store);
    return store.status();
  }
  // Two commits after a reopening, and all is read.
  absl::Status Script(uint64_t* acked, uint64_t* pending) {
    OFFLOAD_RETURN_IF_ERROR(Reopen());
    for (int commits = 0; commits < 2; ++commits) {
      *pending = *acked + 1;
      OFFLOAD_RETURN_IF_ERROR(CommitScript(*store_));
      *acked = *pending;
    }
    return CheckScript(*store_, *acked);
  }
  void ExpectFailedForGood(uint64_t committed) {
    EXPECT_TRUE(store_->failed());
    EXPECT_EQ(ErrorIdOf(WriteScript(*store_)), ErrorId::kStoreFailed);
    const absl::Status commit = CommitNow(*store_, EpochOf(committed + 1), "");
    EXPECT_EQ(ErrorIdOf(commit), ErrorId::kStoreFailed) << commit;
    EXPECT_EQ(store_->committed().sequence, committed);
  }

  TemporaryPool base_;
  std::string pool_;
  std::unique_ptr<FaultFs> file_system_;
  std::unique_ptr<Store> store_;
};

std::string Eio(const char* kind, int nth, int times) {
  return absl::StrCat(kind, " ", nth, " ", EIO, " ", times);
}

TEST_P(FuseFaultTest, AReadThatFailsOnceLosesNothing) {
  file_system_->Tell(Eio("read", 1, 1));
  const absl::Status first = CheckScript(*store_, 1);
  EXPECT_TRUE(first.ok() || absl::IsDataLoss(first)) << first;
  EXPECT_EQ(file_system_->Clear(), 1);
  EXPECT_FALSE(store_->failed());
  EXPECT_EQ(CheckScript(*store_, 1), absl::OkStatus());
  EXPECT_EQ(CommitScript(*store_), absl::OkStatus());
}

TEST_P(FuseFaultTest, ReadsThatFailForEverAreLossesAndCommitsGoOn) {
  file_system_->Tell(Eio("read", 1, -1));
  const absl::Status lost = CheckScript(*store_, 1);
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  EXPECT_EQ(ErrorIdOf(lost), ErrorId::kIo) << lost;
  EXPECT_FALSE(store_->failed());
  EXPECT_EQ(CommitScript(*store_), absl::OkStatus());
  EXPECT_GT(file_system_->Clear(), 0);
  EXPECT_EQ(CheckScript(*store_, 2), absl::OkStatus());
}

TEST_P(FuseFaultTest, AShortReadIsReadToItsEnd) {
  file_system_->Tell("read 1 0 1");
  EXPECT_EQ(CheckScript(*store_, 1), absl::OkStatus());
  EXPECT_EQ(file_system_->Clear(), 1);
}

TEST_P(FuseFaultTest, AWriteThatFailsEndsTheEpochAndTheStore) {
  file_system_->Tell(Eio("write", 1, 1));
  const absl::Status status = CommitScript(*store_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(file_system_->Clear(), 1);
  ExpectFailedForGood(1);
  ASSERT_EQ(Reopen(), absl::OkStatus());
  EXPECT_EQ(CheckScript(*store_, 1), absl::OkStatus());
  EXPECT_EQ(CommitScript(*store_), absl::OkStatus());
}

TEST_P(FuseFaultTest, AFullFileSystemIsSaidToBeFullAndTheLastEpochStands) {
  file_system_->Tell(absl::StrCat("write 1 ", ENOSPC, " -1"));
  const absl::Status status = CommitScript(*store_);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
  EXPECT_GT(file_system_->Clear(), 0);
  ExpectFailedForGood(1);
  ASSERT_EQ(Reopen(), absl::OkStatus());
  EXPECT_EQ(CheckScript(*store_, 1), absl::OkStatus());
}

// The second fsync would succeed, and mean nothing: the kernel has marked the pages clean.
TEST_P(FuseFaultTest, AnFsyncThatFailsOnceIsNeverBelievedAgain) {
  file_system_->Tell(Eio("fsync", 1, 1));
  EXPECT_EQ(ErrorIdOf(CommitScript(*store_)), ErrorId::kStoreFailed);
  EXPECT_EQ(file_system_->Clear(), 1);
  ExpectFailedForGood(1);
  for (const ExtentId& id : AllExtents(*store_)) {  // reads go on
    const MappedRegion bytes = Buffer(store_->ExtentBytes(id));
    Stamp stamp;
    EXPECT_EQ(ReadNow(*store_, id, bytes.span(), &stamp), absl::OkStatus());
    EXPECT_TRUE(store_->Verify(id, stamp, bytes.span()));
  }
  ASSERT_EQ(Reopen(), absl::OkStatus());
  EXPECT_EQ(CheckScript(*store_, 1), absl::OkStatus());
}

bool IsDocumented(const absl::Status& status) {
  static constexpr ErrorId kIds[] = {
      ErrorId::kIo,           ErrorId::kStoreFailed,       ErrorId::kPoolFull,
      ErrorId::kStoreDamaged, ErrorId::kEngineUnavailable, ErrorId::kPoolNoDirectIo};
  const std::optional<ErrorId> id = ErrorIdOf(status);
  return id && std::find(std::begin(kIds), std::end(kIds), *id) != std::end(kIds);
}

struct CallFault {
  const char* kind;
  int error_number;  // 0: short
  int times;         // -1: for ever
};
// No EAGAIN for ever: io_uring itself would try again without end, in the kernel.
constexpr CallFault kCallFaults[] = {
    {"read", EIO, 1},      {"read", EIO, -1},  {"read", 0, 1},     {"read", 0, -1},
    {"read", EAGAIN, 1},   {"write", EIO, 1},  {"write", EIO, -1}, {"write", ENOSPC, 1},
    {"write", ENOSPC, -1}, {"write", 0, 1},    {"write", 0, -1},   {"write", EAGAIN, 1},
    {"fsync", EIO, 1},     {"fsync", EIO, -1},
};

// Opens the store, commits two epochs and reads all, with a fault at the n-th call, from 1 on in
// steps, until one run meets none.
TEST_P(FuseFaultTest, AFaultAtAnyCallLeavesAWholeEpochAndADocumentedCode) {
  const char* const step_text = std::getenv("FAULT_STEP");
  const int step = step_text != nullptr ? std::atoi(step_text) : 5;
  uint64_t acked = 1, faults = 0;
  for (const auto& [kind, error_number, times] : kCallFaults) {
    for (int nth = 1;; nth += std::string_view(kind) == "fsync" ? 1 : step) {
      const std::string fault = absl::StrCat(kind, " ", nth, " ", error_number, " ", times);
      SCOPED_TRACE(fault);
      store_.reset();
      file_system_->Tell(fault);
      uint64_t pending = acked;
      const absl::Status status = Script(&acked, &pending);
      const int64_t met = file_system_->Clear();
      EXPECT_TRUE(status.ok() || IsDocumented(status)) << status;
      EXPECT_TRUE(status.ok() || met > 0) << "an error without a cause: " << status;
      ASSERT_EQ(Reopen(), absl::OkStatus());
      const uint64_t found = store_->committed().sequence;
      ASSERT_TRUE(found == acked || found == pending) << found << " after " << acked;
      acked = found;
      ASSERT_EQ(CheckScript(*store_, found), absl::OkStatus());
      if (met == 0) break;
      ++faults;
    }
  }
  RecordProperty("faults", std::to_string(faults));
  std::printf("%lu faults met\n", faults);
  EXPECT_GT(faults, 20u);
}

// Stores that fail, by the hundred.
class Quiet : public testing::Environment {
 public:
  void SetUp() override { spdlog::set_level(spdlog::level::off); }
};
[[maybe_unused]] const testing::Environment* const kQuiet =
    testing::AddGlobalTestEnvironment(new Quiet);

INSTANTIATE_TEST_SUITE_P(Engines, FuseFaultTest, testing::Values("uring", "libaio", "threads"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace offload::swap
