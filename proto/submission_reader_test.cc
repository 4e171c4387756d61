#include "proto/submission_reader.h"

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "proto/ring.h"

namespace offload::proto {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kBuffer = kRegionFixedBytes;

// Tensor 0: bf16, two extents and 100 elements. 1: fp32 bias. 2: frozen bf16.
Catalogue SmallModel() {
  absl::StatusOr<Catalogue> catalogue = BuildCatalogue(
      {{.name = "weight", .shape = {2 * kExtentElements + 100}, .dtype = Dtype::kBFloat16},
       {.name = "bias", .shape = {10}, .dtype = Dtype::kFloat32},
       {.name = "frozen", .shape = {64}, .dtype = Dtype::kBFloat16, .trainable = false}});
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return *std::move(catalogue);
}

SubmissionEntry Entry(RingOperation operation, uint32_t tensor = 0, uint64_t offset = 0,
                      uint64_t count = 0, uint64_t region_offset = 0,
                      Plane plane = Plane::kWeight) {
  SubmissionEntry entry{};
  entry.tag = 1;
  entry.operation = operation;
  entry.tensor = tensor;
  entry.plane = plane;
  entry.element_offset = offset;
  entry.element_count = count;
  entry.region_offset = region_offset;
  return entry;
}

class CheckSubmissionTest : public testing::Test {
 protected:
  CheckSubmissionTest() {
    limits_.catalogue = &catalogue_;
    limits_.scratch_bytes = 64 << 20;
  }
  void ExpectAccepted(const SubmissionEntry& entry) const {
    const absl::Status status = CheckSubmission(entry, limits_);
    EXPECT_TRUE(status.ok()) << status;
  }
  // The fault names the field.
  void ExpectFault(const SubmissionEntry& entry, const std::string& field) const {
    const absl::Status status = CheckSubmission(entry, limits_);
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kProtocol) << status;
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status << " for " << field;
  }
  const Catalogue catalogue_ = SmallModel();
  SubmissionLimits limits_;
};

TEST_F(CheckSubmissionTest, AcceptsEveryOperationAtItsLimits) {
  ExpectAccepted(Entry(RingOperation::kNop));
  ExpectAccepted(Entry(RingOperation::kAcquire, 2));
  ExpectAccepted(Entry(RingOperation::kPrefetch, 2));
  ExpectAccepted(Entry(RingOperation::kPut, 0, 0, kExtentElements, kBuffer));
  ExpectAccepted(Entry(RingOperation::kPut, 0, 2 * kExtentElements, 100, kBuffer));
  ExpectAccepted(Entry(RingOperation::kGet, 0, 0, kExtentElements, kBuffer, Plane::kMaster));
  ExpectAccepted(Entry(RingOperation::kScratchWrite, 0, (64 << 20) - 4096, 4096, kBuffer));
  limits_.region_bytes = kBuffer + (16 << 20);
  ExpectAccepted(Entry(RingOperation::kScratchRead, 0, 0, 16 << 20, kBuffer));
}

TEST_F(CheckSubmissionTest, RefusesUnknownOperations) {
  ExpectFault(Entry(static_cast<RingOperation>(15)), "operation 15");
  ExpectFault(Entry(static_cast<RingOperation>(UINT32_MAX)), "operation");
}

TEST_F(CheckSubmissionTest, RefusesReservedAndUnusedFields) {
  SubmissionEntry entry = Entry(RingOperation::kAcquire, 1);
  entry.pass = 1;
  ExpectFault(entry, "pass");
  entry = Entry(RingOperation::kAcquire, 1);
  entry.reserved1 = 1;
  ExpectFault(entry, "reserved1");
  entry = Entry(RingOperation::kAcquire, 1);
  for (const RingOperation operation : {RingOperation::kAcquire, RingOperation::kPut}) {
    entry = Entry(operation, 1);
    entry.digest = kHuge;
    ExpectFault(entry, "digest");
  }
  ExpectFault(Entry(RingOperation::kNop, 1), "tensor");
  ExpectFault(Entry(RingOperation::kAcquire, 1, 0, 0, 0, Plane::kMaster), "plane");
  ExpectFault(Entry(RingOperation::kAcquire, 1, 5), "element_offset");
  ExpectFault(Entry(RingOperation::kAcquire, 1, 0, 5), "element_count");
  ExpectFault(Entry(RingOperation::kPrefetch, 1, 0, 0, 4096), "region_offset");
  ExpectFault(Entry(RingOperation::kScratchRead, 1, 0, 4096, kBuffer), "tensor");
  ExpectFault(Entry(RingOperation::kScratchRead, 0, 0, 4096, kBuffer, Plane::kMaster), "plane");
}

TEST_F(CheckSubmissionTest, RefusesTensorsThatAreNotThere) {
  ExpectFault(Entry(RingOperation::kAcquire, 3), "tensor 3");
  ExpectFault(Entry(RingOperation::kPut, UINT32_MAX, 0, 1, kBuffer), "tensor");
  limits_.catalogue = nullptr;
  ExpectFault(Entry(RingOperation::kAcquire, 0), "not sealed");
}

TEST_F(CheckSubmissionTest, RefusesPlanesThatATensorDoesNotHave) {
  const auto get = [](uint32_t tensor, Plane plane) {
    return Entry(RingOperation::kGet, tensor, 0, 1, kBuffer, plane);
  };
  const auto put = [](uint32_t tensor, Plane plane) {
    return Entry(RingOperation::kPut, tensor, 0, 1, kBuffer, plane);
  };
  for (const Plane plane : {Plane::kResidual, Plane::kTies})
    ExpectFault(put(0, plane), "can be put");
  ExpectFault(put(0, Plane::kState2), "no such plane");
  ExpectFault(put(2, Plane::kState0), "no such plane");
  ExpectAccepted(put(0, Plane::kState1));
  ExpectAccepted(put(0, Plane::kMaster));
  for (const uint32_t tensor : {1u, 2u}) ExpectFault(put(tensor, Plane::kMaster), "can be put");
  ExpectFault(get(1, Plane::kResidual), "plane");
  ExpectFault(get(2, Plane::kState0), "plane");
  ExpectFault(get(2, Plane::kMaster), "plane");
  ExpectFault(get(0, static_cast<Plane>(4)), "plane 4");
  ExpectAccepted(get(0, Plane::kResidual));
  ExpectFault(get(2, Plane::kResidual), "plane");
  ExpectAccepted(get(0, Plane::kState1));
  ExpectFault(get(2, Plane::kState1), "plane");
  const Catalogue plain = *BuildCatalogue(catalogue_.tensors, kernels::OptimizerSpec("sgd"));
  limits_.catalogue = &plain;
  ExpectFault(get(0, Plane::kState0), "plane");
  const Catalogue momentum =
      *BuildCatalogue(catalogue_.tensors, kernels::OptimizerSpec("sgd", {{"momentum", 0.9}}));
  limits_.catalogue = &momentum;
  ExpectAccepted(get(0, Plane::kState0));
  ExpectFault(get(0, Plane::kState1), "plane");
}

TEST_F(CheckSubmissionTest, AcceptsDigestsOfPutsOfSeveralRanks) {
  limits_.has_several_ranks = true;
  for (const uint64_t count : {0, 1}) {
    SubmissionEntry entry = Entry(RingOperation::kPut, 0, 0, count, count == 0 ? 0 : kBuffer);
    entry.digest = kHuge;
    ExpectAccepted(entry);
  }
  SubmissionEntry get = Entry(RingOperation::kGet, 0, 0, 1, kBuffer);
  get.digest = 1;
  ExpectFault(get, "digest");
}

TEST_F(CheckSubmissionTest, RefusesElementRangesOutsideTheTensor) {
  const auto put = [](uint64_t offset, uint64_t count) {
    return Entry(RingOperation::kPut, 0, offset, count, kBuffer);
  };
  ExpectFault(put(1, 1), "element_offset");
  ExpectFault(put(0, 0), "element_count");
  ExpectFault(put(0, kExtentElements + 1), "element_count");
  ExpectFault(put(0, kHuge), "element_count");
  ExpectFault(put(2 * kExtentElements, 101), "element_offset");
  ExpectFault(put(3 * kExtentElements, 1), "element_offset");
  ExpectFault(put(kHuge - kExtentElements + 1, kExtentElements), "element_offset");
}

TEST_F(CheckSubmissionTest, RefusesBuffersOutsideTheAllocatedRegion) {
  limits_.region_bytes = kBuffer + 8192;
  const auto get = [](uint64_t region_offset, uint64_t count) {
    return Entry(RingOperation::kGet, 0, 0, count, region_offset);
  };
  ExpectAccepted(get(kBuffer, 4096));
  ExpectFault(get(kBuffer, 4097), "region_offset");
  ExpectFault(get(kBuffer + 8192, 1), "region_offset");
  ExpectFault(get(kBuffer + 64, 1), "region_offset");
  ExpectFault(get(0, 1), "rings");
  ExpectFault(get(kBuffer - 4096, 1), "rings");
  ExpectFault(get(kHuge - 4095, 4096), "region_offset");
}

TEST_F(CheckSubmissionTest, RefusesScratchRangesOutsideTheFile) {
  const auto write = [](uint64_t offset, uint64_t length) {
    return Entry(RingOperation::kScratchWrite, 0, offset, length, kBuffer);
  };
  ExpectFault(write(512, 4096), "scratch offset");
  ExpectFault(write(0, 0), "scratch length");
  ExpectFault(write(0, 100), "scratch length");
  ExpectFault(write(0, (16 << 20) + 4096), "scratch length");
  ExpectFault(write(64 << 20, 4096), "scratch offset");
  ExpectFault(write(kHuge - 4095, 4096), "scratch offset");
}

TEST_F(CheckSubmissionTest, AcceptsOperationsOnGradientsWhereTheDaemonAddsThem) {
  limits_.adds_gradients = true;
  ExpectAccepted(Entry(RingOperation::kBeginGradients, 0, kHuge));
  SubmissionEntry part =
      Entry(RingOperation::kGradient, 0, kExtentElements, kExtentElements, kBuffer);
  part.pass = UINT32_MAX;
  part.start = GradientStart::kPrevious;
  ExpectAccepted(part);
  ExpectAccepted(Entry(RingOperation::kGradient, 0, 2 * kExtentElements, 100, kBuffer));
  ExpectAccepted(Entry(RingOperation::kGradient, 1, 0, 10, kBuffer));
  ExpectAccepted(Entry(RingOperation::kGradient, 0, kExtentElements + 64, 128, kBuffer));
  SubmissionEntry end = Entry(RingOperation::kEndPass);
  end.pass = 3;
  end.start = static_cast<GradientStart>(1);
  ExpectAccepted(end);
  SubmissionEntry look = Entry(RingOperation::kAwaitGradient, 1);
  look.pass = 4;
  ExpectAccepted(look);
  ExpectAccepted(Entry(RingOperation::kPublishNorm, 1, UINT32_MAX));
}

TEST_F(CheckSubmissionTest, AReleaseNamesATrainableTensorAndNothingElse) {
  const RingOperation release = RingOperation::kReleaseGradient;
  ExpectAccepted(Entry(release, 1));
  ExpectFault(Entry(release, 2), "tensor 2");
  ExpectFault(Entry(release, 3), "tensor 3");
  ExpectFault(Entry(release, 1, 1), "element_offset");
  ExpectFault(Entry(release, 1, 0, 1), "element_count");
  ExpectFault(Entry(release, 1, 0, 0, 4096), "region_offset");
  SubmissionEntry entry = Entry(release, 1);
  entry.pass = 1;
  ExpectFault(entry, "pass");
  limits_.catalogue = nullptr;
  ExpectFault(Entry(release, 1), "not sealed");
}

TEST_F(CheckSubmissionTest, AStepCommandStandsWholeInItsPlace) {
  for (const RingOperation operation : {RingOperation::kStep, RingOperation::kBeginStep}) {
    ExpectAccepted(Entry(operation, 0, 0, 1));
    ExpectAccepted(Entry(operation, 0, 0, kStepCommandBytes));
    ExpectFault(Entry(operation), "element_count 0");
    ExpectFault(Entry(operation, 0, 0, kStepCommandBytes + 1), "element_count");
    ExpectFault(Entry(operation, 0, 0, kHuge), "element_count");
    ExpectFault(Entry(operation, 1, 0, 1), "tensor 1");
    ExpectFault(Entry(operation, 0, 8, 1), "element_offset");
    ExpectFault(Entry(operation, 0, 0, 1, kBuffer), "region_offset");
    SubmissionEntry entry = Entry(operation, 0, 0, 1);
    entry.pass = 1;
    ExpectFault(entry, "pass");
  }
}

TEST_F(CheckSubmissionTest, RefusesOperationsOnGradientsThatRanksAddThemselves) {
  for (const RingOperation operation :
       {RingOperation::kBeginGradients, RingOperation::kGradient, RingOperation::kEndPass,
        RingOperation::kAwaitGradient, RingOperation::kPublishNorm})
    ExpectFault(Entry(operation), "operation");
}

TEST_F(CheckSubmissionTest, RefusesPartsThatAreNotOfOneExtentOfATrainableTensor) {
  limits_.adds_gradients = true;
  const auto part = [](uint32_t tensor, uint64_t offset, uint64_t count) {
    return Entry(RingOperation::kGradient, tensor, offset, count, kBuffer);
  };
  ExpectFault(part(2, 0, 64), "tensor 2");
  ExpectFault(part(3, 0, 64), "tensor 3");
  ExpectFault(part(0, 1, kExtentElements), "element_count");
  ExpectFault(part(0, 3 * kExtentElements, 1), "element_offset");
  ExpectFault(part(0, kHuge - kExtentElements + 1, kExtentElements), "element_offset");
  ExpectFault(part(0, 0, kExtentElements + 1), "element_count");
  ExpectFault(part(0, kExtentElements - 1, 2), "element_count");
  ExpectFault(part(0, 0, kHuge), "element_count");
  ExpectFault(part(0, 2 * kExtentElements, 101), "element_count");
  ExpectFault(part(1, 0, 0), "element_count");
  SubmissionEntry entry = part(1, 0, 10);
  entry.start = static_cast<GradientStart>(3);
  ExpectFault(entry, "start");
  entry = part(1, 0, 10);
  entry.plane = Plane::kMaster;
  ExpectFault(entry, "plane");
  entry = part(1, 0, 10);
  entry.region_offset = 0;
  ExpectFault(entry, "rings");
  limits_.catalogue = nullptr;
  ExpectFault(part(1, 0, 10), "not sealed");
}

TEST_F(CheckSubmissionTest, RefusesFieldsThatAnOperationOnGradientsDoesNotUse) {
  limits_.adds_gradients = true;
  const RingOperation begin = RingOperation::kBeginGradients, end = RingOperation::kEndPass,
                      look = RingOperation::kAwaitGradient, norm = RingOperation::kPublishNorm;
  for (const RingOperation operation : {begin, end, look, norm}) {
    ExpectFault(Entry(operation, 0, 0, 0, 0, Plane::kMaster), "plane");
    ExpectFault(Entry(operation, 0, 0, 1), "element_count");
    ExpectFault(Entry(operation, 0, 0, 0, 4096), "region_offset");
    SubmissionEntry entry = Entry(operation);
    entry.start = static_cast<GradientStart>(2);
    ExpectFault(entry, "start");
    entry = Entry(operation);
    entry.reserved1 = 1;
    ExpectFault(entry, "reserved1");
  }
  for (const RingOperation operation : {begin, norm}) {
    SubmissionEntry entry = Entry(operation);
    entry.pass = 1;
    ExpectFault(entry, "pass");
  }
  for (const RingOperation operation : {begin, end}) ExpectFault(Entry(operation, 1), "tensor");
  for (const RingOperation operation : {look, norm}) ExpectFault(Entry(operation, 2), "tensor 2");
  for (const RingOperation operation : {end, look})
    ExpectFault(Entry(operation, 0, 1), "element_offset");
  ExpectFault(Entry(norm, 1, uint64_t{UINT32_MAX} + 1), "element_offset");
}

TEST_F(CheckSubmissionTest, CountsTheBytesOfATransfer) {
  EXPECT_EQ(TransferBytes(Entry(RingOperation::kGradient, 0, 0, 100, kBuffer), limits_), 200u);
  EXPECT_EQ(TransferBytes(Entry(RingOperation::kPut, 0, 0, 100, kBuffer), limits_), 200u);
  EXPECT_EQ(TransferBytes(Entry(RingOperation::kGet, 0, 0, 100, kBuffer, Plane::kMaster), limits_),
            400u);
  EXPECT_EQ(TransferBytes(Entry(RingOperation::kScratchRead, 0, 0, 8192, kBuffer), limits_), 8192u);
  EXPECT_EQ(TransferBytes(Entry(RingOperation::kScratchWrite, 0, 0, 4096, kBuffer), limits_),
            4096u);
  for (const RingOperation operation : {RingOperation::kAcquire, RingOperation::kNop,
                                        RingOperation::kPrefetch, static_cast<RingOperation>(99)})
    EXPECT_EQ(TransferBytes(Entry(operation), limits_), 0u);
}

// Numbers that a rank was not given: none passes, however many are tried.
TEST_F(CheckSubmissionTest, AMillionForeignTensorsAreRefused) {
  std::mt19937_64 random(4711);
  uint32_t accepted = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    SubmissionEntry entry = Entry(RingOperation::kGet, 0, 0, 1, kBuffer);
    const auto range = UINT32_MAX - static_cast<uint32_t>(catalogue_.tensors.size());
    entry.tensor = static_cast<uint32_t>(catalogue_.tensors.size() + random() % range);
    accepted += CheckSubmission(entry, limits_).ok() ? 1 : 0;
  }
  EXPECT_EQ(accepted, 0u);
}

class SubmissionReaderTest : public testing::Test {
 protected:
  SubmissionReaderTest()
      : region_(static_cast<std::byte*>(
            std::aligned_alloc(4096, static_cast<size_t>(kRegionFixedBytes)))) {
    std::memset(region_.get(), 0, kRegionFixedBytes);
    limits_.catalogue = &catalogue_;
    reader_ = std::make_unique<SubmissionReader>(region_.get());
    reader_->SetLimits(limits_);
    rank_ = std::make_unique<SubmissionProducer>(
        SubmissionEntriesOf(region_.get()), &header()->submission_tail, &header()->submission_head);
  }
  RegionHeader* header() { return HeaderOf(region_.get()); }
  void Submit(const SubmissionEntry& entry) {
    rank_->Push(entry);
    rank_->Publish();
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const Catalogue catalogue_ = SmallModel();
  std::unique_ptr<std::byte, Free> region_;
  SubmissionLimits limits_;
  std::unique_ptr<SubmissionReader> reader_;
  std::unique_ptr<SubmissionProducer> rank_;
};

TEST_F(SubmissionReaderTest, ReturnsCheckedEntriesInOrder) {
  EXPECT_FALSE(reader_->HasNext());
  Submit(Entry(RingOperation::kAcquire, 0));
  Submit(Entry(RingOperation::kAcquire, 2));
  EXPECT_TRUE(reader_->HasNext());
  for (const uint32_t tensor : {0u, 2u}) {
    const auto next = reader_->Next();
    ASSERT_TRUE(next.ok()) << next.status();
    ASSERT_TRUE(next->has_value());
    EXPECT_EQ((*next)->tensor, tensor);
  }
  EXPECT_EQ(reader_->in_flight(), 2u);
  const auto none = reader_->Next();
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->has_value());
}

TEST_F(SubmissionReaderTest, AFaultStays) {
  Submit(Entry(RingOperation::kAcquire, 9));
  Submit(Entry(RingOperation::kAcquire, 0));
  EXPECT_FALSE(reader_->Next().ok());
  EXPECT_TRUE(reader_->HasNext());
  EXPECT_EQ(ErrorIdOf(reader_->Next().status()), ErrorId::kProtocol);
}

TEST_F(SubmissionReaderTest, ACursorThatClaimsTooMuchIsAFault) {
  header()->submission_tail = kSubmissionEntries + 1;
  EXPECT_TRUE(reader_->HasNext());
  EXPECT_EQ(ErrorIdOf(reader_->Next().status()), ErrorId::kProtocol);
}

TEST_F(SubmissionReaderTest, MoreInFlightThanAllowedIsAFault) {
  for (uint32_t i = 0; i < kInFlightMax; ++i) {
    Submit(Entry(RingOperation::kNop));
    ASSERT_TRUE(reader_->Next().ok());
  }
  reader_->CountCompletion();
  Submit(Entry(RingOperation::kNop));
  EXPECT_TRUE(reader_->Next().ok());
  Submit(Entry(RingOperation::kNop));
  EXPECT_EQ(ErrorIdOf(reader_->Next().status()), ErrorId::kProtocol);
}

TEST_F(SubmissionReaderTest, ACompletionWithoutSubmissionIsOurOwnMistake) {
  EXPECT_DEATH(reader_->CountCompletion(), "a completion without submission");
}

// The rank flips entries between a good and bad form while they are read: what passes is the good
// form in every field, never a mixture.
TEST_F(SubmissionReaderTest, WhatPassesIsGoodWhateverTheRankWritesMeanwhile) {
  const SubmissionEntry good = Entry(RingOperation::kPut, 0, kExtentElements, 4096, kBuffer);
  const SubmissionEntry bad = Entry(RingOperation::kPut, 999, kHuge, kHuge, kHuge);
  SubmissionEntry* entries = SubmissionEntriesOf(region_.get());
  std::atomic<bool> stop{false};
  std::thread hostile([&] {
    for (uint32_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
      StoreOnce(&entries[i % 16], good);
      StoreOnce(&entries[(i + 7) % 16], bad);
    }
  });
  uint32_t passed = 0;
  uint32_t refused = 0;
  for (int round = 0; round < 200'000 && (passed < 1000 || refused < 1000); ++round) {
    std::memset(static_cast<void*>(header()), 0, sizeof(RegionHeader));
    SubmissionReader reader(region_.get());
    reader.SetLimits(limits_);
    header()->submission_tail.store(16, std::memory_order_release);
    for (auto next = reader.Next(); next.ok() && next->has_value(); next = reader.Next()) {
      const SubmissionEntry& entry = **next;
      if (entry.operation == RingOperation::kNop) continue;  // not written yet
      ++passed;
      ASSERT_LT(entry.tensor, catalogue_.tensors.size());
      ASSERT_EQ(entry.element_offset, good.element_offset);
      ASSERT_EQ(entry.element_count, good.element_count);
      ASSERT_EQ(entry.region_offset, good.region_offset);
    }
    refused += reader.Next().ok() ? 0 : 1;
  }
  stop = true;
  hostile.join();
  EXPECT_GT(refused, 0u);
}

}  // namespace
}  // namespace offload::proto
