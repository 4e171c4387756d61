// aio/memory_device.h
//
// A device over a vector of bytes, for tests and simulators. Nothing happens outside Poll(), so
// that a run is a function of its calls and its seed.
//
// Without a seed, Poll() completes all operations that were waiting when it began, in order. With
// one, it completes a random number of them, at least one, in random order.
//
// Thread safety: as Device.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "aio/device.h"
#include "base/random.h"

namespace offload::aio {

// A queue of operations that leave it in the order described above. Internal to the devices that
// complete only in Poll().
template <typename T>
class ScrambledQueue {
 public:
  explicit ScrambledQueue(std::optional<uint64_t> seed) {
    if (seed.has_value()) random_.emplace(*seed);
  }
  bool empty() const { return items_.empty(); }
  void Push(T item) { items_.push_back(std::move(item)); }

  // How many items one Poll() takes.
  size_t ChooseCount() {
    if (items_.empty() || !random_.has_value()) return items_.size();
    return 1 + random_->Below(items_.size());
  }
  T Pop() {
    const size_t index = random_.has_value() ? random_->Below(items_.size()) : 0;
    T item = std::move(items_[index]);
    items_.erase(items_.begin() + static_cast<ptrdiff_t>(index));
    return item;
  }
  const std::deque<T>& items() const { return items_; }

 private:
  std::optional<Random> random_;
  std::deque<T> items_;
};

class MemoryDevice final : public Device {
 public:
  explicit MemoryDevice(uint64_t size_bytes, std::optional<uint64_t> seed = std::nullopt,
                        uint32_t offset_alignment = 512, uint32_t memory_alignment = 512);
  ~MemoryDevice() override { Drain(); }

  size_t Poll(bool wait) override;
  int event_fd() const override { return -1; }
  const Geometry& geometry() const override { return geometry_; }
  std::string_view engine() const override { return "memory"; }

  // What the drive holds. May be changed between Polls: bit rot.
  std::span<std::byte> bytes() { return bytes_; }

  // Cuts the end off, as somebody who truncates the file would: reads there are DATA_LOSS, though
  // geometry() stays.
  void Truncate(uint64_t size_bytes) { bytes_.resize(size_bytes); }

 protected:
  void Start(std::unique_ptr<Op> op) override { queue_.Push(std::move(op)); }

 private:
  absl::Status Transfer(const Op& op);

  const Geometry geometry_;
  std::vector<std::byte> bytes_;
  ScrambledQueue<std::unique_ptr<Op>> queue_;
};

}  // namespace offload::aio
