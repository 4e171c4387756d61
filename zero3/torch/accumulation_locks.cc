#include "zero3/torch/accumulation_locks.h"

#include <thread>
#include <utility>

namespace offload::zero3 {
namespace {

// The member is protected; an explicit instantiation may name it.
template <auto Member, class Tag>
struct Expose {
  friend std::mutex& MutexOf(torch::autograd::Node& node, Tag) { return node.*Member; }
};
struct AccumulationTag {};
std::mutex& MutexOf(torch::autograd::Node& node, AccumulationTag);
template struct Expose<&torch::autograd::Node::mutex_, AccumulationTag>;

}  // namespace

std::mutex& AccumulationMutex(torch::autograd::Node& node) {
  return MutexOf(node, AccumulationTag{});
}

AccumulationLocks::AccumulationLocks(std::vector<std::shared_ptr<torch::autograd::Node>> nodes,
                                     std::chrono::milliseconds patience)
    : nodes_(std::move(nodes)) {
  const auto end = std::chrono::steady_clock::now() + patience;
  for (const std::shared_ptr<torch::autograd::Node>& node : nodes_) {
    std::unique_lock lock(AccumulationMutex(*node), std::try_to_lock);
    while (!lock.owns_lock() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (lock.try_lock()) break;
    }
    if (lock.owns_lock()) locks_.push_back(std::move(lock));
  }
}

}  // namespace offload::zero3
