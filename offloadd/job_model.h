// offloadd/job_model.h
//
// What a job must hold, computed the simple way: every tensor on plain arrays of its own, as one
// process would that has room for everything. The job's simulator is judged by it.
//
// Values are the kernels' (their tests compare them with torch's); everything else that a job does
// with them, where they stand, who adds what when, what is written and what is committed, is not
// known here.
//
// Thread safety: values, and pure functions over them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/optimizer.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "swap/store.h"

namespace offload::daemon {

using Bytes = std::vector<std::byte>;

// Of one tensor. Shared between states in which it is the same.
struct TensorValues {
  std::vector<float> masters;
  Bytes weights;                                                    // in the working dtype
  std::array<std::vector<float>, kernels::kStatePlanesMax> states;  // those that are kept
  uint64_t updates = 0;
};

// Of a job: what one commit holds.
struct JobState {
  uint64_t epoch = 0;
  std::string blob;  // the trainers' states
  std::vector<std::shared_ptr<const TensorValues>> tensors;
};

// Values of `dtype` that follow from `key`: most of them alike, so that they are quickly made and
// compared, and every 61st another, so that what stands in a wrong place is seen.
Bytes MakeValues(proto::Dtype dtype, uint64_t elements, uint64_t key);

// A tensor whose masters are `weights`, its states as in `before`, or zeros.
std::shared_ptr<const TensorValues> PutWeights(const proto::Catalogue& catalogue, uint32_t tensor,
                                               Bytes weights, const TensorValues* before);

// A bf16 tensor with other masters.
std::shared_ptr<const TensorValues> PutMasters(const TensorValues& before, const Bytes& masters);

// With other values in one of its states.
std::shared_ptr<const TensorValues> PutState(const TensorValues& before, size_t state,
                                             const Bytes& values);

// After one more update.
std::shared_ptr<const TensorValues> UpdateValues(const proto::Catalogue& catalogue, uint32_t tensor,
                                                 const TensorValues& before,
                                                 const kernels::OptimizerSpec& optimizer,
                                                 const Bytes& gradient, float gradient_scale);

// A gradient of one rank's backward pass.
struct GradientPart {
  uint64_t round = 0;
  uint32_t pass = 0, rank = 0;
  proto::GradientStart start = proto::GradientStart::kNothing;
  Bytes values;
};
// The chain of parts in the order of (round, pass, rank), each multiplied by `factor`; `previous`
// is the sum before, empty when there was none.
Bytes SumParts(proto::Dtype dtype, std::vector<const GradientPart*> parts, float factor,
               const Bytes& previous);

// The bytes of a plane of a tensor, masters included.
Bytes PlaneBytes(const proto::Catalogue& catalogue, uint32_t tensor, const TensorValues& values,
                 proto::Plane plane);

// What differs between the state and what a store holds; empty: nothing.
std::string CompareWithStore(const proto::Catalogue& catalogue, const JobState& state,
                             swap::Store& store);

}  // namespace offload::daemon
