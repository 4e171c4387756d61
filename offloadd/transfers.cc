#include "offloadd/transfers.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/string_view.h"
#include "kernels/split.h"
#include "proto/buffer_tensors.h"

namespace offload::daemon {
namespace {

using proto::Plane;
using proto::RingOperation;

// The largest that a transfer needs: an fp64 plane of an extent. The weights and residuals of
// narrow ones take less; pages that nobody touches cost nothing.
constexpr uint64_t kBufferBytes = uint64_t{proto::kExtentElements} * 8;
constexpr uint32_t kBuffersMax = 4;
constexpr uint32_t kMergeElements = 1024;

bool IsPut(const proto::SubmissionEntry& entry) { return entry.operation == RingOperation::kPut; }

// The plane that a put fills from what the rank gives; of a master its upper half.
Plane FilledPlane(const proto::SubmissionEntry& entry) {
  return entry.plane == Plane::kMaster ? Plane::kWeight : entry.plane;
}

// Splits masters of elements [begin, begin + count) of an extent, whose other elements keep their
// residual and tie bits.
absl::StatusOr<TieBits> SplitInto(uint16_t* weights, std::span<int16_t> residual, uint64_t begin,
                                  std::span<const uint32_t> masters, const TieBits& ties) {
  TieSource source(ties);
  TieSink sink(static_cast<uint32_t>(residual.size()));
  const auto keep = [&](uint64_t from, uint64_t to, bool keeps) {
    for (uint64_t i = from; i < to; ++i) {
      if (residual[i] != INT16_MIN) continue;
      const bool bit = source.reader().Next();
      if (keeps) sink.writer().Append(bit);
    }
  };
  const uint64_t end = begin + masters.size();
  keep(0, begin, true);
  if (masters.size() < residual.size()) keep(begin, end, false);
  kernels::Split(masters.data(), masters.size(), weights + begin, residual.data() + begin,
                 &sink.writer());
  keep(end, residual.size(), true);
  return sink.Finish();
}

}  // namespace

// ---- Several ranks -----------------------------------------------------------------------------

bool Transfers::IsFollow(const proto::SubmissionEntry& entry) const {
  return IsPut(entry) && entry.element_count == 0;
}

Transfers::Follows& Transfers::FollowsOf(uint32_t tensor) {
  Follows& follows = follows_[tensor];
  follows.counts.resize(context_->ranks.size(), 0);
  follows.digests.resize(context_->ranks.size(), 0);
  return follows;
}

// Before the job is published only the first rank puts, and nobody reads.
void Transfers::Follow(uint32_t rank, const proto::SubmissionEntry& entry) {
  Follows& follows = FollowsOf(entry.tensor);
  const uint64_t sequence = ++follows.counts[rank];
  follows.digests[rank] = entry.digest;
  if (!context_->published || sequence <= follows.ended)
    return context_->complete(rank, entry.tag, absl::OkStatus(), 0);
  followers_.push_back({rank, entry.tag, entry.tensor, sequence, std::nullopt});
}

// All puts of the sequence are done, or none of them was.
void Transfers::EndSequence(const Request& request, const absl::Status& status) {
  Follows& follows = FollowsOf(request.entry.tensor);
  ++follows.ended;
  // Who waited in an exchange instead has seen it, too.
  for (uint64_t& count : follows.counts) count = std::max(count, follows.ended);
  std::erase_if(followers_, [&](const Follower& follower) {
    if (follower.tensor != request.entry.tensor || follower.sequence > follows.ended) return false;
    context_->complete(follower.rank, follower.tag, status, 0);
    return true;
  });
  --puts_;
  context_->complete(request.rank, request.entry.tag, status, 0);
}

bool Transfers::Waits(uint32_t rank) const {
  const auto is_its = [rank](const auto& waiting) { return waiting.rank == rank; };
  return std::any_of(queue_.begin(), queue_.end(), is_its) ||
         std::any_of(followers_.begin(), followers_.end(), is_its);
}

const std::string& Transfers::NameOf(uint32_t tensor) const {
  return context_->catalogue.tensors[tensor].name;
}

bool Transfers::FirstPuts(uint32_t tensor) const {
  return std::any_of(queue_.begin(), queue_.end(), [tensor](const Request& request) {
    return IsPut(request.entry) && request.entry.tensor == tensor;
  });
}

// A weight that the first rank puts, and that another has to follow before.
std::optional<uint32_t> Transfers::FirstPutsWithout(uint32_t rank) {
  for (const Request& request : queue_) {
    if (!IsPut(request.entry)) continue;
    const Follows& follows = FollowsOf(request.entry.tensor);
    if (follows.counts[rank] <= follows.ended) return request.entry.tensor;
  }
  return std::nullopt;
}

// What the rank does that waits for `other`; empty when it does not.
std::string Transfers::WaitOf(uint32_t rank, uint32_t other) {
  const RankMemory& memory = context_->ranks[rank];
  if (context_->is_ahead_of != nullptr && context_->is_ahead_of(rank, other))
    return absl::StrCat("waits for the gradients of rank ", other);
  if (memory.is_exchanging) return "waits in an exchange";
  if (rank == 0) {
    const std::optional<uint32_t> tensor = FirstPutsWithout(other);
    return tensor.has_value() ? absl::StrCat("writes \"", NameOf(*tensor), "\"") : "";
  }
  for (const Follower& follower : followers_) {
    if (follower.rank == rank && !FirstPuts(follower.tensor))
      return absl::StrCat("writes \"", NameOf(follower.tensor), "\"");
  }
  return "";
}

// Why a rank will not come to what `writer` writes; empty: it may. Threads of a trainer may write
// and wait for other ranks at once: only a rank that waits on and on never comes to it.
std::string Transfers::PassesBy(uint32_t rank, uint32_t writer, std::optional<double>& since) {
  const RankMemory& memory = context_->ranks[rank];
  if (!memory.is_here) return "has closed the job";
  if (memory.is_stepping) return "takes a step";
  std::string wait = WaitOf(rank, writer);
  if (wait.empty()) {
    since.reset();
    return wait;
  }
  const double now = context_->clock->NowSeconds();
  if (!since.has_value()) since = now;
  return now - *since >= context_->room_timeout_seconds ? wait : "";
}

absl::Status Transfers::PassedBy(uint32_t writer, uint32_t tensor, uint32_t rank,
                                 std::string_view instead) const {
  return MakeError(
      ErrorId::kRanksDiffer,
      absl::StrCat("rank ", writer, " writes \"", NameOf(tensor), "\" in place while rank ", rank,
                   " ", ToAbsl(instead), " without having done so"),
      absl::StrCat("Write weights on every rank, and in the same places of the program (not under "
                   "if rank == ",
                   writer, ")"));
}

// True when no other rank reads the old bytes any more; the reason when one never will say so, or
// has made another value of them.
absl::StatusOr<bool> Transfers::IsFollowed(const Request& request) {
  if (context_->ranks.size() == 1 || !context_->published) return true;
  const uint32_t tensor = request.entry.tensor;
  // Nobody uses those but who resumes.
  if (proto::IsBufferTensor(NameOf(tensor))) return true;
  Follows& follows = FollowsOf(tensor);
  for (uint32_t rank = 1; rank < context_->ranks.size(); ++rank) {
    const RankMemory& other = context_->ranks[rank];
    const bool follows_it = follows.counts[rank] > follows.ended;
    if (follows_it && follows.digests[rank] != request.entry.digest) {
      return MakeError(ErrorId::kWeightOfRanks,
                       absl::StrCat("ranks 0 and ", rank, " change \"", NameOf(tensor),
                                    "\" in place, and not to the same value"));
    }
    if (follows_it || other.is_exchanging || !other.is_here) continue;
    const std::string instead = PassesBy(rank, /*writer=*/0, follows.passed_since);
    if (instead.empty()) return false;
    return PassedBy(/*writer=*/0, tensor, rank, instead);
  }
  return true;
}

// The rank will follow a put that waits for that when it has read: it reads the old bytes, or those
// of another member of the bundle, which stay.
bool Transfers::ReadsBeforeFollowing(const Request& request) {
  if (request.rank == 0 || IsPut(request.entry)) return false;
  const Follows& follows = FollowsOf(request.entry.tensor);
  return follows.counts[request.rank] <= follows.ended;
}

// Of those whose first rank will not come, why. `may` is set when there may be more with time.
std::vector<std::pair<Transfers::Follower, absl::Status>> Transfers::FindLeftAlone(bool& may) {
  std::vector<std::pair<Follower, absl::Status>> found;
  for (Follower& follower : followers_) {
    if (FirstPuts(follower.tensor)) continue;
    const std::string instead = PassesBy(/*rank=*/0, follower.rank, follower.passed_since);
    may |= follower.passed_since.has_value();
    if (!instead.empty())
      found.emplace_back(follower, PassedBy(follower.rank, follower.tensor, /*rank=*/0, instead));
  }
  return found;
}

// What it has followed does not count.
void Transfers::Refuse(const Follower& refused, const absl::Status& status) {
  const auto found =
      std::find_if(followers_.begin(), followers_.end(), [&](const Follower& follower) {
        return follower.rank == refused.rank && follower.tag == refused.tag;
      });
  if (found == followers_.end()) return;
  followers_.erase(found);
  --FollowsOf(refused.tensor).counts[refused.rank];
  context_->complete(refused.rank, refused.tag, status, 0);
}

// ---- The queue ---------------------------------------------------------------------------------

void Transfers::Add(uint32_t rank, const proto::SubmissionEntry& entry) {
  if (rank != 0 && IsFollow(entry)) return Follow(rank, entry);
  if (rank != 0 && IsPut(entry)) {
    return context_->complete(
        rank, entry.tag,
        MakeError(ErrorId::kProtocol, absl::StrCat("rank ", rank, " puts; only the first may")), 0);
  }
  puts_ += IsPut(entry);
  queue_.push_back({rank, entry});
}

bool Transfers::Turn() {
  if (context_->failed()) return false;
  std::unordered_set<uint32_t> blocked, unfollowed;
  bool waiting = false;
  const auto left_alone = FindLeftAlone(waiting);
  for (size_t i = 0; i < queue_.size() && in_flight_ < context_->depths.transfers;) {
    const Request request = queue_[i];
    const proto::SubmissionEntry& entry = request.entry;
    const uint32_t store_tensor = context_->catalogue.placements[entry.tensor].store_tensor;
    absl::StatusOr<bool> can_start =
        blocked.count(store_tensor) == 0 &&
        (unfollowed.count(store_tensor) == 0 || ReadsBeforeFollowing(request));
    if (*can_start && IsPut(entry)) {
      can_start = IsFollowed(request);
      if (can_start.ok() && !*can_start) {
        unfollowed.insert(store_tensor);
        waiting = true;
        ++i;
        continue;
      }
    }
    if (!can_start.ok()) {
      queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(i));
      Refuse(request, can_start.status());
      continue;
    }
    if (!*can_start || !CanStart(entry)) {
      if (unfollowed.count(store_tensor) == 0 || *can_start) blocked.insert(store_tensor);
      waiting = true;
      ++i;
      // A long queue behind a few tensors that wait is not worth looking through in every turn.
      if (blocked.size() >= context_->depths.transfers) break;
      continue;
    }
    queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(i));
    IsFollow(entry) ? EndSequence(request, absl::OkStatus()) : Start(request);
  }
  for (const auto& [follower, status] : left_alone) Refuse(follower, status);
  return waiting;
}

// A put of a sequence that is none: at its end those that follow it are told, too.
void Transfers::Refuse(const Request& request, const absl::Status& status) {
  if (IsFollow(request.entry)) return EndSequence(request, status);
  --puts_;
  context_->complete(request.rank, request.entry.tag, status, 0);
}

bool Transfers::CanStart(const proto::SubmissionEntry& entry) {
  const uint32_t store_tensor = context_->catalogue.placements[entry.tensor].store_tensor;
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  if (executor_->Updating(store_tensor)) {
    executor_->Demand(store_tensor);
    return false;
  }
  if (IsPut(entry) && !IsFollow(entry) && !(executor_->Forget(store_tensor) && CanPut()))
    return false;
  if (tensor.bundle && !cache_->loaded(store_tensor)) {
    cache_->EnsureLoading(store_tensor);
    return false;
  }
  if (cache_->loading(store_tensor) || buffers_in_use_ == kBuffersMax) return false;
  const auto found = users_.find(store_tensor);
  const Users users = found == users_.end() ? Users{} : found->second;
  if (!IsPut(entry) || IsFollow(entry)) return users.puts == 0;
  return users.gets == 0 && (!tensor.bundle || users.puts == 0);
}

// While a job is being built its puts are those of epoch 0. Later the last step has to be committed
// first, so that neither its commit has something of the put nor the put takes the step along when
// it is dropped.
bool Transfers::CanPut() {
  if (context_->commit_wanted || context_->changing_snapshots) return false;
  if (!context_->published || (!executor_->busy() && !executor_->HasUncommitted())) return true;
  executor_->Hurry();
  executor_->CommitSoon();
  return false;
}

void Transfers::FailQueued(const absl::Status& status) {
  for (const Follower& follower : std::exchange(followers_, {}))
    context_->complete(follower.rank, follower.tag, status, 0);
  for (const Request& request : std::exchange(queue_, {})) {
    puts_ -= IsPut(request.entry);
    context_->complete(request.rank, request.entry.tag, status, 0);
  }
}

absl::StatusOr<MappedRegion> Transfers::TakeBuffer() {
  ++buffers_in_use_;
  if (free_buffers_.empty()) return MappedRegion::Anonymous(kBufferBytes);
  MappedRegion buffer = std::move(free_buffers_.back());
  free_buffers_.pop_back();
  return buffer;
}

void Transfers::Start(const Request& request) {
  const proto::SubmissionEntry& entry = request.entry;
  auto transfer = std::make_shared<Transfer>();
  const proto::Placement& placement = context_->catalogue.placements[entry.tensor];
  const proto::StoreTensor& tensor = context_->store_tensor(placement.store_tensor);
  transfer->rank = request.rank;
  transfer->entry = entry;
  transfer->store_tensor = placement.store_tensor;
  transfer->index = static_cast<uint32_t>(entry.element_offset / proto::kExtentElements);
  transfer->elements = proto::ExtentElements(tensor.element_count, transfer->index);
  transfer->sequence = context_->store->open_sequence();
  ++in_flight_;
  if (IsPut(entry)) {
    ++context_->writes_in_flight;  // no commit from here on, the checksums bind the open sequence
    context_->unsettled_puts = context_->published;
  }
  Users& users = users_[placement.store_tensor];
  ++(IsPut(entry) ? users.puts : users.gets);
  cache_->Hold(placement.store_tensor);
  if (IsPut(entry) && !IsWhole(entry)) {
    return Finish(transfer,
                  MakeError(ErrorId::kProtocol,
                            absl::StrCat("a put of ", entry.element_count, " elements of \"",
                                         context_->catalogue.tensors[entry.tensor].name,
                                         "\", which are no whole extent")));
  }
  if (IsPut(entry) && state_->HasUnwritten(placement.store_tensor)) {
    return Finish(transfer, MakeError(ErrorId::kProtocol,
                                      absl::StrCat("a put of \"",
                                                   context_->catalogue.tensors[entry.tensor].name,
                                                   "\" after a partial step that has updated it")));
  }
  TakeMore(*transfer);
  PlacePlanes(transfer);
}

// In elements of its extent: 0 unless it is bundled, and a bundle is one extent.
uint64_t Transfers::BeginOf(const proto::SubmissionEntry& entry) const {
  return context_->catalogue.placements[entry.tensor].element_offset;
}

// Of a whole extent, or, of a bundle, of a whole tensor.
bool Transfers::IsWhole(const proto::SubmissionEntry& entry) const {
  const proto::Placement& placement = context_->catalogue.placements[entry.tensor];
  const proto::StoreTensor& tensor = context_->store_tensor(placement.store_tensor);
  const auto index = static_cast<uint32_t>(entry.element_offset / proto::kExtentElements);
  return entry.element_count == (tensor.bundle
                                     ? context_->catalogue.tensors[entry.tensor].element_count
                                     : proto::ExtentElements(tensor.element_count, index));
}

// Who writes tensor after tensor (an optimizer in the trainer's process) would otherwise have the
// bundle written as often.
void Transfers::TakeMore(Transfer& transfer) {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer.store_tensor);
  if (!IsPut(transfer.entry) || !tensor.bundle || context_->ranks.size() > 1) return;
  for (size_t i = 0; i < queue_.size();) {
    const proto::SubmissionEntry entry = queue_[i].entry;
    if (context_->catalogue.placements[entry.tensor].store_tensor != transfer.store_tensor) {
      ++i;
      continue;
    }
    if (!IsPut(entry) || entry.plane != transfer.entry.plane || !IsWhole(entry)) return;
    queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(i));
    transfer.more.push_back(entry);
  }
}

// ---- Where the planes are -----------------------------------------------------------------------

// Planes that a transfer has to have in memory before it can compute.
bool Transfers::NeedsPlane(const Transfer& transfer, Plane plane) const {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer.store_tensor);
  if (IsPut(transfer.entry)) {
    if (plane == Plane::kResidual) return transfer.writes_residual;
    if (transfer.entry.plane == Plane::kMaster) return plane == Plane::kWeight;
    // Of a bundle the other members' values stay; its weights are in the slab.
    return tensor.bundle && plane == transfer.entry.plane && plane != Plane::kWeight;
  }
  if (transfer.entry.plane != Plane::kMaster) return plane == transfer.entry.plane;
  return plane == Plane::kWeight || (plane == Plane::kResidual && HasResidual(tensor));
}

void Transfers::PlacePlanes(const TransferPointer& transfer) {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer->store_tensor);
  // A residual that was never written is zero on the drive, too.
  const swap::ExtentId residual{transfer->store_tensor, swap::Plane::kResidual, transfer->index};
  const bool had_residual =
      HasResidual(tensor) && !context_->store->stamp(residual).never_written();
  transfer->writes_residual =
      IsPut(transfer->entry) && (transfer->entry.plane == Plane::kMaster ||
                                 (transfer->entry.plane == Plane::kWeight && had_residual));
  const bool state_is_there = state_->Loaded(transfer->store_tensor, transfer->index);
  if (cache_->loaded(transfer->store_tensor)) {
    transfer->planes[Plane::kWeight].bytes =
        cache_->slot(transfer->store_tensor) + WeightExtentOffset(tensor, transfer->index);
  }
  if (state_is_there) {
    const ExtentPlanes state = state_->Planes(transfer->store_tensor, transfer->index);
    for (const Plane plane : proto::kUpdateOnlyPlanes) transfer->planes[plane] = state[plane];
  }
  Read(transfer);
}

void Transfers::Read(const TransferPointer& transfer) {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer->store_tensor);
  transfer->reads = 1;
  uint64_t used_bytes = 0;
  for (const Plane plane : proto::kUpdatedPlanes) {
    PlaneMemory& memory = transfer->planes[plane];
    memory.size_bytes = proto::PaddedBytes(tensor.planes.Bytes(plane, transfer->elements));
    if (!NeedsPlane(*transfer, plane) || memory.bytes != nullptr) continue;
    if (!transfer->buffer.valid()) {
      absl::StatusOr<MappedRegion> buffer = TakeBuffer();
      if (!buffer.ok()) {
        --buffers_in_use_;
        transfer->status.Update(buffer.status());
        break;
      }
      transfer->buffer = *std::move(buffer);
    }
    memory.bytes = transfer->buffer.data() + used_bytes;
    used_bytes += memory.size_bytes;
    // A put of a whole extent replaces its residual whatever it was.
    if (IsPut(transfer->entry) && !tensor.bundle) continue;
    const swap::ReadRequest request{ExtentIdOf(transfer->store_tensor, plane, transfer->index),
                                    memory.bytes};
    swap::Stamp stamp;
    ++transfer->reads;
    context_->store->Read(
        {&request, 1}, {&stamp, 1},
        context_->Counted([this, transfer](absl::Status status) { FinishRead(transfer, status); }));
    memory.stamp = stamp;
  }
  ReadTies(transfer);
  FinishRead(transfer, absl::OkStatus());
}

void Transfers::ReadTies(const TransferPointer& transfer) {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer->store_tensor);
  const bool wanted =
      HasTies(tensor) && (IsPut(transfer->entry) ? transfer->writes_residual && tensor.bundle
                                                 : transfer->entry.plane == Plane::kMaster);
  if (!wanted) return;
  const swap::Stamp stamp = state_->TieStamp(transfer->store_tensor, transfer->index);
  transfer->ties.word = stamp.word;
  if ((stamp.flags & swap::kFlagTiesPlane) == 0) return;
  const swap::ExtentId id{transfer->store_tensor, swap::Plane::kTies, transfer->index};
  absl::StatusOr<MappedRegion> memory = MappedRegion::Anonymous(context_->store->ExtentBytes(id));
  if (!memory.ok()) return transfer->status.Update(memory.status());
  transfer->ties.plane = *std::move(memory);
  const swap::ReadRequest request{id, transfer->ties.plane->data()};
  swap::Stamp ties_stamp;
  ++transfer->reads;
  context_->store->Read(
      {&request, 1}, {&ties_stamp, 1},
      context_->Counted([this, transfer](absl::Status status) { FinishRead(transfer, status); }));
  transfer->ties.stamp = ties_stamp;
}

void Transfers::FinishRead(const TransferPointer& transfer, const absl::Status& status) {
  transfer->status.Update(status);
  if (--transfer->reads > 0) return;
  if (context_->failed()) return Finish(transfer, context_->failure);
  if (!transfer->status.ok()) return FailOne(transfer);
  Compute(transfer);
}

// A get that meets a lost extent costs nobody else anything; a put leaves its tensor half replaced.
void Transfers::FailOne(const TransferPointer& transfer) {
  if (IsPut(transfer->entry)) context_->fail(transfer->status);
  Finish(transfer, transfer->status);
}

void Transfers::ReadAgain(const TransferPointer& transfer) {
  const auto wrong = std::exchange(transfer->wrong, {});
  transfer->reads = 1;
  for (const auto& [request, stamp] : wrong) {
    ++transfer->reads;
    context_->store->ReadAgain(
        request, stamp,
        context_->Counted([this, transfer](absl::Status status) { FinishRead(transfer, status); }));
  }
  FinishRead(transfer, absl::OkStatus());
}

// ---- On a worker --------------------------------------------------------------------------------

void Transfers::Compute(const TransferPointer& transfer) {
  context_->Compute(
      [this, transfer] {
        Verify(*transfer);
        if (!transfer->wrong.empty()) return;
        IsPut(transfer->entry) ? ComputePut(*transfer) : ComputeGet(*transfer);
      },
      [this, transfer] {
        if (context_->failed()) return Finish(transfer, context_->failure);
        if (!transfer->wrong.empty()) return ReadAgain(transfer);
        if (!transfer->status.ok()) return FailOne(transfer);
        if (!IsPut(transfer->entry)) return Finish(transfer, absl::OkStatus());
        Write(transfer);
      });
}

void Transfers::Verify(Transfer& transfer) const {
  for (const Plane plane : proto::kUpdatedPlanes) {
    const PlaneMemory& memory = transfer.planes[plane];
    if (!memory.stamp.has_value()) continue;
    const swap::ExtentId id = ExtentIdOf(transfer.store_tensor, plane, transfer.index);
    if (!context_->store->Verify(id, *memory.stamp, {memory.bytes, memory.size_bytes})) {
      transfer.wrong.push_back({{id, memory.bytes}, *memory.stamp});
    }
  }
  if (!transfer.ties.stamp.has_value()) return;
  const swap::ExtentId id{transfer.store_tensor, swap::Plane::kTies, transfer.index};
  if (!context_->store->Verify(id, *transfer.ties.stamp, transfer.ties.plane->span())) {
    transfer.wrong.push_back({{id, transfer.ties.plane->data()}, *transfer.ties.stamp});
  }
}

void Transfers::ComputeGet(Transfer& transfer) const {
  std::byte* to = context_->ranks[transfer.rank].region + transfer.entry.region_offset;
  const proto::StoreTensor& tensor = context_->store_tensor(transfer.store_tensor);
  if (transfer.entry.plane == Plane::kMaster && HasResidual(tensor))
    return MergeMaster(transfer, to);
  for (const Plane plane : proto::kUpdatedPlanes) {
    if (!NeedsPlane(transfer, plane)) continue;
    const uint64_t element_bytes = tensor.planes.Bits(plane) / 8;
    std::memcpy(to, transfer.planes[plane].bytes + BeginOf(transfer.entry) * element_bytes,
                transfer.entry.element_count * element_bytes);
  }
}

// Merges from the extent's beginning, because tie bits are counted from there.
void Transfers::MergeMaster(Transfer& transfer, std::byte* to) const {
  const uint64_t begin = BeginOf(transfer.entry), all = transfer.entry.element_count;
  if (!HasTies(context_->store_tensor(transfer.store_tensor))) {
    const auto* weight =
        reinterpret_cast<const kernels::Half*>(transfer.planes[Plane::kWeight].bytes);
    const auto* residual =
        reinterpret_cast<const uint32_t*>(transfer.planes[Plane::kResidual].bytes);
    kernels::MergeHalf(weight + begin, residual + begin, all, reinterpret_cast<float*>(to));
    return;
  }
  const auto* hi = reinterpret_cast<const uint16_t*>(transfer.planes[Plane::kWeight].bytes);
  const auto* lo = reinterpret_cast<const int16_t*>(transfer.planes[Plane::kResidual].bytes);
  TieSource ties(transfer.ties);
  for (uint64_t i = 0; i < begin; ++i) {
    if (lo[i] == INT16_MIN) ties.reader().Next();
  }
  alignas(64) uint32_t master[kMergeElements];
  for (uint64_t done = 0; done < all; done += kMergeElements) {
    const uint64_t count = std::min<uint64_t>(kMergeElements, all - done);
    kernels::Merge(hi + begin + done, lo + begin + done, count, master, &ties.reader());
    std::memcpy(to + done * sizeof(uint32_t), master, count * sizeof(uint32_t));
  }
}

void Transfers::ComputePut(Transfer& transfer) const {
  const bool zeroes_residual = transfer.writes_residual && transfer.entry.plane == Plane::kWeight;
  const auto take = [&](const proto::SubmissionEntry& entry) {
    TakeFromRank(transfer, entry);
    if (zeroes_residual) PutZeroResidual(transfer, entry);
  };
  take(transfer.entry);
  for (const proto::SubmissionEntry& entry : transfer.more) take(entry);
  if (!transfer.status.ok()) return;
  TakeChecksum(transfer, FilledPlane(transfer.entry));
  if (transfer.writes_residual) TakeChecksum(transfer, Plane::kResidual);
}

// Into memory, where the plane is there; else it is written from where the rank has it. Masters are
// split.
void Transfers::TakeFromRank(Transfer& transfer, const proto::SubmissionEntry& entry) const {
  const std::byte* from = context_->ranks[transfer.rank].region + entry.region_offset;
  const proto::StoreTensor& tensor = context_->store_tensor(transfer.store_tensor);
  const uint64_t begin = BeginOf(entry), count = entry.element_count;
  if (entry.plane == Plane::kMaster && !HasTies(tensor)) {
    kernels::SplitHalf(
        reinterpret_cast<const float*>(from), count,
        reinterpret_cast<kernels::Half*>(transfer.planes[Plane::kWeight].bytes) + begin,
        reinterpret_cast<uint32_t*>(transfer.planes[Plane::kResidual].bytes) + begin);
    return;
  }
  if (entry.plane == Plane::kMaster) {
    return KeepTies(
        transfer,
        SplitInto(reinterpret_cast<uint16_t*>(transfer.planes[Plane::kWeight].bytes),
                  {reinterpret_cast<int16_t*>(transfer.planes[Plane::kResidual].bytes),
                   transfer.elements},
                  begin, {reinterpret_cast<const uint32_t*>(from), count}, transfer.ties));
  }
  PlaneMemory& plane = transfer.planes[entry.plane];
  if (plane.bytes == nullptr) {
    plane.bytes = const_cast<std::byte*>(from);
    return;
  }
  std::memcpy(plane.bytes + tensor.planes.Bytes(entry.plane, begin), from,
              tensor.planes.Bytes(entry.plane, count));
}

void Transfers::PutZeroResidual(Transfer& transfer, const proto::SubmissionEntry& entry) const {
  const PlaneMemory& residual = transfer.planes[Plane::kResidual];
  const proto::StoreTensor& tensor = context_->store_tensor(transfer.store_tensor);
  const uint64_t begin = BeginOf(entry), count = entry.element_count;
  if (!tensor.bundle) {
    std::memset(residual.bytes, 0, residual.size_bytes);
    return;
  }
  if (!HasTies(tensor)) {
    std::memset(residual.bytes + tensor.planes.Bytes(Plane::kResidual, begin), 0,
                tensor.planes.Bytes(Plane::kResidual, count));
    return;
  }
  KeepTies(transfer, ClearResidual({reinterpret_cast<int16_t*>(residual.bytes), transfer.elements},
                                   begin, begin + count, transfer.ties));
}

// They are those that the next put of the transfer finds, and the last of them are written.
void Transfers::KeepTies(Transfer& transfer, absl::StatusOr<TieBits> ties) {
  if (ties.ok()) {
    transfer.ties = *std::move(ties);
  } else {
    transfer.status.Update(ties.status());
  }
}

// Of what is to be written.
void Transfers::TakeChecksum(Transfer& transfer, Plane plane) const {
  const PlaneMemory& memory = transfer.planes[plane];
  swap::Checksum checksum = context_->store->StartChecksum(
      ExtentIdOf(transfer.store_tensor, plane, transfer.index), transfer.sequence);
  checksum.Update({memory.bytes, memory.size_bytes});
  transfer.crc[plane] = checksum.Finish();
}

// ---- The end ------------------------------------------------------------------------------------

void Transfers::Write(const TransferPointer& transfer) {
  const proto::StoreTensor& tensor = context_->store_tensor(transfer->store_tensor);
  const Plane plane = FilledPlane(transfer->entry);
  std::array<swap::WriteRequest, 3> requests;
  for (swap::WriteRequest& request : requests) request.tentative = context_->published;
  size_t count = 0;
  const auto add = [&](const swap::ExtentId& id, const std::byte* bytes, uint32_t crc) {
    swap::WriteRequest& request = requests[count++];
    request.id = id;
    request.bytes = bytes;
    request.crc = crc;
    return &request;
  };
  // While a job is being built the weights of its bundles are assembled in the slab and written
  // once, at the end.
  if (plane != Plane::kWeight || !tensor.bundle || context_->published)
    add(ExtentIdOf(transfer->store_tensor, plane, transfer->index), transfer->planes[plane].bytes,
        transfer->crc[plane]);
  if (transfer->writes_residual) {
    const TieBits& ties = transfer->ties;
    swap::WriteRequest* const residual =
        add({transfer->store_tensor, swap::Plane::kResidual, transfer->index},
            transfer->planes[Plane::kResidual].bytes, transfer->crc[Plane::kResidual]);
    residual->word = ties.word;
    residual->flags = ties.plane.has_value() ? swap::kFlagTiesPlane : 0;
    if (ties.plane.has_value()) {
      const swap::ExtentId id{transfer->store_tensor, swap::Plane::kTies, transfer->index};
      swap::Checksum checksum = context_->store->StartChecksum(id, transfer->sequence);
      checksum.Update(ties.plane->span());
      add(id, ties.plane->data(), checksum.Finish());
    }
  }
  if (count == 0) return Finish(transfer, absl::OkStatus());
  context_->store->Write({requests.data(), count},
                         context_->CountedWrite([this, transfer](absl::Status status) {
                           if (!status.ok()) context_->fail(status);
                           Finish(transfer, status);
                         }));
}

void Transfers::Finish(const TransferPointer& transfer, const absl::Status& status) {
  --in_flight_;
  if (IsPut(transfer->entry)) {
    puts_ -= 1 + static_cast<uint32_t>(transfer->more.size());
    --context_->writes_in_flight;
  }
  cache_->Unhold(transfer->store_tensor);
  Users& users = users_[transfer->store_tensor];
  --(IsPut(transfer->entry) ? users.puts : users.gets);
  if (users.puts == 0 && users.gets == 0) users_.erase(transfer->store_tensor);
  if (transfer->buffer.valid()) {
    --buffers_in_use_;
    free_buffers_.push_back(std::move(transfer->buffer));
  }
  context_->complete(transfer->rank, transfer->entry.tag, status, 0);
  for (const proto::SubmissionEntry& entry : transfer->more)
    context_->complete(transfer->rank, entry.tag, status, 0);
}

void Transfers::WriteBundles(std::function<void(absl::Status)> done) {
  struct Progress {
    uint32_t left = 1;
    absl::Status status;
    std::function<void(absl::Status)> done;
  };
  auto progress = std::make_shared<Progress>();
  progress->done = std::move(done);
  const auto finish = [progress](const absl::Status& status) {
    progress->status.Update(status);
    if (--progress->left == 0) progress->done(progress->status);
  };
  for (uint32_t i = 0; i < context_->catalogue.store_tensors.size(); ++i) {
    if (!context_->store_tensor(i).bundle) continue;
    const swap::ExtentId id{i, swap::Plane::kWeight, 0};
    const std::byte* bytes = cache_->slot(i);
    swap::Checksum checksum = context_->store->StartChecksum(id, context_->store->open_sequence());
    checksum.Update({bytes, context_->store->ExtentBytes(id)});
    const swap::WriteRequest request{id, bytes, checksum.Finish()};
    ++progress->left;
    context_->store->Write({&request, 1}, context_->CountedWrite(finish));
  }
  finish(absl::OkStatus());
}

}  // namespace offload::daemon
