// zero3/torch/record.h
//
// The one place that touches the insides of libtorch: storages whose bytes are elsewhere between
// operations, and the dispatch key that brings them before a kernel runs.
//
// A managed storage is a StorageImpl whose DataPtr carries our deleter as a mark and a Record as
// its context; views, detached tensors, saved tensors and tied weights share it. While no operation
// uses it, it points at a reserved range without access
// ("home") and every data_ptr() throws a text that names the parameter. Tensors over it carry the
// dispatch key DeferredInit, for which torch has no kernel: our fallback pins the records among the
// arguments, runs the operator, unpins.
//
// Invariants
//   * A storage's pointer changes only under its record's lock and while nobody but the changing
//   thread has it pinned; who reads it
//     has pinned it under the same lock before.
//   * The number of bytes of a managed storage never changes, and its DataPtr's context is never
//   null.
//   * Every DataPtr that names a record counts in data_ptrs_; at zero the storage has died.
//   * A failed Pin() leaves nothing pinned and is thrown before the kernel runs.
//
// Thread safety: Pin and Unpin from any thread; the rest as the methods say.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "absl/container/inlined_vector.h"

namespace offload::zero3 {

inline constexpr c10::DispatchKey kManagedKey = c10::DispatchKey::DeferredInit;

enum class Access : uint8_t {
  kRead,
  kWrite,
  kOverwrite /* the whole storage, without looking at it */
};

// Operators that a record may answer without its bytes.
enum class Special : uint8_t { kNone, kNorm, kMultiply, kZero };

class Record {
 public:
  // The record of a tensor's storage, null when it is not managed. Never touches the bytes. O(1).
  static Record* Of(const at::Tensor& tensor);
  static Record* Of(c10::StorageImpl* storage);

  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // Brings the bytes and points the storage at them until as many Unpin(). Blocks; throws
  // offload::Error.
  virtual void Pin(Access access) = 0;
  // The last one lets go, and stores what was written. Throws offload::Error when that fails; the
  // pin is gone nevertheless.
  virtual void Unpin() = 0;
  // Answers an operator whose first argument is a tensor over the whole storage; false: run the
  // kernel.
  virtual bool Serve(Special special, torch::jit::Stack* stack) { return false; }

  // Tells a record that was born in an allocator which storage it belongs to.
  void Learn(c10::StorageImpl* storage) {
    if (storage_.load(std::memory_order_relaxed) == nullptr) LearnSlowly(storage);
  }

  const std::string& name() const { return name_; }
  size_t size_bytes() const { return size_bytes_; }
  // True for a tensor that covers all of the storage, in order.
  bool IsWhole(const at::Tensor& tensor) const;

  void Reference() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unreference();

 protected:
  // `subject` names it in messages: "parameter 'fc.weight'". `home` is a range of at least
  // `size_bytes` that stays reserved while the record lives. The creator has one reference.
  Record(std::string name, std::string subject, size_t size_bytes, std::byte* home);
  virtual ~Record() = default;

  // Takes a storage over: its bytes are freed, it points home. Call once.
  void Manage(c10::StorageImpl* storage);
  // A storage of this record that never had bytes.
  c10::Storage MakeStorage();
  // mutex_ held. Makes the storage point at `bytes`; with `throws`, raw accesses are refused.
  // Nothing when the storage has died.
  void PointTo(std::byte* bytes, bool throws);
  void PointHome() { PointTo(home_, true); }
  void SetMessage(const std::string& text);
  // Turns the storage into an ordinary one that owns `bytes`; the record is free of it. mutex_
  // held.
  void HandOver(c10::DataPtr bytes);
  // A strong reference to the storage, null when it has died. For threads that have no tensor over
  // it.
  c10::intrusive_ptr<c10::StorageImpl> LockStorage() { return weak_storage_.lock(); }
  bool HasStorage() const { return storage_.load(std::memory_order_relaxed) != nullptr; }
  // mutex_ held.
  virtual void OnStorageDeath() {}
  // A pointer for an allocator to hand out: the storage made of it is learned later, and has a
  // reference already.
  c10::DataPtr MakeFirstDataPtr(std::byte* bytes);

  const std::string name_;
  const std::string subject_;
  const size_t size_bytes_;
  std::byte* const home_;
  std::mutex mutex_;

 private:
  static void Drop(void* context);
  c10::DataPtr MakeDataPtr(std::byte* bytes);
  void Attach(c10::StorageImpl* storage);
  void LearnSlowly(c10::StorageImpl* storage);

  std::atomic<int> references_{1};
  std::atomic<int> data_ptrs_{0};
  std::atomic<c10::StorageImpl*> storage_{nullptr};
  c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage_;
};

// The pins of one operation. Those of a thread are nested, so that a record can tell its own
// thread's pins from others'.
class Pins {
 public:
  // `allocates_only`: the operation makes a tensor without giving it a value.
  explicit Pins(bool allocates_only = false) : allocates_only_(allocates_only), below_(top_) {
    top_ = this;
  }
  ~Pins();
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void Add(Record* record, Access access);
  // Unpins, and throws the first failure. Without it the destructor unpins and is silent.
  void Finish();
  // Takes part in the unpinning of a record that is pinned already.
  void AddPinned(Record* record);
  bool allocates_only() const { return allocates_only_; }
  // Whether something was pinned while the operation ran: its results may be of records that do not
  // know their storage yet.
  bool HasMoreThan(size_t count) const { return records_.size() > count; }
  // The innermost operation of the calling thread, null outside.
  static Pins* Current() { return top_; }
  // How often the calling thread has pinned `record`.
  static int CountOwn(const Record* record);

 private:
  static thread_local Pins* top_;
  const bool allocates_only_;
  Pins* const below_;
  absl::InlinedVector<Record*, 4> records_;
};

// A tensor like `tensor` over the same storage that carries the key; for tensor.set_data().
at::Tensor WithManagedKey(const at::Tensor& tensor);
// A tensor of the given shape over a managed storage, born with the key.
at::Tensor MakeManagedTensor(c10::Storage storage, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace offload::zero3
