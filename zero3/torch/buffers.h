// zero3/torch/buffers.h
//
// The buffers of the attached modules (running statistics, masks, tables): they stay ordinary
// tensors in memory, and belong to the job nevertheless. They are committed with every step and
// given back when a job is attached again.
//
// Small ones travel with the trainer's state; those that do not fit there are tensors of the store,
// put when their bytes have changed (`large`).
//
// Beside them, slots: tensors of the store for what optimizers of the trainer's process keep
// (tensor_engine_foreign.cc), which no file has.
//
// Not among them: undefined ones, and those that share memory within themselves (expanded ones),
// which nobody can write in place.
//
// Thread safety: one thread, when no operation runs on the buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "zero3/torch/weights_io.h"

namespace offload::zero3 {

class Buffers {
 public:
  // Of small buffers, in all; with N ranks each has a part of it.
  static constexpr uint64_t kSmallBytesMax = 256 << 10;

  // One that is a tensor of the store: its bytes as fp32 elements.
  struct Large {
    std::string name;
    at::Tensor tensor;  // undefined in a slot that nothing is in
    uint64_t element_count = 0;
    std::optional<uint32_t> crc;  // of the bytes that the store has; nothing: of others
    bool is_stored = false;
    std::optional<size_t> slot;  // its number, where it is one
  };

  // OFD-1601 for one that is not dense, or on a device that nothing here drives.
  static void CheckSupported(std::span<const NamedTensor> buffers);
  // Adds those that are not known yet. Errors as above.
  void Add(std::span<const NamedTensor> buffers);
  const std::vector<NamedTensor>& all() const { return all_; }
  // `tensor` is what a module has under this name from now on. False where the buffer is not one of
  // these, or a run that goes on could not give `tensor`'s value to what its module then makes:
  // another type or device, another shape unless small and first empty, or of one element, or empty
  // now.
  bool Replace(std::string_view name, const at::Tensor& tensor);
  uint64_t size_bytes() const;
  // What one had before Restore() gave it the job's size, or Replace() another.
  uint64_t FirstBytes(const NamedTensor& named) const;
  // Divides them, once for all; the same way in every run that adds the same ones.
  void Divide(uint64_t small_bytes_max);
  // Adds those of modules that come after that, each small as long as all of these are within
  // `small_bytes_max`. One of a name that is known takes its place: the store has nothing of it.
  void AddLater(std::span<const NamedTensor> buffers, uint64_t small_bytes_max);
  // Gives those that are known the names that they have now.
  void Rename(std::span<const NamedTensor> buffers);
  // Those that have no name of these are not small.
  void DivideByNames(const std::unordered_set<std::string>& small);
  // Slots of these sizes, behind those that there are; they keep their numbers.
  void AddSlots(std::span<const uint64_t> sizes_bytes);
  std::vector<Large*> slots();
  // Large ones in the order of the store, whose tensors `places` numbers by their names there.
  void SortLarge(const std::unordered_map<std::string, size_t>& places);
  std::vector<Large>& large() { return large_; }
  const std::vector<Large>& large() const { return large_; }

  // The small ones' bytes, as they are now. Throws OFD-1601 where one in the store has grown beyond
  // its room there.
  std::string EncodeSmall() const;
  // Gives buffers the values that `encoded` has for them, each once, and those that are empty, or
  // one element, or were emptied, its size, too. OFD-1602 when one has another shape or type, 1207
  // for bytes that are not from EncodeSmall.
  absl::Status Restore(std::string_view encoded);

  // One of them on the host, in order; undefined when nothing is in it. Throws OFD-1601 when it has
  // more bytes than `element_count` fp32 elements.
  static at::Tensor InOrder(const Large& large);
  static uint32_t CrcOf(const at::Tensor& in_order);
  static void Assign(Large& large, std::string_view bytes);

 private:
  void Place(const NamedTensor& named, bool is_small);
  static void CheckFits(const Large& large);

  std::vector<NamedTensor> all_;
  std::vector<NamedTensor> small_;
  std::vector<Large> large_;
  size_t slot_count_ = 0;
  std::unordered_set<const void*> known_;                  // TensorImpl, of those that were added
  std::unordered_set<std::string> restored_;               // names
  std::unordered_map<std::string, uint64_t> first_bytes_;  // of names whose size is another since
};

}  // namespace offload::zero3
