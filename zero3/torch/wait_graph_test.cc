#include "zero3/torch/wait_graph.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <thread>
#include <vector>

namespace offload::zero3 {
namespace {

// Behind Name(). Joined after the last test only, so that no identifier is used again.
std::vector<std::thread>& Threads() {
  static auto* const kThreads = new std::vector<std::thread>;
  return *kThreads;
}

// Identifiers of threads that are none: the graph only compares them.
WaitGraph::Thread Name(int number) {
  static auto* const kNames = new std::vector<WaitGraph::Thread>;
  while (kNames->size() <= static_cast<size_t>(number)) {
    Threads().emplace_back([] { std::this_thread::yield(); });
    kNames->push_back(Threads().back().get_id());
  }
  return (*kNames)[number];
}

class WaitGraphTest : public testing::Test {
 protected:
  static void TearDownTestSuite() {
    for (std::thread& thread : Threads()) {
      if (thread.joinable()) thread.join();  // not again where tests are repeated
    }
  }
  bool Any(int self, const char* resource, std::initializer_list<int> holders) {
    return Enter(self, resource, WaitGraph::Needs::kAnyHolder, holders);
  }
  bool All(int self, const char* resource, std::initializer_list<int> holders) {
    return Enter(self, resource, WaitGraph::Needs::kAllHolders, holders);
  }
  WaitGraph graph_;

 private:
  bool Enter(int self, const char* resource, WaitGraph::Needs needs,
             std::initializer_list<int> holders) {
    std::vector<WaitGraph::Thread> threads;
    for (const int holder : holders) threads.push_back(Name(holder));
    return graph_.Enter(Name(self), resource, needs, threads);
  }
};

constexpr char kRoom[] = "room", kOther[] = "other", kThird[] = "third";

TEST_F(WaitGraphTest, ThreadsThatDoNotWaitComeBack) {
  EXPECT_TRUE(Any(1, kRoom, {2}));
  EXPECT_TRUE(All(3, kRoom, {1, 2}));
}

TEST_F(WaitGraphTest, WhoHoldsAllItselfWaitsForEver) {
  EXPECT_FALSE(Any(1, kRoom, {1}));
  EXPECT_FALSE(All(1, kRoom, {1}));
  EXPECT_FALSE(Any(1, kRoom, {})) << "nobody holds it, and it does not fit";
  EXPECT_TRUE(All(1, kRoom, {}));
}

TEST_F(WaitGraphTest, TheOneThatClosesACircleIsTold) {
  EXPECT_TRUE(Any(1, kRoom, {2}));
  EXPECT_FALSE(Any(2, kOther, {1}));
  EXPECT_TRUE(Any(1, kRoom, {2})) << "and was not registered";
}

TEST_F(WaitGraphTest, CirclesGoOverSeveralThreadsAndResources) {
  EXPECT_TRUE(All(1, kRoom, {2}));
  EXPECT_TRUE(All(2, kOther, {3}));
  EXPECT_TRUE(All(4, kOther, {3})) << "outside the circle";
  EXPECT_FALSE(All(3, kThird, {1}));
}

TEST_F(WaitGraphTest, OneFreeHolderIsEnoughForRoomAndNotForAWrite) {
  EXPECT_TRUE(Any(1, kRoom, {2, 3}));
  EXPECT_TRUE(All(2, kOther, {1})) << "3 may return room to 1";
  graph_.Leave(Name(1));
  EXPECT_FALSE(All(1, kThird, {2, 3})) << "3 does not help: 2 has to go, too";
}

TEST_F(WaitGraphTest, WokenThreadsAreFreeUntilTheyLookAgain) {
  EXPECT_TRUE(Any(1, kRoom, {2}));
  graph_.Wake(kRoom);
  EXPECT_TRUE(Any(2, kOther, {1}));
  EXPECT_FALSE(Any(1, kRoom, {2}));
}

TEST(WaitQueueTest, WaitersGoOnAfterTheHolderHasLetGo) {
  WaitGraph graph;
  WaitQueue queue(graph);
  std::mutex mutex;
  bool taken = true;
  const WaitGraph::Thread holder = std::this_thread::get_id();
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      std::unique_lock lock(mutex);
      while (taken) ASSERT_TRUE(queue.Wait(lock, WaitGraph::Needs::kAnyHolder, {&holder, 1}));
    });
  }
  {
    std::lock_guard lock(mutex);
    taken = false;
    queue.NotifyAll();
  }
  for (std::thread& waiter : waiters) waiter.join();
}

// Two threads take two locks in opposite order, again and again: nobody hangs, and who is told
// gives back what it has.
TEST(WaitQueueTest, OppositeOrdersEndWithOneOfBothTold) {
  WaitGraph graph;
  struct Resource {
    explicit Resource(WaitGraph& graph) : queue(graph) {}
    std::mutex mutex;
    WaitQueue queue;
    WaitGraph::Thread holder;
  } resources[2] = {Resource(graph), Resource(graph)};
  const auto take = [&](Resource& resource) {
    std::unique_lock lock(resource.mutex);
    while (resource.holder != WaitGraph::Thread()) {
      const WaitGraph::Thread holder = resource.holder;
      if (!resource.queue.Wait(lock, WaitGraph::Needs::kAllHolders, {&holder, 1})) return false;
    }
    resource.holder = std::this_thread::get_id();
    resource.queue.NotifyAll();
    return true;
  };
  const auto give = [&](Resource& resource) {
    std::lock_guard lock(resource.mutex);
    resource.holder = WaitGraph::Thread();
    resource.queue.NotifyAll();
  };
  int done[2] = {0, 0};
  const auto work = [&](int self) {
    while (done[self] < 2000) {
      if (!take(resources[self])) continue;
      if (take(resources[1 - self])) {
        ++done[self];
        give(resources[1 - self]);
      }
      give(resources[self]);
    }
  };
  std::thread one(work, 0), two(work, 1);
  one.join();
  two.join();
  EXPECT_EQ(done[0] + done[1], 4000);
}

}  // namespace
}  // namespace offload::zero3
