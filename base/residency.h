// base/residency.h
//
// Which weights stay in the window and which make room: pure policy over plain data. The window is
// a row of slots of different sizes; a newcomer gets the first hole that fits, else the contiguous
// run of evictable slots and holes whose earliest next use is furthest away (Belady's rule, with
// the recorded schedule as the oracle).
//
// Invariants
//   * Slots never overlap and never leave the window; a tensor has at most one.
//   * A slot that is pinned or under I/O is never part of found room.
//   * Room found for a prefetch evicts only what is needed later than the prefetched tensor.
//
// Thread safety: none; one owner.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace offload {

// A distance in touches from where the rank is; kNeverUsed: not in the schedule.
inline constexpr uint64_t kNeverUsed = UINT64_MAX;

// The recorded order of touches, asked for the distance to a tensor's next one.
class UseOrder {
 public:
  UseOrder() = default;
  // `touches` names tensors below tensor_count.
  UseOrder(std::span<const uint32_t> touches, uint32_t tensor_count);

  bool empty() const { return touch_count_ == 0; }
  uint32_t touch_count() const { return touch_count_; }
  // Touches from `position` (taken modulo the schedule) to the next use of `tensor`, cyclic;
  // kNeverUsed when there is none.
  uint64_t NextUse(uint32_t tensor, uint32_t position) const;

 private:
  uint32_t touch_count_ = 0;
  std::vector<uint32_t> first_;  // per tensor: its first index in positions_; one more at the end
  std::vector<uint32_t> positions_;  // ascending per tensor
};

// What the policy must know of a tensor in the window.
struct Occupant {
  bool evictable = false;  // not pinned, no I/O, no update under way
  uint64_t next_use = kNeverUsed;
};

class WeightWindow {
 public:
  struct Room {
    uint64_t offset_bytes = 0;
    std::vector<uint32_t> evicted;  // tensors that have to go first
  };
  using Look = std::function<Occupant(uint32_t tensor)>;

  explicit WeightWindow(uint64_t size_bytes = 0) : size_bytes_(size_bytes) {}

  // Finds room, evicting only tensors whose next use is later than `needed`; a demand passes no
  // `needed` and may evict any. Nothing is changed.
  std::optional<Room> Find(uint64_t slot_bytes, std::optional<uint64_t> needed,
                           const Look& look) const;

  // Gives [offset, offset + slot_bytes), which must be free, to a tensor that has no slot.
  void Occupy(uint32_t tensor, uint64_t offset_bytes, uint64_t slot_bytes);
  // Takes a tensor's slot away.
  void Release(uint32_t tensor);

  std::optional<uint64_t> OffsetOf(uint32_t tensor) const;
  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t occupied_bytes() const { return occupied_bytes_; }

 private:
  struct Slot {
    uint64_t size_bytes;
    uint32_t tensor;
  };
  struct Segment {
    uint64_t offset_bytes, size_bytes;
    bool hole;
    uint32_t tensor;
  };
  std::vector<Segment> Segments() const;

  uint64_t size_bytes_;
  uint64_t occupied_bytes_ = 0;
  std::map<uint64_t, Slot> slots_;                    // by offset
  std::unordered_map<uint32_t, uint64_t> offset_of_;  // by tensor
};

}  // namespace offload
