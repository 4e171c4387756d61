// zero3/torch/accumulation_locks.h
//
// torch holds a lock of an AccumulateGrad node while it adds to its parameter's `.grad`. Who takes
// the gradients of a model from under it, since its store is laid out anew for another thread,
// holds those of all of them: a backward of another thread waits where it would add to one.
//
// Invariants
//   * Taken before a passage (operator_gate.h): who adds to `.grad` is within one.
//   * Nobody waits for ever, nor for itself: a step may be taken in a hook that torch calls while
//   it holds such a lock. A lock is not waited for where its node is the one that this thread runs,
//   or one whose thread waits for this one's turn; and kPatience ends every wait.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace offload::zero3 {

// The lock under which torch adds to the `.grad` of the parameter that the node belongs to.
std::mutex& AccumulationMutex(torch::autograd::Node& node);

// The nodes whose threads wait for a turn, in a hook. Thread safety: any thread.
class NodesThatWait {
 public:
  // While it lives, the node that this thread runs is one of them.
  class Here {
   public:
    explicit Here(NodesThatWait& nodes);
    ~Here();
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    NodesThatWait& nodes_;
    const std::shared_ptr<torch::autograd::Node> node_;  // null outside of a backward
  };
  bool Contains(const torch::autograd::Node* node) const;

 private:
  mutable std::mutex mutex_;
  std::multiset<const torch::autograd::Node*> nodes_;
};

class AccumulationLocks {
 public:
  static constexpr std::chrono::seconds kPatience{10};

  // Keeps the nodes alive, too: their parameters get no others meanwhile.
  AccumulationLocks(std::vector<std::shared_ptr<torch::autograd::Node>> nodes,
                    const NodesThatWait& waiting, std::chrono::milliseconds patience = kPatience);

 private:
  const std::vector<std::shared_ptr<torch::autograd::Node>> nodes_;
  std::vector<std::unique_lock<std::mutex>> locks_;
};

}  // namespace offload::zero3
