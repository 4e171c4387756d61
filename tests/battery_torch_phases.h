// tests/battery_torch_phases.h
//
// Trainings whose phases have an optimizer each: objects of torch's that follow each other over the
// same parameters, or stand side by side, of one kind or of several.
#pragma once

#include "tests/battery_torch.h"

namespace offload::battery {

Programs PhasePrograms();

}  // namespace offload::battery
