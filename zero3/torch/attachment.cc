#include "zero3/torch/attachment.h"

#include <ATen/core/grad_mode.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "base/range_allocator.h"
#include "client/backward.h"
#include "proto/shm_abi.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/home_pages.h"
#include "zero3/torch/log.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Transfers that one call keeps in flight; the rings have room for a thousand.
constexpr size_t kTransfersInFlight = 32;
constexpr size_t kLatePutsMax = 64;
constexpr uint64_t kBlockBytes = 8ull << 20;  // of staging, for reading and putting
// Of raw copies: one instruction may use two tensors, a loop a few.
constexpr uint64_t kRawBytesMin = 16ull << 20, kRawWeightsMin = 4;
constexpr uint64_t kReserveStepBytes = 256ull << 20;  // of the scratch file

}  // namespace

bool IsTraining() {
  return c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1;
}

// ---- Staging -----------------------------------------------------------------------------------

Staging::Piece& Staging::Piece::operator=(Piece&& other) noexcept {
  Reset();
  staging_ = std::exchange(other.staging_, nullptr);
  offset_ = other.offset_;
  size_bytes_ = other.size_bytes_;
  return *this;
}

void Staging::Piece::Reset() {
  if (staging_ != nullptr) std::exchange(staging_, nullptr)->Return(offset_, size_bytes_);
}

void Staging::Piece::SetHolder(std::thread::id holder) {
  std::lock_guard lock(staging_->mutex_);
  staging_->holders_[offset_] = holder;
  staging_->returned_.NotifyAll();
}

Staging::Staging(uint64_t offset, uint64_t size_bytes, std::function<bool()> give_back)
    : give_back_(std::move(give_back)), free_(proto::kSectorBytes) {
  free_.Add(offset, size_bytes);
}

std::optional<uint64_t> Staging::TakeFree(uint64_t size_bytes, std::unique_lock<std::mutex>& lock) {
  for (;;) {
    if (const std::optional<uint64_t> offset = free_.Take(size_bytes)) return offset;
    const bool is_left = std::any_of(holders_.begin(), holders_.end(), [](const auto& holder) {
      return holder.second == std::thread::id();
    });
    if (!is_left) return std::nullopt;
    lock.unlock();
    if (!give_back_()) std::this_thread::yield();  // another thread is about to hold it
    lock.lock();
  }
}

void Staging::MakeRoom(uint64_t size_bytes) {
  size_bytes = proto::PaddedBytes(std::max<uint64_t>(size_bytes, 1));
  std::unique_lock lock(mutex_);
  if (const auto offset = TakeFree(size_bytes, lock)) free_.Return(*offset, size_bytes);
}

Staging::Piece Staging::Take(uint64_t size_bytes) {
  std::optional<Piece> piece = TakeIfEver(size_bytes);
  if (piece.has_value()) return *std::move(piece);
  ThrowStatus(MakeError(
      ErrorId::kWindowExhausted,
      absl::StrCat("an operation writes several offloaded parameters, ", FormatBytes(size_bytes),
                   " do not fit into the staging buffer beside the others"),
      "Write one parameter at a time, in one thread at a time"));
}

std::optional<Staging::Piece> Staging::TakeIfEver(uint64_t size_bytes) {
  size_bytes = proto::PaddedBytes(std::max<uint64_t>(size_bytes, 1));
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const std::optional<uint64_t> offset = TakeFree(size_bytes, lock)) {
      holders_[*offset] = std::this_thread::get_id();
      returned_.NotifyAll();  // who waits waits for one more
      Piece piece;
      piece.staging_ = this;
      piece.offset_ = *offset;
      piece.size_bytes_ = size_bytes;
      return piece;
    }
    std::vector<std::thread::id> holders;
    for (const auto& [offset, holder] : holders_) holders.push_back(holder);
    if (!returned_.Wait(lock, WaitGraph::Needs::kAnyHolder, holders)) return std::nullopt;
  }
}

void Staging::Grow(uint64_t end, uint64_t more_bytes) {
  std::lock_guard lock(mutex_);
  free_.Add(end, more_bytes);
  returned_.NotifyAll();
}

void Staging::Return(uint64_t offset, uint64_t size_bytes) {
  std::lock_guard lock(mutex_);
  holders_.erase(offset);
  free_.Return(offset, size_bytes);
  returned_.NotifyAll();
}

// ---- Room in the scratch file ------------------------------------------------------------------

ScratchSpace::ScratchSpace(uint32_t rank, uint32_t world_size)
    : rank_(rank),
      world_size_(world_size),
      free_(world_size == 1 ? proto::kSectorBytes : kStripeBytes) {}

uint64_t ScratchSpace::Take(client::Session& session, uint64_t size_bytes) {
  std::lock_guard lock(mutex_);
  if (const std::optional<uint64_t> offset = free_.Take(size_bytes)) return *offset;
  const uint64_t stripes = (size_bytes + kStripeBytes - 1) / kStripeBytes;
  const uint64_t more_bytes = std::max(stripes * kStripeBytes, kReserveStepBytes);
  ThrowIfError(session.ReserveScratch((reserved_bytes_ + more_bytes) * world_size_));
  free_.Add(reserved_bytes_, more_bytes);
  reserved_bytes_ += more_bytes;
  return *free_.Take(size_bytes);
}

void ScratchSpace::Return(uint64_t offset, uint64_t size_bytes) {
  std::lock_guard lock(mutex_);
  free_.Return(offset, size_bytes);
}

uint64_t ScratchSpace::InFile(uint64_t offset) const {
  if (world_size_ == 1) return offset;
  return (offset / kStripeBytes * world_size_ + rank_) * kStripeBytes + offset % kStripeBytes;
}

// ---- Address space -----------------------------------------------------------------------------

std::byte* HomeRanges::Take(size_t size_bytes) {
  size_bytes = proto::PaddedBytes(std::max<size_t>(size_bytes, 1));
  std::lock_guard lock(mutex_);
  if (const auto given = given_.find(size_bytes); given != given_.end())
    return given_.extract(given).mapped();
  if (left_bytes_ < size_bytes) AddChunk(size_bytes);
  MappedRegion& chunk = chunks_.back();
  std::byte* const taken = chunk.data() + (chunk.size() - left_bytes_);
  left_bytes_ -= size_bytes;
  return taken;
}

// Where address space is limited (ulimit -v) others need it, too.
void HomeRanges::AddChunk(size_t size_bytes) {
  absl::StatusOr<MappedRegion> chunk = MappedRegion::Reserve(std::max(kChunkBytes, size_bytes));
  if (!chunk.ok()) chunk = MappedRegion::Reserve(std::max(kChunkBytesMin, size_bytes));
  if (!chunk.ok()) {
    ThrowStatus(MakeError(ErrorId::kSharedMemory,
                          absl::StrCat("address space: ", chunk.status().message()),
                          "Raise the limit of address space (ulimit -v)"));
  }
  left_bytes_ = chunk->size();
  chunks_.push_back(*std::move(chunk));
}

std::byte* HomeRanges::TakeFor(c10::StorageImpl& storage, size_t size_bytes) {
  const std::shared_ptr<MappedRegion> own = HomePages::Of(storage);
  if (own == nullptr || own->size() < size_bytes) return Take(size_bytes);
  std::lock_guard lock(mutex_);
  brought_.push_back(own);
  return own->data();
}

void HomeRanges::Give(std::byte* home, size_t size_bytes) {
  std::lock_guard lock(mutex_);
  given_.emplace(proto::PaddedBytes(std::max<size_t>(size_bytes, 1)), home);
}

// ---- PlacesOwner -------------------------------------------------------------------------------

void PlacesOwner::Begin(const std::byte* begin, size_t size_bytes) {
  begin_ = begin;
  AddRawRange(begin, size_bytes, this);
}

void PlacesOwner::End() {
  if (begin_ != nullptr) RemoveRawRange(begin_);
  begin_ = nullptr;
}

void PlacesOwner::ServeRaw(bool writes) {
  if (!writes) return;
  ThrowStatus(MakeError(ErrorId::kReleased,
                        "an offloaded parameter is written through a pointer that was taken while "
                        "another thread's operation used the parameter",
                        "Take the pointer while no operation uses the parameter, or copy_() what "
                        "is to be written under NoGradGuard"));
}

// ---- Attachment --------------------------------------------------------------------------------

Attachment::Attachment(std::unique_ptr<client::Session> session)
    : session_(std::move(session)), world_(session_->world()) {
  BeginRoom();
}

void Attachment::BeginRoom() {
  staging_.emplace(proto::kRegionFixedBytes, proto::kLoadingStagingBytes,
                   [this] { return EndOneLate(); });
  scratch_ = std::make_shared<ScratchSpace>(world_.rank, world_.world_size);
}

client::Session& Attachment::session() {
  if (session_ == nullptr) ThrowStatus(Ended("this model"));
  return *session_;
}

void Attachment::EnsureSealed() {
  if (sealed()) return;
  // Who attaches to a store that is there may wait for this operator to end, and holds it
  // meanwhile.
  std::unique_lock lock(seal_mutex_, std::try_to_lock);
  while (!lock.owns_lock()) {
    constexpr std::chrono::milliseconds kPause{1};
    std::this_thread::sleep_for(kPause);
    if (sealed()) return;
    lock.try_lock();
  }
  if (sealed()) return;
  if (seal_failure_) std::rethrow_exception(seal_failure_);
  if (!seal_) ThrowStatus(Ended("this model"));
  try {
    seal_();
  } catch (...) {
    seal_failure_ = std::current_exception();
    throw;
  }
  sealed_.store(true, std::memory_order_release);
}

void Attachment::SetPlan(PlanInput input, Plan plan) {
  input_ = std::move(input);
  plan_ = std::move(plan);
  OFFLOAD_CHECK(plan_.staging_offset == proto::kRegionFixedBytes) << plan_.staging_offset;
  staging_->Grow(plan_.staging_offset + proto::kLoadingStagingBytes,
                 plan_.staging_bytes - proto::kLoadingStagingBytes);
  if (rank() == 0) staging_->Grow(plan_.first_staging_offset, plan_.first_staging_bytes);
  if (serves_raw_) places_.Begin(session_->slab(), plan_.slab.total_bytes);
  window_bytes_ = plan_.memory.window_bytes;
  uint64_t largest_weight_bytes = 0;
  for (const proto::Tensor& tensor : input_.catalogue.tensors)
    largest_weight_bytes =
        std::max(largest_weight_bytes, tensor.element_count * proto::DtypeBytes(tensor.dtype));
  raw_bytes_max_ = std::max(kRawBytesMin, kRawWeightsMin * largest_weight_bytes);
  std::vector<uint64_t> slot_bytes;
  uint64_t largest_bytes = 0;
  for (const proto::Placement& placement : input_.catalogue.placements) {
    const bool resident = plan_.memory.weight_resident[placement.store_tensor];
    slot_bytes.push_back(
        resident ? 0
                 : proto::WeightSlotBytes(input_.catalogue.store_tensors[placement.store_tensor]));
    largest_bytes = std::max(largest_bytes, slot_bytes.back());
  }
  largest_slot_bytes_ = largest_bytes;
  // One slot is the tensor in use, the rest may be ahead of it.
  schedule_ = std::make_unique<Schedule>(
      std::move(slot_bytes),
      plan_.memory.window_bytes - std::min(largest_bytes, plan_.memory.window_bytes));
}

void Attachment::Reopen(absl::FunctionRef<std::unique_ptr<client::Session>()> open) {
  places_.End();
  const absl::Status closed = session().CloseJob();
  session_.reset();  // a private daemon ends, and whoever opens the job has its lock
  EndEpoch();
  ThrowIfError(closed);
  session_ = open();
  BeginRoom();
}

void Attachment::Touch(uint32_t tensor) {
  client::SetBackward(torch::autograd::get_current_graph_task_id() != -1);
  if (device_ != nullptr && device_->Stays(tensor)) return;
  if (plan_.memory.weight_resident[input_.catalogue.placements[tensor].store_tensor]) return;
  const bool training = IsTraining();
  std::lock_guard lock(schedule_mutex_);
  schedule_->SetRecording(training);
  const uint32_t before = schedule_->position();
  schedule_->Touch(tensor, [this](uint32_t next) { session_->Prefetch(next); });
  if (schedule_->position() != before) session_->SetSchedulePosition(schedule_->position());
}

std::vector<uint32_t> Attachment::EndScheduleStep() {
  std::vector<uint32_t> next;
  std::lock_guard lock(schedule_mutex_);
  if (schedule_->EndStep([&](uint32_t tensor) { next.push_back(tensor); })) {
    ThrowIfError(session_->SetSchedule(schedule_->order()));
  }
  session_->SetSchedulePosition(0);
  return next;
}

void Attachment::Prefetch(const std::vector<uint32_t>& tensors) {
  for (const uint32_t tensor : tensors) session_->Prefetch(tensor);
}

void Attachment::NotePut(uint32_t tensor) {
  std::lock_guard lock(put_mutex_);
  put_.insert(tensor);
}

std::vector<uint32_t> Attachment::PutSinceEpoch() {
  std::lock_guard lock(put_mutex_);
  return {put_.begin(), put_.end()};
}

void Attachment::EndEpoch() {
  std::lock_guard lock(put_mutex_);
  put_.clear();
}

std::vector<client::Ticket> Attachment::BeginPut(uint32_t tensor, uint64_t region_offset,
                                                 uint64_t digest) {
  NotePut(tensor);
  const uint64_t element_count = this->tensor(tensor).element_count;
  const uint64_t element_bytes = proto::DtypeBytes(this->tensor(tensor).dtype);
  std::vector<client::Ticket> tickets;
  for (uint64_t begin = 0; begin < element_count; begin += proto::kExtentElements) {
    const uint64_t count = std::min<uint64_t>(element_count - begin, proto::kExtentElements);
    tickets.push_back(session().PutPlane(tensor, proto::Plane::kWeight, begin, count,
                                         region_offset + begin * element_bytes, digest));
  }
  if (world_size() > 1) tickets.push_back(session().FollowPut(tensor, digest));
  return tickets;
}

absl::Status Attachment::WaitForAll(std::span<const client::Ticket> tickets) {
  absl::Status failure;
  for (const client::Ticket ticket : tickets) failure.Update(session().Wait(ticket));
  return failure;
}

LatePut* Attachment::AddLate(LatePut* put) {
  std::lock_guard lock(late_mutex_);
  late_.push_back(put);
  return std::exchange(waiting_, put);
}

void Attachment::ForgetLate(LatePut* put) {
  std::lock_guard lock(late_mutex_);
  late_.remove(put);
  if (waiting_ == put) waiting_ = nullptr;
}

void Attachment::EndOldestLate() {
  {
    std::lock_guard lock(late_mutex_);
    if (late_.size() <= kLatePutsMax) return;
  }
  EndOneLate();
}

bool Attachment::EndOneLate() {
  LatePut* oldest = nullptr;
  {
    std::lock_guard lock(late_mutex_);
    if (late_.empty()) return false;
    oldest = late_.front();
  }
  oldest->EndPut();
  return true;
}

void Attachment::EndLate() {
  LatePut* waiting = nullptr;
  {
    std::lock_guard lock(late_mutex_);
    waiting = waiting_;
  }
  if (waiting != nullptr) waiting->BeginPut();
  while (EndOneLate()) continue;
}

absl::Status Attachment::EndPut(uint32_t tensor, uint64_t digest) {
  return world_size() > 1 ? session().Wait(session().FollowPut(tensor, digest)) : absl::OkStatus();
}

absl::Status Attachment::StreamOut(uint32_t tensor, proto::Plane plane, uint64_t element_bytes,
                                   Drain drain) {
  if (device_ != nullptr) device_->BeforeRead(tensor);
  const DaemonWait wait(*this);
  const uint64_t element_count = this->tensor(tensor).element_count;
  const uint64_t extent_bytes = proto::kExtentElements * element_bytes;
  Staging::Piece piece =
      staging_->Take(std::min(kBlockBytes / 2, proto::PaddedBytes(element_count * element_bytes)));
  const uint64_t blocks = std::max<uint64_t>(piece.size_bytes() / extent_bytes, 1);
  struct Transfer {
    client::Ticket ticket;
    uint64_t begin, count, offset;
  };
  std::deque<Transfer> transfers;
  absl::Status failure;
  const auto take_oldest = [&] {
    const Transfer done = transfers.front();
    transfers.pop_front();
    failure.Update(session().Wait(done.ticket));
    if (failure.ok()) failure.Update(drain(done.begin, done.count, region() + done.offset));
  };
  for (uint64_t begin = 0, block = 0; begin < element_count && failure.ok();
       begin += proto::kExtentElements, ++block) {
    if (transfers.size() == blocks) take_oldest();
    const uint64_t count = std::min<uint64_t>(element_count - begin, proto::kExtentElements);
    const uint64_t offset = piece.region_offset() + block % blocks * extent_bytes;
    transfers.push_back({session().Get(tensor, plane, begin, count, offset), begin, count, offset});
  }
  while (!transfers.empty()) take_oldest();
  return failure;
}

absl::Status Attachment::CopyOut(uint32_t tensor, proto::Plane plane, uint64_t element_bytes,
                                 std::byte* target) {
  return StreamOut(tensor, plane, element_bytes,
                   [&](uint64_t begin, uint64_t count, const std::byte* bytes) {
                     std::memcpy(target + begin * element_bytes, bytes, count * element_bytes);
                     return absl::OkStatus();
                   });
}

absl::Status Attachment::StreamIn(uint32_t tensor, const std::byte* bytes, uint64_t digest) {
  const uint64_t element_bytes = proto::DtypeBytes(this->tensor(tensor).dtype);
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    std::memcpy(target, bytes + begin * element_bytes, count * element_bytes);
    return absl::OkStatus();
  };
  return StreamIn(tensor, fill, digest);
}

absl::Status Attachment::StreamIn(uint32_t tensor, Fill fill, uint64_t digest) {
  absl::Status put;
  if (rank() == 0) put = StreamIn(tensor, proto::Plane::kWeight, fill, digest);
  const DaemonWait wait(*this);
  put.Update(EndPut(tensor, digest));  // the others wait for the end, whatever it is
  return put;
}

absl::Status Attachment::StreamIn(uint32_t tensor, proto::Plane plane, Fill fill, uint64_t digest) {
  return StreamInAll(
      {&tensor, 1}, plane,
      [&](size_t, uint64_t begin, uint64_t count, std::byte* target) {
        return fill(begin, count, target);
      },
      digest);
}

absl::Status Attachment::StreamInAll(std::span<const uint32_t> tensors, proto::Plane plane,
                                     FillOf fill, uint64_t digest) {
  uint64_t all_bytes = 0;
  const auto size_bytes = [&](uint32_t tensor, uint64_t count) {
    return proto::PaddedBytes(count * (input_.catalogue.planes(tensor).Bits(plane) / 8));
  };
  for (const uint32_t tensor : tensors) {
    if (device_ != nullptr) device_->BeforePut(tensor);
    if (plane == proto::Plane::kWeight || plane == proto::Plane::kMaster) NotePut(tensor);
    all_bytes += size_bytes(tensor, this->tensor(tensor).element_count);
  }
  const DaemonWait wait(*this);
  const Staging::Piece piece = staging_->Take(std::min(kBlockBytes / 2, all_bytes));
  RangeAllocator room;
  room.Add(piece.region_offset(), piece.size_bytes());
  struct Transfer {
    client::Ticket ticket;
    uint64_t offset, size_bytes;
  };
  std::deque<Transfer> transfers;
  absl::Status failure;
  const auto wait_for_oldest = [&] {
    const Transfer done = transfers.front();
    transfers.pop_front();
    failure.Update(session().Wait(done.ticket));
    room.Return(done.offset, done.size_bytes);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t element_count = this->tensor(tensors[i]).element_count;
    for (uint64_t begin = 0; begin < element_count && failure.ok();
         begin += proto::kExtentElements) {
      const uint64_t count = std::min<uint64_t>(element_count - begin, proto::kExtentElements);
      const uint64_t bytes = size_bytes(tensors[i], count);
      std::optional<uint64_t> offset;
      while (!(offset = room.Take(bytes)).has_value()) wait_for_oldest();
      failure.Update(fill(i, begin, count, region() + *offset));
      if (!failure.ok()) break;
      transfers.push_back(
          {session().PutPlane(tensors[i], plane, begin, count, *offset, digest), *offset, bytes});
      if (transfers.size() == kTransfersInFlight) wait_for_oldest();
    }
  }
  while (!transfers.empty()) wait_for_oldest();
  return failure;
}

uint64_t Attachment::WindowBytes(uint32_t tensor) const {
  const uint32_t store_tensor = input_.catalogue.placements[tensor].store_tensor;
  if (plan_.memory.weight_resident[store_tensor]) return 0;
  return proto::WeightSlotBytes(input_.catalogue.store_tensors[store_tensor]);
}

// However the places lie, a hole for the largest is left.
bool Attachment::BeginHolding(size_t count, uint64_t size_bytes) {
  // Every rank may hold as much of the one window at the same time.
  const uint64_t needed_bytes = size_bytes + (count + 1) * largest_slot_bytes_;
  if (plan().memory.world_size * needed_bytes > window_bytes_) return false;
  return !is_held_.exchange(true, std::memory_order_acquire);
}

void Attachment::BeginRaw(RawUser* user) {
  if (raw_accesses_.fetch_add(1, std::memory_order_relaxed) == 0) {
    Log().info(
        "{} is used through a raw pointer: its bytes are brought to memory, beside `ram`, until "
        "the "
        "end of the step (raw_access = error refuses that)",
        user->raw_name());
  }
  for (;;) {
    std::vector<RawUser*> oldest;
    {
      std::lock_guard lock(raw_mutex_);
      raw_users_.remove(user);  // an operator has ended what it had before
      uint64_t bytes = user->raw_bytes();
      for (const RawUser* other : raw_users_) bytes += other->raw_bytes();
      for (RawUser* other : raw_users_) {
        if (bytes <= raw_bytes_max_) break;
        oldest.push_back(other);
        bytes -= other->raw_bytes();
      }
      if (oldest.empty()) {
        raw_users_.push_back(user);
        return;
      }
      for (RawUser* other : oldest) raw_users_.remove(other);
    }
    std::vector<RawUser*> used;
    std::exception_ptr failure;
    for (RawUser* other : oldest) {
      try {
        if (!other->EndRaw(/*wait=*/false)) used.push_back(other);
      } catch (...) {
        used.push_back(other);
        failure = std::current_exception();
      }
    }
    std::lock_guard lock(raw_mutex_);
    for (RawUser* other : used) {
      raw_users_.remove(other);  // it may be there again
      raw_users_.push_front(other);
    }
    if (failure) std::rethrow_exception(failure);
    if (used.size() < oldest.size()) continue;
    raw_users_.push_back(user);  // operators use all of them
    return;
  }
}

bool Attachment::KeepMaster(uint64_t size_bytes) {
  if (kept_master_bytes_.fetch_add(size_bytes) + size_bytes <= raw_bytes_max_) return true;
  kept_master_bytes_ -= size_bytes;
  return false;
}

void Attachment::ForgetRaw(RawUser* user) {
  std::lock_guard lock(raw_mutex_);
  raw_users_.remove(user);
}

void Attachment::EndRaw() {
  EndLate();
  for (;;) {
    RawUser* user = nullptr;
    {
      std::lock_guard lock(raw_mutex_);
      if (raw_users_.empty()) return;
      user = raw_users_.front();
      // What was written is put on all ranks in one order, whichever pointer each used first.
      for (RawUser* const other : raw_users_) {
        if (world_size() > 1 && other->raw_name() < user->raw_name()) user = other;
      }
      // Before its end: another thread may show it again right after.
      raw_users_.remove(user);
    }
    try {
      user->EndRaw(/*wait=*/true);
    } catch (...) {
      std::lock_guard lock(raw_mutex_);
      raw_users_.push_front(user);
      throw;
    }
  }
}

void Attachment::Close() {
  if (session_ == nullptr) return;
  {
    std::lock_guard lock(seal_mutex_);
    seal_ = nullptr;
  }
  device_.reset();
  places_.End();
  const absl::Status closed = session_->CloseJob();
  session_.reset();
  ThrowIfError(closed);
}

absl::Status Attachment::Ended(const std::string& subject) const {
  if (end_reason_.empty()) return SessionEnded(subject);
  return MakeError(ErrorId::kSessionEnded,
                   absl::StrCat("the engine of ", subject, " is closed since ", end_reason_),
                   "Start the program again: the job goes on at its last step, as it was then");
}

absl::Status SessionEnded(const std::string& subject) {
  return MakeError(ErrorId::kSessionEnded, absl::StrCat("the engine of ", subject, " is closed"),
                   "Use the model while its offload::Engine lives, or open it with "
                   "weights_at_close = memory");
}

}  // namespace offload::zero3
