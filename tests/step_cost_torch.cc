// usage: step_cost_…_torch STEPS
//
// Prints the processor time of a step in microseconds, and the last loss with all its bits.

#include "tests/step_cost_torch.h"

#include <time.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

namespace {

double ProcessorMicroseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 2000;
  torch::set_num_threads(1);
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 64),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  AttachWhereLinked(*model, optimizer);
  const torch::Tensor x = torch::randn({16, 64});
  torch::Tensor loss;
  const auto step = [&] {
    loss = torch::mse_loss(model->forward(x), x);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 0; i < 200; ++i) step();
  const double begin = ProcessorMicroseconds();
  for (int i = 0; i < steps; ++i) step();
  std::printf("%.2f %a\n", (ProcessorMicroseconds() - begin) / steps, loss.item<double>());
}
