// Every system call of every operation of a store fails once, and from there on, in each way that
// it can: the operation succeeds or says why not, and what was acknowledged is there afterwards.

#include "swap/syscall_faults.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "spdlog/spdlog.h"
#include "swap/fork.h"
#include "swap/fsck.h"
#include "swap/layout.h"
#include "swap/scratch.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

// Little to write: there are hundreds of these stores.
StoreSpec TinySpec(const std::string& job) {
  StoreSpec spec = SmallSpec(job);
  spec.tensors = {{32768 + 7, {{Plane::kWeight, 16}, {Plane::kTies, 1}}}};
  return spec;
}

size_t OpenDescriptorCount() {
  const std::filesystem::directory_iterator begin("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

// Has an identifier, or is one of those that headers document without: no store of that name, and
// memory that the kernel does not give (base/mapped_region.h).
bool IsDocumented(const absl::Status& status) {
  const std::optional<ErrorId> id = ErrorIdOf(status);
  if (id) return *id != ErrorId::kInternal || absl::StrContains(status.message(), "ENOS");
  return absl::IsNotFound(status) ||
         (absl::IsResourceExhausted(status) && absl::StrContains(status.message(), "mmap of "));
}

using Operation = std::function<absl::Status(SyscallFaults&)>;
// Who removes files may believe that one is gone that is there.
enum class Gone { kNever, kAlso };
using Check = std::function<void(const absl::Status&)>;

// Runs `operation`, which arms what it is given, with a fault at its first, second, … call, until
// it makes no more, and `check` after each.
void AtEveryCall(Gone gone, const Operation& operation, const Check& check) {
  for (int number = 0; number < kSyscallFaultCount; ++number) {
    const auto kind = static_cast<SyscallFault>(number);
    if (kind == SyscallFault::kGone && gone == Gone::kNever) continue;
    for (const bool forever : {false, true}) {
      // Others do not last, or change nothing of how an operation ends.
      if (forever && kind != SyscallFault::kBroken && kind != SyscallFault::kExhausted) continue;
      for (uint64_t position = 1;; ++position) {
        const size_t descriptors_before = OpenDescriptorCount();
        SyscallFaults faults(kind, position, forever);
        const absl::Status status = operation(faults);
        faults.Disarm();
        SCOPED_TRACE(absl::StrCat(NameOf(kind), forever ? " from call " : " at call ", position,
                                  ", ", faults.failed_call(), ": ", status.ToString()));
        EXPECT_EQ(OpenDescriptorCount(), descriptors_before) << "descriptors are leaked";
        if (!faults.fired() || kind == SyscallFault::kInterrupted) {
          EXPECT_TRUE(status.ok());
        }
        EXPECT_TRUE(status.ok() || IsDocumented(status));
        check(status);
        if (testing::Test::HasFailure()) return;
        if (!faults.fired()) break;
      }
    }
  }
}

// With one pool, and with two.
class SyscallFaultTest : public testing::TestWithParam<size_t> {
 protected:
  SyscallFaultTest() : pools_(GetParam()) {
    spdlog::set_level(spdlog::level::off);
    options_.io = {.engine = aio::Engine::kThreads, .queue_depth = 16, .thread_count = 2};
    options_.lock_timeout_seconds = 0;
    options_.stripe_weights.assign(pools_.size(), 1);
    fsck_.store = options_;
  }

  std::string PoolNames() const {
    return absl::StrJoin(pools_, ",", [](std::string* out, const TemporaryPool& pool) {
      absl::StrAppend(out, pool.path());
    });
  }

  std::vector<std::string> Files() const {
    std::vector<std::string> files;
    for (const TemporaryPool& pool : pools_) {
      for (const std::string& name : pool.Files())
        files.push_back(absl::StrCat(pool.path(), "/", name));
    }
    return files;
  }

  // A store of two commits of the script and the snapshot "kept" of the second.
  void MakeJob(const std::string& job) {
    StoreOptions options = options_;
    options.generations = 1;
    auto store = Store::Create(PoolNames(), TinySpec(job), options);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ((*store)->Publish(), absl::OkStatus());
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    ASSERT_EQ(RunToEnd(**store,
                       [&](Store::Done done) {
                         (*store)->CreateSnapshot("kept", 1800000000, std::move(done));
                       }),
              absl::OkStatus());
  }

  // All that a store holds, in words; every byte is checked.
  static std::string ContentOf(Store& store) {
    std::string content =
        absl::StrCat("epoch ", store.committed().epoch, ", state ",
                     Crc32c(0, store.committed().blob.data(), store.committed().blob.size()));
    for (const ExtentId& id : AllExtents(store)) {
      const MappedRegion bytes = Buffer(store.ExtentBytes(id));
      Stamp stamp;
      const absl::Status status = ReadNow(store, id, bytes.span(), &stamp);
      EXPECT_EQ(status, absl::OkStatus());
      EXPECT_TRUE(store.Verify(id, stamp, bytes.span())) << NameOf(id);
      absl::StrAppend(&content, ", ", Crc32c(0, bytes.data(), bytes.size()));
    }
    for (const SnapshotInfo& snapshot : store.snapshots())
      absl::StrAppend(&content, ", snapshot ", snapshot.name, " of epoch ", snapshot.epoch,
                      snapshot.damage.ok() ? "" : " is lost");
    return content;
  }

  // What the job holds when nothing fails any more; fsck must agree that it is whole. "" without a
  // store.
  std::string StateOf(const std::string& job) {
    std::string content;
    {
      const auto store = Store::Open(PoolNames(), job, options_);
      if (absl::IsNotFound(store.status())) return "";
      EXPECT_TRUE(store.ok()) << store.status();
      if (!store.ok()) return "cannot be opened";
      content = ContentOf(**store);
    }
    const auto report = CheckStore(PoolNames(), job, fsck_);
    EXPECT_TRUE(report.ok()) << report.status();
    for (const FsckFinding& finding : report.ok() ? report->findings : std::vector<FsckFinding>())
      ADD_FAILURE() << finding.what;
    return content;
  }

  // What failed operations left gives way to a new job of that name, and to its removal.
  void ExpectCleanable(const std::string& job, const std::vector<std::string>& files) {
    if (Files() == files) return;
    {
      const auto store = Store::Create(PoolNames(), TinySpec(job), options_);
      EXPECT_TRUE(store.ok() || ErrorIdOf(store.status()) == ErrorId::kStoreLocked)
          << store.status();
      if (!store.ok()) {
        EXPECT_EQ(RemoveStore(PoolNames(), job), absl::OkStatus());
      }
    }
    EXPECT_EQ(Files(), files);
  }

  std::vector<TemporaryPool> pools_;
  StoreOptions options_;
  FsckOptions fsck_;
};

INSTANTIATE_TEST_SUITE_P(Pools, SyscallFaultTest, testing::Values(1, 2),
                         [](const auto& info) { return info.param == 1 ? "One" : "Two"; });

// Creates, commits and publishes `job`.
absl::Status MakePublished(const std::string& pools, const std::string& job,
                           const StoreOptions& options, SyscallFaults& faults) {
  faults.Arm();
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                           Store::Create(pools, TinySpec(job), options));
  faults.Disarm();
  OFFLOAD_RETURN_IF_ERROR(WriteScript(*store));
  faults.Arm();
  OFFLOAD_RETURN_IF_ERROR(CommitNow(*store, EpochOf(1), BlobOf(1)));
  return store->Publish();
}

TEST_P(SyscallFaultTest, CreateMakesAWholeJobOrNoneAndLeavesNothingThatTheNextCannotClear) {
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) { return MakePublished(PoolNames(), "job", options_, faults); },
      [&](const absl::Status& status) {
        {
          const auto store = Store::Open(PoolNames(), "job", options_);
          EXPECT_TRUE(store.ok() || !status.ok()) << store.status();
          EXPECT_TRUE(store.ok() || absl::IsNotFound(store.status())) << store.status();
          if (store.ok()) {
            EXPECT_EQ(CheckScript(**store, 1), absl::OkStatus());
          }
        }
        ExpectCleanable("job", {});
      });
}

TEST_P(SyscallFaultTest, CreateOverWhatAKilledFormatLeftClearsAllOfItSoonerOrLater) {
  // By name, and how each begins: all that leads to the others.
  std::vector<std::pair<std::string, std::string>> leftovers;
  {
    const auto store = Store::Create(PoolNames(), TinySpec("job"), options_);
    ASSERT_TRUE(store.ok()) << store.status();
    for (std::string file : Files()) {
      std::string begin(2 * kPageBytes, 0);
      std::ifstream(file, std::ios::binary).read(begin.data(), 2 * kPageBytes);
      file.back() = file.back() == '0' ? '1' : '0';  // of the token, which members share
      leftovers.emplace_back(file, begin);
    }
  }
  // Ends as soon as the files are made, so that what removes them is watched, too.
  bool formats = false;
  StoreOptions options = options_;
  options.stripe_weights.clear();
  options.progress = [&](uint64_t, uint64_t) { formats = true; };
  options.cancelled = [&] { return formats; };
  AtEveryCall(
      Gone::kNever,
      [&](SyscallFaults& faults) {
        for (const auto& [name, begin] : leftovers) std::ofstream(name, std::ios::binary) << begin;
        formats = false;
        faults.Arm();
        const absl::Status status = Store::Create(PoolNames(), TinySpec("job"), options).status();
        EXPECT_FALSE(status.ok());
        return ErrorIdOf(status) == ErrorId::kSessionEnded ? absl::OkStatus() : status;
      },
      [&](const absl::Status&) {
        ExpectCleanable("job", {});
        EXPECT_EQ(StateOf("job"), "");
      });
}

TEST_P(SyscallFaultTest, OpenFindsTheLastCommitOrSaysWhyNotAndHarmsNothing) {
  MakeJob("job");
  const std::string content = StateOf("job");
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) -> absl::Status {
        faults.Arm();
        OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                                 Store::Open(PoolNames(), "job", options_));
        faults.Disarm();
        EXPECT_EQ(ContentOf(*store), content);
        return absl::OkStatus();
      },
      [&](const absl::Status& status) {
        // "There is none" makes a trainer begin anew: only what says so may be told so.
        EXPECT_FALSE(absl::IsNotFound(status) && !absl::StrContains(status.message(), "ENOENT") &&
                     !absl::StrContains(status.message(), "removed while"));
        EXPECT_EQ(StateOf("job"), content);
      });
}

TEST_P(SyscallFaultTest, OpenSnapshotFindsWhatItNamesOrSaysWhyNot) {
  MakeJob("job");
  const std::vector<std::string> files = Files();
  const std::string state = StateOf("job");
  const auto content = [&](SyscallFaults& faults) -> absl::StatusOr<std::string> {
    faults.Arm();
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                             Store::OpenSnapshot(PoolNames(), "job", "kept", options_));
    faults.Disarm();
    return ContentOf(*store);
  };
  SyscallFaults none(SyscallFault::kBroken, UINT64_MAX);
  const absl::StatusOr<std::string> expected = content(none);
  ASSERT_TRUE(expected.ok()) << expected.status();
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) {
        const absl::StatusOr<std::string> found = content(faults);
        if (found.ok()) {
          EXPECT_EQ(*found, *expected);
        }
        return found.status();
      },
      [&](const absl::Status&) { EXPECT_EQ(Files(), files); });
  EXPECT_EQ(StateOf("job"), state);
}

TEST_P(SyscallFaultTest, CommitsSnapshotsAndGrowthThatFailLeaveAStateThatWasAcknowledged) {
  const auto delete_snapshot = [](Store& store, Store::Done done) {
    store.DeleteSnapshot("kept", std::move(done));
  };
  const auto create_snapshot = [](Store& store, Store::Done done) {
    store.CreateSnapshot("again", 1800000001, std::move(done));
  };
  const auto grow = [](Store& store, Store::Done done) { store.Grow(nullptr, std::move(done)); };
  std::vector<std::string> acknowledged;
  AtEveryCall(
      Gone::kNever,
      [&](SyscallFaults& faults) -> absl::Status {
        MakeJob("job");
        OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                                 Store::Open(PoolNames(), "job", options_));
        const auto step = [&](const auto& start) {
          acknowledged.push_back(ContentOf(*store));
          faults.Arm();
          const absl::Status status =
              RunToEnd(*store, [&](Store::Done done) { start(*store, std::move(done)); });
          faults.Disarm();
          return status;
        };
        acknowledged.clear();
        absl::Status first;
        // Stripes are as long as they were made; that growth is refused is known.
        if (pools_.size() == 1) first.Update(step(grow));
        first.Update(step(delete_snapshot));
        first.Update(step(create_snapshot));
        EXPECT_FALSE(store->failed()) << "no transfer has failed";
        acknowledged.push_back(ContentOf(*store));
        return first;
      },
      [&](const absl::Status&) {
        EXPECT_EQ(StateOf("job"), acknowledged.back());
        EXPECT_EQ(RemoveStore(PoolNames(), "job"), absl::OkStatus());
        EXPECT_EQ(Files(), std::vector<std::string>());
      });
}

TEST_P(SyscallFaultTest, ForkMakesAWholeJobOrNoneAndLeavesItsSourceAlone) {
  MakeJob("job");
  const std::string content = StateOf("job");
  const std::vector<std::string> files = Files();
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) -> absl::Status {
        faults.Arm();
        OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> source,
                                 OpenForkSource(PoolNames(), "job", "kept", options_));
        return Fork(*source, PoolNames(), "fork", options_);
      },
      [&](const absl::Status& status) {
        const std::string forked = StateOf("fork");
        if (status.ok() || !forked.empty()) {
          EXPECT_EQ(absl::StrCat(forked, ", snapshot kept of epoch 102"), content);
        }
        ExpectCleanable("fork", files);
      });
  EXPECT_EQ(StateOf("job"), content);
}

TEST_P(SyscallFaultTest, FsckRepairsADamagedCopyOrSaysWhyNotAndNothingElse) {
  MakeJob("job");
  const std::string content = StateOf("job");
  FsckOptions repair = fsck_;
  repair.repair = true;
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) -> absl::Status {
        {
          std::fstream file(Files().front(), std::ios::in | std::ios::out | std::ios::binary);
          const uint64_t page_bytes = pools_.size() > 1 ? 2 * kPageBytes : 0;
          file.seekp(static_cast<std::streamoff>(page_bytes + Layout::HeaderOffset(1)));
          file << "not a header";
        }
        faults.Arm();
        OFFLOAD_ASSIGN_OR_RETURN(const FsckReport report, CheckStore(PoolNames(), "job", repair));
        faults.Disarm();
        EXPECT_EQ(report.findings.size(), 1u);
        EXPECT_FALSE(report.has_loss() || report.has_open_repairs());
        return absl::OkStatus();
      },
      [&](const absl::Status& status) {
        const auto report = CheckStore(PoolNames(), "job", repair);
        EXPECT_TRUE(report.ok()) << report.status();
        if (report.ok()) {
          EXPECT_FALSE(report->has_loss() || report->has_open_repairs());
        }
        if (report.ok() && status.ok()) {
          EXPECT_TRUE(report->is_clean());
        }
      });
  EXPECT_EQ(StateOf("job"), content);
}

TEST_P(SyscallFaultTest, ListShowsEveryJobOrSaysWhyNot) {
  MakeJob("first");
  MakeJob("second");
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) -> absl::Status {
        faults.Arm();
        OFFLOAD_ASSIGN_OR_RETURN(const std::vector<StoreSummary> stores, ListStores(PoolNames()));
        faults.Disarm();
        EXPECT_EQ(stores.size(), 2u);
        for (const StoreSummary& store : stores) {
          if (!store.damage.ok()) {
            EXPECT_TRUE(faults.fired()) << store.damage;
            EXPECT_TRUE(IsDocumented(store.damage) || absl::IsDataLoss(store.damage))
                << store.damage;
            continue;
          }
          EXPECT_EQ(store.committed.epoch, EpochOf(2));
          EXPECT_EQ(store.pools.size(), pools_.size() > 1 ? pools_.size() : 0);
        }
        return absl::OkStatus();
      },
      [](const absl::Status&) {});
}

TEST_P(SyscallFaultTest, RemoveTakesAllOfAJobOrCanBeCalledAgain) {
  AtEveryCall(
      Gone::kNever,
      [&](SyscallFaults& faults) {
        if (Files().empty()) MakeJob("job");
        faults.Arm();
        return RemoveStore(PoolNames(), "job");
      },
      [&](const absl::Status& status) {
        if (status.ok()) {
          EXPECT_EQ(Files(), std::vector<std::string>());
        }
        const absl::Status again = RemoveStore(PoolNames(), "job");
        EXPECT_TRUE(again.ok() || absl::IsNotFound(again)) << again;
        EXPECT_EQ(Files(), std::vector<std::string>());
      });
}

TEST(SyscallFaultScratchTest, ScratchThatCannotGrowKeepsWhatItHoldsAndStaysUsable) {
  spdlog::set_level(spdlog::level::off);
  TemporaryPool pool;
  const aio::OpenOptions io{.engine = aio::Engine::kThreads, .thread_count = 2};
  const auto run = [](Scratch& scratch, const auto& start) {
    std::optional<absl::Status> result;
    start([&](absl::Status status) { result = std::move(status); });
    while (!result) {
      pollfd waiting{.fd = scratch.event_fd(), .events = POLLIN};
      EXPECT_EQ(poll(&waiting, 1, /*timeout=*/10000), 1) << "its descriptor tells of completions";
      scratch.Poll(/*wait=*/false);
    }
    return *result;
  };
  const MappedRegion bytes = Buffer(kPageBytes);
  AtEveryCall(
      Gone::kAlso,
      [&](SyscallFaults& faults) -> absl::Status {
        faults.Arm();
        OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Scratch> scratch,
                                 Scratch::Create({pool.path()}, {.io = io}));
        const auto write = [&](Scratch::Done done) {
          scratch->Write(0, bytes.span(), std::move(done));
        };
        const auto read = [&](Scratch::Done done) {
          scratch->Read(0, bytes.span(), std::move(done));
        };
        EXPECT_EQ(run(*scratch, write), absl::OkStatus());
        const absl::Status grown = scratch->Reserve(4 << 20);
        EXPECT_EQ(scratch->size_bytes(), uint64_t{grown.ok() ? 4u : 1u} << 20);
        EXPECT_EQ(run(*scratch, read), absl::OkStatus());
        return grown;
      },
      [&](const absl::Status&) { EXPECT_TRUE(pool.Files().empty()); });
}

TEST(SyscallFaultsSelfTest, TheNamedCallFailsOnceOrFromThereOnAndOnlyWhileArmed) {
  const auto fails = [] { return UniqueFd(open("/", O_RDONLY | O_DIRECTORY)).valid() ? 0 : errno; };
  SyscallFaults once(SyscallFault::kExhausted, 2);
  EXPECT_EQ(fails(), 0);
  once.Arm();
  EXPECT_EQ(fails(), 0);
  EXPECT_EQ(fails(), EMFILE);
  EXPECT_EQ(fails(), 0);
  once.Disarm();
  EXPECT_EQ(once.call_count(), 3u);
  EXPECT_EQ(once.failed_call(), "open");
  SyscallFaults forever(SyscallFault::kBroken, 1, /*forever=*/true);
  forever.Arm();
  EXPECT_EQ(fails(), EIO);
  EXPECT_EQ(fails(), EIO);
}

}  // namespace
}  // namespace offload::swap
