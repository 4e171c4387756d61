// tests/battery_torch_trainers.h
//
// Programs of the battery that are whole trainers of methods, killed and begun again; and those
// that go on from files of their own (battery_torch.h).
//
// Thread safety: as battery_torch.h.
#pragma once

#include "tests/battery_torch.h"

namespace offload::battery {

Programs TrainerPrograms();

}  // namespace offload::battery
