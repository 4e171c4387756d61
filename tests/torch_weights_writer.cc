// A trainer whose weights all have one value, replaced again and again by the next, until it is
// killed. Says on stdout, a JSON line each, what it found, began and ended.
//
// usage: weights_writer POOL JOB loads|edits|looks FOLDER
//
//   loads  LoadWeights of FOLDER/VALUE.safetensors, after steps that leave weights as they are
//   edits  torch operators, and a step that leaves weights as they are
//   looks  says what it finds, and ends
//
// Exit code 3: the weights that were found are not of one value.

#include <offload/torch.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kValues = 8;

// A matrix of many extents, vectors that share an extent, and one that is never updated.
struct Model : torch::nn::Module {
  Model() {
    const std::vector<std::vector<int64_t>> shapes = {{1100, 1024}, {300},     {7},
                                                      {512, 512},   {1000000}, {70001}};
    for (size_t i = 0; i < shapes.size(); ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::zeros(shapes[i]),
                                           /*requires_grad=*/i + 1 < shapes.size()));
    }
  }
  std::vector<torch::Tensor> weights;
};

class Writer {
 public:
  Writer(const std::string& pool, const std::string& job, std::string mode, std::string folder)
      : mode_(std::move(mode)), folder_(std::move(folder)) {
    offload::Options options;
    options.nvme_path = pool;
    options.ram = "64MiB";
    options.job = job;
    options.generations = 1;
    engine_ = offload::Engine::Open(options);
    model_ = std::make_shared<Model>();
    optimizer_ = engine_->AdamW(*model_, torch::optim::AdamWOptions(1e-3).weight_decay(0));
  }

  int Run() {
    const std::optional<int64_t> found = Value();
    if (!found.has_value()) return 3;
    Say("found", *found);
    for (int64_t value = *found; mode_ != "looks";) {
      value = (value + 1) % kValues;
      if (mode_ == "loads") Step();
      Say("begin", value);
      mode_ == "loads" ? Load(value) : Edit(value);
      Say("end", value);
    }
    return 0;
  }

 private:
  void Say(const char* event, int64_t value) {
    std::printf("{\"event\": \"%s\", \"value\": %ld, \"step\": %ld}\n", event, value,
                engine_->step());
    std::fflush(stdout);
  }

  // That all weights have; none when they differ.
  std::optional<int64_t> Value() {
    const torch::NoGradGuard no_grad;
    const auto value = engine_->Gather(model_->weights[0]).flatten()[0].item<float>();
    bool same = true;
    for (size_t i = 0; i < model_->weights.size(); ++i) {
      const torch::Tensor weight = engine_->Gather(model_->weights[i]);
      const auto least = weight.min().item<float>(), most = weight.max().item<float>();
      if (least == value && most == value) continue;
      std::fprintf(stderr, "weight %zu has values of %g to %g, weight 0 begins with %g\n", i, least,
                   most, value);
      same = false;
    }
    return same ? std::optional<int64_t>(static_cast<int64_t>(value)) : std::nullopt;
  }

  // With gradients of zero and moments of zero.
  void Step() {
    torch::Tensor loss = torch::zeros({});
    for (const torch::Tensor& weight : model_->weights) {
      if (weight.requires_grad()) loss = loss + weight.mul(0).sum();
    }
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  void Load(int64_t value) {
    engine_->LoadWeights(folder_ + "/" + std::to_string(value) + ".safetensors");
  }

  void Edit(int64_t value) {
    {
      const torch::NoGradGuard no_grad;
      for (torch::Tensor& weight : model_->weights) weight.fill_(value);
    }
    Step();
    engine_->WaitDurable();
  }

  const std::string mode_, folder_;
  std::shared_ptr<offload::Engine> engine_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: weights_writer POOL JOB loads|edits|looks FOLDER\n");
    return 2;
  }
  try {
    return Writer(argv[1], argv[2], argv[3], argv[4]).Run();
  } catch (const offload::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
