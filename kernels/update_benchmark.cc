// Elements per second of the AdamW update at one thread and at two, beside a pass that only reads
// and rewrites the same bytes. On arrays that fit no cache, an update as fast as that pass is as
// fast as it can be.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/square_root.h"
#include "kernels/update.h"

namespace offload::kernels {
namespace {

constexpr size_t kCountPerThread = size_t{1} << 24;
constexpr int kRepetitions = 9;

// One thread's tensor. Constructed by that thread, so that its pages are near.
struct Planes {
  Planes() : words(4 * kCountPerThread), ties(kCountPerThread / 8), next_ties(ties.size()) {
    for (size_t i = 0; i < words.size(); ++i)
      words[i] = 1e-3f * static_cast<float>(i * 7919 % 1000003 + 1);
  }
  float* plane(size_t index) { return words.data() + index * kCountPerThread; }

  std::vector<float> words;
  std::vector<uint8_t> ties, next_ties;
};

// With roots of a library: a sixth of them is off by one place. By the sequence where the
// instruction set has it, else (and for kNone) from the table.
const uint32_t* LibraryRoots(RootSequence sequence) {
  static std::vector<uint32_t> corrections(SquareRoots::kWords, 0x00010030);
  corrections[SquareRoots::kSequenceWord] = static_cast<uint32_t>(sequence);
  return corrections.data();
}

void UpdateAs(Dtype dtype, float gradient_scale, Planes* planes,
              const OptimizerSpec& optimizer = OptimizerSpec(),
              RootSequence sequence = RootSequence::kNone) {
  TieReader reader{planes->ties.data()};
  TieWriter writer{planes->next_ties.data()};
  Run run;
  run.count = run.tensor_count = kCountPerThread;
  run.weight_dtype = run.gradient_dtype = dtype;
  run.weight = planes->plane(0);
  run.residual = reinterpret_cast<int16_t*>(planes->plane(0) + kCountPerThread / 2);
  run.half_residual = reinterpret_cast<uint32_t*>(planes->plane(0) + kCountPerThread / 2);
  run.state[0] = planes->plane(1);
  run.state[1] = planes->plane(2);
  run.gradient = planes->plane(3);
  run.gradient_scale = gradient_scale;
  run.ties_in = &reader;
  run.ties_out = &writer;
  if (optimizer.TakesLibraryRoots()) run.roots = LibraryRoots(sequence);
  Update(optimizer, 10, run);
  std::fill_n(planes->next_ties.begin(), writer.position / 8 + 1, uint8_t{0});
  std::swap(planes->ties, planes->next_ties);
}

// The bound: three planes read and rewritten, a fourth read.
void ReadModifyWrite(Planes* planes) {
  float *a = planes->plane(0), *b = planes->plane(1), *c = planes->plane(2);
  const float* d = planes->plane(3);
#pragma GCC ivdep
  for (size_t i = 0; i < kCountPerThread; ++i) {
    a[i] += d[i];
    b[i] += d[i];
    c[i] += d[i];
  }
}

using Pass = std::function<void(Planes*)>;

// The time of the fastest repetition, all threads beginning together.
double BestSeconds(std::vector<std::unique_ptr<Planes>>* tensors, const Pass& pass) {
  double best_s = 1e9;
  for (int i = 0; i < kRepetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (auto& planes : *tensors) threads.emplace_back([&] { pass(planes.get()); });
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    best_s = std::min(best_s, elapsed.count());
  }
  return best_s;
}

void Report(const char* name, size_t thread_count, int bytes_per_element, const Pass& pass) {
  std::vector<std::unique_ptr<Planes>> tensors(thread_count);
  std::vector<std::thread> threads;
  for (auto& planes : tensors) threads.emplace_back([&] { planes = std::make_unique<Planes>(); });
  for (std::thread& thread : threads) thread.join();
  const double rate =
      static_cast<double>(kCountPerThread * thread_count) / BestSeconds(&tensors, pass);
  std::printf("%-26s %zu threads %7.0f M elements/s %6.1f GB/s\n", name, thread_count, rate / 1e6,
              rate * bytes_per_element / 1e9);
}

}  // namespace
}  // namespace offload::kernels

int main() {
  using namespace offload::kernels;
  std::printf("kernels: %s\n", IsaName(BestIsa()));
  for (const size_t thread_count : {1, 2}) {
    Report("read, modify, write", thread_count, 28, ReadModifyWrite);
    Report("AdamW fp32", thread_count, 28,
           [](Planes* planes) { UpdateAs(Dtype::kFloat32, 1, planes); });
    Report("AdamW bf16", thread_count, 26,
           [](Planes* planes) { UpdateAs(Dtype::kBFloat16, 1, planes); });
    Report("AdamW bf16, clipped", thread_count, 26,
           [](Planes* planes) { UpdateAs(Dtype::kBFloat16, 0.5f, planes); });
    Report("AdamW fp16", thread_count, 28,
           [](Planes* planes) { UpdateAs(Dtype::kFloat16, 1, planes); });
    const OptimizerSpec unscaled("adamw", {{"unscale", 0.5}});
    Report("AdamW fp16, unscaled", thread_count, 28,
           [&](Planes* planes) { UpdateAs(Dtype::kFloat16, 1, planes, unscaled); });
    const OptimizerSpec unfused("adamw", {{"flavour", 2}});
    constexpr std::pair<const char*, RootSequence> kRoots[] = {
        {"AdamW bf16, table of roots", RootSequence::kNone},
        {"AdamW bf16, sequence of 12", RootSequence::kUnfused12},
        {"AdamW bf16, sequence of 14", RootSequence::kFused14}};
    for (const auto& [name, sequence] : kRoots) {
      Report(name, thread_count, 26, [&, sequence = sequence](Planes* planes) {
        UpdateAs(Dtype::kBFloat16, 1, planes, unfused, sequence);
      });
    }
  }
}
