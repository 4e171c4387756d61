// A trainer that knows nothing of offload: a perceptron, SGD with momentum, a schedule of the
// learning rate.

#include "tests/plain_trainer_torch.h"

namespace {

struct PerceptronImpl : torch::nn::Module {
  PerceptronImpl() {
    hidden = register_module("hidden", torch::nn::Linear(64, 256));
    middle = register_module("middle", torch::nn::Linear(256, 256));
    out = register_module("out", torch::nn::Linear(256, 1));
    scale = register_parameter("scale", torch::ones({256}));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(hidden->forward(x)) * scale;
    return out->forward(torch::tanh(middle->forward(x)));
  }
  torch::nn::Linear hidden = nullptr, middle = nullptr, out = nullptr;
  torch::Tensor scale;
};
TORCH_MODULE(Perceptron);

torch::Tensor Loss(Perceptron& model, int step) {
  torch::manual_seed(100 + step);
  const torch::Tensor x = torch::randn({32, 64});
  return torch::mse_loss(model->forward(x), x.square().mean(1, true));
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = ParseArguments(argc, argv);
  torch::manual_seed(0);
  Perceptron model;
  if (!arguments.weights.empty()) torch::load(model, arguments.weights);
  torch::optim::SGD optimizer(
      model->parameters(),
      torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-4));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      for (auto& group : optimizer.param_groups()) group.options().set_lr(0.05 / (1 + step / 3));
      optimizer.zero_grad();
      const torch::Tensor loss = Loss(model, step);
      loss.backward();
      optimizer.step();
      PrintStep(step, loss);
    }
  }
  const torch::NoGradGuard no_grad;
  PrintEvaluation(Loss(model, 1000));
  torch::save(model, arguments.out);
}
