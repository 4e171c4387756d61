#include "zero3/torch/torch_instructions.h"

#include <ATen/Version.h>

#include "base/error.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

void CheckInstructions() {
  if (at::get_cpu_capability() != "DEFAULT") return;
  ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                        "torch computes without AVX2 here (ATEN_CPU_CAPABILITY, or what it reads "
                        "of the processor), with which an update has other bits than in the daemon",
                        "Leave ATEN_CPU_CAPABILITY out, and see that /proc is mounted; a processor "
                        "without AVX2 is not served"));
}

}  // namespace offload::zero3
