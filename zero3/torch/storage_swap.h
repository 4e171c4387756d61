// zero3/torch/storage_swap.h
//
// The one place that touches the insides of libtorch's storages: a StorageImpl whose pointer is
// swapped under the tensors that share it, and which refuses raw accesses in between. Where the
// bytes come from is its owner's affair (residency.h).
//
// A managed storage is a StorageImpl whose DataPtr carries our deleter as a mark and a StorageSwap
// as its context; views, detached tensors, saved tensors and tied weights share it. While no
// operation uses it, it points at a reserved range without access ("home") and every data_ptr()
// throws a text that names the parameter. On a device home is not an address at all; the flag
// protects alone.
//
// Invariants
//   * The number of bytes of a managed storage never changes, and its DataPtr's context is never
//   null.
//   * Every DataPtr that names a swap counts in data_ptrs_; at zero the storage has died, or has
//   left.
//   * The owner has one reference more while a DataPtr names the swap.
//
// Thread safety: the caller holds the owner's mutex, unless a method says otherwise. The pointer is
// swapped only while nobody but the swapping thread has the storage pinned.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstddef>
#include <string>

namespace offload::zero3 {

inline constexpr c10::DispatchKey kManagedKey = c10::DispatchKey::DeferredInit;

class StorageSwap {
 public:
  // Whose storage it is, and who lives at least as long.
  class Owner {
   public:
    virtual void Reference() = 0;
    virtual void Unreference() = 0;
    // Takes the owner's mutex and calls Die().
    virtual void OnStorageDeath() = 0;

   protected:
    ~Owner() = default;
  };

  // `home` is a range of at least `size_bytes` that stays reserved while the owner lives.
  StorageSwap(Owner& owner, c10::Device device, size_t size_bytes, std::byte* home);
  StorageSwap(const StorageSwap&) = delete;
  StorageSwap& operator=(const StorageSwap&) = delete;

  // The owner of a storage, null when it is not managed. Never touches the bytes. O(1); any
  // thread, no lock.
  static Owner* OwnerOf(c10::StorageImpl* storage);
  static Owner* OwnerOf(const at::Tensor& tensor);
  // The swap that a pointer taken from a storage names, null when it is an ordinary one.
  static StorageSwap* Named(const c10::DataPtr& pointer);

  // Takes a storage over, which points home from now on, and returns what it pointed at: its
  // bytes, or a pointer that names another swap, which has to Leave().
  c10::DataPtr Manage(c10::StorageImpl* storage, const std::string& message);
  // A storage of this swap that never had bytes.
  c10::Storage MakeStorage(const std::string& message);
  // A pointer for an allocator to hand out: the storage made of it is learned later. No lock.
  c10::DataPtr MakeFirstDataPtr(std::byte* bytes);
  void Learn(c10::StorageImpl* storage, const std::string& message);
  bool knows_storage() const { return storage_.load(std::memory_order_relaxed) != nullptr; }

  // Makes the storage point at `bytes`; with `throws`, raw accesses are refused. Nothing when the
  // storage has died.
  void PointTo(std::byte* bytes, bool throws);
  void PointHome() { PointTo(home_, home_throws_); }
  // Whether raw accesses are refused while it points home, the default, or meet the range.
  void SetHomeThrows(bool throws) { home_throws_ = throws; }
  // The text of refused accesses, from now on.
  void SetMessage(const std::string& text);
  // Turns the storage into an ordinary one that owns `bytes`. May end the owner's last reference
  // but the caller's.
  void HandOver(c10::DataPtr bytes);
  // Takes the storage and the home of the other one, and gives it its own: whoever has a tensor or
  // a pointer over one of them is with the other owner from now on. Both have a storage of the same
  // size, which points home; both owners' mutexes are held. The messages are of refused accesses.
  void Exchange(StorageSwap& other, const std::string& message, const std::string& others_message);
  // Another range is home from now on. Requires that no storage is managed.
  void MoveHome(std::byte* home) { home_ = home; }
  // Forgets the storage, which another swap has taken over; pointers that name this one may live
  // on.
  void Leave();
  void Die() { storage_.store(nullptr, std::memory_order_relaxed); }
  // A strong reference to the storage, null when it has died. For threads that have no tensor over
  // it. No lock.
  c10::intrusive_ptr<c10::StorageImpl> Lock() { return weak_storage_.lock(); }

  Owner& owner() const { return owner_; }
  std::byte* home() const { return home_; }

 private:
  static void Drop(void* context);
  c10::DataPtr MakeDataPtr(std::byte* bytes);
  void Remember(c10::StorageImpl* storage, const std::string& message);

  Owner& owner_;
  const c10::Device device_;
  const size_t size_bytes_;
  std::byte* home_;
  bool home_throws_ = true;
  std::atomic<int> data_ptrs_{0};
  std::atomic<c10::StorageImpl*> storage_{nullptr};
  c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage_;
};

// A tensor like `tensor` over the same storage that carries the key; for tensor.set_data().
at::Tensor WithManagedKey(const at::Tensor& tensor);
// A tensor of the shape, strides and type of `like` over a managed storage, on its device, born
// with the key.
at::Tensor MakeManagedTensor(c10::Storage storage, const at::Tensor& like);

}  // namespace offload::zero3
