#include "zero3/torch/born_residency.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <offload/torch.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/slab_layout.h"
#include "zero3/torch/memory_source.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// Whether the calling thread runs a kernel whose memory cannot be born elsewhere (interception.cc).
bool RunsRawKernel();

namespace {

// A read has to begin and end where writes did: this divides every extent, of any dtype.
constexpr uint64_t kTransferBytes = uint64_t{proto::kExtentElements} * 2;
static_assert(ScratchSpace::kStripeBytes == kTransferBytes);
constexpr uint64_t kMoveBytes = 4ull << 20;  // of staging

// Every living residency of the process: BringHome looks here for those that no module names.
std::mutex& RegistryMutex() {
  static auto* const kMutex = new std::mutex;
  return *kMutex;
}
std::unordered_set<BornResidency*>& Registry() {
  static auto* const kResidencies = new std::unordered_set<BornResidency*>;
  return *kResidencies;
}

// The engine for which the calling thread constructs, null when it does not.
thread_local std::shared_ptr<Attachment> constructing;

// Whose construction on this thread is over, while its tensors wait to be attached: operations go
// on to bring them. Only compared.
thread_local const Attachment* constructed = nullptr;

class BornSource final : public MemorySource {
 public:
  static BornSource* OfProcess() {
    static auto* const kSource = new BornSource;
    return kSource;
  }

  c10::DataPtr Allocate(size_t size_bytes) override {
    if (size_bytes < kBornBytesMin || constructing == nullptr || RunsRawKernel()) return {};
    auto* const residency = new BornResidency(constructing, size_bytes);
    // The kernel that asks for it is going to write it, right away.
    Pins* const filling = Pins::Filling();
    c10::DataPtr pointer = residency->Bear(/*resident=*/filling != nullptr);
    if (filling != nullptr) filling->AddPinned(residency);
    residency->Unreference();
    return pointer;
  }
};

}  // namespace

// ---- The residency -----------------------------------------------------------------------------

BornResidency::BornResidency(std::shared_ptr<Attachment> attachment, size_t size_bytes)
    : Residency("", absl::StrCat("a tensor of ", size_bytes, " bytes that is being constructed"),
                c10::kCPU, size_bytes, attachment->homes().Take(size_bytes)),
      attachment_(std::move(attachment)) {
  std::lock_guard lock(RegistryMutex());
  Registry().insert(this);
}

BornResidency::~BornResidency() {
  {
    std::lock_guard lock(RegistryMutex());
    Registry().erase(this);
  }
  if (space_ != nullptr) space_->Return(scratch_offset_, size_bytes_);
}

c10::DataPtr BornResidency::Bear(bool resident) {
  if (!resident) return swap_.MakeFirstDataPtr(swap_.home());
  bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
  written_ = true;
  pins_ = 1;
  return swap_.MakeFirstDataPtr(bytes_.data());
}

void BornResidency::Pin(Access access) {
  std::lock_guard lock(mutex_);
  if (!bytes_.valid()) {
    bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
    is_fresh_ = access == Access::kOverwrite;
    if (has_value_ && access != Access::kOverwrite) {
      try {
        Move(/*write=*/false);
      } catch (...) {
        bytes_.Unmap();
        throw;
      }
    }
    swap_.PointTo(bytes_.data(), /*throws=*/false);
  }
  written_ |= access != Access::kRead;
  ++pins_;
}

void BornResidency::Unpin(Completion* done) {
  OFFLOAD_CHECK(done == nullptr) << "constructed on the host";
  std::lock_guard lock(mutex_);
  if (--pins_ > 0) return;
  if (!dead_ && !swap_.knows_storage())
    return;  // a result that is not known yet: the end of its next operation lets the bytes go
  if (!dead_ && written_) {
    Move(/*write=*/true);
    written_ = false;
    has_value_ = true;
  }
  swap_.PointHome();
  bytes_.Unmap();
}

void BornResidency::Abandon() {
  std::lock_guard lock(mutex_);
  if (is_fresh_ && pins_ == 1) written_ = false;
}

void BornResidency::Move(bool write) {
  if (space_ == nullptr) {
    const std::shared_ptr<ScratchSpace> space = attachment_->scratch();
    scratch_offset_ = space->Take(attachment_->session(), size_bytes_);
    space_ = space;
  }
  client::Session& session = attachment_->session();
  const uint64_t size_bytes = proto::PaddedBytes(size_bytes_);
  Staging::Piece piece = attachment_->staging().Take(std::min(kMoveBytes, size_bytes));
  std::byte* const staging = attachment_->region() + piece.region_offset();
  for (uint64_t begin = 0; begin < size_bytes; begin += piece.size_bytes()) {
    const uint64_t length = std::min(piece.size_bytes(), size_bytes - begin);
    if (write) std::memcpy(staging, bytes_.data() + begin, length);
    std::vector<client::Ticket> tickets;
    for (uint64_t at = 0; at < length; at += kTransferBytes) {
      const uint64_t count = std::min(kTransferBytes, length - at);
      const uint64_t scratch = space_->InFile(scratch_offset_ + begin + at);
      const uint64_t region = piece.region_offset() + at;
      tickets.push_back(write ? session.ScratchWrite(scratch, count, region)
                              : session.ScratchRead(scratch, count, region));
    }
    absl::Status failure;
    for (const client::Ticket ticket : tickets) failure.Update(session.Wait(ticket));
    ThrowIfError(failure, subject_);
    if (!write) std::memcpy(bytes_.data() + begin, staging, length);
  }
}

absl::Status BornResidency::ReadInto(uint64_t begin, uint64_t length, uint64_t region_offset) {
  std::lock_guard lock(mutex_);
  if (bytes_.valid()) {
    std::memcpy(attachment_->region() + region_offset, bytes_.data() + begin, length);
    return absl::OkStatus();
  }
  if (!has_value_) {
    // Made and never written: torch leaves such memory undefined.
    std::memset(attachment_->region() + region_offset, 0, length);
    return absl::OkStatus();
  }
  client::Session& session = attachment_->session();
  std::vector<client::Ticket> tickets;
  for (uint64_t at = 0; at < length; at += kTransferBytes) {
    tickets.push_back(session.ScratchRead(space_->InFile(scratch_offset_ + begin + at),
                                          proto::PaddedBytes(std::min(kTransferBytes, length - at)),
                                          region_offset + at));
  }
  absl::Status failure;
  for (const client::Ticket ticket : tickets) failure.Update(session.Wait(ticket));
  return failure;
}

void BornResidency::BringHome() {
  const auto storage = swap_.Lock();
  if (!storage) return;
  std::lock_guard lock(mutex_);
  c10::DataPtr ordinary = AllocateOrdinary(size_bytes_);
  if (has_value_ || bytes_.valid()) {
    if (!bytes_.valid()) {
      bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
      Move(/*write=*/false);
    }
    std::memcpy(ordinary.get(), bytes_.data(), size_bytes_);
    bytes_.Unmap();
  }
  swap_.HandOver(std::move(ordinary));
}

// ---- The construction --------------------------------------------------------------------------

void EndConstruction() {
  if (constructing != nullptr) SetMemorySource(nullptr);
  if (constructing != nullptr || constructed != nullptr)
    c10::impl::tls_set_dispatch_key_included(kManagedKey, false);
  constructing = nullptr;
  constructed = nullptr;
}

void ForgetConstructed(const Attachment* attachment) {
  if (constructed == attachment && constructing == nullptr) EndConstruction();
}

void LearnStorage(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (Residency* residency = Residency::Of(tensor))
    residency->Learn(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

void BringHome(const Attachment* attachment) {
  std::vector<BornResidency*> residencies;
  {
    std::lock_guard lock(RegistryMutex());
    for (BornResidency* residency : Registry()) {
      if (residency->attachment() != attachment) continue;
      if (residency->ReferenceIfAlive()) residencies.push_back(residency);
    }
  }
  for (BornResidency* residency : residencies) {
    residency->BringHome();
    residency->Unreference();
  }
}

}  // namespace offload::zero3

namespace offload {

struct InitGuard::Impl {};

InitGuard::InitGuard(const std::shared_ptr<Engine>& engine) {
  const auto* const offloading = dynamic_cast<const zero3::ModuleEngine*>(engine.get());
  if (offloading == nullptr || zero3::constructing != nullptr) return;
  offloading->tensors().CheckConstructs();
  zero3::constructing = offloading->tensors().attachment();
  zero3::SetMemorySource(zero3::BornSource::OfProcess());
  c10::impl::tls_set_dispatch_key_included(zero3::kManagedKey, true);
  impl_ = std::make_unique<Impl>();
}

InitGuard::~InitGuard() {
  if (impl_ == nullptr || zero3::constructing == nullptr) return;
  zero3::SetMemorySource(nullptr);
  zero3::constructed = std::exchange(zero3::constructing, nullptr).get();
}

}  // namespace offload
