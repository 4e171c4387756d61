// Snapshots, growth and forks of stores on a real file system.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "aio/faulty_device.h"
#include "base/error.h"
#include "base/random.h"
#include "swap/fork.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

constexpr int64_t kTime = 1'790'000'000;

// Everything that a store says it holds, verified.
struct Contents {
  uint64_t epoch = 0;
  std::string blob;
  std::vector<std::string> extents;
  friend bool operator==(const Contents&, const Contents&) = default;
};

Contents ContentsOf(Store& store) {
  Contents contents{store.committed().epoch, store.committed().blob, {}};
  for (const ExtentId& id : AllExtents(store)) {
    const MappedRegion bytes = Buffer(store.ExtentBytes(id));
    Stamp stamp;
    EXPECT_EQ(ReadNow(store, id, bytes.span(), &stamp), absl::OkStatus());
    EXPECT_TRUE(store.Verify(id, stamp, bytes.span()))
        << "tensor " << id.tensor << " index " << id.index;
    contents.extents.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    contents.extents.back().append(reinterpret_cast<const char*>(&stamp.word), 8);
  }
  return contents;
}

absl::Status CreateNow(Store& store, const std::string& name) {
  return RunToEnd(store,
                  [&](Store::Done done) { store.CreateSnapshot(name, kTime, std::move(done)); });
}
absl::Status DeleteNow(Store& store, const std::string& name) {
  return RunToEnd(store, [&](Store::Done done) { store.DeleteSnapshot(name, std::move(done)); });
}
absl::Status GrowNow(Store& store) {
  return RunToEnd(store, [&](Store::Done done) { store.Grow(nullptr, std::move(done)); });
}

// A published store with so many spare generations, after `commits` commits.
std::unique_ptr<Store> MakeStore(const TemporaryPool& pool, uint32_t generations,
                                 uint64_t commits = 1, StoreOptions options = QuickOptions()) {
  options.generations = generations;
  auto store = Store::Create(pool.path(), SmallSpec(), options);
  EXPECT_TRUE(store.ok()) << store.status();
  for (uint64_t i = 0; i < commits; ++i) EXPECT_TRUE(CommitScript(**store).ok());
  EXPECT_TRUE((*store)->Publish().ok());
  return *std::move(store);
}

std::unique_ptr<Store> MustOpen(const TemporaryPool& pool, const std::string& job = "job") {
  auto store = Store::Open(pool.path(), job, QuickOptions());
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

Contents SnapshotOf(const TemporaryPool& pool, const std::string& name) {
  auto store = Store::OpenSnapshot(pool.path(), "job", name, QuickOptions());
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? ContentsOf(**store) : Contents{};
}

uint64_t FileBytes(const TemporaryPool& pool) {
  return std::filesystem::file_size(pool.path() + "/job.offload");
}

TEST(SnapshotTest, KeepsItsEpochWhileCommitsGoOnAndAcrossReopening) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 2);
  EXPECT_EQ(store->generation_count(), 2u);
  const uint64_t before = FileBytes(pool);
  const Contents first = ContentsOf(*store);
  ASSERT_EQ(CreateNow(*store, "first"), absl::OkStatus());
  EXPECT_EQ(ContentsOf(*store), first) << "the state itself is as it was";
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  const Contents second = ContentsOf(*store);
  ASSERT_EQ(CreateNow(*store, "second"), absl::OkStatus());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  EXPECT_EQ(SnapshotOf(pool, "first"), first) << "beside its owner";
  const Contents last = ContentsOf(*store);
  store.reset();
  store = MustOpen(pool);
  EXPECT_TRUE(store->repairs().empty());
  EXPECT_EQ(ContentsOf(*store), last);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  EXPECT_EQ(SnapshotOf(pool, "first"), first);
  EXPECT_EQ(SnapshotOf(pool, "second"), second);
  EXPECT_EQ(FileBytes(pool), before);
  ASSERT_EQ(store->snapshots().size(), 2u);
  EXPECT_EQ(store->snapshots()[0].name, "first");
  EXPECT_EQ(store->snapshots()[0].epoch, first.epoch);
  EXPECT_EQ(store->snapshots()[0].created_unix_seconds, kTime);
  EXPECT_FALSE(store->has_free_generation());
  const auto listed = ListStores(pool.path());
  ASSERT_TRUE(listed.ok() && listed->size() == 1);
  EXPECT_EQ((*listed)[0].snapshots.size(), 2u);
  EXPECT_EQ((*listed)[0].generation_count, 2u);
}

TEST(SnapshotTest, WritesNoExtent) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 1);
  const uint64_t before = store->device().counters().written_bytes.load();
  ASSERT_EQ(CreateNow(*store, "s"), absl::OkStatus());
  // The table of one page and the blob of one, each in two mirrors; the pair of superblocks.
  EXPECT_LE(store->device().counters().written_bytes.load() - before, 14 * kPageBytes);
}

TEST(SnapshotTest, DeletingGivesItsGenerationToTheNextOne) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 1);
  ASSERT_EQ(CreateNow(*store, "a"), absl::OkStatus());
  ASSERT_TRUE(CommitScript(*store).ok());
  EXPECT_EQ(ErrorIdOf(CreateNow(*store, "b")), ErrorId::kSnapshot);
  ASSERT_EQ(DeleteNow(*store, "a"), absl::OkStatus());
  EXPECT_EQ(ErrorIdOf(DeleteNow(*store, "a")), ErrorId::kSnapshot);
  for (int i = 0; i < 4; ++i) {
    const Contents now = ContentsOf(*store);
    ASSERT_EQ(CreateNow(*store, "b"), absl::OkStatus());
    ASSERT_TRUE(CommitScript(*store).ok() && CommitScript(*store).ok());
    EXPECT_EQ(SnapshotOf(pool, "b"), now);
    ASSERT_EQ(DeleteNow(*store, "b"), absl::OkStatus());
  }
  EXPECT_EQ(ErrorIdOf(Store::OpenSnapshot(pool.path(), "job", "b", QuickOptions()).status()),
            ErrorId::kSnapshot);
}

TEST(SnapshotTest, RefusesBadNamesTakenOnesAndAnOpenEpoch) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 2);
  for (const std::string& name : {std::string(), std::string("a/b"), std::string(65, 'x')})
    EXPECT_EQ(ErrorIdOf(CreateNow(*store, name)), ErrorId::kSnapshot) << name;
  ASSERT_EQ(CreateNow(*store, std::string(64, 'x')), absl::OkStatus());
  EXPECT_EQ(ErrorIdOf(CreateNow(*store, std::string(64, 'x'))), ErrorId::kSnapshot);
  ASSERT_TRUE(WriteScript(*store).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CreateNow(*store, "open")));
  EXPECT_TRUE(absl::IsFailedPrecondition(DeleteNow(*store, std::string(64, 'x'))));
  EXPECT_FALSE(store->failed());
}

// Writes every extent with bytes of their own.
void WriteTentatively(Store& store, uint64_t key) {
  for (const ExtentId& id : AllExtents(store)) {
    const MappedRegion bytes = Buffer(store.ExtentBytes(id));
    Random(key + id.tensor).Fill(bytes.span());
    Checksum checksum = store.StartChecksum(id, store.open_sequence());
    checksum.Update(bytes.span());
    const WriteRequest request{
        .id = id, .bytes = bytes.data(), .crc = checksum.Finish(), .tentative = true};
    ASSERT_EQ(WriteNow(store, {&request, 1}), absl::OkStatus());
  }
}

TEST(SnapshotTest, LeavesTentativeWritesOutAndOpen) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 3, 2);
  const Contents committed = ContentsOf(*store);
  for (const char* name : {"a", "b", "c"}) {  // the last one takes the last generation
    WriteTentatively(*store, name[0]);
    const Contents open = ContentsOf(*store);
    ASSERT_EQ(CreateNow(*store, name), absl::OkStatus());
    EXPECT_EQ(ContentsOf(*store), open);
    EXPECT_TRUE(store->has_uncommitted_writes());
    EXPECT_EQ(SnapshotOf(pool, name), committed);
  }
  ASSERT_EQ(DeleteNow(*store, "b"), absl::OkStatus());
  WriteTentatively(*store, 1);
  store.reset();
  store = MustOpen(pool);
  EXPECT_EQ(ContentsOf(*store), committed) << "no commit has taken them";
  EXPECT_EQ(SnapshotOf(pool, "a"), committed);
}

TEST(SnapshotTest, TheNextCommitTakesTentativeWritesThatASnapshotHasLeftOut) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 2, 2);
  const Contents before = ContentsOf(*store);
  WriteTentatively(*store, 1);
  ASSERT_EQ(CreateNow(*store, "a"), absl::OkStatus());
  ASSERT_EQ(CreateNow(*store, "b"), absl::OkStatus());
  ASSERT_EQ(CommitNow(*store, before.epoch, before.blob), absl::OkStatus());
  const Contents after = ContentsOf(*store);
  EXPECT_NE(after, before);
  EXPECT_FALSE(store->has_uncommitted_writes());
  store.reset();
  store = MustOpen(pool);
  EXPECT_EQ(ContentsOf(*store), after);
  EXPECT_EQ(SnapshotOf(pool, "a"), before);
  EXPECT_EQ(SnapshotOf(pool, "b"), before);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  EXPECT_EQ(SnapshotOf(pool, "a"), before);
}

TEST(SnapshotTest, TheMostGenerationsAreAsManySnapshots) {
  TemporaryPool pool;
  auto store = MakeStore(pool, kGenerationsMax);
  std::map<std::string, Contents> kept;
  for (uint32_t i = 0; i < kGenerationsMax; ++i) {
    const std::string name = absl::StrCat("s", i);
    kept[name] = ContentsOf(*store);
    ASSERT_EQ(CreateNow(*store, name), absl::OkStatus());
    ASSERT_TRUE(CommitScript(*store).ok());
  }
  EXPECT_EQ(ErrorIdOf(CreateNow(*store, "more")), ErrorId::kSnapshot);
  EXPECT_EQ(ErrorIdOf(GrowNow(*store)), ErrorId::kSnapshot);
  for (const auto& [name, contents] : kept) EXPECT_EQ(SnapshotOf(pool, name), contents) << name;
  StoreOptions options = QuickOptions();
  options.generations = kGenerationsMax + 1;
  EXPECT_EQ(ErrorIdOf(Store::Create(pool.path(), SmallSpec("more"), options).status()),
            ErrorId::kBadValue);
}

TEST(SnapshotTest, AnOpenedSnapshotRefusesToBeWritten) {
  TemporaryPool pool;
  ASSERT_EQ(CreateNow(*MakeStore(pool, 1), "s"), absl::OkStatus());
  auto store = Store::OpenSnapshot(pool.path(), "job", "s", QuickOptions());
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE(absl::IsFailedPrecondition(WriteScript(**store)));
  EXPECT_TRUE(absl::IsFailedPrecondition(CommitNow(**store, 1, "")));
  EXPECT_TRUE(absl::IsFailedPrecondition(CreateNow(**store, "t")));
  EXPECT_TRUE(absl::IsFailedPrecondition(GrowNow(**store)));
}

// ---- Damage ------------------------------------------------------------------------------------

class DamagedSnapshotTest : public testing::Test {
 protected:
  void SetUp() override {
    auto store = MakeStore(pool_, 1);
    kept_ = ContentsOf(*store);
    ASSERT_EQ(CreateNow(*store, "s"), absl::OkStatus());
    ASSERT_TRUE(CommitScript(*store).ok() && CommitScript(*store).ok());
    last_ = ContentsOf(*store);
  }
  void Flip(uint64_t offset_bytes) {
    std::fstream file(pool_.path() + "/job.offload",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset_bytes));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset_bytes));
    file.put(byte);
  }

  const Layout layout_ = *Layout::Make(SmallSpec());
  TemporaryPool pool_;
  Contents kept_, last_;
};

TEST_F(DamagedSnapshotTest, OneMirrorOfItsTableIsTakenFromItsTwinAndWrittenAnew) {
  for (const uint32_t mirror : {0, 1}) {
    Flip(layout_.SnapshotTableOffset(0, mirror) + 77);
    auto store = MustOpen(pool_);
    EXPECT_EQ(store->repairs().size(), 1u);
    EXPECT_EQ(SnapshotOf(pool_, "s"), kept_);
    ASSERT_TRUE(CommitScript(*store).ok());
    store.reset();
    EXPECT_TRUE(MustOpen(pool_)->repairs().empty()) << "mirror " << mirror;
  }
  EXPECT_EQ(SnapshotOf(pool_, "s"), kept_);
}

TEST_F(DamagedSnapshotTest, BothMirrorsOfItsTableLoseItAndNothingElse) {
  Flip(layout_.SnapshotTableOffset(0, 0) + 77);
  Flip(layout_.SnapshotTableOffset(0, 1) + 78);
  auto store = MustOpen(pool_);
  EXPECT_EQ(ContentsOf(*store), last_);
  ASSERT_EQ(store->snapshots().size(), 1u);
  EXPECT_EQ(ErrorIdOf(store->snapshots()[0].damage), ErrorId::kSnapshot);
  EXPECT_TRUE(CommitScript(*store).ok());
  store.reset();
  // It stays lost, also when its table could be read again: its places have been written.
  Flip(layout_.SnapshotTableOffset(0, 0) + 77);
  Flip(layout_.SnapshotTableOffset(0, 1) + 78);
  EXPECT_EQ(ErrorIdOf(Store::OpenSnapshot(pool_.path(), "job", "s", QuickOptions()).status()),
            ErrorId::kSnapshot);
  store = MustOpen(pool_);
  EXPECT_FALSE(store->snapshots()[0].damage.ok());
  EXPECT_EQ(DeleteNow(*store, "s"), absl::OkStatus());
  EXPECT_EQ(CreateNow(*store, "s"), absl::OkStatus());
  EXPECT_TRUE(store->snapshots()[0].damage.ok());
  EXPECT_EQ(SnapshotOf(pool_, "s"), ContentsOf(*store));
}

TEST_F(DamagedSnapshotTest, ItsBlobIsTakenFromItsTwinAndBothBadIsAnError) {
  ASSERT_FALSE(kept_.blob.empty());
  Flip(layout_.SnapshotBlobOffset(0, 0) + 3);
  EXPECT_EQ(SnapshotOf(pool_, "s"), kept_);
  Flip(layout_.SnapshotBlobOffset(0, 1) + 3);
  EXPECT_EQ(ErrorIdOf(Store::OpenSnapshot(pool_.path(), "job", "s", QuickOptions()).status()),
            ErrorId::kStoreDamaged);
  EXPECT_EQ(ContentsOf(*MustOpen(pool_)), last_);
}

TEST_F(DamagedSnapshotTest, AForkOfADamagedExtentIsRefusedAndLeavesNothing) {
  auto source = OpenForkSource(pool_.path(), "job", "s", QuickOptions());
  ASSERT_TRUE(source.ok()) << source.status();
  Flip(layout_.PlaceOffset(0) + 100);  // the first commit wrote there
  const absl::Status status = Fork(**source, pool_.path(), "copy", QuickOptions());
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kChecksum) << status;
  EXPECT_EQ(pool_.Files(), std::vector<std::string>{"job.offload"});
}

// ---- Growing -----------------------------------------------------------------------------------

TEST(GrowthTest, MakesRoomForASnapshotWhileCommitsGoOn) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 0);
  EXPECT_EQ(ErrorIdOf(CreateNow(*store, "s")), ErrorId::kSnapshot);
  const uint64_t before = FileBytes(pool);
  uint64_t told = 0, total = 0;
  std::optional<absl::Status> grown;
  store->Grow([&](uint64_t done, uint64_t of) { told = std::max(told, done), total = of; },
              [&](absl::Status status) { grown = std::move(status); });
  EXPECT_FALSE(grown.has_value());
  EXPECT_EQ(store->generation_count(), 0u);
  ASSERT_TRUE(CommitScript(*store).ok());
  while (!grown) store->Poll(/*wait=*/true);
  ASSERT_EQ(*grown, absl::OkStatus());
  EXPECT_EQ(told, store->generation_bytes());
  EXPECT_EQ(total, store->generation_bytes());
  EXPECT_EQ(FileBytes(pool), before + store->generation_bytes());
  const Contents kept = ContentsOf(*store);
  ASSERT_EQ(CreateNow(*store, "s"), absl::OkStatus());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  const Contents last = ContentsOf(*store);
  store.reset();
  EXPECT_EQ(ContentsOf(*MustOpen(pool)), last);
  EXPECT_EQ(SnapshotOf(pool, "s"), kept);
}

TEST(GrowthTest, WithoutACommitTheNextStartFindsTheOldLength) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 0);
  const uint64_t before = FileBytes(pool);
  ASSERT_EQ(GrowNow(*store), absl::OkStatus());
  store.reset();
  store = MustOpen(pool);
  EXPECT_EQ(FileBytes(pool), before);
  EXPECT_EQ(store->generation_count(), 0u);
  EXPECT_EQ(CheckScript(*store, 1), absl::OkStatus());
  ASSERT_EQ(GrowNow(*store), absl::OkStatus());
  ASSERT_TRUE(CommitScript(*store).ok());
  store.reset();
  EXPECT_EQ(MustOpen(pool)->generation_count(), 1u);
  EXPECT_GT(FileBytes(pool), before);
}

TEST(GrowthTest, ThatIsCancelledOrEndsWithItsStoreLeavesNothing) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 0);
  const uint64_t before = FileBytes(pool);
  std::optional<absl::Status> grown;
  const auto done = [&](absl::Status status) { grown = std::move(status); };
  store->Grow(nullptr, done);
  EXPECT_TRUE(absl::IsFailedPrecondition(GrowNow(*store))) << "two at once";
  store->CancelGrowth();
  while (!grown) store->Poll(/*wait=*/true);
  EXPECT_TRUE(absl::IsCancelled(*grown)) << *grown;
  EXPECT_EQ(FileBytes(pool), before);
  EXPECT_FALSE(store->failed());
  grown.reset();
  store->Grow(nullptr, done);
  store.reset();
  EXPECT_TRUE(grown && absl::IsCancelled(*grown));
  EXPECT_EQ(FileBytes(pool), before);
  EXPECT_EQ(CheckScript(*MustOpen(pool), 1), absl::OkStatus());
}

TEST(GrowthTest, AnErrorOfTheDriveEndsAllWritingAsAlways) {
  TemporaryPool pool;
  aio::FaultyDevice* device = nullptr;
  StoreOptions options = QuickOptions();
  options.decorate = [&](std::unique_ptr<aio::Device> behind) {
    auto faulty = std::make_unique<aio::FaultyDevice>(std::move(behind),
                                                      aio::FaultyDevice::Options{.seed = 1});
    device = faulty.get();
    return faulty;
  };
  auto store = MakeStore(pool, 0, 1, options);
  const uint64_t before = FileBytes(pool);
  device->AddFault({aio::FaultKind::kWriteError, 2});
  EXPECT_FALSE(GrowNow(*store).ok());
  EXPECT_TRUE(store->failed());
  EXPECT_EQ(FileBytes(pool), before);
  EXPECT_EQ(ErrorIdOf(GrowNow(*store)), ErrorId::kStoreFailed);
  store.reset();
  EXPECT_EQ(CheckScript(*MustOpen(pool), 1), absl::OkStatus());
}

// The limit of a file's length stands for the end of a drive: the kernel refuses in the same call.
TEST(GrowthTest, WithoutRoomIsRefusedWithTheNumbersAndLeavesNothing) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 0);
  const uint64_t before = FileBytes(pool), after = before + store->generation_bytes();
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{before + store->generation_bytes() / 2, old_limit.rlim_max};
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const absl::Status status = GrowNow(*store);
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
  EXPECT_NE(status.message().find(std::to_string(after)), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("ulimit -f"), absl::string_view::npos) << status;
  EXPECT_EQ(FileBytes(pool), before);
  EXPECT_FALSE(store->failed());
  EXPECT_TRUE(CommitScript(*store).ok());
}

// ---- Forks -------------------------------------------------------------------------------------

TEST(ForkTest, OfASnapshotEqualsItAndGoesItsOwnWay) {
  TemporaryPool pool, other;
  auto store = MakeStore(pool, 1, 2);
  const Contents kept = ContentsOf(*store);
  ASSERT_EQ(CreateNow(*store, "s"), absl::OkStatus());
  ASSERT_TRUE(CommitScript(*store).ok());
  const Contents last = ContentsOf(*store);
  for (const std::string& target : {pool.path(), other.path()}) {
    auto source = OpenForkSource(pool.path(), "job", "s", QuickOptions());
    ASSERT_TRUE(source.ok()) << source.status();
    StoreOptions options = QuickOptions();
    options.generations = 1;
    uint64_t told = 0;
    options.progress = [&](uint64_t done, uint64_t) { told = done; };
    ASSERT_EQ(Fork(**source, target, "copy", options), absl::OkStatus());
    EXPECT_EQ(told, WrittenBytes(**source));
    auto copy = Store::Open(target, "copy", QuickOptions());
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_EQ(ContentsOf(**copy), kept);
    EXPECT_EQ((*copy)->generation_count(), 1u);
    ASSERT_TRUE(CommitScript(**copy).ok());
    EXPECT_EQ(ErrorIdOf(Fork(**source, target, "copy", options)), ErrorId::kStoreLocked)
        << "the name is taken";
  }
  EXPECT_EQ(ContentsOf(*store), last);
  EXPECT_EQ(SnapshotOf(pool, "s"), kept);
}

TEST(ForkTest, OfTheLastEpochTakesTheLock) {
  TemporaryPool pool;
  auto store = MakeStore(pool, 0, 3);
  const Contents last = ContentsOf(*store);
  StoreOptions impatient = QuickOptions();
  impatient.lock_timeout_seconds = 0.1;
  EXPECT_EQ(ErrorIdOf(OpenForkSource(pool.path(), "job", "", impatient).status()),
            ErrorId::kStoreLocked);
  store.reset();
  auto source = OpenForkSource(pool.path(), "job", "", QuickOptions());
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_EQ(Fork(**source, pool.path(), "copy", QuickOptions()), absl::OkStatus());
  EXPECT_EQ(ContentsOf(*MustOpen(pool, "copy")), last);
}

}  // namespace
}  // namespace offload::swap
