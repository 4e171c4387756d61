// Loading and saving weights in the middle of a run: the engine over a real daemon, and with
// OFFLOADD_DISABLE=1, compared bit by bit.

#include <gtest/gtest.h>
#include <offload/torch.h>
#include <stdlib.h>
#include <torch/nn/modules.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>

#include "base/failing_call.h"

namespace offload {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

// One matrix of several extents that is also the output, small ones, and one without elements.
struct Model : nn::Module {
  Model() {
    embedding = register_module("embedding", nn::Embedding(1100, 512));
    same = register_module("same", embedding);
    middle = register_module("middle", nn::Linear(512, 512));
    nothing = register_parameter("nothing", torch::empty({0, 3}));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::linear(at::tanh(middle(embedding(tokens))), embedding->weight);
  }
  nn::Embedding embedding{nullptr}, same{nullptr};
  nn::Linear middle{nullptr};
  at::Tensor nothing;
};

std::shared_ptr<Model> MakeModel(int64_t seed, at::ScalarType dtype) {
  torch::manual_seed(seed);
  auto model = std::make_shared<Model>();
  model->to(dtype);
  return model;
}

std::string FileText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void ExpectRefused(int id, const std::string& path, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << path;
  } catch (const Error& error) {
    EXPECT_EQ(error.id(), id) << error.what();
  }
}

class WeightsIoTest : public testing::TestWithParam<at::ScalarType> {
 protected:
  WeightsIoTest() {
    const char* const base = getenv("TEST_TMPDIR");
    std::string pattern = std::string(base != nullptr ? base : ".") + "/weights-XXXXXX";
    root_ = mkdtemp(pattern.data());
    fs::create_directory(root_ + "/pool");
  }
  ~WeightsIoTest() override {
    unsetenv("OFFLOADD_DISABLE");
    fs::remove_all(root_);
  }

  // Opens the job, attaches a model, and runs `body`.
  struct Run {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Model> model;
    std::unique_ptr<torch::optim::Optimizer> optimizer;

    void Step() const {
      const at::Tensor tokens = at::arange(0, 60, at::kLong).view({2, 30}) + engine->step() * 7;
      model->forward(tokens).to(at::kFloat).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  };
  void With(bool offloaded, const std::function<void(Run&)>& body) {
    setenv("OFFLOADD_DISABLE", offloaded ? "0" : "1", 1);
    Options options;
    options.nvme_path = root_ + "/pool";
    options.ram = "96MiB";
    options.job = "weights";
    Run run;
    run.engine = Engine::Open(options);
    run.model = MakeModel(1, GetParam());
    run.optimizer = run.engine->AdamW(*run.model, torch::optim::AdamWOptions(1e-2));
    body(run);
  }

  // A checkpoint of another model of the same shape.
  std::string OtherWeights(at::ScalarType dtype) {
    const std::string folder = root_ + "/other-" + c10::toString(dtype);
    if (!fs::exists(folder)) SaveWeights(*MakeModel(2, dtype), folder);
    return folder;
  }

  std::string root_;
};

TEST_P(WeightsIoTest, LoadInTheMiddleKeepsMoments) {
  const std::string other = OtherWeights(at::kFloat);
  for (const bool offloaded : {true, false}) {
    const std::string name = root_ + (offloaded ? "/on" : "/off");
    With(offloaded, [&](Run& run) {
      for (int i = 0; i < 3; ++i) run.Step();
      run.engine->LoadWeights(other);
      run.engine->SaveWeights(name + "-loaded");
      run.Step();
      run.engine->WaitDurable();
      run.engine->SaveWeights(name + "-stepped");
    });
  }
  for (const std::string part : {"-loaded", "-stepped"}) {
    const std::string file = part + "/model.safetensors";
    EXPECT_TRUE(FileText(root_ + "/on" + file) == FileText(root_ + "/off" + file)) << part;
  }
  EXPECT_TRUE(FileText(root_ + "/on-loaded/model.safetensors") ==
              FileText(OtherWeights(GetParam()) + "/model.safetensors"))
      << "a cast of the model and a cast of the file";
  With(true, [&](Run& run) {
    EXPECT_EQ(run.engine->step(), 4);
    run.engine->SaveWeights(root_ + "/again", {.shard_bytes = 5'000'000'000});
  });
  EXPECT_TRUE(FileText(root_ + "/on-stepped/model.safetensors") ==
              FileText(root_ + "/again/model.safetensors"));
}

TEST_P(WeightsIoTest, LoadIsDurableWhenItReturns) {
  const std::string other = OtherWeights(GetParam());
  With(true, [&](Run& run) {
    run.Step();
    run.engine->LoadWeights(other);
    const at::NoGradGuard no_grad;
    run.model->middle->bias.fill_(7);  // and what is written by hand is not
  });
  With(true, [&](Run& run) {
    EXPECT_EQ(run.engine->step(), 1);
    run.engine->SaveWeights(root_ + "/found");
  });
  EXPECT_TRUE(FileText(root_ + "/found/model.safetensors") ==
              FileText(other + "/model.safetensors"));
}

TEST_P(WeightsIoTest, LoadThatFailsMidwayIsDroppedAndNoStepMakesItDurable) {
  const std::string other = OtherWeights(GetParam());
  const auto expect = [](int id, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no OFD-" << id;
    } catch (const Error& error) {
      EXPECT_EQ(error.id(), id) << error.what();
    }
  };
  const auto fail_to_load = [&](Run& run) {
    const FailingCall failing("pread", EIO, {.after = 4});  // the header, and two extents
    expect(1405, [&] { run.engine->LoadWeights(other); });
    EXPECT_EQ(failing.failures(), 1);
  };
  With(true, [&](Run& run) {
    run.Step();
    run.engine->SaveWeights(root_ + "/before");
    fail_to_load(run);
    expect(1406, [&] { run.Step(); });
    expect(1406, [&] { run.engine->SaveWeights(root_ + "/half"); });
  });
  With(true, [&](Run& run) {
    EXPECT_EQ(run.engine->step(), 1);
    run.engine->SaveWeights(root_ + "/after");
    fail_to_load(run);
    run.engine->LoadWeights(other);  // a whole one makes it good
    run.Step();
    EXPECT_EQ(run.engine->step(), 2);
  });
  EXPECT_TRUE(FileText(root_ + "/before/model.safetensors") ==
              FileText(root_ + "/after/model.safetensors"));
}

TEST_P(WeightsIoTest, FileThatDoesNotFitChangesNothing) {
  const std::string other = OtherWeights(at::kFloat);
  const std::string file = other + "/model.safetensors";
  for (const bool offloaded : {true, false}) {
    With(offloaded, [&](Run& run) {
      run.Step();
      const at::Tensor before = run.engine->Gather(run.model->middle->weight);
      const auto refused = [&](int id, const std::string& path) {
        ExpectRefused(id, path, [&] { run.engine->LoadWeights(path); });
      };
      refused(1405, root_ + "/none");
      nn::Linear stranger(4, 4);
      const std::string folder = root_ + (offloaded ? "/stranger-on" : "/stranger-off");
      SaveWeights(*stranger, folder);
      refused(1402, folder);
      fs::copy(file, folder + "/short.safetensors");
      fs::resize_file(folder + "/short.safetensors", fs::file_size(file) - 1);
      refused(1401, folder + "/short.safetensors");
      EXPECT_TRUE(run.engine->Gather(run.model->middle->weight).equal(before));
      run.Step();
      EXPECT_THROW(run.engine->SaveWeights(other), Error);  // holds a checkpoint
    });
  }
}

TEST_P(WeightsIoTest, InitialWeightsMayBeNamedUntilTheModelIsUsed) {
  const std::string other = OtherWeights(at::kFloat);
  for (const bool offloaded : {true, false}) {
    With(offloaded, [&](Run& run) {
      const auto refused = [&](int id, const std::string& path) {
        ExpectRefused(id, path, [&] { run.engine->SetInitialWeights(path); });
      };
      run.engine->SetInitialWeights(other);
      run.Step();
      if (offloaded) refused(1002, other);
      refused(1405, "");
      run.engine->SaveWeights(root_ + (offloaded ? "/on" : "/off"));
      EXPECT_THROW(run.engine->SaveWeights(""), Error);
    });
  }
  const std::string file = "/model.safetensors";
  EXPECT_TRUE(FileText(root_ + "/on" + file) == FileText(root_ + "/off" + file));
  // Training began with the file's: not where it would have come to without.
  With(false, [&](Run& run) {
    run.Step();
    run.engine->SaveWeights(root_ + "/without");
  });
  EXPECT_FALSE(FileText(root_ + "/without" + file) == FileText(root_ + "/off" + file));
}

TEST_P(WeightsIoTest, WhatIsNoParameterIsNotGathered) {
  With(true, [](Run& run) {
    const at::Tensor weight = run.model->middle->weight;
    const auto text_of = [&](const at::Tensor& tensor) {
      try {
        run.engine->Gather(tensor);
      } catch (const Error& error) {
        EXPECT_EQ(error.id(), 1002);
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_EQ(text_of(weight), "");
    for (const char* const part : {"shape [512]", "not a part or a copy"})
      EXPECT_NE(text_of(weight.detach()[0]).find(part), std::string::npos) << part;
    EXPECT_NE(text_of(at::Tensor()).find("an undefined tensor"), std::string::npos);
  });
}

TEST_P(WeightsIoTest, OffloadedModuleIsNotTakenForOneInMemory) {
  With(true, [&](Run& run) {
    EXPECT_THROW(SaveWeights(*run.model, root_ + "/out"), Error);
    EXPECT_THROW(LoadWeights(*run.model, OtherWeights(GetParam())), Error);
    EXPECT_FALSE(fs::exists(root_ + "/out"));
  });
}

INSTANTIATE_TEST_SUITE_P(Types, WeightsIoTest, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) {
                           return std::string(info.param == at::kFloat ? "fp32" : "bf16");
                         });

}  // namespace
}  // namespace offload
