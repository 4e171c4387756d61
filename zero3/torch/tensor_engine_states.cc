#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/dimension_order.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/log.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/parameter_text.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// What the optimizer keeps.

void TensorEngine::BeginWith(std::vector<KeptState> states) {
  if (states.empty()) return;
  RequireAttached();
  CheckStates(states);
  if (exists_) {
    Log().info(
        "job {} exists, at step {}: it keeps its optimizer's state, that of the attached "
        "optimizer is not taken",
        options_.job, step_);
    return;
  }
  if (attached_.sealed) return ReplaceState(states);
  CheckCounts(states);
  const std::vector<at::Tensor> frozen = FrozenWithState(states);
  if (!frozen.empty()) CheckThaws();
  for (const at::Tensor& parameter : frozen) declared_[IdOf(parameter)].trainable = true;
  std::move(states.begin(), states.end(), std::back_inserter(initial_states_));
}

// They may be thawed, and go on with it then.
std::vector<at::Tensor> TensorEngine::FrozenWithState(std::span<const KeptState> states) const {
  std::vector<at::Tensor> frozen;
  for (const KeptState& state : states) {
    const bool needs_room =
        state.parameter.numel() > 0 && (state.update_count > 0 || state.parameter.requires_grad());
    if (needs_room && !declared_[IdOf(state.parameter)].trainable)
      frozen.push_back(state.parameter);
  }
  return frozen;
}

void TensorEngine::PutInitialStates() {
  const std::vector<KeptState> states = std::exchange(initial_states_, {});
  if (attachment_->rank() == 0) PutStates(states);
  CountAs(states);
}

void TensorEngine::ReplaceState(std::span<const KeptState> states) {
  CheckStates(states);
  Seal();
  CheckCounts(states);
  attachment_->EndRaw();
  if (const std::vector<at::Tensor> frozen = FrozenWithState(states); !frozen.empty()) Thaw(frozen);
  if (attachment_->world_size() == 1) {
    SettleGiven(/*writes=*/false);  // masters are weights, too
    PutStates(states);
    RefreshGiven();
  } else {
    Exchange("");  // nobody steps or reads any more
    std::string failure;
    try {
      if (attachment_->rank() == 0) PutStates(states);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    failure = Exchange(std::move(failure)).front();
    DropFromDevice();
    if (!failure.empty()) ThrowStatus(absl::AbortedError(failure));
  }
  CountAs(states);
  has_unsettled_states_ = true;
}

std::vector<KeptState> TensorEngine::GatherUnsettled() {
  std::vector<KeptState> states;
  if (!has_unsettled_states_) return states;
  const uint64_t state_bytes = plan().state_bytes;
  if (!MayHold(state_bytes)) {
    ThrowStatus(MakeError(
        ErrorId::kBadValue,
        absl::StrCat("a frozen parameter has a gradient after the optimizer's state was loaded or "
                     "cleared, without a step between them, and weights and state are ",
                     FormatDecimalBytes(state_bytes), ", more than a quarter of ram (",
                     FormatBytes(ram_bytes_), "), to be kept while the store is laid out anew"),
        "Call requires_grad_(true) before the optimizer is attached or loaded, or take a step "
        "between"));
  }
  const ProcessMemory::Use use(process_memory_, /*inside_passes=*/false);
  for (const Gradient* const gradient : gradients_) {
    if (gradient == nullptr) continue;
    KeptState& state = states.emplace_back(GatherState(gradient->parameter()));
    if (state.parameter.scalar_type() != MasterType(state.parameter))
      state.master = Gather(state.parameter, "master");
  }
  return states;
}

void TensorEngine::CheckStates(std::span<const KeptState> states) const {
  for (const KeptState& state : states) {
    if (state.parameter.numel() == 0) continue;
    ThrowIfError(CheckFits(state, declared_[IdOf(state.parameter)].name));
  }
}

// An average has as many weights in it as there were updates.
void TensorEngine::CheckCounts(std::span<const KeptState> states) const {
  for (const KeptState& state : states) {
    if (!averaging_.is_on() || state.parameter.numel() == 0) continue;
    const uint64_t here = update_count(state.parameter);
    if (state.update_count == here) continue;
    ThrowStatus(AverageHasMovedOtherwise(averaging_, Quoted(declared_[IdOf(state.parameter)].name),
                                         state.update_count, here));
  }
}

void TensorEngine::PutStates(std::span<const KeptState> states) {
  const absl::Cleanup drop = [this] { DropFromDevice(); };
  for (const KeptState& state : states) {
    if (state.parameter.numel() == 0) continue;
    const uint32_t id = IdOf(state.parameter);
    ThrowIfError(PutState(id, state), absl::StrCat("parameter '", declared_[id].name, "'"));
    if (state.master.defined()) weights_[id]->Stepped();
  }
}

// Those that the job does not keep (of a frozen tensor all) are of no use to any step of it.
absl::Status TensorEngine::PutState(uint32_t id, const KeptState& state) {
  const at::NoGradGuard no_grad;
  const proto::PlaneSet& planes = attachment_->input().catalogue.planes(id);
  const at::ScalarType master = MasterType(state.parameter);
  for (size_t i = 0; i < state.planes.size(); ++i) {
    const proto::Plane plane = proto::kStatePlanes[i];
    if (!planes.Has(plane)) continue;
    const at::Tensor& given = state.planes[i];
    OFFLOAD_RETURN_IF_ERROR(PutValues(
        id, plane, given.defined() ? InOrderOf(state.parameter, given.to(master)) : given));
  }
  if (!state.master.defined()) return absl::OkStatus();
  if (planes.Has(proto::Plane::kResidual))
    return PutValues(id, proto::Plane::kMaster,
                     InOrderOf(state.parameter, state.master.to(master)));
  return PutValues(id, proto::Plane::kWeight,
                   InOrderOf(state.parameter, state.master.to(state.parameter.scalar_type())));
}

// Values in the order of memory; zeros where there are none.
absl::Status TensorEngine::PutValues(uint32_t id, proto::Plane plane, const at::Tensor& given) {
  const at::Tensor values = given.defined() ? given.cpu() : given;
  const uint64_t element_bytes = attachment_->input().catalogue.planes(id).Bits(plane) / 8;
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* to) {
    if (values.defined()) {
      const auto* const from = static_cast<const std::byte*>(values.const_data_ptr());
      std::memcpy(to, from + begin * element_bytes, count * element_bytes);
    } else {
      std::memset(to, 0, count * element_bytes);
    }
    return absl::OkStatus();
  };
  return attachment_->StreamIn(id, plane, fill, /*digest=*/0);
}

void TensorEngine::CountAs(std::span<const KeptState> states) {
  for (const KeptState& state : states) {
    if (state.parameter.numel() == 0) continue;
    const uint32_t id = IdOf(state.parameter);
    if (declared_[id].trainable) state_.update_counts[id] = state.update_count;
  }
}

uint64_t TensorEngine::CountSuccessions() {
  if (!exists_ && !state_.successions.has_value()) state_.successions = 0;
  return state_.successions.value_or(0);
}

bool TensorEngine::Succeed() {
  ++successions_;
  if (!state_.successions.has_value() || successions_ <= *state_.successions) return false;
  state_.successions = successions_;
  return true;
}

bool TensorEngine::keeps_state() const {
  return !initial_states_.empty() ||
         std::any_of(state_.update_counts.begin(), state_.update_counts.end(),
                     [](uint64_t count) { return count > 0; });
}

KeptState TensorEngine::GatherState(const at::Tensor& parameter) {
  KeptState state{.parameter = parameter, .update_count = update_count(parameter)};
  for (size_t i = 0; i < state.planes.size(); ++i) {
    const kernels::StatePlane* const plane = optimizer_.Plane(i);
    if (plane != nullptr) state.planes[i] = Gather(parameter, plane->name);
  }
  return state;
}

}  // namespace offload::zero3
