// accelerator/host_registration.h
//
// Page-locks a slab or a region, in pieces: drivers refuse very large ranges, and no copy may cross
// from one registration into another.
//
// A slab that is sealed against writing is often refused when it is mapped read-only. A rank that
// maps it writable before the seal, registers it kReadWrite and then makes the mapping read-only
// (mprotect) keeps the registration. One that comes later copies through a staging ring.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"

namespace offload::accelerator {

inline constexpr uint64_t kRegistrationBytesMax = uint64_t{256} << 30;

struct Piece {
  uint64_t offset_bytes = 0, size_bytes = 0;
  bool operator==(const Piece&) const = default;
};

// Cuts [0, size_bytes) at some of `borders` (ascending offsets where slots begin) into as few
// pieces as possible of at most max_bytes. Empty when two borders are further apart than that.
std::vector<Piece> RegistrationPieces(uint64_t size_bytes, std::span<const uint64_t> borders,
                                      uint64_t max_bytes);

// Holds the registrations of one range; gives them back when destroyed.
class HostRegistration {
 public:
  // An object that is not held() when this machine cannot register all of the range: then nothing
  // is registered. The range must outlive it, and so must the accelerator.
  static absl::StatusOr<HostRegistration> Register(Accelerator* accelerator,
                                                   std::span<const std::byte> range,
                                                   std::span<const uint64_t> borders,
                                                   HostAccess access,
                                                   uint64_t max_bytes = kRegistrationBytesMax);

  HostRegistration() = default;
  ~HostRegistration();
  HostRegistration(HostRegistration&& other) noexcept;
  HostRegistration& operator=(HostRegistration&& other) noexcept;

  bool held() const { return !pieces_.empty(); }

 private:
  explicit HostRegistration(Accelerator* accelerator) : accelerator_(accelerator) {}
  void GiveBack();

  Accelerator* accelerator_ = nullptr;
  std::vector<const std::byte*> pieces_;
};

}  // namespace offload::accelerator
