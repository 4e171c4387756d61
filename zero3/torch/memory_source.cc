#include "zero3/torch/memory_source.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace offload::zero3 {
namespace {

constexpr uint8_t kAllocatorPriority = 200;

thread_local MemorySource* source_of_thread = nullptr;

// What frees memory of sources, by its address: torch's raw memory has nothing else of it.
class Lent {
 public:
  static Lent& OfProcess() {
    static auto* const kLent = new Lent;
    return *kLent;
  }

  void Add(void* data, std::function<void()> free) {
    std::lock_guard lock(mutex_);
    by_data_[data] = std::move(free);
  }
  // Nothing when it is of no source.
  std::function<void()> Take(void* data) {
    std::lock_guard lock(mutex_);
    const auto found = by_data_.extract(data);
    return found.empty() ? nullptr : std::move(found.mapped());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::function<void()>> by_data_;
};

void FreeLent(void* data) { Lent::OfProcess().Take(data)(); }

// One for the process, in torch's place while any thread has a source. It lives for ever: torch
// asks storages for the allocator that made them.
class SourceAllocator final : public c10::Allocator {
 public:
  static SourceAllocator& OfProcess() {
    static auto* const kAllocator = new SourceAllocator;
    return *kAllocator;
  }

  void Install() {
    std::lock_guard lock(mutex_);
    if (installed_++ > 0) return;
    ordinary_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this, kAllocatorPriority);
  }
  void Uninstall() {
    std::lock_guard lock(mutex_);
    if (--installed_ == 0) c10::SetCPUAllocator(ordinary_, kAllocatorPriority);
  }

  c10::DataPtr allocate(size_t size_bytes) override {
    if (source_of_thread != nullptr) {
      if (c10::DataPtr data = source_of_thread->Allocate(size_bytes)) return data;
    }
    return ordinary_.load()->allocate(size_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      if (const auto free = Lent::OfProcess().Take(data)) return free();
      OfProcess().ordinary_.load()->raw_deleter()(data);
    };
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  c10::DataPtr AllocateOrdinary(size_t size_bytes) const {
    c10::Allocator* const current = c10::GetCPUAllocator();
    return (current == this ? ordinary_.load() : current)->allocate(size_bytes);
  }

 private:
  std::mutex mutex_;
  int installed_ = 0;  // by threads
  std::atomic<c10::Allocator*> ordinary_{nullptr};
};

}  // namespace

MemorySource* SetMemorySource(MemorySource* source) {
  SourceAllocator& allocator = SourceAllocator::OfProcess();
  if (source != nullptr && source_of_thread == nullptr) allocator.Install();
  if (source == nullptr && source_of_thread != nullptr) allocator.Uninstall();
  return std::exchange(source_of_thread, source);
}

c10::DataPtr MakeDataPtr(void* data, std::function<void()> free) {
  Lent::OfProcess().Add(data, std::move(free));
  return {data, data, &FreeLent, c10::kCPU};
}

c10::DataPtr AllocateOrdinary(size_t size_bytes) {
  return SourceAllocator::OfProcess().AllocateOrdinary(size_bytes);
}

}  // namespace offload::zero3
