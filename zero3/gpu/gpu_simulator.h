// zero3/gpu/gpu_simulator.h
//
// The GPU window and the return of gradients under simulated training: a seed chooses a small
// model, gpu_ram, a slab that is smaller than the model, the device's pace and its troubles;
// everything that follows is a function of that seed. A run that fails is repeated by its number.
//
// What always holds
//   * The checker of the stand-in (accelerator/host_accelerator.h) has nothing to report.
//   * Every operator reads, when the device executes it, the weights of its step; every gradient
//     arrives once, whole, before the step.
//   * Device memory never exceeds gpu_ram and the gradient that an operator writes.
//   * Nothing is left over at the end, neither leases nor memory, events or streams, also when the
//     device breaks in the middle; then every call says OFD-2004.
//
// Mistakes are planted between the code under test and the device, so that the code has none of
// them: what has been planted must be reported, by every seed.
//
// Thread safety: runs are independent of each other.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace offload::zero3 {

enum class Mistake : uint8_t {
  kNone,
  kNoWait,               // operators do not wait for the copy of their weight
  kEarlyReuse,           // the copy stream does not wait for the last users of a place
  kEarlyLeaseReturn,     // leases go back before their copies are done
  kMissingRecordStream,  // the window is not told of a stream that uses a weight
  kEarlyGradientCopy,    // a gradient's copy does not wait for the stream that writes it
  kEarlyDelivery,        // gradients are delivered before their copies are done
};
inline constexpr std::array kMistakes = {Mistake::kNoWait,
                                         Mistake::kEarlyReuse,
                                         Mistake::kEarlyLeaseReturn,
                                         Mistake::kMissingRecordStream,
                                         Mistake::kEarlyGradientCopy,
                                         Mistake::kEarlyDelivery};
const char* MistakeName(Mistake mistake);

struct GpuSimulationOptions {
  uint64_t seed = 1;
  Mistake mistake = Mistake::kNone;
};

struct GpuSimulationResult {
  std::string violation;       // empty: everything held
  uint64_t wrong_weights = 0;  // operators that read other bytes than they should
  uint64_t wrong_gradients = 0;
  uint64_t trace_hash = 0;  // over what was done and what it cost
  // What was met, for sums over seeds.
  uint64_t steps = 0, operators = 0, misses = 0, prefetches = 0;
  uint64_t gradients = 0, side_streams = 0, refused_captures = 0;
  uint64_t staged_runs = 0, broken_devices = 0, host_waits = 0, source_waits = 0;

  void Add(const GpuSimulationResult& other);
};

GpuSimulationResult SimulateGpu(const GpuSimulationOptions& options);

}  // namespace offload::zero3
