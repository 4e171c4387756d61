#include "zero3/torch/given_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/bytes_digest.h"

namespace offload::zero3 {

struct GivenMemory::Piece {
  const c10::Storage storage;
  const size_t begin, size_bytes;
  std::atomic<bool> is_followed;

  size_t end() const { return begin + size_bytes; }
};

// Of parameters of all jobs in the process.
struct GivenMemory::AllPieces {
  std::mutex mutex;
  std::vector<std::shared_ptr<Piece>> pieces;

  static AllPieces& Get() {
    static auto* const kAll = new AllPieces;
    return *kAll;
  }
  // Parameters over the same bytes would change each other within a step.
  void Add(const std::shared_ptr<Piece>& piece) {
    const std::lock_guard lock(mutex);
    for (const std::shared_ptr<Piece>& other : pieces) {
      const bool overlaps = other->storage.is_alias_of(piece->storage) &&
                            other->begin < piece->end() && piece->begin < other->end();
      if (overlaps) other->is_followed = piece->is_followed = false;
    }
    pieces.push_back(piece);
  }
  void Remove(const std::shared_ptr<Piece>& piece) {
    const std::lock_guard lock(mutex);
    std::erase(pieces, piece);
  }
  size_t Count(const c10::Storage& storage) {
    const std::lock_guard lock(mutex);
    return std::count_if(pieces.begin(), pieces.end(), [&](const std::shared_ptr<Piece>& piece) {
      return piece->storage.is_alias_of(storage);
    });
  }
};

namespace {

uint32_t VersionOf(const c10::VariableVersion& version) {
  return version.enabled() ? version.current_version() : 0;  // inference tensors have none
}

}  // namespace

GivenMemory::GivenMemory(c10::Storage storage, size_t begin, size_t size_bytes,
                         c10::VariableVersion version, bool is_of_program, bool may_follow)
    : piece_(new Piece{std::move(storage), begin, size_bytes, may_follow}),
      is_of_program_(is_of_program),
      version_(std::move(version)),
      version_then_(VersionOf(version_)) {
  AllPieces::Get().Add(piece_);
  if (may_follow) digest_then_ = Digest(Bytes());
}

GivenMemory::~GivenMemory() { AllPieces::Get().Remove(piece_); }

bool GivenMemory::IsHeld() const {
  return is_of_program_ || piece_->storage.use_count() > AllPieces::Get().Count(piece_->storage);
}

bool GivenMemory::Is(const c10::Storage& storage, size_t begin) const {
  return piece_->storage.is_alias_of(storage) && piece_->begin == begin;
}

bool GivenMemory::is_followed() const { return piece_->is_followed; }

// The program may have made it smaller.
bool GivenMemory::IsThere() const { return piece_->storage.nbytes() >= piece_->end(); }

const std::byte* GivenMemory::Bytes() const {
  return static_cast<const std::byte*>(piece_->storage.data()) + piece_->begin;
}

uint64_t GivenMemory::Digest(const std::byte* bytes) const {
  BytesDigest digest;
  digest.Update(bytes, piece_->size_bytes);
  return digest.Finish();
}

bool GivenMemory::WasWritten() const {
  if (!is_followed()) return VersionOf(version_) != version_then_;
  return IsThere() && Digest(Bytes()) != digest_then_;
}

// What another thread writes meanwhile is seen the next time: the digest is of what was copied.
void GivenMemory::CopyTo(std::byte* bytes) {
  std::memcpy(bytes, Bytes(), piece_->size_bytes);
  digest_then_ = Digest(bytes);
}

void GivenMemory::CopyFrom(const std::byte* bytes) {
  if (!IsThere()) return;
  std::memcpy(static_cast<std::byte*>(piece_->storage.mutable_data()) + piece_->begin, bytes,
              piece_->size_bytes);
  digest_then_ = Digest(bytes);
}

c10::DataPtr GivenMemory::Share() const {
  if (!IsThere()) return {};
  auto* const kept = new c10::Storage(piece_->storage);
  return {static_cast<std::byte*>(kept->mutable_data()) + piece_->begin, kept,
          [](void* context) { delete static_cast<c10::Storage*>(context); }, kept->device()};
}

}  // namespace offload::zero3
