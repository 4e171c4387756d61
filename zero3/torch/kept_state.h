// zero3/torch/kept_state.h
//
// What an optimizer keeps of its parameters, on its way between memory and whatever holds it: a
// torch::optim object, a job, the trainer in memory.
//
// Thread safety: as torch::optim::Optimizer: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/optimizer.h"

namespace offload::zero3 {

// Of one parameter. Tensors have its shape and any floating type; those that were given are shared
// until they have been taken, and are not written.
struct KeptState {
  at::Tensor parameter;
  uint64_t update_count = 0;  // 0: the next update is its first
  // By number of the plane in the optimizer's row. Undefined: zeros.
  std::array<at::Tensor, kernels::kStatePlanesMax> planes;
  // The value of the parameter, which becomes its cast to the nearest. Undefined: the
  // parameter stays as it is.
  at::Tensor master;
};

// OFD-1002 when a tensor has another shape than the parameter, is not dense or no floating type.
// `name`: of the parameter, for the text; may be empty.
absl::Status CheckFits(const KeptState& state, std::string_view name);

struct ShownState;  // torch_state.h

// An optimizer whose state is not in an object of torch's.
class StateKeeper {
 public:
  virtual ~StateKeeper() = default;
  // What a new job begins with; one that exists has its own, and keeps it. Parameters that are not
  // named begin with nothing. OFD-1002 for what does not fit the parameters.
  virtual void BeginWith(std::vector<KeptState> states) = 0;
  // Replaces what is kept of these parameters, and leaves the others'. In a job it is durable with
  // the next step, and dropped when the job ends before. OFD-1002 as above; nothing has changed
  // then.
  virtual void ReplaceState(std::span<const KeptState> states) = 0;
  // Whether what is kept goes to memory with the weights when the engine is closed.
  virtual bool IsLeft() const = 0;
  // Copies, of every parameter that was updated. OFD-1604 where they are too large for memory.
  virtual std::vector<KeptState> GatherState() const = 0;
  // What the optimizer's own state() shows.
  virtual ShownState& shown_state() = 0;
};

}  // namespace offload::zero3
