#include "zero3/torch/weight_residency.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

WeightResidency::WeightResidency(std::shared_ptr<Attachment> attachment, uint32_t tensor,
                                 const std::string& name, c10::Device device, size_t size_bytes)
    : Residency(name, absl::StrCat("parameter '", name, "'"), device, size_bytes,
                attachment->homes().Take(size_bytes)),
      attachment_(std::move(attachment)),
      tensor_(tensor) {}

bool WeightResidency::closed() {
  Lock lock(mutex_);
  return closed_;
}

// ---- Before the store is sealed ----------------------------------------------------------------

void WeightResidency::Adopt(c10::StorageImpl* storage) {
  Lock lock(mutex_);
  initial_ = swap_.Manage(storage, ReleasedText());
  StorageSwap* const before = StorageSwap::Named(initial_);
  if (before == nullptr) return;
  auto& owner = static_cast<Residency&>(before->owner());
  initial_born_ = dynamic_cast<BornResidency*>(&owner);
  owner.LeaveStorage();
}

absl::Status WeightResidency::ReadInitial(uint64_t begin, uint64_t length, uint64_t region_offset) {
  if (initial_born_ != nullptr) return initial_born_->ReadInto(begin, length, region_offset);
  std::memcpy(attachment_->region() + region_offset,
              static_cast<const std::byte*>(initial_.get()) + begin, length);
  return absl::OkStatus();
}

void WeightResidency::Start() {
  c10::DataPtr initial;  // freed without the lock: it may be another residency's last
  Lock lock(mutex_);
  state_ = State::kHome;
  initial_born_ = nullptr;
  initial = std::exchange(initial_, c10::DataPtr());
  changed_.NotifyAll();
  lock.unlock();
}

// ---- Pins --------------------------------------------------------------------------------------

// kMoving is the state while one thread waits for the daemon without the lock; the others wait for
// it here.
void WeightResidency::Pin(Access access) {
  const bool writes = access != Access::kRead;
  Lock lock(mutex_);
  for (;;) {
    if (closed_) ThrowStatus(SessionEnded(subject_));
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (state_ == State::kWriting || (state_ == State::kReading && !writes)) {
      if (pins_ == 0) swap_.PointTo(bytes_, /*throws=*/false);
      AddPin();
      return;
    }
    // An operation that reads may call one that writes: then all uses are this thread's, and it may
    // swap under them.
    if (state_ == State::kHome || (state_ == State::kReading && Pins::CountOwn(this) == uses_))
      break;
    if (state_ == State::kInitial) {
      lock.unlock();
      attachment_->EnsureSealed();
      lock.lock();
    } else {
      WaitForOthers(lock);
    }
  }
  const State before = std::exchange(state_, State::kMoving);
  mover_ = std::this_thread::get_id();
  lock.unlock();
  std::byte* bytes = nullptr;
  try {
    if (before == State::kHome) attachment_->Touch(tensor_);
    bytes = writes ? FetchForWriting(access) : FetchForReading();
  } catch (...) {
    lock.lock();
    state_ = before;
    changed_.NotifyAll();
    throw;
  }
  lock.lock();
  bytes_ = bytes;
  swap_.PointTo(bytes, /*throws=*/false);
  state_ = writes ? State::kWriting : State::kReading;
  AddPin();
}

void WeightResidency::AddPin() {
  ++pins_;
  ++uses_;
  holders_.push_back(std::this_thread::get_id());
  changed_.NotifyAll();
}

void WeightResidency::WaitForOthers(Lock& lock) {
  absl::InlinedVector<WaitGraph::Thread, 4> others;
  if (state_ == State::kMoving) {
    others.push_back(mover_);
  } else if (uses_ > pins_) {
    return changed_.WaitForOthers(lock);  // an accelerator comes to its end by itself
  } else {
    std::copy_if(holders_.begin(), holders_.end(), std::back_inserter(others),
                 [](WaitGraph::Thread holder) { return holder != std::this_thread::get_id(); });
  }
  if (changed_.Wait(lock, WaitGraph::Needs::kAllHolders, others)) return;
  ThrowStatus(MakeError(
      ErrorId::kWindowExhausted,
      absl::StrCat(subject_, " is used by an operation that waits for a parameter of this one"),
      "Let one thread at a time write parameters"));
}

std::byte* WeightResidency::FetchForReading() {
  // The slab is mapped read-only; torch wants a pointer without const.
  auto* const bytes =
      const_cast<std::byte*>(ValueOrThrow(attachment_->session().Acquire(tensor_), subject_));
  acquired_ = true;
  return bytes;
}

std::byte* WeightResidency::MakePrivate(Access access) {
  if (access == Access::kWrite) {
    ThrowStatus(
        MakeError(ErrorId::kWeightOfRanks,
                  absl::StrCat(subject_, " is changed in place by rank ", attachment_->rank(),
                               ", and every rank would apply the change")));
  }
  private_ = c10::GetCPUAllocator()->allocate(size_bytes_);
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  return static_cast<std::byte*>(private_.get());
}

std::byte* WeightResidency::FetchForWriting(Access access) {
  if (attachment_->rank() > 0) return MakePrivate(access);
  Staging::Piece piece = attachment_->staging().Take(size_bytes_);
  std::byte* const copy = attachment_->region() + piece.region_offset();
  if (access == Access::kWrite) {
    std::memcpy(copy, ValueOrThrow(attachment_->session().Acquire(tensor_), subject_), size_bytes_);
    attachment_->session().Release(tensor_);
  }
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  staging_ = std::move(piece);
  return copy;
}

void WeightResidency::Unpin(Completion* done) {
  Lock lock(mutex_);
  std::swap(*std::find(holders_.begin(), holders_.end(), std::this_thread::get_id()),
            holders_.back());
  holders_.pop_back();
  if (--pins_ == 0) swap_.PointHome();
  if (done == nullptr) return LetGo(lock);
  Reference();
  lock.unlock();
  done->WhenDone([this] {
    {
      Lock later(mutex_);
      try {
        LetGo(later);
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    Unreference();
  });
}

void WeightResidency::LetGo(Lock& lock) {
  if (--uses_ > 0) {
    // Who took the piece may be gone; who waits for it waits for those that are left.
    if (staging_ && !holders_.empty()) staging_.SetHolder(holders_.front());
    changed_.NotifyAll();
    return;
  }
  if (state_ == State::kWriting) return PutBack(lock);
  state_ = State::kHome;
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  changed_.NotifyAll();
}

void WeightResidency::PutBack(Lock& lock) {
  state_ = State::kMoving;
  mover_ = std::this_thread::get_id();
  lock.unlock();
  std::exception_ptr failure;
  try {
    if (staging_) {
      attachment_->PutWeight(tensor_, staging_.region_offset());
    } else {
      attachment_->FollowPut(tensor_);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  staging_.Reset();
  private_.clear();
  lock.lock();
  state_ = State::kHome;
  changed_.NotifyAll();
  if (failure) std::rethrow_exception(failure);
}

void WeightResidency::Close() {
  const auto storage = swap_.Lock();  // lives while its message changes
  c10::DataPtr initial;
  Lock lock(mutex_);
  while (state_ != State::kHome && state_ != State::kInitial) changed_.WaitForOthers(lock);
  closed_ = true;
  initial = std::exchange(initial_, c10::DataPtr());
  if (!storage) return;
  if (state_ == State::kInitial && initial && initial_born_ == nullptr &&
      StorageSwap::Named(initial) == nullptr) {
    swap_.HandOver(std::move(initial));
    return;
  }
  swap_.SetMessage(std::string(SessionEnded(subject_).message()));
  swap_.PointHome();
}

}  // namespace offload::zero3
