#include "accelerator/host_registration.h"

#include <utility>

#include "base/status_macros.h"

namespace offload::accelerator {

std::vector<Piece> RegistrationPieces(uint64_t size_bytes, std::span<const uint64_t> borders,
                                      uint64_t max_bytes) {
  std::vector<Piece> pieces;
  uint64_t begin = 0, end = 0;  // of the piece that grows
  const auto grow = [&](uint64_t border) {
    if (border - begin > max_bytes) {
      if (end > begin) pieces.push_back({begin, end - begin});
      begin = end;
    }
    end = border;
    return end - begin <= max_bytes;
  };
  for (const uint64_t border : borders) {
    if (border > end && border < size_bytes && !grow(border)) return {};
  }
  if (size_bytes == 0 || !grow(size_bytes)) return {};
  pieces.push_back({begin, end - begin});
  return pieces;
}

absl::StatusOr<HostRegistration> HostRegistration::Register(Accelerator* accelerator,
                                                            std::span<const std::byte> range,
                                                            std::span<const uint64_t> borders,
                                                            HostAccess access, uint64_t max_bytes) {
  HostRegistration registration(accelerator);
  for (const Piece& piece : RegistrationPieces(range.size(), borders, max_bytes)) {
    const std::byte* const bytes = range.data() + piece.offset_bytes;
    OFFLOAD_ASSIGN_OR_RETURN(const bool is_registered,
                             accelerator->HostRegister(bytes, piece.size_bytes, access));
    if (!is_registered) return HostRegistration();
    registration.pieces_.push_back(bytes);
  }
  return registration;
}

HostRegistration::~HostRegistration() { GiveBack(); }

HostRegistration::HostRegistration(HostRegistration&& other) noexcept
    : accelerator_(other.accelerator_), pieces_(std::exchange(other.pieces_, {})) {}

HostRegistration& HostRegistration::operator=(HostRegistration&& other) noexcept {
  GiveBack();
  accelerator_ = other.accelerator_;
  pieces_ = std::exchange(other.pieces_, {});
  return *this;
}

void HostRegistration::GiveBack() {
  // A device that has failed has let go of them.
  for (const std::byte* bytes : pieces_) accelerator_->HostUnregister(bytes).IgnoreError();
  pieces_.clear();
}

}  // namespace offload::accelerator
