#include "base/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>

namespace offload {
namespace {

TEST(WorkerPoolTest, DestructorRunsEverythingThatWasPosted) {
  std::atomic<int> count{0};
  {
    WorkerPool pool(3, "test");
    for (int i = 0; i < 1000; ++i) pool.Post([&] { ++count; });
  }
  EXPECT_EQ(count, 1000);
}

TEST(WorkerPoolTest, WorkPostedByWorkRunsAlsoDuringDestruction) {
  std::atomic<int> count{0};
  std::function<void(int)> chain;
  {
    WorkerPool pool(2, "test");
    chain = [&](int left) {
      ++count;
      if (left > 0) pool.Post([&chain, left] { chain(left - 1); });
    };
    pool.Post([&] { chain(100); });
  }
  EXPECT_EQ(count, 101);
}

TEST(WorkerPoolTest, ThreadsRunBesideEachOther) {
  WorkerPool pool(2, "test");
  std::latch both(2);  // ends only if two functions run at the same time
  std::latch done(2);
  for (int i = 0; i < 2; ++i) {
    pool.Post([&] {
      both.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
}

TEST(WorkerPoolTest, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  {
    WorkerPool pool(1, "test");
    for (int i = 0; i < 100; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

}  // namespace
}  // namespace offload
