#include "zero3/torch/weight_residency.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/bytes_digest.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/operator_gate.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

WeightResidency::WeightResidency(std::shared_ptr<Attachment> attachment, uint32_t tensor,
                                 const std::string& name, c10::Device device, size_t size_bytes,
                                 std::byte* home)
    : Residency(name, absl::StrCat("parameter '", name, "'"), device, size_bytes, home),
      attachment_(std::move(attachment)),
      tensor_(tensor),
      torch_device_(device),
      raw_(swap_.home(), size_bytes) {
  // An address of a device cannot be served by a fault.
  if (!attachment_->serves_raw() || !device.is_cpu()) return;
  swap_.SetHomeThrows(false);
  AddRawRange(swap_.home(), size_bytes, this);
}

WeightResidency::~WeightResidency() {
  attachment_->ForgetLate(this);
  attachment_->ForgetRaw(this);
  RemoveRawRange(swap_.home());
  if (raw_.is_shown()) raw_.Remove();
}

bool WeightResidency::closed() {
  Lock lock(mutex_);
  return closed_;
}

// ---- Before the store is sealed ----------------------------------------------------------------

void WeightResidency::Adopt(c10::StorageImpl* storage, c10::Storage values) {
  Lock lock(mutex_);
  initial_ = swap_.Manage(storage, ReleasedText());
  if (values) {
    initial_values_ = std::move(values);
    initial_born_ =
        dynamic_cast<BornResidency*>(Residency::Of(initial_values_.unsafeGetStorageImpl()));
    return;
  }
  StorageSwap* const before = StorageSwap::Named(initial_);
  if (before == nullptr) return;
  auto& owner = static_cast<Residency&>(before->owner());
  initial_born_ = dynamic_cast<BornResidency*>(&owner);
  owner.LeaveStorage();
}

c10::Storage WeightResidency::TakeValues() {
  Lock lock(mutex_);
  initial_born_ = nullptr;
  return std::exchange(initial_values_, {});
}

absl::Status WeightResidency::ReadInitial(uint64_t begin, uint64_t length, std::byte* target) {
  if (initial_born_ != nullptr)
    return initial_born_->ReadInto(begin, length, target - attachment_->region());
  const void* const all = initial_values_ ? initial_values_.data() : initial_.get();
  const std::byte* const bytes = static_cast<const std::byte*>(all) + begin;
  if (torch_device_.is_cpu() || initial_values_) {
    std::memcpy(target, bytes, length);
  } else {
    CopyToHost(target, bytes, length, torch_device_);
  }
  return absl::OkStatus();
}

void WeightResidency::Start(bool goes_on) {
  c10::DataPtr initial;  // freed without the lock: it may be another residency's last
  c10::Storage values;
  Lock lock(mutex_);
  state_ = State::kHome;
  has_residual_ = goes_on;
  version_then_ = Version();
  initial_born_ = nullptr;
  initial = std::exchange(initial_, c10::DataPtr());
  values = std::exchange(initial_values_, {});
  changed_.NotifyAll();
  lock.unlock();
}

// ---- Pins --------------------------------------------------------------------------------------

// kMoving is the state while one thread waits for the daemon without the lock; the others wait for
// it here.
void WeightResidency::Pin(Access access) {
  const bool writes = access > Access::kReadCopy;
  Lock lock(mutex_);
  for (;;) {
    if (closed_) ThrowStatus(attachment_->Ended(subject_));
    if (HasGivenSince(writes)) {
      TakeGiven(lock);
      continue;
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (raw_.is_shown() && state_ != State::kMoving) {
      const bool is_alone = attachment_->world_size() == 1 && given_ == nullptr;
      if (writes && !is_alone && Pins::CountOwn(this) == 0) {
        // Ranks write together, whichever of them has used a pointer. And who has the memory that
        // the parameter was given is to see what is written.
        lock.unlock();
        EndRaw(/*wait=*/true);
        lock.lock();
        continue;
      }
      if (PinRaw(access, lock)) return;
      continue;
    }
    if (state_ == State::kWritten && put_.empty() && access != Access::kReadCopy)
      return TakeBack(access);
    if (state_ == State::kWriting || (state_ == State::kReading && !writes)) {
      if (state_ == State::kReading && device() != nullptr) device()->Pin(tensor_);
      if (pins_ == 0) swap_.PointTo(bytes_, /*throws=*/false);
      AddPin(access);
      return;
    }
    // An operation that reads may call one that writes: then all uses are this thread's, and it may
    // swap under them.
    if (state_ == State::kHome || (state_ == State::kReading && Pins::CountOwn(this) == uses_))
      break;
    if (state_ == State::kInitial) {
      lock.unlock();
      attachment_->EnsureSealed();
      lock.lock();
    } else {
      WaitForOthers(lock);
    }
  }
  const State before = std::exchange(state_, State::kMoving);
  mover_ = std::this_thread::get_id();
  lock.unlock();
  std::byte* bytes = nullptr;
  try {
    if (before == State::kHome) attachment_->Touch(tensor_);
    bytes = writes                        ? FetchForWriting(access)
            : access == Access::kReadCopy ? CopyForHome()
                                          : FetchForReading();
  } catch (...) {
    lock.lock();
    state_ = before;
    changed_.NotifyAll();
    throw;
  }
  lock.lock();
  if (before == State::kReading) TakePinsBack();
  bytes_ = bytes;
  swap_.PointTo(TakeHome(access), /*throws=*/false);
  state_ = writes ? State::kWriting : State::kReading;
  is_overwritten_ = access == Access::kOverwrite;
  AddPin(access);
}

// What was written and is not put yet is used once more.
void WeightResidency::TakeBack(Access access) {
  ThrowIfError(attachment_->session().health(), subject_);
  attachment_->ForgetLate(this);
  is_late_ = false;
  attachment_->Touch(tensor_);
  staging_.SetHolder(std::this_thread::get_id());
  state_ = State::kWriting;
  is_overwritten_ = false;
  swap_.PointTo(TakeHome(access == Access::kOverwrite ? access : Access::kWrite), /*throws=*/false);
  AddPin(access);
}

// The copy never had the weight's bytes.
void WeightResidency::Abandon() {
  Lock lock(mutex_);
  is_abandoned_ = state_ == State::kWriting && is_overwritten_ && uses_ == 1;
}

void WeightResidency::AddPin(Access access) {
  ++pins_;
  ++uses_;
  gives_back_ |= access > Access::kReadCopy && taker_ != std::this_thread::get_id();
  is_compared_ |= access == Access::kWrite && attachment_->world_size() > 1 && !WritesAlike();
  holders_.push_back(std::this_thread::get_id());
  changed_.NotifyAll();
}

void WeightResidency::WaitForOthers(Lock& lock) {
  const bool is_taken = taker_ != WaitGraph::Thread() && taker_ != std::this_thread::get_id();
  if (state_ == State::kWritten && !is_taken) return EndPut(lock);
  absl::InlinedVector<WaitGraph::Thread, 4> others;
  if (is_taken) {
    others.push_back(taker_);
  } else if (state_ == State::kMoving) {
    others.push_back(mover_);
  } else if (uses_ > pins_) {
    return changed_.WaitForOthers(lock);  // an accelerator comes to its end by itself
  } else {
    std::copy_if(holders_.begin(), holders_.end(), std::back_inserter(others),
                 [](WaitGraph::Thread holder) { return holder != std::this_thread::get_id(); });
  }
  if (changed_.Wait(lock, WaitGraph::Needs::kAllHolders, others)) return;
  ThrowStatus(MakeError(
      ErrorId::kWindowExhausted,
      absl::StrCat(subject_, " is used by an operation that waits for a parameter of this one"),
      "Let one thread at a time write parameters"));
}

std::byte* WeightResidency::FetchForReading() {
  if (device() != nullptr) return device()->Pin(tensor_);
  // The slab is mapped read-only; torch wants a pointer without const.
  auto* const bytes =
      const_cast<std::byte*>(ValueOrThrow(attachment_->session().Acquire(tensor_), subject_));
  acquired_ = true;
  return bytes;
}

std::byte* WeightResidency::CopyForHome() const {
  std::byte* const copy = raw_.Allocate();
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(tensor_).dtype);
  const absl::Status copied =
      attachment_->CopyOut(tensor_, proto::Plane::kWeight, element_bytes, copy);
  if (!copied.ok()) raw_.Discard(copy);
  ThrowIfError(copied, subject_);
  return copy;
}

// Where the operator has bytes_, and a pointer that another thread takes meanwhile leads to. It
// outlives the operator, so it is not to lead to a place that is another weight's next. A weight
// that always has a place stays there: putting it home costs a small operator much. So does what is
// overwritten, since an older pointer may be what it is overwritten with.
std::byte* WeightResidency::TakeHome(Access access) {
  if (access == Access::kReadCopy) {
    raw_.Lend(bytes_);
    return bytes_ = swap_.home();
  }
  const bool is_placed = access == Access::kRead ? attachment_->WindowBytes(tensor_) == 0
                                                 : !staging_ || access == Access::kOverwrite;
  if (device() != nullptr || is_placed || !raw_.LendMapped(bytes_)) return bytes_;
  return swap_.home();
}

uint64_t WeightResidency::window_bytes() const {
  attachment_->EnsureSealed();  // as the pin would
  // On a device who finds no room beside others has none of it meanwhile.
  return device() != nullptr ? 0 : attachment_->WindowBytes(tensor_);
}

std::atomic<bool> WeightResidency::takes_data_ = true;

// Inference tensors have none.
static uint32_t VersionOf(const c10::VariableVersion& version) {
  return version.enabled() ? version.current_version() : 0;
}

bool WeightResidency::IsParameter(const at::Tensor& tensor) const {
  return std::find(parameters_.begin(), parameters_.end(), tensor.unsafeGetTensorImpl()) !=
         parameters_.end();
}

// What somebody looks at after set_data() stays where it was, also for pointers that were taken
// before (numpy()).
class WeightResidency::LeftCopy {
 public:
  LeftCopy(std::shared_ptr<Attachment> attachment, std::byte* home, size_t size_bytes)
      : attachment_(std::move(attachment)), home_(home), copy_(home, size_bytes) {
    filled_ = copy_.Allocate();
  }
  ~LeftCopy() {
    if (filled_ != nullptr) {
      copy_.Discard(filled_);
    } else {
      copy_.Remove();
      attachment_->homes().Give(home_, copy_.size_bytes());
    }
  }
  LeftCopy(const LeftCopy&) = delete;
  LeftCopy& operator=(const LeftCopy&) = delete;

  std::byte* bytes() const { return filled_; }
  void Show() { copy_.Show(std::exchange(filled_, nullptr), /*writable=*/true); }
  // `shared`: the memory that the parameter was given, which who looks has as well; or none.
  static c10::DataPtr AsDataPtr(std::unique_ptr<LeftCopy> left, c10::DataPtr shared) {
    void* const bytes = shared ? shared.get() : left->home_;
    left->shared_ = std::move(shared);
    return {bytes, left.release(), [](void* context) { delete static_cast<LeftCopy*>(context); },
            c10::Device(c10::kCPU)};
  }

 private:
  const std::shared_ptr<Attachment> attachment_;  // whose the range is
  std::byte* const home_;
  RawCopy copy_;
  std::byte* filled_ = nullptr;
  c10::DataPtr shared_;
};

// The storage leaves with our home; another range is that of the next one.
void WeightResidency::MoveHome(std::byte* home, std::unique_ptr<LeftCopy> left,
                               c10::DataPtr shared) {
  left->Show();
  RemoveRawRange(swap_.home());
  swap_.HandOver(LeftCopy::AsDataPtr(std::move(left), std::move(shared)));
  swap_.MoveHome(home);
  raw_.MoveHome(home);
  if (attachment_->serves_raw()) AddRawRange(home, size_bytes_, this);
}

void WeightResidency::RefuseMemory(bool is_offloaded) const {
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat(subject_, " is given the memory of another tensor (set_data, set_) while ",
                   is_offloaded ? "that is offloaded, too, and cannot change places with it (of "
                                  "another job, tied, on a device, a part of a parameter)"
                                : "other tensors look at its own: .data(), detach(), a view, "
                                  "a tied weight"),
      "Copy the values under NoGradGuard, parameter.copy_(…), and keep copies, "
      "parameter.clone(), where tensors are kept"));
}

// The values are copied, and `data` becomes a tensor over our storage, so that what set_data() does
// next changes nothing. In plain torch the memory changes and the values follow: who looks at the
// parameter's old memory would see the difference, and so gets it, and who looks at that of `data`.
void WeightResidency::TakeData(const at::Tensor& parameter, const at::Tensor& data) {
  if (!IsParameter(parameter) || closed() || !data.defined()) return;
  if (data.device() != parameter.device()) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat(subject_, " cannot move from ", parameter.device().str(), " to ",
                     data.device().str(), " (set_data, module->to()) while it is attached"),
        "Move the module before attaching it; close the engine first, with weights_at_close = "
        "memory, to move it later"));
  }
  const bool fits = data.layout() == at::kStrided &&
                    data.scalar_type() == parameter.scalar_type() &&
                    data.sizes() == parameter.sizes();
  if (!fits || !HaveSameOrder(parameter, data)) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat(subject_, " cannot become ", c10::toString(data.scalar_type()), " of shape [",
                     absl::StrJoin(data.sizes(), ", "), fits ? "] with other strides" : "]",
                     " (set_data, module->to()) while it is attached"),
        "Cast and replace tensors before attaching the module"));
  }
  Residency* const other = Residency::Of(data);
  if (other == this) {
    if (away_ != nullptr) ComeHome(parameter);
    return;
  }
  if (WeightResidency* const host = Partner(data)) return GoTo(host, parameter);
  if (other == nullptr) BeAlone(parameter);
  const bool is_shared = parameter.unsafeGetTensorImpl()->unsafe_storage().use_count() != 1;
  const bool is_left = is_shared && MayLeave();
  if (other != nullptr || (is_shared && !is_left)) RefuseMemory(other != nullptr);
  const at::AutoGradMode no_grad(false);
  std::unique_ptr<GivenMemory> given = ForgetGiven();
  if (is_left) {
    // Who looks at the old memory keeps it, beside `ram`; the parameter gets a storage of its own.
    attachment_->EnsureSealed();
    EndRaw(/*wait=*/true);
    auto old = std::make_unique<LeftCopy>(attachment_, swap_.home(), size_bytes_);
    std::byte* const home = attachment_->homes().Take(size_bytes_);
    ThrowIfError(
        attachment_->CopyOut(tensor_, proto::Plane::kWeight,
                             proto::DtypeBytes(attachment_->tensor(tensor_).dtype), old->bytes()),
        subject_);
    Lock lock(mutex_);
    while (state_ != State::kHome) WaitForOthers(lock);
    const c10::Storage left = parameter.unsafeGetTensorImpl()->unsafe_storage();
    const bool is_given = given != nullptr && given->is_followed();
    MoveHome(home, std::move(old), is_given ? given->Share() : c10::DataPtr());
    const at::Tensor fresh = MakeManagedTensor(swap_.MakeStorage(ReleasedText()), parameter);
    parameter.unsafeGetTensorImpl()->shallow_copy_from(fresh.getIntrusivePtr());
  }
  given.reset();  // the same memory may be given again
  if (!at::equal(parameter, data)) parameter.variable_data().copy_(data);
  BecomeAlias(parameter, data);
}

// Who has `data` itself has the parameter's memory, as in plain torch; who has another view of what
// was its memory is noted.
void WeightResidency::BecomeAlias(const at::Tensor& parameter, const at::Tensor& data) {
  std::unique_ptr<GivenMemory> given = NoteGiven(data);
  data.unsafeGetTensorImpl()->shallow_copy_from(parameter.getIntrusivePtr());
  KeepGiven(std::move(given));
}

void WeightResidency::KeepGiven(std::unique_ptr<GivenMemory> given) {
  if (!given->IsHeld()) return;
  const Lock lock(mutex_);
  given_ = std::move(given);
  gives_back_ = false;
}

std::unique_ptr<GivenMemory> WeightResidency::NoteGiven(const at::Tensor& data) {
  Lock lock(mutex_);
  const bool is_shown = raw_.is_shown();
  lock.unlock();
  if (is_shown) EndRaw(/*wait=*/true);  // who has a pointer would write without our knowledge
  const at::TensorImpl& impl = *data.unsafeGetTensorImpl();
  return std::make_unique<GivenMemory>(
      impl.unsafe_storage(), impl.storage_offset() * impl.itemsize(), size_bytes_,
      impl.version_counter(), IsMemoryOfProgram(data), MayFollow());
}

// What others are over cannot stay behind on a device, nor for a tied parameter.
bool WeightResidency::MayLeave() const { return torch_device_.is_cpu() && parameters_.size() == 1; }

// Other ranks have memory of their own.
bool WeightResidency::MayFollow() const { return attachment_->world_size() == 1 && MayLeave(); }

bool WeightResidency::Share(const at::Tensor& own, const at::Tensor& data) {
  const bool fits = Residency::Of(data) == nullptr && data.device() == own.device() &&
                    data.layout() == at::kStrided && data.scalar_type() == own.scalar_type() &&
                    data.sizes() == own.sizes() && HaveSameOrder(own, data);
  if (!fits || !IsWhole(own) || !MayFollow() || closed()) return false;
  {
    const at::TensorImpl& impl = *data.unsafeGetTensorImpl();
    const Lock lock(mutex_);
    if (given_ != nullptr &&
        given_->Is(impl.unsafe_storage(), impl.storage_offset() * impl.itemsize()))
      return true;
  }
  const at::AutoGradMode no_grad(false);
  ForgetGiven();
  own.copy_(data);
  KeepGiven(NoteGiven(data));
  return true;
}

std::unique_ptr<GivenMemory> WeightResidency::ForgetGiven() {
  Lock lock(mutex_);
  // A write where it is not followed does not matter any more.
  while (given_ != nullptr && given_->is_followed() && HasGivenSince(/*writes=*/false))
    TakeGiven(lock);
  return std::move(given_);
}

void WeightResidency::SettleGiven(bool writes) {
  Lock lock(mutex_);
  if (away_ != nullptr) {
    ThrowStatus(MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat(subject_, " has the memory of ", away_->subject_,
                     " (set_data), and both are tensors of the job"),
        "Let them change places before the step (a.set_data(b's), b.set_data(what a had)), give "
        "the parameter a copy, set_data(other.detach().clone()), or tie them before attaching the "
        "module"));
  }
  while (HasGivenSince(writes)) TakeGiven(lock);
}

bool WeightResidency::HasGivenSince(bool writes) {
  if (given_ == nullptr || taker_ == std::this_thread::get_id() || Pins::CountOwn(this) > 0)
    return false;
  if (taker_ != WaitGraph::Thread()) return true;
  // Asked first: who lets go of it may have written it just before.
  const bool is_held = given_->IsHeld();
  const bool was_written = given_->WasWritten();
  if (!was_written && !is_held) given_.reset();
  if (given_ == nullptr || (!was_written && (!writes || given_->is_followed()))) return false;
  if (given_->is_followed()) return true;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat(subject_,
                   " was given the memory of another tensor (set_data, "
                   "vector_to_parameters), which ",
                   was_written ? "was written since: the parameter would not change with it"
                               : "the program still has: it would not change with the parameter"),
      "Give the parameter a copy, set_data(values.clone()), "
      "vector_to_parameters(vector.clone(), …), or copy_() the values"));
}

// As an operator that writes it, before the one that asks for it; or waits for who does so: look
// again.
void WeightResidency::TakeGiven(Lock& lock) {
  if (taker_ != WaitGraph::Thread()) return WaitForOthers(lock);
  taker_ = std::this_thread::get_id();
  lock.unlock();
  const auto end = [&] {
    lock.lock();
    taker_ = WaitGraph::Thread();
    changed_.NotifyAll();
  };
  try {
    Pins pins;
    pins.Add(this, Access::kOverwrite);
    given_->CopyTo(BytesNow());
    pins.Finish();
  } catch (...) {
    end();
    throw;
  }
  end();
}

// Where it is pinned.
std::byte* WeightResidency::BytesNow() {
  return static_cast<std::byte*>(swap_.Lock()->mutable_data());
}

// What an operator has written, which who has the memory that the parameter was given sees. Not of
// one that has read what waits to be put: that memory may have been written meanwhile.
void WeightResidency::GiveBack(const std::byte* bytes) {
  const bool was_written = std::exchange(gives_back_, false);
  if (was_written && given_ != nullptr && given_->is_followed()) given_->CopyFrom(bytes);
}

void WeightResidency::RefreshGiven() {
  {
    Lock lock(mutex_);
    if (given_ != nullptr && !given_->IsHeld()) given_.reset();
    if (given_ == nullptr || !given_->is_followed() || swap_.Lock() == nullptr) return;
  }
  Pins pins;
  pins.Add(this, Access::kRead);
  {
    Lock lock(mutex_);
    if (given_ != nullptr) given_->CopyFrom(BytesNow());
  }
  pins.Finish();
}

namespace {

// How many arguments set_() has.
size_t SetArguments(Special special) { return special == Special::kSetStrides ? 5 : 2; }

// A tensor over what set_() is given.
at::Tensor SetSource(Special special, const at::Tensor& target, const torch::jit::Stack& stack) {
  const c10::IValue& given = torch::jit::peek(stack, 1, SetArguments(special));
  if (special == Special::kSet) return given.toTensor();
  c10::Storage storage = given.toStorage();
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  std::vector<int64_t> sizes = {bytes / static_cast<int64_t>(target.element_size())};
  std::vector<int64_t> strides = {1};
  int64_t offset = 0;
  if (special == Special::kSetStrides) {
    offset = torch::jit::peek(stack, 2, 5).toInt();
    sizes = torch::jit::peek(stack, 3, 5).toIntVector();
    strides = torch::jit::peek(stack, 4, 5).toIntVector();
    if (strides.size() != sizes.size()) {
      const c10::DimVector rows = c10::contiguous_strides(sizes);
      strides.assign(rows.begin(), rows.end());
    }
  }
  const at::TensorOptions options(target.scalar_type());
  if (Residency::Of(storage.unsafeGetStorageImpl()) == nullptr)
    return at::empty({0}, options).set_(std::move(storage), offset, sizes, strides);
  at::Tensor source = MakeManagedTensor(
      std::move(storage), at::empty_strided(sizes, strides, options.device(at::kMeta)));
  source.unsafeGetTensorImpl()->set_storage_offset(offset);
  return source;
}

}  // namespace

bool WeightResidency::Serve(Special special, torch::jit::Stack* stack) {
  if (special == Special::kRecordStream && !torch_device_.is_cpu()) {
    RecordStream(torch::jit::peek(*stack, 1, 2).toStream());
    torch::jit::drop(*stack, 2);
    return true;
  }
  const bool sets = special == Special::kSet || special == Special::kSetStorage ||
                    special == Special::kSetStrides;
  if (special != Special::kSetData && !sets) return false;
  const at::Tensor target = torch::jit::peek(*stack, 0, SetArguments(special)).toTensor();
  WeightResidency* const owner = IsParameter(target) ? this : AwayWith(target);
  if (owner == nullptr) return false;  // an alias goes its way alone
  if (special == Special::kSetData) {
    if (takes_data_) owner->TakeData(target, torch::jit::peek(*stack, 1, 2).toTensor());
    return false;
  }
  const at::AutoGradMode no_grad(false);
  if (!owner->TakeTensor(target, SetSource(special, target, *stack))) return false;
  torch::jit::drop(*stack, SetArguments(special));
  torch::jit::push(*stack, target);
  return true;
}

// What set_() does; false: it is torch's affair, and the step refuses what comes of it.
bool WeightResidency::TakeTensor(at::Tensor target, const at::Tensor& source) {
  if (!source.defined() || source.layout() != at::kStrided || source.device() != target.device() ||
      source.sizes() != target.sizes() || source.scalar_type() != target.scalar_type())
    return false;
  // For other strides torch may take other kernels, which give other bits.
  if (!HaveSameOrder(target, source)) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                          absl::StrCat(subject_,
                                       " is given a tensor with other strides (set_, "
                                       "torch::load) while it is attached"),
                          "Copy the values under NoGradGuard, parameter.copy_(…), or lay the "
                          "module out like that before attaching it"));
  }
  Residency* const other = Residency::Of(source);
  WeightResidency* const host = Partner(source);
  if (host == nullptr && other != this && dynamic_cast<WeightResidency*>(other) != nullptr)
    RefuseMemory(/*is_offloaded=*/true);
  if (host != nullptr) {
    GoTo(host, target);
    PutOver(target, source.unsafeGetTensorImpl()->unsafe_storage());
  } else if (other == this) {
    ComeHome(target);
  }
  if (host != nullptr || other == this) {
    if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
    return true;
  }
  BeAlone(target);
  // Who looks at the old memory keeps it, as beside set_data().
  if (target.unsafeGetTensorImpl()->unsafe_storage().use_count() != 1 && MayLeave())
    TakeData(target, target.clone(at::MemoryFormat::Preserve));
  ForgetGiven();
  target.copy_(source);
  if (other == nullptr) BecomeAlias(target, source);
  return true;
}

// ---- Raw pointers ------------------------------------------------------------------------------

// Operators use the bytes at home, too. False: somebody has let go, look again.
bool WeightResidency::PinRaw(Access access, Lock& lock) {
  const bool writes = access > Access::kReadCopy;
  const bool others_read = state_ == State::kReading && Pins::CountOwn(this) != uses_;
  if (others_read && (writes || raw_.was_written())) {
    WaitForOthers(lock);
    return false;
  }
  if (writes && !raw_.was_written()) raw_.AllowWriting();
  if (pins_ == 0 || state_ == State::kHome) swap_.PointTo(swap_.home(), /*throws=*/false);
  AddPin(access);
  return true;
}

void WeightResidency::ServeRaw(bool writes) {
  // What is shown while a step is taken would be what was before it.
  const OperatorGate::Pass pass(OperatorGate::Passage::kTogether);
  Lock lock(mutex_);
  for (;;) {
    if (closed_) ThrowStatus(attachment_->Ended(subject_));
    if (HasGivenSince(writes)) {
      TakeGiven(lock);
      continue;
    }
    if (writes && given_ != nullptr) {
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedModel,
          absl::StrCat(subject_,
                       " is written through a pointer, and the program has the memory that the "
                       "parameter was given (set_data, vector_to_parameters): it would not change "
                       "with the parameter"),
          "Give the parameter a copy, set_data(values.clone()), "
          "vector_to_parameters(vector.clone(), …)"));
    }
    if (raw_.is_shown() && state_ != State::kMoving) {
      if (writes && !raw_.was_written()) raw_.AllowWriting();
      return;
    }
    if (state_ == State::kHome || state_ == State::kReading) break;
    if (state_ == State::kInitial) {
      lock.unlock();
      attachment_->EnsureSealed();
      lock.lock();
    } else if (state_ == State::kWriting && Pins::CountOwn(this) == uses_) {
      ThrowStatus(
          MakeError(ErrorId::kReleased, absl::StrCat(subject_,
                                                     " is written by an operation of this thread, "
                                                     "which uses an older pointer to it")));
    } else {
      WaitForOthers(lock);
    }
  }
  if (state_ == State::kReading) {
    std::byte* const fresh = raw_.Allocate();
    std::memcpy(fresh, bytes_, size_bytes_);
    raw_.Show(fresh, writes);
    lock.unlock();
    return attachment_->BeginRaw(this);
  }
  state_ = State::kMoving;
  mover_ = std::this_thread::get_id();
  lock.unlock();
  std::byte* fresh = nullptr;
  std::exception_ptr failure;
  try {
    attachment_->BeginRaw(this);
    fresh = CopyForHome();
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (!failure) raw_.Show(fresh, writes);
  state_ = State::kHome;
  changed_.NotifyAll();
  if (!failure) return;
  lock.unlock();
  attachment_->ForgetRaw(this);
  std::rethrow_exception(failure);
}

bool WeightResidency::EndRaw(bool wait) {
  Lock lock(mutex_);
  for (;;) {
    if (state_ == State::kWritten) EndPut(lock);
    if (!raw_.is_shown() && state_ != State::kMoving) return true;
    if (raw_.is_shown() && state_ == State::kHome && uses_ == 0) break;
    if (!wait) return false;
    WaitForOthers(lock);
  }
  state_ = State::kMoving;
  mover_ = std::this_thread::get_id();
  const bool written = raw_.was_written();
  if (written) raw_.StopWriting();
  lock.unlock();
  absl::Status put;
  try {
    if (written) put = PutRaw();
  } catch (...) {
    lock.lock();
    if (written) raw_.AllowWriting();
    state_ = State::kHome;
    changed_.NotifyAll();
    throw;
  }
  lock.lock();
  raw_.Remove();
  state_ = State::kHome;
  changed_.NotifyAll();
  lock.unlock();
  ThrowIfError(put, subject_);
  return true;
}

// A page that may be written is not yet a weight that was: a master keeps its fp32 value under a
// weight whose bytes are the same, as in memory.
absl::Status WeightResidency::PutRaw() {
  const uint64_t digest = TakeDigest(swap_.home());
  const auto bytes = [this](uint64_t begin, uint64_t) { return swap_.home() + begin; };
  return PutUnlessSame(bytes, digest,
                       [&] { return attachment_->StreamIn(tensor_, swap_.home(), digest); });
}

// `bytes` is what the weight is to be, which `put` puts.
absl::Status WeightResidency::PutUnlessSame(ReadBytes bytes, uint64_t digest,
                                            absl::FunctionRef<absl::Status()> put) {
  if (!HasMaster() || SeesVersion() || !has_residual_) return put();
  OFFLOAD_ASSIGN_OR_RETURN(const Compared with_job, CompareInBlocks(bytes));
  const auto end_put = [&] {
    const DaemonWait wait(*attachment_);
    return attachment_->EndPut(tensor_, digest);
  };
  if (attachment_->rank() > 0) {
    OFFLOAD_RETURN_IF_ERROR(end_put());
    OFFLOAD_ASSIGN_OR_RETURN(const Compared with_new, CompareInBlocks(bytes));
    NoteHidden(with_job.crc, with_new.crc);
    return absl::OkStatus();
  }
  OFFLOAD_ASSIGN_OR_RETURN(const bool is_none, SeeHidden(with_job));
  return is_none ? end_put() : put();
}

// What an operator has written. False: it is left where it is, for a put behind the operator.
bool WeightResidency::PutStaged() {
  const std::byte* const bytes = attachment_->region() + staging_.region_offset();
  if (!HasMaster() || SeesVersion() || !has_residual_) {
    // Ranks put one after the other, as often as each other.
    if (attachment_->world_size() == 1) return false;
    ThrowIfError(attachment_->WaitForAll(
                     attachment_->BeginPut(tensor_, staging_.region_offset(), TakeDigest(bytes))),
                 subject_);
    return true;
  }
  const uint64_t digest = TakeDigest(bytes);
  const Compared with_job = CompareWithJob(bytes);
  if (with_job.is_same) {
    ThrowIfError(attachment_->EndPut(tensor_, digest), subject_);
    return true;
  }
  const std::vector<std::byte> written(bytes, bytes + size_bytes_);
  staging_.Reset();
  ValueOrThrow(SeeHidden(with_job), subject_);
  ThrowIfError(attachment_->StreamIn(tensor_, written.data(), digest), subject_);
  return true;
}

// The same of a copy in ordinary memory, which other ranks than the first only compare.
void WeightResidency::Follow() {
  const auto* const written = static_cast<const std::byte*>(private_.get());
  const uint64_t digest = TakeDigest(written);
  if (attachment_->rank() == 0) {
    const auto read = [&](uint64_t begin, uint64_t) { return written + begin; };
    return ThrowIfError(
        PutUnlessSame(read, digest,
                      [&] { return attachment_->StreamIn(tensor_, written, digest); }),
        subject_);
  }
  const bool is_seen = !HasMaster() || SeesVersion() || !has_residual_;
  const uint32_t before = is_seen ? 0 : CrcInJob();
  ThrowIfError(attachment_->EndPut(tensor_, digest), subject_);
  if (!is_seen) NoteHidden(before, CrcInJob());
}

// What the first rank knows of an edit, but for the master that it keeps.
void WeightResidency::NoteHidden(uint32_t crc_before, uint32_t crc_now) {
  if (crc_before != crc_now && !hidden_.has_value()) hidden_ = Hidden{.crc = crc_before};
}

// ---- Masters follow edits ----------------------------------------------------------------------

// In memory an edit is seen by the tensor's version, whatever the bytes are, or by a master whose
// cast is another weight. fp32 and fp64 weights are their own masters.
bool WeightResidency::HasMaster() const {
  const proto::Tensor& tensor = attachment_->tensor(tensor_);
  return tensor.trainable &&
         (tensor.dtype == proto::Dtype::kBFloat16 || tensor.dtype == proto::Dtype::kFloat16);
}

uint64_t WeightResidency::Version() const {
  uint64_t sum = 0;
  for (const c10::VariableVersion& version : versions_) sum += VersionOf(version);
  return sum;
}

// The version says that the weight was written: its master is the weight from now on.
bool WeightResidency::SeesVersion() {
  const uint64_t version = Version();
  if (version == version_then_) return false;
  version_then_ = version;
  has_residual_ = false;
  ForgetHidden();
  return true;
}

void WeightResidency::ForgetHidden() {
  if (hidden_.has_value()) attachment_->DropMaster(hidden_->master.size() * sizeof(float));
  hidden_.reset();
}

// What is about to be put is no edit when it is what the job has; else what that has is kept, since
// the trainer may put it back. The staging buffer is free.
absl::StatusOr<bool> WeightResidency::SeeHidden(const Compared& with_job) {
  if (with_job.is_same || hidden_.has_value()) return with_job.is_same;
  hidden_ = Hidden{.crc = with_job.crc};
  const uint64_t element_count = attachment_->tensor(tensor_).element_count;
  if (!attachment_->KeepMaster(element_count * sizeof(float))) return false;
  hidden_->master.resize(element_count);
  OFFLOAD_RETURN_IF_ERROR(
      attachment_->CopyOut(tensor_, proto::Plane::kMaster, sizeof(float),
                           reinterpret_cast<std::byte*>(hidden_->master.data())));
  return false;
}

// By the window: whoever asks has the staging buffer.
WeightResidency::Compared WeightResidency::CompareWithJob(const std::byte* bytes) {
  const std::byte* const own = ValueOrThrow(attachment_->session().Acquire(tensor_), subject_);
  const Compared compared{.is_same = std::memcmp(own, bytes, size_bytes_) == 0,
                          .crc = Crc32c(0, own, size_bytes_)};
  attachment_->session().Release(tensor_);
  return compared;
}

// By the staging buffer: whoever asks may have the window.
absl::StatusOr<WeightResidency::Compared> WeightResidency::CompareInBlocks(ReadBytes bytes) const {
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(tensor_).dtype);
  Compared compared{.is_same = true, .crc = 0};
  OFFLOAD_RETURN_IF_ERROR(attachment_->StreamOut(
      tensor_, proto::Plane::kWeight, element_bytes,
      [&](uint64_t begin, uint64_t count, const std::byte* own) {
        compared.is_same &= std::memcmp(bytes(begin * element_bytes, count * element_bytes), own,
                                        count * element_bytes) == 0;
        compared.crc = Crc32c(compared.crc, own, count * element_bytes);
        return absl::OkStatus();
      }));
  return compared;
}

uint32_t WeightResidency::CrcInJob() {
  const DaemonWait wait(*attachment_);
  const std::byte* const own = ValueOrThrow(attachment_->session().Acquire(tensor_), subject_);
  const uint32_t crc = Crc32c(0, own, size_bytes_);
  attachment_->session().Release(tensor_);
  return crc;
}

bool WeightResidency::IsItsMaster() const {
  return HasMaster() && has_residual_ && Version() != version_then_;
}

std::optional<std::vector<float>> WeightResidency::FollowEdits() {
  if (!HasMaster() || !has_residual_) return std::nullopt;
  if (Version() != version_then_) {
    // The version alone has changed, or by an operator around the one that wrote (_foreach_*).
    Pins pins;
    pins.Add(this, Access::kWrite);
    pins.Finish();
    return std::nullopt;
  }
  if (!hidden_.has_value() || CrcInJob() != hidden_->crc || size_bytes_ == 0) return std::nullopt;
  if (!hidden_->master.empty() || attachment_->rank() > 0) return hidden_->master;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat(subject_,
                   " was changed through .data() or a pointer and then changed back: its fp32 "
                   "master, which is the same as before in memory, was lost with the first change, "
                   "since there is no room to keep those of so large weights"),
      "Write both times under NoGradGuard, parameter.copy_(…), or compute with a copy of the "
      "module"));
}

void WeightResidency::Stepped() {
  Lock lock(mutex_);
  version_then_ = Version();
  has_residual_ = true;
  ForgetHidden();
}

// ---- Several ranks -----------------------------------------------------------------------------

static uint64_t Finished(const BytesDigest& digest) {
  return std::max<uint64_t>(digest.Finish(), 1);
}

// Of what is put, which the daemon compares with that of the other ranks; 0: it was not made from
// the old value, and the first rank's counts whatever it is.
uint64_t WeightResidency::TakeDigest(const std::byte* bytes) {
  if (!std::exchange(is_compared_, false)) return 0;
  BytesDigest digest;
  digest.Update(bytes, size_bytes_);
  return Finished(digest);
}

// The same of bytes on the device.
uint64_t WeightResidency::TakeDigestThere(const std::byte* bytes) {
  if (!std::exchange(is_compared_, false)) return 0;
  constexpr size_t kBlockBytes = size_t{1} << 20;
  static_assert(kBlockBytes % BytesDigest::kBlockBytes == 0);
  std::vector<std::byte> block(std::min(size_bytes_, kBlockBytes));
  BytesDigest digest;
  for (size_t begin = 0; begin < size_bytes_; begin += kBlockBytes) {
    const size_t length = std::min(size_bytes_ - begin, kBlockBytes);
    CopyToHost(block.data(), bytes + begin, length, torch_device_);
    digest.Update(block.data(), length);
  }
  return Finished(digest);
}

std::byte* WeightResidency::MakePrivate(Access access) {
  private_ = c10::GetCPUAllocator()->allocate(size_bytes_);
  if (access == Access::kWrite) {
    std::memcpy(private_.get(), ValueOrThrow(attachment_->session().Acquire(tensor_), subject_),
                size_bytes_);
    attachment_->session().Release(tensor_);
  }
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  return static_cast<std::byte*>(private_.get());
}

// Memory of torch's, since the window has room for what is read only.
std::byte* WeightResidency::FetchForWritingThere(Access access) {
  at::Tensor copy = AllocateBytes(size_bytes_, torch_device_);
  auto* const bytes = static_cast<std::byte*>(copy.mutable_data_ptr());
  if (access == Access::kWrite) {
    device()->BeforeRead(tensor_);
    const DaemonWait wait(*attachment_);
    const std::byte* const host = ValueOrThrow(attachment_->session().Acquire(tensor_), subject_);
    CopyToDevice(bytes, host, size_bytes_, torch_device_);
    attachment_->session().Release(tensor_);
  }
  private_ = TakeBytes(std::move(copy));
  return bytes;
}

// The operations of this thread that read it go on with what is written.
void WeightResidency::TakePinsBack() {
  for (int use = 0; device() != nullptr && use < uses_; ++use)
    device()->Unpin(tensor_).IgnoreError();  // the next pin says so
}

// The operator was launched. What it writes is put back by whoever comes last, so it ends here.
absl::Status WeightResidency::EndUse() {
  if (device() == nullptr) return absl::OkStatus();
  if (state_ == State::kReading) return device()->Unpin(tensor_);
  SynchronizeCurrentStream(torch_device_);
  return absl::OkStatus();
}

void WeightResidency::RecordStream(const c10::Stream& stream) {
  Lock lock(mutex_);
  if (device() != nullptr && state_ == State::kReading) device()->RecordStream(tensor_, stream);
}

std::byte* WeightResidency::FetchForWriting(Access access) {
  if (device() != nullptr) return FetchForWritingThere(access);
  // A forked child has no staging buffer, which what is overwritten would be the first to use.
  ThrowIfError(attachment_->session().health(), subject_);
  if (attachment_->rank() > 0) return MakePrivate(access);
  std::optional<Staging::Piece> piece = attachment_->staging().TakeIfEver(size_bytes_);
  if (!piece.has_value()) return MakePrivate(access);  // this operation has all of it, or a circle
  std::byte* const copy = attachment_->region() + piece->region_offset();
  if (access == Access::kWrite) {
    std::memcpy(copy, ValueOrThrow(attachment_->session().Acquire(tensor_), subject_), size_bytes_);
    attachment_->session().Release(tensor_);
  }
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  staging_ = *std::move(piece);
  return copy;
}

void WeightResidency::Unpin(Completion* done) {
  Lock lock(mutex_);
  std::swap(*std::find(holders_.begin(), holders_.end(), std::this_thread::get_id()),
            holders_.back());
  holders_.pop_back();
  const absl::Status ended = EndUse();
  if (--pins_ == 0) swap_.PointHome();
  if (done == nullptr) {
    LetGo(lock);
    return ThrowIfError(ended, subject_);
  }
  Reference();
  lock.unlock();
  done->WhenDone([this] {
    {
      Lock later(mutex_);
      try {
        LetGo(later);
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    Unreference();
  });
}

void WeightResidency::LetGo(Lock& lock) {
  if (--uses_ > 0) {
    // Who took the piece may be gone; who waits for it waits for those that are left.
    if (staging_ && !holders_.empty()) staging_.SetHolder(holders_.front());
    changed_.NotifyAll();
    return;
  }
  raw_.EndLending();
  if (state_ == State::kWriting) return PutBack(lock);
  if (raw_.is_shown() && raw_.was_written()) GiveBack(swap_.home());
  state_ = State::kHome;
  if (std::exchange(acquired_, false)) attachment_->session().Release(tensor_);
  changed_.NotifyAll();
}

void WeightResidency::PutBack(Lock& lock) {
  state_ = State::kMoving;
  mover_ = std::this_thread::get_id();
  if (is_abandoned_)
    gives_back_ = false;
  else if (device() == nullptr)
    GiveBack(staging_ ? attachment_->region() + staging_.region_offset()
                      : static_cast<const std::byte*>(private_.get()));
  lock.unlock();
  std::exception_ptr failure;
  bool is_put = true;
  try {
    if (std::exchange(is_abandoned_, false)) {
      // Nothing was written.
    } else if (device() != nullptr) {
      ThrowIfError(PutFromDevice(), subject_);
    } else if (staging_) {
      is_put = PutStaged();
    } else {
      Follow();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (is_put) staging_.Reset();
  private_.clear();
  lock.lock();
  state_ = is_put ? State::kHome : State::kWritten;
  LatePut* begins = nullptr;
  if (!is_put) {
    is_late_ = true;
    begins = attachment_->AddLate(this);
    staging_.SetHolder(std::thread::id());
  }
  changed_.NotifyAll();
  if (failure) std::rethrow_exception(failure);
  if (is_put) return;
  lock.unlock();
  if (begins != nullptr) begins->BeginPut();
  attachment_->EndOldestLate();
}

// ---- Behind the operator -----------------------------------------------------------------------

// A put may need room of the daemon's that the operation holds once it has pinned.
void WeightResidency::MakeRoomToWrite() {
  {
    Lock lock(mutex_);
    if (state_ == State::kInitial || state_ == State::kWriting || state_ == State::kWritten) return;
  }
  if (device() == nullptr && attachment_->rank() == 0) attachment_->staging().MakeRoom(size_bytes_);
}

// Runs `action` without the lock, while others wait.
void WeightResidency::MoveWritten(Lock& lock, absl::FunctionRef<void()> action, State after) {
  state_ = State::kMoving;
  mover_ = std::this_thread::get_id();
  lock.unlock();
  std::exception_ptr failure;
  try {
    action();
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (after == State::kHome) ForgetWritten();
  state_ = after;
  changed_.NotifyAll();
  if (failure) std::rethrow_exception(failure);
}

void WeightResidency::ForgetWritten() {
  attachment_->ForgetLate(this);
  is_late_ = false;
  put_.clear();
  staging_.Reset();
}

void WeightResidency::BeginPut() {
  Lock lock(mutex_);
  if (state_ != State::kWritten || !put_.empty()) return;
  const auto begin = [this] {
    put_ = attachment_->BeginPut(tensor_, staging_.region_offset(), /*digest=*/0);
  };
  MoveWritten(lock, begin, State::kWritten);
}

void WeightResidency::EndPut() {
  Lock lock(mutex_);
  while (is_late_ && state_ == State::kMoving) changed_.WaitForOthers(lock);
  if (state_ == State::kWritten) EndPut(lock);
}

// It is late until it is home: whoever waits for all waits for this one, too.
void WeightResidency::EndPut(Lock& lock) {
  staging_.SetHolder(std::this_thread::get_id());
  const auto end = [this] {
    if (put_.empty()) put_ = attachment_->BeginPut(tensor_, staging_.region_offset(), /*digest=*/0);
    ThrowIfError(attachment_->WaitForAll(put_), subject_);
  };
  MoveWritten(lock, end, State::kHome);
}

absl::Status WeightResidency::PutFromDevice() {
  const auto* const bytes = static_cast<const std::byte*>(private_.get());
  const uint64_t element_bytes = proto::DtypeBytes(attachment_->tensor(tensor_).dtype);
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) -> absl::Status {
    CopyToHost(target, bytes + begin * element_bytes, count * element_bytes, torch_device_);
    return absl::OkStatus();
  };
  std::vector<std::byte> block;
  const auto read = [&](uint64_t begin, uint64_t size) {
    block.resize(size);
    CopyToHost(block.data(), bytes + begin, size, torch_device_);
    return static_cast<const std::byte*>(block.data());
  };
  const uint64_t digest = TakeDigestThere(bytes);
  const absl::Status put =
      PutUnlessSame(read, digest, [&] { return attachment_->StreamIn(tensor_, fill, digest); });
  device()->Changed({&tensor_, 1});
  return put;
}

void WeightResidency::Close(c10::DataPtr bytes) {
  const auto storage = swap_.Lock();  // lives while its message changes
  const c10::Storage own = ForgetPlace();
  c10::DataPtr initial;
  c10::Storage values;
  Lock lock(mutex_);
  while (state_ != State::kHome && state_ != State::kInitial && state_ != State::kWritten)
    changed_.WaitForOthers(lock);
  if (state_ == State::kWritten) {  // it could not be put
    ForgetWritten();
    state_ = State::kHome;
  }
  closed_ = true;
  swap_.SetHomeThrows(true);
  initial = std::exchange(initial_, c10::DataPtr());
  values = std::exchange(initial_values_, {});
  if (!storage) return;
  if (state_ == State::kInitial && initial && initial_born_ == nullptr &&
      StorageSwap::Named(initial) == nullptr) {
    swap_.HandOver(std::move(initial));
    return;
  }
  if (bytes && given_ != nullptr && given_->is_followed() && given_->IsHeld()) {
    if (!given_->WasWritten()) given_->CopyFrom(static_cast<const std::byte*>(bytes.get()));
    if (c10::DataPtr given = given_->Share()) bytes = std::move(given);
  }
  given_.reset();
  if (bytes) return swap_.HandOver(std::move(bytes));
  swap_.SetMessage(std::string(attachment_->Ended(subject_).message()));
  swap_.PointHome();
}

}  // namespace offload::zero3
