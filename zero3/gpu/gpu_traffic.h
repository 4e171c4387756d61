// zero3/gpu/gpu_traffic.h
//
// What a step moves over the link between host and device, as planned: the window's rules
// (gpu_window.h) and those of gradients (zero3/torch/device_gradients.h) followed without any
// bytes, over the order in which steps use their tensors as far as a plan can know it: forwards go
// through the model as it is declared, backwards the other way.
//
// Of one rank. Not counted: what a trainer writes or looks at between two steps, and gradients that
// were not kept and that clipping reads.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {

struct LinkTraffic {
  uint64_t weight_bytes = 0;   // to the device
  uint64_t fetched_bytes = 0;  // to the device: of gradients that a further micro-batch is added to
  uint64_t gradient_bytes = 0;  // to the host

  uint64_t ToDeviceBytes() const { return weight_bytes + fetched_bytes; }
  uint64_t ToHostBytes() const { return gradient_bytes; }
  friend bool operator==(const LinkTraffic&, const LinkTraffic&) = default;
};

// Of a step of so many micro-batches, once steps repeat themselves. All that have gradients are
// updated by it.
LinkTraffic PlanLinkTraffic(std::span<const GpuTensor> tensors, const GpuPlan& plan,
                            uint64_t micro_batches);

// The traffic of a step of one micro-batch as a line for people, and of each further one.
std::string DescribeLinkTraffic(std::span<const GpuTensor> tensors, const GpuPlan& plan);

}  // namespace offload::zero3
