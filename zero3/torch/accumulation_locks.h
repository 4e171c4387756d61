// zero3/torch/accumulation_locks.h
//
// torch holds a lock of an AccumulateGrad node while it adds to its parameter's `.grad`. Who takes
// the gradients of a model from under it, since its store is laid out anew for another thread,
// holds those of all of them: a backward of another thread waits where it would add to one.
//
// Invariants
//   * Taken before a passage (operator_gate.h): who adds to `.grad` is within one.
//   * torch calls hooks without the lock, so that a thread that steps in one does not hold it.
//   * Nobody waits for ever: kPatience ends every wait.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace offload::zero3 {

// The lock under which torch adds to the `.grad` of the parameter that the node belongs to.
std::mutex& AccumulationMutex(torch::autograd::Node& node);

class AccumulationLocks {
 public:
  static constexpr std::chrono::seconds kPatience{10};

  // Keeps the nodes alive, too: their parameters get no others meanwhile.
  explicit AccumulationLocks(std::vector<std::shared_ptr<torch::autograd::Node>> nodes,
                             std::chrono::milliseconds patience = kPatience);

 private:
  const std::vector<std::shared_ptr<torch::autograd::Node>> nodes_;
  std::vector<std::unique_lock<std::mutex>> locks_;
};

}  // namespace offload::zero3
