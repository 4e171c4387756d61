// A trainer outside of offload's tree: `trainer DIR` trains a small model, five steps with each
// start, with its state in DIR. Built with CMake alone (CMakeLists.txt).

#include <offload/torch.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <exception>
#include <string>

namespace {

void Train(const std::string& folder) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(64, 512), torch::nn::Tanh(),
                              torch::nn::Linear(512, 64));

  offload::Options options;
  options.nvme_path = folder;
  options.ram = "64MiB";
  options.job = "cmake-example";
  auto engine = offload::Engine::Open(options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  engine->Attach(*model, optimizer);  // the trainer keeps its own

  const int64_t end = engine->step() + 5;
  for (int64_t step = engine->step(); step < end; ++step) {
    torch::manual_seed(static_cast<uint64_t>(100 + step));
    const torch::Tensor batch = torch::randn({16, 64});
    const torch::Tensor loss = (model->forward(batch) - batch).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    std::printf("step %lld loss %.9g\n", static_cast<long long>(step + 1), loss.item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    std::fprintf(stderr, "usage: trainer DIR, a folder on a drive\n");
    return 2;
  }
  try {
    Train(argv[1]);
  } catch (const offload::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());  // begins with OFD-nnnn, ends with the way out
    return 1;
  }
  return 0;
}
