// Programs of the battery as papers have them: reinforcement learners, contrastive and meta
// learning, flows, experts, second derivatives, scripts.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/script.h>
#include <torch/serialize.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

namespace F = torch::nn::functional;
using torch::NoGradGuard;

Tensor Float(const Tensor& values) { return values.to(at::kFloat); }

void Go(Run& run, const Tensor& loss, optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
  run.See(loss);
}

struct ActorCriticImpl : nn::Module {
  ActorCriticImpl(int64_t in, int64_t hidden, int64_t actions) {
    body = register_module("body", nn::Sequential(nn::Linear(in, hidden), nn::Tanh()));
    actor = register_module("actor", nn::Linear(hidden, actions));
    critic = register_module("critic", nn::Linear(hidden, 1));
    log_std = register_parameter("log_std", torch::zeros({actions}));
    for (auto& p : named_parameters()) {
      if (p.key().ends_with("weight")) nn::init::orthogonal_(p.value(), std::sqrt(2.0));
      if (p.key().ends_with("bias")) nn::init::zeros_(p.value());
    }
  }
  std::tuple<Tensor, Tensor> forward(Tensor x) {
    x = body->forward(x);
    return {actor(x), critic(x).squeeze(-1)};
  }
  nn::Sequential body{nullptr};
  nn::Linear actor{nullptr}, critic{nullptr};
  Tensor log_std;
};
TORCH_MODULE(ActorCritic);

// A point on a line, drawn to its middle.
struct Env {
  Tensor state;
  explicit Env(int seed, int64_t dim) {
    state = at::randn({dim}, at::make_generator<at::CPUGeneratorImpl>(seed));
  }
  double Act(int64_t action) {
    state = state * 0.9 + 0.1 * static_cast<double>(action);
    return -state.square().mean().item<double>();
  }
};

void A2c(Run& run) {
  ActorCritic net = run.Cast(ActorCritic(64, 256, 4));
  auto engine = run.Open();
  auto optimizer = engine->RMSprop(*net, optim::RMSpropOptions(7e-4).alpha(0.99).eps(1e-5));
  for (int update = 0; update < 4; ++update) {
    Env env(update, 64);
    std::vector<Tensor> log_probs, values, entropies;
    std::vector<double> rewards;
    for (int t = 0; t < 5; ++t) {
      auto [logits, value] = net(env.state.to(run.dtype()).unsqueeze(0));
      Tensor p = torch::softmax(Float(logits), -1), log_p = torch::log_softmax(Float(logits), -1);
      const Tensor action = p.detach().multinomial(1);
      log_probs.push_back(log_p.gather(1, action).squeeze());
      entropies.push_back(-(p * log_p).sum());
      values.push_back(Float(value).squeeze());
      rewards.push_back(env.Act(action.item<int64_t>()));
    }
    double r = 0;
    Tensor policy = torch::zeros({}), critic = torch::zeros({}), entropy = torch::zeros({});
    for (int t = 4; t >= 0; --t) {
      r = rewards[t] + 0.99 * r;
      const Tensor advantage = r - values[t];
      policy = policy - log_probs[t] * advantage.detach();
      critic = critic + advantage.square();
      entropy = entropy + entropies[t];
    }
    optimizer->zero_grad();
    (policy + 0.5 * critic - 0.01 * entropy).backward();
    run.See(nn::utils::clip_grad_norm_(net->parameters(), 0.5));
    optimizer->step();
    run.See(policy + critic);
  }
  run.See(*net);
}

void PpoContinuous(Run& run) {
  ActorCritic net = run.Cast(ActorCritic(32, 128, 3));
  auto engine = run.Open();
  auto optimizer = engine->Adam(*net, optim::AdamOptions(3e-4).eps(1e-5));
  for (int iteration = 0; iteration < 2; ++iteration) {
    std::vector<Tensor> states, actions, log_probs, values;
    auto log_prob = [&](const Tensor& mean, const Tensor& action) {
      const Tensor std = net->log_std.exp();
      return (Float(-((action - mean) / std).square() / 2 - net->log_std)).sum(-1);
    };
    {
      NoGradGuard no_grad;
      for (int t = 0; t < 8; ++t) {
        const Tensor s = run.Noise(iteration * 100 + t, {32});
        auto [mean, value] = net(s);
        const Tensor a =
            at::normal(Float(mean), Float(net->log_std).exp().expand_as(mean)).to(run.dtype());
        states.push_back(s);
        actions.push_back(a);
        values.push_back(value);
        log_probs.push_back(log_prob(mean, a));
      }
    }
    const Tensor seen = torch::stack(states), taken = torch::stack(actions),
                 before = torch::stack(log_probs), worth = Float(torch::stack(values));
    const Tensor returns = Float(taken).sum(-1).cumsum(0);
    Tensor advantage = returns - worth;
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8);
    for (int epoch = 0; epoch < 2; ++epoch) {
      const Tensor order = torch::randperm(8);
      for (int b = 0; b < 2; ++b) {
        const Tensor rows = order.slice(0, b * 4, b * 4 + 4);
        auto [mean, value] = net(seen.index_select(0, rows));
        const Tensor ratio =
            (log_prob(mean, taken.index_select(0, rows)) - before.index_select(0, rows)).exp();
        const Tensor adv = advantage.index_select(0, rows);
        const Tensor policy = -torch::min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean();
        const Tensor v = Float(value), old = worth.index_select(0, rows),
                     ret = returns.index_select(0, rows);
        const Tensor clipped = old + (v - old).clamp(-0.2, 0.2);
        const Tensor critic = torch::max((v - ret).square(), (clipped - ret).square()).mean();
        const Tensor loss = policy + 0.5 * critic - 0.01 * Float(net->log_std).sum();
        optimizer->zero_grad();
        loss.backward();
        nn::utils::clip_grad_norm_(net->parameters(), 0.5);
        optimizer->step();
        run.See(loss);
        for (auto& group : optimizer->param_groups())
          group.options().set_lr(group.options().get_lr() * 0.9);
        const double kl =
            (before.index_select(0, rows) - log_prob(mean, taken.index_select(0, rows)))
                .mean()
                .item<double>();
        run.See(kl);
      }
    }
  }
  run.See(*net);
}

nn::Sequential QNet() {
  return nn::Sequential(nn::Linear(48, 200), nn::ReLU(), nn::Linear(200, 5));
}

// The target network is a part of what is attached.
struct AgentImpl : nn::Module {
  AgentImpl() {
    online = register_module("online", QNet());
    target = register_module("target", QNet());
    Sync(1);
    for (auto& p : target->parameters()) p.set_requires_grad(false);
  }
  void Sync(double tau) {
    NoGradGuard no_grad;
    auto from = online->named_parameters();
    for (auto& p : target->named_parameters()) p.value().lerp_(from[p.key()], tau);
  }
  nn::Sequential online{nullptr}, target{nullptr};
};
TORCH_MODULE(Agent);

void DqnTargetIsASubmodule(Run& run) {
  Agent agent = run.Cast(Agent());
  optim::Adam own(agent->online->parameters(), optim::AdamOptions(1e-3));
  auto engine = run.Open();
  engine->Attach(*agent, own);
  for (int step = 0; step < 5; ++step) {
    const Tensor s = run.Noise(step, {8, 48});
    const Tensor y = std::get<0>(agent->target->forward(s * 0.5).max(1)).detach();
    const Tensor loss =
        F::huber_loss(Float(agent->online->forward(s).select(1, step % 5)), Float(y));
    Go(run, loss, own);
    if (step % 2 == 1)
      agent->Sync(1);
    else
      agent->Sync(0.01);
  }
  run.See(*agent);
}

// Three optimizers, one of a parameter that is no module's; gradients stop where another one
// learns.
void SacWithALearnedTemperature(Run& run) {
  torch::manual_seed(5);
  auto make_q = [&] {
    return run.Cast(nn::Sequential(nn::Linear(24 + 4, 96), nn::ReLU(), nn::Linear(96, 1)));
  };
  struct Sac : nn::Module {
  } sac;
  auto q1 = make_q(), q2 = make_q(), t1 = make_q(), t2 = make_q();
  auto pi = run.Cast(nn::Sequential(nn::Linear(24, 96), nn::ReLU(), nn::Linear(96, 8)));
  sac.register_module("q1", q1.ptr());
  sac.register_module("q2", q2.ptr());
  sac.register_module("pi", pi.ptr());
  Tensor log_alpha = sac.register_parameter("log_alpha", torch::zeros({1}, run.dtype()));
  std::vector<Tensor> qs = q1->parameters();
  for (auto& p : q2->parameters()) qs.push_back(p);
  optim::Adam of_q(qs, 3e-3), of_pi(pi->parameters(), 3e-3), of_alpha({log_alpha}, 3e-3);
  auto engine = run.Open();
  for (optim::Adam* const own : {&of_q, &of_pi, &of_alpha}) engine->Attach(sac, *own);
  auto sync = [&](double tau) {
    NoGradGuard no_grad;
    auto a = q1->parameters(), b = q2->parameters(), x = t1->parameters(), y = t2->parameters();
    for (size_t i = 0; i < a.size(); ++i) {
      x[i].data().mul_(1 - tau), torch::add_out(x[i], x[i], a[i], tau);
      y[i].data().mul_(1 - tau), torch::add_out(y[i], y[i], b[i], tau);
    }
  };
  sync(1);
  for (auto& t : {t1, t2})
    for (auto& p : t->parameters()) p.requires_grad_(false);
  auto act = [&](const Tensor& s, int seed) {
    auto parts = pi->forward(s).chunk(2, -1);
    const Tensor std = parts[1].clamp(-5, 2).exp();
    const Tensor u = parts[0] + std * run.Noise(seed, {s.size(0), 4});
    const Tensor a = torch::tanh(u);
    const Tensor logp = Float(-(u - parts[0]).square() / (2 * std.square()) - std.log() -
                              (1 - a.square() + 1e-6).log())
                            .sum(-1, true);
    return std::make_pair(a, logp);
  };
  for (int step = 0; step < 4; ++step) {
    const Tensor s = run.Noise(step, {6, 24}), a = run.Noise(step + 40, {6, 4}),
                 n = run.Noise(step + 80, {6, 24});
    Tensor y;
    {
      NoGradGuard no_grad;
      auto [na, logp] = act(n, step + 7);
      const Tensor in = torch::cat({n, na}, 1);
      y = 0.9 *
          (Float(torch::min(t1->forward(in), t2->forward(in))) - Float(log_alpha).exp() * logp);
    }
    const Tensor in = torch::cat({s, a}, 1);
    Go(run, F::mse_loss(Float(q1->forward(in)), y) + F::mse_loss(Float(q2->forward(in)), y), of_q);
    for (auto& p : qs) p.set_requires_grad(false);
    auto [pa, logp] = act(s, step + 17);
    const Tensor in2 = torch::cat({s, pa}, 1);
    Go(run,
       (Float(log_alpha).exp().detach() * logp -
        Float(torch::min(q1->forward(in2), q2->forward(in2))))
           .mean(),
       of_pi);
    for (auto& p : qs) p.set_requires_grad(true);
    Go(run, -(Float(log_alpha).exp() * (logp - 4).detach()).mean(), of_alpha);
    sync(0.005);
  }
  run.See(sac);
  run.See(*t1);
  run.See(*t2);
}

// Evolution: what the optimizer gets is no gradient.
void EsWithoutGradients(Run& run) {
  torch::manual_seed(6);
  auto net = run.Cast(nn::Sequential(nn::Linear(32, 64), nn::Tanh(), nn::Linear(64, 2)));
  auto engine = run.Open();
  auto optimizer = engine->SGD(*net, optim::SGDOptions(0.1).momentum(0.9));
  NoGradGuard no_grad;
  for (int generation = 0; generation < 4; ++generation) {
    std::vector<Tensor> sums;
    for (auto& p : net->parameters()) sums.push_back(torch::zeros_like(p));
    for (int member = 0; member < 4; ++member) {
      auto parameters = net->parameters();
      std::vector<Tensor> noise;
      for (size_t i = 0; i < parameters.size(); ++i) {
        noise.push_back(run.Noise(generation * 1000 + member * 50 + i, parameters[i].sizes()));
        parameters[i].add_(noise[i], 0.05);
      }
      const double plus = Mean(net->forward(run.Noise(generation, {8, 32}))).item<double>();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].add_(noise[i], -0.1);
      const double minus = Mean(net->forward(run.Noise(generation, {8, 32}))).item<double>();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].add_(noise[i], 0.05);
      for (size_t i = 0; i < parameters.size(); ++i) sums[i].add_(noise[i], (plus - minus) / 0.1);
      run.See(plus - minus);
    }
    auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = sums[i] / 4;
    optimizer->step();
  }
  run.See(*net);
}

struct Coupling : nn::Module {
  Coupling(bool flip) : flip(flip) {
    net =
        register_module("net", nn::Sequential(nn::Linear(16, 64), nn::ReLU(), nn::Linear(64, 32)));
    scale = register_parameter("scale", torch::zeros({32}));
    shift = register_parameter("shift", torch::zeros({32}));
    initialised = register_buffer("initialised", torch::tensor(0, torch::kUInt8));
  }
  std::pair<Tensor, Tensor> forward(Tensor x) {
    if (initialised.item<uint8_t>() == 0) {  // ActNorm, from the first batch
      NoGradGuard no_grad;
      shift.copy_(-x.mean(0));
      scale.copy_((1 / (x.std(0) + 1e-6)).log());
      initialised.fill_(1);
    }
    x = (x + shift) * scale.exp();
    auto parts = x.chunk(2, 1);
    const Tensor &a = parts[flip], &b = parts[!flip];
    auto st = net->forward(a).chunk(2, 1);
    const Tensor s = torch::tanh(st[0]);
    const Tensor y = b * s.exp() + st[1];
    return {flip ? torch::cat({y, a}, 1) : torch::cat({a, y}, 1),
            Float(s).sum(1) + Float(scale).sum()};
  }
  bool flip;
  nn::Sequential net{nullptr};
  Tensor scale, shift, initialised;
};

void NormalizingFlowInitialisedByItsFirstBatch(Run& run) {
  torch::manual_seed(4);
  auto flow = std::make_shared<nn::ModuleListImpl>();
  for (int i = 0; i < 4; ++i) flow->push_back(std::make_shared<Coupling>(i % 2));
  flow->to(run.dtype());
  auto engine = run.Open();
  auto optimizer = engine->AdamW(*flow, optim::AdamWOptions(1e-3).weight_decay(1e-5));
  for (int step = 0; step < 4; ++step) {
    Tensor x = run.Noise(step, {8, 32}) * 3 + 1, logdet = torch::zeros({8});
    for (const auto& layer : *flow) {
      auto [y, l] = layer->as<Coupling>()->forward(x);
      x = y, logdet = logdet + l;
    }
    const Tensor loss = (0.5 * Float(x).square().sum(1) - logdet).mean();
    optimizer->zero_grad();
    loss.backward();
    nn::utils::clip_grad_norm_(flow->parameters(), 1.0, 2.0, /*error_if_nonfinite=*/true);
    optimizer->step();
    run.See(loss);
  }
  run.See(*flow);
}

void MamlFirstOrderWithClonesAndGivenGradients(Run& run) {
  torch::manual_seed(6);
  auto net = run.Cast(
      nn::Sequential(nn::Linear(16, 64), nn::ReLU(), nn::BatchNorm1d(64), nn::Linear(64, 16)));
  auto engine = run.Open();
  auto optimizer = engine->Adam(*net, optim::AdamOptions(1e-3));
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    for (int task = 0; task < 3; ++task) {
      auto learner = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
      optim::SGD inner(learner->parameters(), 0.05);
      for (int k = 0; k < 2; ++k) {
        const Tensor x = run.Noise(step * 50 + task * 7 + k, {5, 16});
        inner.zero_grad();
        Mean(learner->forward(x) - x * task).backward();
        if (run.dtype() == at::kFloat) inner.step();
      }
      inner.zero_grad();
      const Tensor x = run.Noise(step * 50 + task * 7 + 40, {5, 16});
      const Tensor loss = Mean(learner->forward(x) - x * task);
      loss.backward();
      run.See(loss);
      auto to = net->parameters(), from = learner->parameters();
      for (size_t i = 0; i < to.size(); ++i) {
        if (to[i].grad().defined())
          to[i].grad().add_(from[i].grad());
        else
          to[i].mutable_grad() = from[i].grad().clone();
      }
    }
    optimizer->step();
  }
  run.See(*net);
}

struct MoeImpl : nn::Module {
  MoeImpl() {
    gate = register_module("gate", nn::Linear(32, 5));
    for (int i = 0; i < 5; ++i)
      experts->push_back(nn::Sequential(nn::Linear(32, 200), nn::GELU(), nn::Linear(200, 32)));
    register_module("experts", experts);
    load = register_buffer("load", torch::zeros({5}, at::kLong));
  }
  Tensor forward(const Tensor& x, Tensor& aux, const Tensor& counts) {
    const Tensor p = torch::softmax(Float(gate(x)), -1);
    auto [value, index] = p.topk(2, -1);
    Tensor out = torch::zeros_like(x);
    for (int e = 0; e < 5; ++e) {
      const Tensor hit = (index == e);
      const Tensor rows = hit.any(1).nonzero().squeeze(1);
      counts[e] += rows.numel();
      if (rows.numel() == 0) continue;
      const Tensor w = (value * hit).sum(1).index_select(0, rows).to(x.scalar_type());
      out = out.index_add(
          0, rows,
          experts[e]->as<nn::SequentialImpl>()->forward(x.index_select(0, rows)) * w.unsqueeze(1));
    }
    aux = p.mean(0).square().sum() * 5;
    return out;
  }
  nn::Linear gate{nullptr};
  nn::ModuleList experts;
  Tensor load;
};
TORCH_MODULE(Moe);

void MixtureWhoseExpertsRest(Run& run) {
  torch::manual_seed(10);
  Moe net = run.Cast(Moe());
  auto engine = run.Open();
  auto optimizer = engine->AdamW(*net, optim::AdamWOptions(1e-2).amsgrad(true));
  for (int step = 0; step < 5; ++step) {
    const Tensor x = run.Noise(step, {1, 32});
    Tensor aux;
    const Tensor y = net->forward(x, aux, net->named_buffers()["load"]);
    Go(run, Mean(y - x) + 0.01 * aux, *optimizer);
    run.SeeGradients(*net);
  }
  run.See(*net);
}

void DifferentialPrivacyBySamples(Run& run) {
  torch::manual_seed(9);
  auto net = run.Cast(nn::Sequential(nn::Linear(32, 100), nn::Tanh(), nn::Linear(100, 4)));
  auto engine = run.Open();
  auto optimizer = engine->Adam(*net, optim::AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    auto parameters = net->parameters();
    std::vector<Tensor> sums(parameters.size());
    for (int i = 0; i < 4; ++i) {
      optimizer->zero_grad();
      const Tensor loss =
          F::nll_loss(F::log_softmax(Float(net->forward(run.Noise(step * 4 + i, {1, 32}))), 1),
                      run.Indices(i, 4, {1}));
      loss.backward();
      run.See(nn::utils::clip_grad_norm_(parameters, 0.5));
      for (size_t k = 0; k < sums.size(); ++k)
        sums[k] = sums[k].defined() ? sums[k] + parameters[k].grad() : parameters[k].grad().clone();
    }
    for (size_t k = 0; k < sums.size(); ++k) {
      sums[k].add_(run.Noise(step * 99 + k, sums[k].sizes()), 0.01);
      parameters[k].mutable_grad() = sums[k].div_(4);
    }
    optimizer->step();
  }
  run.See(*net);
}

struct BufferedImpl : nn::Module {
  BufferedImpl() {
    linear = register_module("linear", nn::Linear(40, 40));
    Keep("undefined", Tensor());
    register_parameter("nothing", Tensor());
    Keep("steps", torch::zeros({}, at::kLong));
    Keep("seen", torch::zeros({40}, at::kBool));
    Keep("bytes", torch::arange(10, at::kByte));
    Keep("empty", torch::empty({0}));
    Keep("phase", torch::zeros({4}, at::kComplexFloat));
    Keep("half", torch::ones({3}, at::kHalf));
    Keep("columns", torch::randn({6, 8}).t());
    Keep("every_second", torch::randn({20}).slice(0, 0, 20, 2));
    Keep("expanded", torch::ones({1}).expand({5}));
    Keep("weights_alias", linear->weight.detach());
    Keep("double", torch::zeros({2}, at::kDouble));
    Keep("mean", torch::zeros({40}));
  }
  Tensor forward(const Tensor& x) {
    if (is_training()) {
      NoGradGuard no_grad;
      b["steps"] += 1;
      b["seen"].logical_or_(x.mean(0) > 0);
      b["bytes"].add_(1);
      b["phase"].mul_(c10::complex<float>(0, 1)).add_(1);
      b["every_second"].mul_(0.9);
      b["columns"].add_(0.1);
      // Another tensor takes the place of the one that was registered.
      b["mean"].set_data(b["mean"] * 0.9 + x.mean(0) * 0.1);
      b["double"].set_data(b["double"] + x.mean().to(at::kDouble));
    }
    return linear(x - b["mean"].to(x.scalar_type()));
  }
  nn::Linear linear{nullptr};
  std::map<std::string, Tensor> b;
  void Keep(const std::string& name, Tensor t) { b[name] = register_buffer(name, t); }
};
TORCH_MODULE(Buffered);

void BuffersOfAllKinds(Run& run) {
  torch::manual_seed(3);
  Buffered net;
  auto engine = run.Open();
  auto optimizer = engine->Adam(*net, optim::AdamOptions(1e-2));
  for (int step = 0; step < 4; ++step) {
    const Tensor x = run.Noise(step, {5, 40});
    Go(run, Mean(net(x) - x), *optimizer);
  }
  run.See(*net);
}

// Each parameter is stepped where its gradient is ready.
void OptimizersInBackward(Run& run) {
  torch::manual_seed(3);
  auto net = run.Cast(nn::Sequential(nn::Linear(32, 64), nn::Tanh(), nn::Linear(64, 32)));
  std::vector<std::unique_ptr<optim::SGD>> optimizers;
  std::vector<std::shared_ptr<torch::autograd::Node>> nodes;
  struct Hook : torch::autograd::FunctionPostHook {
    explicit Hook(std::function<void()> call) : call(std::move(call)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& out,
                                              const torch::autograd::variable_list&) override {
      call();
      return out;
    }
    std::function<void()> call;
  };
  for (auto& p : net->parameters()) {
    optimizers.push_back(std::make_unique<optim::SGD>(std::vector<Tensor>{p},
                                                      optim::SGDOptions(0.05).momentum(0.9)));
    auto engine = run.Open();
    engine->Attach(*net, *optimizers.back());
    auto node = torch::autograd::impl::grad_accumulator(p);
    node->add_post_hook(std::make_unique<Hook>([own = optimizers.back().get()] {
      own->step();
      own->zero_grad();
    }));
    nodes.push_back(node);
  }
  for (int step = 0; step < 4; ++step) {
    const Tensor x = run.Noise(step, {4, 32});
    const Tensor loss = Mean(net->forward(x) - x);
    loss.backward();
    run.See(loss);
  }
  run.See(*net);
}

// The derivative along a direction, times the direction.
void ForwardModeDerivatives(Run& run) {
  torch::manual_seed(3);
  auto net = run.Cast(nn::Sequential(nn::Linear(16, 32), nn::Tanh(), nn::Linear(32, 16)));
  auto engine = run.Open();
  auto optimizer = engine->SGD(*net, optim::SGDOptions(0.05));
  // A forward gradient: the derivative along a direction, times the direction.
  for (int step = 0; step < 4; ++step) {
    auto parameters = net->parameters();
    std::vector<Tensor> duals, directions;
    const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
    Tensor along;
    {
      for (size_t i = 0; i < parameters.size(); ++i) {
        directions.push_back(run.Noise(step * 10 + i, parameters[i].sizes()));
        duals.push_back(at::_make_dual(parameters[i].detach(), directions[i], level));
      }
      const Tensor x = run.Noise(step, {4, 16});
      const Tensor loss =
          Mean(F::linear(torch::tanh(F::linear(x, duals[0], duals[1])), duals[2], duals[3]));
      along = std::get<1>(at::_unpack_dual(loss, level)).clone();
      run.See(loss.detach());
    }
    duals.clear();
    torch::autograd::ForwardADLevel::release_idx(level);
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = directions[i] * along.to(run.dtype());
    optimizer->step();
  }
  run.See(*net);
}

void FunctionThatIsCompiled(Run& run) {
  torch::manual_seed(3);
  auto net = run.Cast(nn::Sequential(nn::Linear(16, 32), nn::Tanh(), nn::Linear(32, 16)));
  auto unit = torch::jit::compile(R"(
def mlp(x, w1, b1, w2, b2):
    h = torch.tanh(torch.addmm(b1, x, w1.t()))
    return torch.addmm(b2, h, w2.t())
)");
  auto engine = run.Open();
  auto optimizer = engine->AdamW(*net, optim::AdamWOptions(1e-2));
  for (int step = 0; step < 5; ++step) {
    auto p = net->parameters();
    const Tensor x = run.Noise(step, {4, 16});
    const Tensor y = unit->run_method("mlp", x, p[0], p[1], p[2], p[3]).toTensor();
    Go(run, Mean(y - x), *optimizer);
  }
  run.See(*net);
}

// Parameters are those of a script module, registered again.
void ScriptModuleIsTrained(Run& run) {
  torch::manual_seed(3);
  torch::jit::Module script("net");
  script.register_parameter("w", run.Noise(1, {64, 32}), false);
  script.register_parameter("b", run.Noise(2, {32}), false);
  script.register_buffer("count", torch::zeros({}, at::kLong));
  script.define(R"(
def forward(self, x):
    self.count.add_(1)
    return torch.relu(x.mm(self.w) + self.b)
)");
  struct Wrap : nn::Module {
  } wrap;
  for (const auto& p : script.named_parameters()) wrap.register_parameter(p.name, p.value);
  for (const auto& p : script.named_buffers()) wrap.register_buffer(p.name, p.value);
  auto engine = run.Open();
  auto optimizer = engine->Adam(wrap, optim::AdamOptions(1e-2));
  for (int step = 0; step < 5; ++step) {
    const Tensor y = script.forward({run.Noise(step, {4, 64})}).toTensor();
    Go(run, Mean(y - 1), *optimizer);
  }
  std::stringstream file;
  script.save(file);
  auto loaded = torch::jit::load(file);
  for (const auto& p : loaded.named_parameters()) run.See(p.value);
  run.See(loaded.forward({run.Noise(9, {2, 64})}).toTensor());
  auto copy = script.deepcopy();
  copy.eval();
  run.See(copy.forward({run.Noise(9, {2, 64})}).toTensor());
  run.See(wrap);
}

void FakeQuantizationWithLearnedScale(Run& run) {
  torch::manual_seed(3);
  struct Net : nn::Module {
    Net() {
      linear = register_module("linear", nn::Linear(32, 64));
      scale = register_parameter("scale", torch::full({1}, 0.05));
      zero = register_parameter("zero", torch::zeros({1}));
      channel = register_parameter("channel", torch::full({64}, 0.03));
      channel_zero = register_parameter("channel_zero", torch::zeros({64}));
      low = register_buffer("low", torch::tensor({-1.0f})),
      high = register_buffer("high", torch::tensor({1.0f}));
    }
    Tensor forward(const Tensor& x) {
      {
        NoGradGuard no_grad;
        low.copy_(torch::min(low, x.min())), high.copy_(torch::max(high, x.max()));
      }
      const Tensor q =
          at::_fake_quantize_learnable_per_tensor_affine(x, scale, zero, -128, 127, 1.0);
      const Tensor w = at::_fake_quantize_learnable_per_channel_affine(
          linear->weight, channel, channel_zero, 0, -128, 127, 1.0);
      return F::linear(q, w, linear->bias) +
             F::linear(x, at::fake_quantize_per_tensor_affine(linear->weight, 0.02, 0, -8, 7));
    }
    nn::Linear linear{nullptr};
    Tensor scale, zero, channel, channel_zero, low, high;
  };
  auto net = std::make_shared<Net>();
  auto engine = run.Open();
  auto optimizer = engine->Adam(*net, optim::AdamOptions(1e-2));
  for (int step = 0; step < 4; ++step)
    Go(run, Mean(net->forward(run.Noise(step, {4, 32})) - 1), *optimizer);
  const Tensor q = at::quantize_per_tensor(net->linear->weight.detach(), 0.02, 0, at::kQInt8);
  run.See(q.dequantize());
  run.See(q.int_repr());
  run.See(*net);
}

void ConjugateGradientsOfHessianProducts(Run& run) {
  torch::manual_seed(3);
  auto net = run.Cast(nn::Sequential(nn::Linear(16, 24), nn::Tanh(), nn::Linear(24, 4)));
  auto engine = run.Open();
  auto optimizer = engine->SGD(*net, optim::SGDOptions(0.1));
  auto flat = [](const std::vector<Tensor>& list) {
    std::vector<Tensor> all;
    for (const auto& t : list) all.push_back(Float(t).reshape(-1));
    return torch::cat(all);
  };
  for (int step = 0; step < 3; ++step) {
    const Tensor x = run.Noise(step, {8, 16});
    auto parameters = net->parameters();
    auto product = [&](const Tensor& v) {
      const Tensor p = torch::log_softmax(Float(net->forward(x)), 1);
      const Tensor kl = (p.detach().exp() * (p.detach() - p)).sum(1).mean();
      const Tensor g = flat(torch::autograd::grad({kl}, parameters, {}, true, true));
      return (flat(torch::autograd::grad({(g * v).sum()}, parameters)) + 0.1 * v).detach();
    };
    const Tensor b = flat(torch::autograd::grad({Mean(net->forward(x) - 1)}, parameters)).detach();
    Tensor s = torch::zeros_like(b), r = b.clone(), d = b.clone(), rr = r.dot(r);
    for (int k = 0; k < 4; ++k) {
      const Tensor hd = product(d), alpha = rr / d.dot(hd);
      s = s + alpha * d, r = r - alpha * hd;
      const Tensor next = r.dot(r);
      d = r + next / rr * d, rr = next;
    }
    int64_t at = 0;
    for (auto& p : parameters) {
      p.mutable_grad() = s.slice(0, at, at + p.numel()).view_as(p).to(run.dtype()).clone();
      at += p.numel();
    }
    optimizer->step();
    run.See(s);
  }
  run.See(*net);
}

void RandomStateKeptForRecomputation(Run& run) {
  torch::manual_seed(3);
  auto net = run.Cast(nn::Sequential(nn::Linear(32, 300), nn::Dropout(0.5), nn::Linear(300, 32)));
  auto engine = run.Open();
  auto optimizer = engine->AdamW(*net, optim::AdamWOptions(1e-2));
  auto generator = at::detail::getDefaultCPUGenerator();
  for (int step = 0; step < 4; ++step) {
    const Tensor x = run.Noise(step, {4, 32});
    Tensor state = generator.get_state(), y;
    {
      NoGradGuard no_grad;
      y = net->forward(x);
    }
    const Tensor after = generator.get_state();
    const Tensor leaf = y.detach().requires_grad_();
    const Tensor loss = Mean(leaf - x);
    optimizer->zero_grad();
    loss.backward();
    generator.set_state(state);
    const Tensor again = net->forward(x);
    run.See(again - y);
    again.backward(leaf.grad());
    generator.set_state(after);
    optimizer->step();
    run.See(loss);
  }
  run.See(torch::rand({3}));
  run.See(*net);
}

void AutocastToBf16(Run& run) {
  auto net = Perceptron(run);
  auto engine = run.Open();
  auto optimizer = engine->AdamW(*net, optim::AdamWOptions(1e-2));
  for (int step = 0; step < 4; ++step) {
    const Tensor x = run.Noise(step, {5, kWidth});
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    const Tensor y = net->forward(x) + net->forward(x * 0.5);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    Go(run, Mean(y - x), *optimizer);
  }
  run.See(*net);
}

void GradientsAndGraphsOfBeforeAttaching(Run& run) {
  auto net = Perceptron(run);
  auto second = std::make_shared<optim::AdamW>(net->parameters(), 1e-2);
  int hooks = 0;
  net->parameters()[0].register_hook([&](Tensor g) {
    ++hooks;
    return g * 2;
  });
  Loss(run, net, 0).backward();
  const Tensor old = Loss(run, net, 1);
  const Tensor viewed = net->parameters()[0].view({-1});
  auto engine = run.Open();
  engine->Attach(*net, *second);
  old.backward();
  run.SeeGradients(*net);
  second->step();
  run.See(viewed);
  second->zero_grad();
  Train(run, net, *second, 2, 5);
  run.See(hooks);
  run.See(*net);
}

}  // namespace

Programs PaperPrograms() {
  return {
      {"a2c", A2c},
      {"ppo_continuous", PpoContinuous},
      {"dqn_target_is_a_submodule", DqnTargetIsASubmodule},
      {"sac_with_a_learned_temperature", SacWithALearnedTemperature},
      {"es_without_gradients", EsWithoutGradients},
      {"normalizing_flow_initialised_by_its_first_batch",
       NormalizingFlowInitialisedByItsFirstBatch},
      {"maml_first_order_with_clones_and_given_gradients",
       MamlFirstOrderWithClonesAndGivenGradients},
      {"mixture_whose_experts_rest", MixtureWhoseExpertsRest},
      {"differential_privacy_by_samples", DifferentialPrivacyBySamples},
      {"buffers_of_all_kinds", BuffersOfAllKinds, 0, true},
      {"optimizers_in_backward", OptimizersInBackward},
      {"forward_mode_derivatives", ForwardModeDerivatives},
      {"function_that_is_compiled", FunctionThatIsCompiled},
      {"script_module_is_trained", ScriptModuleIsTrained},
      {"fake_quantization_with_learned_scale", FakeQuantizationWithLearnedScale, 0, true},
      {"conjugate_gradients_of_hessian_products", ConjugateGradientsOfHessianProducts},
      {"random_state_kept_for_recomputation", RandomStateKeptForRecomputation},
      {"autocast_to_bf16", AutocastToBf16, 0, true},
      {"gradients_and_graphs_of_before_attaching", GradientsAndGraphsOfBeforeAttaching},
  };
}

}  // namespace offload::battery
