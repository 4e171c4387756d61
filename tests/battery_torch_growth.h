// tests/battery_torch_growth.h
//
// Models that get further parameters while they are trained, in groups of their optimizer or with
// one of their own.
#pragma once

#include "tests/battery_torch.h"

namespace offload::battery {

Programs GrowthPrograms();

}  // namespace offload::battery
