// What a caller does wrong, or too early, is refused in words and changes nothing.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "aio/faulty_device.h"
#include "aio/memory_device.h"
#include "base/error.h"
#include "swap/fork.h"
#include "swap/fsck.h"
#include "swap/store.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

namespace fs = std::filesystem;

std::unique_ptr<Store> OnMemory(uint32_t generations = 0) {
  auto store =
      Store::CreateOn(std::make_unique<aio::MemoryDevice>(FormattedBytes(SmallSpec(), generations)),
                      SmallSpec(), {1}, generations);
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

void MakeJob(const std::string& pool, const std::string& job) {
  const auto store = Store::Create(pool, SmallSpec(job), QuickOptions());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(CommitScript(**store), absl::OkStatus());
  ASSERT_EQ((*store)->Publish(), absl::OkStatus());
}

TEST(StoreMisuseTest, UnknownExtentsHaveNoBytesAndNoStamps) {
  const auto store = OnMemory();
  const ExtentId unknown{99, Plane::kWeight, 0};
  EXPECT_EQ(store->ExtentCount(99), 0u);
  EXPECT_EQ(store->ExtentBytes(unknown), 0u);
  EXPECT_TRUE(store->stamp(unknown).never_written());
  EXPECT_TRUE(store->Verify(unknown, {}, {}));
  const ExtentId known{0, Plane::kWeight, 0};
  const MappedRegion bytes = Buffer(store->ExtentBytes(known));
  EXPECT_TRUE(store->Verify(known, {}, bytes.span()));
  EXPECT_FALSE(store->Verify(known, {}, bytes.span().first(4096)));
  for (const size_t at : {size_t{0}, bytes.size() - 1}) {
    bytes.data()[at] = std::byte{1};
    EXPECT_FALSE(store->Verify(known, {}, bytes.span())) << "never written is zeros, byte " << at;
    bytes.data()[at] = std::byte{0};
  }
}

TEST(StoreMisuseTest, EveryReadHasAStampAndAReadOfNothingEnds) {
  const auto store = OnMemory();
  const MappedRegion bytes = Buffer(store->ExtentBytes({}));
  const ReadRequest request{{}, bytes.data()};
  EXPECT_TRUE(absl::IsInvalidArgument(RunToEnd(*store, [&](Store::Done done) {
    store->Read({&request, 1}, {}, std::move(done));
  })));
  EXPECT_EQ(RunToEnd(*store, [&](Store::Done done) { store->Read({}, {}, std::move(done)); }),
            absl::OkStatus());
  EXPECT_EQ(WriteNow(*store, {}), absl::OkStatus());
}

TEST(StoreMisuseTest, ACommitWhileAnotherRunsIsRefusedAndTheFirstGoesOn) {
  const auto store = OnMemory();
  ASSERT_EQ(WriteScript(*store), absl::OkStatus());
  std::optional<absl::Status> first;
  store->Commit(EpochOf(1), BlobOf(1), [&](absl::Status status) { first = std::move(status); });
  EXPECT_TRUE(absl::IsFailedPrecondition(CommitNow(*store, 7, "")));
  while (!first) store->Poll(/*wait=*/true);
  EXPECT_EQ(*first, absl::OkStatus());
  EXPECT_EQ(CheckScript(*store, 1), absl::OkStatus());
}

TEST(StoreMisuseTest, ReadAgainIsForAnExtentThatIsAsItsStampSays) {
  const auto store = OnMemory();
  ASSERT_EQ(CommitScript(*store), absl::OkStatus());
  const std::vector<ExtentId> ids = AllExtents(*store);
  const auto written = std::find_if(ids.begin(), ids.end(), [&](const ExtentId& id) {
    return IsWrittenIn(id, 1) && IsWrittenIn(id, 2);
  });
  ASSERT_NE(written, ids.end());
  const MappedRegion bytes = Buffer(store->ExtentBytes(*written));
  const Stamp stamp = store->stamp(*written);
  const auto again = [&](const ExtentId& id, const Stamp& of) {
    return RunToEnd(*store, [&](Store::Done done) {
      store->ReadAgain({id, bytes.data()}, of, std::move(done));
    });
  };
  EXPECT_EQ(again(*written, stamp), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(again({99, Plane::kWeight, 0}, stamp)));
  EXPECT_TRUE(absl::IsInvalidArgument(again(*written, Stamp{})));
  Stamp other = stamp;
  other.crc ^= 1;
  EXPECT_TRUE(absl::IsFailedPrecondition(again(*written, other)));
  ASSERT_EQ(CommitScript(*store), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(again(*written, stamp))) << "written meanwhile";
  EXPECT_EQ(store->error_counts().lost_extents, 0u);
}

TEST(StoreMisuseTest, ADeviceThatIsTooShortHoldsNoStoreAndOneOfFixedLengthCannotGrow) {
  EXPECT_EQ(ErrorIdOf(Store::CreateOn(
                          std::make_unique<aio::MemoryDevice>(FormattedBytes(SmallSpec()) - 4096),
                          SmallSpec(), {1})
                          .status()),
            ErrorId::kPoolFull);
  const auto store = OnMemory(1);
  const auto create_snapshot = [&](Store::Done done) {
    store->CreateSnapshot("one", 1, std::move(done));
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(RunToEnd(*store, create_snapshot)))
      << "nothing is committed";
  ASSERT_EQ(CommitScript(*store), absl::OkStatus());
  const absl::Status grown =
      RunToEnd(*store, [&](Store::Done done) { store->Grow(nullptr, std::move(done)); });
  EXPECT_EQ(ErrorIdOf(grown), ErrorId::kSnapshot) << grown;
  EXPECT_FALSE(store->failed());
  EXPECT_EQ(RunToEnd(*store, create_snapshot), absl::OkStatus());
  EXPECT_EQ(FormattedBytes(StoreSpec{}), 0u);
}

TEST(StoreMisuseTest, AStoreThatHasFailedIsNotPublished) {
  TemporaryPool pool;
  aio::FaultyDevice* drive = nullptr;
  StoreOptions options = QuickOptions();
  options.decorate = [&](std::unique_ptr<aio::Device> device) {
    auto faulty = std::make_unique<aio::FaultyDevice>(std::move(device),
                                                      aio::FaultyDevice::Options{.seed = 1});
    drive = faulty.get();
    return faulty;
  };
  {
    const auto store = Store::Create(pool.path(), SmallSpec(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(CommitScript(**store), absl::OkStatus());
    drive->AddFault({aio::FaultKind::kFlushError});
    EXPECT_EQ(ErrorIdOf(CommitScript(**store)), ErrorId::kStoreFailed);
    EXPECT_EQ(ErrorIdOf((*store)->Publish()), ErrorId::kStoreFailed);
  }
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreMisuseTest, NamesThatAreNoJobsAreRefusedBeforeAnyFileIsLookedAt) {
  TemporaryPool pool;
  for (const char* job : {"", "../job", ".job", "a/b"}) {
    EXPECT_EQ(ErrorIdOf(Store::Open(pool.path(), job, QuickOptions()).status()),
              ErrorId::kBadValue);
    EXPECT_EQ(ErrorIdOf(Store::OpenSnapshot(pool.path(), job, "one", QuickOptions()).status()),
              ErrorId::kBadValue);
    EXPECT_EQ(ErrorIdOf(RemoveStore(pool.path(), job)), ErrorId::kBadValue);
  }
}

TEST(StoreMisuseTest, AForkThatNobodyWantsAnyMoreLeavesNoJob) {
  TemporaryPool pool;
  MakeJob(pool.path(), "job");
  const auto source = OpenForkSource(pool.path(), "job", "", QuickOptions());
  ASSERT_TRUE(source.ok()) << source.status();
  StoreOptions options = QuickOptions();
  bool formatted = false, copied = false;
  options.progress = [&](uint64_t done, uint64_t all) {
    copied |= formatted && all == WrittenBytes(**source);
    formatted |= done == all;
  };
  options.cancelled = [&] { return copied; };
  EXPECT_TRUE(absl::IsCancelled(Fork(**source, pool.path(), "fork", options)));
  EXPECT_EQ(pool.Files(), std::vector<std::string>{"job.offload"});
  options.cancelled = [] { return false; };
  EXPECT_EQ(Fork(**source, pool.path(), "fork", options), absl::OkStatus());
}

TEST(StoreMisuseTest, AFileUnderAnotherJobsNameIsFoundByFsckAndRefusedByOpen) {
  TemporaryPool pool;
  MakeJob(pool.path(), "job");
  fs::rename(pool.path() + "/job.offload", pool.path() + "/other.offload");
  FsckOptions options;
  uint64_t told_bytes = 0;
  options.store.progress = [&](uint64_t done, uint64_t) { told_bytes = done; };
  auto report = CheckStore(pool.path(), "other", options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->findings.size(), 1u);
  EXPECT_TRUE(absl::StrContains(report->findings[0].what, "'job'"));
  EXPECT_EQ(told_bytes, report->extent_bytes_read);
  EXPECT_EQ(ErrorIdOf(Store::Open(pool.path(), "other", QuickOptions()).status()),
            ErrorId::kStoreDamaged);
  bool asked = false;
  options.store.cancelled = [&] { return std::exchange(asked, true); };
  EXPECT_EQ(ErrorIdOf(CheckStore(pool.path(), "other", options).status()), ErrorId::kSessionEnded);
}

TEST(PoolFilesTest, FilesThatOnlyLookLikeLeftoversStay) {
  TemporaryPool pool;
  const std::vector<std::string> foreign = {
      ".job.offload.building-0123456789abcdeg", ".job.offload.building-0123",
      ".jab.offload.building-0123456789abcdef", "bad name.offload"};
  for (const std::string& name : foreign) std::ofstream(pool.path() + "/" + name) << "x";
  MakeJob(pool.path(), "job");
  EXPECT_EQ(pool.Files().size(), foreign.size() + 1);
  const auto stores = ListStores(pool.path());
  ASSERT_TRUE(stores.ok()) << stores.status();
  EXPECT_EQ(stores->size(), 1u);
}

TEST(PoolFilesTest, APipeUnderAStoresNameIsRefusedAndNotWaitedFor) {
  TemporaryPool pool;
  ASSERT_EQ(mkfifo((pool.path() + "/job.offload").c_str(), 0600), 0);
  const absl::Status status = Store::Open(pool.path(), "job", QuickOptions()).status();
  EXPECT_TRUE(ErrorIdOf(status).has_value()) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "job.offload")) << status;
}

TEST(PoolFilesTest, AFileSystemThatIsNotKnownIsNamedByItsNumber) {
  const absl::Status status = CheckPool("/proc");
  EXPECT_TRUE(absl::StrContains(status.message(), "file system other 9fa0")) << status;
}

}  // namespace
}  // namespace offload::swap
