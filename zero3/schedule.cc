#include "zero3/schedule.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace offload::zero3 {

Schedule::Schedule(std::vector<uint64_t> slot_bytes, uint64_t window_bytes)
    : slot_bytes_(std::move(slot_bytes)),
      window_bytes_(window_bytes),
      in_window_(slot_bytes_.size(), 0),
      asked_(slot_bytes_.size(), false) {}

void Schedule::Touch(uint32_t tensor, const std::function<void(uint32_t tensor)>& prefetch) {
  OFFLOAD_CHECK(tensor < slot_bytes_.size()) << tensor << " of " << slot_bytes_.size();
  if (slot_bytes_[tensor] == 0 || tensor == last_) return;
  if (recording_ && recorded_.size() < kTouchesMax) recorded_.push_back(tensor);
  if (!order_.empty()) {
    if (cursor_ < order_.size() && order_[cursor_] == tensor) {
      Advance();
    } else {
      ++mismatches_;
      if (const size_t position = Locate(tensor); position < order_.size()) MoveTo(position + 1);
    }
  }
  last_ = tensor;
  asked_[tensor] = false;
  FillWindow(prefetch);
}

bool Schedule::EndStep(const std::function<void(uint32_t tensor)>& prefetch) {
  // A step without a touch (everything resident, or no forward at all) says nothing.
  const bool changed = !recorded_.empty() && recorded_ != order_;
  if (changed) {
    MoveTo(order_.size());
    order_ = std::move(recorded_);
    Rebuild();
  }
  recorded_.clear();
  last_ = kNone;
  std::fill(asked_.begin(), asked_.end(), false);
  MoveTo(0);
  FillWindow(prefetch);
  return changed;
}

void Schedule::SetRecording(bool recording) { recording_ = recording; }
std::span<const uint32_t> Schedule::order() const { return order_; }
uint32_t Schedule::position() const { return static_cast<uint32_t>(cursor_); }
uint64_t Schedule::mismatches() const { return mismatches_; }

void Schedule::Advance() {
  if (cursor_ < ahead_) {
    const uint32_t tensor = order_[cursor_];
    if (--in_window_[tensor] == 0) in_window_bytes_ -= slot_bytes_[tensor];
  } else {
    ++ahead_;
  }
  ++cursor_;
}

void Schedule::MoveTo(size_t position) {
  while (cursor_ < ahead_) Advance();
  cursor_ = ahead_ = position;
}

void Schedule::FillWindow(const std::function<void(uint32_t tensor)>& prefetch) {
  for (; ahead_ < order_.size(); ++ahead_) {
    const uint32_t tensor = order_[ahead_];
    const uint64_t more_bytes = in_window_[tensor] == 0 ? slot_bytes_[tensor] : 0;
    if (in_window_bytes_ + more_bytes > window_bytes_) return;
    in_window_bytes_ += more_bytes;
    ++in_window_[tensor];
    if (asked_[tensor]) continue;
    asked_[tensor] = true;
    // The tensor that is in use right now needs no asking, and would count as asked before its own
    // release.
    if (tensor != last_) prefetch(tensor);
  }
}

size_t Schedule::Locate(uint32_t tensor) const {
  const auto begin = positions_.begin() + positions_begin_[tensor];
  const auto end = positions_.begin() + positions_begin_[tensor + 1];
  if (begin == end) return order_.size();
  if (last_ != kNone) {
    const auto follows = std::find_if(begin, end, [this](uint32_t position) {
      return position > 0 && order_[position - 1] == last_;
    });
    if (follows != end) return *follows;
  }
  const auto next = std::lower_bound(begin, end, static_cast<uint32_t>(cursor_));
  return next == end ? *begin : *next;
}

void Schedule::Rebuild() {
  positions_begin_.assign(slot_bytes_.size() + 1, 0);
  for (const uint32_t tensor : order_) ++positions_begin_[tensor + 1];
  for (size_t i = 1; i < positions_begin_.size(); ++i)
    positions_begin_[i] += positions_begin_[i - 1];
  positions_.resize(order_.size());
  std::vector<uint32_t> at(positions_begin_.begin(), positions_begin_.end() - 1);
  for (size_t position = 0; position < order_.size(); ++position)
    positions_[at[order_[position]]++] = static_cast<uint32_t>(position);
}

}  // namespace offload::zero3
