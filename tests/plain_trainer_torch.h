// tests/plain_trainer_torch.h
//
// What the trainers that know nothing of offload have in common: their arguments, and lines in
// which a loss has all its bits.
//
//   trainer STEPS[,STEPS]... OUT [WEIGHTS]
//
// A trainer makes its model, loads WEIGHTS when there are any, makes its optimizer, runs its loop
// so often for each of STEPS, from the first batch each time, and goes on with model and optimizer;
// then it evaluates without gradients and saves the model to OUT.
#pragma once

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

struct Arguments {
  std::vector<int> loops;  // steps of each
  std::string out, weights;
};

inline Arguments ParseArguments(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s STEPS[,STEPS]... OUT [WEIGHTS]\n", argv[0]);
    std::exit(2);
  }
  Arguments arguments{.out = argv[2], .weights = argc > 3 ? argv[3] : ""};
  std::istringstream loops(argv[1]);
  for (std::string steps; std::getline(loops, steps, ',');)
    arguments.loops.push_back(std::atoi(steps.c_str()));
  torch::set_num_threads(1);
  return arguments;
}

inline void PrintStep(int step, const torch::Tensor& loss) {
  std::printf("step %d loss %a\n", step, loss.item<double>());
  std::fflush(stdout);
}

inline void PrintEvaluation(const torch::Tensor& loss) {
  std::printf("evaluation %a\n", loss.item<double>());
}
