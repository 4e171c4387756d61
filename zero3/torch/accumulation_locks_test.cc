#include "zero3/torch/accumulation_locks.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <functional>
#include <latch>
#include <thread>
#include <utility>

namespace offload::zero3 {
namespace {

constexpr std::chrono::hours kForEver{1};

class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Hook(std::function<void()> work) : work_(std::move(work)) {}
  void operator()(const torch::autograd::Variable&) override { work_(); }

 private:
  const std::function<void()> work_;
};

class AccumulationLocksTest : public testing::Test {
 protected:
  std::vector<std::shared_ptr<torch::autograd::Node>> Nodes() { return {node_, other_node_}; }

  at::Tensor parameter_ = at::ones({2}).requires_grad_(true);
  at::Tensor other_ = at::ones({2}).requires_grad_(true);
  // The parameters keep weak references.
  std::shared_ptr<torch::autograd::Node> node_ =
                                             torch::autograd::impl::grad_accumulator(parameter_),
                                         other_node_ =
                                             torch::autograd::impl::grad_accumulator(other_);
};

TEST_F(AccumulationLocksTest, WaitForWhoAddsAndAreAwaited) {
  std::latch has_lock(1);
  std::atomic<bool> has_added = false;
  std::thread adds([&] {
    const std::lock_guard lock(AccumulationMutex(*node_));
    has_lock.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    has_added = true;
  });
  has_lock.wait();
  std::thread backward;
  {
    const AccumulationLocks locks(Nodes(), kForEver);
    EXPECT_TRUE(has_added);
    backward = std::thread([&] { (parameter_ * 2 + other_ * 3).sum().backward(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(parameter_.mutable_grad().defined());
    EXPECT_FALSE(other_.mutable_grad().defined());
  }
  adds.join();
  backward.join();
  EXPECT_TRUE(at::equal(parameter_.grad(), at::full({2}, 2.0f)));
  EXPECT_TRUE(at::equal(other_.grad(), at::full({2}, 3.0f)));
}

// A step is taken in one, which may lay a store out anew.
TEST_F(AccumulationLocksTest, AreFreeInHooks) {
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(parameter_, std::make_unique<Hook>([&] {
                                                   const AccumulationLocks locks(Nodes(), kForEver);
                                                   ++calls;
                                                 }));
  (parameter_ * 2).sum().backward();
  (parameter_ * 2).sum().backward();  // added in place
  EXPECT_EQ(calls, 2);
}

TEST_F(AccumulationLocksTest, DoNotWaitForEver) {
  std::latch has_lock(1), may_end(1);
  std::thread adds([&] {
    const std::lock_guard lock(AccumulationMutex(*node_));
    has_lock.count_down();
    may_end.wait();
  });
  has_lock.wait();
  {
    const AccumulationLocks locks(Nodes(), std::chrono::milliseconds(20));
    std::thread([&] { EXPECT_FALSE(AccumulationMutex(*other_node_).try_lock()); }).join();
  }
  may_end.count_down();
  adds.join();
}

}  // namespace
}  // namespace offload::zero3
