// zero3/gpu/gpu_traffic.h
//
// What a step moves over the link between host and device, as planned: the window's rules
// (gpu_window.h) and those of gradients (zero3/torch/device_gradients.h) followed without any
// bytes, over the order in which steps use their tensors as far as a plan can know it: forwards go
// through the model as it is declared, backwards the other way.
//
// Of one rank. Not counted: what a trainer writes or looks at between two steps. Clipping by
// 2-norms moves nothing: they are taken where a pass leaves the gradients.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

struct LinkTraffic {
  uint64_t weight_bytes = 0;   // to the device
  uint64_t fetched_bytes = 0;  // to the device: of gradients that a further micro-batch is added to
  uint64_t gradient_bytes = 0;  // to the host
  // To the host, at a checkpoint alone: of what is updated on the device.
  uint64_t checkpoint_bytes = 0;

  uint64_t ToDeviceBytes() const { return weight_bytes + fetched_bytes; }
  uint64_t ToHostBytes() const { return gradient_bytes; }
  friend bool operator==(const LinkTraffic&, const LinkTraffic&) = default;
};

// Of a step of so many micro-batches, once steps repeat themselves. All that have gradients are
// updated by it. Tensors of the tier move at checkpoints only.
LinkTraffic PlanLinkTraffic(std::span<const GpuTensor> tensors, const GpuPlan& plan,
                            uint64_t micro_batches);

}  // namespace offload::zero3
