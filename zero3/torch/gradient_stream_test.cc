// The stream's logic against a daemon of a few lines: it keeps parts until everything before them
// in the chain is added or known to be absent, which is the contract that the real one has, too.

#include "zero3/torch/gradient_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::zero3 {
namespace {

using client::Ticket;
using proto::GradientStart;

constexpr uint64_t kRegionBytes = 1 << 20;

class FakeDaemon {
 public:
  FakeDaemon(uint32_t world_size, const std::vector<uint64_t>& element_counts)
      : ranks_(world_size), tensors_(element_counts.size()) {
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].sum.assign(element_counts[i], 0.0f);
  }

  Ticket Begin(uint32_t rank, uint64_t step) {
    return Submit(rank, absl::StrCat("begin ", step), [&](Ticket ticket) {
      const bool is_first = ranks_[rank].begun || IsFirst();
      if (is_first) BeginSums(step);
      ranks_[rank].begun = true;
      done_.insert(ticket);
    });
  }
  Ticket Deliver(uint32_t rank, uint32_t tensor, uint32_t pass, GradientStart start, uint64_t begin,
                 uint64_t count, const float* bytes) {
    const std::string call = absl::StrCat("part ", tensor, " of pass ", pass, " from ", begin,
                                          " start ", static_cast<uint32_t>(start));
    return Submit(rank, call, [&](Ticket ticket) {
      tensors_[tensor].chains[begin].parts[{pass, rank}] = {ticket, start, count, bytes};
      ranks_[rank].closed = false;
    });
  }
  Ticket EndPass(uint32_t rank, uint32_t pass, bool wait) {
    return Submit(rank, absl::StrCat("end ", pass, wait ? " and wait" : ""), [&](Ticket ticket) {
      ranks_[rank].ended = pass + 1;
      if (wait) {
        waiting_ends_.push_back({ticket, pass});
      } else {
        done_.insert(ticket);
      }
    });
  }
  Ticket Publish(uint32_t rank, uint32_t tensor, float norm) {
    return Submit(rank, absl::StrCat("norm of ", tensor), [&](Ticket ticket) {
      tensors_[tensor].norm = norm;
      done_.insert(ticket);
    });
  }
  // The rank has stepped, or has no more to give.
  void Close(uint32_t rank) {
    std::lock_guard lock(mutex_);
    ranks_[rank].closed = true;
    Advance();
    changed_.notify_all();
  }
  uint64_t Await(uint32_t rank, uint32_t tensor, uint32_t passes) {
    std::unique_lock lock(mutex_);
    ranks_[rank].calls.push_back(absl::StrCat("await ", tensor, " after ", passes));
    ranks_[rank].closed = true;
    Advance();
    changed_.notify_all();
    changed_.wait(lock, [&] { return IsFinal(tensor); });
    return Word(tensor);
  }
  void Wait(Ticket ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_.contains(ticket); });
    done_.erase(ticket);
  }
  void Note(uint32_t rank, const std::string& call) {
    std::lock_guard lock(mutex_);
    ranks_[rank].calls.push_back(call);
  }

  uint64_t GradientWord(uint32_t tensor) {
    std::lock_guard lock(mutex_);
    return Word(tensor);
  }
  std::vector<float> sum(uint32_t tensor) {
    std::lock_guard lock(mutex_);
    return tensors_[tensor].sum;
  }
  // Since the last question.
  std::vector<std::string> calls(uint32_t rank) {
    std::lock_guard lock(mutex_);
    return std::exchange(ranks_[rank].calls, {});
  }
  size_t tickets_not_waited_for() {
    std::lock_guard lock(mutex_);
    return done_.size();
  }

 private:
  struct Part {
    Ticket ticket;
    GradientStart start;
    uint64_t count;
    const float* bytes;
  };
  // An extent: its parts by (pass, rank), and the first that is neither added nor known to be
  // absent.
  struct Chain {
    std::map<std::pair<uint32_t, uint32_t>, Part> parts;
    std::pair<uint32_t, uint32_t> next = {0, 0};
    bool is_new = true;
  };
  struct Tensor {
    std::vector<float> sum;
    std::map<uint64_t, Chain> chains;  // by the first element
    uint64_t step = 0;
    bool exists = false;
    uint32_t first_pass = 0;
    std::optional<float> norm;
  };
  struct Rank {
    bool begun = false, closed = false;
    uint32_t ended = 0;  // passes
    std::vector<std::string> calls;
  };

  Ticket Submit(uint32_t rank, const std::string& call, const std::function<void(Ticket)>& apply) {
    std::lock_guard lock(mutex_);
    ranks_[rank].calls.push_back(call);
    const Ticket ticket = next_ticket_++;
    apply(ticket);
    Advance();
    changed_.notify_all();
    return ticket;
  }
  bool IsFirst() const {
    return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.begun; });
  }
  void BeginSums(uint64_t step) {
    for (Rank& rank : ranks_) rank = {.calls = std::move(rank.calls)};
    for (Tensor& tensor : tensors_) {
      tensor.chains.clear();
      tensor.step = step;
      tensor.exists = false;
      tensor.norm.reset();
    }
  }
  bool IsPast(uint32_t rank, uint32_t pass) const {
    return ranks_[rank].ended > pass || ranks_[rank].closed;
  }
  void Advance() {
    for (Tensor& tensor : tensors_) {
      for (auto& [begin, chain] : tensor.chains) {
        if (HaveAllBegun()) AdvanceChain(tensor, begin, chain);
      }
    }
    std::erase_if(waiting_ends_, [&](const auto& end) {
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (!IsPast(rank, end.second)) return false;
      }
      done_.insert(end.first);
      return true;
    });
  }
  bool HaveAllBegun() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.begun || rank.closed; });
  }
  void AdvanceChain(Tensor& tensor, uint64_t begin, Chain& chain) {
    while (!chain.parts.empty()) {
      auto& [pass, rank] = chain.next;
      const auto part = chain.parts.find(chain.next);
      if (part != chain.parts.end()) {
        if (!tensor.exists) tensor.first_pass = pass;
        Add(tensor, begin, chain, part->second);
        chain.parts.erase(part);
      } else if (!IsPast(rank, pass)) {
        return;
      }
      if (++rank == ranks_.size()) {
        rank = 0;
        ++pass;
      }
    }
  }
  void Add(Tensor& tensor, uint64_t begin, Chain& chain, const Part& part) {
    const bool anew = std::exchange(chain.is_new, false) && part.start != GradientStart::kPrevious;
    for (uint64_t i = 0; i < part.count; ++i) {
      float& sum = tensor.sum[begin + i];
      const float share = part.bytes[i] * (1.0f / static_cast<float>(ranks_.size()));
      sum = anew ? share : sum + share;
    }
    tensor.exists = true;
    tensor.norm.reset();
    done_.insert(part.ticket);
  }
  bool IsFinal(uint32_t tensor) const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.closed; }) &&
           std::all_of(tensors_[tensor].chains.begin(), tensors_[tensor].chains.end(),
                       [](const auto& chain) { return chain.second.parts.empty(); });
  }
  uint64_t Word(uint32_t tensor) const {
    const Tensor& t = tensors_[tensor];
    const uint8_t bits = static_cast<uint8_t>((t.exists ? proto::kGradientExists : 0) |
                                              (t.norm.has_value() ? proto::kGradientNorm : 0));
    return proto::MakeGradientWord(bits, t.step, std::bit_cast<uint32_t>(t.norm.value_or(0)),
                                   t.first_pass);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::vector<Tensor> tensors_;
  std::vector<std::pair<Ticket, uint32_t>> waiting_ends_;
  std::set<Ticket> done_;
  Ticket next_ticket_ = 1;
};

// One rank: its channel, its gradients as the trainer sees them, its stream.
class TestRank final : public GradientChannel, public GradientOwner {
 public:
  TestRank(FakeDaemon* daemon, uint32_t rank, uint32_t world_size,
           const std::vector<uint64_t>& element_counts, uint64_t ring_bytes = kRegionBytes)
      : daemon_(daemon), rank_(rank), region_(kRegionBytes / sizeof(float)) {
    GradientStream::Options options{.rank = rank,
                                    .world_size = world_size,
                                    .step = 1,
                                    .region = reinterpret_cast<std::byte*>(region_.data()),
                                    .ring_offset = 0,
                                    .ring_bytes = ring_bytes,
                                    .norm_patience = std::chrono::microseconds(0)};
    for (const uint64_t count : element_counts) {
      options.tensors.push_back({absl::StrCat("t", options.tensors.size()), count, 4, true});
    }
    stream_ = std::make_unique<GradientStream>(this, this, std::move(options));
  }

  GradientStream& stream() { return *stream_; }
  std::vector<std::string> calls() { return daemon_->calls(rank_); }

  // A backward as torch runs it, that gives `values` to the tensors in this order.
  std::vector<uint32_t> Backward(const std::vector<std::pair<uint32_t, std::vector<float>>>& gives,
                                 GradientStart start = GradientStart::kNothing) {
    const int64_t task = ++backwards_;
    for (const auto& [tensor, values] : gives) {
      EXPECT_TRUE(stream_->EnterBackward(task).ok());
      EXPECT_TRUE(stream_->Deliver(tensor, start, Bytes(values)).ok());
    }
    return *stream_->LeaveBackward(task, /*failed=*/false);
  }
  void Step() {
    daemon_->Close(rank_);
    EXPECT_TRUE(stream_->Stepped().ok());
  }
  static const std::byte* Bytes(const std::vector<float>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
  }

  // ---- GradientChannel ----
  Ticket BeginGradients(uint64_t step) override { return daemon_->Begin(rank_, step); }
  Ticket DeliverGradient(uint32_t tensor, uint32_t pass, GradientStart start,
                         uint64_t element_offset, uint64_t element_count,
                         uint64_t region_offset) override {
    return daemon_->Deliver(rank_, tensor, pass, start, element_offset, element_count,
                            region_.data() + region_offset / sizeof(float));
  }
  Ticket EndPass(uint32_t pass, bool wait) override { return daemon_->EndPass(rank_, pass, wait); }
  absl::StatusOr<uint64_t> AwaitGradient(uint32_t tensor, uint32_t passes) override {
    return daemon_->Await(rank_, tensor, passes);
  }
  Ticket PublishNorm(uint32_t tensor, float norm) override {
    return daemon_->Publish(rank_, tensor, norm);
  }
  uint64_t GradientWord(uint32_t tensor) const override { return daemon_->GradientWord(tensor); }
  absl::Status Wait(Ticket ticket) override {
    daemon_->Wait(ticket);
    return wait_fails;
  }

  // ---- GradientOwner ----
  bool HasZeroed() override { return zeroed; }
  absl::Status LetGoOfSums() override {
    daemon_->Note(rank_, "let go");
    zeroed = false;
    return absl::OkStatus();
  }
  void WatchEnd(int64_t backward) override { watched.push_back(backward); }
  absl::StatusOr<std::optional<float>> ComputeNorm(uint32_t tensor) override {
    ++norms_computed;
    if (without_gradient.contains(tensor)) return std::nullopt;
    float squares = 0;
    for (const float value : daemon_->sum(tensor)) squares += value * value;
    return std::sqrt(squares);
  }

  bool zeroed = false;
  std::vector<int64_t> watched;
  std::set<uint32_t> without_gradient;
  int norms_computed = 0;
  absl::Status wait_fails;

 private:
  FakeDaemon* const daemon_;
  const uint32_t rank_;
  std::vector<float> region_;
  std::unique_ptr<GradientStream> stream_;
  int64_t backwards_ = 0;
};

using Calls = std::vector<std::string>;

TEST(GradientStreamTest, StepBeginsWithItsFirstGradientAndEveryPassEnds) {
  FakeDaemon daemon(1, {2, 2});
  TestRank rank(&daemon, 0, 1, {2, 2});
  rank.Backward({{1, {1, 2}}, {0, {3, 4}}});
  rank.Backward({{1, {1, 2}}, {0, {3, 4}}});
  EXPECT_EQ(rank.calls(),
            (Calls{"let go", "begin 1", "part 1 of pass 0 from 0 start 0",
                   "part 0 of pass 0 from 0 start 0", "end 0", "part 1 of pass 1 from 0 start 0",
                   "part 0 of pass 1 from 0 start 0", "end 1"}));
  EXPECT_EQ(rank.stream().passes(), 2u);
  rank.Step();
  rank.Backward({{0, {1, 1}}, {1, {1, 1}}}, GradientStart::kZeros);
  EXPECT_EQ(rank.calls(), (Calls{"let go", "begin 2", "part 0 of pass 0 from 0 start 1",
                                 "part 1 of pass 0 from 0 start 1", "end 0"}));
  rank.Step();
  EXPECT_EQ(daemon.tickets_not_waited_for(), 0u);
}

TEST(GradientStreamTest, LaterPassesRepeatWhatTheGenerationBeganWith) {
  FakeDaemon daemon(1, {1});
  TestRank rank(&daemon, 0, 1, {1});
  rank.Backward({{0, {1}}}, GradientStart::kZeros);
  rank.Backward({{0, {1}}}, GradientStart::kPrevious);  // .grad is there now
  EXPECT_EQ(rank.calls().back(), "end 1");
  EXPECT_EQ(daemon.sum(0), std::vector<float>{2});
}

TEST(GradientStreamTest, ZeroingWithoutAStepBeginsTheSumsAnew) {
  FakeDaemon daemon(1, {1, 1});
  TestRank rank(&daemon, 0, 1, {1, 1});
  rank.Backward({{0, {1}}, {1, {1}}});
  rank.zeroed = true;  // of tensor 0 only; tensor 1 goes on
  EXPECT_TRUE(rank.stream().EnterBackward(7).ok());
  const std::vector<float> five = {5};
  EXPECT_TRUE(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(five)).ok());
  EXPECT_TRUE(rank.stream().Deliver(1, GradientStart::kPrevious, TestRank::Bytes(five)).ok());
  EXPECT_TRUE(rank.stream().LeaveBackward(7, false).ok());
  EXPECT_EQ(daemon.sum(0), std::vector<float>{5});
  EXPECT_EQ(daemon.sum(1), std::vector<float>{6});
  EXPECT_EQ(rank.stream().passes(), 1u);
  EXPECT_EQ(rank.stream().step(), 1u);
}

TEST(GradientStreamTest, BackwardsInsideABackwardBelongToItsPass) {
  FakeDaemon daemon(1, {1, 1});
  TestRank rank(&daemon, 0, 1, {1, 1});
  const std::vector<float> one = {1};
  EXPECT_TRUE(rank.stream().EnterBackward(1).ok());
  EXPECT_TRUE(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(one)).ok());
  EXPECT_TRUE(rank.stream().EnterBackward(2).ok());
  EXPECT_TRUE(rank.stream().Deliver(1, GradientStart::kNothing, TestRank::Bytes(one)).ok());
  EXPECT_TRUE(rank.stream().LeaveBackward(2, false).ok());
  EXPECT_EQ(rank.stream().passes(), 0u);
  EXPECT_TRUE(rank.stream().LeaveBackward(1, false).ok());
  EXPECT_EQ(rank.stream().passes(), 1u);
  EXPECT_EQ(rank.watched, (std::vector<int64_t>{1, 2}));
}

TEST(GradientStreamTest, TensorThatComesTwiceInAPassBeginsAnother) {
  FakeDaemon daemon(1, {1, 1});
  TestRank rank(&daemon, 0, 1, {1, 1});
  rank.Backward({{0, {1}}, {1, {1}}, {0, {2}}});
  EXPECT_EQ(rank.calls(), (Calls{"let go", "begin 1", "part 0 of pass 0 from 0 start 0",
                                 "part 1 of pass 0 from 0 start 0", "end 0",
                                 "part 0 of pass 1 from 0 start 0", "end 1"}));
  EXPECT_EQ(daemon.sum(0), std::vector<float>{3});
}

TEST(GradientStreamTest, BackwardThatFailedEndsItsPassAndWaitsForNobody) {
  FakeDaemon daemon(2, {1, 1});
  TestRank rank(&daemon, 0, 2, {1, 1});
  const std::vector<float> one = {1};
  EXPECT_TRUE(rank.stream().EnterBackward(1).ok());
  EXPECT_TRUE(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(one)).ok());
  EXPECT_TRUE(rank.stream().LeaveBackward(1, /*failed=*/true)->empty());
  EXPECT_EQ(rank.calls().back(), "end 0");
}

TEST(GradientStreamTest, RankThatFailsAmidATensorSaysNothingAnyMore) {
  const uint64_t count = proto::kExtentElements + 5;
  FakeDaemon daemon(1, {count});
  // Room for one extent: the second waits for it.
  TestRank rank(&daemon, 0, 1, {count}, /*ring_bytes=*/proto::kExtentElements * sizeof(float));
  rank.wait_fails = absl::AbortedError("gone");
  const std::vector<float> ones(count, 1);
  EXPECT_TRUE(rank.stream().EnterBackward(1).ok());
  EXPECT_EQ(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(ones)),
            rank.wait_fails);
  rank.calls();
  EXPECT_TRUE(rank.stream().LeaveBackward(1, /*failed=*/true)->empty());
  EXPECT_EQ(rank.stream().EnterBackward(2), rank.wait_fails);
  EXPECT_EQ(rank.stream().Look(0).status(), rank.wait_fails);
  EXPECT_EQ(rank.stream().EnterStep(), rank.wait_fails);
  EXPECT_EQ(rank.calls(), Calls());
}

TEST(GradientStreamTest, PassWithoutSomeTensorLearnsWhatOtherRanksHave) {
  FakeDaemon daemon(2, {1, 1, 1});
  TestRank first(&daemon, 0, 2, {1, 1, 1}), second(&daemon, 1, 2, {1, 1, 1});
  std::vector<uint32_t> missing;
  std::thread other([&] { missing = first.Backward({{0, {2}}}); });
  second.Backward({{0, {2}}, {1, {4}}});
  other.join();
  EXPECT_EQ(missing, (std::vector<uint32_t>{1}));
  EXPECT_TRUE(first.stream().Exists(1));
  EXPECT_FALSE(first.stream().Exists(2));
  EXPECT_EQ(daemon.sum(1), std::vector<float>{2});
}

TEST(GradientStreamTest, SumIsTheChainOverPassesAndRanksWhoeverIsFirst) {
  // Two extents and a bit; the ring holds one of them.
  const std::vector<uint64_t> counts = {2 * proto::kExtentElements / 8 + 3, 5, 1000};
  constexpr uint32_t kRanks = 3, kPasses = 4;
  const auto value = [](uint32_t rank, uint32_t pass, uint32_t tensor, uint64_t i) {
    return 1.0f / static_cast<float>(1 + rank + 7 * pass + 31 * tensor + i % 97);
  };
  FakeDaemon daemon(kRanks, counts);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      TestRank self(&daemon, rank, kRanks, counts, /*ring_bytes=*/512 << 10);
      for (uint32_t pass = 0; pass < kPasses; ++pass) {
        std::vector<std::pair<uint32_t, std::vector<float>>> gives;
        for (uint32_t i = 0; i < counts.size(); ++i) {
          const uint32_t tensor = (i + rank + pass) % counts.size();  // paths differ
          std::vector<float> values(counts[tensor]);
          for (uint64_t at = 0; at < values.size(); ++at)
            values[at] = value(rank, pass, tensor, at);
          gives.emplace_back(tensor, std::move(values));
        }
        self.Backward(gives);
      }
      EXPECT_TRUE(self.stream().Look(0).ok());
      self.Step();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t tensor = 0; tensor < counts.size(); ++tensor) {
    std::vector<float> expected(counts[tensor]);
    for (uint64_t at = 0; at < expected.size(); ++at) {
      for (uint32_t pass = 0; pass < kPasses; ++pass) {
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
          const float share = value(rank, pass, tensor, at) * (1.0f / kRanks);
          expected[at] = pass + rank == 0 ? share : expected[at] + share;
        }
      }
    }
    EXPECT_EQ(daemon.sum(tensor), expected) << tensor;
  }
  EXPECT_EQ(daemon.tickets_not_waited_for(), 0u);
}

TEST(GradientStreamTest, TensorIsLookedAtOncePerPass) {
  FakeDaemon daemon(1, {1, 1});
  TestRank rank(&daemon, 0, 1, {1, 1});
  rank.Backward({{0, {3}}, {1, {4}}});
  rank.calls();
  EXPECT_TRUE(rank.stream().Look(0).ok());
  EXPECT_TRUE(rank.stream().Look(0).ok());
  EXPECT_EQ(rank.calls(), Calls{"await 0 after 1"});
  rank.Backward({{0, {3}}, {1, {4}}}, GradientStart::kPrevious);
  rank.calls();
  EXPECT_TRUE(rank.stream().Look(0).ok());
  EXPECT_EQ(rank.calls(), Calls{"await 0 after 2"});
  rank.Step();
  EXPECT_TRUE(rank.stream().Look(1).ok());  // of the step that is taken: nobody is asked
  EXPECT_EQ(rank.calls(), Calls{});
}

TEST(GradientStreamTest, LookWhileBackwardRunsIsRefused) {
  FakeDaemon daemon(1, {1});
  TestRank rank(&daemon, 0, 1, {1});
  EXPECT_TRUE(rank.stream().EnterBackward(1).ok());
  const absl::Status refused = rank.stream().Look(0).status();
  EXPECT_EQ(ErrorIdOf(refused), ErrorId::kGradientOfRanks);
  EXPECT_NE(refused.message().find("'t0'"), std::string::npos) << refused;
}

TEST(GradientStreamTest, NormsAreSharedAndTakenOnce) {
  const std::vector<uint64_t> counts = {1, 5, 3, 4};
  FakeDaemon daemon(2, counts);
  TestRank first(&daemon, 0, 2, counts), second(&daemon, 1, 2, counts);
  const std::vector<std::pair<uint32_t, std::vector<float>>> gives = {
      {0, {2}}, {1, {0, 6, 0, 0, 0}}, {2, {0, 8, 0}}, {3, {6, 0, 8, 0}}};
  first.Backward(gives);
  second.Backward(gives);
  std::thread look([&] { EXPECT_TRUE(second.stream().Look(0).ok()); });
  EXPECT_TRUE(first.stream().Look(0).ok());
  look.join();
  // By size: 1, 3, 2, 0. The first rank takes 1 and 2 before it looks for 3.
  EXPECT_EQ(*first.stream().Norm(1), 6);
  EXPECT_EQ(first.norms_computed, 2);
  EXPECT_EQ(*second.stream().Norm(3), 10);
  EXPECT_EQ(second.norms_computed, 2);
  for (uint32_t tensor = 0; tensor < 4; ++tensor) {
    EXPECT_EQ(*first.stream().Norm(tensor), *second.stream().Norm(tensor));
  }
  EXPECT_EQ(first.norms_computed + second.norms_computed, 4);
}

TEST(GradientStreamTest, NormThatNobodyTakesIsTakenHere) {
  FakeDaemon daemon(2, {1, 1});
  TestRank first(&daemon, 0, 2, {1, 1}), second(&daemon, 1, 2, {1, 1});
  first.Backward({{0, {2}}, {1, {4}}});
  second.Backward({{0, {2}}, {1, {4}}});
  daemon.Close(1);  // it steps and never asks for norms
  EXPECT_EQ(*first.stream().Norm(1), 4);
  EXPECT_EQ(first.norms_computed, 2);
}

TEST(GradientStreamTest, ShareSkipsTensorsWithoutAGradient) {
  FakeDaemon daemon(1, {1, 1});
  TestRank rank(&daemon, 0, 1, {1, 1});
  rank.without_gradient = {1};
  rank.Backward({{0, {3}}});
  rank.calls();
  EXPECT_EQ(*rank.stream().Norm(0), 3);
  EXPECT_EQ(rank.calls(), (Calls{"await 0 after 1", "norm of 0", "await 1 after 1"}));
}

TEST(GradientStreamTest, NormsOfOnePassAreNotThoseOfTheNext) {
  FakeDaemon daemon(1, {1});
  TestRank rank(&daemon, 0, 1, {1});
  rank.Backward({{0, {3}}});
  EXPECT_EQ(*rank.stream().Norm(0), 3);
  rank.Backward({{0, {4}}}, GradientStart::kPrevious);
  EXPECT_EQ(*rank.stream().Norm(0), 7);
}

TEST(GradientStreamTest, FailureOfADeliveryIsThatOfTheNext) {
  FakeDaemon daemon(1, {1});
  TestRank rank(&daemon, 0, 1, {1}, /*ring_bytes=*/4096);
  rank.wait_fails = absl::AbortedError("rank 1 is lost");
  const std::vector<float> one = {1};
  EXPECT_TRUE(rank.stream().EnterBackward(1).ok());
  EXPECT_TRUE(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(one)).ok());
  EXPECT_EQ(rank.stream().Deliver(0, GradientStart::kNothing, TestRank::Bytes(one)).message(),
            "rank 1 is lost");
}

TEST(DeliveryRingTest, KeptPiecesThatFillItAreNamed) {
  DeliveryRing ring(0, 8192, [](Ticket) { return absl::OkStatus(); });
  const uint64_t first = *ring.Take(4096), second = *ring.Take(100);
  EXPECT_EQ(first, 0u);
  EXPECT_EQ(second, 4096u);
  EXPECT_EQ(ErrorIdOf(ring.Take(1).status()), ErrorId::kWindowExhausted);
  ring.Return(first, 4096);
  ring.Return(second, 100);
  EXPECT_EQ(*ring.Take(8192), 0u);  // one piece again
}

TEST(DeliveryRingTest, RoomComesBackInTheOrderOfDeliveries) {
  std::vector<Ticket> waited;
  DeliveryRing ring(4096, 8192, [&](Ticket ticket) {
    waited.push_back(ticket);
    return absl::OkStatus();
  });
  for (Ticket ticket = 1; ticket <= 5; ++ticket) {
    const uint64_t offset = *ring.Take(4096);
    EXPECT_EQ(offset, 4096u + (ticket + 1) % 2 * 4096);
    ring.Deliver(offset, 4096, ticket);
  }
  EXPECT_EQ(waited, (std::vector<Ticket>{1, 2, 3}));
  EXPECT_TRUE(ring.WaitForAll().ok());
  EXPECT_EQ(waited, (std::vector<Ticket>{1, 2, 3, 4, 5}));
}

TEST(DeliveryRingTest, DeliveriesInFlightAreBounded) {
  size_t waited = 0;
  DeliveryRing ring(0, uint64_t{1} << 30, [&](Ticket) {
    ++waited;
    return absl::OkStatus();
  });
  for (size_t i = 0; i < DeliveryRing::kDeliveriesMax + 3; ++i) {
    ring.Deliver(*ring.Take(64), 64, i + 1);
  }
  EXPECT_EQ(waited, 3u);
}

}  // namespace
}  // namespace offload::zero3
