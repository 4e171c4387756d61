#include "tests/battery_torch_trainers.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace offload::battery {
namespace {

using torch::NoGradGuard;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

Tensor Float(const Tensor& values) { return values.to(at::kFloat); }

// Parameters and buffers by name.
struct Bare : nn::Module {
  Tensor Get(const std::string& name) { return named_parameters(false)[name]; }
};

// ---- Trainers that are killed ------------------------------------------------------------------

// What a program makes at each of its starts.
struct Trainer {
  std::shared_ptr<nn::Module> module;
  std::vector<std::shared_ptr<optim::Optimizer>> optimizers;
  std::function<Tensor(int64_t iteration)> iterate;  // a step of every optimizer, or as many
};
using Make = std::function<Trainer(Run&)>;

void Iterate(Run& run, const Make& make, const std::string& job, int64_t end, int64_t of_iteration,
             int64_t see_from, bool is_last) {
  torch::manual_seed(31);
  Trainer trainer = make(run);
  auto engine = run.Open([&](Options& options) { options.job = job; });
  for (const auto& optimizer : trainer.optimizers) engine->Attach(*trainer.module, *optimizer);
  for (int64_t i = engine->step() / of_iteration; i < end; ++i) {
    torch::manual_seed(500 + i);
    const Tensor loss = trainer.iterate(i);
    if (i >= see_from) run.See(loss);
  }
  if (is_last) run.See(*trainer.module);
}

// Six iterations. A run ends by a signal behind the second, another one behind the fourth.
Program Killed(std::string name, Make make, int64_t of_iteration = 1, bool fp32_only = false) {
  return {std::move(name),
          [=](Run& run) {
            const std::string job = run.options().job + "-killed";
            constexpr int64_t kEnd = 6, kLast = 4;
            for (const int64_t end : {int64_t{2}, kLast}) {
              if (IsInMemory()) break;
              const pid_t child = fork();
              if (child == 0) {
                try {
                  Iterate(run, make, job, end, of_iteration, kEnd, /*is_last=*/false);
                  kill(getpid(), SIGKILL);
                } catch (const std::exception& error) {
                  fprintf(stderr, "of a run that is to be killed: %s\n", error.what());
                }
                _exit(1);
              }
              int status = 0;
              waitpid(child, &status, 0);
              if (!WIFSIGNALED(status)) run.See(-1);
            }
            Iterate(run, make, job, kEnd, of_iteration, kLast, /*is_last=*/true);
          },
          0, fp32_only};
}

template <class Own, class Options>
std::shared_ptr<optim::Optimizer> MakeOwn(std::vector<Tensor> parameters, Options options) {
  return std::make_shared<Own>(std::move(parameters), options);
}
std::shared_ptr<optim::Optimizer> AdamOf(std::vector<Tensor> parameters, double lr = 1e-3) {
  return MakeOwn<optim::Adam>(std::move(parameters), optim::AdamOptions(lr));
}
std::shared_ptr<optim::Optimizer> SgdOf(std::vector<Tensor> parameters, double lr = 0.05) {
  return MakeOwn<optim::SGD>(std::move(parameters), optim::SGDOptions(lr).momentum(0.9));
}
void Descend(const Tensor& loss, optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
}

nn::Sequential Net(const Run& run, int64_t in, int64_t out) {
  return run.Cast(nn::Sequential(nn::Linear(in, kInner), nn::Tanh(), nn::Linear(kInner, out)));
}

// A frozen base with low-rank parts, which are added to it in the middle.
Trainer LowRankMerged(Run& run) {
  auto net = std::make_shared<Bare>();
  net->register_parameter("base", torch::randn({kInner, kWidth}) * 0.05, false);
  net->register_parameter("a", torch::randn({8, kWidth}) * 0.05);
  net->register_parameter("b", torch::zeros({kInner, 8}));
  net->to(run.dtype());
  auto optimizer = AdamOf({net->Get("a"), net->Get("b")}, 1e-2);
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor x = run.Noise(i, {6, kWidth});
            const Tensor y =
                x.mm(net->Get("base").t()) + x.mm(net->Get("a").t()).mm(net->Get("b").t());
            const Tensor loss = Mean(y - 1);
            Descend(loss, *optimizer);
            if (i == 2) {
              const NoGradGuard no_grad;
              net->Get("base").add_(net->Get("b").mm(net->Get("a")));
              net->Get("b").zero_();
            }
            return loss;
          }};
}

// One vector is all weights of a net.
Trainer OneVector(Run& run) {
  auto net = std::make_shared<Bare>();
  net->register_parameter("all", torch::randn({kWidth * kInner + kInner + kInner * 8}) * 0.05);
  net->to(run.dtype());
  auto optimizer = AdamOf(net->parameters());
  return {
      net, {optimizer}, [=, &run](int64_t i) {
        const auto parts = net->Get("all").split_with_sizes({kWidth * kInner, kInner, kInner * 8});
        const Tensor h = torch::tanh(
            torch::addmm(parts[1], run.Noise(i, {6, kWidth}), parts[0].view({kWidth, kInner})));
        const Tensor loss = Mean(h.mm(parts[2].view({kInner, 8})) - 1);
        Descend(loss, *optimizer);
        return loss;
      }};
}

// Weights are divided by their largest singular value before every step but the first; its vector
// is a buffer.
Trainer SpectrumLimited(Run& run) {
  auto net = Net(run, kWidth, kWidth);
  auto* const first = net->ptr<nn::LinearImpl>(0).get();
  const Tensor u = first->register_buffer("u", torch::randn({kInner}).to(run.dtype()));
  auto optimizer = SgdOf(net->parameters());
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            if (i > 0) {
              const NoGradGuard no_grad;
              const Tensor w = net->at<nn::LinearImpl>(0).weight;
              Tensor u = net->at<nn::LinearImpl>(0).named_buffers()["u"];
              const Tensor v = torch::mv(w.t(), u);
              u.copy_(torch::mv(w, v / v.norm()));
              const Tensor sigma = u.norm();
              u.div_(sigma);
              net->at<nn::LinearImpl>(0).weight.div_(sigma);
            }
            const Tensor loss = Mean(net->forward(run.Noise(i, {6, kWidth})) - 1);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// Two nets, three steps of the critic for one of the generator, penalty on its gradient.
Trainer Wasserstein(Run& run) {
  struct Both : nn::Module {
    nn::Sequential generator{nullptr}, critic{nullptr};
  };
  auto both = std::make_shared<Both>();
  both->generator = both->register_module("generator", Net(run, 64, kWidth));
  both->critic = both->register_module("critic", Net(run, kWidth, 1));
  auto of_generator = AdamOf(both->generator->parameters());
  auto of_critic = AdamOf(both->critic->parameters(), 2e-3);
  return {
      both, {of_generator, of_critic}, [=, &run](int64_t i) {
        for (int round = 0; round < 3; ++round) {
          const Tensor real = run.Noise(10 * i + round, {5, kWidth});
          const Tensor made =
              both->generator->forward(run.Noise(900 + 10 * i + round, {5, 64})).detach();
          const Tensor between = (0.3 * real + 0.7 * made).requires_grad_();
          const Tensor g = torch::autograd::grad({both->critic->forward(between).sum()}, {between},
                                                 {}, true, true)[0];
          const Tensor penalty = (Float(g).norm(2, 1) - 1).square().mean();
          Descend(Float(both->critic->forward(made)).mean() -
                      Float(both->critic->forward(real)).mean() + 10 * penalty,
                  *of_critic);
        }
        const Tensor loss =
            -Float(both->critic->forward(both->generator->forward(run.Noise(i, {5, 64})))).mean();
        Descend(loss, *of_generator);
        return loss;
      }};
}

// An encoder that follows by averages, and a queue of what it gave.
Trainer MomentumContrast(Run& run) {
  struct Moco : nn::Module {
    nn::Sequential query{nullptr}, key{nullptr};
    Tensor queue, place;
  };
  auto net = std::make_shared<Moco>();
  net->query = net->register_module("query", Net(run, kWidth, 32));
  net->key = net->register_module("key", Net(run, kWidth, 32));
  for (Tensor& parameter : net->key->parameters()) parameter.set_requires_grad(false);
  net->queue = net->register_buffer("queue", torch::randn({40, 32}).to(run.dtype()));
  net->place = net->register_buffer("place", torch::zeros({}, at::kLong));
  auto optimizer = SgdOf(net->query->parameters());
  return {
      net, {optimizer}, [=, &run](int64_t i) {
        {
          const NoGradGuard no_grad;
          const auto from = net->query->parameters();
          auto to = net->key->parameters();
          for (size_t p = 0; p < to.size(); ++p) to[p].mul_(0.9).add_(from[p], 0.1);
        }
        const Tensor x = run.Noise(i, {8, kWidth});
        const Tensor q = net->query->forward(x);
        const Tensor k = net->key->forward(x + 0.1 * run.Noise(70 + i, {8, kWidth})).detach();
        const Tensor logits = torch::cat({(q * k).sum(1, true), q.mm(net->queue.t().clone())}, 1);
        const Tensor loss =
            torch::nll_loss(torch::log_softmax(Float(logits), 1), torch::zeros({8}, at::kLong));
        const int64_t at = net->place.item<int64_t>();
        net->queue.narrow(0, at, 8).copy_(k);
        net->place.fill_((at + 8) % 40);
        Descend(loss, *optimizer);  // which commits what was written before
        return loss;
      }};
}

// The latent of an autoencoder is drawn.
Trainer Variational(Run& run) {
  struct Vae : nn::Module {
    nn::Sequential in{nullptr}, out{nullptr};
    nn::BatchNorm1d norm{nullptr};
  };
  auto net = std::make_shared<Vae>();
  net->in = net->register_module("in", Net(run, kWidth, 64));
  net->out = net->register_module("out", Net(run, 32, kWidth));
  net->norm = net->register_module("norm", run.Cast(nn::BatchNorm1d(32)));
  auto optimizer =
      MakeOwn<optim::AdamW>(net->parameters(), optim::AdamWOptions(1e-3).amsgrad(true));
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor x = run.Noise(i, {6, kWidth});
            const auto parts = net->in->forward(x).chunk(2, 1);
            const Tensor z = parts[0] + torch::randn_like(parts[0]) * (0.5 * parts[1]).exp();
            const Tensor kl =
                -0.5 *
                (1 + Float(parts[1]) - Float(parts[0]).square() - Float(parts[1]).exp()).mean();
            const Tensor loss = Mean(net->out->forward(net->norm->forward(z)) - x) +
                                std::min(1.0, 0.2 * static_cast<double>(i)) * kl;
            Descend(loss, *optimizer);
            return loss;
          }};
}

// The gradient is turned around on its way.
struct Reversed : torch::autograd::Function<Reversed> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double by) {
    ctx->saved_data["by"] = by;
    return x.view_as(x);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list gradients) {
    return {-ctx->saved_data["by"].toDouble() * gradients[0], Tensor()};
  }
};
Trainer DomainAdversarial(Run& run) {
  struct Dann : nn::Module {
    nn::Sequential body{nullptr}, label{nullptr}, domain{nullptr};
  };
  auto net = std::make_shared<Dann>();
  net->body = net->register_module("body", Net(run, kWidth, 96));
  net->label = net->register_module("label", Net(run, 96, 10));
  net->domain = net->register_module("domain", Net(run, 96, 2));
  auto optimizer = SgdOf(net->parameters(), 0.02);
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor h = net->body->forward(run.Noise(i, {8, kWidth}));
            const auto cross = [](const Tensor& logits, const Tensor& target) {
              return torch::nll_loss(torch::log_softmax(Float(logits), 1), target);
            };
            const Tensor loss =
                cross(net->label->forward(h), run.Indices(i, 10, {8})) +
                cross(net->domain->forward(Reversed::apply(h, 0.1 * static_cast<double>(i + 1))),
                      run.Indices(90 + i, 2, {8}));
            optimizer->zero_grad();
            loss.backward();
            nn::utils::clip_grad_value_(net->parameters(), 1e-3);
            optimizer->step();
            return loss;
          }};
}

// Signs of latent weights compute; the latent ones are clamped.
struct Sign : torch::autograd::Function<Sign> {
  static Tensor forward(AutogradContext* ctx, const Tensor& w) {
    ctx->save_for_backward({w});
    return w.sign();
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list gradients) {
    return {gradients[0] * (ctx->get_saved_variables()[0].abs() <= 1)};
  }
};
Trainer Binarised(Run& run) {
  auto net = Net(run, kWidth, kWidth);
  auto optimizer = AdamOf(net->parameters(), 0.3);
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            {
              const NoGradGuard no_grad;
              for (Tensor& parameter : net->parameters()) parameter.clamp_(-1, 1);
            }
            nn::LinearImpl &first = net->at<nn::LinearImpl>(0), &last = net->at<nn::LinearImpl>(2);
            const Tensor x = run.Noise(i, {6, kWidth});
            const Tensor h = torch::linear(x, Sign::apply(first.weight), first.bias).tanh();
            const Tensor loss = Mean(torch::linear(h, Sign::apply(last.weight), last.bias) - x);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// Activations are computed from what comes after them.
struct Reversible : torch::autograd::Function<Reversible> {
  static tensor_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                             const Tensor& f, const Tensor& g) {
    const Tensor c = a + torch::tanh(b.mm(f)), d = b + torch::tanh(c.mm(g));
    ctx->save_for_backward({c, d, f, g});
    return {c, d};
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list gradients) {
    const auto saved = ctx->get_saved_variables();
    Tensor c = saved[0].detach().requires_grad_(), d = saved[1].detach();
    const at::AutoGradMode grad(true);
    const Tensor gc = torch::tanh(c.mm(saved[3]));
    auto first = torch::autograd::grad({gc}, {c, saved[3]}, {gradients[1]});
    const Tensor of_c = gradients[0] + first[0];
    Tensor b = (d - gc).detach().requires_grad_();
    const Tensor fb = torch::tanh(b.mm(saved[2]));
    auto second = torch::autograd::grad({fb}, {b, saved[2]}, {of_c});
    return {of_c, gradients[1] + second[0], second[1], first[1]};
  }
};
Trainer ReversibleBlocks(Run& run) {
  auto net = std::make_shared<Bare>();
  for (int i = 0; i < 6; ++i)
    net->register_parameter("w" + std::to_string(i), torch::randn({kWidth, kWidth}) * 0.05);
  net->to(run.dtype());
  auto optimizer = MakeOwn<optim::Adagrad>(net->parameters(), optim::AdagradOptions(0.01));
  return {net, {optimizer}, [=, &run](int64_t i) {
            Tensor a = run.Noise(i, {6, kWidth}), b = run.Noise(40 + i, {6, kWidth});
            for (int at = 0; at < 6; at += 2) {
              const auto out = Reversible::apply(a, b, net->Get("w" + std::to_string(at)),
                                                 net->Get("w" + std::to_string(at + 1)));
              a = out[0];
              b = out[1];
            }
            const Tensor loss = Mean(a - 1) + Mean(b + 1);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// A fixed point, whose gradient is found by iteration in a hook.
Trainer Equilibrium(Run& run) {
  auto net = std::make_shared<Bare>();
  net->register_parameter("w", torch::randn({kWidth, kWidth}) * 0.02);
  net->register_parameter("in", torch::randn({kWidth, kWidth}) * 0.05);
  net->to(run.dtype());
  auto optimizer = AdamOf(net->parameters());
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor x = run.Noise(i, {6, kWidth});
            const auto f = [=](const Tensor& z) {
              return torch::tanh(z.mm(net->Get("w")) + x.mm(net->Get("in")));
            };
            Tensor z = torch::zeros_like(x);
            {
              const NoGradGuard no_grad;
              for (int k = 0; k < 6; ++k) z = f(z);
            }
            Tensor out = f(z);
            const Tensor at = z.detach().requires_grad_(), there = f(at);
            out.register_hook([=](const Tensor& gradient) {
              Tensor g = gradient;
              for (int k = 0; k < 4; ++k)
                g = torch::autograd::grad({there}, {at}, {g}, true)[0] + gradient;
              return g;
            });
            const Tensor loss = Mean(out - 0.5);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// A net makes the weights of another.
Trainer Hypernetwork(Run& run) {
  auto net = std::make_shared<Bare>();
  net->register_parameter("code", torch::randn({4, 16}));
  net->register_parameter("to_weights", torch::randn({16, 64 * 64}) * 0.05);
  net->register_parameter("to_biases", torch::randn({16, 64}) * 0.05);
  net->to(run.dtype());
  auto optimizer = MakeOwn<optim::RMSprop>(
      net->parameters(), optim::RMSpropOptions(1e-3).centered(true).momentum(0.5));
  return {net, {optimizer}, [=, &run](int64_t i) {
            Tensor h = run.Noise(i, {6, 64});
            const Tensor weights = net->Get("code").mm(net->Get("to_weights")).view({4, 64, 64});
            const Tensor biases = net->Get("code").mm(net->Get("to_biases"));
            for (int layer = 0; layer < 4; ++layer)
              h = torch::tanh(torch::addmm(biases[layer], h, weights[layer]));
            const Tensor loss = Mean(h - 0.2);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// Bags of words of all modes, with and without weights of the words.
Trainer Bags(Run& run) {
  struct Net_ : nn::Module {
    nn::EmbeddingBag sum{nullptr}, mean{nullptr}, max{nullptr};
    nn::Linear out{nullptr};
  };
  auto net = std::make_shared<Net_>();
  const auto bag = [](auto mode) {
    return nn::EmbeddingBag(nn::EmbeddingBagOptions(700, 48).mode(mode));
  };
  net->sum = net->register_module("sum", bag(torch::kSum));
  net->mean = net->register_module("mean", bag(torch::kMean));
  net->max = net->register_module("max", bag(torch::kMax));
  net->out = net->register_module("out", nn::Linear(144, 5));
  net->to(run.dtype());
  auto optimizer = MakeOwn<optim::Adagrad>(net->parameters(), optim::AdagradOptions(0.05));
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor words = run.Indices(i, 700, {30});
            const Tensor offsets = torch::tensor({0, 4, 4, 17}, at::kLong);
            const Tensor weights = run.Noise(i, {30});
            const Tensor h =
                torch::cat({net->sum->forward(words, offsets, weights),
                            net->mean->forward(words, offsets), net->max->forward(words, offsets)},
                           1);
            const Tensor loss = Mean(net->out->forward(h) - 1);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// Words of one table at both ends; the rate rises and falls; smoothed labels.
Trainer Translation(Run& run) {
  struct Net_ : nn::Module {
    nn::Embedding table{nullptr};
    nn::Transformer body{nullptr};
  };
  auto net = std::make_shared<Net_>();
  net->table = net->register_module("table", nn::Embedding(150, 64));
  net->body = net->register_module(
      "body",
      nn::Transformer(nn::TransformerOptions(64, 4, 1, 1).dim_feedforward(256).dropout(0.1)));
  net->to(run.dtype());
  auto optimizer =
      MakeOwn<optim::AdamW>(net->parameters(), optim::AdamWOptions(1e-3).betas({0.9, 0.98}));
  return {net, {optimizer}, [=, &run](int64_t i) {
            const Tensor from = run.Indices(i, 150, {7, 3}), to = run.Indices(60 + i, 150, {6, 3});
            const double step = static_cast<double>(i + 1);
            for (auto& group : optimizer->param_groups())
              group.options().set_lr(0.05 * std::min(std::pow(step, -0.5), step * 0.2));
            const Tensor h = net->body->forward(
                net->table(from), net->table(to), Tensor(),
                nn::TransformerImpl::generate_square_subsequent_mask(6).to(run.dtype()));
            const Tensor logits = torch::log_softmax(Float(h.matmul(net->table->weight.t())), 2);
            const Tensor loss =
                -(0.9 * logits.gather(2, to.unsqueeze(2)).mean() + 0.1 * logits.mean());
            optimizer->zero_grad();
            loss.backward();
            nn::utils::clip_grad_norm_(net->parameters(), 0.5, 1.0);
            optimizer->step();
            return loss;
          }};
}

// A penalty for leaving what an earlier task needs, whose measure is a buffer.
Trainer Consolidated(Run& run) {
  auto net = std::make_shared<Bare>();
  net->register_parameter("w", torch::randn({kWidth, kInner}) * 0.05);
  net->register_buffer("need", torch::zeros({kWidth, kInner}));
  net->register_buffer("old", torch::zeros({kWidth, kInner}));
  net->to(run.dtype());
  auto optimizer = SgdOf(net->parameters(), 0.5);
  return {net, {optimizer}, [=, &run](int64_t i) {
            auto buffers = net->named_buffers();
            Tensor need = buffers["need"], old = buffers["old"];
            const Tensor w = net->Get("w");
            const Tensor fit = Mean(run.Noise(i, {6, kWidth}).mm(w) - (i < 3 ? 1 : -1));
            const Tensor loss = fit + 100 * (Float(need) * (Float(w) - Float(old)).square()).sum();
            Descend(loss, *optimizer);
            if (i == 2) {
              need.add_(w.grad().square());
              old.copy_(w.detach());
            }
            return loss;
          }};
}

// Noise is added by hand before every step, and gradients are brought about their mean.
Trainer Langevin(Run& run) {
  auto net = Net(run, kWidth, kWidth);
  auto optimizer = SgdOf(net->parameters(), 0.01);
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            {
              const NoGradGuard no_grad;
              for (Tensor& parameter : net->parameters())
                parameter.add_(torch::randn_like(parameter), 1e-3);
            }
            const Tensor x = run.Noise(i, {6, kWidth});
            const Tensor loss = Mean(net->forward(x) - x);
            optimizer->zero_grad();
            loss.backward();
            for (Tensor& parameter : net->parameters()) {
              if (parameter.dim() > 1)
                parameter.mutable_grad().sub_(parameter.grad().mean(1, true));
            }
            optimizer->step();
            return loss;
          }};
}

// A hook throws in the middle of a backward pass, and what has come until then is stepped.
Trainer PartsOfAPass(Run& run) {
  auto net = Perceptron(run);
  auto optimizer = SgdOf(net->parameters());
  return {
      net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
        const Tensor x = run.Noise(i, {6, kWidth});
        Tensor h = x;
        int at = 0;
        for (auto& module : *net) {
          h = module.forward(h);
          if (at++ == 1 && i % 2 == 1)
            h.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("enough"); });
        }
        const Tensor loss = Mean(h - x);
        optimizer->zero_grad();
        try {
          loss.backward();
        } catch (const std::exception&) {
        }
        optimizer->step();
        return loss;
      }};
}

// Gradients that are no numbers are made zeros; threads come and go.
Trainer NansAndThreads(Run& run) {
  auto net = Perceptron(run);
  auto optimizer = AdamOf(net->parameters());
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            at::set_num_threads(1 + static_cast<int>(i) % 2);
            const Tensor x = run.Noise(i, {6, kWidth});
            Tensor loss = Mean(net->forward(x) - x);
            if (i % 2 == 1) loss = loss + Float(LinearAt(net, 2).weight.mul(0).sqrt()).sum();
            optimizer->zero_grad();
            loss.backward();
            for (Tensor& parameter : net->parameters()) {
              if (parameter.grad().defined()) parameter.mutable_grad().nan_to_num_(0, 0, 0);
            }
            optimizer->step();
            at::set_num_threads(1);
            return loss;
          }};
}

// Batches come from tasks of their own, and a task evaluates while the gradients are computed.
Trainer WithTasks(Run& run) {
  auto net = Perceptron(run);
  auto optimizer = AdamOf(net->parameters());
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            auto batch = std::async(std::launch::async, [&] { return run.Noise(i, {6, kWidth}); });
            const Tensor x = batch.get();
            auto evaluated = std::async(std::launch::async, [&] {
              const NoGradGuard no_grad;
              at::set_num_threads(1);
              return Mean(net->forward(run.Noise(77, {6, kWidth})));
            });
            const Tensor loss = Mean(net->forward(x) - x);
            optimizer->zero_grad();
            loss.backward();
            const Tensor seen = evaluated.get();
            optimizer->step();
            return loss + seen;
          }};
}

// Second derivatives by the input.
Trainer Physics(Run& run) {
  torch::manual_seed(8);
  auto net = run.Cast(nn::Sequential(nn::Linear(2, kInner), nn::Tanh(), nn::Linear(kInner, kInner),
                                     nn::Tanh(), nn::Linear(kInner, 1)));
  auto optimizer = AdamOf(net->parameters());
  return {net.ptr(), {optimizer}, [=, &run](int64_t i) mutable {
            const Tensor x = run.Noise(i, {12, 2}).requires_grad_();
            const Tensor u = net->forward(x);
            const Tensor du = torch::autograd::grad({u.sum()}, {x}, {}, true, true)[0];
            const Tensor dd =
                torch::autograd::grad({du.select(1, 1).sum()}, {x}, {}, true, true)[0];
            const Tensor loss = Mean(du.select(1, 0) - 0.1 * dd.select(1, 1)) + Mean(u - 1);
            Descend(loss, *optimizer);
            return loss;
          }};
}

// ---- Several engines ---------------------------------------------------------------------------

// Clients train on their own, and all begin the next round with the mean of their weights.
void Federated(Run& run) {
  std::vector<nn::Sequential> clients;
  std::vector<std::shared_ptr<Engine>> engines;
  for (int client = 0; client < 3; ++client) {
    clients.push_back(Perceptron(run));
    engines.push_back(run.Open());
  }
  for (int round = 0; round < 3; ++round) {
    for (int client = 0; client < 3; ++client) {
      optim::SGD own(clients[client]->parameters(), optim::SGDOptions(0.05).momentum(0.9));
      engines[client]->Attach(*clients[client], own);
      Train(run, clients[client], own, 10 * round + 3 * client, 10 * round + 3 * client + 2);
    }
    const NoGradGuard no_grad;
    for (size_t p = 0; p < clients[0]->parameters().size(); ++p) {
      Tensor mean = torch::zeros_like(clients[0]->parameters()[p], at::kFloat);
      for (auto& client : clients) mean.add_(client->parameters()[p], 1.0 / 3);
      for (auto& client : clients) client->parameters()[p].copy_(mean);
    }
  }
  for (auto& client : clients) run.See(*client);
}

// One follows another by averages, and learns itself.
void PolyakOfTwoEngines(Run& run) {
  auto online = Perceptron(run), target = Perceptron(run);
  auto first = run.Open(), second = run.Open();
  optim::Adam a(online->parameters(), optim::AdamOptions(1e-3));
  optim::SGD b(target->parameters(), optim::SGDOptions(0.01).momentum(0.9));
  first->Attach(*online, a);
  second->Attach(*target, b);
  for (int step = 0; step < 5; ++step) {
    const Tensor x = run.Noise(step, {6, kWidth});
    const Tensor loss = Mean(online->forward(x) - target->forward(x) - 0.1 * x);
    a.zero_grad();
    b.zero_grad();
    loss.backward();
    a.step();
    if (step % 2 == 1) b.step();
    run.See(loss);
    const NoGradGuard no_grad;
    auto to = target->parameters();
    const auto from = online->parameters();
    for (size_t p = 0; p < to.size(); ++p) {
      step % 2 == 0 ? to[p].lerp_(from[p], 0.2) : to[p].mul_(0.8).add_(from[p].detach(), 0.2);
    }
  }
  run.See(*online);
  run.See(*target);
}

// Each generation learns from the last, whose engine is closed then.
void BornAgain(Run& run) {
  nn::Sequential teacher(nullptr);
  std::shared_ptr<Engine> of_teacher;
  for (int generation = 0; generation < 3; ++generation) {
    auto student = Perceptron(run);
    auto engine = run.Open();
    optim::AdamW own(student->parameters(), optim::AdamWOptions(1e-3));
    engine->Attach(*student, own);
    for (int step = 0; step < 2; ++step) {
      const Tensor x = run.Noise(10 * generation + step, {6, kWidth});
      Tensor goal = x;
      if (!teacher.is_empty()) {
        const NoGradGuard no_grad;
        goal = teacher->forward(x);
      }
      const Tensor loss = Mean(student->forward(x) - goal);
      Descend(loss, own);
      run.See(loss);
    }
    teacher = student;
    of_teacher = engine;
  }
  run.See(*teacher);
}

// Slow weights that the program keeps, to which the model goes back.
void Lookahead(Run& run) {
  auto model = Perceptron(run);
  auto engine = run.Open();
  optim::Adam own(model->parameters(), optim::AdamOptions(1e-2));
  engine->Attach(*model, own);
  std::vector<Tensor> slow;
  for (const Tensor& parameter : model->parameters()) slow.push_back(parameter.detach().clone());
  for (int step = 0; step < 6; ++step) {
    TrainStep(run, model, own, step);
    if (step % 2 == 0) continue;
    const NoGradGuard no_grad;
    auto parameters = model->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      slow[p].add_(parameters[p] - slow[p], 0.5);
      parameters[p].copy_(slow[p]);
    }
  }
  run.See(*model);
}

// Masks, back to the first weights, and an optimizer for each round.
void LotteryTicket(Run& run) {
  auto model = Perceptron(run);
  auto engine = run.Open();
  std::vector<Tensor> first, masks;
  for (const Tensor& parameter : model->parameters()) {
    first.push_back(parameter.detach().clone());
    masks.push_back(torch::ones_like(parameter));
  }
  for (int round = 0; round < 3; ++round) {
    auto own = AdamOf(model->parameters(), 1e-2);
    engine->Attach(*model, *own);
    for (int step = 0; step < 2; ++step) {
      const Tensor loss = Loss(run, model, 10 * round + step);
      own->zero_grad();
      loss.backward();
      auto parameters = model->parameters();
      for (size_t p = 0; p < parameters.size(); ++p) parameters[p].mutable_grad().mul_(masks[p]);
      own->step();
      run.See(loss);
    }
    const NoGradGuard no_grad;
    auto parameters = model->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const Tensor size = Float(parameters[p]).abs();
      masks[p].mul_(size > size.median());
      parameters[p].copy_(first[p] * masks[p]);
    }
  }
  run.See(*model);
}

// ---- Files of the program's own ----------------------------------------------------------------

enum class Order { kModelFirst, kOptimizerFirst, kBeforeAttach, kOfEngine };

// A trainer that keeps no job, but files: each run begins with those of the last.
enum class Kind { kAdamW, kMomentum, kSgd };
void FromFiles(Run& run, Order order, Kind kind = Kind::kAdamW) {
  std::string of_model, of_optimizer;
  for (int part = 0; part < 3; ++part) {
    if (IsInMemory() && part > 0) break;
    torch::manual_seed(100 + part);  // other weights, which the file's replace
    auto model =
        run.Cast(nn::Sequential(nn::Linear(kWidth, kInner), nn::Tanh(), nn::Linear(kInner, kWidth),
                                nn::GELU(), nn::Linear(kWidth, kWidth)));
    if (part == 0) model = Perceptron(run);
    auto engine = run.Open();
    std::unique_ptr<optim::Optimizer> own;
    const auto make = [&]() -> std::unique_ptr<optim::Optimizer> {
      if (kind == Kind::kAdamW)
        return std::make_unique<optim::AdamW>(model->parameters(),
                                              optim::AdamWOptions(1e-3).weight_decay(0.1));
      return std::make_unique<optim::SGD>(
          model->parameters(), optim::SGDOptions(0.05).momentum(kind == Kind::kSgd ? 0 : 0.9));
    };
    const auto read = [&](auto& to, const std::string& file) {
      if (part == 0) return;
      std::istringstream stream(file);
      torch::load(to, stream);
    };
    if (order == Order::kOfEngine) {
      own = engine->AdamW(*model, optim::AdamWOptions(1e-3).weight_decay(0.1));
    } else {
      own = make();
      if (order == Order::kBeforeAttach) read(*own, of_optimizer);
      engine->Attach(*model, *own);
    }
    if (order == Order::kOptimizerFirst) read(*own, of_optimizer);
    read(model, of_model);
    if (order == Order::kModelFirst || order == Order::kOfEngine) read(*own, of_optimizer);
    const uint64_t end = IsInMemory() ? 9 : 3 * part + 3;
    for (uint64_t step = 3 * part; step < end; ++step) {
      const Tensor loss = Loss(run, model, step);
      Descend(loss, *own);
      run.See(loss);
    }
    std::ostringstream model_out, optimizer_out;
    torch::save(model, model_out);
    torch::save(*own, optimizer_out);
    of_model = model_out.str();
    of_optimizer = optimizer_out.str();
    if (end == 9) {
      for (const Tensor& parameter : model->parameters())
        run.See(engine->Gather(parameter, "master"));
    }
  }
}

}  // namespace

Programs TrainerPrograms() {
  return {
      Killed("low_rank_parts_merged", LowRankMerged),
      Killed("all_weights_are_one_vector", OneVector),
      Killed("spectrum_limited_behind_each_step", SpectrumLimited),
      Killed("wasserstein_with_penalty", Wasserstein, 4),
      Killed("momentum_contrast", MomentumContrast),
      Killed("variational_autoencoder", Variational),
      Killed("domain_adversarial", DomainAdversarial),
      Killed("binarised_weights", Binarised),
      Killed("reversible_blocks", ReversibleBlocks),
      Killed("deep_equilibrium", Equilibrium),
      Killed("hypernetwork", Hypernetwork),
      Killed("bags_of_words", Bags),
      Killed("translation_with_one_table", Translation),
      Killed("elastic_weight_consolidation", Consolidated),
      Killed("langevin_noise", Langevin),
      Killed("parts_of_a_pass_are_stepped", PartsOfAPass),
      {"nans_and_threads",
       [](Run& run) {  // a fork has no threads of OpenMP
         Iterate(run, NansAndThreads, run.options().job, 6, 1, 0, /*is_last=*/true);
       }},
      Killed("with_tasks", WithTasks),
      Killed("physics_informed", Physics),
      {"federated", Federated},
      {"polyak_of_two_engines", PolyakOfTwoEngines},
      {"born_again", BornAgain},
      {"lookahead_by_hand", Lookahead},
      {"lottery_ticket", LotteryTicket},
      {"from_files_model_first", [](Run& run) { FromFiles(run, Order::kModelFirst); }},
      {"from_files_optimizer_first", [](Run& run) { FromFiles(run, Order::kOptimizerFirst); }},
      {"from_files_before_attaching", [](Run& run) { FromFiles(run, Order::kBeforeAttach); }},
      {"from_files_of_the_engines_optimizer", [](Run& run) { FromFiles(run, Order::kOfEngine); }},
      {"from_files_momentum",
       [](Run& run) { FromFiles(run, Order::kModelFirst, Kind::kMomentum); }},
      {"from_files_sgd", [](Run& run) { FromFiles(run, Order::kModelFirst, Kind::kSgd); }},
      {"from_files_sgd_before_attaching",
       [](Run& run) { FromFiles(run, Order::kBeforeAttach, Kind::kSgd); }},
  };
}

}  // namespace offload::battery
