#include "offloadd/gradient_order.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::daemon {
namespace {

using proto::GradientStart;

// What a rank may be ahead of another, in rounds, and the passes of one round: both only bound what
// a rank can make the daemon keep.
constexpr size_t kRoundsMax = 64;
constexpr uint32_t kPassesMax = 1u << 24;

absl::Status Violation(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }
absl::Status Differ(std::string_view what, std::string_view way_out) {
  return MakeError(ErrorId::kGradientOfRanks, what, way_out);
}

constexpr std::string_view kSamePasses =
    "Let every rank make the same backward passes between two looks at gradients, and look before "
    "the step only";

std::string_view DescribeStart(GradientStart start) {
  switch (start) {
    case GradientStart::kNothing:
      return "has none";
    case GradientStart::kZeros:
      return "has zeros";
    case GradientStart::kPrevious:
      return "has kept it";
  }
  return "is at odds";
}

}  // namespace

GradientOrder::GradientOrder(const proto::Catalogue* catalogue, uint32_t world_size, uint64_t step)
    : catalogue_(catalogue),
      step_(step + 1),
      ranks_(world_size),
      tensors_(catalogue->tensors.size()) {
  uint32_t extents = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].first_extent = extents;
    tensors_[i].extent_count = proto::ExtentCount(catalogue->tensors[i].element_count);
    extents += tensors_[i].extent_count;
  }
  extents_.resize(extents);
  for (Rank& rank : ranks_) {
    rank.round = 1;
    rank.deliveries.resize(tensors_.size());
  }
  AddRound(/*beginning=*/1, /*passes=*/0);
}

// ---- Rounds ------------------------------------------------------------------------------------

GradientOrder::Round* GradientOrder::FindRound(uint64_t number) {
  const uint64_t first = rounds_.front().number;
  return number < first || number - first >= rounds_.size() ? nullptr : &rounds_[number - first];
}
const GradientOrder::Round* GradientOrder::FindRound(uint64_t number) const {
  return const_cast<GradientOrder*>(this)->FindRound(number);
}

void GradientOrder::AddRound(uint64_t beginning, uint32_t passes) {
  Round round;
  round.number = rounds_.empty() ? beginning : rounds_.back().number + 1;
  round.beginning = beginning;
  round.stands.resize(ranks_.size(), {.ended = passes});
  rounds_.push_back(std::move(round));
}

// Every rank has left the rounds that are gone.
bool GradientOrder::HasPassed(uint64_t round, uint32_t rank, uint32_t pass) const {
  const Round* found = FindRound(round);
  return found == nullptr || HasClosed(*found, rank) || found->stands[rank].ended > pass;
}

void GradientOrder::StartRounds() {
  for (const Round* round = FindRound(under_way_ + 1); round != nullptr;
       round = FindRound(under_way_ + 1)) {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!HasEntered(*round, rank)) return;
    }
    ++under_way_;
    const bool begins = round->beginning == round->number;
    for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      const Tensor& t = tensors_[tensor];
      if (t.bits != 0 && t.step == step_) SetBits(tensor, begins ? 0 : proto::kGradientExists);
    }
    for (const uint32_t tensor : waiting_) {
      if (const std::optional<uint32_t> pass = FirstPassIn(tensor, under_way_))
        MarkExisting(tensor, round->beginning, *pass);
    }
  }
}

void GradientOrder::CloseRounds() {
  const uint64_t closed_before = closed_;
  while (closed_ < under_way_) {
    const Round* round = FindRound(closed_ + 1);
    for (uint32_t rank = 0; round != nullptr && rank < ranks_.size(); ++rank) {
      if (!HasClosed(*round, rank)) round = nullptr;
    }
    if (round == nullptr) break;
    ++closed_;
  }
  if (closed_ == closed_before) return;
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) MarkFinal(tensor);
}

void GradientOrder::DropRounds() {
  while (rounds_.size() > 1 && rounds_.front().number <= closed_) {
    for (const Rank& rank : ranks_) {
      if (!rank.steps && rank.round <= rounds_.front().number) return;
    }
    rounds_.pop_front();
  }
}

// ---- What ranks say ----------------------------------------------------------------------------

absl::Status GradientOrder::Begin(uint32_t rank, uint64_t step) {
  if (step != step_ || ranks_[rank].steps) {
    return Violation(
        absl::StrCat("rank ", rank, " begins gradients for step ", step,
                     ranks_[rank].steps ? " after it has called for step " : " of step ", step_));
  }
  if (StandOf(rank).entered) OFFLOAD_RETURN_IF_ERROR(BeginAnew(rank));
  ranks_[rank].gave = 0;
  StandOf(rank).entered = true;
  Advance();
  return absl::OkStatus();
}

// The trainer has zeroed what passes gave, without a step.
absl::Status GradientOrder::BeginAnew(uint32_t rank) {
  if (ranks_[rank].unfinished > 0) {
    return Violation(absl::StrCat("rank ", rank, " begins gradients amid a tensor"));
  }
  const uint64_t next = ranks_[rank].round + 1;
  if (const Round* round = FindRound(next); round != nullptr) {
    if (round->beginning != next) {
      return Differ(
          absl::StrCat("rank ", rank, " has zeroed gradients without a step, other ranks ",
                       "go on adding to them"),
          "Zero gradients on all ranks or on none");
    }
  } else if (rounds_.size() == kRoundsMax) {
    return Differ(absl::StrCat("rank ", rank, " has zeroed its gradients ", kRoundsMax,
                               " times, and another rank not once"),
                  "Zero gradients on all ranks or on none");
  } else {
    AddRound(next, 0);
  }
  StandOf(rank).closed = true;
  ranks_[rank].round = next;
  return absl::OkStatus();
}

absl::Status GradientOrder::PassesDiffer(uint32_t rank, const Round& round) const {
  std::string counts;
  for (uint32_t i = 0; i < ranks_.size(); ++i) {
    const Stand& stand = round.stands[i];
    const bool looks = stand.closed && !ranks_[i].steps;
    absl::StrAppend(&counts, i == 0 ? "" : ", ", "rank ", i,
                    ranks_[i].steps ? " steps after "
                    : looks         ? " has looked after "
                                    : " is at ",
                    stand.ended);
  }
  return Differ(absl::StrCat("rank ", rank,
                             " goes on with a backward pass after it has looked at a gradient, and "
                             "the ranks do not stand alike (passes of this step: ",
                             counts, ")"),
                kSamePasses);
}

// A rank that has looked goes on with another pass: possible when all have looked after as many.
// Whether one of them steps by now does not matter, so that it is no question of who comes first.
absl::Status GradientOrder::GoOn(uint32_t rank) {
  const uint64_t number = ranks_[rank].round;
  const Round& round = *FindRound(number);
  const uint32_t passes = round.stands[rank].ended;
  if (const Round* next = FindRound(number + 1); next != nullptr) {
    if (next->beginning == next->number) {
      return Differ(
          absl::StrCat("rank ", rank, " goes on adding to gradients that another rank has ",
                       "zeroed without a step"),
          "Zero gradients on all ranks or on none");
    }
  } else {
    for (uint32_t i = 0; i < ranks_.size(); ++i) {
      const Stand& stand = round.stands[i];
      if (!stand.closed || stand.ended != passes) return PassesDiffer(rank, round);
    }
    AddRound(round.beginning, passes);
  }
  ranks_[rank].round = number + 1;
  StandOf(rank).entered = true;
  return absl::OkStatus();
}

// The pass that a rank names has to be the one that runs.
absl::Status GradientOrder::EnterForPass(uint32_t rank, uint32_t pass) {
  if (!StandOf(rank).entered || ranks_[rank].steps) {
    return Violation(absl::StrCat("rank ", rank, " has a backward pass ",
                                  ranks_[rank].steps ? "after its step" : "before it has begun"));
  }
  if (StandOf(rank).closed) OFFLOAD_RETURN_IF_ERROR(GoOn(rank));
  const uint32_t running = StandOf(rank).ended;
  if (pass == running && pass < kPassesMax) return absl::OkStatus();
  return Violation(
      absl::StrCat("rank ", rank, " speaks of backward pass ", pass, ", and ", running, " runs"));
}

// The extents of a tensor come in order, once per pass.
absl::Status GradientOrder::CountExtent(uint32_t tensor, uint32_t extent,
                                        const Position& position) {
  Rank& rank = ranks_[position.rank];
  Delivery& delivery = rank.deliveries[tensor];
  const bool is_new = delivery.round != position.round || delivery.pass != position.pass;
  const uint32_t expected = is_new ? 0 : delivery.next_extent;
  if (extent != expected || extent >= tensors_[tensor].extent_count) {
    return Violation(absl::StrCat("rank ", position.rank, " delivers extent ", extent, " of \"",
                                  catalogue_->tensors[tensor].name, "\" in pass ", position.pass,
                                  ", the next is ", expected, " of ",
                                  tensors_[tensor].extent_count));
  }
  if (is_new) ++rank.unfinished;
  delivery = {position.round, position.pass, extent + 1};
  if (delivery.next_extent == tensors_[tensor].extent_count) --rank.unfinished;
  return absl::OkStatus();
}

// Ranks that give a gradient in the first pass in which there is one have to agree on what it is
// added to. Who gives it later has seen the others' sum meanwhile. Looked at in the order of the
// chain, so that it is no question of who comes first.
void GradientOrder::CompareStart(uint32_t tensor, const Part& part, bool is_first) {
  auto& first = tensors_[tensor].first;
  if (part.beginning < first.beginning) return;  // another extent is further
  if (is_first) {
    first = {part.beginning, part.position.pass, part.position.rank, part.start};
  } else if (first.pass == part.position.pass && first.start != part.start) {
    fault_.Update(
        Differ(absl::StrCat("the gradient of \"", catalogue_->tensors[tensor].name,
                            "\" begins differently: rank ", first.rank, " ",
                            std::string(DescribeStart(first.start)), ", rank ", part.position.rank,
                            " ", std::string(DescribeStart(part.start))),
               "Zero gradients on all ranks, in the same way (set_to_none)"));
  }
}

// In the order of the chain a slice of each rank follows the other, and nothing comes between.
void GradientOrder::CountSlice(uint32_t tensor, const Part& part, Extent& extent) {
  const bool is_next = part.ticket.is_slice && part.position.rank == extent.slices &&
                       (extent.slices == 0 || (part.position.round == extent.last.round &&
                                               part.position.pass == extent.last.pass));
  if (!is_next && (part.ticket.is_slice || extent.slices > 0)) {
    fault_.Update(Violation(absl::StrCat(
        "rank ", part.position.rank, " delivers ", part.ticket.is_slice ? "a slice" : "a part",
        " of \"", catalogue_->tensors[tensor].name, "\" in pass ", part.position.pass, " where ",
        extent.slices == 0 ? "no slices of other ranks stand"
                           : absl::StrCat("the slice of rank ", extent.slices, " is missing"))));
  }
  if (!is_next) return;
  if (extent.slices == 0) ++tensors_[tensor].amid_slices;
  if (++extent.slices < ranks_.size()) return;
  extent.slices = 0;
  --tensors_[tensor].amid_slices;
}

absl::Status GradientOrder::Deliver(uint32_t tensor, uint32_t extent, uint32_t pass,
                                    GradientStart start, const Ticket& ticket) {
  OFFLOAD_RETURN_IF_ERROR(EnterForPass(ticket.rank, pass));
  const uint64_t number = ranks_[ticket.rank].round;
  const Part part{{number, pass, ticket.rank}, FindRound(number)->beginning, start, ticket};
  OFFLOAD_RETURN_IF_ERROR(CountExtent(tensor, extent, part.position));
  ++ranks_[ticket.rank].said;
  Tensor& t = tensors_[tensor];
  ++t.held;
  ++t.unsettled;
  ++unsettled_;
  std::vector<Part>& parts = parts_[t.first_extent + extent];
  parts.insert(
      std::upper_bound(parts.begin(), parts.end(), part,
                       [](const Part& a, const Part& b) { return a.position < b.position; }),
      part);
  waiting_.insert(tensor);
  const uint64_t under_way_before = under_way_;
  StartRounds();  // the rank may have entered one with this part
  if (under_way_ != under_way_before) {
    Advance();
  } else if (number <= under_way_) {
    MarkExisting(tensor, part.beginning, pass);
    AdvanceExtent(tensor, extent);
  }
  return absl::OkStatus();
}

absl::Status GradientOrder::EndPass(uint32_t pass, bool waits, const Ticket& ticket) {
  const uint32_t rank = ticket.rank;
  OFFLOAD_RETURN_IF_ERROR(EnterForPass(rank, pass));
  if (ranks_[rank].unfinished > 0) {
    return Violation(absl::StrCat("rank ", rank, " ends pass ", pass, " amid a tensor"));
  }
  ++ranks_[rank].said;
  ranks_[rank].gave = FindRound(ranks_[rank].round)->beginning;
  ++StandOf(rank).ended;
  if (waits) {
    ends_.push_back({.ticket = ticket, .round = ranks_[rank].round, .pass = pass});
  } else {
    answers_.push_back({.ticket = ticket});
  }
  Advance();
  return absl::OkStatus();
}

absl::Status GradientOrder::Look(uint32_t tensor, uint32_t passes, const Ticket& ticket) {
  const uint32_t rank = ticket.rank;
  Stand& stand = StandOf(rank);
  if (!stand.entered || ranks_[rank].steps || ranks_[rank].unfinished > 0 ||
      passes != stand.ended) {
    return Violation(absl::StrCat("rank ", rank, " looks at \"", catalogue_->tensors[tensor].name,
                                  "\" after ", passes, " passes, it has ended ", stand.ended));
  }
  stand.closed = true;
  looks_.push_back({.ticket = ticket, .round = ranks_[rank].round, .tensor = tensor});
  Advance();
  return absl::OkStatus();
}

void GradientOrder::PublishNorm(uint32_t tensor, uint32_t norm_bits) {
  Tensor& t = tensors_[tensor];
  if ((t.bits & proto::kGradientFinal) == 0) return;  // of a sum that is not there any more
  t.norm_bits = norm_bits;
  SetBits(tensor, t.bits | proto::kGradientNorm);
}

void GradientOrder::Step(uint32_t rank) {
  if (ranks_[rank].unfinished > 0)
    fault_.Update(Violation(absl::StrCat("rank ", rank, " steps amid a tensor")));
  ranks_[rank].steps = true;
  Advance();
}

void GradientOrder::CancelStep() {
  for (uint32_t i = 0; i < ranks_.size(); ++i) {
    if (!std::exchange(ranks_[i].steps, false)) continue;
    // A rank that stepped without it has let go of the sums before, and has seen these.
    while (FindRound(ranks_[i].round + 1) != nullptr) ++ranks_[i].round;
    Stand& stand = StandOf(i);
    stand.entered = stand.closed = true;
  }
}

// ---- What was done -----------------------------------------------------------------------------

void GradientOrder::Added(uint32_t tensor, uint32_t extent, bool finite) {
  Tensor& t = tensors_[tensor];
  Extent& e = extents_[t.first_extent + extent];
  OFFLOAD_CHECK(e.adding > 0) << "extent " << extent << " of tensor " << tensor;
  t.unsettled -= e.adding;
  unsettled_ -= e.adding;
  e.adding = 0;
  t.finite = t.finite && finite;
  AdvanceExtent(tensor, extent);
  MarkFinal(tensor);
  AnswerWaits();
}

void GradientOrder::BeginNextStep(std::span<const uint32_t> updated) {
  OFFLOAD_CHECK(IsSettled()) << "step " << step_ << " with parts that are not added";
  ++step_;
  for (const uint32_t tensor : updated) tensors_[tensor].update_pending = true;
  const uint64_t number = rounds_.back().number + 1;
  rounds_.clear();
  AddRound(number, 0);
  under_way_ = closed_ = number - 1;
  for (Rank& rank : ranks_) {
    rank.round = number;
    rank.steps = false;
    rank.gave = 0;
    rank.unfinished = 0;
  }
}

void GradientOrder::UpdateComputed(uint32_t tensor) {
  tensors_[tensor].update_pending = tensors_[tensor].update_wanted = false;
  AdvanceTensor(tensor);
}

std::vector<GradientOrder::Ticket> GradientOrder::TakeTickets() {
  std::vector<Ticket> tickets;
  for (const auto& [extent, parts] : parts_) {
    for (const Part& part : parts) tickets.push_back(part.ticket);
  }
  // The map has an order of its own in every run.
  std::sort(tickets.begin(), tickets.end(), [](const Ticket& a, const Ticket& b) {
    return std::tie(a.rank, a.tag) < std::tie(b.rank, b.tag);
  });
  for (const std::vector<Wait>* waits : {&ends_, &looks_}) {
    for (const Wait& wait : *waits) tickets.push_back(wait.ticket);
  }
  for (const Addition& addition : additions_)
    tickets.insert(tickets.end(), addition.parts.begin(), addition.parts.end());
  for (const Answer& answer : answers_) tickets.push_back(answer.ticket);
  parts_.clear();
  ends_.clear();
  looks_.clear();
  additions_.clear();
  answers_.clear();
  return tickets;
}

// ---- What is known -----------------------------------------------------------------------------

std::vector<uint32_t> GradientOrder::TakeChanged() {
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  return std::exchange(changed_, {});
}

bool GradientOrder::IsSettled() const {
  return unsettled_ == 0 &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.steps; });
}

bool GradientOrder::Waits(uint32_t rank) const {
  const auto is_its = [rank](const Wait& wait) { return wait.ticket.rank == rank; };
  return std::any_of(looks_.begin(), looks_.end(), is_its) ||
         std::any_of(ends_.begin(), ends_.end(), is_its);
}

bool GradientOrder::HoldsUpLook(uint32_t rank, const Wait& look) const {
  return std::any_of(rounds_.begin(), rounds_.end(), [&](const Round& round) {
    return round.number <= look.round && round.number > closed_ && !HasClosed(round, rank);
  });
}

bool GradientOrder::HoldsUpEnd(uint32_t rank, const Wait& end) const {
  return rank != end.ticket.rank && !HasPassed(end.round, rank, end.pass);
}

std::vector<uint32_t> GradientOrder::WaitedFor() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (std::any_of(looks_.begin(), looks_.end(),
                    [&](const Wait& look) { return HoldsUpLook(rank, look); }) ||
        std::any_of(ends_.begin(), ends_.end(),
                    [&](const Wait& end) { return HoldsUpEnd(rank, end); }))
      ranks.push_back(rank);
  }
  return ranks;
}

bool GradientOrder::IsAheadOf(uint32_t rank, uint32_t other) const {
  for (const Wait& look : looks_) {
    if (look.ticket.rank == rank && HoldsUpLook(other, look)) return true;
  }
  for (const Wait& end : ends_) {
    if (end.ticket.rank == rank && HoldsUpEnd(other, end)) return true;
  }
  const std::vector<uint32_t> late = PartsWaitFor();
  return std::find(late.begin(), late.end(), other) != late.end() &&
         std::find(late.begin(), late.end(), rank) == late.end();
}

std::vector<uint32_t> GradientOrder::PartsWaitFor() const {
  std::vector<uint32_t> ranks;
  if (waiting_.empty()) return ranks;
  const Tensor& t = tensors_[*waiting_.begin()];
  auto parts = parts_.end();
  uint32_t extent = t.first_extent;
  for (; extent < t.first_extent + t.extent_count && parts == parts_.end(); ++extent)
    parts = parts_.find(extent);
  if (parts == parts_.end() || t.update_pending || extents_[parts->first].adding > 0) return ranks;
  const Position& position = parts->second.front().position;
  const Round* const round = FindRound(position.round);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const bool is_outside = round != nullptr && !HasEntered(*round, rank);
    if (is_outside || IsBefore(rank, extents_[parts->first].last, position)) ranks.push_back(rank);
  }
  return ranks;
}

uint64_t GradientOrder::word(uint32_t tensor) const {
  const Tensor& t = tensors_[tensor];
  return proto::MakeGradientWord(t.bits, t.step, t.norm_bits, t.first_pass);
}

void GradientOrder::SetBits(uint32_t tensor, uint8_t bits) {
  Tensor& t = tensors_[tensor];
  t.bits = bits;
  if ((bits & proto::kGradientNorm) == 0) t.norm_bits = 0;
  changed_.push_back(tensor);
}

void GradientOrder::MarkExisting(uint32_t tensor, uint64_t beginning, uint32_t pass) {
  Tensor& t = tensors_[tensor];
  if (t.beginning == beginning) {
    if (pass >= t.first_pass) return;
    t.first_pass = pass;  // of a slower rank
    changed_.push_back(tensor);
    return;
  }
  t.beginning = beginning;
  t.first_pass = pass;
  t.step = step_;
  t.finite = true;
  SetBits(tensor, proto::kGradientExists);
}

// Until the next round is under way.
void GradientOrder::MarkFinal(uint32_t tensor) {
  Tensor& t = tensors_[tensor];
  const bool is_final = (t.bits & proto::kGradientExists) != 0 && t.step == step_ &&
                        closed_ == under_way_ && IsAddedUpTo(tensor, under_way_);
  if (!is_final || (t.bits & proto::kGradientFinal) != 0) return;
  if (t.amid_slices > 0) {
    fault_.Update(
        Violation(absl::StrCat("ranks have delivered slices of \"",
                               catalogue_->tensors[tensor].name, "\", and others nothing")));
  }
  SetBits(tensor,
          proto::kGradientExists | proto::kGradientFinal | (t.finite ? proto::kGradientFinite : 0));
}

bool GradientOrder::IsAddedUpTo(uint32_t tensor, uint64_t round) const {
  const Tensor& t = tensors_[tensor];
  if (t.unsettled == 0) return true;
  for (uint32_t i = t.first_extent; i < t.first_extent + t.extent_count; ++i) {
    if (extents_[i].adding > 0 && extents_[i].last.round <= round) return false;
    const auto parts = parts_.find(i);
    if (parts != parts_.end() && parts->second.front().position.round <= round) return false;
  }
  return true;
}

std::optional<uint32_t> GradientOrder::FirstPassIn(uint32_t tensor, uint64_t round) const {
  const Tensor& t = tensors_[tensor];
  std::optional<uint32_t> first;
  for (uint32_t i = t.first_extent; i < t.first_extent + t.extent_count; ++i) {
    const auto parts = parts_.find(i);
    if (parts == parts_.end()) continue;
    for (const Part& part : parts->second) {
      if (part.position.round != round) continue;
      first = std::min(first.value_or(part.position.pass), part.position.pass);
    }
  }
  return first;
}

// ---- The order ---------------------------------------------------------------------------------

// True when something of the rank may yet stand between the two. It makes its passes in order, so
// only the last that would stand there is asked for.
bool GradientOrder::IsBefore(uint32_t rank, const Position& last, const Position& position) const {
  if (rank == position.rank) return false;  // it has come here itself
  if (rank > position.rank && position.pass == 0) return false;
  const Position before{position.round, position.pass - (rank > position.rank ? 1 : 0), rank};
  return before > last && !HasPassed(before.round, rank, before.pass);
}

bool GradientOrder::IsNext(const Position& last, const Position& position) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (IsBefore(rank, last, position)) return false;
  }
  return true;
}

void GradientOrder::AdvanceExtent(uint32_t tensor, uint32_t extent) {
  Tensor& t = tensors_[tensor];
  Extent& e = extents_[t.first_extent + extent];
  const auto parts = parts_.find(t.first_extent + extent);
  if (parts == parts_.end() || e.adding > 0) return;
  if (t.update_pending) {
    if (!std::exchange(t.update_wanted, true)) wanted_.push_back(tensor);
    return;
  }
  Addition addition{.tensor = tensor, .extent = extent};
  std::vector<Part>& waiting = parts->second;
  // A sweep stays within a round: the next one may begin anew.
  for (const Part& part : waiting) {
    const Position& position = part.position;
    if (position.round > under_way_ || !IsNext(e.last, position)) break;
    if (e.adding > 0 && position.round != e.last.round) break;
    const bool is_first = e.last.round < part.beginning;
    if (is_first) addition.start = part.start;
    CompareStart(tensor, part, is_first);
    CountSlice(tensor, part, e);
    e.last = position;
    ++e.adding;
    addition.parts.push_back(part.ticket);
  }
  if (e.adding == 0) return;
  waiting.erase(waiting.begin(), waiting.begin() + e.adding);
  if (waiting.empty()) parts_.erase(parts);
  t.held -= e.adding;
  if (t.held == 0) waiting_.erase(tensor);
  additions_.push_back(std::move(addition));
}

void GradientOrder::AdvanceTensor(uint32_t tensor) {
  for (uint32_t i = 0; i < tensors_[tensor].extent_count; ++i) AdvanceExtent(tensor, i);
}

void GradientOrder::Advance() {
  StartRounds();
  CloseRounds();
  const std::vector<uint32_t> waiting(waiting_.begin(), waiting_.end());
  for (const uint32_t tensor : waiting) AdvanceTensor(tensor);
  AnswerWaits();
  DropRounds();
}

void GradientOrder::AnswerWaits() {
  std::erase_if(ends_, [this](const Wait& end) {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (rank != end.ticket.rank && !HasPassed(end.round, rank, end.pass)) return false;
    }
    answers_.push_back({.ticket = end.ticket});
    return true;
  });
  std::erase_if(looks_, [this](const Wait& look) {
    if (look.round > closed_ || !IsAddedUpTo(look.tensor, look.round)) return false;
    const Tensor& t = tensors_[look.tensor];
    const bool exists = (t.bits & proto::kGradientExists) != 0 && t.step == step_;
    answers_.push_back(
        {look.ticket,
         exists ? word(look.tensor) : proto::MakeGradientWord(proto::kGradientFinal, step_, 0)});
    return true;
  });
}

}  // namespace offload::daemon
