// Nanoseconds per parameter of the ordered sum of N ranks' gradients, on arrays that fit no cache,
// beside a copy of one of them.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/sum.h"

namespace offload::kernels {
namespace {

constexpr size_t kCount = size_t{1} << 24;
constexpr size_t kRun = size_t{1} << 18;  // an extent
constexpr int kRepetitions = 9;

// Of this thread's processor time, so that other work on the machine counts little.
double NowNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

double BestNanoseconds(const std::function<void()>& pass) {
  double best = 1e9;
  for (int i = 0; i < kRepetitions; ++i) {
    const double begin = NowNanoseconds();
    pass();
    best = std::min(best, (NowNanoseconds() - begin) / kCount);
  }
  return best;
}

template <class T>
void Report(Dtype dtype, const char* name) {
  std::vector<std::vector<T>> parts(4, std::vector<T>(kCount, T{0x3C3C}));
  std::vector<T> sum(kCount);
  std::printf("%s: copy %.2f", name, BestNanoseconds([&] {
                std::memcpy(sum.data(), parts[0].data(), kCount * sizeof(T));
              }));
  for (const size_t ranks : {1, 2, 4}) {
    for (const SumStart start : {SumStart::kNothing, SumStart::kSum}) {
      const double best = BestNanoseconds([&] {
        for (size_t begin = 0; begin < kCount; begin += kRun) {
          const void* pointers[4];
          for (size_t i = 0; i < ranks; ++i) pointers[i] = parts[i].data() + begin;
          AddParts({dtype, kRun, sum.data() + begin, start, pointers, ranks,
                    1.0f / static_cast<float>(ranks)});
        }
      });
      std::printf(", N = %zu %s %.2f", ranks, start == SumStart::kNothing ? "first" : "further",
                  best);
    }
  }
  std::printf(" ns/parameter\n");
}

}  // namespace
}  // namespace offload::kernels

int main() {
  using namespace offload::kernels;
  std::printf("kernels: %s\n", IsaName(BestIsa()));
  Report<uint16_t>(Dtype::kBFloat16, "bf16");
  Report<float>(Dtype::kFloat32, "fp32");
}
