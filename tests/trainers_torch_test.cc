// Ordinary trainers, each run in memory (OFFLOADD_DISABLE=1) and offloaded, with little memory and
// with much, in fp32 and in bf16: what they compute is compared bit by bit. Each is a model, an
// optimizer and a loop that somebody might have written without knowing of us.

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <offload/torch.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/torch_fixture.h"

namespace offload {
namespace {

namespace nn = torch::nn;
using at::Tensor;

Options OptionsFor(const std::string& job, const std::string& ram = "256MiB") {
  return PoolOptions(job, ram);
}

Tensor Numbers(int64_t seed, at::IntArrayRef sizes) {
  torch::manual_seed(1000 + seed);
  return torch::randn(sizes);
}

// ---- Programs ----------------------------------------------------------------------------------

// One trainer, in the hands of which everything is.
struct Trainer {
  std::shared_ptr<nn::Module> module;
  std::function<Tensor(int64_t step)> loss;
};

struct Training {
  Trainer trainer;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Tensor> log;

  void Add(const Tensor& value) { log.push_back(value.detach().clone()); }
  void AddState() {
    for (const auto& item : trainer.module->named_parameters()) Add(item.value() * 1);
    for (const auto& item : trainer.module->named_buffers()) {
      if (item.value().defined()) Add(item.value());
    }
  }
  void Backward(int64_t step) {
    const Tensor loss = trainer.loss(step);
    loss.backward();
    Add(loss);
  }
};

struct Program {
  std::string name;
  std::function<Trainer(at::ScalarType)> make;
  std::function<std::shared_ptr<torch::optim::Optimizer>(Engine&, nn::Module&)> optimize;
  std::function<void(Training&)> loop;
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16};
};

std::string FloorOf(const Program& program, at::ScalarType dtype) {
  SetOffloading(true);
  const Trainer trainer = program.make(dtype);
  auto engine = Engine::Open(OptionsFor(program.name + c10::toString(dtype) + "_floor", "1GiB"));
  const auto optimizer = program.optimize(*engine, *trainer.module);
  return std::to_string(engine->plan().floor_bytes);
}

std::vector<Tensor> RunOnce(const Program& program, at::ScalarType dtype, bool offload,
                            const Options& options) {
  SetOffloading(offload);
  Training run;
  torch::manual_seed(7);
  run.trainer = program.make(dtype);
  run.engine = Engine::Open(options);
  run.optimizer = program.optimize(*run.engine, *run.trainer.module);
  program.loop(run);
  run.AddState();
  run.Add(torch::tensor(run.engine->step()));
  return run.log;
}

void ExpectSame(const std::vector<Tensor>& expected, const std::vector<Tensor>& actual,
                const std::string& what) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(expected[i], actual[i]))
        << what << ": entry " << i << " of " << expected.size() << " differs in "
        << (expected[i] != actual[i]).sum().item<int64_t>() << " of " << expected[i].numel();
  }
}

void ExpectParity(const Program& program) {
  for (const at::ScalarType dtype : program.dtypes) {
    const std::string name = program.name + "_" + c10::toString(dtype);
    const auto expected = RunOnce(program, dtype, false, OptionsFor(name));
    Options tight = OptionsFor(name + "_tight", FloorOf(program, dtype));
    ExpectSame(expected, RunOnce(program, dtype, true, tight), name + " at the floor");
    ExpectSame(expected, RunOnce(program, dtype, true, OptionsFor(name, "1GiB")), name);
  }
}

// ---- Models ------------------------------------------------------------------------------------

constexpr int64_t kWidth = 300;

Trainer Perceptron(at::ScalarType dtype) {
  nn::Sequential model(nn::Linear(kWidth, 900), nn::Tanh(), nn::Linear(900, 700), nn::ReLU(),
                       nn::Linear(700, 10));
  model->to(dtype);
  return {model.ptr(), [model, dtype](int64_t step) mutable {
            return model->forward(Numbers(step, {4, kWidth}).to(dtype)).square().mean();
          }};
}

Trainer Normalized(at::ScalarType dtype) {
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)), nn::BatchNorm2d(32),
                       nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(32, 64, 3).stride(2)),
                       nn::BatchNorm2d(64), nn::AdaptiveAvgPool2d(2), nn::Flatten(),
                       nn::Linear(256, 600), nn::Linear(600, 10));
  model->to(dtype);
  return {model.ptr(), [model, dtype](int64_t step) mutable {
            return model->forward(Numbers(step, {4, 3, 12, 12}).to(dtype)).square().mean();
          }};
}

struct RecurrentModel : nn::Module {
  explicit RecurrentModel(bool gru) {
    if (gru) {
      gated = register_module("gated", nn::GRU(nn::GRUOptions(200, 300).num_layers(2)));
    } else {
      recurrent = register_module(
          "recurrent", nn::LSTM(nn::LSTMOptions(200, 300).num_layers(2).bidirectional(true)));
    }
  }
  Tensor forward(const Tensor& x) {
    return gated ? std::get<0>(gated(x)) : std::get<0>(recurrent(x));
  }
  nn::LSTM recurrent{nullptr};
  nn::GRU gated{nullptr};
};

Trainer Recurrent(at::ScalarType dtype, bool gru) {
  auto model = std::make_shared<RecurrentModel>(gru);
  model->to(dtype);
  return {model, [model, dtype](int64_t step) {
            return model->forward(Numbers(step, {3, 2, 200}).to(dtype)).square().mean();
          }};
}

// Parameters that one operator takes together.
struct StackedModel : nn::Module {
  StackedModel() {
    for (int i = 0; i < 5; ++i)
      parts.push_back(
          register_parameter("part" + std::to_string(i), torch::randn({300, 400}) * 0.05));
  }
  std::vector<Tensor> parts;
};

Trainer Stacked(at::ScalarType dtype) {
  auto model = std::make_shared<StackedModel>();
  model->to(dtype);
  return {model, [model, dtype](int64_t step) {
            const Tensor all = torch::cat(model->parts, 0) + torch::stack(model->parts).mean();
            const Tensor flat = nn::utils::parameters_to_vector(model->parameters());
            return all.mv(Numbers(step, {400}).to(dtype)).square().mean() + flat.square().mean();
          }};
}

Trainer SparseEmbedding(at::ScalarType dtype) {
  nn::Embedding embedding(nn::EmbeddingOptions(3000, 200).sparse(true));
  embedding->to(dtype);
  return {embedding.ptr(), [embedding](int64_t step) mutable {
            torch::manual_seed(step);
            return embedding->forward(torch::randint(3000, {4, 6})).square().mean();
          }};
}

// ---- Optimizers --------------------------------------------------------------------------------

std::shared_ptr<torch::optim::Optimizer> AdamW(Engine& engine, nn::Module& module) {
  return engine.AdamW(module, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}
std::shared_ptr<torch::optim::Optimizer> SGD(Engine& engine, nn::Module& module) {
  return engine.SGD(module, torch::optim::SGDOptions(0.05).momentum(0.9));
}

// ---- Loops -------------------------------------------------------------------------------------

void Plain(Training& run) {
  for (int64_t step = 0; step < 3; ++step) {
    run.optimizer->zero_grad();
    run.Backward(step);
    run.optimizer->step();
  }
}

TEST(TrainersTest, Perceptron) { ExpectParity({"perceptron", Perceptron, AdamW, Plain}); }

TEST(TrainersTest, ConvolutionsWithBatchNorm) {
  ExpectParity({"batchnorm", Normalized, SGD, Plain});
}

TEST(TrainersTest, OperatorsThatTakeManyWeightsRunAtTheFloor) {
  ExpectParity({"lstm", [](at::ScalarType t) { return Recurrent(t, false); }, AdamW, Plain});
  ExpectParity({"gru", [](at::ScalarType t) { return Recurrent(t, true); }, AdamW, Plain});
  ExpectParity({"stacked", Stacked, AdamW, Plain});
}

TEST(TrainersTest, SparseGradients) {
  const auto accumulate = [](Training& run) {
    for (int64_t step = 0; step < 3; ++step) {
      run.Backward(2 * step);
      run.Backward(2 * step + 1);
      run.optimizer->step();
      run.optimizer->zero_grad();
    }
  };
  ExpectParity({"sparse_adamw", SparseEmbedding, AdamW, accumulate});
  const auto plain_sgd = [](Engine& engine, nn::Module& module) {
    return engine.SGD(module, torch::optim::SGDOptions(0.05));
  };
  ExpectParity({"sparse_sgd", SparseEmbedding, plain_sgd, accumulate});
}

TEST(TrainersTest, ComposedFlavours) {
  for (const AdamWFlavour flavour : {AdamWFlavour::kLerp, AdamWFlavour::kMulAdd}) {
    const std::string name = flavour == AdamWFlavour::kLerp ? "lerp" : "mul_add";
    ExpectParity({name, Perceptron,
                  [flavour](Engine& engine, nn::Module& module) {
                    return engine.AdamW(module, torch::optim::AdamWOptions(1e-2), flavour);
                  },
                  Plain});
    ExpectParity({name + "_amsgrad",
                  Perceptron,
                  [flavour](Engine& engine, nn::Module& module) {
                    return engine.Adam(
                        module, torch::optim::AdamOptions(1e-2).amsgrad(true).weight_decay(0.1),
                        flavour);
                  },
                  Plain,
                  {at::kFloat}});
  }
}

// ---- Gradients that the trainer edits ----------------------------------------------------------

TEST(TrainersTest, GradientTimesANumberIsRoundedAsTorchRoundsIt) {
  ExpectParity({"scaled",
                Perceptron,
                SGD,
                [](Training& run) {
                  for (int64_t step = 0; step < 4; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    std::vector<Tensor> gradients;
                    for (const Tensor& parameter : run.trainer.module->parameters())
                      gradients.push_back(parameter.grad());
                    if (step % 2 == 0) {
                      for (Tensor& gradient : gradients) gradient.mul_(0.3);
                    } else {
                      at::_foreach_mul_(gradients, 0.7);
                    }
                    for (const Tensor& gradient : gradients) run.Add(gradient.norm());
                    run.optimizer->step();
                  }
                },
                {at::kFloat, at::kBFloat16, at::kHalf}});
}

TEST(TrainersTest, GradientEditedThroughItsPointerBetweenTwoNorms) {
  ExpectParity({"raw_gradient",
                Perceptron,
                SGD,
                [](Training& run) {
                  for (int64_t step = 0; step < 3; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    const auto parameters = run.trainer.module->parameters();
                    run.Add(torch::tensor(nn::utils::clip_grad_norm_(parameters, 0.01)));
                    for (const Tensor& parameter : parameters) {
                      auto* const values = parameter.grad().data_ptr<float>();
                      for (int64_t i = 0; i < parameter.numel(); i += 3) values[i] += 0.01f;
                    }
                    run.Add(torch::tensor(nn::utils::clip_grad_norm_(parameters, 0.02)));
                    run.optimizer->step();
                  }
                },
                {at::kFloat}});
}

TEST(TrainersTest, NonFiniteValueWrittenThroughAPointerStopsTheStep) {
  SetOffloading(true);
  const Trainer trainer = Perceptron(at::kFloat);
  auto engine = Engine::Open(OptionsFor("raw_nan"));
  auto optimizer = engine->SGD(*trainer.module, torch::optim::SGDOptions(0.1));
  trainer.loss(0).backward();
  nn::utils::clip_grad_norm_(trainer.module->parameters(), 1e9);
  trainer.module->parameters()[0].grad().data_ptr<float>()[5] = NAN;
  ExpectError(1701, "0.weight", [&] { optimizer->step(); });
}

TEST(TrainersTest, StepsWithoutGradientsCount) {
  ExpectParity({"empty_steps", Perceptron, SGD, [](Training& run) {
                  run.optimizer->step();
                  run.Backward(0);
                  run.optimizer->step();
                  run.optimizer->zero_grad();
                  run.optimizer->step();
                }});
}

// ---- Weights that the trainer edits ------------------------------------------------------------

TEST(TrainersTest, WeightsEditedThroughData) {
  ExpectParity({"edited_data", Perceptron, AdamW, [](Training& run) {
                  for (int64_t step = 0; step < 3; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    run.optimizer->step();
                    for (Tensor& parameter : run.trainer.module->parameters())
                      parameter.data().mul_(0.75);
                    const Tensor first = run.trainer.module->parameters()[0];
                    run.Add(run.engine->Gather(first, "master"));
                  }
                }});
}

TEST(TrainersTest, WeightsReadAndWrittenThroughPointers) {
  ExpectParity({"raw_weights",
                Perceptron,
                AdamW,
                [](Training& run) {
                  for (int64_t step = 0; step < 3; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    run.optimizer->step();
                    double sum = 0;
                    for (Tensor& parameter : run.trainer.module->parameters()) {
                      auto* const values = parameter.data_ptr<float>();
                      for (int64_t i = 0; i < parameter.numel(); ++i) sum += values[i];
                      values[step] = 0.5f;
                    }
                    run.Add(torch::tensor(sum));
                    const auto view = run.trainer.module->parameters()[0].accessor<float, 2>();
                    run.Add(torch::tensor(view[3][4]));
                    run.Add(run.engine->Gather(run.trainer.module->parameters()[0]));
                  }
                },
                {at::kFloat}});
}

TEST(TrainersTest, ModuleIsSavedAndLoadedByTorch) {
  ExpectParity({"torch_save", Normalized, AdamW, [](Training& run) {
                  run.Backward(0);
                  run.optimizer->step();
                  std::stringstream stream;
                  torch::save(run.trainer.module->parameters(), stream);
                  torch::serialize::OutputArchive saved;
                  run.trainer.module->save(saved);
                  std::stringstream file;
                  saved.save_to(file);
                  run.optimizer->zero_grad();
                  run.Backward(1);
                  run.optimizer->step();
                  torch::serialize::InputArchive archive;
                  archive.load_from(file);
                  run.trainer.module->load(archive);
                  run.AddState();
                  std::vector<Tensor> tensors;
                  torch::load(tensors, stream);
                  for (const Tensor& tensor : tensors) run.Add(tensor);
                  run.optimizer->zero_grad();
                  run.Backward(2);
                  run.optimizer->step();
                }});
}

// Neither the stream nor the C library touches the bytes: it is the kernel that does.
TEST(TrainersTest, FilesAreWrittenAndReadThroughPointers) {
  ExpectParity({"raw_files",
                Perceptron,
                AdamW,
                [](Training& run) {
                  run.Backward(0);
                  run.optimizer->step();
                  const Tensor first = run.trainer.module->parameters()[0];
                  const Tensor third = run.trainer.module->parameters()[2];
                  const std::string path = Pool() + "/raw_file";
                  const auto bytes = [](const Tensor& tensor) {
                    return static_cast<std::streamsize>(tensor.numel() * sizeof(float));
                  };
                  {
                    std::ofstream file(path, std::ios::binary);
                    file.write(reinterpret_cast<const char*>(first.data_ptr<float>()),
                               bytes(first));
                    EXPECT_TRUE(file.good());
                  }
                  FILE* const appended = fopen(path.c_str(), "ab");
                  EXPECT_EQ(fwrite(third.data_ptr<float>(), sizeof(float), third.numel(), appended),
                            static_cast<size_t>(third.numel()));
                  fclose(appended);
                  run.optimizer->zero_grad();
                  run.Backward(1);
                  run.optimizer->step();
                  {
                    std::ifstream file(path, std::ios::binary);
                    file.read(reinterpret_cast<char*>(first.data_ptr<float>()), bytes(first));
                    EXPECT_TRUE(file.good());
                    file.read(reinterpret_cast<char*>(third.data_ptr<float>()), bytes(third));
                    EXPECT_TRUE(file.good());
                  }
                  run.AddState();
                  run.optimizer->zero_grad();
                  run.Backward(2);
                  run.optimizer->step();
                },
                {at::kFloat}});
}

// A call that takes bytes from a pointer, and the one that puts them where another points.
struct Transfer {
  const char* name;
  ssize_t (*take)(int end, const iovec& from);
  ssize_t (*put)(int end, const iovec& to);
};

msghdr MessageOf(const iovec& part) {
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(&part);
  message.msg_iovlen = 1;
  return message;
}

using End = int;
using Part = const iovec&;
const Transfer kThroughFiles[] = {
    {"pwrite", [](End f, Part p) { return pwrite(f, p.iov_base, p.iov_len, 0); },
     [](End f, Part p) { return pread(f, p.iov_base, p.iov_len, 0); }},
    {"pwrite64", [](End f, Part p) { return pwrite64(f, p.iov_base, p.iov_len, 0); },
     [](End f, Part p) { return pread64(f, p.iov_base, p.iov_len, 0); }},
    {"pwritev", [](End f, Part p) { return pwritev(f, &p, 1, 0); },
     [](End f, Part p) { return preadv(f, &p, 1, 0); }},
    {"pwritev64", [](End f, Part p) { return pwritev64(f, &p, 1, 0); },
     [](End f, Part p) { return preadv64(f, &p, 1, 0); }},
    {"pwritev2", [](End f, Part p) { return pwritev2(f, &p, 1, 0, 0); },
     [](End f, Part p) { return preadv2(f, &p, 1, 0, 0); }},
    {"pwritev64v2", [](End f, Part p) { return pwritev64v2(f, &p, 1, 0, 0); },
     [](End f, Part p) { return preadv64v2(f, &p, 1, 0, 0); }},
};
const Transfer kThroughSockets[] = {
    {"write", [](End s, Part p) { return write(s, p.iov_base, p.iov_len); },
     [](End s, Part p) { return read(s, p.iov_base, p.iov_len); }},
    {"writev", [](End s, Part p) { return writev(s, &p, 1); },
     [](End s, Part p) { return readv(s, &p, 1); }},
    {"send", [](End s, Part p) { return send(s, p.iov_base, p.iov_len, 0); },
     [](End s, Part p) { return recv(s, p.iov_base, p.iov_len, MSG_WAITALL); }},
    {"sendto", [](End s, Part p) { return sendto(s, p.iov_base, p.iov_len, 0, nullptr, 0); },
     [](End s, Part p) {
       return recvfrom(s, p.iov_base, p.iov_len, MSG_WAITALL, nullptr, nullptr);
     }},
    {"sendmsg",
     [](End s, Part p) {
       const msghdr message = MessageOf(p);
       return sendmsg(s, &message, 0);
     },
     [](End s, Part p) {
       msghdr message = MessageOf(p);
       return recvmsg(s, &message, MSG_WAITALL);
     }},
};

// Some of a gradient's bytes into another, each time elsewhere. Operators in between see to it that
// pointers have to be served anew.
void MoveParts(Training& run, const Tensor& from, const Tensor& to) {
  constexpr size_t kBytes = 16 << 10;
  const int file = open((Pool() + "/raw_part").c_str(), O_CREAT | O_RDWR | O_TRUNC, 0600);
  int ends[2];
  ASSERT_GE(file, 0);
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  size_t at = 0;
  const auto move = [&](const Transfer& transfer, int in, int out) {
    SCOPED_TRACE(transfer.name);
    at += kBytes;
    const iovec source = {static_cast<char*>(from.data_ptr()) + at, kBytes};
    const iovec target = {static_cast<char*>(to.data_ptr()) + at, kBytes};
    EXPECT_EQ(transfer.take(in, source), ssize_t{kBytes}) << strerror(errno);
    EXPECT_EQ(transfer.put(out, target), ssize_t{kBytes}) << strerror(errno);
    run.Add(from.sum());
    run.Add(to.sum());
  };
  for (const Transfer& transfer : kThroughFiles) move(transfer, file, file);
  for (const Transfer& transfer : kThroughSockets) move(transfer, ends[0], ends[1]);
  for (const int end : {file, ends[0], ends[1]}) close(end);
}

TEST(TrainersTest, PointersAreGivenToEveryCallThatMovesBytes) {
  ExpectParity({"raw_calls",
                Perceptron,
                AdamW,
                [](Training& run) {
                  run.Backward(0);
                  MoveParts(run, run.trainer.module->parameters()[0].grad(),
                            run.trainer.module->parameters()[2].grad());
                  run.optimizer->step();
                },
                {at::kFloat}});
}

// What an operator has ended is not counted any more.
TEST(TrainersTest, PointersToGradientsAndOperatorsInTurn) {
  ExpectParity({"raw_in_turn",
                Perceptron,
                AdamW,
                [](Training& run) {
                  run.Backward(0);
                  for (int64_t round = 0; round < 20; ++round) {
                    for (const Tensor& parameter : run.trainer.module->parameters()) {
                      parameter.grad().data_ptr<float>()[round % 10] = 0.125f;
                      run.Add(parameter.grad().sum());
                    }
                  }
                  run.optimizer->step();
                },
                {at::kFloat}});
}

TEST(TrainersTest, ManyGradientsInOneOperator) {
  ExpectParity({"gradients_together",
                Perceptron,
                SGD,
                [](Training& run) {
                  for (int64_t step = 0; step < 3; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    std::vector<Tensor> flat;
                    std::vector<Tensor> all;
                    for (const Tensor& parameter : run.trainer.module->parameters()) {
                      flat.push_back(parameter.grad().view(-1));
                      all.push_back(parameter.grad());
                    }
                    run.Add(torch::cat(flat).norm());
                    // What GradScaler does before a step.
                    Tensor found_infinity = torch::zeros({1}), scale = torch::full({1}, 0.5);
                    at::_amp_foreach_non_finite_check_and_unscale_(all, found_infinity, scale);
                    run.Add(found_infinity);
                    run.optimizer->step();
                  }
                },
                {at::kFloat}});
}

// ---- Parts of one vector ------------------------------------------------------------------------

struct Flat : nn::Module {
  explicit Flat(at::ScalarType dtype) {
    torch::manual_seed(7);
    Tensor all = (torch::randn({300 * 200 + 200 + 200 * 300}) * 0.1).to(dtype);
    first = register_parameter("first", all.narrow(0, 0, 60000).view({200, 300}).detach());
    bias = register_parameter("bias", all.narrow(0, 60000, 200).detach());
    last = register_parameter("last", all.narrow(0, 60200, 60000).view({200, 300}).t().detach());
    whole = all;
  }
  Tensor forward(const Tensor& x) {
    return torch::tanh(nn::functional::linear(x, first, bias)).matmul(last.t()).square().mean();
  }
  Tensor first, bias, last, whole;
};

Trainer PartsOfAVector(at::ScalarType dtype) {
  const auto model = std::make_shared<Flat>(dtype);
  model->whole.reset();
  return {model, [model, dtype](int64_t step) {
            return model->forward(Numbers(step, {4, 300}).to(dtype));
          }};
}

TEST(TrainersTest, PartsOfAVectorThatNobodyElseUses) {
  ExpectParity({"parts", PartsOfAVector, AdamW, Plain});
}

TEST(TrainersTest, PartsOfAVectorThatSomebodyElseUsesAreRefused) {
  SetOffloading(true);
  Flat model(at::kFloat);
  auto engine = Engine::Open(OptionsFor("parts_of_a_known_vector"));
  const Tensor before = model.whole.clone();
  ExpectError(1601, "'first', 'bias', 'last' are parts of larger tensors",
              [&] { engine->SGD(model, torch::optim::SGDOptions(1)); });
  EXPECT_TRUE(torch::equal(model.whole, before));
  EXPECT_EQ(model.first.storage().data(), model.whole.storage().data()) << "nothing has changed";
  model.whole.reset();
  model.last = model.last.detach();  // another use, which is no parameter
  ExpectError(1601, "parts of larger tensors",
              [&] { engine->SGD(model, torch::optim::SGDOptions(1)); });
  model.last.reset();
  engine->SGD(model, torch::optim::SGDOptions(1));
}

TEST(TrainersTest, PartsThatOverlapAreRefused) {
  SetOffloading(true);
  struct Overlapping : nn::Module {
    Overlapping() {
      const Tensor all = torch::randn({200});
      register_parameter("a", all.narrow(0, 0, 120).detach());
      register_parameter("b", all.narrow(0, 80, 120).detach());
    }
  } model;
  auto engine = Engine::Open(OptionsFor("parts_that_overlap"));
  ExpectError(1601, "'a', 'b' are parts", [&] { engine->SGD(model, torch::optim::SGDOptions(1)); });
}

// ---- Staged unfreezing --------------------------------------------------------------------------

// The first layer, whose weight has two extents and whose bias is bundled, trains from step 2 on;
// the bias of the second one stops at 4 and goes on at 6.
class Unfreezing {
 public:
  Unfreezing(at::ScalarType dtype, bool offloading, const Options& options) : options_(options) {
    SetOffloading(offloading);
    torch::manual_seed(7);
    trainer_ = Perceptron(dtype);
    Freeze(0);
    Open();
  }

  void Train(int64_t from, int64_t to, bool zeroes_late = false) {
    for (int64_t step = from; step < to; ++step) {
      Freeze(step);
      if (!zeroes_late) optimizer_->zero_grad();
      const Tensor loss = trainer_.loss(step);
      if (zeroes_late) optimizer_->zero_grad(/*set_to_none=*/false);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(trainer_.module->parameters(), 0.01);
      optimizer_->step();
      log_.push_back(loss.detach().clone());
    }
  }

  // As another process would go on at that step: the values of the module are not used.
  void Restart(int64_t step) {
    const at::ScalarType dtype = trainer_.module->parameters()[0].scalar_type();
    optimizer_.reset();
    engine_.reset();
    trainer_ = Perceptron(dtype);
    Freeze(step);
    Open();
    EXPECT_EQ(engine_->step(), step);
  }

  std::vector<Tensor> Log() {
    for (const Tensor& parameter : trainer_.module->parameters()) {
      for (const char* const plane : {"weight", "master", "exp_avg", "exp_avg_sq"})
        log_.push_back(engine_->Gather(parameter, plane));
    }
    return log_;
  }
  Engine& engine() { return *engine_; }
  nn::Module& module() { return *trainer_.module; }

 private:
  void Open() {
    engine_ = Engine::Open(options_);
    optimizer_ = engine_->AdamW(*trainer_.module, torch::optim::AdamWOptions(1e-2));
  }
  void Freeze(int64_t step) {
    const auto parameters = trainer_.module->parameters();
    for (const int i : {0, 1}) Tensor(parameters[i]).requires_grad_(step >= 2);
    Tensor(parameters[3]).requires_grad_(step < 4 || step >= 6);
  }

  const Options options_;
  Trainer trainer_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Tensor> log_;
};

class UnfreezingTest : public testing::TestWithParam<std::tuple<at::ScalarType, bool, bool>> {
 protected:
  Options JobOptions(const std::string& job) const {
    const auto& [dtype, spills, announced] = GetParam();
    Options options = OptionsFor(job + c10::toString(dtype) + (spills ? "_spilled" : "") +
                                 (announced ? "_announced" : ""));
    options.spill_gradients = spills;
    options.may_thaw = announced;
    return options;
  }
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
};

TEST_P(UnfreezingTest, WhileTraining) {
  for (const bool zeroes_late : {false, true}) {
    const auto train = [&](bool offloading) {
      Unfreezing run(dtype(), offloading, JobOptions(zeroes_late ? "thaw_late" : "thaw"));
      run.Train(0, 7, zeroes_late);
      EXPECT_EQ(run.engine().step(), 7);
      return run.Log();
    };
    const auto expected = train(false);
    ExpectSame(expected, train(true), "thawed while training");
  }
}

TEST_P(UnfreezingTest, BetweenRuns) {
  Unfreezing memory(dtype(), false, JobOptions("in_memory"));
  memory.Train(0, 7);
  const auto expected = memory.Log();
  for (const int64_t restart : {2, 5}) {
    Unfreezing run(dtype(), true, JobOptions("restart" + std::to_string(restart)));
    run.Train(0, restart);
    run.Restart(restart);
    run.Train(restart, 7);
    ExpectSame(expected, run.Log(), "restarted at step " + std::to_string(restart));
  }
}

INSTANTIATE_TEST_SUITE_P(Thawing, UnfreezingTest,
                         testing::Combine(testing::Values(at::kFloat, at::kBFloat16),
                                          testing::Bool(), testing::Bool()));

TEST(TrainersTest, WhatIsThawedBeforeTheFirstOperatorIsTrained) {
  SetOffloading(true);
  nn::Linear layer(30, 20);
  layer->bias.requires_grad_(false);
  auto engine = Engine::Open(OptionsFor("thawed_early"));
  auto optimizer = engine->SGD(*layer, torch::optim::SGDOptions(1));
  const Tensor before = layer->bias.detach().clone();
  layer->bias.requires_grad_(true);
  layer->forward(Numbers(0, {2, 30})).sum().backward();
  optimizer->step();
  EXPECT_TRUE(torch::equal(engine->Gather(layer->bias), before - 2));
}

// What was written into weights before it is not lost.
TEST(TrainersTest, EditsBeforeAThawAreKept) {
  const auto train = [](bool offloading) {
    Unfreezing run(at::kBFloat16, offloading, OptionsFor("thaw_edited"));
    run.Train(0, 2);
    {
      const torch::NoGradGuard no_grad;
      run.module().parameters()[0].mul_(0.5);
      run.module().parameters()[2].add_(0.25);
    }
    run.Train(2, 4);
    return run.Log();
  };
  const auto expected = train(false);
  ExpectSame(expected, train(true), "edited");
}

// What is attached, thawed and added there stays ordinary, and so do gradients that the program
// keeps: forward and backward are outside of it.
TEST(TrainersTest, AttachedAndSteppedUnderInferenceMode) {
  const auto train = [](bool offloading) {
    SetOffloading(offloading);
    torch::manual_seed(1);
    nn::Sequential model(nn::Linear(30, 40), nn::Tanh(), nn::Linear(40, 20));
    const std::vector<Tensor> frozen = model[0]->parameters();
    for (const Tensor& parameter : frozen) parameter.set_requires_grad(false);
    auto engine = Engine::Open(OptionsFor("inference_mode"));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    {
      const c10::InferenceMode inference;
      engine->Attach(*model, optimizer);
    }
    std::vector<Tensor> kept, log;
    for (int step = 0; step < 6; ++step) {
      if (step == 1) {
        for (const Tensor& parameter : frozen) parameter.set_requires_grad(true);
      }
      if (step == 2) {
        model->push_back(nn::Linear(20, 10));
        optimizer.add_param_group(
            torch::optim::OptimizerParamGroup(model[model->size() - 1]->parameters()));
      }
      optimizer.zero_grad(/*set_to_none=*/step != 4);
      for (Tensor& parameter : model->parameters()) {
        if (step == 3) parameter.mutable_grad() = torch::full_like(parameter, 0.25).detach();
      }
      for (int pass = 0; pass < 2 && step != 3; ++pass)
        model->forward(Numbers(step, {4, 30})).square().mean().backward();
      for (const Tensor& parameter : model->parameters()) kept.push_back(parameter.grad());
      const c10::InferenceMode inference;
      optimizer.step();
    }
    for (const Tensor& tensor : kept) log.push_back(tensor.defined() ? tensor.clone() : Tensor());
    std::erase_if(log, [](const Tensor& tensor) { return !tensor.defined(); });
    for (const Tensor& parameter : model->parameters()) log.push_back(parameter.detach().clone());
    return log;
  };
  const auto expected = train(false);
  ExpectSame(expected, train(true), "under InferenceMode");
}

// Torch settles a thread's number of threads (at::set_num_threads) when something large is first
// computed there, which may be the optimizer's step; products before that are computed with
// another number, and so with other bits. Nothing of ours may settle it sooner, or later.
std::vector<Tensor> TrainOnAnUnsettledThread(bool offloading, bool attaches_there, bool spills) {
  const auto most = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (most == nullptr || set == nullptr) return {};
  SetOffloading(offloading);
  torch::manual_seed(7);
  nn::Sequential model(nn::Linear(48, 200), nn::Tanh(), nn::Linear(200, 200), nn::Tanh(),
                       nn::Linear(200, 48));
  std::shared_ptr<Engine> engine;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Tensor> log;
  const auto attach = [&] {
    Options options = OptionsFor(std::string(attaches_there ? "attached_there" : "settles") +
                                 (spills ? "_spilled" : ""));
    options.spill_gradients = spills;
    engine = Engine::Open(options);
    optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
  };
  const auto see_threads = [&] { log.push_back(torch::tensor(most())); };
  if (!attaches_there) attach();
  std::thread([&] {
    set(2);  // without torch
    if (attaches_there) attach();
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      const Tensor x = Numbers(step, {6, 48});
      (model->forward(x) - x).square().mean().backward();
      see_threads();
      optimizer->step();
      see_threads();
    }
  }).join();
  for (const Tensor& parameter : model->parameters()) log.push_back(parameter.detach().clone());
  return log;
}

TEST(TrainersTest, AThreadSettlesItsNumberOfThreadsWhereItDoesInMemory) {
  for (const bool attaches_there : {false, true}) {
    const auto expected =
        TrainOnAnUnsettledThread(/*offloading=*/false, attaches_there, /*spills=*/false);
    if (expected.empty()) GTEST_SKIP() << "this torch is not built with OpenMP";
    EXPECT_EQ(expected[0].item<int>(), 2);  // at the first step, and not before
    EXPECT_EQ(expected[1].item<int>(), 1);
    for (const bool spills : {false, true}) {
      const auto actual = TrainOnAnUnsettledThread(/*offloading=*/true, attaches_there, spills);
      ExpectSame(expected, actual,
                 std::string(attaches_there ? "attached there" : "attached elsewhere") +
                     (spills ? ", gradients spilled" : ""));
    }
  }
}

TEST(TrainersTest, AThawThatRamDoesNotHoldChangesNothing) {
  const auto build = [] {
    torch::manual_seed(7);
    nn::Sequential model(nn::Linear(1000, 3000), nn::Linear(3000, 10));
    for (Tensor& parameter : model[0]->as<nn::Linear>()->parameters())
      parameter.requires_grad_(false);
    return model;
  };
  SetOffloading(true);
  std::string floor;
  {
    nn::Sequential model = build();
    auto engine = Engine::Open(OptionsFor("no_room_floor", "1GiB"));
    const auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
    floor = std::to_string(engine->plan().floor_bytes);
  }
  nn::Sequential model = build();
  auto engine = Engine::Open(OptionsFor("no_room", floor));
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-3));
  const auto step = [&] {
    optimizer->zero_grad();
    model->forward(Numbers(0, {2, 1000})).sum().backward();
    optimizer->step();
  };
  step();
  Tensor weight = model[0]->as<nn::Linear>()->weight;
  weight.requires_grad_(true);
  ExpectError(1301, "the least that trains this model", step);
  EXPECT_EQ(engine->step(), 1);
  weight.requires_grad_(false);
  step();
  EXPECT_EQ(engine->step(), 2);
}

// The daemon dies when all is copied and nothing has its name yet.
TEST(TrainersTest, AKilledThawLeavesTheJobAsItWas) {
  const auto parity = [](bool offloading) {
    Unfreezing run(at::kFloat, offloading, OptionsFor("killed_thaw"));
    run.Train(0, 2);
    if (offloading) {
      setenv("OFFLOADD_FAULT_POINT", "job.laid_out_anew:1:exit", 1);
      run.Restart(2);
      ExpectError(1801, "", [&] { run.engine().Seal(); });
      unsetenv("OFFLOADD_FAULT_POINT");
      run.Restart(2);
    }
    run.Train(2, 7);
    return run.Log();
  };
  const auto expected = parity(false);
  ExpectSame(expected, parity(true), "killed");
}

// One graph each, at once; sums of small whole numbers are exact in any order.
TEST(TrainersTest, ThreadsRunAnLstmAtTheFloor) {
  const Program program = {
      "lstm_threads", [](at::ScalarType dtype) { return Recurrent(dtype, false); }, SGD, Plain};
  SetOffloading(true);
  torch::manual_seed(7);
  const Options options = OptionsFor("lstm_threads", FloorOf(program, at::kFloat));
  Trainer trainer = Recurrent(at::kFloat, false);
  auto engine = Engine::Open(options);
  auto optimizer = engine->SGD(*trainer.module, torch::optim::SGDOptions(0.1));
  std::vector<std::thread> threads;
  std::vector<Tensor> results(6);
  auto* const model = dynamic_cast<RecurrentModel*>(trainer.module.get());
  const Tensor input = Numbers(0, {3, 2, 200});
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      const torch::NoGradGuard no_grad;
      for (int round = 0; round < 4; ++round) results[i] = model->forward(input);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& result : results) EXPECT_TRUE(torch::equal(result, results[0]));
}

// ---- Handlers of SIGSEGV ------------------------------------------------------------------------

sigjmp_buf after_own_fault;
volatile int own_faults = 0;
void TakeOwnFault(int, siginfo_t*, void*) {
  own_faults = own_faults + 1;
  siglongjmp(after_own_fault, 1);
}
void FaultElsewhere() {
  if (sigsetjmp(after_own_fault, 1) == 0) *reinterpret_cast<volatile int*>(8) = 1;
}

using SigactionFunction = int (*)(int, const struct sigaction*, struct sigaction*);

TEST(TrainersTest, AHandlerOfTheProgramsOwnGetsTheOtherFaults) {
  SetOffloading(true);
  const Trainer trainer = Perceptron(at::kFloat);
  auto engine = Engine::Open(OptionsFor("handlers"));
  const auto optimizer = SGD(*engine, *trainer.module);
  const auto step = [&] {
    trainer.loss(0).backward();
    optimizer->step();
    optimizer->zero_grad();
  };
  const auto touch = [&] {
    for (const Tensor& parameter : trainer.module->parameters()) {
      const Tensor gathered = engine->Gather(parameter);
      EXPECT_EQ(
          std::memcmp(parameter.const_data_ptr(), gathered.const_data_ptr(), parameter.nbytes()),
          0);
    }
  };
  step();
  struct sigaction own = {}, before = {}, now = {};
  own.sa_sigaction = &TakeOwnFault;
  own.sa_flags = SA_SIGINFO;
  ASSERT_EQ(sigaction(SIGSEGV, &own, &before), 0);
  touch();
  FaultElsewhere();
  EXPECT_EQ(own_faults, 1);
  step();
  touch();
  ASSERT_EQ(sigaction(SIGSEGV, &before, &now), 0);
  EXPECT_EQ(now.sa_sigaction, &TakeOwnFault);
  touch();
  const auto was = signal(SIGSEGV, SIG_IGN);
  EXPECT_EQ(was, before.sa_handler);
  step();
  touch();
  EXPECT_EQ(signal(SIGSEGV, was), SIG_IGN);

  // One that comes without our knowledge is behind ours from the next step on.
  const auto unseen = reinterpret_cast<SigactionFunction>(dlsym(RTLD_NEXT, "sigaction"));
  ASSERT_EQ(unseen(SIGSEGV, &own, nullptr), 0);
  step();
  touch();
  FaultElsewhere();
  EXPECT_EQ(own_faults, 2);
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
}

TEST(TrainersDeathTest, AFaultWithoutAHandlerEndsTheProgramAsEver) {
  const auto raise_it = [] {
    SetOffloading(true);
    const Trainer trainer = Perceptron(at::kFloat);
    auto engine = Engine::Open(OptionsFor("default_handler"));
    const auto optimizer = SGD(*engine, *trainer.module);
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
  };
  EXPECT_EXIT(raise_it(), testing::KilledBySignal(SIGSEGV), "");
}

TEST(TrainersTest, RawAccessCanBeRefused) {
  SetOffloading(true);
  const Trainer trainer = Perceptron(at::kFloat);
  Options options = OptionsFor("raw_refused");
  options.raw_access = "error";
  auto engine = Engine::Open(options);
  auto optimizer = engine->SGD(*trainer.module, torch::optim::SGDOptions(0.1));
  EXPECT_ANY_THROW(trainer.module->parameters()[0].data_ptr<float>());
  options.raw_access = "perhaps";
  ExpectError(1002, "raw_access", [&] { Engine::Open(options); });
}

TEST(TrainersTest, ParameterInMemoryOfTheProgramIsRefused) {
  SetOffloading(true);
  std::vector<float> memory(200 * 300, 0.5f);
  nn::Linear layer(300, 200);
  layer->weight.set_data(torch::from_blob(memory.data(), {200, 300}));
  auto engine = Engine::Open(OptionsFor("blob"));
  ExpectError(1601, "'weight'", [&] { engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3)); });
  layer->weight.set_data(layer->weight.clone());
  engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
}

TEST(TrainersTest, OtherTypesAreRefusedWithAndWithoutOffloading) {
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    for (const at::ScalarType dtype : {at::kComplexFloat, at::kFloat8_e4m3fn}) {
      nn::Linear layer(30, 20);
      layer->to(dtype);
      auto engine = Engine::Open(OptionsFor("types"));
      ExpectError(1601, "'weight', 'bias' have dtype",
                  [&] { engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3)); });
    }
  }
}

TEST(TrainersTest, EmptyParameterIsGathered) {
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    nn::Linear layer(30, 20);
    const Tensor nothing = layer->register_parameter("nothing", torch::empty({0, 3}));
    auto engine = Engine::Open(OptionsFor("empty"));
    auto optimizer = engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
    EXPECT_EQ(engine->Gather(nothing).sizes(), at::IntArrayRef({0, 3}));
  }
}

TEST(TrainersTest, StateIsGatheredWhenTheOptimizerIsGone) {
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    nn::Linear layer(30, 20);
    auto engine = Engine::Open(OptionsFor("gone"));
    auto optimizer = engine->AdamW(*layer, torch::optim::AdamWOptions(1e-3));
    layer->forward(Numbers(0, {2, 30})).sum().backward();
    optimizer->step();
    optimizer.reset();
    EXPECT_TRUE(engine->Gather(layer->weight, "exp_avg").abs().sum().item<float>() > 0);
    EXPECT_EQ(engine->step(), 1);
  }
}

// ---- Resume ------------------------------------------------------------------------------------

// A module with buffers of several types and sizes; the big one changes, too.
struct WithBuffers : nn::Module {
  WithBuffers() {
    layer = register_module("layer", nn::Linear(kWidth, 500));
    norm = register_module("norm", nn::BatchNorm1d(500));
    count = register_buffer("count", torch::zeros({}, at::kLong));
    flags = register_buffer("flags", torch::zeros({7}, at::kBool));
    big = register_buffer("big", torch::zeros({400, 333}));
    turned = register_buffer("turned", torch::conj(torch::zeros({9}, at::kComplexFloat)));
    negated = register_buffer("negated", torch::_neg_view(torch::zeros({5})));
  }
  Tensor forward(const Tensor& x, int64_t step) {
    count.add_(1);
    flags[step % 7] = true;
    big[step].add_(static_cast<double>(step) + 0.5);
    turned.add_(c10::complex<double>(1, static_cast<double>(step) + 1));
    negated.add_(static_cast<double>(step) + 1);
    return norm(layer(x)) * (1 + big.sum());
  }
  nn::Linear layer{nullptr};
  nn::BatchNorm1d norm{nullptr};
  Tensor count, flags, big, turned, negated;
};

std::vector<Tensor> TrainWithBuffers(const std::string& job, int64_t steps, bool kill_after) {
  torch::manual_seed(5);
  auto model = std::make_shared<WithBuffers>();
  auto engine = Engine::Open(OptionsFor(job));
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
  for (int64_t step = engine->step(); step < steps; ++step) {
    optimizer->zero_grad();
    model->forward(Numbers(step, {6, kWidth}), step).square().mean().backward();
    optimizer->step();
  }
  if (kill_after) {
    engine->WaitDurable();
    kill(getpid(), SIGKILL);
  }
  model->eval();
  std::vector<Tensor> result;
  const torch::NoGradGuard no_grad;
  result.push_back(model->norm(model->layer(Numbers(99, {6, kWidth}))));
  for (const Tensor& buffer : model->buffers()) result.push_back(buffer.clone());
  return result;
}

TEST(ResumeTest, BuffersAreThoseOfTheUninterruptedRun) {
  SetOffloading(false);
  const auto expected = TrainWithBuffers("buffers", 6, false);
  SetOffloading(true);
  const pid_t child = fork();
  if (child == 0) {
    TrainWithBuffers("buffers", 3, true);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  ExpectSame(expected, TrainWithBuffers("buffers", 6, false), "resumed");
}

// Averages that follow step(): the last ones before a kill are done anew, as docs/attach.md says.
std::vector<Tensor> TrainWithAverages(int64_t steps, bool kill_after) {
  torch::manual_seed(5);
  nn::Linear model(kWidth, 300);
  const Tensor average = model->register_buffer("average", torch::zeros_like(model->weight));
  auto engine = Engine::Open(OptionsFor("averages"));
  auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
  const auto follow = [&] {
    const torch::NoGradGuard no_grad;
    average.lerp_(model->weight, 0.25);
  };
  if (engine->step() > 0) follow();
  for (int64_t step = engine->step(); step < steps; ++step) {
    optimizer->zero_grad();
    model->forward(Numbers(step, {6, kWidth})).square().mean().backward();
    optimizer->step();
    follow();
  }
  if (kill_after) {
    engine->WaitDurable();
    kill(getpid(), SIGKILL);
  }
  return {average.clone(), model->weight.detach().clone()};
}

TEST(ResumeTest, AveragesThatFollowAStepGoOnWhereTheyAreDoneAnew) {
  SetOffloading(false);
  const auto expected = TrainWithAverages(5, false);
  SetOffloading(true);
  const pid_t child = fork();
  if (child == 0) {
    TrainWithAverages(3, true);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  ExpectSame(expected, TrainWithAverages(5, false), "resumed");
}

TEST(ResumeTest, BuffersAreInFiles) {
  std::vector<std::vector<Tensor>> results;
  for (const bool offloading : {false, true}) {
    SetOffloading(offloading);
    const std::string folder = Pool() + (offloading ? "/files_on" : "/files_off");
    std::filesystem::remove_all(folder);
    torch::manual_seed(5);
    auto model = std::make_shared<WithBuffers>();
    auto engine = Engine::Open(OptionsFor("buffer_files"));
    auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-2));
    model->forward(Numbers(0, {6, kWidth}), 0).square().mean().backward();
    optimizer->step();
    engine->SaveWeights(folder);
    std::vector<Tensor> saved;
    for (const Tensor& buffer : model->buffers()) saved.push_back(buffer.clone());
    model->forward(Numbers(1, {6, kWidth}), 1);
    engine->LoadWeights(folder);
    ExpectSame(saved, model->buffers(), "loaded");
    auto other = std::make_shared<WithBuffers>();
    LoadWeights(*other, folder);
    ExpectSame(saved, other->buffers(), "loaded into memory");
    results.push_back(saved);
  }
  ExpectSame(results[0], results[1], "saved");
}

// ---- The trainer's own optimizer ---------------------------------------------------------------

void TakeStepsAndAClosure(Training& run) {
  for (int64_t step = 0; step < 3; ++step) {
    run.optimizer->zero_grad();
    run.Backward(step);
    run.optimizer->param_groups()[0].options().set_lr(0.01 / (1 + step));
    run.optimizer->step();
  }
  run.optimizer->step([&run] {
    run.optimizer->zero_grad();
    const Tensor loss = run.trainer.loss(3);
    loss.backward();
    return loss;
  });
}

// What torch alone computes, without any engine, is what an engine without offloading does.
template <class Optimizer, class OptimizerOptions>
void ExpectPlainParity(const Program& program, const OptimizerOptions& options) {
  Training run;
  torch::manual_seed(7);
  run.trainer = program.make(at::kFloat);
  run.optimizer = std::make_shared<Optimizer>(run.trainer.module->parameters(), options);
  program.loop(run);
  run.AddState();
  std::vector<Tensor> with_engine =
      RunOnce(program, at::kFloat, /*offload=*/false, OptionsFor(program.name));
  with_engine.pop_back();  // the engine's step
  ExpectSame(run.log, with_engine, program.name + " beside plain torch");
}

// The trainer's line stays as it is; steps, schedules and closures go through its own object.
template <class Optimizer, class OptimizerOptions>
void ExpectOwnParity(const std::string& name, const OptimizerOptions& options) {
  const Program program = {"own_" + name, Perceptron,
                           [options](Engine& engine, nn::Module& module) {
                             auto optimizer =
                                 std::make_shared<Optimizer>(module.parameters(), options);
                             engine.Attach(module, *optimizer);
                             return optimizer;
                           },
                           TakeStepsAndAClosure};
  ExpectPlainParity<Optimizer>(program, options);
  ExpectParity(program);
}

TEST(OwnOptimizerTest, ObjectsOfTorchStepInTheDaemon) {
  ExpectOwnParity<torch::optim::AdamW>("adamw", torch::optim::AdamWOptions(1e-2));
  ExpectOwnParity<torch::optim::Adam>("adam", torch::optim::AdamOptions(1e-2).amsgrad(true));
  ExpectOwnParity<torch::optim::SGD>("sgd", torch::optim::SGDOptions(1e-2).momentum(0.9));
  ExpectOwnParity<torch::optim::Adagrad>("adagrad", torch::optim::AdagradOptions(1e-2));
  ExpectOwnParity<torch::optim::RMSprop>("rmsprop", torch::optim::RMSpropOptions(1e-3));
  ExpectOwnParity<torch::optim::RMSprop>(
      "rmsprop_in_full",
      torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.9).weight_decay(0.1));
}

// Not torch's: runs here, on offloaded weights.
class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(0.01)) {}
  Tensor step(LossClosure closure) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.add_(parameter.grad().sign(), -0.01);
      }
    }
    return closure ? closure() : Tensor();
  }
};

TEST(OwnOptimizerTest, OptimizersOfTheTrainersOwnRunUnmodified) {
  ExpectParity({"own_sign", Perceptron,
                [](Engine& engine, nn::Module& module) {
                  auto optimizer = std::make_shared<SignDescent>(module.parameters());
                  engine.Attach(module, *optimizer);
                  return optimizer;
                },
                [](Training& run) {
                  for (int64_t step = 0; step < 3; ++step) {
                    run.optimizer->zero_grad();
                    run.Backward(step);
                    run.optimizer->step();
                    run.engine->CommitStep();
                  }
                }});
}

struct Kept {
  std::vector<Tensor> weights;
  int64_t step = 0;
};

// Runs of `steps` each, of one job where it is offloaded; in memory one run of all of them.
template <typename MakeOptimizer, typename TakeStep>
Kept TrainInRuns(const std::string& job, const std::vector<int64_t>& ends, bool offloading,
                 const MakeOptimizer& make, const TakeStep& take) {
  SetOffloading(offloading);
  Kept kept;
  for (const int64_t end : offloading ? ends : std::vector<int64_t>{ends.back()}) {
    torch::manual_seed(7);
    const Trainer trainer = Perceptron(at::kFloat);
    auto optimizer = make(*trainer.module);
    auto engine = Engine::Open(OptionsFor(job, "512MiB"));
    engine->Attach(*trainer.module, *optimizer);
    for (int64_t step = engine->step(); step < end; ++step)
      take(trainer, *engine, *optimizer, step);
    kept.weights.clear();
    for (const Tensor& parameter : trainer.module->parameters())
      kept.weights.push_back(engine->Gather(parameter));
    kept.step = engine->step();
  }
  return kept;
}

void StepOfLbfgs(const Trainer& trainer, Engine&, torch::optim::LBFGS& optimizer, int64_t step) {
  optimizer.step([&] {
    optimizer.zero_grad();
    const Tensor loss = trainer.loss(step);
    loss.backward();
    return loss;
  });
}

// Its history grows with every step, in the job, too.
TEST(OwnOptimizerTest, LbfgsRunsHereAndGoesOn) {
  const auto make = [](nn::Module& module) {
    return std::make_unique<torch::optim::LBFGS>(
        module.parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3).history_size(4));
  };
  const Kept expected = TrainInRuns("own_lbfgs", {6}, false, make, StepOfLbfgs);
  const Kept offloaded = TrainInRuns("own_lbfgs", {2, 3, 6}, true, make, StepOfLbfgs);
  ExpectSame(expected.weights, offloaded.weights, "lbfgs");
  EXPECT_EQ(offloaded.step, 6);
}

// Memory of this process that lies in a file without a name.
uint64_t PagedBytes() {
  std::ifstream maps("/proc/self/maps");
  uint64_t size_bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with("(deleted)") || line.find("/#") == std::string::npos) continue;
    char* end = nullptr;
    const uint64_t begin = std::strtoull(line.c_str(), &end, 16);
    size_bytes += std::strtoull(end + 1, nullptr, 16) - begin;
  }
  return size_bytes;
}

TEST(OwnOptimizerTest, WhatIsMoreThanMemoryIsPaged) {
  const auto make = [](nn::Module& module) {
    return std::make_unique<torch::optim::LBFGS>(
        module.parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3).history_size(4));
  };
  uint64_t most = 0;
  const auto step = [&](const Trainer& trainer, Engine& engine, torch::optim::LBFGS& optimizer,
                        int64_t number) {
    StepOfLbfgs(trainer, engine, optimizer, number);
    most = std::max(most, PagedBytes());
  };
  const Kept expected = TrainInRuns("paged_lbfgs", {6}, false, make, StepOfLbfgs);
  setenv("OFFLOADD_BESIDE_RAM", "64KiB", 1);
  const Kept offloaded = TrainInRuns("paged_lbfgs", {2, 3, 6}, true, make, step);
  unsetenv("OFFLOADD_BESIDE_RAM");
  ExpectSame(expected.weights, offloaded.weights, "lbfgs");
  uint64_t model_bytes = 0;
  for (const Tensor& weight : offloaded.weights) model_bytes += weight.nbytes();
  EXPECT_GT(most, 4 * model_bytes);  // two histories of four
  EXPECT_EQ(PagedBytes(), 0);
}

// The daemon has the first one; the second, of another kind, runs here. Of 16-bit weights it has
// fp32 masters, which libtorch's own file of it has not.
std::vector<Tensor> TrainInPhases(at::ScalarType dtype, const std::vector<int64_t>& ends,
                                  bool offloading) {
  SetOffloading(offloading);
  std::vector<Tensor> weights;
  for (const int64_t end : offloading ? ends : std::vector<int64_t>{ends.back()}) {
    torch::manual_seed(7);
    const Trainer trainer = Perceptron(dtype);
    auto engine = Engine::Open(OptionsFor(absl::StrCat("phases_", toString(dtype)), "512MiB"));
    std::unique_ptr<torch::optim::Optimizer> optimizer = std::make_unique<torch::optim::SGD>(
        trainer.module->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    engine->Attach(*trainer.module, *optimizer);
    for (int64_t step = engine->step(); step < end; ++step) {
      if (step >= 2 && dynamic_cast<torch::optim::SGD*>(optimizer.get()) != nullptr) {
        optimizer.reset();
        optimizer = std::make_unique<torch::optim::Adam>(trainer.module->parameters(), 1e-3);
        engine->Attach(*trainer.module, *optimizer);
      }
      optimizer->zero_grad();
      trainer.loss(step).backward();
      optimizer->step();
    }
    weights.clear();
    for (const Tensor& parameter : trainer.module->parameters())
      weights.push_back(engine->Gather(parameter));
  }
  return weights;
}

TEST(OwnOptimizerTest, APhaseOfAnotherKindGoesOn) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::vector<Tensor> expected = TrainInPhases(dtype, {7}, false);
    ExpectSame(expected, TrainInPhases(dtype, {2, 4, 5, 7}, true), "phases");
  }
}

struct SparseTable : nn::Module {
  SparseTable()
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(500, 64).sparse(true)))),
        head(register_module("head", nn::Linear(64, 10))) {}
  nn::Embedding table;
  nn::Linear head;
};

// torch's SGD keeps a sparse buffer of such gradients.
std::vector<Tensor> TrainSparsely(const std::vector<int64_t>& ends, bool offloading) {
  SetOffloading(offloading);
  std::vector<Tensor> weights;
  for (const int64_t end : offloading ? ends : std::vector<int64_t>{ends.back()}) {
    torch::manual_seed(7);
    auto model = std::make_shared<SparseTable>();
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto engine = Engine::Open(OptionsFor("sparse_momentum", "512MiB"));
    engine->Attach(*model, optimizer);
    for (int64_t step = engine->step(); step < end; ++step) {
      optimizer.zero_grad();
      torch::manual_seed(100 + step);
      const Tensor rows = torch::randint(500, {40}).remainder(20 + 5 * step);
      model->head(model->table(rows)).square().mean().backward();
      optimizer.step();
    }
    weights.clear();
    for (const Tensor& parameter : model->parameters())
      weights.push_back(engine->Gather(parameter));
  }
  return weights;
}

TEST(OwnOptimizerTest, SparseMomentumGoesOn) {
  const std::vector<Tensor> expected = TrainSparsely({8}, false);
  ExpectSame(expected, TrainSparsely({2, 3, 6, 8}, true), "sparse momentum");
}

// Each step updates the first weight twice.
TEST(OwnOptimizerTest, OneThatNamesAParameterTwiceGoesOn) {
  const auto make = [](nn::Module& module) {
    std::vector<Tensor> parameters = module.parameters();
    parameters.push_back(parameters.front());
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.01).momentum(0.9));
  };
  const auto take = [](const Trainer& trainer, Engine&, torch::optim::SGD& optimizer,
                       int64_t step) {
    optimizer.zero_grad();
    trainer.loss(step).backward();
    optimizer.step();
  };
  const Kept expected = TrainInRuns("own_twice", {6}, false, make, take);
  const Kept offloaded = TrainInRuns("own_twice", {2, 4, 6}, true, make, take);
  ExpectSame(expected.weights, offloaded.weights, "twice");
}

TEST(OwnOptimizerTest, OptionsOfOneThatGoesOnAreThePrograms) {
  SetOffloading(true);
  for (const double rate : {0.5, 0.25}) {
    nn::Linear layer(kWidth, 20);
    torch::optim::LBFGS optimizer(layer->parameters(), torch::optim::LBFGSOptions(rate));
    auto engine = Engine::Open(OptionsFor("own_options"));
    engine->Attach(*layer, optimizer);
    auto& group = optimizer.param_groups()[0];
    EXPECT_EQ(static_cast<torch::optim::LBFGSOptions&>(group.options()).lr(), rate);
    StepOfLbfgs({layer.ptr(), [&](int64_t) { return layer->weight.square().mean(); }}, *engine,
                optimizer, 0);
  }
}

// A class of the trainer's own; what its save() writes goes with CommitStep(optimizer).
class Momentum : public torch::optim::Optimizer {
 public:
  explicit Momentum(std::vector<Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(0.01)) {
    for (const Tensor& parameter : param_groups_[0].params())
      means_.push_back(torch::zeros_like(parameter));
  }
  Tensor step(LossClosure closure) override {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < means_.size(); ++i) {
      Tensor& parameter = param_groups_[0].params()[i];
      means_[i].mul_(0.9).add_(parameter.grad());
      parameter.add_(means_[i], -0.01 / static_cast<double>(++count_));
    }
    return closure ? closure() : Tensor();
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("count", torch::tensor(count_));
    for (size_t i = 0; i < means_.size(); ++i) archive.write(std::to_string(i), means_[i]);
  }
  void load(torch::serialize::InputArchive& archive) override {
    Tensor count;
    archive.read("count", count);
    count_ = count.item<int64_t>();
    for (size_t i = 0; i < means_.size(); ++i) archive.read(std::to_string(i), means_[i]);
  }

 private:
  std::vector<Tensor> means_;
  int64_t count_ = 0;
};

template <typename Optimizer>
void StepOfOwn(const Trainer& trainer, Engine& engine, Optimizer& optimizer, int64_t step) {
  optimizer.zero_grad();
  trainer.loss(step).backward();
  optimizer.step(nullptr);
  engine.CommitStep(optimizer);
}

TEST(OwnOptimizerTest, OneOfTheTrainersOwnGoesOnWithWhatItsSaveWrites) {
  const auto make = [](nn::Module& module) {
    return std::make_unique<Momentum>(module.parameters());
  };
  const Kept expected = TrainInRuns("own_momentum", {5}, false, make, StepOfOwn<Momentum>);
  const Kept offloaded = TrainInRuns("own_momentum", {1, 3, 5}, true, make, StepOfOwn<Momentum>);
  ExpectSame(expected.weights, offloaded.weights, "own");
}

TEST(OwnOptimizerTest, WithoutSaveItsJobIsNotResumed) {
  const auto make = [](nn::Module& module) {
    return std::make_unique<SignDescent>(module.parameters());
  };
  ExpectError(1604, "has no save()", [&] {
    TrainInRuns("own_without_save", {1, 2}, true, make, StepOfOwn<SignDescent>);
  });
  const auto commits_alone = [](const Trainer& trainer, Engine& engine, Momentum& optimizer,
                                int64_t step) {
    optimizer.zero_grad();
    trainer.loss(step).backward();
    optimizer.step(nullptr);
    engine.CommitStep();
  };
  const auto make_momentum = [](nn::Module& module) {
    return std::make_unique<Momentum>(module.parameters());
  };
  ExpectError(1604, "CommitStep(optimizer)", [&] {
    TrainInRuns("own_committed_alone", {1, 2}, true, make_momentum, commits_alone);
  });
}

TEST(OwnOptimizerTest, CommitStepOfAnotherThanAnAttachedOneIsRefused) {
  SetOffloading(true);
  nn::Linear layer(kWidth, 20);
  torch::optim::SGD attached(layer->parameters(), 0.1);
  SignDescent other(layer->parameters());
  auto engine = Engine::Open(OptionsFor("own_unknown"));
  engine->Attach(*layer, attached);
  ExpectError(1002, "not attached", [&] { engine->CommitStep(other); });
  ExpectError(1002, "commits its steps itself", [&] { engine->CommitStep(attached); });
}

// ---- After the engine --------------------------------------------------------------------------

TEST(CloseTest, WeightsStayInMemoryWhenAsked) {
  SetOffloading(true);
  nn::Linear layer(kWidth, 200);
  Tensor last;
  {
    Options options = OptionsFor("closed");
    options.weights_at_close = "memory";
    auto engine = Engine::Open(options);
    auto optimizer = engine->SGD(*layer, torch::optim::SGDOptions(0.1));
    layer->forward(Numbers(0, {2, kWidth})).sum().backward();
    optimizer->step();
    last = engine->Gather(layer->weight);
  }
  EXPECT_TRUE(torch::equal(layer->weight, last));
  EXPECT_NE(layer->weight.data_ptr<float>(), nullptr);
  layer->forward(Numbers(0, {2, kWidth}));
}

}  // namespace
}  // namespace offload
