#include "zero3/torch/gradient.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "kernels/update.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Transfers of one gradient in flight.
constexpr size_t kTransfersInFlight = 32;

class AccumulationHook : public torch::autograd::FunctionPostHook {
 public:
  explicit AccumulationHook(Gradient* gradient) : gradient_(gradient) { gradient_->Reference(); }
  ~AccumulationHook() override { gradient_->Unreference(); }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    gradient_->AfterAccumulation();
    return outputs;
  }

 private:
  Gradient* const gradient_;
};

// Reads a number out of a Scalar or a 0-dim tensor; nothing for what mul_ would treat otherwise.
std::optional<float> Factor(const c10::IValue& value) {
  if (value.isDouble() || value.isInt()) return static_cast<float>(value.toScalar().toDouble());
  if (!value.isTensor()) return std::nullopt;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.dim() != 0 || !tensor.device().is_cpu() ||
      tensor.requires_grad() || Record::Of(tensor) != nullptr) {
    return std::nullopt;
  }
  const at::ScalarType type = tensor.scalar_type();
  if (!c10::isFloatingType(type) && !c10::isIntegralType(type, /*includeBool=*/false))
    return std::nullopt;
  return static_cast<float>(tensor.item().toDouble());
}

}  // namespace

// ---- The window --------------------------------------------------------------------------------

uint64_t GradientWindow::Take(Gradient* gradient, uint64_t size_bytes,
                              std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const auto fits = std::find_if(free_.begin(), free_.end(),
                                   [&](const auto& range) { return range.second >= size_bytes; });
    if (fits != free_.end()) {
      const auto [offset, range_bytes] = *fits;
      free_.erase(fits);
      if (range_bytes > size_bytes) free_[offset + size_bytes] = range_bytes - size_bytes;
      users_.push_back(gradient);
      return offset;
    }
    const auto idle = std::find_if(users_.begin(), users_.end(),
                                   [](const Gradient* user) { return user->pins_ == 0; });
    if (idle != users_.end()) {
      (*idle)->Evict();
      continue;
    }
    const bool all_own = std::all_of(users_.begin(), users_.end(),
                                     [](const Gradient* user) { return Pins::CountOwn(user) > 0; });
    if (all_own) {
      ThrowStatus(MakeError(
          ErrorId::kWindowExhausted,
          absl::StrCat(
              "one operation uses more spilled gradients at once than their window holds, ",
              FormatBytes(size_bytes), " more are needed")));
    }
    unpinned_.wait(lock);
  }
}

void GradientWindow::Leave(Gradient* gradient, uint64_t offset, uint64_t size_bytes) {
  users_.erase(std::find(users_.begin(), users_.end(), gradient));
  const auto after = free_.upper_bound(offset);
  if (after != free_.end() && offset + size_bytes == after->first) {
    size_bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.upper_bound(offset);
  if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
    std::prev(next)->second += size_bytes;
  } else {
    free_[offset] = size_bytes;
  }
}

// ---- The gradient ------------------------------------------------------------------------------

Gradient::Gradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
                   uint32_t tensor, const at::Tensor& parameter)
    : Record(attachment->tensor(tensor).name,
             absl::StrCat("the gradient of parameter '", attachment->tensor(tensor).name, "'"),
             parameter.numel() * parameter.element_size(),
             attachment->homes().Take(parameter.numel() * parameter.element_size())),
      attachment_(std::move(attachment)),
      window_(std::move(window)),
      tensor_id_(tensor),
      parameter_(parameter) {
  const proto::GradientPlacement& placement = attachment_->plan().memory.gradients[tensor];
  if (placement.home == proto::GradientHome::kRegion) place_ = placement.offset_bytes;
  tensor_ = MakeManagedTensor(MakeStorage(), parameter_.sizes(), parameter_.scalar_type());
}

void Gradient::Watch() {
  accumulation_ = torch::autograd::impl::grad_accumulator(parameter_);
  accumulation_->add_post_hook(std::make_unique<AccumulationHook>(this));
}

at::Tensor Gradient::Plain() const {
  return at::from_blob(bytes(), parameter_.sizes(),
                       at::TensorOptions().dtype(parameter_.scalar_type()));
}

void Gradient::CheckOpen() const {
  if (closed_) ThrowStatus(SessionEnded(subject_));
}

void Gradient::WaitForUpdate() {
  if (!updating_) return;
  client::Session& session = attachment_->session();
  if (session.State(tensor_id_) == proto::kPending) {
    ValueOrThrow(session.Acquire(tensor_id_), subject_);
    session.Release(tensor_id_);
  }
  updating_ = false;
}

void Gradient::Load(Access access, Lock& lock) {
  if (place_.has_value()) return;
  place_ = window_->Take(this, proto::PaddedBytes(size_bytes_), lock);
  if (zero_ || access == Access::kOverwrite || !on_drive_) return;
  try {
    MoveScratch(/*write=*/false);
  } catch (...) {
    window_->Leave(this, *place_, proto::PaddedBytes(size_bytes_));
    place_.reset();
    throw;
  }
}

void Gradient::Settle(Access access) {
  const bool overwrite = access == Access::kOverwrite;
  if (zero_ && !overwrite) std::memset(bytes(), 0, size_bytes_);
  if (!zero_ && scale_ != 1.0f && !overwrite) Plain().mul_(at::scalar_tensor(scale_));
  if (zero_ || scale_ != 1.0f || access != Access::kRead) Changed();
  zero_ = false;
  scale_ = 1.0f;
}

void Gradient::Changed() {
  dirty_ = spilled();
  norms_.clear();
  finite_.reset();
}

void Gradient::ShowBytes() {
  if (pins_ > 0) {
    PointTo(bytes(), /*throws=*/false);
  } else if (spilled()) {
    PointHome();
  } else {
    PointTo(bytes(), /*throws=*/busy());
  }
}

void Gradient::Pin(Access access) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  const c10::AutoGradMode no_grad(false);
  Lock lock(mutex());
  CheckOpen();
  const bool unsettled = zero_ || scale_ != 1.0f;
  if (access != Access::kRead || unsettled) {
    WaitForUpdate();
    FinishWritingLocked();
  }
  Load(access, lock);
  Settle(access);
  ++pins_;
  ShowBytes();
}

void Gradient::Unpin() {
  Lock lock(mutex());
  --pins_;
  ShowBytes();
  if (spilled() && pins_ == 0) window_->NotifyUnpinned();
}

// ---- What needs no kernel ----------------------------------------------------------------------

bool Gradient::Serve(Special special, torch::jit::Stack* stack) {
  if (special == Special::kNorm) {
    const double p = torch::jit::peek(*stack, 1, 2).toScalar().toDouble();
    at::Tensor norm = Norm(p);
    torch::jit::drop(*stack, 2);
    torch::jit::push(*stack, std::move(norm));
    return true;
  }
  const at::Tensor self = torch::jit::peek(*stack, 0, special == Special::kZero ? 1 : 2).toTensor();
  if (special == Special::kZero) {
    Lock lock(mutex());
    CheckOpen();
    if (pins_ > 0) return false;
    zero_ = true;
    scale_ = 1.0f;
    norms_.clear();
    finite_ = true;
    ShowBytes();
    torch::jit::drop(*stack, 1);
  } else {
    const std::optional<float> factor = Factor(torch::jit::peek(*stack, 1, 2));
    if (!factor.has_value()) return false;
    Lock lock(mutex());
    CheckOpen();
    if (pins_ > 0 || updating_ || zero_ || scale_ != 1.0f) return false;
    NoteFinite();
    scale_ = *factor;
    if (scale_ != 1.0f) norms_.clear();
    if (!(std::fabs(scale_) <= 1.0f)) finite_.reset();
    ShowBytes();
    torch::jit::drop(*stack, 2);
  }
  self.unsafeGetTensorImpl()->bump_version();
  torch::jit::push(*stack, self);
  return true;
}

at::Tensor Gradient::Norm(double p) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    CheckOpen();
    if (!zero_ && scale_ == 1.0f) {
      for (const auto& [known_p, norm] : norms_) {
        if (known_p == p) return norm.clone();
      }
    }
  }
  Pins pins;
  pins.Add(this, Access::kRead);
  at::Tensor norm = Plain().norm(p);
  {
    Lock lock(mutex());
    norms_.emplace_back(p, norm.clone());
  }
  pins.Finish();
  return norm;
}

// ---- Accumulation ------------------------------------------------------------------------------

void Gradient::AfterAccumulation() {
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    if (closed_) return;
  }
  at::Tensor& grad = parameter_.mutable_grad();
  // A gradient that is itself differentiable stays as it is; the step takes its value.
  if (!grad.defined() || grad.requires_grad()) return;
  if (!grad.is_same(tensor_)) AdoptStolen(grad);
  if (!spilled()) return;
  Norm(2.0);  // while the bytes are here: neither clipping nor the finite check reads them again
  IsFinite();
  Lock lock(mutex());
  StartWriting();
}

void Gradient::CheckFits(const at::Tensor& value) const {
  if (value.sizes() == parameter_.sizes() && value.layout() == at::kStrided &&
      value.scalar_type() == parameter_.scalar_type()) {
    return;
  }
  ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                        absl::StrCat(subject_, " is sparse or of another shape or type")));
}

void Gradient::AdoptStolen(const at::Tensor& stolen) {
  CheckFits(stolen);
  LeaveTensorToOthers();
  {
    const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
    Pins pins;
    pins.Add(this, Access::kOverwrite);
    Plain().copy_(stolen);
    pins.Finish();
  }
  parameter_.mutable_grad() = tensor_;  // drops the stolen buffer
}

// Somebody kept the gradient of the last step: in plain torch its buffer is then theirs. They get a
// copy to keep, and the accumulator a new storage.
void Gradient::LeaveTensorToOthers() {
  const c10::Storage& storage = tensor_.unsafeGetTensorImpl()->unsafe_storage();
  if (tensor_.use_count() == 1 && storage.use_count() == 1) return;
  Pins pins;
  pins.Add(this, Access::kRead);
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(size_bytes_);
  std::memcpy(copy.get(), bytes(), size_bytes_);
  pins.Finish();
  {
    Lock lock(mutex());
    HandOver(std::move(copy));
  }
  tensor_ = MakeManagedTensor(MakeStorage(), parameter_.sizes(), parameter_.scalar_type());
}

// ---- The step ----------------------------------------------------------------------------------

bool Gradient::PrepareStep() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) return false;
  if (!grad.is_same(tensor_)) AdoptStolen(grad.detach());
  bool settle = false;
  {
    Lock lock(mutex());
    CheckOpen();
    settle = zero_ || !(std::fabs(scale_) <= 1.0f);
  }
  if (settle) {
    Pins pins;
    pins.Add(this, Access::kRead);
    pins.Finish();
  }
  if (!IsFinite())
    ThrowStatus(
        MakeError(ErrorId::kNonFinite,
                  absl::StrCat(subject_, " holds NaN or infinity, the step was not taken")));
  Lock lock(mutex());
  WaitForUpdate();
  StartWriting();
  return true;
}

// A finite norm has finite parts; one that is not may just have overflowed.
void Gradient::NoteFinite() {
  for (const auto& [p, norm] : norms_) {
    if (!finite_.has_value() && p >= 1 && std::isfinite(norm.item().toDouble())) finite_ = true;
  }
}

bool Gradient::IsFinite() {
  {
    Lock lock(mutex());
    NoteFinite();
    if (finite_.has_value()) return *finite_;
  }
  Pins pins;
  pins.Add(this, Access::kRead);
  const kernels::Dtype dtype =
      parameter_.scalar_type() == at::kFloat ? kernels::Dtype::kFloat32 : kernels::Dtype::kBFloat16;
  const bool finite = kernels::AllFinite(dtype, bytes(), parameter_.numel());
  {
    Lock lock(mutex());
    finite_ = finite;
  }
  pins.Finish();
  return finite;
}

void Gradient::BeginUpdate() {
  Lock lock(mutex());
  updating_ = true;
  ShowBytes();
}

void Gradient::FinishWriting() {
  Lock lock(mutex());
  FinishWritingLocked();
}

// ---- The scratch file --------------------------------------------------------------------------

// In the daemon's extents, which the update reads one by one. Writes stay in flight when they are
// few.
void Gradient::MoveScratch(bool write) {
  client::Session& session = attachment_->session();
  const uint64_t scratch = attachment_->plan().memory.gradients[tensor_id_].offset_bytes;
  const uint64_t extent_bytes = uint64_t{proto::kExtentElements} * parameter_.element_size();
  const uint64_t size_bytes = proto::PaddedBytes(size_bytes_);
  for (uint64_t begin = 0; begin < size_bytes; begin += extent_bytes) {
    if (writes_.size() == kTransfersInFlight) FinishWritingLocked();
    const uint64_t length = std::min(extent_bytes, size_bytes - begin);
    writes_.push_back(write ? session.ScratchWrite(scratch + begin, length, *place_ + begin)
                            : session.ScratchRead(scratch + begin, length, *place_ + begin));
  }
  if (!write) FinishWritingLocked();
}

void Gradient::StartWriting() {
  if (!dirty_) return;
  MoveScratch(/*write=*/true);
  dirty_ = false;
  on_drive_ = true;
}

void Gradient::FinishWritingLocked() {
  absl::Status failure;
  for (const client::Ticket ticket : writes_) failure.Update(attachment_->session().Wait(ticket));
  writes_.clear();
  ThrowIfError(failure, subject_);
}

void Gradient::Evict() {
  if (!zero_) StartWriting();
  FinishWritingLocked();
  window_->Leave(this, *place_, proto::PaddedBytes(size_bytes_));
  place_.reset();
}

void Gradient::Close() {
  const auto storage = LockStorage();
  {
    Lock lock(mutex());
    closed_ = true;
    for (const client::Ticket ticket : writes_) attachment_->session().Wait(ticket).IgnoreError();
    writes_.clear();
    if (storage) SetMessage(std::string(SessionEnded(subject_).message()));
    if (storage) PointHome();
  }
  if (parameter_.mutable_grad().is_same(tensor_)) parameter_.mutable_grad().reset();
  // The hook of the node holds a reference to this.
  accumulation_.reset();
  tensor_.reset();
  parameter_.reset();
}

}  // namespace offload::zero3
