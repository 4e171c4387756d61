#include "swap/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "aio/faulty_device.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/store_fixture.h"
#include "swap/verified_read.h"

namespace offload::swap {
namespace {

std::unique_ptr<Store> MustCreate(const TemporaryPool& pool, const StoreSpec& spec = SmallSpec(),
                                  const StoreOptions& options = QuickOptions()) {
  auto store = Store::Create(pool.path(), spec, options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

std::unique_ptr<Store> MustOpen(const TemporaryPool& pool,
                                const StoreOptions& options = QuickOptions()) {
  auto store = Store::Open(pool.path(), "job", options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// A published store after `commits` commits of the script.
void MakeStore(const TemporaryPool& pool, uint64_t commits) {
  auto store = MustCreate(pool);
  for (uint64_t i = 0; i < commits; ++i) ASSERT_TRUE(CommitScript(*store).ok());
  ASSERT_TRUE(store->Publish().ok());
}

// Options that put a FaultyDevice in front of the file and tell where it is.
StoreOptions FaultyOptions(aio::FaultyDevice** device, uint64_t seed = 1) {
  StoreOptions options = QuickOptions();
  options.decorate = [device, seed](std::unique_ptr<aio::Device> behind) {
    auto faulty = std::make_unique<aio::FaultyDevice>(std::move(behind),
                                                      aio::FaultyDevice::Options{.seed = seed});
    *device = faulty.get();
    return faulty;
  };
  return options;
}

ErrorId IdOf(const absl::Status& status) { return ErrorIdOf(status).value_or(ErrorId::kInternal); }

class Patch {
 public:
  explicit Patch(const std::string& path)
      : file_(path, std::ios::in | std::ios::out | std::ios::binary) {}
  void Flip(uint64_t offset_bytes, int bit) {
    file_.seekg(static_cast<std::streamoff>(offset_bytes));
    char byte = static_cast<char>(file_.get() ^ (1 << bit));
    file_.seekp(static_cast<std::streamoff>(offset_bytes));
    file_.put(byte);
    file_.flush();
  }

 private:
  std::fstream file_;
};

TEST(StoreTest, NeverWrittenExtentsReadAsZeros) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  EXPECT_EQ(store->committed().sequence, 0u);
  EXPECT_TRUE(CheckScript(*store, 0).ok());
}

TEST(StoreTest, ReadsReturnWhatTheOpenEpochWrote) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  ASSERT_TRUE(CommitScript(*store).ok());
  const ExtentId id{0, Plane::kState0, 1};
  const MappedRegion written = Buffer(store->ExtentBytes(id)), got = Buffer(store->ExtentBytes(id));
  for (int round = 0; round < 3; ++round) {  // also written again in the same epoch
    FillExtent(id, 77 + round, written.span());
    Checksum checksum = store->StartChecksum(id, store->open_sequence());
    checksum.Update(written.span());
    const WriteRequest request{id, written.data(), checksum.Finish(), 5, kFlagTiesPlane};
    ASSERT_TRUE(WriteNow(*store, {&request, 1}).ok());
    Stamp stamp;
    ASSERT_TRUE(ReadNow(*store, id, got.span(), &stamp).ok());
    EXPECT_EQ(std::memcmp(got.data(), written.data(), got.size()), 0);
    EXPECT_EQ(stamp.word, 5u);
    EXPECT_EQ(stamp.flags, kFlagTiesPlane);
    EXPECT_TRUE(store->Verify(id, stamp, got.span()));
  }
  EXPECT_TRUE(store->has_uncommitted_writes());
}

TEST(StoreTest, CommittedEpochsSurviveReopening) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  for (uint64_t sequence = 1; sequence <= 6; ++sequence) {
    auto store = MustOpen(pool);
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(CheckScript(*store, sequence), absl::OkStatus());
    EXPECT_TRUE(store->repairs().empty()) << store->repairs().front();
    EXPECT_EQ(store->spec().catalogue, SmallSpec().catalogue);
    EXPECT_EQ(store->spec().tensors, SmallSpec().tensors);
    ASSERT_EQ(CommitScript(*store), absl::OkStatus());
    EXPECT_EQ(CheckScript(*store, sequence + 1), absl::OkStatus());
  }
}

TEST(StoreTest, EpochsThatTouchFewTablePagesReachBothTableCopies) {
  TemporaryPool pool;
  StoreSpec spec = SmallSpec();
  spec.tensors = {{32768 * 600, {{Plane::kWeight, 1}}}};  // 600 entries: four table pages
  const MappedRegion bytes = Buffer(4096);
  std::vector<uint64_t> expected(600, 0);
  auto store = MustCreate(pool, spec);
  for (uint64_t sequence = 1; sequence <= 9; ++sequence) {
    const auto index = static_cast<uint32_t>(sequence * 211 % 600);
    const WriteRequest request{{0, Plane::kWeight, index}, bytes.data(), 0, sequence};
    ASSERT_EQ(WriteNow(*store, {&request, 1}), absl::OkStatus());
    ASSERT_EQ(CommitNow(*store, sequence, ""), absl::OkStatus());
    expected[index] = sequence;
    ASSERT_EQ(sequence == 1 ? store->Publish() : absl::OkStatus(), absl::OkStatus());
    if (sequence % 3 != 0) continue;
    store.reset();
    store = MustOpen(pool);
    ASSERT_NE(store, nullptr);
    for (uint32_t i = 0; i < 600; ++i)
      EXPECT_EQ(store->stamp({0, Plane::kWeight, i}).word, expected[i]) << i;
  }
}

TEST(StoreTest, UncommittedEpochDisappears) {
  TemporaryPool pool;
  MakeStore(pool, 3);
  for (int round = 0; round < 2; ++round) {
    auto store = MustOpen(pool);
    ASSERT_EQ(WriteScript(*store), absl::OkStatus());
  }
  EXPECT_EQ(CheckScript(*MustOpen(pool), 3), absl::OkStatus());
}

TEST(StoreTest, NeighboursOnDiskBecomeOneTransfer) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  const std::vector<ExtentId> ids = {{0, Plane::kState1, 0},
                                     {0, Plane::kWeight, 0},
                                     {0, Plane::kResidual, 0},
                                     {0, Plane::kState0, 0}};  // any order
  std::vector<MappedRegion> buffers;
  std::vector<WriteRequest> writes;
  std::vector<ReadRequest> reads;
  for (const ExtentId& id : ids) {
    buffers.push_back(Buffer(store->ExtentBytes(id)));
    writes.push_back({id, buffers.back().data(), 0});
    reads.push_back({id, buffers.back().data()});
  }
  const uint64_t writes_before = store->device().counters().writes;
  ASSERT_TRUE(WriteNow(*store, writes).ok());
  EXPECT_EQ(store->device().counters().writes - writes_before, 1u);
  const uint64_t reads_before = store->device().counters().reads;
  std::vector<Stamp> stamps(reads.size());
  bool done = false;
  store->Read(reads, stamps, [&](absl::Status status) { done = status.ok(); });
  while (!done) store->Poll(true);
  EXPECT_EQ(store->device().counters().reads - reads_before, 1u);
}

TEST(StoreTest, CallbacksRunOnlyInPollAndTheDescriptorTellsOfThem) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  const ExtentId id{1, Plane::kWeight, 0};
  const MappedRegion buffer = Buffer(store->ExtentBytes(id));
  bool done = false;
  const ReadRequest request{id, buffer.data()};
  Stamp stamp;
  store->Read({&request, 1}, {&stamp, 1},
              [&](absl::Status) { done = true; });  // never written: no I/O at all
  EXPECT_FALSE(done);
  pollfd waiting{store->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 10000), 1);
  EXPECT_EQ(store->Poll(false), 1u);
  EXPECT_TRUE(done);
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  EXPECT_EQ(store->Poll(true), 0u) << "nothing is in flight";
}

TEST(StoreTest, ACommitRefusesWritesInFlightAndWritesRefuseACommit) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  const ExtentId id{1, Plane::kWeight, 0};
  const MappedRegion buffer = Buffer(store->ExtentBytes(id));
  const WriteRequest request{id, buffer.data(), 0};
  absl::Status write, commit, second_commit, second_write;
  store->Write({&request, 1}, [&](absl::Status status) { write = status; });
  store->Commit(1, "", [&](absl::Status status) { commit = status; });
  while (store->Poll(true) > 0) {
  }
  EXPECT_TRUE(write.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(commit)) << commit;
  store->Commit(1, "", [&](absl::Status status) { second_commit = status; });
  store->Write({&request, 1}, [&](absl::Status status) { second_write = status; });
  while (store->Poll(true) > 0) {
  }
  EXPECT_TRUE(second_commit.ok()) << second_commit;
  EXPECT_TRUE(absl::IsFailedPrecondition(second_write)) << second_write;
  EXPECT_FALSE(store->has_uncommitted_writes());
}

TEST(StoreTest, RefusesExtentsFlagsAndBlobsOutsideTheSpec) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  const MappedRegion buffer = Buffer(1 << 20);
  for (const ExtentId& id :
       {ExtentId{3, Plane::kWeight, 0}, ExtentId{1, Plane::kResidual, 0},
        ExtentId{1, Plane::kWeight, 1}, ExtentId{0, static_cast<Plane>(200), 0}}) {
    Stamp stamp;
    EXPECT_TRUE(absl::IsInvalidArgument(ReadNow(*store, id, buffer.span(), &stamp)));
    const WriteRequest request{id, buffer.data(), 0};
    EXPECT_TRUE(absl::IsInvalidArgument(WriteNow(*store, {&request, 1})));
    EXPECT_EQ(store->ExtentBytes(id), 0u);
  }
  const WriteRequest request{{1, Plane::kWeight, 0}, buffer.data(), 0, 0, 1u << 31};
  EXPECT_TRUE(absl::IsInvalidArgument(WriteNow(*store, {&request, 1})));
  EXPECT_EQ(IdOf(CommitNow(*store, 1, std::string((1 << 20) + 1, 'x'))), ErrorId::kBadValue);
  EXPECT_FALSE(store->failed());
  EXPECT_TRUE(CommitNow(*store, 1, std::string(1 << 20, 'x')).ok());
}

TEST(StoreTest, ChecksumsBindStoreExtentAndSequence) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  auto other = MustCreate(pool, SmallSpec("other"));
  const ExtentId id{0, Plane::kWeight, 0};
  const MappedRegion bytes = Buffer(store->ExtentBytes(id));
  const auto take = [&](const Store& of, const ExtentId& extent, uint64_t sequence) {
    Checksum checksum = of.StartChecksum(extent, sequence);
    checksum.Update(bytes.span().first(4096));  // tile by tile
    checksum.Update(bytes.span().subspan(4096));
    return checksum.Finish();
  };
  const uint32_t crc = take(*store, id, 1);
  EXPECT_TRUE(store->Verify(id, {.sequence = 1, .crc = crc}, bytes.span()));
  EXPECT_FALSE(store->Verify(id, {.sequence = 2, .crc = crc}, bytes.span()));
  EXPECT_FALSE(store->Verify({0, Plane::kResidual, 0}, {.sequence = 1, .crc = crc}, bytes.span()));
  EXPECT_FALSE(other->Verify(id, {.sequence = 1, .crc = crc}, bytes.span()));
  EXPECT_FALSE(store->Verify(id, {.sequence = 1, .crc = crc}, bytes.span().first(4096)));
  EXPECT_TRUE(store->Verify(id, {}, bytes.span())) << "zeros that were never written";
  bytes.data()[100] = std::byte{1};
  EXPECT_FALSE(store->Verify(id, {}, bytes.span()));
}

TEST(StoreTest, FailedFlushFailsTheStoreForGoodAndKeepsTheLastEpoch) {
  for (uint64_t nth = 1; nth <= 4; ++nth) {  // data, table, either superblock
    TemporaryPool pool;
    MakeStore(pool, 2);
    aio::FaultyDevice* device = nullptr;
    auto store = MustOpen(pool, FaultyOptions(&device));
    device->AddFault({aio::FaultKind::kFlushError, nth, /*persistent=*/false});
    EXPECT_EQ(IdOf(CommitScript(*store)), ErrorId::kStoreFailed);
    EXPECT_TRUE(store->failed());
    EXPECT_EQ(store->committed().sequence, 2u);
    EXPECT_EQ(IdOf(CommitNow(*store, 9, "")), ErrorId::kStoreFailed)
        << "the next flush would succeed";
    EXPECT_EQ(IdOf(WriteScript(*store)), ErrorId::kStoreFailed);
    const ExtentId id{2, Plane::kWeight, 0};
    const MappedRegion got = Buffer(store->ExtentBytes(id));
    Stamp stamp;
    EXPECT_TRUE(ReadNow(*store, id, got.span(), &stamp).ok());
    EXPECT_TRUE(store->Verify(id, stamp, got.span()));
  }
}

TEST(StoreTest, FailedWriteLeavesItsExtentAsItWas) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  aio::FaultyDevice* device = nullptr;
  {
    auto store = MustOpen(pool, FaultyOptions(&device));
    device->AddFault({aio::FaultKind::kTornWrite, 1, /*persistent=*/true});
    EXPECT_FALSE(WriteScript(*store).ok());
    EXPECT_TRUE(store->failed());
    EXPECT_EQ(CheckScript(*store, 2), absl::OkStatus());
  }
  EXPECT_EQ(CheckScript(*MustOpen(pool), 2), absl::OkStatus());
}

// The heart: cut the power at every operation of a run of three epochs, each sector keeping any of
// its unflushed contents.
TEST(StoreTest, PowerCutAtAnyOperationLeavesAWholeEpoch) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  const std::string path = pool.path() + "/job.offload";
  const std::string saved = pool.path() + "/saved";
  std::filesystem::copy_file(path, saved);
  uint64_t cuts = 0;
  for (uint64_t nth = 1;; ++nth) {
    std::filesystem::copy_file(saved, path, std::filesystem::copy_options::overwrite_existing);
    aio::FaultyDevice* device = nullptr;
    uint64_t acked = 2;
    bool cut = false;
    {
      auto store = MustOpen(pool, FaultyOptions(&device, /*seed=*/nth));
      device->AddFault({aio::FaultKind::kPowerCut, nth});
      while (acked < 5 && CommitScript(*store).ok()) ++acked;
      cut = device->is_cut();
    }
    if (!cut) break;
    ++cuts;
    auto store = MustOpen(pool);
    ASSERT_NE(store, nullptr) << "cut at operation " << nth;
    const uint64_t found = store->committed().sequence;
    EXPECT_TRUE(found == acked || found == acked + 1)
        << "cut at operation " << nth << ": " << found << " after " << acked;
    EXPECT_EQ(CheckScript(*store, found), absl::OkStatus()) << "cut at operation " << nth;
    EXPECT_EQ(CommitScript(*store), absl::OkStatus());
    EXPECT_EQ(CheckScript(*store, found + 1), absl::OkStatus());
  }
  EXPECT_GE(cuts, 30u);
}

TEST(StoreTest, AcknowledgedFormatSurvivesPowerCutAndAnEarlierCutLeavesNoStore) {
  for (const uint64_t nth : {1, 3, 7, 9, 12, 14, 16, 18, 20, 22, 24, 26}) {
    TemporaryPool pool;
    aio::FaultyDevice* device = nullptr;
    StoreOptions options = FaultyOptions(&device);
    const auto decorate = options.decorate;
    options.decorate = [&](std::unique_ptr<aio::Device> behind) {
      auto faulty = decorate(std::move(behind));
      device->AddFault({aio::FaultKind::kPowerCut, nth});
      return faulty;
    };
    bool published = false;
    if (auto store = Store::Create(pool.path(), SmallSpec(), options); store.ok()) {
      published = CommitScript(**store).ok() && (*store)->Publish().ok();
    }
    const auto opened = Store::Open(pool.path(), "job", QuickOptions());
    EXPECT_EQ(opened.ok(), published) << opened.status();
    if (opened.ok()) {
      EXPECT_EQ(CheckScript(**opened, 1), absl::OkStatus());
    } else {
      EXPECT_TRUE(absl::IsNotFound(opened.status()));
      EXPECT_TRUE(pool.Files().empty());
    }
  }
}

void FlipInBothPlaces(const TemporaryPool& pool, const Layout& layout, const Layout::Where& where,
                      uint64_t bit) {
  for (uint32_t place = 0; place < 2; ++place) {
    Patch(pool.path() + "/job.offload")
        .Flip(layout.PlaceOffset(place) + where.area_offset_bytes + bit / 8, bit % 8);
  }
}

TEST(StoreTest, AFlippedBitOfAnExtentIsDetected) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  const Layout layout = *Layout::Make(SmallSpec());
  const ExtentId id{0, Plane::kState0, 1};
  Layout::Where where;
  ASSERT_TRUE(layout.Find(id, &where));
  Stamp stamp;
  const MappedRegion got = Buffer(where.size_bytes);
  for (uint64_t bit = 3; bit < where.size_bytes * 8; bit += where.size_bytes * 8 / 40 + 1) {
    FlipInBothPlaces(pool, layout, where, bit);
    auto store = MustOpen(pool);
    ASSERT_TRUE(ReadNow(*store, id, got.span(), &stamp).ok());
    EXPECT_FALSE(store->Verify(id, stamp, got.span())) << "bit " << bit;
    FlipInBothPlaces(pool, layout, where, bit);
  }
  EXPECT_EQ(CheckScript(*MustOpen(pool), 2), absl::OkStatus());
}

// As a job's status asks for it while its store is laid out anew.
TEST(StoreTest, WhatItsDriveDoesIsToldWhileAnotherThreadReads) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  const Layout layout = *Layout::Make(SmallSpec());
  const ExtentId id{0, Plane::kState0, 1};
  Layout::Where where;
  ASSERT_TRUE(layout.Find(id, &where));
  FlipInBothPlaces(pool, layout, where, 3);
  auto store = MustOpen(pool);
  constexpr uint64_t kReads = 20;
  std::atomic<bool> is_over = false;
  std::thread reads([&] {
    const MappedRegion got = Buffer(where.size_bytes);
    for (uint64_t i = 0; i < kReads; ++i) {
      Stamp stamp = store->stamp(id);
      EXPECT_EQ(IdOf(ReadVerified(*store, {id, got.data()}, &stamp)), ErrorId::kChecksum);
    }
    is_over = true;
  });
  while (!is_over) {
    EXPECT_LE(store->error_counts().lost_extents, kReads);
    EXPECT_LE(store->device().in_flight(), 1u);
  }
  reads.join();
  EXPECT_EQ(store->error_counts().lost_extents, kReads);
  EXPECT_EQ(store->error_counts().checksum_mismatches, kReads);
}

TEST(StoreTest, DamagedTwinsAreServedAndHealedByTheNextCommits) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  const Layout layout = *Layout::Make(SmallSpec());
  {
    Patch patch(pool.path() + "/job.offload");
    for (const uint64_t offset :
         {Layout::SuperblockOffset(0), layout.TableOffset(0, 0), layout.BlobOffset(0, 0)})
      patch.Flip(offset + 20, 4);
  }
  {
    auto store = MustOpen(pool);
    EXPECT_EQ(store->repairs().size(), 3u);
    ASSERT_EQ(CheckScript(*store, 2), absl::OkStatus());
    ASSERT_EQ(CommitScript(*store), absl::OkStatus());
    ASSERT_EQ(CommitScript(*store), absl::OkStatus());
  }
  auto store = MustOpen(pool);
  EXPECT_TRUE(store->repairs().empty());
  EXPECT_EQ(CheckScript(*store, 4), absl::OkStatus());
}

TEST(StoreTest, SecondOpenIsRefusedAndNamesTheHolder) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  StoreOptions impatient = QuickOptions();
  impatient.lock_timeout_seconds = 0;
  auto owner = MustOpen(pool);
  const auto second = Store::Open(pool.path(), "job", impatient);
  EXPECT_EQ(IdOf(second.status()), ErrorId::kStoreLocked) << second.status();
  EXPECT_NE(second.status().message().find("process " + std::to_string(getpid())),
            absl::string_view::npos)
      << second.status();
  EXPECT_EQ(IdOf(RemoveStore(pool.path(), "job")), ErrorId::kStoreLocked);
  EXPECT_EQ(IdOf(Store::Create(pool.path(), SmallSpec(), impatient).status()),
            ErrorId::kStoreLocked);
  const auto listed = ListStores(pool.path());
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_TRUE((*listed)[0].in_use);
  EXPECT_EQ((*listed)[0].committed.epoch, EpochOf(1));
  owner.reset();
  EXPECT_NE(MustOpen(pool, impatient), nullptr);
}

TEST(StoreTest, AReplacementTakesTheNameOfItsStoreAtOnce) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  StoreSpec spec = SmallSpec();
  spec.catalogue = "another";
  spec.tensors.push_back(spec.tensors.front());
  auto store = MustOpen(pool);
  StoreOptions options = QuickOptions();
  EXPECT_EQ(ErrorIdOf(Store::Create(pool.path(), spec, options).status()), ErrorId::kStoreLocked);
  options.replaces = true;
  for (const bool published : {false, true}) {
    auto replacement = Store::Create(pool.path(), spec, options);
    ASSERT_TRUE(replacement.ok()) << replacement.status();
    ASSERT_EQ(CommitNow(**replacement, 17, "blob"), absl::OkStatus());
    EXPECT_EQ(CheckScript(*store, 1), absl::OkStatus()) << "it goes on meanwhile";
    if (!published) continue;  // it goes with its object
    ASSERT_EQ((*replacement)->Publish(), absl::OkStatus());
    store.reset();
  }
  store = MustOpen(pool);
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(store->spec().catalogue, "another");
  EXPECT_EQ(store->committed().epoch, 17u);
  EXPECT_EQ(pool.Files(), std::vector<std::string>{"job.offload"});
  const TemporaryPool other;
  const auto striped = Store::Create(pool.path() + "," + other.path(), spec, options);
  EXPECT_EQ(ErrorIdOf(striped.status()), ErrorId::kBadValue) << striped.status();
}

TEST(StoreTest, AJobIsBuiltOnceAtATime) {
  TemporaryPool pool;
  auto builder = MustCreate(pool);
  StoreOptions impatient = QuickOptions();
  impatient.lock_timeout_seconds = 0;
  EXPECT_EQ(IdOf(Store::Create(pool.path(), SmallSpec(), impatient).status()),
            ErrorId::kStoreLocked);
  EXPECT_TRUE(absl::IsNotFound(Store::Open(pool.path(), "job", QuickOptions()).status()))
      << "not published";
  EXPECT_TRUE(absl::IsFailedPrecondition(builder->Publish())) << "no commit";
  ASSERT_EQ(CommitScript(*builder), absl::OkStatus());
  ASSERT_EQ(builder->Publish(), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(builder->Publish()));
  ASSERT_EQ(CommitScript(*builder), absl::OkStatus());  // goes on under its name
  builder.reset();
  EXPECT_EQ(CheckScript(*MustOpen(pool), 2), absl::OkStatus());
}

TEST(StoreTest, AnUnpublishedStoreGoesWithItsObject) {
  TemporaryPool pool;
  auto store = MustCreate(pool);
  EXPECT_EQ(pool.Files().size(), 1u);
  store.reset();
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreTest, LeftoversOfAKilledFormatAreRemovedButNotThoseOfOtherJobs) {
  TemporaryPool pool;
  const std::string mine = ".job.offload.building-0123456789abcdef",
                    other = ".jobs.offload.building-0123456789abcdef";
  for (const std::string& name : {mine, other})
    std::ofstream(pool.path() + "/" + name) << "half made";
  EXPECT_TRUE(absl::IsNotFound(Store::Open(pool.path(), "job", QuickOptions()).status()));
  EXPECT_EQ(pool.Files(), std::vector<std::string>{other});
  std::ofstream(pool.path() + "/" + mine) << "half made";
  MakeStore(pool, 1);
  EXPECT_EQ(pool.Files(), (std::vector<std::string>{other, "job.offload"}));
}

TEST(StoreTest, AStoreThatDoesNotFitIsRefusedAndLeavesNothing) {
  TemporaryPool pool;
  struct statvfs info {};
  ASSERT_EQ(statvfs(pool.path().c_str(), &info), 0);
  StoreSpec spec = SmallSpec();
  spec.extent_elements = 1 << 24;
  spec.tensors[0].element_count =
      uint64_t{info.f_blocks} * info.f_frsize / 8;  // 12 bytes each, twice
  const auto store = Store::Create(pool.path(), spec, QuickOptions());
  EXPECT_EQ(IdOf(store.status()), ErrorId::kPoolFull) << store.status();
  EXPECT_NE(store.status().message().find(std::to_string(FormattedBytes(spec))),
            absl::string_view::npos)
      << store.status();
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreTest, ALimitOfTheLengthOfFilesIsNamed) {
  TemporaryPool pool;
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{FormattedBytes(SmallSpec()) / 2, old_limit.rlim_max};
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(IdOf(store.status()), ErrorId::kPoolFull) << store.status();
  EXPECT_NE(store.status().message().find("ulimit -f"), absl::string_view::npos) << store.status();
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreTest, AWriteErrorDuringFormatLeavesNothing) {
  TemporaryPool pool;
  aio::FaultyDevice* device = nullptr;
  StoreOptions options = FaultyOptions(&device);
  const auto decorate = options.decorate;
  options.decorate = [&](std::unique_ptr<aio::Device> behind) {
    auto faulty = decorate(std::move(behind));
    device->AddFault({aio::FaultKind::kWriteError, 3});
    return faulty;
  };
  EXPECT_FALSE(Store::Create(pool.path(), SmallSpec(), options).ok());
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreTest, FormatReportsProgressUpToTheBytesItTakes) {
  TemporaryPool pool;
  StoreOptions options = QuickOptions();
  uint64_t last = 0, total = 0;
  options.progress = [&](uint64_t done, uint64_t of) {
    EXPECT_GT(done, last);
    last = done;
    total = of;
  };
  auto store = MustCreate(pool, SmallSpec(), options);
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, FormattedBytes(SmallSpec()));
  EXPECT_EQ(std::filesystem::file_size(pool.path() + "/" + pool.Files()[0]), total);
}

// Between the two writes of a superblock pair the copies differ, and a listing may look just then.
TEST(StoreTest, HalfWrittenPairIsDamageOnlyWhenNobodyIsWritingIt) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  auto owner = MustOpen(pool);
  const bool odd = owner->committed().sequence % 2 == 1;
  std::fstream file(pool.path() + "/job.offload", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(Layout::SuperblockOffset(odd ? 3 : 1) + 600));
  file.put('x');
  file.close();
  const auto listed = ListStores(pool.path());
  ASSERT_TRUE(listed.ok());
  EXPECT_TRUE((*listed)[0].in_use);
  EXPECT_TRUE((*listed)[0].damage.ok()) << (*listed)[0].damage;
  EXPECT_EQ((*listed)[0].committed.epoch, EpochOf(1));
  owner.reset();
  EXPECT_FALSE((*ListStores(pool.path()))[0].damage.ok());
}

TEST(StoreTest, FormatThatNobodyWantsAnyMoreLeavesNothing) {
  TemporaryPool pool;
  StoreOptions options = QuickOptions();
  bool begun = false;
  options.progress = [&](uint64_t, uint64_t) { begun = true; };
  options.cancelled = [&] { return begun; };
  EXPECT_EQ(IdOf(Store::Create(pool.path(), SmallSpec(), options).status()),
            ErrorId::kSessionEnded);
  EXPECT_TRUE(begun);
  EXPECT_TRUE(pool.Files().empty());
}

TEST(StoreTest, WaitForALockEndsWhenNobodyWantsTheStoreAnyMore) {
  TemporaryPool pool;
  auto owner = MustCreate(pool, SmallSpec(), QuickOptions());
  StoreOptions options = QuickOptions();
  options.lock_timeout_seconds = 1e9;
  options.cancelled = [] { return true; };
  EXPECT_EQ(IdOf(Store::Create(pool.path(), SmallSpec(), options).status()),
            ErrorId::kSessionEnded);
  owner.reset();
  MakeStore(pool, 1);
  auto opened = Store::Open(pool.path(), "job", QuickOptions());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(IdOf(Store::Open(pool.path(), "job", options).status()), ErrorId::kSessionEnded);
}

TEST(StoreTest, AnotherFormatVersionIsNamedAsSuch) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  for (uint32_t copy = 0; copy < 2; ++copy) {
    std::fstream file(pool.path() + "/job.offload",
                      std::ios::in | std::ios::out | std::ios::binary);
    HeaderPage page;
    file.seekg(static_cast<std::streamoff>(Layout::HeaderOffset(copy)));
    file.read(reinterpret_cast<char*>(&page), sizeof(page));
    page.prefix.version = 99;
    const auto* bytes = reinterpret_cast<const char*>(&page);
    page.prefix.crc = Crc32c(Crc32c(0, bytes, 12), bytes + 16, sizeof(page) - 16);
    file.seekp(static_cast<std::streamoff>(Layout::HeaderOffset(copy)));
    file.write(bytes, sizeof(page));
  }
  EXPECT_EQ(IdOf(Store::Open(pool.path(), "job", QuickOptions()).status()), ErrorId::kStoreVersion);
  EXPECT_EQ(IdOf((*ListStores(pool.path()))[0].damage), ErrorId::kStoreVersion);
}

TEST(StoreTest, ATruncatedStoreIsDamagedNotACrash) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  const std::string path = pool.path() + "/job.offload";
  for (uint64_t size = FormattedBytes(SmallSpec()); size > 0;) {
    size = size > 200000 ? size - 199 * 512 : size - std::min<uint64_t>(size, 7 * 512);
    std::filesystem::resize_file(path, size);
    EXPECT_EQ(IdOf(Store::Open(pool.path(), "job", QuickOptions()).status()),
              ErrorId::kStoreDamaged)
        << size;
  }
}

TEST(StoreTest, RefusesFilesThatAreNotItsOwn) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  const std::string path = pool.path() + "/job.offload";
  const auto open_error = [&] {
    return IdOf(Store::Open(pool.path(), "job", QuickOptions()).status());
  };
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_EQ(open_error(), ErrorId::kPoolNotUsable);
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  std::filesystem::create_hard_link(path, pool.path() + "/second");
  EXPECT_EQ(open_error(), ErrorId::kPoolNotUsable);
  std::filesystem::remove(path);
  std::filesystem::create_symlink(pool.path() + "/second", path);
  EXPECT_EQ(open_error(), ErrorId::kPoolNotUsable);
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_EQ(open_error(), ErrorId::kPoolNotUsable);
  std::filesystem::remove(path);
  std::filesystem::rename(pool.path() + "/second", pool.path() + "/other.offload");
  EXPECT_EQ(IdOf(Store::Open(pool.path(), "other", QuickOptions()).status()),
            ErrorId::kStoreDamaged)
      << "says it is of job 'job'";
}

TEST(StoreTest, RemoveTakesAStoreAwayAlsoADamagedOne) {
  TemporaryPool pool;
  MakeStore(pool, 1);
  std::filesystem::resize_file(pool.path() + "/job.offload", 4096);
  EXPECT_EQ(RemoveStore(pool.path(), "job"), absl::OkStatus());
  EXPECT_TRUE(pool.Files().empty());
  EXPECT_TRUE(absl::IsNotFound(RemoveStore(pool.path(), "job")));
  EXPECT_EQ(IdOf(RemoveStore(pool.path(), "../job")), ErrorId::kBadValue);
}

absl::Status WriteAsideNow(Store& store, std::span<const WriteRequest> requests) {
  return RunToEnd(store, [&](Store::Done done) { store.WriteAside(requests, std::move(done)); });
}

TEST(StoreTest, WhatIsWrittenAsideIsNothingUntilItIsAdopted) {
  for (const bool adopts : {false, true}) {
    TemporaryPool pool;
    MakeStore(pool, 2);
    auto store = MustOpen(pool);
    const uint64_t sequence = store->open_sequence();
    const ScriptWrites writes = MakeScriptWrites(*store);
    ASSERT_EQ(WriteAsideNow(*store, writes.requests), absl::OkStatus());
    EXPECT_EQ(CheckScript(*store, 2), absl::OkStatus());
    EXPECT_FALSE(store->has_uncommitted_writes());
    if (adopts) {
      ASSERT_EQ(store->Adopt(writes.requests, sequence), absl::OkStatus());
      EXPECT_TRUE(store->has_uncommitted_writes());
      ASSERT_EQ(CommitNow(*store, EpochOf(sequence), BlobOf(sequence)), absl::OkStatus());
    }
    store.reset();
    store = MustOpen(pool);
    EXPECT_EQ(CheckScript(*store, adopts ? 3 : 2), absl::OkStatus());
    // Either way the next epochs are written as ever.
    for (int i = 0; i < 2; ++i) ASSERT_EQ(CommitScript(*store), absl::OkStatus());
    EXPECT_EQ(CheckScript(*store, adopts ? 5 : 4), absl::OkStatus());
  }
}

TEST(StoreTest, WhatIsWrittenAsideIsOfOneEpochAndGivesWayToWrites) {
  TemporaryPool pool;
  MakeStore(pool, 2);
  auto store = MustOpen(pool);
  uint64_t sequence = store->open_sequence();
  ScriptWrites aside = MakeScriptWrites(*store);
  ASSERT_EQ(WriteAsideNow(*store, aside.requests), absl::OkStatus());
  ASSERT_EQ(CommitScript(*store), absl::OkStatus());  // over what was written aside
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Adopt(aside.requests, sequence)));
  EXPECT_EQ(CheckScript(*store, 3), absl::OkStatus());

  sequence = store->open_sequence();
  aside = MakeScriptWrites(*store);
  ASSERT_EQ(WriteScript(*store), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(WriteAsideNow(*store, aside.requests)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Adopt(aside.requests, sequence)));
  ASSERT_EQ(CommitNow(*store, EpochOf(sequence), BlobOf(sequence)), absl::OkStatus());
  EXPECT_EQ(CheckScript(*store, 4), absl::OkStatus());
}

TEST(PoolTest, NamesOfJobs) {
  for (const char* good : {"a", "run-1", "A.b_c-d#2", "x.offload"})
    EXPECT_TRUE(IsValidJobName(good)) << good;
  for (const char* bad : {"", ".hidden", "..", "a/b", "a b", "ü", "a\n"})
    EXPECT_FALSE(IsValidJobName(bad)) << bad;
  EXPECT_TRUE(IsValidJobName(std::string(128, 'x')));
  EXPECT_FALSE(IsValidJobName(std::string(129, 'x')));
}

TEST(PoolTest, RefusesWhatCannotHoldStores) {
  TemporaryPool pool;
  EXPECT_EQ(CheckPool(pool.path()), absl::OkStatus());
  EXPECT_TRUE(pool.Files().empty());
  EXPECT_EQ(IdOf(CheckPool(pool.path() + "/missing")), ErrorId::kPoolMissing);
  std::ofstream(pool.path() + "/file") << "x";
  EXPECT_EQ(IdOf(CheckPool(pool.path() + "/file")), ErrorId::kPoolNotUsable);
  EXPECT_EQ(IdOf(Store::Open(pool.path() + "/missing", "job", QuickOptions()).status()),
            ErrorId::kPoolMissing);
}

TEST(PoolTest, RefusesTmpfs) {
  struct stat info {};
  if (stat("/dev/shm", &info) != 0) GTEST_SKIP() << "no /dev/shm";
  const absl::Status status = CheckPool("/dev/shm");
  EXPECT_EQ(IdOf(status), ErrorId::kPoolNoDirectIo) << status;
  EXPECT_NE(status.message().find("tmpfs"), absl::string_view::npos) << status;
}

TEST(PoolTest, RefusesADirectoryThatThisUserCannotWrite) {
  TemporaryPool pool;
  const bool root = geteuid() == 0;
  ASSERT_EQ(chmod(pool.path().c_str(), 0555), 0);
  if (root && seteuid(65534) != 0) GTEST_SKIP() << "root without the right to become another user";
  const absl::Status status = CheckPool(pool.path());
  EXPECT_TRUE(!root || seteuid(0) == 0);
  ASSERT_EQ(chmod(pool.path().c_str(), 0755), 0);
  EXPECT_EQ(IdOf(status), ErrorId::kPoolNotUsable) << status;
  EXPECT_NE(status.message().find(pool.path()), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace offload::swap
