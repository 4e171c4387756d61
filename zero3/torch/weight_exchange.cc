// Parameters in each other's memory.
//
// a.set_data(b.data()) puts a parameter over another one's storage: both are one for a while, as in
// plain torch, and what belongs to them in the job stays where it is. When set_data() has come full
// circle, each has one storage again, and the residencies exchange theirs with their values. A step
// before that is refused (SettleGiven).
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <memory>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "base/check.h"
#include "zero3/torch/weight_residency.h"

namespace offload::zero3 {
namespace {

struct Away {
  std::mutex mutex;
  absl::flat_hash_map<const c10::TensorImpl*, WeightResidency*> owners;  // of such parameters
};
Away& AllAway() {
  static auto* const kAway = new Away;
  return *kAway;
}

}  // namespace

WeightResidency* WeightResidency::AwayWith(const at::Tensor& parameter) {
  Away& all = AllAway();
  const std::lock_guard lock(all.mutex);
  const auto found = all.owners.find(parameter.unsafeGetTensorImpl());
  return found != all.owners.end() && found->second->away_ == Residency::Of(parameter)
             ? found->second
             : nullptr;
}

// Whose storage `data` is over, when the parameter may change places with that one.
WeightResidency* WeightResidency::Partner(const at::Tensor& data) const {
  auto* const host = dynamic_cast<WeightResidency*>(Residency::Of(data));
  const bool fits = host != nullptr && host != this && host->attachment_ == attachment_ &&
                    torch_device_.is_cpu() && host->torch_device_.is_cpu() &&
                    host->parameters_.size() == 1 && parameters_.size() == 1 &&
                    host->size_bytes_ == size_bytes_ && host->IsWhole(data);
  if (!fits) return nullptr;
  attachment_->EnsureSealed();
  return attachment_->tensor(tensor_).dtype == attachment_->tensor(host->tensor_).dtype ? host
                                                                                        : nullptr;
}

// torch puts the parameter there next.
void WeightResidency::GoTo(WeightResidency* host, const at::Tensor& parameter) {
  if (away_ == nullptr) own_storage_ = parameter.unsafeGetTensorImpl()->unsafe_storage();
  {
    Away& all = AllAway();
    const std::lock_guard lock(all.mutex);
    away_ = host;
    all.owners[parameter.unsafeGetTensorImpl()] = this;
  }
  const WeightResidency* last = host;
  while (last->away_ != nullptr && last != this) last = last->away_;
  if (last != this) return;
  for (WeightResidency* at = this; at->away_ != nullptr;) {
    WeightResidency* const next = at->away_;
    at->Exchange(*next, parameter.scalar_type());
    at = next;
  }
}

// The parameter over its own storage again.
void WeightResidency::ComeHome(const at::Tensor& parameter) {
  if (away_ == nullptr) return;
  PutOver(parameter, std::exchange(own_storage_, {}));
  Away& all = AllAway();
  const std::lock_guard lock(all.mutex);
  away_ = nullptr;
  all.owners.erase(parameter.unsafeGetTensorImpl());
}

// Before its storage takes other values: those of another one that is over it keep theirs.
void WeightResidency::BeAlone(const at::Tensor& parameter) {
  ComeHome(parameter);
  WeightResidency* guest = nullptr;
  c10::Storage fresh;
  {
    Away& all = AllAway();
    const std::lock_guard lock(all.mutex);
    for (const auto& [impl, owner] : all.owners) {
      if (owner->away_ == this) guest = owner;
    }
    if (guest != nullptr) fresh = guest->own_storage_;
  }
  if (guest == nullptr) return;
  Exchange(*guest, parameter.scalar_type());
  PutOver(parameter, std::move(fresh));
  own_storage_ = {};
}

void WeightResidency::PutOver(const at::Tensor& parameter, c10::Storage storage) const {
  const at::AutoGradMode no_grad(false);
  const at::Tensor there = MakeManagedTensor(std::move(storage), parameter);
  parameter.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
}

// Storages and values, so that every storage has the values that it had.
void WeightResidency::Exchange(WeightResidency& other, at::ScalarType type) {
  const at::AutoGradMode no_grad(false);
  EndRaw(/*wait=*/true);
  other.EndRaw(/*wait=*/true);
  const auto elements = [type](WeightResidency& of) {
    const auto count = static_cast<int64_t>(of.attachment_->tensor(of.tensor_).element_count);
    const at::Tensor like = at::empty({count}, at::TensorOptions(type).device(at::kMeta));
    return MakeManagedTensor(c10::Storage(of.swap_.Lock()), like);
  };
  std::unique_ptr<GivenMemory> given = std::move(given_), others_given = std::move(other.given_);
  {
    at::Tensor own = elements(*this), others = elements(other);
    if (!at::equal(own, others)) {
      const at::Tensor before = own.clone();
      own.copy_(others);
      others.copy_(before);
    }
  }
  EndRaw(/*wait=*/true);  // of what these copies have written, too
  other.EndRaw(/*wait=*/true);
  given_ = std::move(others_given);
  other.given_ = std::move(given);
  {
    std::scoped_lock lock(mutex_, other.mutex_);
    OFFLOAD_CHECK(state_ == State::kHome && other.state_ == State::kHome && uses_ == 0 &&
                  other.uses_ == 0)
        << subject_;
    RemoveRawRange(swap_.home());
    RemoveRawRange(other.swap_.home());
    swap_.Exchange(other.swap_, ReleasedText(), other.ReleasedText());
    for (WeightResidency* const each : {this, &other}) {
      each->raw_.MoveHome(each->swap_.home());
      if (attachment_->serves_raw()) AddRawRange(each->swap_.home(), size_bytes_, each);
    }
  }
  std::swap(own_storage_, other.own_storage_);
  Away& all = AllAway();
  const std::lock_guard lock(all.mutex);
  absl::erase_if(all.owners, [&](const auto& entry) {
    WeightResidency* const owner = entry.second;
    if (owner->away_ == this || owner->away_ == &other)
      owner->away_ = owner->away_ == this ? &other : this;
    if (owner->away_ != owner) return false;
    owner->away_ = nullptr;
    owner->own_storage_ = {};
    return true;
  });
}

// The engine closes: the parameter stays where it is. Returns its own storage, if it had left that.
c10::Storage WeightResidency::ForgetPlace() {
  Away& all = AllAway();
  const std::lock_guard lock(all.mutex);
  absl::erase_if(all.owners, [this](const auto& entry) { return entry.second == this; });
  away_ = nullptr;
  return std::exchange(own_storage_, {});
}

}  // namespace offload::zero3
