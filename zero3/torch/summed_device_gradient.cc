#include "zero3/torch/summed_device_gradient.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "zero3/torch/devices.h"
#include "zero3/torch/exchanged_parts.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

SummedDeviceGradient::SummedDeviceGradient(std::shared_ptr<Attachment> attachment,
                                           std::shared_ptr<GradientWindow> window,
                                           std::shared_ptr<GradientSums> sums, uint32_t tensor,
                                           const at::Tensor& parameter)
    : SummedGradient(std::move(attachment), std::move(window), std::move(sums), tensor, parameter),
      device_(parameter.device()) {}

// ---- Accumulation ------------------------------------------------------------------------------

// The copy is behind the stream that has written it. Beside `.grad` only the hook's arguments have
// the memory, or somebody might write it before it is copied.
void SummedDeviceGradient::Deliver(const at::Tensor& grad) {
  const bool is_alone =
      grad.use_count() == 1 && grad.unsafeGetTensorImpl()->unsafe_storage().use_count() <= 2;
  at::Tensor part = InOrderOf(parameter_, grad);
  if (!is_alone && part.is_same(grad)) part = grad.clone(at::MemoryFormat::Preserve);
  ExchangedParts& parts = attachment_->device()->parts();
  parts.Give(tensor_id_, static_cast<const std::byte*>(part.const_data_ptr()),
             std::make_shared<const at::Tensor>(part));
  const absl::Status delivered =
      sums_->stream().Deliver(tensor_id_, start_, /*bytes=*/nullptr);  // the channel finds them
  parts.Forget(tensor_id_);
  ThrowIfError(delivered, subject_);
}

// ---- Pins --------------------------------------------------------------------------------------

// The bytes are torch's own memory, which it may give to others as soon as the stream that made it
// is done with it.
void SummedDeviceGradient::Pin(Access access) {
  SummedGradient::Pin(access);
  const c10::Stream stream = CurrentTorchStream(device_);
  Lock lock(mutex());
  if (made_on_ != stream) on_device_.record_stream(stream);
}

void SummedDeviceGradient::ShowBytes() {
  if (pins_ == 0) return swap_.PointHome();
  swap_.PointTo(static_cast<std::byte*>(const_cast<void*>(on_device_.const_data_ptr())),
                /*throws=*/false);
}

const std::byte* SummedDeviceGradient::HostBytes() const {
  return own_.has_value() ? attachment_->region() + *own_ : SumBytes();
}

// Without the lock.
at::Tensor SummedDeviceGradient::Fetch(bool with_value) const {
  at::Tensor fetched =
      at::empty_strided(parameter_.sizes(), strides_,
                        at::TensorOptions().dtype(parameter_.scalar_type()).device(device_));
  if (!with_value) return fetched;
  if (zero_) return fetched.zero_();
  CopyToDevice(static_cast<std::byte*>(fetched.mutable_data_ptr()), HostBytes(), size_bytes_,
               device_);
  attachment_->device()->CountFetched(size_bytes_);
  return scale_ == 1 ? fetched : fetched.mul_(ScaleTensor());
}

void SummedDeviceGradient::Bring(Access access, Lock& lock) {
  ThrowIfLost();
  const bool writes = access != Access::kRead;
  if (writes) WaitForOtherUses(lock);
  if (writes && own_.has_value()) WaitForUpdate(lock);
  // Reads of the operation that writes have the value already, and go on with it.
  const bool goes_on = on_device_.defined() && access == Access::kWrite;
  if (uses_ == 0) took_piece_ = writes && !own_.has_value();
  const bool fetches_value = !goes_on && access != Access::kOverwrite;
  if (fetches_value && !zero_ && !own_.has_value()) LoadSum(lock);
  Alone(lock, [&] {
    at::Tensor made = goes_on ? on_device_.clone() : Fetch(fetches_value);
    // What is remembered is done for every stream, as in plain torch, long ago.
    if (zero_ || scale_ != 1) SynchronizeCurrentStream(device_);
    if (writes && !own_.has_value())
      own_ = ValueOrThrow(sums_->stream().ring().Take(size_bytes_), subject_);
    if (on_device_.defined()) replaced_.push_back(on_device_);
    on_device_ = std::move(made);
    made_on_ = CurrentTorchStream(device_);
  });
  if (!writes) return;
  is_newer_ = true;
  zero_ = false;
  scale_ = 1;
  norms_.clear();
  finite_.reset();
  if (pins_ > 0) ShowBytes();
}

void SummedDeviceGradient::DropOverwritten() {
  SummedGradient::DropOverwritten();
  is_newer_ = false;
}

// A failure of the device is met again by who comes next.
void SummedDeviceGradient::Rest() {
  if (std::exchange(is_newer_, false)) {
    try {
      CopyToHost(attachment_->region() + *own_,
                 static_cast<const std::byte*>(on_device_.const_data_ptr()), size_bytes_, device_);
    } catch (...) {
      lost_ = std::current_exception();
    }
  }
  on_device_.reset();
  replaced_.clear();
}

void SummedDeviceGradient::ThrowIfLost() {
  if (lost_) std::rethrow_exception(lost_);
}

bool SummedDeviceGradient::Serve(Special special, torch::jit::Stack* stack) {
  if (special != Special::kRecordStream) return SummedGradient::Serve(special, stack);
  const c10::Stream stream = torch::jit::peek(*stack, 1, 2).toStream();
  {
    Lock lock(mutex());
    if (on_device_.defined()) on_device_.record_stream(stream);
  }
  torch::jit::drop(*stack, 2);
  return true;
}

c10::DataPtr SummedDeviceGradient::CopyBytes() { return TakeBytes(on_device_.clone()); }

// ---- The step ----------------------------------------------------------------------------------

bool SummedDeviceGradient::PrepareStep() {
  const bool has_gradient = SummedGradient::PrepareStep();
  const Lock lock(mutex());
  ThrowIfLost();
  return has_gradient;
}

void SummedDeviceGradient::FinishWriting() {
  ThrowIfError(attachment_->device()->parts().Flush(), subject_);
}

// Of what the trainer has written; the daemon looks at sums itself.
bool SummedDeviceGradient::IsFinite() {
  ThrowIfLost();
  return AreFinite(HostBytes());
}

}  // namespace offload::zero3
