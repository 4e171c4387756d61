// Job's ranks: who is there, who has left and how, and what the others are told of it.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/string_view.h"
#include "offloadd/job.h"
#include "offloadd/limits.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {

Rank* Job::FindRank(uint64_t session) {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank != nullptr && rank->session() == session) return rank.get();
  }
  return nullptr;
}

bool Job::Holds(const std::function<bool()>& question) {
  const absl::Status answered =
      loop_->Call<absl::Status>([&](const std::function<void(absl::Status)>& answer) {
        answer(question() ? absl::OkStatus() : absl::NotFoundError("it does not"));
      });
  return answered.ok();
}

bool Job::HasMember(uint64_t session) {
  return Holds([this, session] {
    const Rank* const rank = FindRank(session);
    return rank != nullptr && (rank->is_open || phase() == JobPhase::kOpening);
  });
}

bool Job::IsLeftBy(uint32_t rank) {
  return Holds([this, rank] {
    return phase() != JobPhase::kOpening && rank < ranks_.size() && ranks_[rank] != nullptr &&
           ranks_[rank]->state == Rank::State::kLeft;
  });
}

bool Job::All(bool (*holds)(const Rank& rank)) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [holds](const std::unique_ptr<Rank>& rank) {
    return rank != nullptr && holds(*rank);
  });
}

std::string Job::Describe(const Rank& rank) {
  return absl::StrCat("rank ", rank.number(), " (process ", rank.pid(), ")");
}

// What the parts see of it.
void Job::UpdateMemory(const Rank& rank) {
  RankMemory& memory = context_.ranks[rank.number()];
  memory.is_here = rank.is_here();
  memory.is_stepping = rank.calls.step != nullptr;
  memory.is_exchanging = rank.calls.exchange != nullptr;
  if (!rank.is_here()) memory.pins = nullptr;
}

// ---- The end -----------------------------------------------------------------------------------

absl::Status Job::CheckAllAreHere() const {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->is_here()) continue;
    return MakeError(ErrorId::kRankLost,
                     absl::StrCat(Describe(*rank), " has closed job ", identity_.name));
  }
  return absl::OkStatus();
}

// A step that all have called for is none of these.
void Job::AnswerWaiting(const absl::Status& status) {
  if (gate_.has_value() && !gate_->IsComplete()) {
    gate_->Clear();
    AnswerStep(status);
  }
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr) continue;
    if (rank->calls.open != nullptr) std::exchange(rank->calls.open, nullptr)(status);
    if (rank->calls.exchange != nullptr) std::exchange(rank->calls.exchange, nullptr)(status);
    UpdateMemory(*rank);
  }
  if (phase() != JobPhase::kPublishing) AnswerPublish(status);
}

// Who waits for gradients of a rank that has closed the job, which gives none any more.
void Job::AnswerLooks() {
  if (gradients_ == nullptr || phase() != JobPhase::kTraining) return;
  const absl::Status status = CheckAllAreHere();
  if (status.ok()) return;
  for (const std::vector<uint32_t>& missing :
       {gradients_->WaitedFor(), gradients_->PartsWaitFor()}) {
    for (const uint32_t rank : missing) {
      if (!ranks_[rank]->is_here()) return gradients_->FailQueued(status);
    }
  }
}

void Job::Close(Rank& rank, Done done) {
  if (rank.is_here()) rank.state = Rank::State::kLeft;
  UpdateMemory(rank);
  if (!end_reason_.ok()) return done(end_reason_);
  if (phase() == JobPhase::kDrained) return done(context_.failure);
  if (std::none_of(ranks_.begin(), ranks_.end(),
                   [](const auto& each) { return each != nullptr && each->is_here(); })) {
    close_waiters_.push_back(std::move(done));
    return BeginClosing();
  }
  // The others go on with what needs nobody else.
  AnswerWaiting(CheckAllAreHere());
  if (phase() != JobPhase::kSealing) AnswerSeal(CheckAllAreHere());
  if (phase() != JobPhase::kTraining) return done(context_.failure);
  WaitDurable([done = std::move(done)](const absl::StatusOr<uint64_t>& durable) {
    done(durable.status());
  });
}

void Job::Leave(uint64_t session, const std::string& how, std::function<void()> done) {
  Rank* const rank = FindRank(session);
  if (rank == nullptr) return done();
  const bool was_here = rank->is_here();
  if (was_here) rank->state = Rank::State::kLost;
  rank->is_connected = false;
  DetachRings(*rank);
  UpdateMemory(*rank);
  const auto is_connected = [](const auto& each) { return each != nullptr && each->is_connected; };
  if (std::any_of(ranks_.begin(), ranks_.end(), is_connected)) {
    if (was_here) {
      EndBecause(MakeError(ErrorId::kRankLost, absl::StrCat(Describe(*rank), " is gone: ", how)));
    }
    return done();
  }
  if (cache_ != nullptr) cache_->DropWishes();
  Shutdown(std::move(done));
}

void Job::EndBecause(const absl::Status& reason) {
  if (IsClosing(phase()) || context_.failed()) return;
  spdlog::error("job {}: {}", identity_.name, ToStd(reason.message()));
  end_reason_ = reason;
  if (opened_) proto::PublishFailure(header(), reason);
  BeginClosing();
  if (cache_ != nullptr) cache_->FailWaiters(reason);
  if (transfers_ != nullptr) transfers_->FailQueued(reason);
  // A step that all have called for is finished, and needs its sums.
  if (gradients_ != nullptr && !StepIsReady()) gradients_->FailQueued(reason);
}

// ---- Exchange ----------------------------------------------------------------------------------

void Job::Exchange(Rank& rank, const proto::v1::ExchangeRequest& request, ExchangeDone done) {
  absl::Status status = Check(JobCall::kExchange);
  if (status.ok()) status = CheckAllAreHere();
  if (status.ok() && rank.calls.exchange != nullptr)
    status = MakeError(ErrorId::kProtocol, "two exchanges at once");
  if (status.ok() && request.data().size() > kLimits.exchange_bytes_max) {
    status =
        MakeError(ErrorId::kBadValue, absl::StrCat("an exchange of ", request.data().size(),
                                                   " bytes; at most ", kLimits.exchange_bytes_max));
  }
  if (!status.ok()) return done(std::move(status));
  rank.exchanged = request.data();
  rank.exchange_number = request.number();
  rank.calls.exchange = std::move(done);
  UpdateMemory(rank);
  if (All([](const Rank& each) { return each.calls.exchange != nullptr; }))
    AnswerExchange(Exchanged());
}

absl::StatusOr<std::vector<std::string>> Job::Exchanged() {
  absl::StatusOr<std::vector<std::string>> answer = std::vector<std::string>();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (answer.ok() && rank->exchange_number != ranks_.front()->exchange_number) {
      answer = MakeError(ErrorId::kRanksDiffer,
                         absl::StrCat("rank 0 exchanges for the ", ranks_.front()->exchange_number,
                                      ". time and rank ", rank->number(), " for the ",
                                      rank->exchange_number, ". time"));
    }
    if (answer.ok()) answer->push_back(std::move(rank->exchanged));
  }
  return answer;
}

// Of the ranks that wait in one.
void Job::AnswerExchange(const absl::StatusOr<std::vector<std::string>>& answer) {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank == nullptr || rank->calls.exchange == nullptr) continue;
    const ExchangeDone done = std::exchange(rank->calls.exchange, nullptr);
    rank->exchanged.clear();
    UpdateMemory(*rank);
    done(answer);
  }
}

// ---- Late ones ---------------------------------------------------------------------------------

// What some ranks wait for the others to do, and who these are; missing when nobody waits.
std::optional<Job::Wait> Job::FindWait() const {
  const auto waiting = [this](const char* call, auto member) -> std::optional<Wait> {
    Wait wait{.what = absl::StrCat("have called ", call)};
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      if (rank == nullptr) return std::nullopt;  // they are still joining
      if (rank->calls.*member == nullptr) wait.missing.push_back(rank->number());
    }
    if (wait.missing.empty() || wait.missing.size() == ranks_.size()) return std::nullopt;
    return wait;
  };
  if (auto wait = waiting("Seal", &Rank::Calls::seal)) return wait;
  if (auto wait = waiting("Publish", &Rank::Calls::publish)) return wait;
  if (auto wait = waiting("Step", &Rank::Calls::step)) return wait;
  std::optional<Wait> exchange = waiting("Exchange", &Rank::Calls::exchange);
  if (gradients_ == nullptr) return exchange;
  if (exchange.has_value()) {
    for (const uint32_t rank : exchange->missing) exchange->said += gradients_->said(rank);
    return exchange;
  }
  Wait look{.what = "look at gradients", .missing = gradients_->WaitedFor()};
  if (!look.missing.empty()) return look;
  // Their rings may be full: nobody says that.
  Wait parts{.what = "give gradients", .missing = gradients_->PartsWaitFor()};
  if (parts.missing.empty()) return std::nullopt;
  for (const uint32_t rank : parts.missing) parts.said += gradients_->said(rank);
  return parts;
}

// An exchange of some ranks while others wait for these: none of them goes on. Whoever gives
// gradients waits once its ring is full, which nobody says: it has said nothing `for_long`.
absl::Status Job::FindDeadExchange(bool for_long) const {
  for (const std::unique_ptr<Rank>& waiting : ranks_) {
    if (waiting == nullptr || waiting->calls.exchange == nullptr) continue;
    if (waiting->calls.step != nullptr) continue;  // on another thread: it goes on
    for (const std::unique_ptr<Rank>& other : ranks_) {
      if (other == nullptr || other->calls.exchange != nullptr) continue;
      const bool is_stepping = other->calls.step != nullptr;
      const bool waits = gradients_ != nullptr &&
                         (for_long || gradients_->Waits(other->number())) &&
                         gradients_->IsAheadOf(other->number(), waiting->number());
      if (!is_stepping && !waits) continue;
      return MakeError(
          ErrorId::kRanksDiffer,
          absl::StrCat("rank ", waiting->number(),
                       " waits for all ranks (in Exchange() or LoadWeights()) while rank ",
                       other->number(), is_stepping ? " takes a step" : " waits for gradients",
                       " without having come to that"),
          absl::StrCat("Call it on every rank, and in the same places of the program (not under "
                       "if rank == ",
                       waiting->number(), ")"));
    }
  }
  return absl::OkStatus();
}

void Job::WatchRanks() {
  WatchJoining();
  const std::optional<Wait> wait = FindWait();
  const double now = context_.clock->NowSeconds();
  if (wait != wait_) {
    wait_ = wait;
    wait_since_seconds_ = now;
    wait_report_seconds_ = now + kLimits.rank_report_seconds;
  }
  const double waited_seconds = now - wait_since_seconds_;
  if (!wait_.has_value() || waited_seconds < kLimits.rank_report_seconds) return;
  if (const absl::Status dead = FindDeadExchange(waited_seconds >= context_.room_timeout_seconds);
      !dead.ok())
    return AnswerExchange(dead);
  if (now < wait_report_seconds_) return;
  std::vector<std::string> missing;
  for (const uint32_t number : wait_->missing) {
    const Rank& rank = *ranks_[number];
    missing.push_back(absl::StrCat(Describe(rank), ", which has called step ", rank.step, " last"));
  }
  spdlog::warn("job {}: ranks of {} {} and wait for {}", identity_.name, world_size(), wait_->what,
               absl::StrJoin(missing, ", and for "));
  wait_report_seconds_ = now + 6 * kLimits.rank_report_seconds;
}

// The loop's sleep, so that late ranks are told of in time.
int Job::LateRankMilliseconds(int sleep_ms) const {
  constexpr int kLookMilliseconds = 100;
  const bool is_joining = phase() == JobPhase::kOpening && world_size() > 1;
  if (!is_joining && !wait_.has_value()) return sleep_ms;
  return sleep_ms < 0 ? kLookMilliseconds : std::min(sleep_ms, kLookMilliseconds);
}

}  // namespace offload::daemon
