// zero3/torch/residency.h
//
// What brings the bytes of a storage and takes them away again: a weight from the job's slab, a
// gradient from the region or the scratch file, a tensor that is being constructed. Tensors over
// such storages carry the dispatch key DeferredInit, for which torch has no kernel: our fallback
// (interception.cc) pins the residencies among an operator's arguments, runs it, unpins.
//
// Between Pin() and Unpin() an operator of the host has the bytes. On an accelerator the operator
// has then only been launched: Unpin() says when the bytes are done with, and until then they stay
// where they are, while the storage points home already.
//
// Invariants
//   * A storage's pointer changes only under its residency's lock and while nobody but the changing
//   thread has it pinned; who reads it has pinned it under the same lock before.
//   * A failed Pin() leaves nothing pinned and is thrown before the kernel runs.
//
// Thread safety: Pin and Unpin from any thread; the rest as the methods say.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "zero3/torch/storage_swap.h"

namespace offload::zero3 {

enum class Access : uint8_t {
  kRead,
  kReadCopy, /* of weights only: as kRead, without holding room that others wait for */
  kWrite,
  kOverwrite /* the whole storage, without looking at it */
};

// Whether what the calling thread writes is written alike by all ranks of a job: in the step of an
// optimizer of the trainer's, in a collective operation. What ranks make of weights in place is
// then not compared; otherwise one that differs is OFD-1606. The first rank's counts in any case.
bool WritesAlike();
void SetWritesAlike(bool alike);

// Operators that a residency may answer without its bytes.
enum class Special : uint8_t {
  kNone,
  kNorm,
  kVectorNorm, /* linalg.vector_norm() */
  kListNorm,   /* _foreach_norm() of a list of one, by the kernel of lists that a device has */
  kMultiply,
  kZero,
  // What follows changes what a tensor is, not its bytes.
  kSet,        /* set_() with a tensor */
  kSetStorage, /* with a storage */
  kSetStrides, /* with a storage, offset, sizes and strides */
  kSetData,
  kRecordStream
};

// The end of what an operator does with bytes.
class Completion {
 public:
  // Calls `then` once, when it has come: perhaps at once, perhaps on another thread. `then` does
  // not throw.
  virtual void WhenDone(std::function<void()> then) = 0;

 protected:
  ~Completion() = default;
};

class Residency : public StorageSwap::Owner {
 public:
  // The residency of a tensor's storage, null when it is not managed. Never touches the bytes.
  // O(1).
  static Residency* Of(const at::Tensor& tensor) {
    return static_cast<Residency*>(StorageSwap::OwnerOf(tensor));
  }
  static Residency* Of(c10::StorageImpl* storage) {
    return static_cast<Residency*>(StorageSwap::OwnerOf(storage));
  }

  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Brings the bytes and points the storage at them until as many Unpin(). Blocks; throws
  // offload::Error.
  virtual void Pin(Access access) = 0;
  // The operator has run (`done` is null), or was launched and is over at `done`. The last one lets
  // go, and stores what was written. Throws offload::Error when that fails; the pin is gone
  // nevertheless. What fails after `done` is thrown by the next Pin().
  virtual void Unpin(Completion* done) = 0;
  // The operation has thrown: what it was to overwrite without looking stays what it was. Before
  // its Unpin().
  virtual void Abandon() {}
  // Answers an operator whose first argument is a tensor over the whole storage; false: run the
  // kernel.
  virtual bool Serve(Special special, torch::jit::Stack* stack) { return false; }

  // How much of the room that an operation shares with others its bytes take; 0 when they have a
  // place of their own.
  virtual uint64_t window_bytes() const { return 0; }
  // Whether an operation that reads several of them gets copies, which it has one after the other.
  virtual bool is_copied_among_several() const { return false; }
  // Whether one operation at a time may hold `count` such places, of `size_bytes` in all, while it
  // waits for the last of them. True: until EndHolding().
  virtual bool BeginHolding(size_t count, uint64_t size_bytes) { return true; }
  virtual void EndHolding() {}
  // An operation is about to pin it and write, and others with it; it has pinned none.
  virtual void MakeRoomToWrite() {}

  // Tells a residency that was born in an allocator which storage it belongs to.
  void Learn(c10::StorageImpl* storage) {
    if (!swap_.knows_storage()) LearnSlowly(storage);
  }

  // Forgets a storage that another residency has taken over.
  void LeaveStorage();

  const std::string& name() const { return name_; }
  // Where the storage points while no operation uses it.
  const std::byte* home() const { return swap_.home(); }
  size_t size_bytes() const { return size_bytes_; }
  // True for a tensor that has every element of the storage once, in whatever order.
  bool IsWhole(const at::Tensor& tensor) const;

  void Reference() final { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unreference() final;
  // For who knows of it without a reference: false when it is about to go.
  bool ReferenceIfAlive();

 protected:
  // `subject` names it in messages: "parameter 'fc.weight'". `home` as for StorageSwap. The creator
  // has one reference.
  Residency(std::string name, std::string subject, c10::Device device, size_t size_bytes,
            std::byte* home);
  virtual ~Residency() = default;

  // The OFD-1603 of raw accesses.
  std::string ReleasedText() const;
  // mutex_ held.
  virtual void ForgetStorage() {}

  const std::string name_;
  const std::string subject_;
  const size_t size_bytes_;
  std::mutex mutex_;
  StorageSwap swap_;

 private:
  void OnStorageDeath() final;
  void LearnSlowly(c10::StorageImpl* storage);

  std::atomic<int> references_{1};
};

// Whether the elements of two tensors of one shape lie in memory in the same order, without gaps.
bool HaveSameOrder(const at::Tensor& a, const at::Tensor& b);

// Values of a tensor's shape with their elements in memory in the order of the tensor's: themselves
// or a copy.
at::Tensor InOrderOf(const at::Tensor& tensor, const at::Tensor& values);

// The pins of one operation. Those of a thread are nested, so that a residency can tell its own
// thread's pins from others'.
class Pins {
 public:
  // What the calling thread's operation allocates, when it constructs a model.
  enum class Allocates {
    kResults,    // tensors that it gives values to
    kEmpty,      // tensors without values
    kForCaller,  // bytes of a tensor that the operation below it is about to fill: resize_
  };
  // `is_loop`: it runs other operations for the elements of a list and looks at no bytes itself.
  explicit Pins(Allocates allocates = Allocates::kResults, bool is_loop = false)
      : allocates_(allocates), is_loop_(is_loop), below_(top_) {
    top_ = this;
  }
  ~Pins();
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void Add(Residency* residency, Access access);
  // Unpins, and throws the first failure. Without it the operation has thrown: the destructor
  // unpins and is silent.
  void Finish(Completion* done = nullptr);
  // Takes part in the unpinning of a residency that is pinned already: of memory that the operation
  // has allocated. Finish() leaves it to the operation that runs this one, whose kernel may read
  // the result by its address.
  void AddPinned(Residency* residency);
  // Whether the operation has allocated something: its results may be of residencies that do not
  // know their storage yet.
  bool HasAllocated() const { return !allocated_.empty(); }
  // The innermost operation of the calling thread, null outside.
  static Pins* Current() { return top_; }
  // The operation of the calling thread that gives a value to what is allocated now; null when none
  // does.
  static Pins* Filling();
  // How often the calling thread has pinned it.
  static int CountOwn(const Residency* residency);

 private:
  static Pins* FillingFrom(Pins* pins);
  void LeaveAllocated();

  static thread_local Pins* top_;
  const Allocates allocates_;
  const bool is_loop_;
  Pins* const below_;
  absl::InlinedVector<Residency*, 4> residencies_;
  absl::InlinedVector<Residency*, 4> allocated_;
};

}  // namespace offload::zero3
