// Programs of the battery about how programs live: threads, several models and engines, resuming,
// what is destroyed first, what may not be attached.

#include <ATen/Functions.h>
#include <torch/data.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <filesystem>
#include <future>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

using torch::NoGradGuard;

std::unique_ptr<optim::Optimizer> MakeSgd(Engine& engine, nn::Module& model) {
  return engine.SGD(model, optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<optim::Optimizer> MakeAdamW(Engine& engine, nn::Module& model) {
  return engine.AdamW(model, optim::AdamWOptions(1e-2));
}

class InFolder {
 public:
  explicit InFolder(const std::filesystem::path& folder) { std::filesystem::current_path(folder); }
  ~InFolder() { std::filesystem::current_path(before_); }
  InFolder(const InFolder&) = delete;
  InFolder& operator=(const InFolder&) = delete;

 private:
  const std::filesystem::path before_ = std::filesystem::current_path();
};

// A model with statistics and dropout, trained in parts.
nn::Sequential Normalised(const Run& run) {
  torch::manual_seed(21);
  return run.Cast(nn::Sequential(nn::Linear(kWidth, kInner), nn::BatchNorm1d(kInner), nn::ReLU(),
                                 nn::Linear(kInner, kWidth)));
}

// Trains `parts` runs of `steps` steps: of one process in memory, of one after another offloaded,
// each with a model of its own that the job gives its weights.
template <class Make>
void TrainInParts(
    Run& run, Make make, int parts, int steps,
    const std::function<nn::Sequential(const Run&)>& model_of,
    const std::function<void(Options&)>& change = [](Options&) {}) {
  const bool in_memory = IsInMemory();
  nn::Sequential model(nullptr);
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> optimizer;
  for (int part = 0; part < parts; ++part) {
    if (part == 0 || !in_memory) {
      optimizer.reset();
      engine.reset();
      model = model_of(run);
      engine = part == 0 ? run.Open(change) : run.Reopen();
      optimizer = make(*engine, *model);
    }
    run.See(static_cast<double>(engine->step()));
    Train(run, model, *optimizer, part * steps, part * steps + steps);
  }
  model->eval();
  run.See(battery::Loss(run, model, 200));
  run.See(*model);
}

struct Numbers : torch::data::Dataset<Numbers> {
  torch::data::Example<> get(size_t index) override {
    const Tensor x = at::full({kWidth}, 0.01 * static_cast<double>(index));
    return {x, x * 2};
  }
  std::optional<size_t> size() const override { return 24; }
};

// To one engine, which has its store before the last is there.
template <class... Kinds>
void AttachByThreads(Run& run) {
  constexpr size_t kThreads = 4;
  using Maker = std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)>;
  const std::vector<Maker> makers = {[](std::vector<Tensor> parameters) {
    return std::make_unique<Kinds>(std::move(parameters), 1e-3);
  }...};
  const auto engine = run.Open();
  std::vector<nn::Sequential> models;
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
  for (size_t i = 0; i < kThreads; ++i) {
    models.push_back(i % 2 == 0 ? Perceptron(run) : Normalised(run));
    optimizers.push_back(makers[i % makers.size()](models[i]->parameters()));
  }
  const auto in_threads = [&](const std::function<void(size_t)>& work) {
    std::vector<std::future<void>> threads;
    for (size_t i = 0; i < kThreads; ++i)
      threads.push_back(std::async(std::launch::async, work, i));
    for (const std::future<void>& thread : threads) thread.wait();
    for (std::future<void>& thread : threads) thread.get();
  };
  in_threads([&](size_t i) {
    engine->Attach(*models[i], *optimizers[i]);
    const at::NoGradGuard no_grad;
    models[i]->forward(run.Noise(i, {6, kWidth}));
  });
  in_threads([&](size_t i) {
    for (size_t step = 0; step < 6; ++step) {
      battery::Loss(run, models[i], step + i).backward();
      optimizers[i]->step();
      optimizers[i]->zero_grad();
    }
  });
  run.See(static_cast<double>(engine->step()));
  for (const nn::Sequential& model : models) run.See(*model);
}

// One thread trains while another attaches further models, each with an optimizer of this process.
void TrainWhileOthersAreAttached(Run& run) {
  const auto engine = run.Open();
  nn::Sequential deep;
  for (int block = 0; block < 10; ++block) {
    deep->push_back(nn::Linear(kWidth, kWidth));
    deep->push_back(nn::Tanh());
  }
  run.Cast(deep);
  optim::AdamW optimizer(deep->parameters(), 1e-2);
  engine->Attach(*deep, optimizer);
  Train(run, deep, optimizer, 0, 2);
  std::vector<nn::Sequential> models;
  std::future<void> other = std::async(std::launch::async, [&] {
    for (int i = 0; i < 3; ++i) {
      models.push_back(Normalised(run));
      optim::RMSprop rms_prop(models.back()->parameters(), 1e-3);
      optim::Adagrad adagrad(models.back()->parameters(), 1e-3);
      optim::Optimizer& kind = i % 2 == 0 ? static_cast<optim::Optimizer&>(rms_prop) : adagrad;
      engine->Attach(*models.back(), kind);
      for (int step = 0; step < 2; ++step) {
        battery::Loss(run, models.back(), i + step).backward();
        kind.step();
        kind.zero_grad();
      }
    }
  });
  try {
    Train(run, deep, optimizer, 2, 20);
  } catch (...) {
    other.wait();
    throw;
  }
  other.get();
  run.See(*deep);
  for (const nn::Sequential& model : models) run.See(*model);
}

Programs Threads() {
  return {
      {"data_loader_with_workers",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
             Numbers().map(torch::data::transforms::Stack<>()),
             torch::data::DataLoaderOptions().batch_size(6).workers(2));
         for (auto& batch : *loader) {
           const Tensor loss =
               Mean(model->forward(batch.data.to(run.dtype())) - batch.target.to(run.dtype()));
           loss.backward();
           optimizer->step();
           optimizer->zero_grad();
           run.See(loss);
         }
         run.See(*model);
       }},
      {"training_in_a_thread",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, *model);
         std::thread([&] { Train(run, model, *optimizer, 0, 3); }).join();
         Train(run, model, *optimizer, 3, 4);
         run.See(*model);
       }},
      {"everything_in_a_thread",
       [](Run& run) {
         std::async(std::launch::async, [&] {
           auto model = Perceptron(run);
           auto engine = run.Open();
           auto optimizer = MakeSgd(*engine, *model);
           Train(run, model, *optimizer, 0, 3);
           run.See(*model);
         }).get();
       }},
      {"evaluation_in_a_thread",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, *model);
         for (int step = 0; step < 3; ++step) {
           Train(run, model, *optimizer, step, step + 1);
           Tensor loss;
           std::thread([&] {
             const NoGradGuard no_grad;
             loss = battery::Loss(run, model, 80 + step);
           }).join();
           run.See(loss);
         }
         run.See(*model);
       }},
      // torch gives a thread its number of threads at its first parallel operator: this one has
      // none in plain torch, and none may be put into it.
      {"backward_in_a_thread_of_its_own",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, *model);
         engine->Seal();
         Tensor loss;
         std::binary_semaphore given{0}, done{0};
         constexpr int kSteps = 5;
         std::thread thread([&] {
           for (int step = 0; step < kSteps; ++step) {
             given.acquire();
             loss.backward();
             done.release();
           }
         });
         for (int step = 0; step < kSteps; ++step) {
           loss = battery::Loss(run, model, step);
           given.release();
           done.acquire();
           nn::utils::clip_grad_norm_(model->parameters(), 0.5);
           optimizer->step();
           optimizer->zero_grad();
           run.See(loss);
         }
         thread.join();
         run.See(*model);
       }},
      {"many_readers",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         for (int step = 0; step < 3; ++step) {
           Train(run, model, *optimizer, step, step + 1);
           std::vector<Tensor> losses(4);
           std::vector<std::thread> readers;
           for (int t = 0; t < 4; ++t)
             readers.emplace_back([&, t] {
               const NoGradGuard no_grad;
               for (int i = 0; i < 3; ++i) losses[t] = battery::Loss(run, model, t);
             });
           for (std::thread& reader : readers) reader.join();
           for (const Tensor& loss : losses) run.See(loss);
         }
         run.See(*model);
       }},
      {"readers_while_training",
       [](Run& run) {
         // What they read is of before or after a step, and training is not to see that they do:
         // there is always one that has begun before the step.
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         const Tensor rows = run.Noise(7, {256, kWidth});
         std::atomic<bool> is_done = false;
         std::vector<std::thread> readers;
         for (int t = 0; t < 3; ++t) {
           readers.emplace_back([&] {
             const NoGradGuard no_grad;
             while (!is_done) model->forward(rows);
           });
         }
         for (int step = 0; step < 5; ++step) {
           TrainStep(run, model, *optimizer, step);
           const NoGradGuard no_grad;
           for (Tensor& parameter : model->parameters()) parameter.clamp_(-0.05, 0.05);
         }
         is_done = true;
         for (std::thread& reader : readers) reader.join();
         run.See(*model);
       }},
      {"reader_while_a_layer_is_thawed",
       [](Run& run) {
         // It waits while the store is laid out anew.
         auto model = Perceptron(run);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(false);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         const Tensor rows = run.Noise(7, {64, kWidth});
         std::exception_ptr failure;
         std::jthread reader([&](const std::stop_token& stop) {  // also where ram is refused below
           const NoGradGuard no_grad;
           try {
             while (!stop.stop_requested()) model->forward(rows);
           } catch (...) {
             failure = std::current_exception();
           }
         });
         Train(run, model, *optimizer, 0, 2);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(true);
         Train(run, model, *optimizer, 2, 4);
         reader.request_stop();
         reader.join();
         if (failure) std::rethrow_exception(failure);
         run.See(*model);
       }},
      {"backward_in_threads",
       [](Run& run) {
         auto model = Perceptron(run);
         {
           const NoGradGuard no_grad;  // sums of small integers do not depend on their order
           torch::manual_seed(8);
           for (Tensor& p : model->parameters()) p.copy_(torch::randint(-1, 2, p.sizes()));
         }
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.5));
         for (int step = 0; step < 2; ++step) {
           std::vector<std::thread> threads;
           for (int t = 0; t < 4; ++t)
             threads.emplace_back([&, t] {
               const Tensor x = torch::full({2, kWidth}, t % 2, run.dtype());
               LinearAt(model, 0).forward(x).sum().backward();
             });
           for (std::thread& thread : threads) thread.join();
           run.SeeGradients(*model);
           for (const Tensor& p : LinearAt(model, 0).parameters()) p.grad().clamp_(-1, 1);
           optimizer->step();
           optimizer->zero_grad();
         }
         run.See(*model);
       }},
      {"pointers_read_by_threads",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         std::atomic<uint64_t> sum{0};
         std::vector<std::thread> readers;
         for (const Tensor& parameter : model->parameters())
           readers.emplace_back([&sum, parameter] {
             const auto* const bytes =
                 static_cast<const unsigned char*>(parameter.const_data_ptr());
             uint64_t own = 0;
             for (size_t i = 0; i < parameter.nbytes(); ++i) own += bytes[i];
             sum += own;
           });
         for (std::thread& reader : readers) reader.join();
         run.See(static_cast<double>(sum));
         Train(run, model, *optimizer, 2, 3);
         run.See(*model);
       }},
      // Of more weights and gradients than are shown at once: what one thread touches takes the
      // place of what another writes.
      {"pointers_written_by_threads",
       [](Run& run) {
         torch::manual_seed(4);
         nn::Sequential model;
         for (int i = 0; i < 10; ++i) model->push_back(nn::Linear(512, 512));
         run.Cast(model);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         const std::vector<Tensor> parameters = model->parameters();
         const auto clear = [](const Tensor& tensor, int64_t begin) {
           auto* const bytes = static_cast<std::byte*>(tensor.data_ptr());
           const size_t element_bytes = tensor.element_size();
           for (int64_t i = begin; i < tensor.numel(); i += 1024)
             std::memset(bytes + i * element_bytes, 0, element_bytes);
         };
         for (int step = 0; step < 2; ++step) {
           const Tensor loss = Mean(model->forward(run.Noise(step, {2, 512})));
           loss.backward();
           std::vector<std::thread> threads;
           for (size_t number = 0; number < 4; ++number) {
             threads.emplace_back([&, number] {
               for (size_t i = 0; i < 2 * parameters.size(); ++i) {
                 const Tensor& parameter = parameters[(i * 7 + number * 5) % parameters.size()];
                 clear(parameter, static_cast<int64_t>(number));
                 clear(parameter.grad(), static_cast<int64_t>(number) * 3);
               }
             });
           }
           for (std::thread& thread : threads) thread.join();
           run.SeeGradients(*model);
           optimizer->step();
           optimizer->zero_grad();
           run.See(loss);
         }
         run.See(*model);
       }},
      {"two_engines_in_two_threads",
       [](Run& run) {
         std::vector<nn::Sequential> models = {Perceptron(run), Normalised(run)};
         std::vector<std::shared_ptr<Engine>> engines = {run.Open(), run.Open()};
         std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
         for (int i = 0; i < 2; ++i) optimizers.push_back(MakeSgd(*engines[i], *models[i]));
         std::vector<std::thread> threads;
         for (int i = 0; i < 2; ++i)
           threads.emplace_back([&, i] {
             for (int step = 0; step < 3; ++step) {
               battery::Loss(run, models[i], step).backward();
               optimizers[i]->step();
               optimizers[i]->zero_grad();
             }
           });
         for (std::thread& thread : threads) thread.join();
         for (const nn::Sequential& model : models) run.See(*model);
       }},
      {"attached_by_threads_at_once", AttachByThreads<optim::AdamW>},
      // All but the first to come step in this process.
      {"optimizers_of_several_kinds_attached_by_threads",
       AttachByThreads<optim::AdamW, optim::SGD, optim::RMSprop, optim::Adagrad>},
      {"trains_while_others_are_attached", TrainWhileOthersAreAttached},
      {"two_modules_of_one_job_in_two_threads",
       [](Run& run) {
         std::vector<nn::Sequential> models = {Perceptron(run), Normalised(run)};
         const auto engine = run.Open();
         std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
         for (nn::Sequential& model : models) optimizers.push_back(MakeSgd(*engine, *model));
         std::vector<std::thread> threads;
         std::vector<std::string> errors(2);
         for (int i = 0; i < 2; ++i)
           threads.emplace_back([&, i] {
             try {
               for (int step = 0; step < 8; ++step) {
                 battery::Loss(run, models[i], step).backward();
                 optimizers[i]->step();
                 optimizers[i]->zero_grad();
               }
             } catch (const std::exception& error) {
               errors[i] = error.what();
             }
           });
         for (std::thread& thread : threads) thread.join();
         for (const std::string& error : errors)
           if (!error.empty()) throw std::runtime_error(error);
         run.See(static_cast<double>(engine->step()));
         for (const nn::Sequential& model : models) run.See(*model);
       }},
  };
}

Programs SeveralModels() {
  return {
      {"gan_in_one_job",
       [](Run& run) {
         auto generator = Perceptron(run);
         torch::manual_seed(31);
         nn::Sequential critic = run.Cast(
             nn::Sequential(nn::Linear(kWidth, kInner), nn::LeakyReLU(), nn::Linear(kInner, 1)));
         auto engine = run.Open();
         auto of_generator = MakeAdamW(*engine, *generator);
         auto of_critic = MakeAdamW(*engine, *critic);
         for (int step = 0; step < 3; ++step) {
           const Tensor real = run.Noise(step, {4, kWidth}),
                        noise = run.Noise(step + 50, {4, kWidth});
           for (int inner = 0; inner < 2; ++inner) {
             of_critic->zero_grad();
             const Tensor loss = (at::softplus(-critic->forward(real)) +
                                  at::softplus(critic->forward(generator->forward(noise).detach())))
                                     .mean();
             loss.backward();
             of_critic->step();
             run.See(loss);
           }
           of_generator->zero_grad();
           const Tensor loss = at::softplus(-critic->forward(generator->forward(noise))).mean();
           loss.backward();
           of_generator->step();
           run.See(loss);
         }
         run.See(*generator);
         run.See(*critic);
       }},
      {"gan_in_two_engines",
       [](Run& run) {
         auto generator = Perceptron(run);
         auto critic = Normalised(run);
         auto engine_g = run.Open(), engine_c = run.Open();
         auto of_generator = MakeSgd(*engine_g, *generator);
         auto of_critic = MakeAdamW(*engine_c, *critic);
         for (int step = 0; step < 3; ++step) {
           const Tensor noise = run.Noise(step, {4, kWidth});
           const Tensor made = generator->forward(noise);
           Mean(critic->forward(made.detach()) - noise).backward();
           of_critic->step();
           Mean(critic->forward(made)).backward();
           of_generator->step();
           of_critic->zero_grad();
           of_generator->zero_grad();
         }
         run.See(*generator);
         run.See(*critic);
       }},
      {"distillation_from_a_frozen_teacher",
       [](Run& run) {
         auto teacher = Normalised(run);
         for (Tensor& p : teacher->parameters()) p.set_requires_grad(false);
         teacher->eval();
         auto student = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, *student);
         for (int step = 0; step < 3; ++step) {
           const Tensor x = run.Noise(step, {4, kWidth});
           const Tensor loss = Mean(student->forward(x) - teacher->forward(x));
           loss.backward();
           optimizer->step();
           optimizer->zero_grad();
           run.See(loss);
         }
         run.See(*student);
       }},
      {"weights_shared_between_two_models",
       [](Run& run) {
         auto first = Perceptron(run);
         nn::Sequential second(LinearAt(first, 0), nn::ReLU(), nn::Linear(kInner, kWidth));
         run.Cast(second);
         auto engine = run.Open();
         auto of_first = MakeSgd(*engine, *first);
         auto of_second = MakeSgd(*engine, *second);
         for (int step = 0; step < 3; ++step) {
           TrainStep(run, first, *of_first, step);
           TrainStep(run, second, *of_second, step + 10);
           of_first->zero_grad();
         }
         run.See(*first);
         run.See(*second);
       }},
      {"a_model_is_the_data_of_another",
       [](Run& run) {
         auto first = Perceptron(run), second = Normalised(run);
         auto engine_a = run.Open(), engine_b = run.Open();
         auto of_first = MakeSgd(*engine_a, *first), of_second = MakeSgd(*engine_b, *second);
         for (int step = 0; step < 2; ++step) {
           Train(run, first, *of_first, step, step + 1);
           const NoGradGuard no_grad;
           LinearAt(second, 0).weight.copy_(LinearAt(first, 0).weight);
           at::AutoGradMode grad(true);
           Train(run, second, *of_second, step, step + 1);
         }
         run.See(*second);
       }},
      {"jobs_one_after_another",
       [](Run& run) {
         for (int job = 0; job < 3; ++job) {
           auto model = job == 1 ? Normalised(run) : Perceptron(run);
           auto engine = run.Open();
           auto optimizer = MakeSgd(*engine, *model);
           Train(run, model, *optimizer, job, job + 2);
           run.See(*model);
         }
       }},
      // What was accumulated and not stepped goes on in memory, and with the next job.
      {"gradients_left_at_close",
       [](Run& run) {
         auto model = Perceptron(run);
         for (int job = 0; job < 2; ++job) {
           auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
           auto optimizer = MakeSgd(*engine, *model);
           battery::Loss(run, model, 10 * job).backward();
           optimizer->step();
           if (job == 0) optimizer->zero_grad();
           battery::Loss(run, model, 10 * job + 1).backward();
           run.See(nn::utils::clip_grad_norm_(model->parameters(), 0.05));
           const Tensor kept = model->parameters()[0].grad();
           optimizer.reset();
           engine.reset();
           run.See(kept);
           run.SeeGradients(*model);
           for (const Tensor& parameter : model->parameters()) parameter.grad().mul_(0.5);
           battery::Loss(run, model, 10 * job + 2).backward();
           run.SeeGradients(*model);
         }
         run.See(*model);
       }},
      {"one_model_in_two_jobs_in_turn",
       [](Run& run) {
         auto model = Perceptron(run);
         for (int job = 0; job < 2; ++job) {
           auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
           auto optimizer = MakeSgd(*engine, *model);
           Train(run, model, *optimizer, job, job + 2);
         }
         run.See(*model);
       }},
      {"large_masters_changed_through_data_and_back",
       [](Run& run) {
         torch::manual_seed(2);
         nn::Sequential model;
         for (int i = 0; i < 4; ++i) model->push_back(nn::Linear(1100, 1100));
         model->to(at::kBFloat16);
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         Mean(model->forward(run.Noise(1, {2, 1100}).to(at::kBFloat16))).backward();
         optimizer->step();
         for (const Tensor& p : model->parameters()) {
           const Tensor before = p.data().clone();
           p.data().mul_(2);
           p.data().copy_(before);
         }
         optimizer->step();
       },
       1601, true},
      {"module_registered_after_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 1);
         torch::manual_seed(3);
         nn::Linear late = run.Cast(nn::Linear(kWidth, kWidth));
         model->push_back(late);
         Train(run, model, *optimizer, 1, 3);
         run.See(*model);
         run.See(late->weight.grad());
       }},
      {"module_registered_and_stepped_after_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 1);
         nn::Linear late = run.Cast(nn::Linear(kWidth, kWidth));
         model->push_back(late);
         optimizer->add_param_group(optim::OptimizerParamGroup(
             late->parameters(), std::make_unique<optim::SGDOptions>(0.02)));
         Train(run, model, *optimizer, 1, 3);
         run.See(*model);
       }},
      {"buffer_registered_after_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 1);
         Tensor late = model->register_buffer("late", torch::ones({kWidth}, run.dtype()));
         for (int step = 1; step < 3; ++step) {
           late.mul_(0.5);
           const Tensor x = run.Noise(step, {4, kWidth});
           Mean(model->forward(x) * late).backward();
           optimizer->step();
           optimizer->zero_grad();
         }
         run.See(*model);
       }},
  };
}

Programs Resumes() {
  return {
      {"resumed", [](Run& run) { TrainInParts(run, MakeAdamW, 3, 2, Perceptron); }},
      {"resumed_with_statistics", [](Run& run) { TrainInParts(run, MakeSgd, 2, 2, Normalised); }},
      {"resumed_with_own_optimizer",
       [](Run& run) {
         TrainInParts(
             run,
             [](Engine& engine, nn::Sequential::ContainedType& model) {
               auto own =
                   std::make_unique<optim::Adam>(model.parameters(), optim::AdamOptions(1e-2));
               engine.Attach(model, *own);
               return std::unique_ptr<optim::Optimizer>(std::move(own));
             },
             2, 2, Normalised);
       }},
      {"resumed_with_a_schedule",
       [](Run& run) {
         int part = 0;
         TrainInParts(
             run,
             [&part](Engine& engine, nn::Module& model) {
               auto optimizer = MakeAdamW(engine, model);
               optimizer->param_groups()[0].options().set_lr(1e-2 / (1 + 0 * part++));
               return optimizer;
             },
             3, 1, Perceptron);
       }},
      {"resumed_with_trainer_state",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         engine->SetTrainerState("at 7");
         Train(run, model, *optimizer, 0, 2);
         engine->WaitDurable();
         run.See(static_cast<double>(engine->TrainerState().size()));
         run.See(*model);
       }},
      {"weights_at_close",
       [](Run& run) {
         auto model = Normalised(run);
         {
           auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
           auto optimizer = MakeAdamW(*engine, *model);
           Train(run, model, *optimizer, 0, 3);
         }
         run.See(*model);
         model->eval();
         run.See(battery::Loss(run, model, 9));
         std::stringstream file;
         torch::save(model, file);
         nn::Sequential copy = Normalised(run);
         torch::load(copy, file);
         run.See(*copy);
         optim::SGD after(model->parameters(), optim::SGDOptions(0.1));
         Train(run, model, after, 9, 11);
         run.See(*model);
       }},
      {"weights_released_at_close",
       [](Run& run) {
         auto model = Perceptron(run);
         {
           auto engine = run.Open();
           auto optimizer = MakeAdamW(*engine, *model);
           Train(run, model, *optimizer, 0, 2);
         }
         run.See(*model);
       },
       1802},
      {"files_after_training",
       [](Run& run) {
         auto model = Normalised(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         const std::string folder = run.options().nvme_path + "/files";
         engine->SaveWeights(folder);
         auto copy = Normalised(run);
         LoadWeights(*copy, folder);
         run.See(*copy);
       }},
  };
}

Programs Ends() {
  return {
      {"model_destroyed_first",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         run.See(*model);
         model = nullptr;
         optimizer.reset();
         engine.reset();
       }},
      {"engine_destroyed_first",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         run.See(*model);
         engine.reset();
         optimizer.reset();
       }},
      {"optimizer_destroyed_and_made_again",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         optimizer.reset();
         run.See(*model);
         run.See(battery::Loss(run, model, 5));
       }},
      {"own_optimizer_destroyed_first",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         {
           optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
           engine->Attach(*model, optimizer);
           Train(run, model, optimizer, 0, 2);
         }
         run.See(*model);
       }},
      {"engine_closed_in_the_middle_of_a_graph",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open([](Options& o) { o.weights_at_close = "memory"; });
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 1);
         const Tensor loss = battery::Loss(run, model, 1);
         optimizer.reset();
         engine.reset();
         loss.backward();
         run.SeeGradients(*model);
         run.See(*model);
       }},
      {"never_trained",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         run.See(*model);
       }},
      {"never_touched",
       [](Run& run) {
         auto model = Perceptron(run);
         {
           auto engine = run.Open();
           auto optimizer = MakeSgd(*engine, *model);
         }
         run.See(*model);
       }},
      {"opened_and_closed",
       [](Run& run) {
         run.Open();
         run.See(1.0);
       }},
      {"exception_through_everything",
       [](Run& run) {
         try {
           auto model = Perceptron(run);
           auto engine = run.Open();
           auto optimizer = MakeSgd(*engine, *model);
           Train(run, model, *optimizer, 0, 2);
           run.See(*model);
           battery::Loss(run, model, 3).backward();
           throw std::runtime_error("of the trainer");
         } catch (const std::runtime_error&) {
         }
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         run.See(*model);
       }},
      {"gradient_kept_beyond_the_engine",
       [](Run& run) {
         Tensor kept;
         {
           auto model = Perceptron(run);
           auto engine = run.Open();
           auto optimizer = MakeSgd(*engine, *model);
           battery::Loss(run, model, 3).backward();
           kept = model->parameters()[0].grad().clone();
         }
         run.See(kept);
       }},
  };
}

// Attached as they are: served like everything else, or refused when they are attached.
template <class Make>
Program Kind(std::string name, Make make, int refused) {
  return {std::move(name),
          [=](Run& run) {
            torch::manual_seed(4);
            auto net = std::make_shared<nn::Module>();
            net->register_parameter("ordinary", torch::randn({40, 40}));
            Tensor odd = make(run);
            if (odd.is_floating_point() || odd.is_complex()) odd.requires_grad_();
            net->register_parameter("odd", odd, odd.requires_grad());
            auto engine = run.Open();
            auto optimizer = MakeSgd(*engine, *net);
            for (int step = 0; step < 3; ++step) {
              const Tensor ordinary = net->parameters()[0], odd = net->parameters()[1];
              Tensor loss = Mean(ordinary);
              const Tensor dense = odd.is_sparse() ? odd.to_dense() : odd;
              loss = loss + (dense.is_complex() ? Mean(torch::view_as_real(dense)) : Mean(dense));
              loss.backward();
              optimizer->step();
              optimizer->zero_grad();
              run.See(loss);
              run.See(odd);
            }
          },
          refused};
}

Programs Kinds() {
  return {
      Kind(
          "double_weight",
          [](Run&) {
            return torch::randn({300, 300}, at::kDouble);
          },
          0),
      Kind(
          "half_weight",
          [](Run&) {
            return torch::randn({300, 300}).to(at::kHalf);
          },
          0),
      Kind(
          "complex_weight",
          [](Run&) {
            return torch::randn({30, 30}, at::kComplexFloat);
          },
          1601),
      Kind(
          "integer_weight",
          [](Run&) {
            return torch::randint(9, {30, 30}, at::kLong);
          },
          0),
      Kind(
          "boolean_weight",
          [](Run&) {
            return torch::rand({30, 30}) > 0.5;
          },
          0),
      Kind(
          "transposed_weight",
          [](Run& r) {
            return r.Noise(1, {300, 400}).t();
          },
          0),
      Kind(
          "channels_last_weight",
          [](Run& r) {
            return r.Noise(1, {64, 32, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
          },
          0),
      Kind(
          "weight_of_every_other_column",
          [](Run& r) {
            return r.Noise(1, {300, 400}).slice(1, 0, 400, 2);
          },
          1601),
      Kind(
          "expanded_weight",
          [](Run& r) {
            return r.Noise(1, {300, 1}).expand({300, 4});
          },
          1601),
      Kind(
          "part_of_a_larger_weight",
          [](Run& r) {
            return r.Noise(1, {300, 400}).slice(0, 0, 100);
          },
          1601),
      Kind(
          "sparse_weight",
          [](Run& r) {
            return r.Noise(1, {30, 40}).to_sparse();
          },
          1601),
      Kind(
          "weight_in_own_memory",
          [](Run& r) {
            static std::vector<char> memory(4 * 120000);
            Tensor blob = torch::from_blob(memory.data(), {300, 400}, r.dtype());
            blob.copy_(r.Noise(1, {300, 400}));
            return blob;
          },
          1601),
      Kind(
          "weight_with_one_element", [](Run& r) { return r.Noise(1, {1}); }, 0),
      Kind(
          "weight_without_dimensions", [](Run& r) { return r.Noise(1, {}); }, 0),
      {"thawed_while_training",
       [](Run& run) {
         auto model = Perceptron(run);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(false);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 8);
         engine->WaitDurable();
         const Statistics before = engine->statistics();
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(true);
         Train(run, model, *optimizer, 8, 10);
         // The counters go on, though the store is another one.
         const Statistics after = engine->statistics();
         run.See(after.bytes_written >= before.bytes_written);
         run.See(after.bytes_read >= before.bytes_read);
         run.See(after.wait_seconds >= before.wait_seconds);
         run.See(*model);
       }},
      // The pool is named from a folder that the program leaves.
      {"thawed_in_another_folder",
       [](Run& run) {
         auto model = Perceptron(run);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(false);
         std::shared_ptr<Engine> engine;
         {
           const InFolder there(run.options().nvme_path);
           engine = run.Open([](Options& o) { o.nvme_path = "."; });
         }
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(true);
         Train(run, model, *optimizer, 2, 4);
         run.See(*model);
       }},
      {"thawed_as_announced",
       [](Run& run) {
         auto model = Perceptron(run);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(false);
         auto engine = run.Open([](Options& o) { o.may_thaw = true; });
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         for (Tensor& p : LinearAt(model, 0).parameters()) p.set_requires_grad(true);
         Train(run, model, *optimizer, 2, 4);
         run.See(*model);
       }},
      {"optimizer_saved",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         Train(run, model, *optimizer, 0, 2);
         std::stringstream file;
         torch::save(*optimizer, file);
         Train(run, model, *optimizer, 2, 4);
         torch::load(*optimizer, file);
         Train(run, model, *optimizer, 4, 6);
         run.See(*model);
       }},
      {"own_optimizer_saved",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         optim::Adam optimizer(model->parameters(), optim::AdamOptions(1e-2));
         engine->Attach(*model, optimizer);
         Train(run, model, optimizer, 0, 2);
         std::stringstream file;
         torch::save(optimizer, file);
         run.See(*model);
       }},
      {"everything_is_frozen",
       [](Run& run) {
         auto model = Perceptron(run);
         for (Tensor& p : model->parameters()) p.set_requires_grad(false);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         run.See(battery::Loss(run, model, 0));
         optimizer->step();
         run.See(*model);
       }},
      {"module_without_parameters",
       [](Run& run) {
         nn::Sequential model{nn::ReLU(), nn::Flatten()};
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         run.See(model->forward(run.Noise(0, {2, 3})));
       },
       1601},
      {"made_in_inference_mode",
       [](Run& run) {
         auto model = Perceptron(run);
         {
           const c10::InferenceMode inference;
           torch::manual_seed(3);
           model->push_back(run.Cast(nn::Linear(kWidth, kWidth)));
         }
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
       },
       1601},
      {"attached_twice",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto first = MakeSgd(*engine, *model);
         auto second = MakeSgd(*engine, *model);
         Train(run, model, *first, 0, 2);
         run.See(*model);
       },
       1604},
      {"attached_to_two_engines",
       [](Run& run) {
         auto model = Perceptron(run);
         auto one = run.Open(), two = run.Open();
         auto first = MakeSgd(*one, *model);
         auto second = MakeSgd(*two, *model);
         Train(run, model, *first, 0, 2);
         run.See(*model);
       },
       1601},
  };
}

}  // namespace

Programs LifePrograms() {
  Programs programs;
  for (Programs& some :
       std::vector<Programs>{Threads(), SeveralModels(), Resumes(), Ends(), Kinds()})
    programs.insert(programs.end(), some.begin(), some.end());
  return programs;
}

}  // namespace offload::battery
