#include "zero3/torch/summed_gradient.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

class BeforeAccumulationHook : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulationHook(SummedGradient* gradient) : gradient_(gradient) {
    gradient_->Reference();
  }
  ~BeforeAccumulationHook() override { gradient_->Unreference(); }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    gradient_->BeforeAccumulation();
    return grads;
  }

 private:
  SummedGradient* const gradient_;
};

[[noreturn]] void Refuse(const std::string& subject, std::string_view what, std::string_view way) {
  ThrowStatus(
      MakeError(ErrorId::kGradientOfRanks, absl::StrCat(subject, " ", std::string(what)), way));
}

std::string NoPointers(const std::string& subject) {
  return std::string(
      MakeError(ErrorId::kReleased,
                absl::StrCat(subject, " is the sum of several ranks, which has no pointer"),
                "Take a copy (grad.clone()), or reduce the gradients in the trainer and set "
                "options.gradients = \"reduced_by_trainer\"")
          .message());
}

}  // namespace

SummedGradient::SummedGradient(std::shared_ptr<Attachment> attachment,
                               std::shared_ptr<GradientWindow> window,
                               std::shared_ptr<GradientSums> sums, uint32_t tensor,
                               const at::Tensor& parameter)
    : Gradient(std::move(attachment), std::move(window), tensor, parameter),
      sums_(std::move(sums)) {
  RefuseRaw();
  swap_.SetMessage(NoPointers(subject_));
  sums_->Add(tensor, this);
}

void SummedGradient::Watch() {
  Gradient::Watch();
  accumulation_->add_pre_hook(std::make_unique<BeforeAccumulationHook>(this));
}

// ---- Accumulation ------------------------------------------------------------------------------

void SummedGradient::BeforeAccumulation() {
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    if (closed_) return;
  }
  sums_->EnterBackward();
  std::lock_guard accumulation(accumulation_mutex());
  at::Tensor& grad = parameter_.mutable_grad();
  start_ = proto::GradientStart::kNothing;
  taken_away_ = grad.defined();
  if (!taken_away_) return;
  if (!IsOwn(grad)) {
    Refuse(subject_, "was assigned, and backward() would add to it",
           "Assign gradients after the last backward() of a step, or call zero_grad() before");
  }
  CheckAccumulates();
  start_ = zero_ ? proto::GradientStart::kZeros : proto::GradientStart::kPrevious;
  grad.reset();  // so that torch keeps its own buffer
}

void SummedGradient::CheckAccumulates() const {
  if (zero_ || (!own_.has_value() && scale_ == 1)) return;
  Refuse(subject_, "was written by the trainer, and backward() would add to it",
         "Write gradients after the last backward() of a step, and call zero_grad() before the "
         "next");
}

void SummedGradient::AfterAccumulation(const at::Tensor&) {
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    if (closed_) return;
  }
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) {  // nothing came
    if (taken_away_) grad = tensor_;
    return;
  }
  if (grad.requires_grad()) {
    Refuse(subject_, "is to be differentiated itself (backward with create_graph)",
           "Use autograd::grad for such terms of the loss, and backward() without create_graph");
  }
  const at::Tensor part = grad.is_sparse() ? grad.to_dense() : grad;
  CheckFits(part);
  Deliver(part);
  NoteExisting();
}

void SummedGradient::Deliver(const at::Tensor& grad) {
  const at::Tensor part = InOrderOf(parameter_, grad);
  ThrowIfError(sums_->stream().Deliver(tensor_id_, start_,
                                       static_cast<const std::byte*>(part.const_data_ptr())),
               subject_);
}

void SummedGradient::NoteExisting() {
  {
    Lock lock(mutex());
    given_ = true;
    zero_ = false;
    scale_ = 1;
    DropCopies();
  }
  at::Tensor& grad = parameter_.mutable_grad();
  if (!IsOwn(grad)) grad = tensor_;  // drops torch's buffer
}

bool SummedGradient::IsZeroed() {
  Lock lock(mutex());
  return given_ && (zero_ || !parameter_.grad().defined());
}

void SummedGradient::LetGoOfSum() {
  for (const auto& hook : accumulation_->post_hooks()) {
    if (dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) == nullptr)
      continue;
    Refuse(subject_, "is reduced by DistributedDataParallel, too",
           "Train the module itself (ddp.module): the ranks' gradients are added here. Or set "
           "gradients = reduced_by_trainer");
  }
  const bool goes_on = IsOwn(parameter_.grad());
  if (!goes_on) {
    LeaveTensorToOthers();
    swap_.SetMessage(NoPointers(subject_));
  }
  Lock lock(mutex());
  WaitWhileMoving(lock);
  if (!goes_on) zero_ = true;
  if (zero_) {
    scale_ = 1;
    DropOwn(lock);
  }
  if (!own_.has_value()) updating_ = false;  // the daemon keeps the order
  given_ = false;
  DropCopies();
}

void SummedGradient::DropOwn(Lock& lock) {
  if (!own_.has_value()) return;
  WaitForUpdate(lock);
  sums_->stream().ring().Return(*std::exchange(own_, std::nullopt), size_bytes_);
}

// What was made of the sum as it was.
void SummedGradient::DropCopies() {
  norms_.clear();
  finite_.reset();
  if (!spilled() || !region_offset_.has_value() || uses_ > 0) return;
  window_->Leave(this, *region_offset_, size_bytes_);
  region_offset_.reset();
}

// ---- Pins --------------------------------------------------------------------------------------

const std::byte* SummedGradient::SumBytes() const {
  return spilled() ? attachment_->region() + *region_offset_ : sums_->SumOf(tensor_id_);
}

std::byte* SummedGradient::bytes() const {
  if (settled_) return static_cast<std::byte*>(settled_.get());
  if (own_.has_value()) return attachment_->region() + *own_;
  return const_cast<std::byte*>(SumBytes());  // mapped read-only; torch wants it so
}

void SummedGradient::ShowBytes() {
  if (pins_ > 0) {
    swap_.PointTo(bytes(), /*throws=*/false);
  } else {
    swap_.PointHome();
  }
}

void SummedGradient::BeforePin() {
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    if (own_.has_value() || zero_) return;
  }
  ThrowIfError(sums_->stream().Look(tensor_id_).status(), subject_);
}

void SummedGradient::Bring(Access access, Lock& lock) {
  if (access == Access::kRead) {
    BringForReading(lock);
  } else {
    BringForWriting(access, lock);
  }
}

void SummedGradient::BringForReading(Lock& lock) {
  if (!zero_ && !own_.has_value()) LoadSum(lock);
  if (!zero_ && scale_ == 1) return;
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(size_bytes_);
  Alone(lock, [&] { CopyTo(static_cast<std::byte*>(copy.get())); });
  settled_ = std::move(copy);
}

void SummedGradient::BringForWriting(Access access, Lock& lock) {
  WaitForOtherUses(lock);
  const bool overwrites = access == Access::kOverwrite;
  const bool was_own = own_.has_value();
  if (was_own) WaitForUpdate(lock);
  if (!was_own && !zero_ && !overwrites) LoadSum(lock);
  const bool is_value = was_own && !zero_ && scale_ == 1;
  if (uses_ == 0) took_piece_ = !was_own;
  Alone(lock, [&] {
    const uint64_t piece =
        was_own ? *own_ : ValueOrThrow(sums_->stream().ring().Take(size_bytes_), subject_);
    if (!overwrites && !is_value) CopyTo(attachment_->region() + piece);
    own_ = piece;
  });
  replaced_ = std::move(settled_);  // this thread's reads may still use it
  zero_ = false;
  scale_ = 1;
  norms_.clear();
  finite_.reset();
  if (pins_ > 0) ShowBytes();
}

void SummedGradient::DropOverwritten() {
  if (took_piece_) sums_->stream().ring().Return(*std::exchange(own_, std::nullopt), size_bytes_);
}

// An operation that reads may call one that writes: its own uses may be there.
void SummedGradient::WaitForOtherUses(Lock& lock) {
  while (uses_ > Pins::CountOwn(this)) {
    std::vector<WaitGraph::Thread> others;
    std::copy_if(holders_.begin(), holders_.end(), std::back_inserter(others),
                 [](WaitGraph::Thread holder) { return holder != std::this_thread::get_id(); });
    if (others.empty()) {
      changed().WaitForOthers(lock);  // an accelerator
    } else if (!changed().Wait(lock, WaitGraph::Needs::kAllHolders, others)) {
      ThrowStatus(MakeError(
          ErrorId::kWindowExhausted,
          absl::StrCat(subject_, " is read by an operation that waits for one of this thread"),
          "Let one thread at a time write gradients"));
    }
  }
}

void SummedGradient::LoadSum(Lock& lock) {
  if (!spilled() || region_offset_.has_value()) return;
  on_drive_ = true;  // the daemon has written it
  Load(Access::kRead, lock);
}

// bytes() may be the target itself.
void SummedGradient::CopyTo(std::byte* target) const {
  if (zero_) {
    std::memset(target, 0, size_bytes_);
    return;
  }
  if (settled_) {
    std::memcpy(target, settled_.get(), size_bytes_);
    return;
  }
  if (target != bytes()) std::memcpy(target, bytes(), size_bytes_);
  if (scale_ == 1) return;
  at::from_blob(target, parameter_.sizes(), at::TensorOptions().dtype(parameter_.scalar_type()))
      .mul_(ScaleTensor());
}

void SummedGradient::Rest() {
  settled_.clear();
  replaced_.clear();
}

// ---- Norms -------------------------------------------------------------------------------------

// The word that ranks share has room for fp32: each takes the norm of an fp64 sum by itself.
bool SummedGradient::HasSharedNorm() const { return parameter_.scalar_type() != at::kDouble; }

at::Tensor SummedGradient::Norm(double p, NormKernel kernel) {
  const auto options =
      at::TensorOptions().dtype(parameter_.scalar_type()).device(parameter_.device());
  bool of_sum = false;
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    if (zero_ && p > 0) return at::zeros({}, options);
    of_sum = p == 2.0 && !zero_ && !own_.has_value() && scale_ == 1 && HasSharedNorm();
  }
  // Ranks share one norm of each tensor: those of another kernel each takes for itself.
  if (!of_sum || kernel != NormKernel::kOfOne) return Gradient::Norm(p, kernel);
  const float norm = ValueOrThrow(sums_->stream().Norm(tensor_id_), subject_);
  return at::scalar_tensor(norm, options);
}

std::optional<float> SummedGradient::NormOfSum() {
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    if (closed_ || zero_ || own_.has_value() || scale_ != 1 || !HasSharedNorm())
      return std::nullopt;
    if (!IsOwn(parameter_.grad())) return std::nullopt;
  }
  return Gradient::Norm(2.0).item().toFloat();
}

// ---- The step ----------------------------------------------------------------------------------

bool SummedGradient::PrepareStep() {
  const c10::AutoGradMode no_grad(false);
  if (parameter_.grad().defined() && !IsOwn(parameter_.grad()))
    AdoptStolen(parameter_.grad().detach());
  if (!given_ && !own_.has_value()) {  // other ranks may have made more passes
    ThrowIfError(sums_->stream().EnterStep());
    ThrowIfError(sums_->stream().Look(tensor_id_).status(), subject_);
    if (sums_->stream().Exists(tensor_id_)) NoteExisting();
  }
  if (!parameter_.grad().defined()) return false;
  if (zero_ || !(std::fabs(scale_) <= 1)) {
    Pins pins;
    pins.Add(this, Access::kWrite);
    pins.Finish();
  }
  if (own_.has_value() && !IsFinite()) {
    ThrowStatus(
        MakeError(ErrorId::kNonFinite,
                  absl::StrCat(subject_, " holds NaN or infinity, the step was not taken")));
  }
  return true;
}

void SummedGradient::Describe(client::TensorUpdate& update) const {
  Gradient::Describe(update);
  if (!own_.has_value()) return;
  update.own_gradient_offset = *own_;
  update.own_gradient_crc = Crc32c(0, attachment_->region() + *own_, size_bytes_);
}

void SummedGradient::BeginUpdate() {
  Gradient::BeginUpdate();
  Lock lock(mutex());
  given_ = false;
}

}  // namespace offload::zero3
