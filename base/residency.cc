#include "base/residency.h"

#include <algorithm>
#include <deque>
#include <iterator>

#include "base/check.h"

namespace offload {

UseOrder::UseOrder(std::span<const uint32_t> touches, uint32_t tensor_count)
    : touch_count_(static_cast<uint32_t>(touches.size())),
      first_(tensor_count + 1, 0),
      positions_(touches.size()) {
  for (const uint32_t tensor : touches) {
    OFFLOAD_CHECK(tensor < tensor_count) << tensor << " of " << tensor_count;
    ++first_[tensor + 1];
  }
  for (uint32_t tensor = 0; tensor < tensor_count; ++tensor) first_[tensor + 1] += first_[tensor];
  std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
  for (uint32_t i = 0; i < touch_count_; ++i) positions_[next[touches[i]]++] = i;
}

uint64_t UseOrder::NextUse(uint32_t tensor, uint32_t position) const {
  if (touch_count_ == 0 || tensor + 1 >= first_.size()) return kNeverUsed;
  const auto begin = positions_.begin() + first_[tensor];
  const auto end = positions_.begin() + first_[tensor + 1];
  if (begin == end) return kNeverUsed;
  const uint32_t from = position % touch_count_;
  const auto next = std::lower_bound(begin, end, from);
  return next != end ? *next - from : uint64_t{touch_count_} - from + *begin;
}

std::vector<WeightWindow::Segment> WeightWindow::Segments() const {
  std::vector<Segment> segments;
  segments.reserve(2 * slots_.size() + 1);
  uint64_t end = 0;
  for (const auto& [offset, slot] : slots_) {
    if (offset > end) segments.push_back({end, offset - end, true, 0});
    segments.push_back({offset, slot.size_bytes, false, slot.tensor});
    end = offset + slot.size_bytes;
  }
  if (end < size_bytes_) segments.push_back({end, size_bytes_ - end, true, 0});
  return segments;
}

std::optional<WeightWindow::Room> WeightWindow::Find(uint64_t slot_bytes,
                                                     std::optional<uint64_t> needed,
                                                     const Look& look) const {
  if (slot_bytes > size_bytes_) return std::nullopt;
  const std::vector<Segment> segments = Segments();
  for (const Segment& segment : segments) {
    if (segment.hole && segment.size_bytes >= slot_bytes) return Room{segment.offset_bytes, {}};
  }

  // A run [first, last] slides over the row. `earliest` holds the slots of the run that can still
  // become its earliest next use, ascending by next use: its front is the run's.
  struct Use {
    size_t segment;
    uint64_t next_use;
  };
  std::deque<Use> earliest;
  uint64_t run_bytes = 0;
  size_t first = 0, best_first = 0, best_last = 0;
  bool found = false;
  uint64_t best_use = 0;
  for (size_t last = 0; last < segments.size(); ++last) {
    const Segment& segment = segments[last];
    if (!segment.hole) {
      const Occupant occupant = look(segment.tensor);
      if (!occupant.evictable || (needed.has_value() && occupant.next_use <= *needed)) {
        first = last + 1;
        run_bytes = 0;
        earliest.clear();
        continue;
      }
      while (!earliest.empty() && earliest.back().next_use >= occupant.next_use)
        earliest.pop_back();
      earliest.push_back({last, occupant.next_use});
    }
    run_bytes += segment.size_bytes;
    // The shortest run that ends here; a longer one could only be needed earlier.
    while (run_bytes - segments[first].size_bytes >= slot_bytes) {
      run_bytes -= segments[first].size_bytes;
      if (!earliest.empty() && earliest.front().segment == first) earliest.pop_front();
      ++first;
    }
    if (run_bytes < slot_bytes) continue;
    const uint64_t use = earliest.empty() ? kNeverUsed : earliest.front().next_use;
    if (!found || use > best_use) {
      found = true;
      best_use = use;
      best_first = first;
      best_last = last;
    }
  }
  if (!found) return std::nullopt;
  Room room{segments[best_first].offset_bytes, {}};
  for (size_t i = best_first; i <= best_last; ++i) {
    if (!segments[i].hole) room.evicted.push_back(segments[i].tensor);
  }
  return room;
}

void WeightWindow::Occupy(uint32_t tensor, uint64_t offset_bytes, uint64_t slot_bytes) {
  OFFLOAD_CHECK(slot_bytes > 0 && offset_bytes <= size_bytes_ &&
                slot_bytes <= size_bytes_ - offset_bytes)
      << offset_bytes << " + " << slot_bytes << " of " << size_bytes_;
  const auto next = slots_.lower_bound(offset_bytes);
  OFFLOAD_CHECK(next == slots_.end() || offset_bytes + slot_bytes <= next->first)
      << "tensor " << tensor;
  if (next != slots_.begin()) {
    const auto& [offset, slot] = *std::prev(next);
    OFFLOAD_CHECK(offset + slot.size_bytes <= offset_bytes) << "tensor " << tensor;
  }
  OFFLOAD_CHECK(offset_of_.emplace(tensor, offset_bytes).second)
      << "tensor " << tensor << " has a slot";
  slots_.emplace(offset_bytes, Slot{slot_bytes, tensor});
  occupied_bytes_ += slot_bytes;
}

void WeightWindow::Release(uint32_t tensor) {
  const auto entry = offset_of_.find(tensor);
  OFFLOAD_CHECK(entry != offset_of_.end()) << "tensor " << tensor << " has no slot";
  const auto slot = slots_.find(entry->second);
  occupied_bytes_ -= slot->second.size_bytes;
  slots_.erase(slot);
  offset_of_.erase(entry);
}

std::optional<uint64_t> WeightWindow::OffsetOf(uint32_t tensor) const {
  const auto entry = offset_of_.find(tensor);
  if (entry == offset_of_.end()) return std::nullopt;
  return entry->second;
}

}  // namespace offload
