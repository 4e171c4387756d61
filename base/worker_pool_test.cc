#include "base/worker_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
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

// While it exists there is address space for some more threads only.
class LittleAddressSpace {
 public:
  LittleAddressSpace() {
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    const rlimit lower = {pages * sysconf(_SC_PAGESIZE) + (100u << 20), before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &lower), 0);
  }
  ~LittleAddressSpace() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_ = {};
};

constexpr size_t kMoreThanThereAre = 256;

TEST(WorkerPoolTest, WorksWithAsManyThreadsAsTheSystemGives) {
  const LittleAddressSpace little;
  std::atomic<int> count{0};
  {
    WorkerPool pool(kMoreThanThereAre, "test");
    EXPECT_GT(pool.thread_count(), 0u);
    EXPECT_LT(pool.thread_count(), kMoreThanThereAre);
    for (int i = 0; i < 1000; ++i) pool.Post([&] { ++count; });
  }
  EXPECT_EQ(count, 1000);
}

TEST(CountStartableThreadsTest, IsWhatIsWantedOrWhatTheSystemGives) {
  EXPECT_EQ(CountStartableThreads(3), 3u);
  const LittleAddressSpace little;
  const size_t count = CountStartableThreads(kMoreThanThereAre);
  EXPECT_GT(count, 0u);
  EXPECT_LT(count, kMoreThanThereAre);
}

}  // namespace
}  // namespace offload
