// Reads that went wrong: again, extent by extent, bounded.

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "swap/repeated_read.h"
#include "swap/store_impl.h"

namespace offload::swap {

void Store::Impl::Reread(Batch* batch, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    ++batch->transfers_left;
    const Piece& piece = batch->pieces[i];
    offload::swap::ReadAgain(
        device.get(), piece.offset_bytes,
        {static_cast<std::byte*>(piece.memory.iov_base), piece.memory.iov_len},
        /*is_good=*/nullptr, kReadTriesMax - 1, [this, batch, id = piece.id](absl::Status status) {
          if (status.ok()) return FinishPart(batch, std::move(status));
          ++lost_extents;
          FinishPart(batch, MakeError(ErrorId::kIo,
                                      absl::StrCat(path, ": ", NameOf(id), " ", status.message())));
        });
  }
  FinishPart(batch, absl::OkStatus());  // the transfer that failed; its extents are counted anew
}

void Store::Impl::ReadAgain(const ReadRequest& request, const Stamp& stamp, Done done) {
  Layout::Where where;
  if (!layout.Find(request.id, &where) || stamp.never_written()) {
    return Defer(std::move(done), absl::InvalidArgumentError(NameOf(request.id)));
  }
  const auto is_current = [this, index = where.entry, stamp] {
    const TableEntry& current = CurrentEntry(index);
    return current.sequence == stamp.sequence && current.crc == stamp.crc;
  };
  if (!is_current()) {
    return Defer(std::move(done), absl::FailedPreconditionError(absl::StrCat(
                                      NameOf(request.id), " has been written meanwhile")));
  }
  ++checksum_mismatches;
  const uint32_t seed = ExtentSeed(uuid, request.id, stamp.sequence);
  const auto is_good = [seed, crc = stamp.crc](std::span<const std::byte> bytes) {
    return Crc32c(seed, bytes.data(), bytes.size()) == crc;
  };
  offload::swap::ReadAgain(
      device.get(), layout.PlaceOffset(CurrentEntry(where.entry).place()) + where.area_offset_bytes,
      {request.bytes, where.size_bytes}, is_good, kReadTriesMax - 1,
      [this, id = request.id, is_current, done = std::move(done)](absl::Status status) {
        ++callbacks_run;
        if (status.ok()) return done(std::move(status));
        if (!is_current())
          return done(absl::FailedPreconditionError(
              absl::StrCat(NameOf(id), " has been written meanwhile")));
        ++lost_extents;
        done(MakeError(ErrorId::kChecksum,
                       absl::StrCat(path, ": ", NameOf(id), ": ", status.message())));
      });
}

}  // namespace offload::swap
