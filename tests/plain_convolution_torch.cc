// A trainer that knows nothing of offload: convolutions with batch norm and dropout, a frozen stem,
// Adam with AMSGrad, a scheduler of torch's.

#include "tests/plain_trainer_torch.h"

namespace {

torch::nn::Sequential MakeModel() {
  using namespace torch::nn;  // NOLINT
  Sequential model(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(),
                   Conv2d(Conv2dOptions(8, 64, 3).padding(1)), BatchNorm2d(64), ReLU(),
                   MaxPool2d(2), Conv2d(Conv2dOptions(64, 64, 3).padding(1).bias(false)),
                   BatchNorm2d(64), ReLU(), AdaptiveAvgPool2d(1), Flatten(), Dropout(0.1),
                   Linear(64, 10));
  for (auto& parameter : model->ptr(0)->parameters()) parameter.requires_grad_(false);
  return model;
}

torch::Tensor Loss(torch::nn::Sequential& model, int step) {
  torch::manual_seed(100 + step);
  const torch::Tensor images = torch::randn({4, 3, 12, 12}), labels = torch::randint(10, {4});
  return torch::nll_loss(torch::log_softmax(model->forward(images), 1), labels);
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = ParseArguments(argc, argv);
  torch::manual_seed(0);
  torch::nn::Sequential model = MakeModel();
  if (!arguments.weights.empty()) torch::load(model, arguments.weights);
  std::vector<torch::Tensor> trained;
  for (const torch::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  torch::optim::Adam optimizer(trained, torch::optim::AdamOptions(1e-2).amsgrad(true));
  for (const int steps : arguments.loops) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(1e-2);
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5);
    model->train();
    for (int step = 0; step < steps; ++step) {
      const torch::Tensor loss = Loss(model, step);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      scheduler.step();
      PrintStep(step, loss);
    }
  }
  model->eval();
  {
    const torch::NoGradGuard no_grad;
    PrintEvaluation(Loss(model, 1000));
  }
  torch::save(model, arguments.out);
}
