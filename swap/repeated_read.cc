#include "swap/repeated_read.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "swap/format.h"

namespace offload::swap {
namespace {

// Owned by the callback of the one read that is under way.
struct Attempt {
  aio::Device* device;
  uint64_t offset_bytes;
  std::span<std::byte> bytes;
  std::function<bool(std::span<const std::byte>)> is_good;
  int tries_left;
  aio::Device::Done done;
};

void Start(aio::Device* device, uint64_t offset_bytes, std::span<std::byte> bytes,
           aio::Device::Done done) {
  const iovec memory{bytes.data(), bytes.size()};
  device->Read(offset_bytes, {&memory, 1}, std::move(done));
}

// The range cannot be read as a whole: halves it until one page is left.
void FindBadPage(std::shared_ptr<Attempt> attempt, uint64_t begin_bytes, uint64_t size_bytes) {
  if (size_bytes <= kPageBytes) {
    return attempt->done(absl::DataLossError(
        absl::StrCat("cannot be read at byte ", attempt->offset_bytes + begin_bytes)));
  }
  const uint64_t half_bytes = RoundUpToPage(size_bytes / 2);
  Start(attempt->device, attempt->offset_bytes + begin_bytes,
        attempt->bytes.subspan(begin_bytes, half_bytes),
        [attempt, begin_bytes, size_bytes, half_bytes](absl::Status status) {
          if (!status.ok()) return FindBadPage(attempt, begin_bytes, half_bytes);
          FindBadPage(attempt, begin_bytes + half_bytes, size_bytes - half_bytes);
        });
}

void TryOnce(std::shared_ptr<Attempt> attempt) {
  --attempt->tries_left;
  Start(attempt->device, attempt->offset_bytes, attempt->bytes, [attempt](absl::Status status) {
    const bool is_read = status.ok();
    if (is_read && (!attempt->is_good || attempt->is_good(attempt->bytes))) {
      return attempt->done(absl::OkStatus());
    }
    if (attempt->tries_left > 0) return TryOnce(attempt);
    if (is_read) {
      return attempt->done(absl::DataLossError(
          absl::StrCat("other bytes than were written, in ", kReadTriesMax, " reads")));
    }
    FindBadPage(attempt, 0, attempt->bytes.size());
  });
}

}  // namespace

void ReadAgain(aio::Device* device, uint64_t offset_bytes, std::span<std::byte> bytes,
               std::function<bool(std::span<const std::byte>)> is_good, int tries_left,
               aio::Device::Done done) {
  TryOnce(std::make_shared<Attempt>(
      Attempt{device, offset_bytes, bytes, std::move(is_good), tries_left, std::move(done)}));
}

}  // namespace offload::swap
