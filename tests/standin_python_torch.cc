// The stand-in device for programs in Python: this library is the package's own one and the device,
// and is loaded in its place (OFFLOADD_LIBRARY). What C++ tests say to the device, ctypes says
// here.

#include <cstdint>
#include <string>

#include "accelerator/host_accelerator.h"
#include "tests/standin_torch.h"

namespace {

using offload::accelerator::HostAccelerator;
using offload::accelerator::Pace;

HostAccelerator* device = nullptr;

}  // namespace

extern "C" {

// The device of this process from now on; before the first tensor on it.
__attribute__((visibility("default"))) void offloadd_standin_use(uint64_t seed, int is_late,
                                                                 int registers_slab) {
  device = new HostAccelerator({.seed = seed,
                                .pace = is_late != 0 ? Pace::kLate : Pace::kRandom,
                                .queries_are_late = is_late != 0,
                                .registers_read_only = registers_slab != 0});  // outlives tensors
  offload::UseStandin(*device);
}

// What its checker has found so far, line by line; good until the next call.
__attribute__((visibility("default"))) const char* offloadd_standin_violations() {
  static auto* const text = new std::string;
  text->clear();
  for (const std::string& violation : device->Violations()) *text += violation + "\n";
  return text->c_str();
}

__attribute__((visibility("default"))) uint64_t offloadd_standin_bytes_to_device() {
  return device->counters().bytes_to_device;
}

__attribute__((visibility("default"))) uint64_t offloadd_standin_allocated_bytes() {
  const auto memory = *device->MemGetInfo();
  return memory.total_bytes - memory.free_bytes;
}

// It has no more than this from now on; a model that needs more gets "the stand-in has … B free".
__attribute__((visibility("default"))) void offloadd_standin_set_memory_bytes(uint64_t bytes) {
  device->SetMemoryBytes(bytes);
}

}  // extern "C"
