#include "zero3/torch/born_record.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <offload/torch.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/slab_layout.h"
#include "zero3/torch/offload_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// A read has to begin and end where writes did: this divides every extent, of either dtype.
constexpr uint64_t kTransferBytes = uint64_t{proto::kExtentElements} * 2;
constexpr uint64_t kMoveBytes = 4ull << 20;  // of staging
constexpr uint64_t kReserveStepBytes = 256ull << 20;
constexpr uint8_t kAllocatorPriority = 200;

// Every living record of the process: BringHome looks here for those that no module names.
std::mutex& RegistryMutex() {
  static auto* const kMutex = new std::mutex;
  return *kMutex;
}
std::unordered_set<BornRecord*>& Registry() {
  static auto* const kRecords = new std::unordered_set<BornRecord*>;
  return *kRecords;
}

class BornAllocator;
// Non-null on the thread that constructs.
thread_local BornAllocator* constructing = nullptr;

class BornAllocator final : public c10::Allocator {
 public:
  BornAllocator(std::shared_ptr<Attachment> attachment, c10::Allocator* ordinary)
      : attachment_(std::move(attachment)),
        scratch_(std::make_shared<ScratchSpace>(attachment_->session())),
        ordinary_(ordinary) {}

  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes < kBornBytesMin || constructing != this) return ordinary_->allocate(size_bytes);
    auto* const record = new BornRecord(attachment_, scratch_, size_bytes);
    Pins* const operation = Pins::Current();
    // The kernel that asks for it is going to write it, right away.
    const bool resident = operation != nullptr && !operation->allocates_only();
    c10::DataPtr pointer = record->Bear(resident);
    if (resident) operation->AddPinned(record);
    record->Unreference();
    return pointer;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  c10::Allocator* ordinary() const { return ordinary_; }

 private:
  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<ScratchSpace> scratch_;
  c10::Allocator* const ordinary_;
};

}  // namespace

// ---- Room in the scratch file ------------------------------------------------------------------

uint64_t ScratchSpace::Take(uint64_t size_bytes) {
  std::lock_guard lock(mutex_);
  const auto fits = std::find_if(free_.begin(), free_.end(),
                                 [&](const auto& range) { return range.second >= size_bytes; });
  if (fits != free_.end()) {
    const auto [offset, range_bytes] = *fits;
    free_.erase(fits);
    if (range_bytes > size_bytes) free_[offset + size_bytes] = range_bytes - size_bytes;
    return offset;
  }
  const uint64_t more_bytes = std::max(size_bytes, kReserveStepBytes);
  ThrowIfError(session_.ReserveScratch(reserved_bytes_ + more_bytes));
  const uint64_t offset = reserved_bytes_;
  reserved_bytes_ += more_bytes;
  if (more_bytes > size_bytes) free_[offset + size_bytes] = more_bytes - size_bytes;
  return offset;
}

void ScratchSpace::Return(uint64_t offset, uint64_t size_bytes) {
  std::lock_guard lock(mutex_);
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

// ---- The record --------------------------------------------------------------------------------

BornRecord::BornRecord(std::shared_ptr<Attachment> attachment,
                       std::shared_ptr<ScratchSpace> scratch, size_t size_bytes)
    : Record("", absl::StrCat("a tensor of ", size_bytes, " bytes that is being constructed"),
             size_bytes, attachment->homes().Take(size_bytes)),
      attachment_(std::move(attachment)),
      scratch_(std::move(scratch)) {
  std::lock_guard lock(RegistryMutex());
  Registry().insert(this);
}

BornRecord::~BornRecord() {
  {
    std::lock_guard lock(RegistryMutex());
    Registry().erase(this);
  }
  if (has_place_) scratch_->Return(place_, proto::PaddedBytes(size_bytes_));
}

void BornRecord::OnStorageDeath() { dead_ = true; }

c10::DataPtr BornRecord::Bear(bool resident) {
  if (!resident) return MakeFirstDataPtr(home_);
  bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
  written_ = true;
  pins_ = 1;
  return MakeFirstDataPtr(bytes_.data());
}

void BornRecord::Pin(Access access) {
  std::lock_guard lock(mutex_);
  if (!bytes_.valid()) {
    bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
    if (has_value_ && access != Access::kOverwrite) {
      try {
        Move(/*write=*/false);
      } catch (...) {
        bytes_.Unmap();
        throw;
      }
    }
    PointTo(bytes_.data(), /*throws=*/false);
  }
  written_ |= access != Access::kRead;
  ++pins_;
}

void BornRecord::Unpin() {
  std::lock_guard lock(mutex_);
  if (--pins_ > 0) return;
  if (!dead_ && !HasStorage())
    return;  // a result that is not known yet: the end of its next operation lets the bytes go
  if (!dead_ && written_) {
    Move(/*write=*/true);
    written_ = false;
    has_value_ = true;
  }
  PointHome();
  bytes_.Unmap();
}

void BornRecord::Move(bool write) {
  if (!has_place_) {
    place_ = scratch_->Take(proto::PaddedBytes(size_bytes_));
    has_place_ = true;
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
      const uint64_t scratch = place_ + begin + at, region = piece.region_offset() + at;
      tickets.push_back(write ? session.ScratchWrite(scratch, count, region)
                              : session.ScratchRead(scratch, count, region));
    }
    absl::Status failure;
    for (const client::Ticket ticket : tickets) failure.Update(session.Wait(ticket));
    ThrowIfError(failure, subject_);
    if (!write) std::memcpy(bytes_.data() + begin, staging, length);
  }
}

absl::Status BornRecord::ReadInto(uint64_t begin, uint64_t length, uint64_t region_offset) {
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
  return session.Wait(
      session.ScratchRead(place_ + begin, proto::PaddedBytes(length), region_offset));
}

void BornRecord::BringHome() {
  const auto storage = LockStorage();
  if (!storage) return;
  std::lock_guard lock(mutex_);
  c10::DataPtr ordinary = c10::GetCPUAllocator()->allocate(size_bytes_);
  if (has_value_ || bytes_.valid()) {
    if (!bytes_.valid()) {
      bytes_ = ValueOrThrow(MappedRegion::Anonymous(proto::PaddedBytes(size_bytes_)), subject_);
      Move(/*write=*/false);
    }
    std::memcpy(ordinary.get(), bytes_.data(), size_bytes_);
    bytes_.Unmap();
  }
  HandOver(std::move(ordinary));
}

// ---- The construction --------------------------------------------------------------------------

void EndConstruction() {
  if (constructing == nullptr) return;
  c10::SetCPUAllocator(constructing->ordinary(), kAllocatorPriority);
  c10::impl::tls_set_dispatch_key_included(kManagedKey, false);
  constructing = nullptr;
}

void BringHome(torch::nn::Module& module) {
  // A buffer that no operation has touched is not known to its record yet.
  for (const at::Tensor& buffer : module.buffers()) {
    if (!buffer.defined()) continue;
    if (Record* record = Record::Of(buffer))
      record->Learn(buffer.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  std::vector<BornRecord*> records;
  {
    std::lock_guard lock(RegistryMutex());
    for (BornRecord* record : Registry()) {
      record->Reference();
      records.push_back(record);
    }
  }
  for (BornRecord* record : records) {
    record->BringHome();
    record->Unreference();
  }
}

}  // namespace offload::zero3

namespace offload {

// The allocator outlives every storage that it made: torch asks storages for it.
struct InitGuard::Impl {};

InitGuard::InitGuard(const std::shared_ptr<Engine>& engine) {
  const auto* const offloading = dynamic_cast<const zero3::OffloadEngine*>(engine.get());
  if (offloading == nullptr || zero3::constructing != nullptr) return;
  auto* const allocator =
      new zero3::BornAllocator(offloading->attachment(), c10::GetCPUAllocator());
  zero3::constructing = allocator;
  c10::SetCPUAllocator(allocator, zero3::kAllocatorPriority);
  c10::impl::tls_set_dispatch_key_included(zero3::kManagedKey, true);
  impl_ = std::make_unique<Impl>();
}

InitGuard::~InitGuard() {
  if (impl_ != nullptr) zero3::EndConstruction();
}

}  // namespace offload
