// The windows of several ranks over one slab: threads, each with a stand-in of its own, and once a
// process that is killed.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "base/error.h"
#include "base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "zero3/gpu/careless_accelerator.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_window.h"
#include "zero3/gpu/peer_fixture.h"
#include "zero3/gpu/peer_group.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Stream;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kWeights = 10;
constexpr uint64_t kWeightBytes = 40'004;  // with a rest for every number of ranks
constexpr uint64_t kRingBytes = 64 << 10;
constexpr uint64_t kNowhereEnough = 4;  // weights of the window

// The daemon's memory.
struct Slab {
  Slab() : bytes(kWeights * kWeightBytes) { Change(0); }
  // Nobody holds a lease.
  void Change(uint64_t version) { Random(version + 1).Fill(bytes); }
  std::span<const std::byte> weight(uint32_t tensor) const {
    return std::span(bytes).subspan(tensor * kWeightBytes, kWeightBytes);
  }
  std::vector<std::byte> bytes;
};

class Source final : public WeightSource {
 public:
  explicit Source(const Slab* slab) : slab_(slab) {}
  void Prefetch(uint32_t) override {}
  absl::StatusOr<const std::byte*> TryLease(uint32_t tensor) override {
    ++leases_;
    return slab_->weight(tensor).data();
  }
  absl::StatusOr<const std::byte*> Lease(uint32_t tensor) override { return TryLease(tensor); }
  void Return(uint32_t) override { --leases_; }
  int leases() const { return leases_; }

 private:
  const Slab* const slab_;
  int leases_ = 0;
};

HostAccelerator::Options OptionsOf(uint32_t rank, uint64_t seed) {
  const bool is_late = (rank + seed) % 2 == 1;
  return {.seed = seed * 100 + rank,
          .pace = is_late ? accelerator::Pace::kLate : accelerator::Pace::kRandom,
          .queries_are_late = is_late,
          .registers_read_only = seed % 3 != 0,  // else through a ring
          .peer_address = "standin/" + std::to_string(rank)};
}

// A rank: what runs on it are operators that read a weight to the host.
class Rank {
 public:
  Rank(const Slab* slab, uint32_t rank, const HostAccelerator::Options& options)
      : rank_(rank), device_(options), slab_(slab), source_(slab), result_(kWeightBytes) {}
  ~Rank() { Close(); }

  void Join(uint32_t world_size, const PeerGroup::Exchange& exchange, bool takes_part = true,
            bool asks = true) {
    auto joined =
        PeerGroup::Join(&device_, kWeights, {rank_, world_size, takes_part, asks}, exchange);
    ASSERT_TRUE(joined.ok()) << joined.status();
    group_ = std::move(joined->group);
    why_not_ = joined->why_not;
  }

  void OpenWindow(accelerator::Accelerator* device = nullptr) {
    ring_.resize(kRingBytes);
    slab_held_ =
        *HostRegistration::Register(&device_, slab_->bytes, {}, accelerator::HostAccess::kReadOnly);
    ring_held_ =
        *HostRegistration::Register(&device_, ring_, {}, accelerator::HostAccess::kReadWrite);
    result_held_ =
        *HostRegistration::Register(&device_, result_, {}, accelerator::HostAccess::kReadWrite);
    window_ = *GpuWindow::Make(
        device == nullptr ? &device_ : device, &source_,
        std::vector<uint64_t>(kWeights, kWeightBytes),
        {.window_bytes = kNowhereEnough * DeviceBytes(kWeightBytes),
         .lookahead_bytes = 2 * DeviceBytes(kWeightBytes),
         .leased_bytes_max = 3 * kWeightBytes,
         .source_is_shared = true,
         .staging = slab_held_.held() ? std::span<std::byte>() : std::span<std::byte>(ring_),
         .peers = group_.get(),
         .source_begin = slab_->bytes.data()});
    window_->SetRecording(true);
    stream_ = *device_.StreamCreate();
    event_ = *device_.EventCreate();
  }

  absl::Status Operator(uint32_t tensor) {
    const absl::StatusOr<std::byte*> bytes = window_->Pin(tensor, stream_);
    if (!bytes.ok()) return bytes.status();
    device_.NoteUse(stream_, accelerator::Use::kRead, *bytes, kWeightBytes);
    const absl::Status copied = device_.MemcpyToHost(result_.data(), *bytes, kWeightBytes, stream_);
    const absl::Status unpinned = window_->Unpin(tensor, stream_);
    return copied.ok() ? unpinned : copied;
  }
  void Finish() {
    device_.EventRecord(event_, stream_).IgnoreError();
    device_.EventSynchronize(event_).IgnoreError();
  }
  // An operator, and what it has read is the weight.
  void Check(uint32_t tensor) {
    const absl::Status status = Operator(tensor);
    ASSERT_TRUE(status.ok()) << status;
    Finish();
    ASSERT_EQ(std::memcmp(result_.data(), slab_->weight(tensor).data(), kWeightBytes), 0)
        << "tensor " << tensor << " of rank " << rank_;
  }

  void Close() {
    if (window_ == nullptr) return;
    Finish();
    window_->BeginSourceWait();  // takes back its offers: the others can agree to nothing more
    gathers_ = window_->counters().gathers;
    window_->EndSourceWait();
    window_.reset();
    group_.reset();
    EXPECT_EQ(source_.leases(), 0);
  }

  GpuWindow& window() { return *window_; }
  PeerGroup* group() { return group_.get(); }
  const std::string& why_not() const { return why_not_; }
  HostAccelerator& device() { return device_; }
  const std::vector<std::byte>& result() const { return result_; }
  uint64_t gathers() const { return gathers_; }
  int leases() const { return source_.leases(); }
  uint32_t rank() const { return rank_; }

 private:
  const uint32_t rank_;
  HostAccelerator device_;
  const Slab* const slab_;
  Source source_;
  std::vector<std::byte> ring_, result_;
  HostRegistration slab_held_, ring_held_, result_held_;
  std::unique_ptr<PeerGroup> group_;
  std::string why_not_;
  std::unique_ptr<GpuWindow> window_;
  Stream stream_;
  accelerator::Event event_;
  uint64_t gathers_ = 0;
};

// A step, as all ranks take it: the bytes of all weights change while nobody has a lease.
void Step(Threads& threads, Slab& slab, Rank& rank, uint64_t version) {
  std::vector<uint32_t> all(kWeights);
  for (uint32_t tensor = 0; tensor < kWeights; ++tensor) all[tensor] = tensor;
  rank.Finish();
  rank.window().BeginSourceWait();
  EXPECT_EQ(rank.leases(), 0);
  threads.Meet();
  if (rank.rank() == 0) slab.Change(version);
  threads.Meet();
  rank.window().EndSourceWait();
  ASSERT_TRUE(rank.window().EndStep(all).ok());
}

struct Found {
  std::vector<std::string> violations;
  std::vector<uint64_t> gathers;  // by rank
};

// Every rank trains for some steps; `pass` is its forward and backward.
using Pass = std::function<void(Rank& rank, Threads& threads, uint64_t step)>;
Found Train(uint32_t world_size, uint64_t seed, const Pass& pass,
            CarelessAccelerator::Mistakes mistakes = {}) {
  Slab slab;
  Threads threads(world_size);
  Found found;
  std::mutex mutex;
  threads.Run([&](uint32_t number) {
    Rank rank(&slab, number, OptionsOf(number, seed));
    rank.Join(world_size, threads.ExchangeOf(number));
    ASSERT_NE(rank.group(), nullptr) << rank.why_not();
    CarelessAccelerator careless(&rank.device(), mistakes);
    rank.OpenWindow(&careless);
    for (uint64_t step = 1; step <= 4; ++step) {
      pass(rank, threads, step);
      Step(threads, slab, rank, step);
    }
    rank.Close();
    const std::lock_guard lock(mutex);
    for (const std::string& violation : rank.device().Violations())
      found.violations.push_back(violation);
    found.gathers.push_back(rank.gathers());
  });
  return found;
}

void ForwardAndBackward(Rank& rank) {
  for (uint32_t tensor = 0; tensor < kWeights; ++tensor) rank.Check(tensor);
  for (uint32_t tensor = kWeights; tensor-- > 0;) rank.Check(tensor);
}

// ---- Tests -------------------------------------------------------------------------------------

TEST(GpuWindowPeersTest, RanksThatGoTheSameWayGather) {
  for (uint64_t seed = 1; seed <= 9; ++seed) {
    SCOPED_TRACE(seed);
    const uint32_t world_size = 2 + seed % 3;
    const Found found = Train(world_size, seed, [](Rank& rank, Threads& threads, uint64_t) {
      threads.Meet();  // what the step has announced is offered by all
      ForwardAndBackward(rank);
    });
    EXPECT_THAT(found.violations, IsEmpty());
    for (const uint64_t gathers : found.gathers) {
      EXPECT_GE(gathers, 2u) << "the first weights of later steps, at least";
      EXPECT_EQ(gathers, found.gathers.front());
    }
  }
}

// Other orders, weights that some do not use, one that does nothing, one that goes alone: nobody
// waits for another, and every value is right.
TEST(GpuWindowPeersTest, RanksThatGoTheirOwnWaysDoNotWaitForEachOther) {
  for (uint64_t seed = 1; seed <= 9; ++seed) {
    SCOPED_TRACE(seed);
    const Found found = Train(3, seed, [seed](Rank& rank, Threads&, uint64_t step) {
      if (rank.rank() == (seed + step) % 3) return;
      Random random(seed * 1000 + step * 10 + rank.rank());
      const uint64_t uses = random.Below(60);
      for (uint64_t use = 0; use < uses; ++use) {
        const bool follows = random.Below(4) != 0;
        rank.Check(follows ? static_cast<uint32_t>(use % kWeights)
                           : static_cast<uint32_t>(random.Below(kWeights)));
      }
    });
    EXPECT_THAT(found.violations, IsEmpty());
    for (const uint64_t gathers : found.gathers) EXPECT_EQ(gathers, found.gathers.front());
  }
}

TEST(GpuWindowPeersTest, ARankThatHasEndedLeavesTheOthersTheirOwnCopies) {
  Slab slab;
  Threads threads(2);
  threads.Run([&](uint32_t number) {
    Rank rank(&slab, number, OptionsOf(number, 1));
    rank.Join(2, threads.ExchangeOf(number));
    rank.OpenWindow();
    for (uint64_t step = 1; step <= 2; ++step) {
      ForwardAndBackward(rank);
      Step(threads, slab, rank, step);
    }
    if (number == 1) rank.Close();
    threads.Meet();
    if (number == 0) {
      ForwardAndBackward(rank);
      ForwardAndBackward(rank);
    }
    rank.Close();
    EXPECT_THAT(rank.device().Violations(), IsEmpty());
  });
}

TEST(GpuWindowPeersTest, AMissingWaitOfTheWindowIsFoundInEveryRun) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const Found found = Train(2, seed,
                              [](Rank& rank, Threads& threads, uint64_t) {
                                threads.Meet();
                                for (uint32_t tensor = 0; tensor < kWeights; ++tensor)
                                  ASSERT_TRUE(rank.Operator(tensor).ok());
                              },
                              {.own_wait = false});
    EXPECT_THAT(found.violations, Contains(HasSubstr("no event orders"))) << "seed " << seed;
  }
}

TEST(PeerGroupTest, NobodyTakesPartWhenOneDoesNotReachTheOthers) {
  Slab slab;
  Threads threads(3);
  threads.Run([&](uint32_t number) {
    HostAccelerator::Options options = OptionsOf(number, 1);
    if (number == 1) options.peer_address.clear();
    Rank rank(&slab, number, options);
    rank.Join(3, threads.ExchangeOf(number));
    EXPECT_EQ(rank.group(), nullptr);
    EXPECT_THAT(rank.why_not(), HasSubstr("rank 1: stand-in reaches no other device"));
  });
}

TEST(PeerGroupTest, NobodyTakesPartWhenOneHasNoDevice) {
  Slab slab;
  Threads threads(2);
  threads.Run([&](uint32_t number) {
    if (number == 1) {
      EXPECT_TRUE(PeerGroup::StayOut(threads.ExchangeOf(number)).ok());
      return;
    }
    Rank rank(&slab, number, OptionsOf(number, 1));
    rank.Join(2, threads.ExchangeOf(number));
    EXPECT_EQ(rank.group(), nullptr);
    EXPECT_THAT(rank.why_not(), HasSubstr("rank 1: has no device"));
  });
}

TEST(PeerGroupTest, NobodyTakesPartWhenTwoHaveOneDeviceOrOneIsToldNotTo) {
  Slab slab;
  Threads threads(2);
  threads.Run([&](uint32_t number) {
    Rank same(&slab, number, OptionsOf(0, 1));
    same.Join(2, threads.ExchangeOf(number));
    EXPECT_EQ(same.group(), nullptr);
    EXPECT_THAT(same.why_not(), HasSubstr("rank 0: stand-in does not reach standin/0"));
    Rank told(&slab, number, OptionsOf(number, 1));
    told.Join(2, threads.ExchangeOf(number), /*takes_part=*/number == 0);
    EXPECT_EQ(told.group(), nullptr);
    EXPECT_THAT(told.why_not(), HasSubstr("rank 1: told not to"));
    Rank given(&slab, number, OptionsOf(0, 1));
    given.Join(2, threads.ExchangeOf(number), /*takes_part=*/true, /*asks=*/false);
    EXPECT_NE(given.group(), nullptr) << given.why_not();
  });
}

TEST(GpuWindowPeersTest, AFailedDeviceIsAnErrorOfAllRanks) {
  Slab slab;
  Threads threads(2);
  threads.Run([&](uint32_t number) {
    HostAccelerator::Options options = OptionsOf(number, 1);
    if (number == 1) options.failing_copy = 25;
    Rank rank(&slab, number, options);
    rank.Join(2, threads.ExchangeOf(number));
    rank.OpenWindow();
    absl::Status status;
    for (uint32_t use = 0; status.ok(); ++use) {
      status = rank.Operator(use % kWeights);
      rank.Finish();
    }
    if (number == 0) {
      EXPECT_EQ(ErrorIdOf(status), ErrorId::kRankLost) << status;
      EXPECT_THAT(status.ToString(), HasSubstr("the device of rank 1 has failed"));
    } else {
      EXPECT_EQ(ErrorIdOf(status), ErrorId::kGpuFailed) << status;
    }
    EXPECT_EQ(rank.Operator(0), status) << "and stays one";
    threads.Meet();
  });
}

// Rank 1 agrees to gather, and never comes: it is killed while rank 0's stream waits for it.
TEST(GpuWindowPeersTest, ARankThatIsKilledAmidAGatherIsAnErrorOfTheOthers) {
  int sockets[2] = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  Slab slab;
  const pid_t child = fork();
  if (child == 0) {
    HostAccelerator device(OptionsOf(1, 1));
    auto joined = PeerGroup::Join(&device, kWeights, {1, 2, true}, ExchangeOver(sockets[1], 1));
    if (!joined.ok() || joined->group == nullptr) _exit(1);
    for (uint32_t tensor = 0; tensor < kWeights; ++tensor)
      joined->group->agreement().Offer(tensor, tensor * kWeightBytes);
    char byte = 0;
    send(sockets[1], &byte, 1, 0);
    for (;;) pause();
  }
  Rank rank(&slab, 0, OptionsOf(0, 1));
  rank.Join(2, ExchangeOver(sockets[0], 0));
  ASSERT_NE(rank.group(), nullptr) << rank.why_not();
  char byte = 0;
  ASSERT_EQ(recv(sockets[0], &byte, 1, 0), 1);
  rank.OpenWindow();
  // A first round, with nothing ahead of use, gives the schedule; the next one is gathered.
  for (uint32_t tensor = 0; tensor < kWeights; ++tensor) rank.Check(tensor);
  ASSERT_TRUE(rank.window().EndStep({}).ok());
  EXPECT_EQ(rank.window().counters().gathers, 2u) << "as the window looks ahead";
  kill(child, SIGKILL);
  absl::Status status;
  for (uint32_t use = 0; status.ok(); ++use) {
    status = rank.Operator(use % kWeights);
    rank.Finish();
    // The weight, or nothing that a trainer could take for it.
    const auto expected = slab.weight(use % kWeights);
    for (size_t i = 0; status.ok() && i < kWeightBytes; ++i)
      ASSERT_TRUE(rank.result()[i] == expected[i] || rank.result()[i] == std::byte{0xFF}) << i;
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kRankLost) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("rank 1"));
  rank.Close();
  close(sockets[0]);
  close(sockets[1]);
}

}  // namespace
}  // namespace offload::zero3
