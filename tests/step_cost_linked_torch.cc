#include <offload/torch.h>

#include <memory>

#include "tests/step_cost_torch.h"

void AttachWhereLinked(torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  static std::shared_ptr<offload::Engine> engine;
  engine = offload::Engine::Open(offload::Options::FromEnvironment());
  engine->Attach(module, optimizer);
}
