#include "zero3/torch/device_gradient.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "kernels/update.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

c10::Stream CurrentTorchStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceGradient::DeviceGradient(std::shared_ptr<Attachment> attachment, uint32_t tensor,
                               const at::Tensor& parameter)
    : Gradient(std::move(attachment), /*window=*/nullptr, tensor, parameter),
      device_(parameter.device()) {}

// ---- Pins --------------------------------------------------------------------------------------

// The bytes are torch's own memory, which it may give to others as soon as the stream that made it
// is done with it.
void DeviceGradient::Pin(Access access) {
  Gradient::Pin(access);
  const c10::Stream stream = CurrentTorchStream(device_);
  Lock lock(mutex());
  if (made_on_ != stream) on_device_.record_stream(stream);
}

void DeviceGradient::ShowBytes() {
  if (pins_ == 0) return swap_.PointHome();
  swap_.PointTo(static_cast<std::byte*>(const_cast<void*>(on_device_.const_data_ptr())),
                /*throws=*/false);
}

void DeviceGradient::Bring(Access access, Lock& lock) {
  const bool changes = access != Access::kRead || zero_ || scale_ != 1;
  if (changes) WaitForUpdate(lock);
  Alone(lock, [&] { MakeThere(changes && access == Access::kRead ? Access::kWrite : access); });
  if (!changes) return;
  // What was remembered of a zero_() or mul_() is there for every stream, as in plain torch, where
  // it would have been done long ago.
  if (access == Access::kRead) SynchronizeCurrentStream(device_);
  is_newer_ = true;
  zero_ = false;
  scale_ = 1;
  norms_.clear();
  finite_.reset();
}

// Marked, without the lock.
void DeviceGradient::MakeThere(Access access) {
  at::Tensor found = ValueOrThrow(
      bytes_on_device().Use(tensor_id_, access != Access::kRead, CurrentStream(device_)), subject_);
  if (found.defined()) {
    on_device_ = std::move(found);
  } else {
    Fetch(access);
  }
  if (access == Access::kOverwrite) return;
  if (zero_) {
    on_device_.zero_();
  } else if (scale_ != 1) {
    on_device_.mul_(ScaleTensor());
  }
}

void DeviceGradient::Fetch(Access access) {
  at::Tensor fetched =
      at::empty_strided(parameter_.sizes(), strides_,
                        at::TensorOptions().dtype(parameter_.scalar_type()).device(device_));
  if (access != Access::kOverwrite && !zero_)
    CopyToDevice(static_cast<std::byte*>(fetched.mutable_data_ptr()), bytes(), size_bytes_,
                 device_);
  ThrowIfError(bytes_on_device().Give(tensor_id_, fetched), subject_);
  made_on_ = CurrentTorchStream(device_);
  on_device_ = std::move(fetched);
}

// A failure of the device is met again by the step.
void DeviceGradient::Rest() {
  if (std::exchange(is_newer_, false))
    bytes_on_device().Return(tensor_id_, bytes(), CurrentStream(device_)).IgnoreError();
  bytes_on_device().Rest(tensor_id_);
  on_device_.reset();
}

bool DeviceGradient::Serve(Special special, torch::jit::Stack* stack) {
  if (special != Special::kRecordStream) return Gradient::Serve(special, stack);
  const c10::Stream stream = torch::jit::peek(*stack, 1, 2).toStream();
  {
    Lock lock(mutex());
    if (on_device_.defined()) on_device_.record_stream(stream);
  }
  torch::jit::drop(*stack, 2);
  return true;
}

// ---- Accumulation and the step -----------------------------------------------------------------

// What torch has just put into `.grad` is nobody else's: beside it only the hook's arguments have
// the memory.
bool DeviceGradient::MayTake(const at::Tensor& stolen) const {
  const c10::Storage& storage = stolen.unsafeGetTensorImpl()->unsafe_storage();
  return stolen.is_same(parameter_.grad()) && stolen.use_count() == 1 && storage.use_count() <= 2 &&
         stolen.storage_offset() == 0 && storage.nbytes() == size_bytes_ &&
         stolen.strides() == at::IntArrayRef(strides_);
}

void DeviceGradient::AdoptStolen(const at::Tensor& stolen) {
  CheckFits(stolen);
  LeaveTensorToOthers();
  at::Tensor taken = stolen;
  if (!MayTake(stolen)) {
    taken = at::empty_strided(parameter_.sizes(), strides_, stolen.options());
    taken.copy_(stolen);
  }
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    const Moving moving(*this);
    WaitForUpdate(lock);
    Alone(lock, [&] {
      DeviceGradients& gradients = bytes_on_device();
      ThrowIfError(gradients.Give(tensor_id_, taken), subject_);
      ThrowIfError(gradients.Return(tensor_id_, bytes(), CurrentStream(device_)), subject_);
      gradients.Rest(tensor_id_);
    });
    made_on_ = CurrentTorchStream(device_);
    zero_ = false;
    scale_ = 1;
    norms_.clear();
    finite_.reset();
    ShowBytes();
  }
  parameter_.mutable_grad() = tensor_;
}

c10::DataPtr DeviceGradient::CopyBytes() { return TakeBytes(on_device_.clone()); }

void DeviceGradient::FinishWriting() {
  ThrowIfError(bytes_on_device().Flush(), subject_);
  attachment_->device()->accelerator().NoteHostUse(accelerator::Use::kRead, bytes(), size_bytes_);
}

bool DeviceGradient::IsFinite() {
  {
    Lock lock(mutex());
    if (finite_.has_value()) return *finite_;
  }
  FinishWriting();
  const kernels::Dtype dtype = TrainedDtype(parameter_.scalar_type()).value();
  const bool finite = kernels::AllFinite(dtype, bytes(), parameter_.numel());
  Lock lock(mutex());
  finite_ = finite;
  return finite;
}

}  // namespace offload::zero3
