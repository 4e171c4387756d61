// The attach of README.md around a small model: `attach_example DIR` trains ten steps with its
// state in DIR, and ten more when it is started again.

#include <offload/torch.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <iostream>
#include <string>

namespace {

torch::Tensor Batch(int64_t step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  return torch::randn({32, 256});
}

// Learns to give back what it is given.
torch::Tensor Loss(torch::nn::Sequential& model, const torch::Tensor& batch) {
  return (model->forward(batch) - batch).square().mean();
}

void Train(torch::nn::Sequential& model, const std::string& folder, int64_t more_steps) {
  // README.md shows from here
  offload::Options options;
  options.nvme_path = folder;                    // "/nvme0": on a drive with direct I/O
  options.ram = "8GiB";                          // what the offloaded state may hold in memory
  options.job = "example";                       // the same name resumes
  auto engine = offload::Engine::Open(options);  // the node's daemon, or a private one
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-4));

  const int64_t end = engine->step() + more_steps;
  for (int64_t step = engine->step(); step < end; ++step) {  // and the loop stays as it is
    Loss(model, Batch(step)).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer->step();
    optimizer->zero_grad();
  }
  // to here
  std::cout << "step " << engine->step() << ", loss " << Loss(model, Batch(0)).item<double>()
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    std::cerr << "usage: attach_example DIR, a folder on a drive" << std::endl;
    return 2;
  }
  try {
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(256, 1024), torch::nn::Linear(1024, 256));
    Train(model, argv[1], /*more_steps=*/10);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;  // begins with OFD-nnnn
    return 1;
  }
  return 0;
}
