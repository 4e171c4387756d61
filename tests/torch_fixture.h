// tests/torch_fixture.h
//
// What tests of programs with torch have in common: a pool in the test's own folder, offloading on
// or off, errors by number and text, and a daemon that is found from any folder.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <offload/torch.h>
#include <stdlib.h>

#include <functional>
#include <string>

namespace offload {

inline std::string Pool() {
  const char* const folder = getenv("TEST_TMPDIR");
  return folder != nullptr ? folder : ".";
}

inline void SetOffloading(bool on) { setenv("OFFLOADD_DISABLE", on ? "0" : "1", 1); }

inline Options PoolOptions(const std::string& job, const std::string& ram) {
  Options options;
  options.nvme_path = Pool();
  options.ram = ram;
  options.job = job;
  return options;
}

inline void ExpectError(int id, const std::string& text, const std::function<void()>& action) {
  try {
    action();
    ADD_FAILURE() << "no error, OFD-" << id << " expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.id(), id) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

class TorchEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    at::set_num_threads(1);
    if (const char* const binary = getenv("OFFLOADD_BINARY")) {
      char absolute[4096];
      if (realpath(binary, absolute) != nullptr) setenv("OFFLOADD_BINARY", absolute, 1);
    }
  }
};
inline const auto* const kTorchEnvironment =
    testing::AddGlobalTestEnvironment(new TorchEnvironment);

}  // namespace offload
