// tests/standin_torch_fixture.h
//
// What tests that train a model on the stand-in device have in common: device_torch_fixture.h, and
// the device that judges them.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "accelerator/host_accelerator.h"
#include "gmock/gmock.h"
#include "tests/device_torch_fixture.h"
#include "tests/standin_torch.h"

namespace offload {

// The checker has found nothing, and nothing is left on the device.
inline void ExpectClean(accelerator::HostAccelerator& device) {
  EXPECT_THAT(device.Violations(), testing::IsEmpty());
  EXPECT_THAT(device.Leftovers(), testing::IsEmpty());
}

// Batch `number` of a training set: [sequences, length].
inline at::Tensor TokensOnStandin(int64_t number, int64_t vocabulary, int64_t sequences,
                                  int64_t length) {
  torch::manual_seed(100 + number);
  return torch::randint(vocabulary, {sequences, length}).to(StandinDevice());
}

}  // namespace offload
