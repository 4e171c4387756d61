// Programs of the battery that make optimizers anew, again and again, in runs that are ended and
// begun again.

#include <signal.h>
#include <sys/wait.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

struct LifeIsOver {};

// One run of a program, which makes everything again in its order, and skips the steps that the job
// has taken already.
class Life {
 public:
  Life(Run& run, int64_t end, bool is_killed, bool is_last, const std::string& job)
      : run_(run), end_(end), is_killed_(is_killed), is_last_(is_last) {
    model = Perceptron(run);
    engine = run.Open([&](Options& options) {
      options.job = job;
      options.ram = "128MiB";
    });
    begun_at_ = engine->step();
  }

  template <class Own>
  std::unique_ptr<Own> Attach(std::unique_ptr<Own> own) {
    engine->Attach(*model, *own);
    return own;
  }

  // Whether the job has to take this step.
  bool Begins() {
    if (step_ >= end_) Die();
    return step_ >= begun_at_ || (++step_, false);
  }
  void Step(optim::Optimizer& own) {
    if (!Begins()) return;
    const Tensor loss = own.step([&] {
      model->zero_grad();
      Tensor loss = Loss(run_, model, step_);
      loss.backward();
      return loss;
    });
    if (is_last_ && step_ >= begun_at_) losses.push_back(loss);
    ++step_;
    if (step_ >= end_ && !dies_late) Die();
  }
  void Die() {
    if (is_last_) return;
    if (is_killed_) kill(getpid(), SIGKILL);
    throw LifeIsOver();
  }

  std::vector<Tensor> Of(size_t at) { return LinearAt(model, at).parameters(); }

  nn::Sequential model = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<Tensor> losses;
  bool dies_late = false;  // before the next step begins, not behind the last

 private:
  Run& run_;
  int64_t end_, begun_at_ = 0, step_ = 0;
  bool is_killed_, is_last_;
};

using Body = std::function<void(Life&)>;

// `ends`: steps at which a run ends and another begins; `all` of them are compared.
void InLives(Run& run, const std::vector<int64_t>& ends, int64_t all, bool is_killed,
             const Body& body) {
  std::string job = run.options().job + "-lives";
  if (!IsInMemory()) {
    for (const int64_t end : ends) {
      const auto live = [&] {
        try {
          Life life(run, end, is_killed, /*is_last=*/false, job);
          body(life);
        } catch (const LifeIsOver&) {
        }
      };
      if (!is_killed) {
        live();
        continue;
      }
      const pid_t child = fork();
      if (child == 0) {
        try {
          live();
        } catch (const std::exception& error) {
          fprintf(stderr, "child: %s\n", error.what());
        }
        _exit(3);
      }
      int status = 0;
      waitpid(child, &status, 0);
      run.See(static_cast<double>(WIFSIGNALED(status)));
    }
  } else if (is_killed) {
    for (size_t i = 0; i < ends.size(); ++i) run.See(1.0);
  }
  Life life(run, all, is_killed, /*is_last=*/true, job);
  body(life);
  const size_t of_last = all - (ends.empty() ? 0 : ends.back());
  const size_t skipped = life.losses.size() > of_last ? life.losses.size() - of_last : 0;
  for (size_t i = skipped; i < life.losses.size(); ++i) run.See(life.losses[i]);
  run.See(static_cast<double>(life.engine->step()));
  run.See(*life.model);
}

Program Ended(std::string name, std::vector<int64_t> ends, int64_t all, Body body) {
  return {std::move(name), [=](Run& run) { InLives(run, ends, all, /*is_killed=*/false, body); }};
}
Program Killed(std::string name, std::vector<int64_t> ends, int64_t all, Body body) {
  return {std::move(name), [=](Run& run) { InLives(run, ends, all, /*is_killed=*/true, body); }};
}

std::unique_ptr<optim::LBFGS> Lbfgs(std::vector<Tensor> parameters) {
  return std::make_unique<optim::LBFGS>(std::move(parameters),
                                        optim::LBFGSOptions(0.1).max_iter(3).history_size(4));
}
std::unique_ptr<optim::SGD> Momentum(std::vector<Tensor> parameters) {
  return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<optim::Adam> Adam(std::vector<Tensor> parameters) {
  return std::make_unique<optim::Adam>(std::move(parameters), optim::AdamOptions(1e-3));
}
std::unique_ptr<optim::SGD> InTwoGroups(Life& life) {
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(life.Of(4));
  std::vector<Tensor> rest = life.Of(0);
  for (const Tensor& tensor : life.Of(2)) rest.push_back(tensor);
  groups.emplace_back(rest);
  return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.05).momentum(0.9));
}

// Two at a time, which step in turn.
void TwoLive(Life& life) {
  for (int epoch = 0; epoch < 4; ++epoch) {
    auto a = life.Attach(Lbfgs(life.model->parameters()));
    auto b = life.Attach(Lbfgs(life.model->parameters()));
    for (int i = 0; i < 2; ++i) {
      life.Step(*a);
      life.Step(*b);
    }
  }
}

// The next is attached before the last is destroyed.
void Overlapping(Life& life) {
  auto own = life.Attach(Lbfgs(life.model->parameters()));
  for (int epoch = 0; epoch < 5; ++epoch) {
    life.Step(*own);
    life.Step(*own);
    auto next = life.Attach(Lbfgs(life.model->parameters()));
    own = std::move(next);
  }
}

void DroppedUnused(Life& life) {
  for (int epoch = 0; epoch < 4; ++epoch) {
    life.Attach(Lbfgs(life.model->parameters()));
    auto own = life.Attach(Lbfgs(life.model->parameters()));
    life.Step(*own);
    life.Step(*own);
    own.reset();
    life.Attach(Lbfgs(life.model->parameters()));
  }
}

void OtherLayers(Life& life) {
  for (int epoch = 0; epoch < 6; ++epoch) {
    auto own = life.Attach(Lbfgs(life.Of(epoch % 3 * 2)));
    life.Step(*own);
    life.Step(*own);
  }
}

void OtherLayersOfTwo(Life& life) {
  for (int epoch = 0; epoch < 4; ++epoch) {
    auto first = life.Attach(Lbfgs(life.Of(epoch % 2 * 2)));
    auto second = life.Attach(Lbfgs(life.Of(4)));
    life.Step(*first);
    life.Step(*second);
    (epoch % 2 == 0 ? first : second).reset();
  }
}

void OtherGroups(Life& life) {
  {
    auto own = life.Attach(Adam(life.model->parameters()));
    life.Step(*own);
  }
  for (int epoch = 0; epoch < 5; ++epoch) {
    std::unique_ptr<optim::SGD> own =
        life.Attach(epoch % 2 == 0 ? Momentum(life.model->parameters()) : InTwoGroups(life));
    life.Step(*own);
    life.Step(*own);
  }
}

// In the order of the parameters, and in another.
void OtherOrder(Life& life) {
  {
    auto own = life.Attach(Adam(life.model->parameters()));
    life.Step(*own);
  }
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<Tensor> parameters = life.model->parameters();
    if (epoch % 2 == 1) std::reverse(parameters.begin(), parameters.end());
    auto own = life.Attach(Momentum(parameters));
    life.Step(*own);
    life.Step(*own);
  }
}

void EmplacedAnd(Life& life, bool is_asked_first) {
  std::optional<optim::LBFGS> own;
  for (int epoch = 0; epoch < 4; ++epoch) {
    own.emplace(life.model->parameters(), optim::LBFGSOptions(0.1).max_iter(3).history_size(4));
    if (is_asked_first) own->state().clear();
    life.engine->Attach(*life.model, *own);
    life.Step(*own);
    life.Step(*own);
  }
}
void Emplaced(Life& life) { EmplacedAnd(life, /*is_asked_first=*/false); }
void EmplacedAndAskedFirst(Life& life) { EmplacedAnd(life, /*is_asked_first=*/true); }

void MadeBeforeTheLastDies(Life& life) {
  std::unique_ptr<optim::LBFGS> own;
  for (int epoch = 0; epoch < 4; ++epoch) {
    own = Lbfgs(life.model->parameters());
    life.engine->Attach(*life.model, *own);
    life.Step(*own);
    life.Step(*own);
  }
}

// LBFGS and one of the daemon in turn.
void InTurnWithTheDaemons(Life& life) {
  for (int epoch = 0; epoch < 3; ++epoch) {
    {
      auto own = life.Attach(Lbfgs(life.model->parameters()));
      life.Step(*own);
      life.Step(*own);
    }
    auto own = life.Attach(Adam(life.model->parameters()));
    life.Step(*own);
    life.Step(*own);
  }
}

// The next begins with the file of the last.
void WithTheFileOfTheLast(Life& life) {
  {
    auto own = life.Attach(Adam(life.model->parameters()));
    life.Step(*own);
  }
  std::string file;
  for (int epoch = 0; epoch < 4; ++epoch) {
    auto own = life.Attach(Momentum(life.model->parameters()));
    if (!file.empty()) {
      std::istringstream stream(file);
      torch::load(*own, stream);
    }
    life.Step(*own);
    life.Step(*own);
    std::ostringstream stream;
    torch::save(*own, stream);
    file = stream.str();
  }
}

// What is killed is so before the next is made, or behind that.
void DiesLate(Life& life) {
  life.dies_late = true;
  OtherLayers(life);
}
void LbfgsDiesLate(Life& life) {
  life.dies_late = true;
  MadeBeforeTheLastDies(life);
}

// An embedding with sparse gradients and momentum.
void SparseForEachEpoch(Run& run) {
  std::string job;
  for (const int end : IsInMemory() ? std::vector{8} : std::vector{3, 4, 8}) {
    torch::manual_seed(3);
    nn::Embedding table(nn::EmbeddingOptions(300, 96).sparse(true));
    auto engine = run.Open([&](Options& options) {
      if (job.empty()) job = options.job;
      options.job = job;
      options.ram = "128MiB";
    });
    for (int step = engine->step(), epoch = 0; step < end; ++epoch) {
      optim::SGD own(table->parameters(), optim::SGDOptions(0.1).momentum(0.9));
      engine->Attach(*table, own);
      for (; step < std::min(end, 2 * epoch + 2); ++step) {
        own.zero_grad();
        const Tensor loss = Mean(table(run.Indices(step, 300, {20})) - 1);
        loss.backward();
        own.step();
        run.See(loss);
      }
    }
    if (end == 8) run.See(*table);
  }
}

void GatherOfWhatIsDead(Run& run) {
  auto model = Perceptron(run);
  auto engine = run.Open();
  for (const bool is_first : {true, false}) {
    std::unique_ptr<optim::Optimizer> own;
    if (is_first) {
      own = Adam(model->parameters());
    } else {
      own = Momentum(model->parameters());
    }
    engine->Attach(*model, *own);
    Train(run, model, *own, 0, 2);
  }
  for (const Tensor& parameter : model->parameters()) {
    run.See(engine->Gather(parameter, "weight"));
    run.See(engine->Gather(parameter, "momentum_buffer"));
  }
}

}  // namespace

Programs AnewPrograms() {
  return {
      Ended("anew_two_live", {3, 6, 9}, 16, TwoLive),
      Ended("anew_overlapping", {3, 5}, 10, Overlapping),
      Ended("anew_dropped_unused", {2, 3, 5}, 8, DroppedUnused),
      Ended("anew_other_layers", {3, 7, 8}, 12, OtherLayers),
      Ended("anew_other_layers_of_two", {3, 5}, 8, OtherLayersOfTwo),
      Ended("anew_other_groups", {4, 6, 8}, 11, OtherGroups),
      Ended("anew_other_order", {4, 6}, 9, OtherOrder),
      Ended("anew_emplaced", {3, 4, 5}, 8, Emplaced),
      Ended("anew_emplaced_and_asked_first", {3, 5}, 8, EmplacedAndAskedFirst),
      Ended("anew_made_before_the_last_dies", {3, 4, 5}, 8, MadeBeforeTheLastDies),
      Ended("anew_in_turn_with_the_daemons", {3, 5, 7}, 12, InTurnWithTheDaemons),
      Ended("anew_with_the_file_of_the_last", {}, 9, WithTheFileOfTheLast),
      Killed("anew_killed_two_live", {3, 6}, 16, TwoLive),
      Killed("anew_killed_late", {2, 4, 7}, 12, DiesLate),
      Killed("anew_killed_lbfgs_late", {2, 4, 5}, 8, LbfgsDiesLate),
      Killed("anew_killed_overlapping", {3, 5}, 10, Overlapping),
      Killed("anew_killed_other_groups", {3, 6}, 11, OtherGroups),
      {"anew_sparse", SparseForEachEpoch, 0, true},
      {"gather_of_what_is_dead", GatherOfWhatIsDead},
  };
}

}  // namespace offload::battery
