#include "offloadd/weight_cache.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "offloadd/extent_update.h"
#include "offloadd/limits.h"
#include "spdlog/spdlog.h"

namespace offload::daemon {

WeightCache::WeightCache(JobContext* context, bool new_store)
    : context_(context),
      window_(context->layout.window_bytes),
      states_(context->catalogue.store_tensors.size()),
      pending_(context->catalogue.tensors.size(), false),
      waiting_count_(context->catalogue.tensors.size(), 0),
      waits_of_rank_(context->ranks.size(), 0) {
  for (uint32_t i = 0; i < states_.size(); ++i) {
    if (!context->plan.weight_resident[i]) continue;
    states_[i].permanent = true;
    states_[i].offset_bytes = context->layout.weight_offset[i];
    if (new_store) BecomeLoaded(i);
  }
}

std::atomic<uint64_t>& WeightCache::Word(uint32_t tensor) const {
  return reinterpret_cast<proto::TensorWord*>(context_->slab +
                                              context_->layout.tensor_words_offset)[tensor];
}

void WeightCache::StoreWord(uint32_t tensor, proto::TensorState state) const {
  const proto::Placement& placement = context_->catalogue.placements[tensor];
  const proto::StoreTensor& store_tensor = context_->store_tensor(placement.store_tensor);
  const uint64_t offset = state == proto::kResident
                              ? states_[placement.store_tensor].offset_bytes +
                                    WeightBytes(store_tensor, placement.element_offset)
                              : 0;
  Word(tensor).store(proto::MakeTensorWord(state, offset), std::memory_order_seq_cst);
}

void WeightCache::Answer(const Waiter& waiter) const {
  context_->complete(waiter.rank, waiter.tag, absl::OkStatus(),
                     Word(waiter.tensor).load(std::memory_order_relaxed));
}

void WeightCache::AnswerWaiters(uint32_t store_tensor) {
  std::vector<Waiter> waiters = std::exchange(states_[store_tensor].waiters, {});
  for (const Waiter& waiter : waiters) {
    if (pending_[waiter.tensor]) {
      states_[store_tensor].waiters.push_back(waiter);
      continue;
    }
    CountWait(waiter, -1);
    context_->activity->AddWait(store_tensor, waiter.cause, waiter.since_nanoseconds);
    Answer(waiter);
  }
}

void WeightCache::FailWaiters(const absl::Status& status) {
  for (State& state : states_) {
    for (const Waiter& waiter : std::exchange(state.waiters, {})) {
      CountWait(waiter, -1);
      context_->complete(waiter.rank, waiter.tag, status, 0);
    }
    state.demanded = false;
  }
  demands_.clear();
  wishes_.clear();
}

// ---- Ranks -------------------------------------------------------------------------------------

void WeightCache::Acquire(uint32_t rank, uint32_t tensor, uint64_t tag) {
  const uint32_t store_tensor = context_->catalogue.placements[tensor].store_tensor;
  if (!pending_[tensor] && loaded(store_tensor)) return Answer({rank, tensor, tag});
  State& state = states_[store_tensor];
  state.waiters.push_back(
      {rank, tensor, tag, CauseOfWait(tensor), context_->activity->NowNanoseconds()});
  CountWait(state.waiters.back(), 1);
  if (pending_[tensor]) on_demand_(store_tensor);
  if (pending_[tensor] || state.phase == Phase::kAbsent) Demand(store_tensor);
  if (state.phase == Phase::kLoading) {
    // Whatever else is being loaded can wait.
    const auto load = std::find(loads_.begin(), loads_.end(), store_tensor);
    if (load != loads_.end()) {
      loads_.erase(load);
      loads_.push_front(store_tensor);
    }
  }
}

ActivityLog::WaitCause WeightCache::CauseOfWait(uint32_t tensor) const {
  if (pending_[tensor]) return ActivityLog::WaitCause::kUpdate;
  return loading(context_->catalogue.placements[tensor].store_tensor)
             ? ActivityLog::WaitCause::kLate
             : ActivityLog::WaitCause::kMiss;
}

void WeightCache::Demand(uint32_t store_tensor) {
  State& state = states_[store_tensor];
  if (state.demanded) return;
  state.demanded = true;
  state.waiting_since = context_->clock->NowSeconds();
  demands_.push_back(store_tensor);
}

void WeightCache::Prefetch(uint32_t tensor) {
  const uint32_t store_tensor = context_->catalogue.placements[tensor].store_tensor;
  if (pending_[tensor] || states_[store_tensor].phase != Phase::kAbsent ||
      states_[store_tensor].demanded)
    return;
  if (std::find(wishes_.begin(), wishes_.end(), store_tensor) != wishes_.end()) return;
  if (wishes_.size() >= kLimits.wishes_max) wishes_.pop_front();
  wishes_.push_back(store_tensor);
}

void WeightCache::SetSchedule(std::span<const uint32_t> tensors) {
  std::vector<uint32_t> touches;
  touches.reserve(tensors.size());
  for (const uint32_t tensor : tensors)
    touches.push_back(context_->catalogue.placements[tensor].store_tensor);
  order_ = UseOrder(touches, static_cast<uint32_t>(states_.size()));
}

void WeightCache::SetPositions(std::span<const Position> positions) {
  positions_.assign(positions.begin(), positions.end());
  last_ = *std::min_element(positions.begin(), positions.end(),
                            [](const Position& a, const Position& b) {
                              return std::pair(a.step, a.touch) < std::pair(b.step, b.touch);
                            });
}

uint64_t WeightCache::NextUse(uint32_t store_tensor) const {
  uint64_t nearest = kNeverUsed;
  for (const Position& position : positions_)
    nearest = std::min(nearest, order_.NextUse(store_tensor, position.touch));
  return nearest;
}

// ---- The update --------------------------------------------------------------------------------

void WeightCache::MarkPending(std::span<const uint32_t> tensors) {
  for (const uint32_t tensor : tensors) {
    pending_[tensor] = true;
    StoreWord(tensor, proto::kPending);
  }
}

bool WeightCache::Unused(uint32_t tensor) const {
  return context_->Pins(tensor) <= waiting_count_[tensor];
}

bool WeightCache::HasSlot(uint32_t store_tensor) const {
  const State& state = states_[store_tensor];
  return state.permanent || state.phase == Phase::kLoaded;
}

bool WeightCache::Claim(uint32_t store_tensor, std::optional<uint64_t> needed) {
  State& state = states_[store_tensor];
  OFFLOAD_CHECK(state.phase == Phase::kAbsent || state.phase == Phase::kLoaded) << store_tensor;
  if (state.phase == Phase::kAbsent && !state.permanent && !GiveSlot(store_tensor, needed))
    return false;
  if (state.phase == Phase::kAbsent && state.permanent) {
    permanent_loaded_bytes_ += proto::WeightSlotBytes(context_->store_tensor(store_tensor));
  }
  state.phase = Phase::kClaimed;
  return true;
}

void WeightCache::Updated(uint32_t store_tensor) {
  State& state = states_[store_tensor];
  OFFLOAD_CHECK(state.phase == Phase::kClaimed) << store_tensor;
  state.phase = Phase::kLoaded;
  state.arrival = ++arrivals_;
  for (const uint32_t member : context_->store_tensor(store_tensor).members) {
    pending_[member] = false;
    StoreWord(member, proto::kResident);
  }
  AnswerWaiters(store_tensor);
}

// ---- Room --------------------------------------------------------------------------------------

bool WeightCache::Pinned(const proto::StoreTensor& tensor) const {
  return std::any_of(tensor.members.begin(), tensor.members.end(),
                     [this](uint32_t member) { return context_->Pins(member) != 0; });
}

bool WeightCache::AnyPending(const proto::StoreTensor& tensor) const {
  return std::any_of(tensor.members.begin(), tensor.members.end(),
                     [this](uint32_t member) { return pending_[member]; });
}

Occupant WeightCache::Look(uint32_t store_tensor) const {
  const State& state = states_[store_tensor];
  Occupant occupant;
  occupant.evictable = state.phase == Phase::kLoaded && state.holds == 0 &&
                       !Pinned(context_->store_tensor(store_tensor));
  // Without a schedule the oldest goes first.
  occupant.next_use = order_.empty() ? kNeverUsed - 1 - state.arrival : NextUse(store_tensor);
  return occupant;
}

// The three moves: say that it is gone, look whether somebody was faster, take it back if so.
bool WeightCache::Evict(uint32_t store_tensor) {
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  for (const uint32_t member : tensor.members) {
    if (!pending_[member]) StoreWord(member, proto::kAbsent);
  }
  if (Pinned(tensor)) {
    for (const uint32_t member : tensor.members) {
      if (!pending_[member]) StoreWord(member, proto::kResident);
    }
    return false;
  }
  window_.Release(store_tensor);
  states_[store_tensor].phase = Phase::kAbsent;
  return true;
}

bool WeightCache::GiveSlot(uint32_t store_tensor, std::optional<uint64_t> needed) {
  const uint64_t slot_bytes = proto::WeightSlotBytes(context_->store_tensor(store_tensor));
  const std::optional<WeightWindow::Room> room =
      window_.Find(slot_bytes, needed, [this](uint32_t tensor) { return Look(tensor); });
  if (!room.has_value()) return false;
  for (const uint32_t evicted : room->evicted) {
    if (!Evict(evicted)) return false;
  }
  window_.Occupy(store_tensor, room->offset_bytes, slot_bytes);
  states_[store_tensor].offset_bytes = context_->layout.window_offset + room->offset_bytes;
  return true;
}

// ---- Loading -----------------------------------------------------------------------------------

void WeightCache::EnsureLoading(uint32_t store_tensor) {
  if (states_[store_tensor].phase == Phase::kAbsent) TryLoad(store_tensor, std::nullopt);
}

bool WeightCache::TryLoad(uint32_t store_tensor, std::optional<uint64_t> needed) {
  State& state = states_[store_tensor];
  if (state.holds > 0) return false;
  if (!state.permanent && !GiveSlot(store_tensor, needed)) return false;
  StartLoad(store_tensor, !needed.has_value());
  return true;
}

void WeightCache::StartLoad(uint32_t store_tensor, bool urgent) {
  State& state = states_[store_tensor];
  state.phase = Phase::kLoading;
  state.next_extent = 0;
  state.extents_left = proto::ExtentCount(context_->store_tensor(store_tensor).element_count);
  if (urgent) {
    loads_.push_front(store_tensor);
  } else {
    loads_.push_back(store_tensor);
  }
  IssueLoads();
}

void WeightCache::IssueLoads() {
  while (!loads_.empty() && loads_in_flight_ < context_->depths.loads && !context_->failed()) {
    const uint32_t store_tensor = loads_.front();
    State& state = states_[store_tensor];
    IssueExtent(store_tensor, state.next_extent++);
    if (state.next_extent == proto::ExtentCount(context_->store_tensor(store_tensor).element_count))
      loads_.pop_front();
  }
}

void WeightCache::IssueExtent(uint32_t store_tensor, uint32_t index) {
  const swap::ExtentId id{store_tensor, swap::Plane::kWeight, index};
  std::byte* bytes =
      slot(store_tensor) + WeightExtentOffset(context_->store_tensor(store_tensor), index);
  const swap::ReadRequest request{id, bytes};
  const uint64_t size_bytes = context_->store->ExtentBytes(id);
  auto stamp = std::make_shared<swap::Stamp>();
  ++loads_in_flight_;
  auto done = [this, store_tensor, id, bytes, size_bytes, stamp](absl::Status status) {
    --loads_in_flight_;
    IssueLoads();
    if (!status.ok() || stamp->never_written()) return FinishExtent(store_tensor, status);
    auto good = std::make_shared<bool>(false);
    context_->Compute(
        [this, id, bytes, size_bytes, stamp, good] {
          *good = context_->store->Verify(id, *stamp, {bytes, size_bytes});
        },
        [this, store_tensor, id, bytes, stamp, good] {
          if (*good) return FinishExtent(store_tensor, absl::OkStatus());
          context_->store->ReadAgain({id, bytes}, *stamp,
                                     context_->Counted([this, store_tensor](absl::Status status) {
                                       FinishExtent(store_tensor, status);
                                     }));
        });
  };
  context_->store->Read({&request, 1}, {stamp.get(), 1}, context_->Counted(std::move(done)));
}

void WeightCache::FinishExtent(uint32_t store_tensor, const absl::Status& status) {
  if (!status.ok()) context_->fail(status);
  if (--states_[store_tensor].extents_left > 0 || context_->failed()) return;
  BecomeLoaded(store_tensor);
  AnswerWaiters(store_tensor);
}

void WeightCache::BecomeLoaded(uint32_t store_tensor) {
  State& state = states_[store_tensor];
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  state.phase = Phase::kLoaded;
  state.arrival = ++arrivals_;
  if (state.permanent) permanent_loaded_bytes_ += proto::WeightSlotBytes(tensor);
  for (const uint32_t member : tensor.members) {
    if (!pending_[member]) StoreWord(member, proto::kResident);
  }
}

// ---- Turns -------------------------------------------------------------------------------------

bool WeightCache::Turn() {
  if (context_->failed()) return false;
  const bool demands_wait = ServeDemands();
  const bool wishes_wait = ServeWishes();
  return demands_wait || wishes_wait;
}

void WeightCache::PutLastRankFirst() {
  std::stable_partition(demands_.begin(), demands_.end(), [this](uint32_t store_tensor) {
    const std::vector<Waiter>& waiters = states_[store_tensor].waiters;
    return std::any_of(waiters.begin(), waiters.end(),
                       [this](const Waiter& waiter) { return waiter.rank == last_.rank; });
  });
}

// Tries all, in order: a big tensor that finds no room must not stop those that other threads wait
// for.
bool WeightCache::ServeDemands() {
  if (positions_.size() > 1) PutLastRankFirst();
  bool waits_for_room = false;  // updates that wait for it are looked after by the executor
  for (size_t i = demands_.size(); i > 0; --i) {
    const uint32_t store_tensor = demands_.front();
    demands_.pop_front();
    State& state = states_[store_tensor];
    const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
    const bool updating = AnyPending(tensor);
    const bool wanted = !state.waiters.empty() && (state.phase == Phase::kAbsent || updating);
    // The update, perhaps one that came after the acquire, brings the weights of all but bundles.
    if (wanted && updating) on_demand_(store_tensor);
    const bool loads = wanted && state.phase == Phase::kAbsent && (!updating || tensor.bundle) &&
                       TryLoad(store_tensor, std::nullopt);
    if (!wanted || (loads && !updating)) {
      state.demanded = false;
      continue;
    }
    demands_.push_back(store_tensor);
    CheckPatience(store_tensor);
    waits_for_room |= !updating;
  }
  return waits_for_room;
}

void WeightCache::CountWait(const Waiter& waiter, int32_t change) {
  waiting_count_[waiter.tensor] += change;
  waits_of_rank_[waiter.rank] += change;
}

bool WeightCache::AllRanksWait() const {
  for (uint32_t rank = 0; rank < context_->ranks.size(); ++rank) {
    if (Computes(rank)) return false;
  }
  return true;
}

bool WeightCache::IsWaitingForRanks(uint32_t rank) const {
  return context_->waits_for_ranks && context_->waits_for_ranks(rank);
}

bool WeightCache::Computes(uint32_t rank) const {
  return context_->ranks[rank].is_here && !IsWaitingForWeights(rank) && !IsWaitingForRanks(rank);
}

bool WeightCache::IsUsingWeights(uint32_t rank) const {
  const proto::PinWord* const pins = context_->ranks[rank].pins;
  if (pins == nullptr) return false;
  return std::any_of(pins, pins + pending_.size(), [](const proto::PinWord& pin) {
    return pin.load(std::memory_order_relaxed) != 0;
  });
}

// Of several ranks, those whose weights will make room of themselves: of a rank that waits for
// nothing, which is slow, and of one that waits for such a rank. Empty: there are none.
std::string WeightCache::WhoMayLetGo() const {
  const auto count = static_cast<uint32_t>(context_->ranks.size());
  if (count == 1) return "";
  std::optional<uint32_t> busy;
  for (uint32_t rank = 0; rank < count; ++rank) {
    if (!Computes(rank)) continue;
    if (IsUsingWeights(rank)) return absl::StrCat("rank ", rank);
    busy = rank;
  }
  for (uint32_t rank = 0; rank < count && busy.has_value(); ++rank) {
    if (!IsWaitingForWeights(rank) && IsWaitingForRanks(rank) && IsUsingWeights(rank))
      return absl::StrCat("rank ", rank, ", which waits for rank ", *busy);
  }
  return "";
}

void WeightCache::CheckPatience(uint32_t store_tensor) {
  State& state = states_[store_tensor];
  const double now = context_->clock->NowSeconds();
  if (context_->outstanding > context_->scrubbing)
    state.waiting_since = now;  // what is in flight may still make room
  if (now - state.waiting_since < context_->room_timeout_seconds) return;
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  if (const std::string who = WhoMayLetGo(); !who.empty()) {
    spdlog::warn("for {} s a rank has waited for the room of weights that others use: {}",
                 context_->room_timeout_seconds, who);
    state.waiting_since = now;
    return;
  }
  const absl::Status status =
      MakeError(ErrorId::kWindowExhausted,
                absl::StrCat(AnyPending(tensor) ? "no room to update \"" : "no room for \"",
                             context_->catalogue.tensors[tensor.members[0]].name, "\" (",
                             FormatBytes(proto::WeightSlotBytes(tensor)),
                             ") in the weight window of ", FormatBytes(window_.size_bytes()), ": ",
                             FormatBytes(window_.occupied_bytes()), " are in use"));
  state.waiting_since = now;  // of who comes next
  for (const Waiter& waiter : std::exchange(state.waiters, {})) {
    CountWait(waiter, -1);
    context_->complete(waiter.rank, waiter.tag, status, 0);
  }
}

bool WeightCache::ServeWishes() {
  for (size_t i = wishes_.size(); i > 0; --i) {
    const uint32_t store_tensor = wishes_.front();
    wishes_.pop_front();
    const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
    if (states_[store_tensor].phase != Phase::kAbsent || AnyPending(tensor)) continue;
    if (!TryLoad(store_tensor, NextUse(store_tensor))) wishes_.push_back(store_tensor);
  }
  return !wishes_.empty();
}

}  // namespace offload::daemon
