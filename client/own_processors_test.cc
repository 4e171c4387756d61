#include "client/own_processors.h"

#include <gtest/gtest.h>

#include <latch>
#include <thread>

// Of a runtime of OpenMP that binds: two places. Found as the runtime's own ones are.
static bool g_binds = false;
extern "C" {
int omp_get_num_places() { return g_binds ? 2 : 0; }
int omp_get_place_num_procs(int place) { return place + 1; }
void omp_get_place_proc_ids(int place, int* numbers) {
  for (int i = 0; i <= place; ++i) numbers[i] = 700 + 10 * place + i;
}
}

namespace offload::client {
namespace {

TEST(OwnProcessorsTest, AreThoseOfAllThreads) {
  const CpuList all = ProcessorsOf(0);
  EXPECT_EQ(OwnProcessors(), all);
  std::latch asked(1);
  std::thread other([&] { asked.wait(); });
  std::thread([&] {
    ASSERT_TRUE(RunOn({all.front()}));
    ASSERT_EQ(ProcessorsOf(0), CpuList{all.front()});
    EXPECT_EQ(OwnProcessors(), all);
  }).join();
  asked.count_down();
  other.join();
}

TEST(OwnProcessorsTest, AreThoseThatOpenMpBindsTo) {
  g_binds = true;
  EXPECT_EQ(Intersection(OwnProcessors(), {699, 700, 701, 710, 711, 712}),
            (CpuList{700, 710, 711}));
  g_binds = false;
}

}  // namespace
}  // namespace offload::client
