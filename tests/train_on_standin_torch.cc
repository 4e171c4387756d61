// examples/train with a stand-in device: --device standin. What its checker finds at the end is a
// failure.

#include <iostream>
#include <string>
#include <vector>

#include "accelerator/host_accelerator.h"
#include "examples/train.h"
#include "tests/standin_torch.h"

int main(int argc, char** argv) {
  // Outlives every tensor.
  static auto* const kDevice =
      new offload::accelerator::HostAccelerator({.memory_bytes = uint64_t{4} << 30});
  offload::UseStandin(*kDevice);
  const int code = offload::examples::TrainMain(argc, argv);
  const std::vector<std::string> violations = kDevice->Violations();
  for (const std::string& violation : violations) std::cerr << violation << std::endl;
  return code == 0 && !violations.empty() ? 1 : code;
}
