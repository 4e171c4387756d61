#include "zero3/torch/weight_record.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

WeightRecord::WeightRecord(std::shared_ptr<Attachment> attachment, uint32_t tensor,
                           size_t size_bytes)
    : Record(attachment->tensor(tensor).name,
             absl::StrCat("parameter '", attachment->tensor(tensor).name, "'"), size_bytes,
             attachment->homes().Take(size_bytes)),
      attachment_(std::move(attachment)),
      tensor_(tensor) {}

// kMoving is the state while one thread waits for the daemon without the lock; the others wait for
// it here.
void WeightRecord::Pin(Access access) {
  const bool writes = access != Access::kRead;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (closed_) ThrowStatus(SessionEnded(subject_));
    if (state_ == State::kWriting || (state_ == State::kReading && !writes)) {
      ++pins_;
      return;
    }
    // An operation that reads may call one that writes: then all pins are this thread's, and it may
    // swap under them.
    if (state_ == State::kHome || (state_ == State::kReading && Pins::CountOwn(this) == pins_))
      break;
    changed_.wait(lock);
  }
  const State before = std::exchange(state_, State::kMoving);
  lock.unlock();
  std::byte* bytes = nullptr;
  try {
    if (before == State::kHome) attachment_->Touch(tensor_);
    if (writes) {
      bytes = FetchForWriting(access);
    } else {
      // The slab is mapped read-only; torch wants a pointer without const.
      bytes =
          const_cast<std::byte*>(ValueOrThrow(attachment_->session().Acquire(tensor_), subject_));
      acquired_ = true;
    }
  } catch (...) {
    lock.lock();
    state_ = before;
    changed_.notify_all();
    throw;
  }
  lock.lock();
  PointTo(bytes, /*throws=*/false);
  state_ = writes ? State::kWriting : State::kReading;
  ++pins_;
  changed_.notify_all();
}

std::byte* WeightRecord::FetchForWriting(Access access) {
  if (access == Access::kWrite && attachment_->rank() > 0) {
    ThrowStatus(MakeError(
        ErrorId::kWeightOfRanks,
        absl::StrCat(subject_, " is changed in place by rank ", attachment_->rank(),
                     ", and every rank would apply the change")));
  }
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

void WeightRecord::Unpin() {
  std::unique_lock lock(mutex_);
  if (--pins_ > 0) {
    changed_.notify_all();
    return;
  }
  PointHome();
  if (state_ == State::kWriting) {
    PutBack(lock);
    return;
  }
  state_ = State::kHome;
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  changed_.notify_all();
}

void WeightRecord::PutBack(std::unique_lock<std::mutex>& lock) {
  state_ = State::kMoving;
  lock.unlock();
  std::exception_ptr failure;
  try {
    attachment_->PutWeight(tensor_, staging_.region_offset());
  } catch (...) {
    failure = std::current_exception();
  }
  staging_.Reset();
  lock.lock();
  state_ = State::kHome;
  changed_.notify_all();
  if (failure) std::rethrow_exception(failure);
}

void WeightRecord::Close() {
  // Keeps the storage alive while its message changes.
  const auto storage = LockStorage();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return state_ == State::kHome; });
  closed_ = true;
  if (storage) SetMessage(std::string(SessionEnded(subject_).message()));
  if (storage) PointHome();
  lock.unlock();
}

}  // namespace offload::zero3
