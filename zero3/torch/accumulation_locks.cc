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

NodesThatWait::Here::Here(NodesThatWait& nodes)
    : nodes_(nodes), node_(torch::autograd::get_current_node()) {
  if (node_ == nullptr) return;
  const std::lock_guard lock(nodes_.mutex_);
  nodes_.nodes_.insert(node_.get());
}

NodesThatWait::Here::~Here() {
  if (node_ == nullptr) return;
  const std::lock_guard lock(nodes_.mutex_);
  nodes_.nodes_.erase(nodes_.nodes_.find(node_.get()));
}

bool NodesThatWait::Contains(const torch::autograd::Node* node) const {
  const std::lock_guard lock(mutex_);
  return nodes_.contains(node);
}

AccumulationLocks::AccumulationLocks(std::vector<std::shared_ptr<torch::autograd::Node>> nodes,
                                     const NodesThatWait& waiting,
                                     std::chrono::milliseconds patience)
    : nodes_(std::move(nodes)) {
  const std::shared_ptr<torch::autograd::Node> current = torch::autograd::get_current_node();
  const auto end = std::chrono::steady_clock::now() + patience;
  for (const std::shared_ptr<torch::autograd::Node>& node : nodes_) {
    std::unique_lock lock(AccumulationMutex(*node), std::try_to_lock);
    while (!lock.owns_lock() && node != current && !waiting.Contains(node.get()) &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (lock.try_lock()) break;
    }
    if (lock.owns_lock()) locks_.push_back(std::move(lock));
  }
}

}  // namespace offload::zero3
