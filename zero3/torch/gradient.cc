#include "zero3/torch/gradient.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "kernels/update.h"
#include "zero3/torch/accumulation_locks.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Transfers of one gradient in flight.
constexpr size_t kTransfersInFlight = 32;

// Of the window of spilled gradients, for those that are read ahead of their use.
constexpr uint64_t kPartForAwaited = 2;

constexpr c10::DispatchKeySet kModeKeys{c10::DispatchKey::Python,
                                        c10::DispatchKey::PythonTLSSnapshot};

// Whether torch's number of threads is settled on this thread, for all that we know: the step asks
// for it (TensorEngine::Step). Who has asked otherwise is not seen.
thread_local bool threads_are_settled = false;

// As to.copy_(from). In memory a gradient that is kept is not copied: while nothing is settled the
// parts are too small to ask for the number, which would change the bits of products that follow.
void CopyWithoutSettling(const at::Tensor& to, const at::Tensor& from) {
  if (threads_are_settled || to.numel() < at::internal::GRAIN_SIZE ||
      from.layout() != at::kStrided) {
    to.copy_(from);
    return;
  }
  const at::IntArrayRef sizes = to.sizes();
  const int64_t longest = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const int64_t size = sizes[longest], half = size / 2;
  CopyWithoutSettling(to.narrow(longest, 0, half), from.narrow(longest, 0, half));
  CopyWithoutSettling(to.narrow(longest, half, size - half),
                      from.narrow(longest, half, size - half));
}

std::shared_ptr<Gradient> Referenced(Gradient* gradient) {
  gradient->Reference();
  return {gradient, [](Gradient* of) { of->Unreference(); }};
}

// torch does not hold the lock of the accumulation while it calls the hooks, and says that they
// have to look after themselves. A node has one of these, which follows the gradients of its
// parameter: nobody may add a hook to a node whose hooks a backward of another thread calls.
class AccumulationHook : public torch::autograd::FunctionPostHook {
 public:
  // Belongs to the node.
  AccumulationHook(torch::autograd::Node& node, Gradient* gradient)
      : mutex_(AccumulationMutex(node)), gradient_(Referenced(gradient)) {}
  // Of a node, where it has one.
  static AccumulationHook* Of(torch::autograd::Node& node) {
    for (const auto& hook : node.post_hooks()) {
      if (auto* const own = dynamic_cast<AccumulationHook*>(hook.get())) return own;
    }
    return nullptr;
  }
  // While nobody accumulates.
  void Follow(Gradient* gradient) { gradient_ = Referenced(gradient); }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    std::shared_ptr<Gradient> announces;
    {
      std::lock_guard lock(mutex_);
      gradient_->AfterAccumulation(inputs.front());
      if (gradient_->IsInPlace()) announces = gradient_;
    }
    if (announces != nullptr) announces->Announce();
    return outputs;
  }

 private:
  std::mutex& mutex_;
  std::shared_ptr<Gradient> gradient_;  // mutex_ held
};

float InType(at::ScalarType type, double value) {
  const auto single = static_cast<float>(value);
  if (type == at::kBFloat16) return c10::BFloat16(single);
  return type == at::kHalf ? static_cast<float>(c10::Half(single)) : single;
}

// Reads a number out of a Scalar or a 0-dim tensor; nothing for what mul_ would treat otherwise. On
// the host a Scalar takes the type of the tensor that it multiplies, before it does. On CUDA all
// numbers of the host are fp32, and those of the device take the type.
std::optional<double> Factor(const c10::IValue& value, const at::Tensor& of) {
  const at::ScalarType multiplied = of.scalar_type();
  const bool is_double = multiplied == at::kDouble;
  if (value.isDouble() || value.isInt()) {
    const double factor = value.toScalar().toDouble();
    if (is_double) return factor;
    return of.is_cuda() ? static_cast<float>(factor) : InType(multiplied, factor);
  }
  if (!value.isTensor()) return std::nullopt;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.dim() != 0 ||
      !(tensor.device().is_cpu() || tensor.device() == of.device()) || tensor.requires_grad() ||
      Residency::Of(tensor) != nullptr) {
    return std::nullopt;
  }
  const at::ScalarType type = tensor.scalar_type();
  if (!c10::isFloatingType(type) && !c10::isIntegralType(type, /*includeBool=*/false))
    return std::nullopt;
  const double factor = tensor.item().toDouble();
  if (is_double) return factor;
  return tensor.is_cuda() ? InType(multiplied, factor) : static_cast<float>(factor);
}

// is_alias_of() looks at the bytes, too, and those of an offloaded tensor may be nowhere.
bool HaveOneStorage(const at::Tensor& a, const at::Tensor& b) {
  return a.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
         b.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

// ---- The window --------------------------------------------------------------------------------

GradientWindow::GradientWindow(uint64_t offset, uint64_t size_bytes)
    : size_bytes_(size_bytes), free_(proto::kSectorBytes) {
  free_.Add(offset, size_bytes);
}

uint64_t GradientWindow::Take(Gradient* gradient, uint64_t size_bytes,
                              std::unique_lock<std::mutex>& lock) {
  for (;;) {
    if (const std::optional<uint64_t> offset = free_.Take(size_bytes)) {
      users_.push_back(gradient);
      changed_.NotifyAll();  // who waits waits for one more
      return *offset;
    }
    auto idle = std::find_if(users_.begin(), users_.end(), [](const Gradient* user) {
      return user->IsIdle() && !user->is_awaited_;
    });
    if (idle == users_.end())
      idle = std::find_if(users_.begin(), users_.end(), std::mem_fn(&Gradient::IsIdle));
    if (idle != users_.end()) {
      (*idle)->Evict(lock);
      continue;
    }
    std::vector<WaitGraph::Thread> holders;
    bool device_holds = false;
    for (const Gradient* user : users_) {
      if (user->moving_) {
        holders.push_back(user->mover_);
      } else {
        holders.insert(holders.end(), user->holders_.begin(), user->holders_.end());
        device_holds |= user->uses_ > user->pins_ + user->raw_pins_;
      }
    }
    if (device_holds) {
      changed_.WaitForOthers(lock);
    } else if (!changed_.Wait(lock, WaitGraph::Needs::kAnyHolder, holders)) {
      ThrowStatus(MakeError(
          ErrorId::kWindowExhausted,
          absl::StrCat(
              "one operation uses more spilled gradients at once than their window holds, ",
              FormatBytes(size_bytes), " more are needed")));
    }
  }
}

bool GradientWindow::MayAwait(uint64_t size_bytes) const {
  uint64_t awaited_bytes = size_bytes;
  for (const Gradient* user : users_) awaited_bytes += user->is_awaited_ ? user->size_bytes_ : 0;
  return awaited_bytes <= size_bytes_ / kPartForAwaited;
}

std::optional<uint64_t> GradientWindow::TryTake(Gradient* gradient, uint64_t size_bytes,
                                                std::unique_lock<std::mutex>& lock) {
  while (MayAwait(size_bytes)) {
    if (const std::optional<uint64_t> offset = free_.Take(size_bytes)) {
      users_.push_back(gradient);
      changed_.NotifyAll();
      return offset;
    }
    const auto still = std::find_if(users_.begin(), users_.end(), std::mem_fn(&Gradient::CanLeave));
    if (still == users_.end()) break;
    (*still)->Evict(lock);
  }
  return std::nullopt;
}

void GradientWindow::Leave(Gradient* gradient, uint64_t offset, uint64_t size_bytes) {
  users_.erase(std::find(users_.begin(), users_.end(), gradient));
  free_.Return(offset, size_bytes);
  changed_.NotifyAll();
}

void GradientWindow::WriteDue(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const auto due = std::find_if(users_.begin(), users_.end(), [](const Gradient* user) {
      return user->uses_ == 0 && !user->moving_ && user->IsDue();
    });
    if (due == users_.end()) return;
    (*due)->StartWriting(lock);
  }
}

// ---- The gradient ------------------------------------------------------------------------------

Gradient::Gradient(std::shared_ptr<Attachment> attachment, std::shared_ptr<GradientWindow> window,
                   uint32_t tensor, const at::Tensor& parameter)
    : Residency(attachment->tensor(tensor).name,
                absl::StrCat("the gradient of parameter '", attachment->tensor(tensor).name, "'"),
                parameter.device(), parameter.numel() * parameter.element_size(),
                attachment->homes().Take(parameter.numel() * parameter.element_size())),
      attachment_(std::move(attachment)),
      window_(std::move(window)),
      tensor_id_(tensor),
      strides_(parameter.strides().vec()),
      maker_(std::this_thread::get_id()),
      parameter_(parameter),
      raw_(swap_.home(), size_bytes_) {
  const proto::GradientPlacement& placement = attachment_->plan().memory.gradients[tensor];
  if (placement.home == proto::GradientHome::kRegion) region_offset_ = placement.offset_bytes;
  tensor_ = MakeManagedTensor(swap_.MakeStorage(ReleasedText()), parameter_);
  if (!attachment_->serves_raw() || !parameter.device().is_cpu()) return;
  swap_.SetHomeThrows(false);
  AddRawRange(swap_.home(), size_bytes_, this);
}

Gradient::~Gradient() {
  attachment_->ForgetRaw(this);
  RemoveRawRange(swap_.home());
  if (raw_.is_shown()) raw_.Remove();
}

void Gradient::RefuseRaw() {
  RemoveRawRange(swap_.home());
  swap_.SetHomeThrows(true);
}

// ---- Raw pointers ------------------------------------------------------------------------------

void Gradient::ServeRaw(bool writes) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    do {
      WaitWhileMoving(lock);
      WaitWhileRawMoves(lock);
    } while (moving_);
    CheckOpen();
    if (raw_.is_shown()) {
      if (writes && !raw_.was_written()) raw_.AllowWriting();
      return;
    }
    moves_raw_ = true;  // none of another thread may come and go between the copy and its place
    raw_mover_ = std::this_thread::get_id();
  }
  std::byte* fresh = nullptr;
  std::exception_ptr failure;
  try {
    Pins pins;
    pins.Add(this, Access::kRead);
    fresh = raw_.Allocate();
    std::memcpy(fresh, bytes(), size_bytes_);
    pins.Finish();
  } catch (...) {
    failure = std::current_exception();
  }
  {
    Lock lock(mutex());
    if (!failure) raw_.Show(fresh, writes);
    if (failure && fresh != nullptr) raw_.Discard(fresh);
    moves_raw_ = false;
    changed().NotifyAll();
  }
  if (failure) std::rethrow_exception(failure);
  attachment_->BeginRaw(this);
}

bool Gradient::EndRaw(bool wait) {
  {
    Lock lock(mutex());
    if (!raw_.is_shown()) return true;
    if (!wait && (uses_ > 0 || moving_)) return false;
  }
  FinishRaw();
  return true;
}

void Gradient::FinishRaw() {
  {
    Lock lock(mutex());
    WaitWhileRawMoves(lock);
    if (!raw_.is_shown() || moves_raw_) return;
    if (!raw_.was_written()) return raw_.Remove();
    moves_raw_ = true;
    raw_mover_ = std::this_thread::get_id();
    raw_.StopWriting();
  }
  std::exception_ptr failure;
  try {
    const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
    Pins pins;
    pins.Add(this, Access::kOverwrite);
    std::memcpy(bytes(), swap_.home(), size_bytes_);
    pins.Finish();
  } catch (...) {
    failure = std::current_exception();
  }
  Lock lock(mutex());
  failure ? raw_.AllowWriting() : raw_.Remove();
  moves_raw_ = false;
  changed().NotifyAll();
  if (failure) std::rethrow_exception(failure);
}

void Gradient::WaitWhileRawMoves(Lock& lock) {
  while (moves_raw_ && raw_mover_ != std::this_thread::get_id()) {
    const WaitGraph::Thread mover = raw_mover_;
    if (changed().Wait(lock, WaitGraph::Needs::kAllHolders, {&mover, 1})) continue;
    ThrowStatus(MakeError(
        ErrorId::kWindowExhausted,
        absl::StrCat(subject_, " is used by a thread that waits for a gradient of this one"),
        "Let one thread at a time use gradients through pointers"));
  }
}

void Gradient::Watch() {
  // The node is of the stream that is current now. torch warns of it where a trainer has others,
  // which in memory would have made it in its first forward.
  if (!parameter_.is_cpu()) at::globalContext().setWarnOnAccumulateGradStreamMismatch(false);
  accumulation_ = torch::autograd::impl::grad_accumulator(parameter_);
  if (AccumulationHook* const hook = AccumulationHook::Of(*accumulation_)) {
    hook->Follow(this);
  } else {
    accumulation_->add_post_hook(std::make_unique<AccumulationHook>(*accumulation_, this));
  }
}

std::mutex& Gradient::accumulation_mutex() const { return AccumulationMutex(*accumulation_); }

at::Tensor Gradient::ScaleTensor() const {
  return at::scalar_tensor(scale_, at::TensorOptions(MasterType(parameter_)));
}

at::Tensor Gradient::Plain() const {
  return at::from_blob(bytes(), parameter_.sizes(), parameter_.strides(),
                       at::TensorOptions().dtype(parameter_.scalar_type()));
}

void Gradient::CheckOpen() const {
  if (closed_) ThrowStatus(attachment_->Ended(subject_));
}

Gradient::Moving::Moving(Gradient& gradient) : gradient_(gradient), outer_(gradient.moving_) {
  gradient_.moving_ = true;
  gradient_.mover_ = std::this_thread::get_id();
}

Gradient::Moving::~Moving() {
  gradient_.moving_ = outer_;
  if (!outer_) gradient_.changed().NotifyAll();
}

void Gradient::WaitWhileMoving(Lock& lock) {
  while (moving_) {
    const WaitGraph::Thread mover = mover_;
    if (changed().Wait(lock, WaitGraph::Needs::kAllHolders, {&mover, 1})) continue;
    ThrowStatus(MakeError(
        ErrorId::kWindowExhausted,
        absl::StrCat(subject_, " is used by an operation that waits for a gradient of this one"),
        "Let one thread at a time use several gradients in one operation"));
  }
}

void Gradient::Alone(Lock& lock, absl::FunctionRef<void()> work) {
  const Moving moving(*this);
  lock.unlock();
  try {
    work();
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
}

void Gradient::WaitForUpdate(Lock& lock) {
  if (!updating_) return;
  client::Session& session = attachment_->session();
  if (session.State(tensor_id_) == proto::kPending) {
    Alone(lock, [&] {
      const DaemonWait wait(*attachment_);
      ValueOrThrow(session.Acquire(tensor_id_), subject_);
      session.Release(tensor_id_);
    });
  }
  updating_ = false;
}

void Gradient::Load(Access access, Lock& lock) {
  is_awaited_ = false;
  FinishReading(lock);
  if (region_offset_.has_value()) return;
  const uint64_t region_offset = window_->Take(this, size_bytes_, lock);
  if (!zero_ && access != Access::kOverwrite && on_drive_) {
    try {
      Alone(lock, [&] { WaitFor(Transfer(/*write=*/false, region_offset)); });
    } catch (...) {
      window_->Leave(this, region_offset, size_bytes_);
      throw;
    }
  }
  region_offset_ = region_offset;
}

void Gradient::Settle(Access access, Lock& lock) {
  const bool overwrite = access == Access::kOverwrite;
  if (zero_ && !overwrite) Alone(lock, [&] { std::memset(bytes(), 0, size_bytes_); });
  if (!zero_ && scale_ != 1 && !overwrite) {
    Alone(lock, [&] { Plain().mul_(ScaleTensor()); });
  }
  if (zero_ || scale_ != 1 || access != Access::kRead) Changed();
  zero_ = false;
  scale_ = 1;
}

void Gradient::Changed() {
  dirty_ = spilled();
  norms_.clear();
  finite_.reset();
}

void Gradient::ShowBytes() {
  if (pins_ > 0) {
    swap_.PointTo(bytes(), /*throws=*/false);
  } else if (spilled()) {
    swap_.PointHome();
  } else {
    // A pointer that the trainer takes is good for ever only there, where it is served.
    busy() || attachment_->serves_raw() ? swap_.PointHome()
                                        : swap_.PointTo(bytes(), /*throws=*/false);
  }
}

void Gradient::Pin(Access access) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  const c10::AutoGradMode no_grad(false);
  FinishRaw();
  BeforePin();
  Lock lock(mutex());
  WaitWhileMoving(lock);
  CheckOpen();
  // A gradient in use is in memory, and its bytes are the value.
  if (uses_ == 0 || access != Access::kRead) {
    const Moving moving(*this);
    const Before before = {zero_, scale_, dirty_, region_offset_.has_value()};
    if (uses_ == 0) overwritten_.reset();
    Bring(access, lock);
    if (uses_ == 0 && access == Access::kOverwrite) overwritten_ = before;
  }
  ++uses_;
  if (IsMovingRaw()) {
    ++raw_pins_;
  } else if (++pins_ == 1) {
    ShowBytes();
  }
  holders_.push_back(std::this_thread::get_id());
}

void Gradient::Bring(Access access, Lock& lock) {
  const bool unsettled = zero_ || scale_ != 1;
  if (access != Access::kRead || unsettled) {
    WaitForUpdate(lock);
    FinishWriting(lock);
  }
  Load(access, lock);
  Settle(access, lock);
}

void Gradient::Unpin(Completion* done) {
  {
    Lock lock(mutex());
    std::swap(*std::find(holders_.begin(), holders_.end(), std::this_thread::get_id()),
              holders_.back());
    holders_.pop_back();
    if (IsMovingRaw()) {
      --raw_pins_;
    } else if (--pins_ == 0) {
      ShowBytes();
    }
    if (done == nullptr) return LetGo();
  }
  Reference();
  done->WhenDone([this] {
    {
      Lock lock(mutex());
      LetGo();
    }
    Unreference();
  });
}

void Gradient::Abandon() {
  Lock lock(mutex());
  if (!overwritten_.has_value() || uses_ > 1 || moving_ || closed_) return;
  DropOverwritten();
  zero_ = overwritten_->zero;
  scale_ = overwritten_->scale;
  dirty_ = overwritten_->dirty;
  norms_.clear();
  finite_.reset();
  overwritten_.reset();
}

void Gradient::DropOverwritten() {
  if (!spilled() || overwritten_->has_bytes || !region_offset_.has_value()) return;
  window_->Leave(this, *region_offset_, size_bytes_);
  region_offset_.reset();
}

void Gradient::LetGo() {
  if (--uses_ == 0) Rest();
  changed().NotifyAll();
}

// ---- What needs no kernel ----------------------------------------------------------------------

bool Gradient::Serve(Special special, torch::jit::Stack* stack) {
  if (special >= Special::kSet) return false;
  FinishRaw();
  if (special <= Special::kListNorm) return ServeNorm(special, stack);
  const at::Tensor self = torch::jit::peek(*stack, 0, special == Special::kZero ? 1 : 2).toTensor();
  if (special == Special::kZero) {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    if (uses_ > 0) return false;
    zero_ = true;
    scale_ = 1;
    norms_.clear();
    finite_ = true;
    ShowBytes();
    torch::jit::drop(*stack, 1);
  } else {
    const std::optional<double> factor = Factor(torch::jit::peek(*stack, 1, 2), parameter_);
    if (!factor.has_value()) return false;
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    if (uses_ > 0 || updating_ || zero_ || scale_ != 1) return false;
    NoteFinite();
    scale_ = *factor;
    if (scale_ != 1) norms_.clear();
    if (!(std::fabs(scale_) <= 1)) finite_.reset();
    ShowBytes();
    torch::jit::drop(*stack, 2);
  }
  self.unsafeGetTensorImpl()->bump_version();
  torch::jit::push(*stack, self);
  return true;
}

bool Gradient::ServeNorm(Special special, torch::jit::Stack* stack) {
  const bool is_of_list = special == Special::kListNorm;
  const size_t count = is_of_list ? 3 : special == Special::kVectorNorm ? 5 : 2;
  const c10::IValue& first = torch::jit::peek(*stack, 0, count);
  const at::Tensor viewed = is_of_list ? first.toTensorVector().front() : first.toTensor();
  if (special != Special::kNorm) {
    // On the host it is that of an operator which reads the bytes, on torch's threads.
    if (viewed.is_cpu() || viewed.requires_grad()) return false;
    if (!torch::jit::peek(*stack, count - 1, count).isNone()) return false;  // in another type
  }
  if (special == Special::kVectorNorm) {
    const c10::IValue& dimensions = torch::jit::peek(*stack, 2, count);
    if (!dimensions.isNone() && !dimensions.toIntVector().empty()) return false;
    if (torch::jit::peek(*stack, 3, count).toBool()) return false;  // of which dimensions are kept
  }
  // Of a view with other strides torch may add in another order.
  const bool is_row_by_row = attachment_->tensor(tensor_id_).dimension_order.empty();
  if (is_row_by_row ? !viewed.is_contiguous() : viewed.strides() != strides_) return false;
  const double p = torch::jit::peek(*stack, 1, count).toScalar().toDouble();
  at::Tensor norm = Norm(p, is_of_list ? NormKernel::kOfLists : NormKernel::kOfOne);
  torch::jit::drop(*stack, count);
  if (is_of_list) {
    torch::jit::push(*stack, c10::List<at::Tensor>({std::move(norm)}));
  } else {
    torch::jit::push(*stack, std::move(norm));
  }
  return true;
}

at::Tensor Gradient::Norm(double p, NormKernel kernel) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    if (!zero_ && scale_ == 1 && !raw_writable()) {
      for (const KnownNorm& known : norms_) {
        if (known.p != p || known.kernel != kernel) continue;
        // It may have been taken on another stream than this thread's, and its memory is that
        // one's.
        if (!known.norm.is_cpu()) known.norm.record_stream(CurrentTorchStream(known.norm.device()));
        return known.norm.clone();
      }
    }
  }
  Pins pins;
  pins.Add(this, Access::kRead);
  at::Tensor norm =
      kernel == NormKernel::kOfLists ? at::_foreach_norm(Plain(), p).front() : Plain().norm(p);
  if (!raw_writable()) {
    Lock lock(mutex());
    norms_.push_back({p, kernel, norm.clone()});
  }
  pins.Finish();
  return norm;
}

// ---- Accumulation ------------------------------------------------------------------------------

// Somebody else has it. Torch counts the Python object, too, which lives as long as the tensor.
static bool IsShared(const at::Tensor& tensor) {
  return !torch::autograd::impl::is_tensor_stealable(tensor);
}

void Gradient::AfterAccumulation(const at::Tensor& added) {
  const c10::AutoGradMode no_grad(false);
  {
    Lock lock(mutex());
    if (closed_) return;
  }
  at::Tensor& grad = parameter_.mutable_grad();
  // A gradient that is itself differentiable, or sparse, stays as it is; the step takes its value.
  if (!grad.defined() || grad.requires_grad() || grad.layout() != at::kStrided) return;
  if (!IsOwn(grad)) {
    // What torch has taken over as it came is of no use to anybody else.
    const bool is_taken = added.defined() && HaveOneStorage(grad, added) && !IsShared(grad);
    if (!is_taken && IsTrainers(grad)) return;
    AdoptStolen(grad);
  }
  if (spilled()) AfterPass();
}

void Gradient::AfterPass() {
  // While the bytes are here: neither clipping nor the finite check reads them again. A norm asks
  // for the number of threads, and in memory nobody has asked yet where nothing is settled.
  if (threads_are_settled || parameter_.numel() < at::internal::GRAIN_SIZE) {
    Norm(2.0);
    IsFinite();
  }
  Lock lock(mutex());
  if (!timing_.AddPass()) return;
  WaitWhileMoving(lock);
  StartWriting(lock);
}

bool Gradient::IsInPlace() {
  {
    Lock lock(mutex());
    if (closed_) return false;
  }
  const at::Tensor& grad = parameter_.grad();
  return !spilled() && grad.defined() && IsOwn(grad);
}

bool Gradient::IsOwn(const at::Tensor& grad) const {
  return grad.is_same(tensor_) && Of(grad) == this;
}

void Gradient::CheckFits(const at::Tensor& value) const {
  if (value.sizes() == parameter_.sizes() && value.layout() == at::kStrided &&
      value.scalar_type() == parameter_.scalar_type()) {
    return;
  }
  ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                        absl::StrCat(subject_, " is sparse or of another shape or type"),
                        "Give it the shape and type of its parameter"));
}

// Somebody has another reference to it or its memory, and would miss what is done to `.grad`; or
// its elements lie otherwise than the accumulator's, and torch would sum them in another order.
bool Gradient::IsTrainers(const at::Tensor& grad) const {
  return grad.layout() == at::kStrided &&
         (IsShared(grad) || grad.unsafeGetTensorImpl()->unsafe_storage().use_count() > 1 ||
          !HaveSameOrder(parameter_, grad));
}

void Gradient::AdoptStolen(const at::Tensor& stolen) {
  TakeValues(stolen);
  parameter_.mutable_grad() = tensor_;  // drops the stolen buffer
}

c10::DataPtr Gradient::CopyBytes() {
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(size_bytes_);
  std::memcpy(copy.get(), bytes(), size_bytes_);
  return copy;
}

void Gradient::TakeValues(const at::Tensor& values) {
  CheckFits(values);
  LeaveTensorToOthers();
  // Of an offloaded tensor, a weight or another's gradient, by way of its residency: read as plain
  // bytes it would be served as through a raw pointer, and the step would change it under that.
  // A dispatch mode of the program sees what it would see in plain torch, which only keeps them.
  const bool is_wrapper = values.key_set().has(c10::DispatchKey::Python);
  const c10::impl::ExcludeDispatchKeyGuard unseen(is_wrapper ? c10::DispatchKeySet() : kModeKeys);
  const at::Tensor plain_values = Residency::Of(values) != nullptr ? values.clone() : values;
  const c10::impl::ExcludeDispatchKeyGuard plain(kManagedKey);
  Pins pins;
  pins.Add(this, Access::kOverwrite);
  const bool is_on_host = parameter_.device().is_cpu() && plain_values.device().is_cpu();
  if (is_on_host && IsElsewhere() && HaveSameOrder(parameter_, plain_values) &&
      !plain_values.is_neg()) {
    std::memcpy(bytes(), plain_values.const_data_ptr(), size_bytes_);
  } else {
    CopyWithoutSettling(Plain(), plain_values);
  }
  pins.Finish();
}

// Somebody kept the gradient of the last step, or gave its tensor another storage: in plain torch
// its buffer is then theirs. They get a copy to keep, and the accumulator a new storage.
void Gradient::LeaveTensorToOthers() {
  const c10::Storage& storage = tensor_.unsafeGetTensorImpl()->unsafe_storage();
  if (IsOwn(tensor_) && !IsShared(tensor_) && storage.use_count() == 1) return;
  Pins pins;
  pins.Add(this, Access::kRead);
  c10::DataPtr copy = CopyBytes();
  pins.Finish();
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    swap_.HandOver(std::move(copy));
  }
  tensor_ = MakeManagedTensor(swap_.MakeStorage(ReleasedText()), parameter_);
}

void Gradient::LeaveInMemory() {
  const c10::AutoGradMode no_grad(false);
  FinishRaw();
  LeaveTensorToOthers();
  Close();
}

// ---- The step ----------------------------------------------------------------------------------

bool Gradient::PrepareStep() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) return false;
  FinishRaw();
  if (!IsOwn(grad)) {
    const bool stays = grad.is_sparse() || IsTrainers(grad);
    const at::Tensor values = grad.is_sparse() ? grad.detach().to_dense() : grad.detach();
    stays ? TakeValues(values) : AdoptStolen(values);
  }
  bool settle = false;
  {
    Lock lock(mutex());
    WaitWhileMoving(lock);
    CheckOpen();
    // All ranks have the same bytes, whether one has looked at them or not.
    const bool is_compared = scale_ != 1 && attachment_->input().gradients_reduced;
    settle = zero_ || is_compared || !(std::fabs(scale_) <= 1);
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
  WaitWhileMoving(lock);
  WaitForUpdate(lock);
  StartWriting(lock);
  if (parameter_.numel() >= at::internal::GRAIN_SIZE) threads_are_settled = true;
  return true;
}

// A finite norm has finite parts; one that is not may just have overflowed.
void Gradient::NoteFinite() {
  for (const KnownNorm& known : norms_) {
    if (!finite_.has_value() && known.p >= 1 && std::isfinite(known.norm.item().toDouble()))
      finite_ = true;
  }
}

// On torch's threads, as the update that it stands in for would have read them.
bool Gradient::AreFinite(const std::byte* values) const {
  constexpr int64_t kGrain = 1 << 16;
  const kernels::Dtype dtype = TrainedDtype(parameter_.scalar_type()).value();
  const uint64_t element_bytes = kernels::DtypeBytes(dtype);
  std::atomic<bool> finite = true;
  at::parallel_for(0, parameter_.numel(), kGrain, [&](int64_t begin, int64_t end) {
    if (!kernels::AllFinite(dtype, values + begin * element_bytes, end - begin))
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

bool Gradient::IsFinite() {
  {
    Lock lock(mutex());
    NoteFinite();
    if (finite_.has_value() && (zero_ || !raw_writable())) return *finite_;
  }
  Pins pins;
  pins.Add(this, Access::kRead);
  const bool finite = AreFinite(bytes());
  {
    Lock lock(mutex());
    finite_ = finite;
  }
  pins.Finish();
  return finite;
}

void Gradient::Describe(client::TensorUpdate& update) const {
  update.gradient_scale = scale_;
  if (attachment_->input().gradients_reduced)
    update.own_gradient_crc = Crc32c(0, bytes(), size_bytes_);
}

void Gradient::BeginUpdate() {
  Lock lock(mutex());
  WaitWhileMoving(lock);
  timing_.Stepped();
  updating_ = true;
  ShowBytes();
}

void Gradient::FinishWriting() {
  Lock lock(mutex());
  WaitWhileMoving(lock);
  FinishWriting(lock);
}

// ---- The scratch file --------------------------------------------------------------------------

uint64_t Gradient::extent_bytes() const {
  return uint64_t{proto::kExtentElements} * parameter_.element_size();
}

// In the daemon's extents, which the update reads one by one.
client::Ticket Gradient::StartTransfer(bool write, uint64_t begin, uint64_t region_offset) {
  client::Session& session = attachment_->session();
  const uint64_t scratch = attachment_->plan().memory.gradients[tensor_id_].offset_bytes;
  const uint64_t length = std::min(extent_bytes(), proto::PaddedBytes(size_bytes_) - begin);
  return write ? session.ScratchWrite(scratch + begin, length, region_offset + begin)
               : session.ScratchRead(scratch + begin, length, region_offset + begin);
}

std::vector<client::Ticket> Gradient::Transfer(bool write, uint64_t region_offset) {
  std::vector<client::Ticket> tickets;
  for (uint64_t begin = 0; begin < size_bytes_; begin += extent_bytes()) {
    if (tickets.size() == kTransfersInFlight) WaitFor(std::exchange(tickets, {}));
    tickets.push_back(StartTransfer(write, begin, region_offset));
  }
  return tickets;
}

void Gradient::WaitFor(std::vector<client::Ticket> tickets) {
  absl::Status failure;
  for (const client::Ticket ticket : tickets) failure.Update(attachment_->session().Wait(ticket));
  ThrowIfError(failure, subject_);
}

bool Gradient::StartReading(Lock& lock) {
  if (!is_coming_) {
    const std::optional<uint64_t> offset = window_->TryTake(this, size_bytes_, lock);
    if (!offset.has_value()) return false;
    // While the lock was let go somebody may have begun to use it.
    if (!IsIdle() || region_offset_.has_value() || closed_) {
      window_->Leave(this, *offset, size_bytes_);
      return true;
    }
    region_offset_ = offset;
    is_coming_ = is_awaited_ = true;
    read_bytes_ = 0;
  }
  const auto is_done = [&](client::Ticket ticket) { return attachment_->session().IsDone(ticket); };
  if (!std::ranges::all_of(reads_, is_done)) return read_bytes_ >= size_bytes_;
  try {
    Alone(lock, [&] {
      WaitFor(std::exchange(reads_, {}));
      for (; read_bytes_ < size_bytes_ && reads_.size() < kTransfersInFlight;
           read_bytes_ += extent_bytes())
        reads_.push_back(StartTransfer(/*write=*/false, read_bytes_, *region_offset_));
    });
  } catch (const std::exception&) {
    LeaveSlot();  // who uses the gradient reads it again, and meets what has failed
    return true;
  }
  return read_bytes_ >= size_bytes_;
}

bool Gradient::HasCome() const {
  const auto is_done = [&](client::Ticket ticket) { return attachment_->session().IsDone(ticket); };
  return read_bytes_ >= size_bytes_ && std::ranges::all_of(reads_, is_done);
}

void Gradient::FinishReading(Lock& lock) {
  if (!is_coming_) return;
  try {
    Alone(lock, [&] {
      WaitFor(std::exchange(reads_, {}));
      for (; read_bytes_ < size_bytes_; read_bytes_ += extent_bytes()) {
        if (reads_.size() == kTransfersInFlight) WaitFor(std::exchange(reads_, {}));
        reads_.push_back(StartTransfer(/*write=*/false, read_bytes_, *region_offset_));
      }
      WaitFor(std::exchange(reads_, {}));
    });
  } catch (...) {
    LeaveSlot();
    throw;
  }
  is_coming_ = false;
}

// The writes stay in flight.
void Gradient::StartWriting(Lock& lock) {
  if (!dirty_) return;
  Arrive(lock);
  FinishWriting(lock);
  std::vector<client::Ticket> writes;
  Alone(lock, [&] { writes = Transfer(/*write=*/true, *region_offset_); });
  writes_ = std::move(writes);
  dirty_ = false;
  on_drive_ = true;
}

void Gradient::FinishWriting(Lock& lock) {
  if (writes_.empty()) return;
  Alone(lock, [&] { WaitFor(std::exchange(writes_, {})); });
}

void Gradient::Evict(Lock& lock) {
  const Moving moving(*this);
  try {
    FinishReading(lock);
  } catch (const std::exception&) {
    return;  // the slot is gone, and who uses the gradient reads it again
  }
  Arrive(lock);
  if (!zero_) StartWriting(lock);
  FinishWriting(lock);
  timing_.Evicted();
  LeaveSlot();
}

void Gradient::LeaveSlot() {
  window_->Leave(this, *region_offset_, size_bytes_);
  region_offset_.reset();
  is_coming_ = is_awaited_ = false;
}

// At once: the scratch file has the value, and nobody is at work on the slot.
bool Gradient::CanLeave() const {
  const auto is_done = [&](client::Ticket ticket) { return attachment_->session().IsDone(ticket); };
  return IsIdle() && !dirty_ && !is_awaited_ && !is_coming_ && IsStill() &&
         std::ranges::all_of(writes_, is_done);
}

void Gradient::Close() {
  const auto storage = swap_.Lock();
  {
    Lock lock(mutex());
    while (moving_) changed().WaitForOthers(lock);
    closed_ = true;
    swap_.SetHomeThrows(true);
    for (std::vector<client::Ticket>* const tickets : {&writes_, &reads_}) {
      for (const client::Ticket ticket : *tickets)
        attachment_->session().Wait(ticket).IgnoreError();
      tickets->clear();
    }
    // Or the next one that needs room would write this one out, which is gone by then.
    if (spilled() && region_offset_.has_value() && uses_ == 0) LeaveSlot();
    if (storage) swap_.SetMessage(std::string(attachment_->Ended(subject_).message()));
    if (storage) swap_.PointHome();
  }
  if (parameter_.mutable_grad().is_same(tensor_)) parameter_.mutable_grad().reset();
  // The hook of the node holds a reference to this.
  accumulation_.reset();
  tensor_.reset();
  parameter_.reset();
}

}  // namespace offload::zero3
