// Gradients of several ranks, exchanged or not: threads, each with a stand-in of its own and the
// window's thread beside it, and once a process that is killed. What the daemon is told is added as
// the daemon would, and has to be the chain of all parts, bit for bit.
#include "zero3/torch/exchanged_parts.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "base/error.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sum.h"
#include "proto/gradient_slices.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/careless_accelerator.h"
#include "zero3/gpu/gpu_window.h"
#include "zero3/gpu/peer_fixture.h"
#include "zero3/gpu/peer_group.h"
#include "zero3/gpu/slice_exchange.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Stream;
using kernels::Dtype;
using kernels::SumStart;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Of these the second has two extents, and the last is too small for an exchange.
constexpr uint64_t kElements[] = {20'003, proto::kExtentElements + 9'001, 16'384, 100};
constexpr uint32_t kTensors = std::size(kElements);
constexpr uint64_t kRegionBytes = 16 << 20;
constexpr uint64_t kAmple = 8 << 20;  // room for all gradients
constexpr std::chrono::hours kForEver(1);

// What ranks have given in a step, and what the daemon was told.
class Daemon {
 public:
  using Bytes = std::vector<std::byte>;
  Daemon(uint32_t world_size, Dtype dtype) : world_size_(world_size), dtype_(dtype) {}

  void Given(uint32_t tensor, uint32_t pass, uint32_t rank, SumStart start, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    starts_.emplace(tensor, start);
    given_[{tensor, pass, rank}] = std::move(bytes);
  }
  client::Ticket Told(uint32_t tensor, uint32_t pass, uint32_t rank, uint64_t offset,
                      uint64_t count, const std::byte* bytes) {
    const std::lock_guard lock(mutex_);
    const uint64_t size_bytes = count * kernels::DtypeBytes(dtype_);
    told_[{tensor, offset / proto::kExtentElements, pass, rank}] = {
        offset, count, Bytes(bytes, bytes + size_bytes)};
    return ++tickets_;
  }

  // The step is over: compares, and forgets. How many slices there were.
  uint64_t Finish(bool compares) {
    uint64_t slices = 0;
    for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
      const Bytes expected = Chain(tensor), sum = Sum(tensor, &slices);
      EXPECT_TRUE(expected == sum || !compares) << "tensor " << tensor;
    }
    EXPECT_TRUE(told_.empty());
    given_.clear();
    told_.clear();
    starts_.clear();
    return slices;
  }
  size_t told_count() const { return told_.size(); }

 private:
  struct Elements {
    uint64_t offset, count;
    Bytes bytes;
  };

  // Adds one part to a run of `sum`.
  void Add(SumStart start, Bytes& sum, uint64_t begin, uint64_t count,
           const std::byte* part) const {
    const void* const parts[] = {part};
    kernels::AddParts({.dtype = dtype_,
                       .count = count,
                       .sum = sum.data() + begin * kernels::DtypeBytes(dtype_),
                       .start = start,
                       .parts = parts,
                       .part_count = 1,
                       .factor = 1.0 / world_size_});
  }

  Bytes Chain(uint32_t tensor) const {
    Bytes sum(kElements[tensor] * kernels::DtypeBytes(dtype_));
    SumStart start = starts_.contains(tensor) ? starts_.at(tensor) : SumStart::kNothing;
    for (const auto& [key, bytes] : given_) {
      if (std::get<0>(key) != tensor) continue;
      Add(std::exchange(start, SumStart::kSum), sum, 0, kElements[tensor], bytes.data());
    }
    return sum;
  }

  // As offloadd/gradient_sum.cc does it.
  Bytes Sum(uint32_t tensor, uint64_t* slices) {
    Bytes sum(kElements[tensor] * kernels::DtypeBytes(dtype_));
    std::map<uint64_t, SumStart> starts;  // of extents
    std::map<std::pair<uint64_t, uint32_t>, uint32_t> ranks_with_slices;
    for (auto part = told_.begin(); part != told_.end();) {
      const auto [of, extent, pass, rank] = part->first;
      if (of != tensor) {
        ++part;
        continue;
      }
      const Elements& elements = part->second;
      const uint64_t whole = proto::ExtentElements(kElements[tensor], extent);
      const uint64_t in_extent = elements.offset % proto::kExtentElements;
      SumStart& start = starts.try_emplace(extent, starts_.at(tensor)).first->second;
      if (elements.count == whole) {
        EXPECT_EQ(in_extent, 0u);
        Add(start, sum, elements.offset, elements.count, elements.bytes.data());
      } else {
        EXPECT_EQ(in_extent, proto::SliceBegin(whole, world_size_, rank));
        EXPECT_EQ(elements.count, proto::SliceElements(whole, world_size_, rank));
        std::memcpy(sum.data() + elements.offset * kernels::DtypeBytes(dtype_),
                    elements.bytes.data(), elements.bytes.size());
        ++ranks_with_slices[{extent, pass}];
        ++*slices;
      }
      start = SumStart::kSum;
      part = told_.erase(part);
    }
    for (const auto& [where, ranks] : ranks_with_slices)
      EXPECT_EQ(ranks, world_size_) << "slices of some ranks only";
    return sum;
  }

  const uint32_t world_size_;
  const Dtype dtype_;
  std::mutex mutex_;
  std::map<uint32_t, SumStart> starts_;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Bytes> given_;  // tensor, pass, rank
  std::map<std::tuple<uint32_t, uint64_t, uint32_t, uint32_t>, Elements> told_;  // with the extent
  client::Ticket tickets_ = 0;
};

// Values that round, vanish and cancel, none of them a NaN.
void FillGradient(Random& random, Dtype dtype, std::vector<std::byte>& bytes) {
  constexpr float kFactors[] = {1.0f, 1.0f, 1e-39f, 1e20f, 300.0f};
  for (size_t i = 0; i < bytes.size(); i += kernels::DtypeBytes(dtype)) {
    const auto value = static_cast<float>(random.Unit() - 0.5) * kFactors[random.Below(5)];
    const auto bits = std::bit_cast<uint32_t>(value);
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype == Dtype::kFloat32) std::memcpy(&bytes[i], &bits, 4);
    if (dtype == Dtype::kBFloat16) std::memcpy(&bytes[i], &half, 2);
  }
}

// No weights: the window only follows the agreement.
class NoWeights final : public WeightSource {
 public:
  void Prefetch(uint32_t) override {}
  absl::StatusOr<const std::byte*> TryLease(uint32_t) override { return nullptr; }
  absl::StatusOr<const std::byte*> Lease(uint32_t) override { return nullptr; }
  void Return(uint32_t) override {}
};

HostAccelerator::Options OptionsOf(uint32_t rank, uint64_t seed) {
  const bool is_late = (rank + seed) % 2 == 1;
  return {.seed = seed * 100 + rank,
          .pace = is_late ? accelerator::Pace::kLate : accelerator::Pace::kRandom,
          .queries_are_late = is_late,
          .peer_address = "standin/" + std::to_string(rank)};
}

struct Job {
  uint32_t world_size = 2;
  Dtype dtype = Dtype::kFloat32;
  uint64_t seed = 1;
  uint64_t area_bytes = kAmple, copied_bytes = kAmple;
  std::chrono::microseconds patience = kForEver;
  CarelessAccelerator::Mistakes mistakes = {};
  bool compares = true;  // or only what the checker says counts
};

class Rank {
 public:
  Rank(const Job& job, uint32_t rank, Daemon* daemon, HostAccelerator::Options options)
      : job_(job),
        rank_(rank),
        daemon_(daemon),
        device_(options),
        careless_(&device_, job.mistakes),
        region_(kRegionBytes),
        source_(kRegionBytes) {}
  ~Rank() { Close(); }

  void Open(const PeerGroup::Exchange& exchange) {
    auto joined = PeerGroup::Join(&device_, 2 * kTensors, {rank_, job_.world_size, true}, exchange);
    ASSERT_TRUE(joined.ok()) << joined.status();
    group_ = std::move(joined->group);
    ASSERT_NE(group_, nullptr) << joined->why_not;
    held_ = *HostRegistration::Register(&device_, region_, {}, accelerator::HostAccess::kReadWrite);
    source_held_ =
        *HostRegistration::Register(&device_, source_, {}, accelerator::HostAccess::kReadWrite);
    exchange_ = *SliceExchange::Make(&careless_, {.peers = group_.get(),
                                                  .first_item = kTensors,
                                                  .tensor_count = kTensors,
                                                  .area_bytes = job_.area_bytes,
                                                  .factor = 1.0 / job_.world_size,
                                                  .patience = job_.patience});
    window_ = *GpuWindow::Make(&careless_, &weights_, std::vector<uint64_t>(kTensors, 0),
                               {.window_bytes = 4096,
                                .lookahead_bytes = 4096,
                                .leased_bytes_max = 4096,
                                .peers = group_.get(),
                                .other_work = exchange_.get()});
    copies_ = *DeviceParts::Make(&careless_, job_.copied_bytes, kRegionBytes);
    std::vector<ExchangedParts::Tensor> tensors;
    for (const uint64_t elements : kElements) tensors.push_back({job_.dtype, elements});
    parts_ = std::make_unique<ExchangedParts>(copies_.get(), exchange_.get(), tensors);
    exchange_->Connect([this] { return window_->FollowAgreement(); });
    stream_ = *device_.StreamCreate();
  }

  void Begin(uint64_t step) {
    step_ = step;
    used_ = 0;
    parts_->Begin(step);
  }

  // A backward pass gives a tensor. `waits_amid`: for the first of its parts, before the others
  // are started.
  absl::Status Give(uint32_t tensor, uint32_t pass, SumStart start = SumStart::kNothing,
                    bool waits_amid = false) {
    const uint64_t element_bytes = kernels::DtypeBytes(job_.dtype);
    const uint64_t size_bytes = kElements[tensor] * element_bytes;
    std::vector<std::byte> values(size_bytes);
    Random random(((job_.seed * 64 + step_) * 64 + pass) * 4096 + tensor * 64 + rank_);
    FillGradient(random, job_.dtype, values);
    daemon_->Given(tensor, pass, rank_, start, values);
    const uint64_t at = used_;
    used_ += (size_bytes + 4095) / 4096 * 4096;
    EXPECT_LE(used_, kRegionBytes);
    device_.NoteHostUse(accelerator::Use::kWrite, source_.data() + at, size_bytes);
    std::memcpy(source_.data() + at, values.data(), size_bytes);
    OFFLOAD_ASSIGN_OR_RETURN(std::byte* const bytes, device_.Malloc(size_bytes));
    OFFLOAD_RETURN_IF_ERROR(
        device_.MemcpyToDevice(bytes, source_.data() + at, size_bytes, stream_));
    parts_->Give(
        tensor, bytes, std::shared_ptr<const void>(bytes, [this](const void* memory) {
          device_.Free(const_cast<std::byte*>(static_cast<const std::byte*>(memory))).IgnoreError();
        }));
    for (uint64_t begin = 0; begin < kElements[tensor]; begin += proto::kExtentElements) {
      std::byte* const host = region_.data() + at + begin * element_bytes;
      tickets_.push_back(parts_->Start(
          {.tensor = tensor,
           .pass = pass,
           .start = start,
           .element_offset = begin,
           .element_count = std::min<uint64_t>(kElements[tensor] - begin, proto::kExtentElements),
           .host = host,
           .tell =
               [=, this](uint64_t offset, uint64_t count) {
                 return daemon_->Told(tensor, pass, rank_, offset, count, host);
               }},
          stream_));
      if (std::exchange(waits_amid, false)) OFFLOAD_RETURN_IF_ERROR(TakeTickets());
    }
    parts_->Forget(tensor);
    return absl::OkStatus();
  }
  absl::Status EndPass(uint32_t pass) { return parts_->EndPass(pass); }
  // The ring waits for all parts of the step.
  absl::Status TakeTickets() {
    absl::Status status;
    for (const client::Ticket ticket : std::exchange(tickets_, {}))
      status.Update(parts_->TicketOf(ticket).status());
    status.Update(parts_->Flush());
    return status;
  }

  void Close() {
    if (parts_ == nullptr) return;
    exchanged_ = exchange_->counters().exchanged;
    EXPECT_LE(exchange_->bytes_max_ever(), 2 * job_.area_bytes);
    parts_.reset();
    copies_.reset();
    exchange_->Drain();
    window_.reset();
    exchange_.reset();
    group_.reset();
  }

  uint32_t rank() const { return rank_; }
  uint64_t exchanged() const { return exchanged_; }
  HostAccelerator& device() { return device_; }

 private:
  const Job job_;
  const uint32_t rank_;
  Daemon* const daemon_;
  HostAccelerator device_;
  CarelessAccelerator careless_;
  std::vector<std::byte> region_, source_;
  HostRegistration held_, source_held_;
  NoWeights weights_;
  std::unique_ptr<PeerGroup> group_;
  std::unique_ptr<SliceExchange> exchange_;
  std::unique_ptr<GpuWindow> window_;
  std::unique_ptr<DeviceParts> copies_;
  std::unique_ptr<ExchangedParts> parts_;
  std::vector<client::Ticket> tickets_;
  Stream stream_;
  uint64_t step_ = 0, used_ = 0;
  uint64_t exchanged_ = 0;
};

struct Found {
  std::vector<std::string> violations;
  uint64_t exchanged = 0;  // by rank 0
  uint64_t slices = 0;
  uint64_t bytes_to_host = 0;  // by all ranks together
};

// Every rank trains for some steps; `passes` are its backwards, ended ones.
using Passes = std::function<void(Rank& rank, uint64_t step)>;
constexpr uint64_t kSteps = 3;
Found Train(const Job& job, const Passes& passes) {
  Daemon daemon(job.world_size, job.dtype);
  Threads threads(job.world_size);
  Found found;
  std::mutex mutex;
  threads.Run([&](uint32_t number) {
    Rank rank(job, number, &daemon, OptionsOf(number, job.seed));
    rank.Open(threads.ExchangeOf(number));
    for (uint64_t step = 1; step <= kSteps; ++step) {
      rank.Begin(step);
      passes(rank, step);
      const absl::Status told = rank.TakeTickets();
      EXPECT_TRUE(told.ok()) << told;
      threads.Meet();  // the optimizer's step
      if (number == 0) found.slices += daemon.Finish(job.compares);
      threads.Meet();
    }
    rank.Close();
    const std::lock_guard lock(mutex);
    for (const std::string& violation : rank.device().Violations())
      found.violations.push_back(violation);
    found.bytes_to_host += rank.device().counters().bytes_to_host;
    if (number == 0) found.exchanged = rank.exchanged();
  });
  return found;
}

void Backward(Rank& rank, uint32_t pass, SumStart start = SumStart::kNothing) {
  for (uint32_t tensor = kTensors; tensor-- > 0;) EXPECT_TRUE(rank.Give(tensor, pass, start).ok());
  const absl::Status ended = rank.EndPass(pass);
  EXPECT_TRUE(ended.ok()) << ended;
}

Dtype DtypeOf(uint64_t seed) { return seed % 2 == 0 ? Dtype::kFloat32 : Dtype::kBFloat16; }

// ---- Tests -------------------------------------------------------------------------------------

TEST(ExchangedPartsTest, RanksThatGoTheSameWayExchangeEverythingThatIsLarge) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    const uint32_t world_size = 2 + seed % 3;
    const Found found =
        Train({.world_size = world_size, .dtype = DtypeOf(seed), .seed = seed},
              [seed](Rank& rank, uint64_t) {
                Backward(rank, 0, seed % 3 == 0 ? SumStart::kZeros : SumStart::kNothing);
              });
    EXPECT_THAT(found.violations, IsEmpty());
    EXPECT_EQ(found.exchanged, 3 * kSteps);
    EXPECT_EQ(found.slices, 4 * kSteps * world_size) << "one for every extent";
    const uint64_t elements =
        kElements[0] + kElements[1] + kElements[2] + world_size * kElements[3];
    EXPECT_EQ(found.bytes_to_host, kSteps * elements * kernels::DtypeBytes(DtypeOf(seed)))
        << "what is exchanged goes to the host once, not by every rank";
  }
}

// The sum goes on from the slice that is on the device.
TEST(ExchangedPartsTest, SeveralPassesExchangeEachOfTheirs) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    const Found found =
        Train({.world_size = seed % 2 == 0 ? 2u : 3u, .dtype = DtypeOf(seed), .seed = seed},
              [](Rank& rank, uint64_t) {
                for (uint32_t pass = 0; pass < 3; ++pass) Backward(rank, pass);
              });
    EXPECT_THAT(found.violations, IsEmpty());
    EXPECT_EQ(found.exchanged, 9 * kSteps);
  }
}

// Room for one gradient at a time: sums of earlier passes make way, and go to the daemon.
TEST(ExchangedPartsTest, WhereThereIsLittleRoomTheRestGoesToTheDaemon) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    const Found found = Train(
        {.dtype = DtypeOf(seed), .seed = seed, .area_bytes = 130'000, .copied_bytes = 300'000},
        [](Rank& rank, uint64_t) {
          for (uint32_t pass = 0; pass < 2; ++pass) Backward(rank, pass);
        });
    EXPECT_THAT(found.violations, IsEmpty());
    EXPECT_GE(found.exchanged, kSteps);
    EXPECT_LT(found.exchanged, 6 * kSteps) << "the largest never is";
  }
}

// Other orders, tensors that some do not use, other numbers of passes, one that does nothing:
// nobody waits for another for ever, and the sums are right.
TEST(ExchangedPartsTest, RanksThatGoTheirOwnWaysDoNotWaitForEachOther) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    const Found found = Train({.world_size = 3,
                               .dtype = DtypeOf(seed),
                               .seed = seed,
                               .area_bytes = seed % 3 == 0 ? uint64_t{400'000} : kAmple,
                               .patience = std::chrono::milliseconds(2)},
                              [seed](Rank& rank, uint64_t step) {
                                Random random(seed * 1000 + step * 10 + rank.rank());
                                const uint32_t passes = random.Below(4);
                                for (uint32_t pass = 0; pass < passes; ++pass) {
                                  std::vector<uint32_t> tensors = {3, 2, 1, 0};
                                  if (random.OneIn(3)) std::swap(tensors[1], tensors[2]);
                                  for (const uint32_t tensor : tensors) {
                                    if (random.OneIn(4)) continue;
                                    EXPECT_TRUE(rank.Give(tensor, pass).ok());
                                  }
                                  EXPECT_TRUE(rank.EndPass(pass).ok());
                                }
                              });
    EXPECT_THAT(found.violations, IsEmpty());
  }
}

TEST(ExchangedPartsTest, SumsThatBeginAnewWithoutAStepBeginWithNothing) {
  const Found found = Train({.dtype = Dtype::kBFloat16}, [](Rank& rank, uint64_t step) {
    Backward(rank, 0);
    EXPECT_TRUE(rank.TakeTickets().ok());
    rank.Begin(step);  // the test's daemon takes the later part of a pass for the first
    Backward(rank, 0);
  });
  EXPECT_THAT(found.violations, IsEmpty());
  EXPECT_EQ(found.exchanged, 6 * kSteps);
}

// The ring of one rank is full amid a tensor: it goes whole, and the others do not wait.
TEST(ExchangedPartsTest, APartThatIsWaitedForIsNotKeptForAnExchange) {
  const Found found = Train({.dtype = Dtype::kFloat32}, [](Rank& rank, uint64_t step) {
    const bool waits_amid = rank.rank() == step % 2;
    EXPECT_TRUE(rank.Give(1, 0, SumStart::kNothing, waits_amid).ok());
    EXPECT_TRUE(rank.Give(0, 0).ok());
    EXPECT_TRUE(rank.EndPass(0).ok());
  });
  EXPECT_THAT(found.violations, IsEmpty());
  EXPECT_EQ(found.exchanged, kSteps);
}

TEST(ExchangedPartsTest, AMissingWaitIsFoundInEveryRun) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const Found found = Train({.seed = seed, .mistakes = {.own_wait = false}, .compares = false},
                              [](Rank& rank, uint64_t) { Backward(rank, 0); });
    EXPECT_THAT(found.violations, Contains(HasSubstr("no event orders"))) << "seed " << seed;
  }
}

TEST(ExchangedPartsTest, MemoryThatIsLetGoTooSoonIsFoundInEveryRun) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const Found found =
        Train({.seed = seed, .mistakes = {.asks_for_done = false}, .compares = false},
              [](Rank& rank, uint64_t) { Backward(rank, 0); });
    EXPECT_THAT(found.violations, Contains(HasSubstr("memory freed in use"))) << "seed " << seed;
  }
}

TEST(ExchangedPartsTest, AFailedDeviceIsAnErrorOfAllRanks) {
  Daemon daemon(2, Dtype::kFloat32);
  Threads threads(2);
  threads.Run([&](uint32_t number) {
    HostAccelerator::Options options = OptionsOf(number, 1);
    if (number == 1) options.failing_copy = 3;  // while others are on their way
    Rank rank({}, number, &daemon, options);
    rank.Open(threads.ExchangeOf(number));
    absl::Status status;
    for (uint64_t step = 1; status.ok(); ++step) {
      rank.Begin(step);
      for (uint32_t tensor = kTensors; tensor-- > 0 && status.ok();) status = rank.Give(tensor, 0);
      status.Update(rank.EndPass(0));  // also of a backward that fails
    }
    EXPECT_EQ(ErrorIdOf(status), number == 0 ? ErrorId::kRankLost : ErrorId::kGpuFailed) << status;
    threads.Meet();
  });
}

// Rank 1 agrees to exchange, and never comes: it is killed while rank 0's stream waits for it. The
// daemon hears nothing of what did not arrive.
TEST(ExchangedPartsTest, ARankThatIsKilledAmidAnExchangeIsAnErrorOfTheOthers) {
  int sockets[2] = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const pid_t child = fork();
  if (child == 0) {
    HostAccelerator device(OptionsOf(1, 1));
    auto joined = PeerGroup::Join(&device, 2 * kTensors, {1, 2, true}, ExchangeOver(sockets[1], 1));
    if (!joined.ok() || joined->group == nullptr) _exit(1);
    // Of step 1, as rank 0 will.
    for (uint32_t tensor = 0; tensor < 3; ++tensor)
      joined->group->agreement().Offer(kTensors + tensor, uint64_t{1} << 30);
    char byte = 0;
    send(sockets[1], &byte, 1, 0);
    for (;;) pause();
  }
  Daemon daemon(2, Dtype::kFloat32);
  Rank rank({}, 0, &daemon, OptionsOf(0, 1));
  rank.Open(ExchangeOver(sockets[0], 0));
  char byte = 0;
  ASSERT_EQ(recv(sockets[0], &byte, 1, 0), 1);
  rank.Begin(1);
  for (const uint32_t tensor : {2, 0}) EXPECT_TRUE(rank.Give(tensor, 0).ok());
  std::thread kills([child] { kill(child, SIGKILL); });
  const absl::Status ended = rank.EndPass(0);
  kills.join();
  waitpid(child, nullptr, 0);
  EXPECT_EQ(ErrorIdOf(ended), ErrorId::kRankLost) << ended;
  EXPECT_THAT(ended.ToString(), HasSubstr("rank 1"));
  EXPECT_EQ(daemon.told_count(), 0u);
  rank.Close();
  EXPECT_EQ(rank.exchanged(), 2u) << "as it was agreed";
  close(sockets[0]);
  close(sockets[1]);
}

}  // namespace
}  // namespace offload::zero3
