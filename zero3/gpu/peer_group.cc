#include "zero3/gpu/peer_group.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::zero3 {
namespace {

constexpr char kYes = '+';  // before what a rank says; another: why it does not take part

// What all have said when none refuses, else the first refusal.
absl::StatusOr<std::vector<std::string>> AllSay(const PeerGroup::Exchange& exchange,
                                                const absl::StatusOr<std::string>& say,
                                                std::string* why_not) {
  const std::string mine = say.ok() ? absl::StrCat(std::string(1, kYes), *say)
                                    : absl::StrCat("-", say.status().message());
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<std::string> said, exchange(mine));
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (!said[rank].empty() && said[rank].front() == kYes) {
      said[rank].erase(0, 1);
    } else if (why_not->empty()) {
      *why_not = absl::StrCat("rank ", rank, ": ", said[rank].empty() ? "" : said[rank].substr(1));
    }
  }
  return said;
}

absl::StatusOr<std::string> SayWho(accelerator::Accelerator* accelerator,
                                   const PeerGroup::Rank& self) {
  if (!self.takes_part) return absl::CancelledError("told not to");
  if (self.world_size > GatherAgreement::kRanksMax)
    return absl::OutOfRangeError(absl::StrCat("more than ", GatherAgreement::kRanksMax, " ranks"));
  accelerator::Peers* const peers = accelerator::PeersOf(accelerator);
  const std::string address = peers == nullptr ? "" : peers->Address();
  if (address.empty())
    return absl::UnimplementedError(absl::StrCat(accelerator->Name(), " reaches no other device"));
  return absl::StrCat(getpid(), " ", address);
}

}  // namespace

absl::StatusOr<PeerGroup::Joined> PeerGroup::Join(accelerator::Accelerator* accelerator,
                                                  size_t tensor_count, const Rank& self,
                                                  const Exchange& exchange) {
  Joined joined;
  const auto all_say = [&](const absl::StatusOr<std::string>& say) {
    return AllSay(exchange, say, &joined.why_not);
  };

  // Who is there.
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> ranks,
                           all_say(SayWho(accelerator, self)));
  if (!joined.why_not.empty()) return joined;
  accelerator::Peers* const peers = accelerator::PeersOf(accelerator);
  std::unique_ptr<PeerGroup> group(new PeerGroup);
  group->rank_ = self.rank;
  group->world_size_ = self.world_size;
  const absl::Status reaches = [&] {
    for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
      const std::pair<std::string, std::string> who =
          absl::StrSplit(ranks[rank], absl::MaxSplits(' ', 1));
      int pid = 0;
      if (!absl::SimpleAtoi(who.first, &pid)) return absl::InternalError(ranks[rank]);
      group->pids_.push_back(pid);
      if (self.asks && rank != self.rank && !peers->CanAccess(who.second)) {
        return absl::UnavailableError(absl::StrCat(
            accelerator->Name(), " does not reach ", who.second,
            who.second == peers->Address() ? ", its own GPU, which ranks share, or have instances "
                                             "of (MIG)"
                                           : ""));
      }
    }
    return absl::OkStatus();
  }();

  // Rank 0 makes what they share.
  const size_t memory_bytes = GatherAgreement::MemoryBytes(tensor_count);
  const auto make = [&]() -> absl::StatusOr<std::string> {
    OFFLOAD_RETURN_IF_ERROR(reaches);
    OFFLOAD_ASSIGN_OR_RETURN(group->watch_, PeerWatch::Open(group->pids_));
    if (self.rank != 0) return "";
    OFFLOAD_ASSIGN_OR_RETURN(group->memory_, NamedMemory::Make(memory_bytes));
    GatherAgreement::Format(group->memory_.span(), tensor_count, self.world_size);
    OFFLOAD_ASSIGN_OR_RETURN(const std::string id, peers->MakeId(self.world_size));
    return absl::StrCat(group->memory_.name(), " ", id);
  };
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> made, all_say(make()));
  if (!joined.why_not.empty()) return joined;
  const std::pair<std::string, std::string> shared =
      absl::StrSplit(made.front(), absl::MaxSplits(' ', 1));

  // All map it; then nobody waits in vain for who could not.
  const auto map = [&]() -> absl::StatusOr<std::string> {
    if (self.rank != 0) {
      OFFLOAD_ASSIGN_OR_RETURN(group->memory_, NamedMemory::Open(shared.first, memory_bytes));
    }
    group->agreement_.emplace(group->memory_.span(), self.rank);
    return "";
  };
  OFFLOAD_RETURN_IF_ERROR(all_say(map()).status());
  if (!joined.why_not.empty()) return joined;

  const auto connect = [&]() -> absl::StatusOr<std::string> {
    OFFLOAD_ASSIGN_OR_RETURN(group->collectives_,
                             peers->Join(shared.second, self.rank, self.world_size));
    return "";
  };
  OFFLOAD_RETURN_IF_ERROR(all_say(connect()).status());
  if (!joined.why_not.empty()) {
    if (group->collectives_ != nullptr) group->collectives_->Abort();
    return joined;
  }
  joined.group = std::move(group);
  return joined;
}

absl::Status PeerGroup::StayOut(const Exchange& exchange) {
  std::string why_not;
  return AllSay(exchange, absl::CancelledError("has no device"), &why_not).status();
}

absl::Status PeerGroup::Health() {
  for (const uint32_t rank : watch_.Ended()) {
    if (agreement_->HasLeft(rank)) continue;
    return MakeError(ErrorId::kRankLost,
                     absl::StrCat("rank ", rank, " (process ", pids_[rank],
                                  ") ended while the ranks' devices were connected"));
  }
  if (const std::optional<uint32_t> rank = agreement_->FailedRank()) {
    return MakeError(ErrorId::kRankLost,
                     *rank == GatherAgreement::kRanksMax
                         ? "a rank ended amid an agreement with the others"
                         : absl::StrCat("the device of rank ", *rank, " has failed"));
  }
  return collectives_->AsyncError();
}

}  // namespace offload::zero3
