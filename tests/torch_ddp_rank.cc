// A rank of the trainer that tests/ddp_test.py writes in Python, too, with DistributedDataParallel:
// the same operators on the same numbers, so that what differs is how gradients are reduced. Writes
// norm and weights after each step into a file of fp32 numbers.
//
// usage: ddp_rank POOL JOB STEPS MICRO_BATCHES OUTPUT

#include <ATen/Parallel.h>
#include <offload/torch.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>

namespace offload {
namespace {

constexpr int64_t kWidth = 64, kInner = 512, kRows = 4;

struct Model : torch::nn::Module {
  Model() {
    up = register_parameter("up", torch::randn({kInner, kWidth}) * 0.1);
    down = register_parameter("down", torch::randn({kWidth, kInner}) * 0.1);
    bias = register_parameter("bias", torch::zeros({kWidth}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + torch::linear(torch::tanh(torch::linear(x, up)), down, bias);
  }
  torch::Tensor up, down, bias;
};

void Write(std::ofstream& file, const torch::Tensor& values) {
  const torch::Tensor plain = values.contiguous();
  file.write(reinterpret_cast<const char*>(plain.const_data_ptr<float>()),
             plain.numel() * static_cast<int64_t>(sizeof(float)));
}

void Train(const std::string& pool, const std::string& job, int64_t steps, int64_t micro_batches,
           const std::string& output) {
  at::set_num_threads(1);
  Options options;
  options.nvme_path = pool;
  options.job = job;
  options.ram = "64MiB";
  const std::shared_ptr<Engine> engine = Engine::Open(options);
  torch::manual_seed(3);
  auto model = std::make_shared<Model>();
  // The other side is Python's.
  const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2).weight_decay(0.1),
                                       AdamWFlavour::kLerp);
  std::ofstream file(output, std::ios::binary);
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      torch::manual_seed((step * 10 + micro_batch) * 10 + engine->rank());
      const torch::Tensor x = torch::randn({kRows, kWidth}), y = torch::randn({kRows, kWidth});
      (torch::mse_loss(model->forward(x), y) / static_cast<double>(micro_batches)).backward();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    optimizer->step();
    optimizer->zero_grad();
    if (engine->rank() != 0) continue;
    Write(file, torch::full({1}, norm, at::kFloat));
    for (const torch::Tensor& parameter : model->parameters())
      Write(file, engine->Gather(parameter));
  }
}

}  // namespace
}  // namespace offload

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: ddp_rank POOL JOB STEPS MICRO_BATCHES OUTPUT" << std::endl;
    return 2;
  }
  try {
    offload::Train(argv[1], argv[2], std::atoll(argv[3]), std::atoll(argv[4]), argv[5]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
