#include "zero3/torch/residency.h"

#include <ATen/ops/empty_strided.h>

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "zero3/dimension_order.h"

namespace offload::zero3 {

static thread_local bool writes_alike = false;

bool WritesAlike() { return writes_alike; }
void SetWritesAlike(bool alike) { writes_alike = alike; }

Residency::Residency(std::string name, std::string subject, c10::Device device, size_t size_bytes,
                     std::byte* home)
    : name_(std::move(name)),
      subject_(std::move(subject)),
      size_bytes_(size_bytes),
      swap_(*this, device, size_bytes, home) {}

bool Residency::IsWhole(const at::Tensor& tensor) const {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         static_cast<size_t>(tensor.numel()) * tensor.element_size() == size_bytes_;
}

bool HaveSameOrder(const at::Tensor& a, const at::Tensor& b) {
  return a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense() &&
         OrderOf(a.sizes(), a.strides()) == OrderOf(b.sizes(), b.strides());
}

at::Tensor InOrderOf(const at::Tensor& tensor, const at::Tensor& values) {
  if (HaveSameOrder(tensor, values)) return values.resolve_neg();
  return at::empty_strided(tensor.sizes(), tensor.strides(), values.options()).copy_(values);
}

void Residency::Unreference() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

bool Residency::ReferenceIfAlive() {
  int references = references_.load(std::memory_order_relaxed);
  while (references > 0 && !references_.compare_exchange_weak(references, references + 1)) {
  }
  return references > 0;
}

void Residency::OnStorageDeath() {
  std::lock_guard lock(mutex_);
  swap_.Die();
  ForgetStorage();
}

void Residency::LearnSlowly(c10::StorageImpl* storage) {
  std::lock_guard lock(mutex_);
  swap_.Learn(storage, ReleasedText());
}

void Residency::LeaveStorage() {
  std::lock_guard lock(mutex_);
  swap_.Leave();
}

std::string Residency::ReleasedText() const {
  return std::string(
      MakeError(ErrorId::kReleased,
                absl::StrCat(subject_,
                             " is offloaded: its bytes are in memory only while an operation uses "
                             "them"))
          .message());
}

thread_local Pins* Pins::top_ = nullptr;

void Pins::Add(Residency* residency, Access access) {
  residency->Pin(access);
  residency->Reference();
  // Those that write unpin last: the daemon may need the memory of the others to take what they
  // put back.
  residencies_.insert(access <= Access::kReadCopy ? residencies_.end() : residencies_.begin(),
                      residency);
}

void Pins::AddPinned(Residency* residency) {
  residency->Reference();
  allocated_.push_back(residency);
}

void Pins::LeaveAllocated() {
  Pins* const outer = FillingFrom(below_);
  auto& to = outer != nullptr && !outer->is_loop_ ? outer->allocated_ : residencies_;
  to.insert(to.end(), allocated_.begin(), allocated_.end());
  allocated_.clear();
}

void Pins::Finish(Completion* done) {
  LeaveAllocated();
  std::exception_ptr failure;
  while (!residencies_.empty()) {
    Residency* residency = residencies_.back();
    try {
      residency->Unpin(done);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    residencies_.pop_back();
    residency->Unreference();
  }
  if (failure) std::rethrow_exception(failure);
}

Pins::~Pins() {
  for (Residency* const residency : residencies_) residency->Abandon();
  try {
    Finish();
  } catch (...) {  // an operator is failing already, with its own reason
  }
  top_ = below_;
}

Pins* Pins::Filling() { return FillingFrom(top_); }

// A kernel that asks an operation for a tensor without values (empty_like) writes it by its
// address.
Pins* Pins::FillingFrom(Pins* pins) {
  while (pins != nullptr && pins->allocates_ != Allocates::kResults) pins = pins->below_;
  return pins;
}

int Pins::CountOwn(const Residency* residency) {
  int count = 0;
  for (const Pins* pins = top_; pins != nullptr; pins = pins->below_) {
    for (const Residency* pinned : pins->residencies_) count += pinned == residency ? 1 : 0;
  }
  return count;
}

}  // namespace offload::zero3
