#include "zero3/torch/device_gradient.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <utility>

#include "base/check.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Whether the program asks for 2-norms by these kernels.
std::array<std::atomic<bool>, 2> asks_for_norms{};

constexpr c10::DispatchKeySet kUnseenKeys{kManagedKey, c10::DispatchKey::Python,
                                          c10::DispatchKey::PythonTLSSnapshot};

}  // namespace

DeviceGradient::DeviceGradient(std::shared_ptr<Attachment> attachment,
                               std::shared_ptr<GradientWindow> window, uint32_t tensor,
                               const at::Tensor& parameter)
    : Gradient(std::move(attachment), std::move(window), tensor, parameter),
      device_(parameter.device()),
      stays_(attachment_->device()->Stays(tensor)) {
  if (GradientsAhead* const ahead = attachment_->device()->gradients_ahead())
    ahead->Join(tensor, this);
}

// Where the device is gone nobody asks any more.
DeviceGradient::~DeviceGradient() {
  DeviceMemory* const device = attachment_->device();
  if (device != nullptr && device->gradients_ahead() != nullptr)
    device->gradients_ahead()->Leave(tensor_id_, this);
}

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
  const Access needed = changes && access == Access::kRead ? Access::kWrite : access;
  if (spilled()) {
    BringSpilled(needed, changes, lock);
  } else {
    Alone(lock, [&] {
      UseThere(needed);
      MakeThere(needed);
    });
  }
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

void DeviceGradient::DropOverwritten() {
  Gradient::DropOverwritten();
  is_newer_ = false;
  if (!was_there_) bytes_on_device().Drop(tensor_id_);
}

// A slot for what will be copied to the host, and for what is fetched.
void DeviceGradient::BringSpilled(Access access, bool changes, Lock& lock) {
  is_awaited_ = false;
  const bool had_slot = region_offset_.has_value();
  try {
    Alone(lock, [&] { UseThere(access); });
    if (changes || !on_device_.defined())
      TakeSlot(on_device_.defined() ? Access::kOverwrite : access, lock);
    Alone(lock, [&] { MakeThere(access); });
  } catch (...) {
    if (!had_slot && region_offset_.has_value()) {  // it need not have the value
      Alone(lock, [&] { bytes_on_device().WaitFor(tensor_id_).IgnoreError(); });
      window_->Leave(this, *region_offset_, size_bytes_);
      region_offset_.reset();
    }
    if (uses_ == 0) {
      bytes_on_device().Rest(tensor_id_);
      on_device_.reset();
    }
    throw;
  }
}

// With what the scratch file has, unless it is overwritten.
void DeviceGradient::TakeSlot(Access access, Lock& lock) {
  if (access != Access::kRead) Gradient::FinishWriting(lock);
  const bool has_slot = region_offset_.has_value() && !is_coming_;
  const bool reads =
      !region_offset_.has_value() && !zero_ && access != Access::kOverwrite && on_drive_;
  if (reads) bytes_on_device().CountRead(/*ahead=*/false);
  Load(access, lock);
  if (has_slot) return;
  attachment_->device()->accelerator().NoteHostUse(accelerator::Use::kWrite, bytes(), size_bytes_);
}

// ---- Bytes on the device; marked, without the lock ---------------------------------------------

void DeviceGradient::UseThere(Access access) {
  const bool is_used = on_device_.defined();
  on_device_ = ValueOrThrow(
      bytes_on_device().Use(tensor_id_, access != Access::kRead, CurrentStream(device_)), subject_);
  if (!is_used) was_there_ = on_device_.defined();
}

void DeviceGradient::MakeThere(Access access) {
  if (!on_device_.defined()) Fetch(access);
  if (access == Access::kOverwrite) return;
  if (zero_) {
    on_device_.zero_();
  } else if (scale_ != 1) {
    on_device_.mul_(ScaleTensor());
  }
}

at::Tensor DeviceGradient::Allocate() const {
  return at::empty_strided(parameter_.sizes(), strides_,
                           at::TensorOptions().dtype(parameter_.scalar_type()).device(device_));
}

void DeviceGradient::Fetch(Access access) {
  at::Tensor fetched = Allocate();
  DeviceGradients& gradients = bytes_on_device();
  if (access == Access::kOverwrite || zero_) {
    ThrowIfError(gradients.Give(tensor_id_, fetched), subject_);
  } else {
    OFFLOAD_CHECK(!stays_) << subject_;
    ThrowIfError(gradients.Fetch(tensor_id_, fetched, bytes(), CurrentStream(device_)), subject_);
  }
  made_on_ = CurrentTorchStream(device_);
  on_device_ = std::move(fetched);
}

// A failure of the device is met again by the step.
void DeviceGradient::Rest() {
  if (std::exchange(is_newer_, false) && !stays_) {
    bytes_on_device().Return(tensor_id_, bytes(), CurrentStream(device_)).IgnoreError();
    dirty_ = spilled();
  }
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

void DeviceGradient::AfterAccumulation(const at::Tensor& added) {
  Gradient::AfterAccumulation(added);
  {
    Lock lock(mutex());
    if (closed_) return;
    was_added_to_ = true;
  }
  GradientsAhead* const ahead = attachment_->device()->gradients_ahead();
  if (ahead == nullptr) return;  // all of them stay
  if (!spilled() && parameter_.grad().defined() && IsOwn(parameter_.grad())) {
    TakeIfAsked(NormKernel::kOfOne);
    TakeIfAsked(NormKernel::kOfLists);
  }
  ahead->Added(tensor_id_);
}

at::Tensor DeviceGradient::Norm(double p, NormKernel kernel) {
  if (p == 2.0) asks_for_norms[static_cast<size_t>(kernel)] = true;
  return Gradient::Norm(p, kernel);
}

void DeviceGradient::TakeIfAsked(NormKernel kernel) {
  if (asks_for_norms[static_cast<size_t>(kernel)]) Gradient::Norm(2.0, kernel);
}

void DeviceGradient::BeginUpdate() {
  Gradient::BeginUpdate();
  Lock lock(mutex());
  is_awaited_ = false;
  was_added_to_ = false;
}

// Neither the host nor the device has what the next pass is added to. mutex() held.
bool DeviceGradient::WaitsOnDrive() const {
  const bool has_value = was_added_to_ && !zero_ && on_drive_;
  return spilled() && has_value && (!region_offset_.has_value() || is_coming_) &&
         !bytes_on_device().Has(tensor_id_);
}

bool DeviceGradient::ReadAhead() {
  Lock lock(mutex());
  if (closed_ || moving_ || uses_ > 0 || !spilled()) return true;
  if (region_offset_.has_value() && !is_coming_) {
    is_awaited_ = is_awaited_ || (was_added_to_ && window_->MayAwait(size_bytes_));
    return true;
  }
  if (!WaitsOnDrive()) return true;
  const bool begins = !is_coming_;
  const bool is_begun = StartReading(lock);
  if (begins && is_coming_) {
    bytes_on_device().CountRead(/*ahead=*/true);
    attachment_->device()->accelerator().NoteHostUse(accelerator::Use::kWrite, bytes(),
                                                     size_bytes_);
  }
  return is_begun;
}

// A dispatch mode of the program sees nothing of it. What fails here is met by who uses the
// gradient.
bool DeviceGradient::ComeAhead() {
  if (spilled() && !ReadAhead()) return false;
  const c10::impl::ExcludeDispatchKeyGuard unseen(kUnseenKeys);
  const c10::AutoGradMode no_grad(false);
  const accelerator::Stream stream = CurrentStream(device_);
  Lock lock(mutex());
  const bool has_value = was_added_to_ && !zero_ && region_offset_.has_value();
  if (closed_ || moving_ || uses_ > 0 || !has_value || stays_) return true;
  try {
    if (is_coming_) {
      if (!HasCome()) return false;
      FinishReading(lock);
    }
    bool is_made = false;
    const auto allocate = [&] {
      is_made = true;
      return Allocate();
    };
    const absl::StatusOr<bool> comes =
        bytes_on_device().FetchAhead(tensor_id_, size_bytes_, allocate, bytes(), stream);
    if (is_made) made_on_ = CurrentTorchStream(device_);
    if (comes.value_or(false)) is_awaited_ = false;  // it is on the device now, and stays there
    return !comes.ok() || *comes;
  } catch (const std::exception&) {
    return true;
  }
}

// What torch has just put into `.grad` is nobody else's: beside it only the hook's arguments have
// the memory.
bool DeviceGradient::MayTake(const at::Tensor& stolen) const {
  const c10::Storage& storage = stolen.unsafeGetTensorImpl()->unsafe_storage();
  return stolen.is_same(parameter_.grad()) && stolen.use_count() == 1 && storage.use_count() <= 2 &&
         stolen.storage_offset() == 0 && storage.nbytes() == size_bytes_ &&
         stolen.strides() == at::IntArrayRef(strides_) && !stolen.is_neg();
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
    if (spilled()) TakeSlot(Access::kOverwrite, lock);
    Alone(lock, [&] {
      DeviceGradients& gradients = bytes_on_device();
      ThrowIfError(gradients.Give(tensor_id_, taken), subject_);
      if (!stays_)
        ThrowIfError(gradients.Return(tensor_id_, bytes(), CurrentStream(device_)), subject_);
      gradients.Rest(tensor_id_);
    });
    made_on_ = CurrentTorchStream(device_);
    dirty_ = spilled();
    zero_ = false;
    scale_ = 1;
    norms_.clear();
    finite_.reset();
    ShowBytes();
  }
  parameter_.mutable_grad() = tensor_;
}

c10::DataPtr DeviceGradient::CopyBytes() { return TakeBytes(on_device_.clone()); }

void DeviceGradient::GiveToUpdate(
    absl::FunctionRef<void(const at::Tensor& bytes, double scale)> update) {
  const accelerator::Stream stream = CurrentStream(device_);
  Lock lock(mutex());
  WaitWhileMoving(lock);
  OFFLOAD_CHECK(stays_ && !zero_) << subject_;
  const at::Tensor there =
      ValueOrThrow(bytes_on_device().Use(tensor_id_, /*writes=*/false, stream), subject_);
  OFFLOAD_CHECK(there.defined()) << subject_;
  const c10::Stream torch_stream = CurrentTorchStream(device_);
  if (made_on_ != torch_stream) there.record_stream(torch_stream);
  update(there, scale_);
  if (uses_ == 0) bytes_on_device().Rest(tensor_id_);
}

void DeviceGradient::FinishWriting() {
  if (spilled()) return Gradient::FinishWriting();
  ThrowIfError(bytes_on_device().Flush(), subject_);
  attachment_->device()->accelerator().NoteHostUse(accelerator::Use::kRead, bytes(), size_bytes_);
}

// ---- Spilled -----------------------------------------------------------------------------------

// The norm while the bytes are there; the host waits for no copy of the device.
void DeviceGradient::AfterPass() {
  Gradient::Norm(2.0);
  TakeIfAsked(NormKernel::kOfLists);
  ThrowIfError(bytes_on_device().Poll(), subject_);
  Lock lock(mutex());
  is_due_ = timing_.AddPass();
  window_->WriteDue(lock);
}

void DeviceGradient::Arrive(Lock& lock) {
  Alone(lock, [&] { ThrowIfError(bytes_on_device().WaitFor(tensor_id_), subject_); });
  attachment_->device()->accelerator().NoteHostUse(accelerator::Use::kRead, bytes(), size_bytes_);
}

bool DeviceGradient::IsDue() const {
  return is_due_ && dirty_ && bytes_on_device().HasArrived(tensor_id_);
}

bool DeviceGradient::IsStill() const { return bytes_on_device().IsStill(tensor_id_); }

bool DeviceGradient::IsFiniteThere() {
  {
    Lock lock(mutex());
    NoteFinite();
    if (finite_.has_value()) return *finite_;
  }
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  Pins pins;
  pins.Add(this, Access::kRead);
  const bool finite = Plain().isfinite().all().item().toBool();
  pins.Finish();
  Lock lock(mutex());
  finite_ = finite;
  return finite;
}

// ---- The step ----------------------------------------------------------------------------------

bool DeviceGradient::IsFinite() {
  if (spilled() || stays_) return IsFiniteThere();
  {
    Lock lock(mutex());
    if (finite_.has_value()) return *finite_;
  }
  FinishWriting();
  const bool finite = AreFinite(bytes());
  Lock lock(mutex());
  finite_ = finite;
  return finite;
}

}  // namespace offload::zero3
