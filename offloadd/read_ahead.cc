#include "offloadd/read_ahead.h"

#include <algorithm>
#include <unordered_set>

#include "offloadd/extent_transfer.h"

namespace offload::daemon {

void ReadAhead::BeginStep(std::vector<uint32_t> store_tensors) {
  order_ = std::move(store_tensors);
  next_tensor_ = next_extent_ = 0;
  const std::unordered_set<uint32_t> updated(order_.begin(), order_.end());
  std::erase_if(pieces_, [&](const auto& entry) {
    if (updated.contains(entry.first.first)) return false;
    Forget(*entry.second);
    return true;
  });
  std::erase_if(sequence_, [this](const Key& key) { return pieces_.count(key) == 0; });
}

// A few at a time: weights may be asked for meanwhile.
void ReadAhead::Turn(const std::function<bool(uint32_t store_tensor, uint32_t index)>& is_done) {
  auto reading =
      std::ranges::count_if(pieces_, [](const auto& entry) { return !entry.second->is_read; });
  while (next_tensor_ < order_.size() && blocks_->free_count() > 0 &&
         reading < context_->depths.write_backs) {
    const uint32_t store_tensor = order_[next_tensor_];
    const uint32_t extents = proto::ExtentCount(context_->store_tensor(store_tensor).element_count);
    if (next_extent_ == extents) {
      ++next_tensor_;
      next_extent_ = 0;
      continue;
    }
    const uint32_t index = next_extent_++;
    if (!NeedsReading(store_tensor, index) || is_done(store_tensor, index)) continue;
    Start(store_tensor, index);
    ++reading;
  }
}

bool ReadAhead::NeedsReading(uint32_t store_tensor, uint32_t index) const {
  return !state_->Has(store_tensor, index) && pieces_.count({store_tensor, index}) == 0 &&
         proto::StateBytes(context_->store_tensor(store_tensor), index) > 0;
}

void ReadAhead::Start(uint32_t store_tensor, uint32_t index) {
  auto piece = std::make_shared<Piece>();
  piece->block = blocks_->Take();
  piece->update = DescribeExtent(*context_, store_tensor, index, {});
  piece->update.planes = StatePlanes(context_->store_tensor(store_tensor), index, piece->block);
  pieces_[{store_tensor, index}] = piece;
  sequence_.push_back({store_tensor, index});
  PlaneFlags wanted;
  for (const proto::Plane plane : proto::kUpdateOnlyPlanes) wanted[plane] = true;
  ReadPlanes(*context_, wanted, piece->update,
             [this, piece](const absl::Status& status) { Finish(*piece, status); });
}

void ReadAhead::Finish(Piece& piece, const absl::Status& status) {
  piece.is_read = true;
  piece.status = status;
  if (piece.is_forgotten) return blocks_->Return(piece.block);
  if (piece.on_read) piece.on_read(status);
}

std::shared_ptr<ReadAhead::Piece> ReadAhead::Take(uint32_t store_tensor, uint32_t index) {
  const auto found = pieces_.find({store_tensor, index});
  if (found == pieces_.end()) return nullptr;
  std::shared_ptr<Piece> piece = std::move(found->second);
  pieces_.erase(found);
  std::erase(sequence_, Key{store_tensor, index});  // as many as there are blocks
  return piece;
}

void ReadAhead::Forget(Piece& piece) {
  piece.is_forgotten = true;
  if (piece.is_read) blocks_->Return(piece.block);
}

void ReadAhead::Forget(uint32_t store_tensor) {
  const auto begin = pieces_.lower_bound({store_tensor, 0});
  const auto end = pieces_.lower_bound({store_tensor + 1, 0});
  for (auto piece = begin; piece != end; ++piece) Forget(*piece->second);
  pieces_.erase(begin, end);
}

bool ReadAhead::GiveBack() {
  for (; !sequence_.empty(); sequence_.pop_back()) {
    const auto last = pieces_.find(sequence_.back());
    if (last == pieces_.end()) continue;
    if (!last->second->is_read) return false;
    Forget(*last->second);
    pieces_.erase(last);
    sequence_.pop_back();
    return true;
  }
  return false;
}

}  // namespace offload::daemon
