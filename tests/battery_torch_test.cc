// Every program of the battery computes offloaded what it computes in memory, bit for bit, with as
// little memory as can be and with plenty; or it is refused, with the error that it names. bf16 has
// plenty, and fp64 and fp16 their turn, only with OFFLOADD_LONG_TESTS=1, for the sake of time.

#include "tests/battery_torch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/battery_torch_growth.h"
#include "tests/battery_torch_phases.h"
#include "tests/battery_torch_trainers.h"
#include "tests/torch_fixture.h"

namespace offload::battery {

std::shared_ptr<Engine> Run::Open(const std::function<void(Options&)>& change) {
  ++jobs_;
  Options options = options_;
  options.job += "-" + std::to_string(jobs_);
  change(options);
  return Engine::Open(options);
}

std::shared_ptr<Engine> Run::Reopen() {
  --jobs_;
  return Open();
}

Tensor Run::Noise(uint64_t seed, at::IntArrayRef sizes) const {
  return at::randn(sizes, at::detail::createCPUGenerator(seed + 1000)).to(dtype_);
}

Tensor Run::Indices(uint64_t seed, int64_t end, at::IntArrayRef sizes) const {
  return at::randint(end, sizes, at::detail::createCPUGenerator(seed + 2000), at::kLong);
}

void Run::See(const Tensor& tensor) {
  const at::NoGradGuard no_grad;
  seen_.push_back(tensor.defined()
                      ? (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().clone()
                      : at::zeros({0}));
}

void Run::See(const nn::Module& module) {
  for (const Tensor& parameter : module.parameters()) See(parameter);
  for (const Tensor& buffer : module.buffers()) See(buffer);
}

void Run::SeeGradients(const nn::Module& module) {
  for (const Tensor& parameter : module.parameters()) See(parameter.grad());
}

// ---- The comparison ----------------------------------------------------------------------------

namespace {

struct Case {
  Program program;
  at::ScalarType dtype;
};

std::string NameOf(const Case& of) {
  switch (of.dtype) {
    case at::kFloat:
      return of.program.name + "_fp32";
    case at::kBFloat16:
      return of.program.name + "_bf16";
    case at::kHalf:
      return of.program.name + "_fp16";
    default:
      return of.program.name + "_fp64";
  }
}

struct Outcome {
  std::vector<Tensor> seen;
  std::optional<int> error;
  std::string text;
};

Outcome RunOnce(const Case& of, const std::string& ram) {
  Options options = PoolOptions("job", ram);
  options.nvme_path += "/" + NameOf(of);
  std::filesystem::remove_all(options.nvme_path);
  std::filesystem::create_directories(options.nvme_path);
  Run run(options, of.dtype);
  Outcome outcome;
  torch::manual_seed(1);
  try {
    of.program.run(run);
  } catch (const Error& error) {
    outcome.error = error.id();
    outcome.text = error.what();
  }
  outcome.seen = run.seen();
  std::filesystem::remove_all(options.nvme_path);
  return outcome;
}

// With the least that OFD-1301 names; a program of several jobs takes the most of them.
Outcome RunAtTheFloor(const Case& of) {
  std::string ram = "9MiB";
  for (;;) {
    Outcome outcome = RunOnce(of, ram);
    const std::string words = "Set ram to at least ";
    const size_t at = outcome.text.find(words);
    if (outcome.error != 1301 || at == std::string::npos) return outcome;
    ram = std::to_string(std::stoull(outcome.text.substr(at + words.size())));
  }
}

bool IsSame(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return !a.is_floating_point() ? torch::equal(a, b)
                                : torch::equal(a.nan_to_num(7.25), b.nan_to_num(7.25));
}

void ExpectSame(const Outcome& expected, const Outcome& outcome, const std::string& with) {
  EXPECT_FALSE(outcome.error.has_value()) << with << ": " << outcome.text;
  EXPECT_EQ(expected.seen.size(), outcome.seen.size()) << with;
  for (size_t i = 0; i < std::min(expected.seen.size(), outcome.seen.size()); ++i) {
    ASSERT_TRUE(IsSame(expected.seen[i], outcome.seen[i]))
        << with << ": of " << expected.seen.size() << " tensors the one at " << i << " differs, "
        << expected.seen[i].sizes();
  }
}

class BatteryTest : public testing::TestWithParam<Case> {};

TEST_P(BatteryTest, ComputesWhatItComputesInMemory) {
  if (const int refused = GetParam().program.refused) {
    SetOffloading(true);
    const Outcome outcome = RunOnce(GetParam(), "1GiB");
    EXPECT_EQ(outcome.error, refused) << outcome.text;
    return;
  }
  const at::ScalarType dtype = GetParam().dtype;
  SetOffloading(false);
  Outcome in_memory;
  try {
    in_memory = RunOnce(GetParam(), "1GiB");
  } catch (const c10::Error& error) {
    if (dtype != at::kHalf && dtype != at::kDouble) throw;
    GTEST_SKIP() << "torch itself does not run it: " << error.what_without_backtrace();
  }
  SetOffloading(true);
  ASSERT_FALSE(in_memory.error.has_value()) << in_memory.text;
  ASSERT_FALSE(in_memory.seen.empty());
  const Outcome at_the_floor = RunAtTheFloor(GetParam());
  if (dtype == at::kDouble && at_the_floor.error == 1604)
    GTEST_SKIP() << "refused as it should be: " << at_the_floor.text;
  ExpectSame(in_memory, at_the_floor, "at the floor");
  if (GetParam().dtype == at::kFloat || getenv("OFFLOADD_LONG_TESTS") != nullptr)
    ExpectSame(in_memory, RunOnce(GetParam(), "1GiB"), "with 1 GiB");
}

std::vector<Case> Cases() {
  const bool in_every_type = getenv("OFFLOADD_LONG_TESTS") != nullptr;
  std::vector<Case> cases;
  for (const auto programs :
       {ModulePrograms, LoopPrograms, EditPrograms, LifePrograms, StridePrograms, PhasePrograms,
        GrowthPrograms, PaperPrograms, AnewPrograms, TrainerPrograms}) {
    for (Program& program : programs()) {
      cases.push_back({program, at::kFloat});
      if (program.fp32_only) continue;
      cases.push_back({program, at::kBFloat16});
      if (!in_every_type) continue;
      cases.push_back({program, at::kDouble});
      cases.push_back({std::move(program), at::kHalf});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Programs, BatteryTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           return NameOf(info.param);
                         });

}  // namespace
}  // namespace offload::battery
