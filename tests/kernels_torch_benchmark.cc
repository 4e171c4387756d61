// Elements per second of the AdamW update beside at::_fused_adamw_ on the same tensor, at one
// thread and at two.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/update.h"

namespace offload::kernels {
namespace {

constexpr int64_t kCount = int64_t{1} << 25;
constexpr int kRepetitions = 7;

double SecondsOf(const std::function<void()>& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Tensors {
  at::Tensor weight = torch::randn({kCount}), gradient = torch::randn({kCount}),
             exp_avg = torch::zeros({kCount}), exp_avg_sq = torch::zeros({kCount}),
             step = torch::tensor(10.0f);
};

void UpdateWithTorch(Tensors* t) {
  at::_fused_adamw_({t->weight}, {t->gradient}, {t->exp_avg}, {t->exp_avg_sq}, {}, {t->step}, 1e-3,
                    0.9, 0.999, 0.01, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
}

void UpdateWithKernels(Tensors* t, int thread_count) {
  std::vector<std::thread> threads;
  for (int i = 0; i < thread_count; ++i) {
    threads.emplace_back([=] {
      const int64_t begin = kCount / thread_count * i;
      Run run;
      run.begin = begin;
      run.count = kCount / thread_count;
      run.tensor_count = kCount;
      run.weight = t->weight.data_ptr<float>() + begin;
      run.state[0] = t->exp_avg.data_ptr<float>() + begin;
      run.state[1] = t->exp_avg_sq.data_ptr<float>() + begin;
      run.gradient = t->gradient.data_ptr<float>() + begin;
      Update(OptimizerSpec(), 10, run);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The two in turn, so that a change in the machine's speed meets both; the best of each.
void Compare(int thread_count) {
  at::set_num_threads(thread_count);
  Tensors tensors;
  double torch_s = 1e9, kernels_s = 1e9;
  for (int i = 0; i < kRepetitions; ++i) {
    torch_s = std::min(torch_s, SecondsOf([&] { UpdateWithTorch(&tensors); }));
    kernels_s = std::min(kernels_s, SecondsOf([&] { UpdateWithKernels(&tensors, thread_count); }));
  }
  std::printf("%d threads: torch %.0f M elements/s, kernels (%s) %.0f M elements/s, ratio %.3f\n",
              thread_count, kCount / torch_s / 1e6, IsaName(BestIsa()), kCount / kernels_s / 1e6,
              torch_s / kernels_s);
}

}  // namespace
}  // namespace offload::kernels

int main() {
  for (const int thread_count : {1, 2}) offload::kernels::Compare(thread_count);
}
