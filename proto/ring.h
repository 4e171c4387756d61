// proto/ring.h
//
// Rings with one producer and one consumer over the words of proto/shm_abi.h.
//
// Invariants
//   * Each side keeps its own cursor privately and only publishes it: a peer that overwrites the
//   shared copy harms itself.
//   * The peer's cursor is believed only when it leaves 0 … kEntries entries; anything else is a
//   fault of the peer.
//   * An entry is copied once, word by word, with relaxed atomic loads: whatever the peer does
//   meanwhile, the copy is a value.
//   * Indices are masked, so no cursor, however wrong, leads outside the ring.
//
// Ordering: the producer writes entries, then publishes its cursor with release; the consumer loads
// that cursor with acquire and reads entries. The way back (entries may be reused) is the same with
// the other cursor.
//
// Thread safety: one thread at a time per side.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <type_traits>

#include "base/checked.h"
#include "proto/shm_abi.h"

namespace offload::proto {

// Copies a value out of memory that the peer may be writing.
template <typename T>
T CopyOnce(T* shared) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0 &&
                alignof(T) >= alignof(uint64_t));
  auto* words = reinterpret_cast<uint64_t*>(shared);
  uint64_t copy[sizeof(T) / sizeof(uint64_t)];
  for (size_t i = 0; i < std::size(copy); ++i) {
    copy[i] = std::atomic_ref<uint64_t>(words[i]).load(std::memory_order_relaxed);
  }
  T value;
  std::memcpy(&value, copy, sizeof(T));
  return value;
}

// Writes a value where the peer may be reading.
template <typename T>
void StoreOnce(T* shared, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0 &&
                alignof(T) >= alignof(uint64_t));
  auto* words = reinterpret_cast<uint64_t*>(shared);
  uint64_t copy[sizeof(T) / sizeof(uint64_t)];
  std::memcpy(copy, &value, sizeof(T));
  for (size_t i = 0; i < std::size(copy); ++i) {
    std::atomic_ref<uint64_t>(words[i]).store(copy[i], std::memory_order_relaxed);
  }
}

template <typename Entry, uint32_t kEntries>
class RingProducer {
 public:
  static_assert(IsPowerOfTwo(kEntries));
  // The ring must be fresh: both cursors 0.
  RingProducer(Entry* entries, std::atomic<uint32_t>* tail, const std::atomic<uint32_t>* head)
      : entries_(entries), shared_tail_(tail), shared_head_(head) {}

  // Entries that may be pushed. Missing: the consumer's cursor makes no sense.
  std::optional<uint32_t> Room() const {
    const uint32_t used = tail_ - shared_head_->load(std::memory_order_acquire);
    if (used > kEntries) return std::nullopt;
    return kEntries - used;
  }

  // Writes the next entry; the consumer sees it after Publish(). Without Room() it overwrites an
  // entry that was not consumed.
  void Push(const Entry& entry) { StoreOnce(&entries_[tail_++ % kEntries], entry); }

  void Publish() { shared_tail_->store(tail_, std::memory_order_release); }

 private:
  Entry* entries_;
  std::atomic<uint32_t>* shared_tail_;
  const std::atomic<uint32_t>* shared_head_;
  uint32_t tail_ = 0;
};

template <typename Entry, uint32_t kEntries>
class RingConsumer {
 public:
  static_assert(IsPowerOfTwo(kEntries));
  // The ring must be fresh: both cursors 0.
  RingConsumer(Entry* entries, const std::atomic<uint32_t>* tail, std::atomic<uint32_t>* head)
      : entries_(entries), shared_tail_(tail), shared_head_(head) {}

  // Entries that can be taken. Missing: the producer's cursor makes no sense.
  std::optional<uint32_t> Available() const {
    const uint32_t count = shared_tail_->load(std::memory_order_acquire) - head_;
    if (count > kEntries) return std::nullopt;
    return count;
  }

  // Copies the next entry. Requires Available() ≥ 1 (without, the value is an old one).
  Entry Take() { return CopyOnce(&entries_[head_++ % kEntries]); }

  // Lets the producer reuse what was taken.
  void Publish() { shared_head_->store(head_, std::memory_order_release); }

 private:
  Entry* entries_;
  const std::atomic<uint32_t>* shared_tail_;
  std::atomic<uint32_t>* shared_head_;
  uint32_t head_ = 0;
};

using SubmissionProducer = RingProducer<SubmissionEntry, kSubmissionEntries>;
using SubmissionConsumer = RingConsumer<SubmissionEntry, kSubmissionEntries>;
using CompletionProducer = RingProducer<CompletionEntry, kCompletionEntries>;
using CompletionConsumer = RingConsumer<CompletionEntry, kCompletionEntries>;

// The fixed part of a mapped region. `region` is page aligned and at least kRegionFixedBytes long.
inline RegionHeader* HeaderOf(std::byte* region) { return reinterpret_cast<RegionHeader*>(region); }
inline SubmissionEntry* SubmissionEntriesOf(std::byte* region) {
  return reinterpret_cast<SubmissionEntry*>(region + kSubmissionRingOffset);
}
inline CompletionEntry* CompletionEntriesOf(std::byte* region) {
  return reinterpret_cast<CompletionEntry*>(region + kCompletionRingOffset);
}

}  // namespace offload::proto
