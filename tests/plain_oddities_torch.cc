// Programs that know nothing of offload and do what fewer trainers do: STEPS OUT NAME, where other
// trainers have a file with weights.

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "tests/plain_trainer_torch.h"

namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::optim::SGD;

Tensor Loss(Linear& model, int step) {
  torch::manual_seed(100 + step);
  return model->forward(torch::randn({4, 64})).square().mean();
}

void Train(Linear& model, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = Loss(model, step);
    loss.backward();
    optimizer.step();
    PrintStep(step, loss);
  }
}

// Two models, two optimizers, which are moved into a vector and within it.
void Adversaries(const Arguments& arguments) {
  Linear generator(16, 64), critic(64, 1);
  std::vector<SGD> optimizers;
  optimizers.emplace_back(generator->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  optimizers.emplace_back(critic->parameters(), torch::optim::SGDOptions(2e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    torch::manual_seed(100 + step);
    const Tensor made = generator->forward(torch::randn({4, 16}));
    const Tensor critic_loss =
        critic->forward(made.detach()).mean() - critic->forward(torch::randn({4, 64})).mean();
    optimizers[1].zero_grad();
    critic_loss.backward();
    optimizers[1].step();
    optimizers[0].zero_grad();
    const Tensor generator_loss = -critic->forward(made).mean();
    generator_loss.backward();
    optimizers[0].step();
    PrintStep(step, critic_loss + generator_loss);
  }
}

// A thread for each of two models, which share nothing.
void Threads(const Arguments& arguments) {
  std::vector<Linear> models = {Linear(64, 64), Linear(64, 64)};
  std::vector<std::unique_ptr<SGD>> optimizers;
  for (Linear& model : models)
    optimizers.push_back(
        std::make_unique<SGD>(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9)));
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      for (int step = 0; step < 20 * arguments.loops.front(); ++step) {
        const Tensor x = torch::full({4, 64}, 0.01 * (step % 7 + i));
        models[i]->forward(x).square().mean().backward();
        optimizers[i]->step();
        optimizers[i]->zero_grad();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (Linear& model : models) PrintEvaluation(Loss(model, 0));
}

// Models are made and moved, each with its optimizer behind it.
void InTurn(const Arguments& arguments) {
  std::vector<Linear> models;
  std::vector<std::unique_ptr<SGD>> optimizers;
  for (int i = 0; i < 3; ++i) {
    models.emplace_back(64, 64);
    models.back()->to(torch::kCPU);
    models.back()->to(torch::kCPU, torch::kFloat);
    models.back()->to(torch::kFloat);
    optimizers.push_back(std::make_unique<SGD>(models.back()->parameters(),
                                               torch::optim::SGDOptions(1e-2).momentum(0.9)));
  }
  for (int i = 0; i < 3; ++i) Train(models[i], *optimizers[i], arguments.loops.front());
}

// A second model, made when the first one is trained.
void Late(const Arguments& arguments) {
  for (int i = 0; i < 2; ++i) {
    Linear model(64, 64);
    SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
    Train(model, optimizer, arguments.loops.front());
  }
}

// What teaches is made and used without gradients of any kind.
void Inference(const Arguments& arguments) {
  Linear teacher(nullptr);
  {
    const c10::InferenceMode inference;
    teacher = Linear(64, 64);
  }
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    torch::manual_seed(100 + step);
    const Tensor x = torch::randn({4, 64});
    Tensor y;
    {
      const c10::InferenceMode inference;
      y = teacher->forward(x);
    }
    const Tensor loss = (model->forward(x) - y.clone()).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    PrintStep(step, loss);
  }
}

// The optimizer has a tensor that no module knows, and uses it by an operator of its own first.
void FreeTensor(const Arguments& arguments) {
  Tensor weight = torch::randn({64, 8}).requires_grad_(true);
  torch::optim::Adagrad optimizer({weight}, torch::optim::AdagradOptions(1e-2));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    torch::manual_seed(100 + step);
    const Tensor loss = torch::mm(torch::randn({4, 64}), weight).square().mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    PrintStep(step, loss);
  }
}

// An optimizer is replaced by another before anything is trained; a copy of the model is kept.
void Replaced(const Arguments& arguments) {
  Linear model(64, 64);
  auto optimizer = std::make_unique<SGD>(model->parameters(), torch::optim::SGDOptions(1));
  optimizer = std::make_unique<SGD>(model->parameters(), torch::optim::SGDOptions(1e-2));
  auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->clone());
  Train(model, *optimizer, arguments.loops.front());
  Linear kept(copy);
  PrintEvaluation(Loss(kept, 0));
}

// Phases of a training, each with an optimizer of its own. All of the parameters come late to the
// last one.
void Phases(const Arguments& arguments) {
  Linear model(64, 64);
  for (const double lr : {1e-2, 1e-3}) {
    SGD optimizer(model->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
    Train(model, optimizer, arguments.loops.front());
  }
  auto optimizer = std::make_unique<SGD>(model->parameters(), torch::optim::SGDOptions(1e-2));
  optimizer = std::make_unique<SGD>(std::vector{model->weight},
                                    torch::optim::SGDOptions(1e-2).momentum(0.5));
  Train(model, *optimizer, arguments.loops.front());
  optimizer->add_param_group(torch::optim::OptimizerParamGroup({model->bias}));
  Train(model, *optimizer, arguments.loops.front());
  optimizer->param_groups().erase(optimizer->param_groups().begin());
  Train(model, *optimizer, arguments.loops.front());
}

// Fine tuning by a method of the second order.
void AdamThenLbfgs(const Arguments& arguments) {
  Linear model(64, 64);
  torch::optim::Adam first(model->parameters(), torch::optim::AdamOptions(1e-2));
  Train(model, first, arguments.loops.front() - 1);
  torch::optim::LBFGS second(model->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  PrintStep(arguments.loops.front(), second.step([&] {
    second.zero_grad();
    const Tensor loss = Loss(model, 7);
    loss.backward();
    return loss;
  }));
}

// Two over the same parameters, in turn.
template <class Slow, class Options>
void Alternate(const Arguments& arguments, const Options& options, bool looks = false) {
  Linear model(64, 64);
  SGD fast(model->parameters(), torch::optim::SGDOptions(1e-1).momentum(0.9));
  auto slow = std::make_unique<Slow>(model->parameters(), options);
  Slow moved(std::move(*slow));
  slow.reset();
  if (looks && !fast.state().empty()) std::abort();
  for (int round = 0; round < arguments.loops.front(); ++round) {
    Train(model, fast, 1);
    Train(model, moved, 1);
  }
}
void Alternating(const Arguments& arguments) {
  Alternate<SGD>(arguments, torch::optim::SGDOptions(1e-3).momentum(0.5));
}
void AlternatingKinds(const Arguments& arguments) {
  Alternate<torch::optim::Adam>(arguments, torch::optim::AdamOptions(1e-3));
}
void AlternatingLooked(const Arguments& arguments) {
  Alternate<SGD>(arguments, torch::optim::SGDOptions(1e-3), /*looks=*/true);
}

void Lbfgs(const Arguments& arguments) {
  Linear model(64, 64);
  torch::optim::LBFGS optimizer(model->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  for (const int count : arguments.loops) {
    for (int step = 0; step < count; ++step) {
      PrintStep(step, optimizer.step([&] {
        optimizer.zero_grad();
        const Tensor loss = Loss(model, step);
        loss.backward();
        return loss;
      }));
    }
  }
}

void SavedOptimizer(const Arguments& arguments) {
  Linear model(64, 64);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  Train(model, optimizer, arguments.loops.front());
  torch::save(optimizer, arguments.out);
}

// Looks at what the optimizer keeps, and changes it.
void OwnState(const Arguments& arguments) {
  Linear model(64, 64);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    optimizer.zero_grad();
    Loss(model, step).backward();
    optimizer.step();
    Tensor sum = torch::zeros({});
    for (const Tensor& parameter : model->parameters()) {
      auto& state = static_cast<torch::optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      sum = sum + state.exp_avg().abs().sum() + state.exp_avg_sq().sum() + state.step();
      if (step == 1) state.exp_avg().mul_(0.5);
    }
    PrintStep(step, sum);
  }
}

// Reads the file of the other.
void LoadedOptimizer(const Arguments& arguments) {
  Linear model(64, 64);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1));
  torch::load(optimizer, arguments.out);
  Train(model, optimizer, arguments.loops.front());
}

// One optimizer after another, each of which reads what the last has written.
void OneAfterAnother(const Arguments& arguments) {
  Linear model(64, 64);
  const auto make = [&model] {
    return std::make_unique<SGD>(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  };
  auto optimizer = make();
  for (const int steps : arguments.loops) {
    Train(model, *optimizer, steps);
    torch::save(*optimizer, arguments.out);
    optimizer.reset();
    optimizer = make();
    torch::load(*optimizer, arguments.out);
    Train(model, *optimizer, steps);
  }
}

// Memory of this process beside files, in KiB.
int64_t OwnMemory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8));
  }
  return 0;
}
void AnewForEachStep(const Arguments& arguments) {
  Linear model(64, 64);
  int64_t before = 0;
  for (int step = 0; step < arguments.loops.front(); ++step) {
    SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    Train(model, optimizer, 1);
    if (step == arguments.loops.front() / 5) before = OwnMemory();
  }
  std::cout << "grown " << OwnMemory() - before << " KiB\n";
}

class OwnSgd final : public SGD {
 public:
  using SGD::SGD;
  Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : param_groups().front().params())
      Tensor(parameter).add_(parameter.grad(), -1e-2);
    return {};
  }
};
void OwnOptimizer(const Arguments& arguments) {
  Linear model(64, 64);
  OwnSgd optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  Train(model, optimizer, arguments.loops.front());
}

// Its step does more than that of torch's class.
class Clipping final : public torch::optim::Adam {
 public:
  using Adam::Adam;
  Tensor step(LossClosure closure = nullptr) override {
    torch::nn::utils::clip_grad_norm_(param_groups().front().params(), 0.1);
    {
      const torch::NoGradGuard no_grad;
      for (Tensor& parameter : param_groups().front().params()) parameter.mul_(0.99);
    }
    return Adam::step(std::move(closure));
  }
};
void Derived(const Arguments& arguments) {
  Linear model(64, 64);
  Clipping optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  Train(model, optimizer, arguments.loops.front());
}

// A closure sets the rate, and gives the optimizer another group.
void Closures(const Arguments& arguments) {
  Linear model(64, 64), head(64, 64);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    const Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      optimizer.param_groups().front().options().set_lr(step % 2 == 0 ? 1e-2 : 1e-3);
      if (step == 2)
        optimizer.add_param_group(torch::optim::OptimizerParamGroup(head->parameters()));
      Tensor value = (head->forward(model->forward(torch::randn({4, 64}))) - 1).square().mean();
      value.backward();
      return value;
    });
    PrintStep(step, loss);
  }
}

// Nobody asks the optimizer for anything but its own step.
void OwnStep(const Arguments& arguments) {
  Linear model(64, 64);
  OwnSgd optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    const Tensor loss = Loss(model, step);
    loss.backward();
    optimizer.step();
    model->zero_grad();
    PrintStep(step, loss);
  }
}

void NoOptimizer(const Arguments&) {
  Linear model(64, 64);
  PrintEvaluation(Loss(model, 0));
}

// Their buffers of momentum are sparse.
void SparseTables(const Arguments& arguments) {
  torch::manual_seed(3);
  torch::nn::Embedding words(torch::nn::EmbeddingOptions(300, 64).sparse(true));
  torch::nn::EmbeddingBag bags(
      torch::nn::EmbeddingBagOptions(50, 64).sparse(true).mode(torch::kSum));
  std::vector<Tensor> parameters = words->parameters();
  parameters.push_back(bags->weight);
  SGD optimizer(parameters, torch::optim::SGDOptions(0.5).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    torch::manual_seed(100 + step);
    optimizer.zero_grad();
    const Tensor loss =
        (words(torch::randint(40, {32})) + bags(torch::randint(30, {32, 3}))).square().mean();
    loss.backward();
    optimizer.step();
    PrintStep(step, loss);
  }
}

// A gradient that its optimizer takes in memory only: the program goes on without the steps.
void RefusedSteps(const Arguments& arguments) {
  torch::manual_seed(3);
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    optimizer.zero_grad();
    torch::embedding(model->weight, torch::arange(5), /*padding_idx=*/-1,
                     /*scale_grad_by_freq=*/false, /*sparse=*/true)
        .square()
        .mean()
        .backward();
    try {
      optimizer.step();
    } catch (const std::exception& error) {
      std::cout << error.what() << "\n";
    }
  }
}

void DoublePrecision(const Arguments& arguments) {
  Linear model(64, 64);
  model->to(torch::kDouble);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    const Tensor loss = model->forward(torch::randn({4, 64}, torch::kDouble)).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    PrintStep(step, loss);
  }
}

// Weights of 16 bits beside others: half of them is thawed for the second phase.
void SixteenBits(const Arguments& arguments) {
  Linear model(64, 64), head(64, 64), exact(64, 64);
  model->to(torch::kBFloat16);
  head->to(torch::kBFloat16);
  for (const Tensor& parameter : head->parameters()) parameter.requires_grad_(false);
  std::vector<Tensor> parameters;
  for (const Linear& part : {model, head, exact}) {
    for (const Tensor& parameter : part->parameters()) parameters.push_back(parameter);
  }
  for (int phase = 0; phase < 2; ++phase) {
    SGD optimizer(parameters, torch::optim::SGDOptions(1e-2).momentum(0.9));
    for (int step = 0; step < arguments.loops.front(); ++step) {
      const Tensor x = torch::randn({4, 64}, torch::kBFloat16);
      const Tensor loss =
          exact->forward(head->forward(model->forward(x)).to(torch::kFloat)).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      PrintStep(step, loss);
    }
    for (const Tensor& parameter : head->parameters()) parameter.requires_grad_(true);
  }
}

// They are read only, and what is trained has 32 bits.
void SixteenBitsRead(const Arguments& arguments) {
  Linear model(64, 64), head(64, 64);
  model->to(torch::kBFloat16);
  for (const Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
  std::vector<Tensor> parameters = model->parameters();
  for (const Tensor& parameter : head->parameters()) parameters.push_back(parameter);
  SGD optimizer(parameters, torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    const Tensor x = torch::randn({4, 64}, torch::kBFloat16);
    const Tensor loss = head->forward(model->forward(x).to(torch::kFloat)).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    PrintStep(step, loss);
  }
}

// LBFGS has no masters.
void SixteenBitsSearched(const Arguments& arguments) {
  Linear model(64, 64);
  model->to(torch::kBFloat16);
  torch::optim::LBFGS optimizer(model->parameters(), torch::optim::LBFGSOptions(1e-1).max_iter(4));
  const Tensor x = torch::randn({4, 64}, torch::kBFloat16);
  for (int step = 0; step < arguments.loops.front(); ++step) {
    const Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      Tensor value = (model->forward(x) - 1).square().mean();
      value.backward();
      return value;
    });
    PrintStep(step, loss);
  }
}

// Steps from one number to another, which begin with the files of the steps before.
void SixteenBitsOfFiles(const Arguments& arguments) {
  Linear model(64, 64);
  model->to(torch::kBFloat16);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-3));
  if (arguments.loops[0] > 0) {
    torch::load(model, arguments.out + ".model");
    torch::load(optimizer, arguments.out + ".optimizer");
  }
  for (int step = arguments.loops[0]; step < arguments.loops[1]; ++step) {
    torch::manual_seed(step);
    const Tensor loss =
        (model->forward(torch::randn({4, 64}, torch::kBFloat16)) - 1).square().mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    PrintStep(step, loss);
  }
  torch::save(model, arguments.out + ".model");
  torch::save(optimizer, arguments.out + ".optimizer");
}

// A forward pass that writes a buffer before it has gradients.
void PowerIteration(const Arguments& arguments) {
  struct Normed : torch::nn::Module {
    Linear layer = register_module("layer", Linear(64, 64));
    Tensor u = register_buffer("u", torch::ones({64}));
  };
  const auto model = std::make_shared<Normed>();
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      torch::manual_seed(100 + step);
      {
        const torch::NoGradGuard no_grad;
        const Tensor next = model->layer->weight.mv(model->layer->weight.t().mv(model->u));
        model->u.copy_(next / next.norm());
      }
      const Tensor norm = model->u.dot(model->layer->weight.mv(model->u));
      const Tensor loss = (model->layer->forward(torch::randn({4, 64})) / norm).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      PrintStep(step, loss);
    }
  }
}

void ComplexWeights(const Arguments&) {
  Linear model(64, 64);
  model->to(torch::kComplexFloat);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  model->forward(torch::randn({4, 64}, torch::kComplexFloat)).abs().sum().backward();
  optimizer.step();
}

// An autograd function of the program's own: operators in it run without gradients.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight) {
    context->save_for_backward({x});
    return x.mm(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {Tensor(), context->get_saved_variables()[0].t().mm(gradients[0])};
  }
};
void OwnFunction(const Arguments& arguments) {
  Tensor weight = torch::randn({64, 8}).requires_grad_(true);
  SGD optimizer({weight}, torch::optim::SGDOptions(1e-2));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      torch::manual_seed(100 + step);
      const Tensor loss = OwnLinear::apply(torch::randn({4, 64}), weight).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      PrintStep(step, loss);
    }
  }
}

// The same in two pieces, which keep nothing and are computed anew in the backward. The weight is
// among no inputs of theirs.
struct ComputedAnew : torch::autograd::Function<ComputedAnew> {
  static Tensor Compute(const Tensor& x, const Tensor& weight) { return x.mm(weight).tanh(); }
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor* weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return Compute(x, *weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    const auto* const weight =
        reinterpret_cast<const Tensor*>(context->saved_data["weight"].toInt());
    const torch::AutoGradMode grad(true);
    torch::autograd::backward({Compute(x, *weight)}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};
void PiecesComputedAnew(const Arguments& arguments) {
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      torch::manual_seed(100 + step);
      const Tensor x = torch::randn({4, 64}).requires_grad_(true);
      const Tensor first = ComputedAnew::apply(x, &model->weight);
      const Tensor loss = ComputedAnew::apply(first, &model->weight).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      PrintStep(step, loss);
    }
  }
}

// Its rows are shortened before they are looked up.
void EmbeddingOfLargestNorm(const Arguments& arguments) {
  torch::nn::Embedding model(torch::nn::EmbeddingOptions(100, 16).max_norm(1.0));
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      torch::manual_seed(100 + step);
      const Tensor loss = (model->forward(torch::randint(100, {20})) - 1).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      PrintStep(step, loss);
    }
  }
}

// Each step begins with an edit, the way of NAME: of the weight itself, or of what data() gives.
void EditedFirst(const Arguments& arguments) {
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      if (arguments.weights == "masked_first") {
        const torch::NoGradGuard no_grad;
        model->weight.mul_(0.9);
      } else {
        model->weight.data().clamp_(-0.1, 0.1);
      }
      optimizer.zero_grad();
      const Tensor loss = Loss(model, step);
      loss.backward();
      optimizer.step();
      PrintStep(step, loss);
    }
  }
}

// A reinforcement learner: what its policy does without gradients, in one of torch's two ways, and
// with running statistics of what it sees, it learns from afterwards.
struct Policy : torch::nn::Module {
  Policy() {
    register_module("act", act);
    seen = register_buffer("seen", torch::zeros({64}));
  }
  Tensor forward(const Tensor& x) { return act(x - seen); }
  Linear act{64, 8};
  Tensor seen;
};
void Rollout(const Arguments& arguments) {
  Policy policy;
  torch::optim::Adam optimizer(policy.parameters(), torch::optim::AdamOptions(1e-2));
  for (const int steps : arguments.loops) {
    for (int step = 0; step < steps; ++step) {
      torch::manual_seed(100 + step);
      const Tensor x = torch::randn({4, 64});
      Tensor taken;
      if (arguments.weights == "rollout") {
        const torch::NoGradGuard no_grad;
        policy.seen.lerp_(x.mean(0), 0.1);
        taken = policy.forward(x).argmax(1);
      } else {
        const c10::InferenceMode inference;
        taken = policy.forward(x).argmax(1);
      }
      const Tensor chances = torch::log_softmax(policy.forward(x), 1);
      const Tensor loss = -(chances.gather(1, taken.clone().unsqueeze(1)) * x.sum(1, true)).mean();
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      PrintStep(step, loss);
    }
  }
}

// Gradients that no backward pass has made.
void AssignedGradients(const Arguments& arguments) {
  Linear model(64, 64);
  SGD optimizer({model->weight}, torch::optim::SGDOptions(1e-2));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    model->weight.mutable_grad() = torch::full({64, 64}, 0.1 * step);
    optimizer.step();
    PrintStep(step, model->weight.mean());
  }
}

// Says on standard error how much memory the process has, when the model is made and once it has
// trained.
void Large(const Arguments& arguments) {
  const auto say_memory = [](const char* when) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) std::cerr << when << " " << line << std::endl;
    }
  };
  say_memory("begun");
  Linear first(64, 4096), second(4096, 2048), last(2048, 64);
  say_memory("made");
  torch::optim::RMSprop optimizer(torch::nn::Sequential(first, second, last)->parameters(),
                                  torch::optim::RMSpropOptions(1e-3));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    torch::manual_seed(100 + step);
    const Tensor x = torch::randn({4, 64});
    const Tensor loss = (last->forward(second->forward(first->forward(x))) - x).square().mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    PrintStep(step, loss);
  }
  say_memory("trained");
}

// A global looks at its model when the program ends, and saves what its optimizer keeps.
struct Last {
  Linear model{nullptr};
  std::unique_ptr<torch::optim::Adam> optimizer;
  ~Last() {
    if (model.is_empty()) return;
    PrintEvaluation(model->weight.detach().clone().sum());
    std::stringstream file;
    torch::save(*optimizer, file);
    torch::optim::Adam copy(std::vector<Tensor>{model->weight});
    torch::load(copy, file);
    for (const auto& [key, state] : copy.state())
      PrintEvaluation(static_cast<torch::optim::AdamParamState&>(*state).exp_avg().abs().sum());
  }
} last;
void UsedAtTheEnd(const Arguments& arguments) {
  last.model = Linear(64, 64);
  last.optimizer = std::make_unique<torch::optim::Adam>(std::vector<Tensor>{last.model->weight});
  Train(last.model, *last.optimizer, arguments.loops.front());
}

void Environment(const Arguments&) {
  std::fflush(stdout);
  if (std::system("echo LD_PRELOAD is $LD_PRELOAD") != 0) std::exit(3);
  const pid_t child = ::fork();
  if (child == 0) std::exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  std::printf("child %d\n", status);
}

// A child trains while the program waits for it, or after the program has ended.
void InChild(const Arguments& arguments, bool waits) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child != 0) {
    int status = 0;
    if (waits) ::waitpid(child, &status, 0);
    std::exit(WEXITSTATUS(status));
  }
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  Train(model, optimizer, arguments.loops.front());
  std::exit(0);
}

// What it takes when the models are made, have been cast, or loaded, it reads and writes until the
// end.
void Pointers(const Arguments& arguments) {
  Linear model(64, 64), exact(64, 64), loaded(64, 64);
  exact->to(torch::kDouble);
  std::stringstream file;
  torch::save(Linear(64, 64), file);
  torch::load(loaded, file);
  const float* const last = loaded->weight.data_ptr<float>();
  auto weight = model->weight.accessor<float, 2>();
  Tensor bias = torch::from_blob(model->bias.data_ptr<float>(), {64});
  double* const first = exact->weight.data_ptr<double>();
  first[1] = 0.5;
  std::vector<Tensor> parameters = model->parameters();
  for (const Linear& other : {exact, loaded}) {
    for (const Tensor& parameter : other->parameters()) parameters.push_back(parameter);
  }
  SGD optimizer(parameters, torch::optim::SGDOptions(1e-2).momentum(0.9));
  for (int step = 0; step < arguments.loops.front(); ++step) {
    optimizer.zero_grad();
    const Tensor loss =
        exact
            ->forward(torch::tanh(model->forward(loaded->forward(torch::randn({4, 64}))))
                          .to(torch::kDouble))
            .square()
            .mean();
    loss.backward();
    optimizer.step();
    weight[step][0] *= 0.5f;
    bias.mul_(0.75);
    first[step] += weight[3][3];
    PrintStep(step, loss + bias.sum() + first[5] + last[70]);
  }
}

// All of it but where the tests' daemon is.
void ClearedEnvironment(const Arguments& arguments) {
  const char* const daemon = std::getenv("OFFLOADD_BINARY");
  const std::string kept = daemon != nullptr ? daemon : "";
  ::clearenv();
  ::setenv("OFFLOADD_BINARY", kept.c_str(), 1);
  Linear model(64, 64);
  SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  Train(model, optimizer, arguments.loops.front());
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = ParseArguments(argc, argv);
  static const std::map<std::string, std::function<void(const Arguments&)>> kPrograms = {
      {"adversaries", Adversaries},
      {"threads", Threads},
      {"in_turn", InTurn},
      {"late", Late},
      {"inference", Inference},
      {"free_tensor", FreeTensor},
      {"replaced", Replaced},
      {"phases", Phases},
      {"adam_then_lbfgs", AdamThenLbfgs},
      {"alternating", Alternating},
      {"alternating_kinds", AlternatingKinds},
      {"alternating_looked", AlternatingLooked},
      {"lbfgs", Lbfgs},
      {"own_optimizer", OwnOptimizer},
      {"own_step", OwnStep},
      {"derived", Derived},
      {"closures", Closures},
      {"no_optimizer", NoOptimizer},
      {"refused_steps", RefusedSteps},
      {"sparse_tables", SparseTables},
      {"double_precision", DoublePrecision},
      {"sixteen_bits", SixteenBits},
      {"sixteen_bits_read", SixteenBitsRead},
      {"sixteen_bits_searched", SixteenBitsSearched},
      {"power_iteration", PowerIteration},
      {"complex_weights", ComplexWeights},
      {"own_function", OwnFunction},
      {"assigned_gradients", AssignedGradients},
      {"masked_first", EditedFirst},
      {"limited_first", EditedFirst},
      {"rollout", Rollout},
      {"rollout_of_inference", Rollout},
      {"embedding_of_largest_norm", EmbeddingOfLargestNorm},
      {"pieces_computed_anew", PiecesComputedAnew},
      {"environment", Environment},
      {"in_a_child", [](const Arguments& a) { InChild(a, /*waits=*/true); }},
      {"in_a_child_that_stays", [](const Arguments& a) { InChild(a, /*waits=*/false); }},
      {"pointers", Pointers},
      {"cleared_environment", ClearedEnvironment},
      {"large", Large},
      {"used_at_the_end", UsedAtTheEnd},
      {"own_state", OwnState},
      {"one_after_another", OneAfterAnother},
      {"anew_for_each_step", AnewForEachStep},
      {"saved_optimizer", SavedOptimizer},
      {"sixteen_bits_of_files", SixteenBitsOfFiles},
      {"loaded_optimizer", LoadedOptimizer},
  };
  torch::manual_seed(0);
  kPrograms.at(arguments.weights)(arguments);
}
