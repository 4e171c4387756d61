// What offloading costs a step when everything is resident: a stack of perceptrons in memory and
// offloaded with room for all of it, in turns.
//
//   bazel run -c opt //tests:resident_torch_benchmark -- POOL [ROUNDS [DURABILITY [HIDDEN]]]
//
// Prints the medians of the two, and of their ratios, for hidden sizes 64, 512 and 2048, or the one
// that is given; the processor time of the trainer's process alone in brackets. The daemon's update
// runs beside it. Losses have to be equal: exit status 1 when they are not. Needs OFFLOADD_BINARY.

#include <offload/torch.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int kRows = 512, kStepsOfRound = 4;

struct Cost {
  double wall_ms = 0, processor_ms = 0;  // of a step
};

double ProcessorMilliseconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto milliseconds = [](const timeval& time) {
    return time.tv_sec * 1e3 + time.tv_usec / 1e3;
  };
  return milliseconds(usage.ru_utime) + milliseconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

torch::nn::Sequential MakeModel(int hidden) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  const int layers = hidden > 1024 ? 1 : 4;
  for (int layer = 0; layer < layers; ++layer) {
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
    model->push_back(torch::nn::Linear(hidden, 2 * hidden));
    model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Linear(2 * hidden, hidden));
  }
  return model;
}

// A model and its optimizer, which take steps when they are told to.
class Side {
 public:
  Side(torch::nn::Sequential model, std::unique_ptr<torch::optim::Optimizer> optimizer, int hidden)
      : model_(std::move(model)), optimizer_(std::move(optimizer)), hidden_(hidden) {}

  Cost Round() {
    const auto begin = std::chrono::steady_clock::now();
    const double processor_begin = ProcessorMilliseconds();
    for (int step = 0; step < kStepsOfRound; ++step) Step();
    const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now() - begin;
    return {wall.count() / kStepsOfRound,
            (ProcessorMilliseconds() - processor_begin) / kStepsOfRound};
  }
  const std::vector<double>& losses() const { return losses_; }

 private:
  void Step() {
    torch::manual_seed(losses_.size());
    const torch::Tensor x = torch::randn({kRows, hidden_});
    const torch::Tensor loss = torch::mse_loss(model_->forward(x), x.sin());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model_->parameters(), 1.0);
    optimizer_->step();
    optimizer_->zero_grad();
    losses_.push_back(loss.item<double>());
  }

  torch::nn::Sequential model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  const int hidden_;
  std::vector<double> losses_;
};

// True when the losses are equal.
bool Compare(const std::string& pool, int hidden, int rounds, const std::string& durability) {
  offload::Options options;
  options.nvme_path = pool;
  options.ram = "1GiB";
  options.durability = durability;
  options.job = "benchmark-resident-" + std::to_string(hidden);
  const auto engine = offload::Engine::Open(options);
  if (engine->step() != 0) {
    std::fprintf(stderr, "job %s is there already: offloadctl rm %s %s --yes\n",
                 options.job.c_str(), pool.c_str(), options.job.c_str());
    std::exit(1);
  }
  const torch::optim::AdamWOptions adamw(1e-4);
  torch::nn::Sequential in_memory_model = MakeModel(hidden), offloaded_model = MakeModel(hidden);
  Side in_memory(in_memory_model,
                 std::make_unique<torch::optim::AdamW>(in_memory_model->parameters(), adamw),
                 hidden);
  Side offloaded(offloaded_model, engine->AdamW(*offloaded_model, adamw), hidden);
  in_memory.Round();  // warm
  offloaded.Round();
  std::vector<double> memory_ms, here_ms, ratios, processor_ratios;
  for (int round = 0; round < rounds; ++round) {
    const Cost memory = in_memory.Round(), here = offloaded.Round();
    memory_ms.push_back(memory.wall_ms);
    here_ms.push_back(here.wall_ms);
    ratios.push_back(here.wall_ms / memory.wall_ms);
    processor_ratios.push_back(here.processor_ms / memory.processor_ms);
  }
  const bool equal = in_memory.losses() == offloaded.losses();
  const offload::PlanSummary plan = engine->plan();
  std::printf(
      "hidden %d, %.1f M parameters, gradients %s: in memory %.2f ms, offloaded %.2f ms a step, "
      "median of %d ratios %.3f [%.3f], losses %s\n",
      hidden, plan.parameters / 1e6, plan.gradients_spilled ? "spilled" : "in memory",
      Median(memory_ms), Median(here_ms), rounds, Median(ratios), Median(processor_ratios),
      equal ? "equal" : "DIFFERENT");
  return equal;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s POOL [ROUNDS [DURABILITY [HIDDEN]]]\n", argv[0]);
    return 2;
  }
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  const std::string durability = argc > 3 ? argv[3] : "step";
  bool equal = true;
  const std::vector<int> sizes =
      argc > 4 ? std::vector<int>{std::atoi(argv[4])} : std::vector<int>{64, 512, 2048};
  for (const int hidden : sizes) equal &= Compare(argv[1], hidden, rounds, durability);
  return equal ? 0 : 1;
}
