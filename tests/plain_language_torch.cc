// A trainer that knows nothing of offload: an embedding, an LSTM and a decoder, AdamW with two
// groups, several micro-batches a step, gradients that are clipped.

#include "tests/plain_trainer_torch.h"

namespace {

constexpr int kWords = 512, kWidth = 96;

struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl()
      : words(register_module("words", torch::nn::Embedding(kWords, kWidth))),
        lstm(register_module("lstm", torch::nn::LSTM(kWidth, kWidth))),
        decoder(register_module("decoder", torch::nn::Linear(kWidth, kWords))) {
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() > 1) torch::nn::init::xavier_uniform_(parameter.value());
    }
  }
  torch::Tensor forward(const torch::Tensor& text) {
    return decoder->forward(std::get<0>(lstm->forward(words->forward(text))));
  }
  torch::nn::Embedding words;
  torch::nn::LSTM lstm;
  torch::nn::Linear decoder;
};
TORCH_MODULE(LanguageModel);

torch::Tensor Loss(LanguageModel& model, int batch) {
  torch::manual_seed(100 + batch);
  const torch::Tensor text = torch::randint(kWords, {9, 2});
  const torch::Tensor guesses = model->forward(text.slice(0, 0, 8));
  return torch::nn::functional::cross_entropy(guesses.reshape({-1, kWords}),
                                              text.slice(0, 1).reshape({-1}));
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = ParseArguments(argc, argv);
  torch::manual_seed(0);
  auto model = std::make_shared<LanguageModel>();
  if (!arguments.weights.empty()) torch::load(*model, arguments.weights);
  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : (*model)->parameters())
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(
                                   torch::optim::AdamWOptions(3e-3).weight_decay(0)));
  auto optimizer = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-3));
  {
    const torch::NoGradGuard no_grad;
    PrintEvaluation(Loss(*model, 1000));
  }
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
      torch::Tensor sum = torch::zeros({});
      for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
        const torch::Tensor loss = Loss(*model, 3 * step + micro_batch) / 3;
        loss.backward();
        sum += loss.detach();
      }
      torch::nn::utils::clip_grad_norm_((*model)->parameters(), 0.5);
      optimizer->step();
      PrintStep(step, sum);
    }
  }
  const torch::NoGradGuard no_grad;
  PrintEvaluation(Loss(*model, 1000));
  torch::save(*model, arguments.out);
}
