#include "swap/scratch.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "swap/format.h"
#include "swap/pool_directory.h"
#include "swap/store.h"
#include "swap/wakeup.h"

namespace offload::swap {
namespace {

constexpr uint64_t kFirstBytes = uint64_t{1} << 20;

// Binds a checksum to its place, so that a misdirected write is seen.
uint32_t ChunkCrc(uint64_t offset_bytes, std::span<const std::byte> bytes) {
  return Crc32c(Crc32c(0, &offset_bytes, sizeof(offset_bytes)), bytes.data(), bytes.size());
}

}  // namespace

struct Scratch::Impl {
  struct Chunk {
    uint64_t size_bytes;
    uint32_t crc;
  };

  Impl(PoolDirectory pool_directory, UniqueFd unnamed_file, aio::OpenOptions options,
       Wakeup scratch_wakeup)
      : directory(std::move(pool_directory)),
        file(std::move(unnamed_file)),
        io(options),
        wakeup(std::move(scratch_wakeup)) {}
  ~Impl() { Close(); }

  absl::Status Reserve(uint64_t bytes);
  absl::Status Allocate(uint64_t bytes);
  // Runs everything that is under way and gives the device up.
  void Close();
  void Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done);
  void Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done);
  // Forgets the checksums of all chunks that [offset, offset + size) touches.
  void Forget(uint64_t offset_bytes, uint64_t size_bytes);
  // The chunks that make up [offset, offset + size) exactly; empty when none do.
  std::vector<std::pair<uint64_t, Chunk>> ChunksOf(uint64_t offset_bytes,
                                                   uint64_t size_bytes) const;
  absl::Status Verify(uint64_t offset_bytes, std::span<const std::byte> bytes,
                      std::span<const std::pair<uint64_t, Chunk>> expected) const;
  void Defer(Done done, absl::Status status);
  size_t Poll(bool wait);

  PoolDirectory directory;
  UniqueFd file;  // the device has a duplicate, so that it can be replaced when the file grows
  const aio::OpenOptions io;
  uint64_t size_bytes = 0;
  std::map<uint64_t, Chunk> chunks;  // by offset; disjoint
  std::deque<std::pair<Done, absl::Status>> deferred;
  Wakeup wakeup;
  std::unique_ptr<aio::Device> device;
};

void Scratch::Impl::Close() {
  if (device == nullptr) return;
  while (device->in_flight() > 0 || !deferred.empty()) Poll(/*wait=*/true);
  wakeup.Forget(device->event_fd());
  device.reset();
}

absl::Status Scratch::Impl::Allocate(uint64_t bytes) {
  int result;
  do {
    result = fallocate(file.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  const int error = errno;
  // A refused allocation may have taken part of the space.
  [[maybe_unused]] const int truncated = ftruncate(file.get(), static_cast<off_t>(size_bytes));
  struct statvfs info {};
  fstatvfs(file.get(), &info);
  return MakeError(ErrorId::kPoolFull,
                   absl::StrCat(directory.PathOf(""), ": scratch space needs ", bytes - size_bytes,
                                " bytes more, free are ", uint64_t{info.f_bavail} * info.f_frsize,
                                ": ", ErrnoText(error)));
}

absl::Status Scratch::Impl::Reserve(uint64_t bytes) {
  bytes = RoundUpToPage(std::max(bytes, kFirstBytes));
  if (bytes <= size_bytes) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(Allocate(bytes));
  UniqueFd duplicate(fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
  if (!duplicate.valid())
    return MakeError(RefusalId(errno), absl::StrCat("dup: ", ErrnoText(errno)));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> grown,
                           aio::OpenDevice(duplicate.release(), io));
  OFFLOAD_RETURN_IF_ERROR(wakeup.Watch(grown->event_fd()));
  Close();
  device = std::move(grown);
  size_bytes = bytes;
  return absl::OkStatus();
}

void Scratch::Impl::Forget(uint64_t offset_bytes, uint64_t size) {
  auto chunk = chunks.lower_bound(offset_bytes);
  if (chunk != chunks.begin()) {
    const auto before = std::prev(chunk);
    if (before->first + before->second.size_bytes > offset_bytes) chunk = before;
  }
  while (chunk != chunks.end() && chunk->first < offset_bytes + size) chunk = chunks.erase(chunk);
}

std::vector<std::pair<uint64_t, Scratch::Impl::Chunk>> Scratch::Impl::ChunksOf(
    uint64_t offset_bytes, uint64_t size) const {
  std::vector<std::pair<uint64_t, Chunk>> found;
  uint64_t at = offset_bytes;
  for (auto chunk = chunks.find(offset_bytes);
       chunk != chunks.end() && chunk->first == at && at < offset_bytes + size; ++chunk) {
    found.emplace_back(*chunk);
    at += chunk->second.size_bytes;
  }
  if (at != offset_bytes + size) found.clear();
  return found;
}

void Scratch::Impl::Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done) {
  if (bytes.empty())
    return Defer(std::move(done), absl::InvalidArgumentError("an empty scratch write"));
  Forget(offset_bytes, bytes.size());
  const Chunk chunk{bytes.size(), ChunkCrc(offset_bytes, bytes)};
  const iovec memory{const_cast<std::byte*>(bytes.data()), bytes.size()};
  device->Write(offset_bytes, {&memory, 1},
                [this, offset_bytes, chunk, done = std::move(done)](absl::Status status) {
                  if (status.ok()) chunks[offset_bytes] = chunk;
                  done(std::move(status));
                });
}

void Scratch::Impl::Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done) {
  auto expected = ChunksOf(offset_bytes, bytes.size());
  if (expected.empty()) {
    return Defer(std::move(done), absl::InvalidArgumentError(
                                      absl::StrCat("scratch bytes [", offset_bytes, ", +",
                                                   bytes.size(), ") are no run of whole writes")));
  }
  const iovec memory{bytes.data(), bytes.size()};
  device->Read(offset_bytes, {&memory, 1},
               [this, offset_bytes, bytes, expected = std::move(expected),
                done = std::move(done)](absl::Status status) {
                 done(status.ok() ? Verify(offset_bytes, bytes, expected) : std::move(status));
               });
}

absl::Status Scratch::Impl::Verify(uint64_t offset_bytes, std::span<const std::byte> bytes,
                                   std::span<const std::pair<uint64_t, Chunk>> expected) const {
  for (const auto& [chunk_offset, chunk] : expected) {
    if (ChunkCrc(chunk_offset, bytes.subspan(chunk_offset - offset_bytes, chunk.size_bytes)) ==
        chunk.crc)
      continue;
    return MakeError(ErrorId::kChecksum,
                     absl::StrCat("scratch space of ", directory.PathOf(""), " at ", chunk_offset,
                                  ", ", chunk.size_bytes, " bytes"));
  }
  return absl::OkStatus();
}

void Scratch::Impl::Defer(Done done, absl::Status status) {
  if (deferred.empty()) wakeup.Signal();
  deferred.emplace_back(std::move(done), std::move(status));
}

size_t Scratch::Impl::Poll(bool wait) {
  size_t count = 0;
  if (!deferred.empty()) {
    auto ready = std::exchange(deferred, {});
    wakeup.Clear();
    for (auto& [done, status] : ready) {
      ++count;
      done(std::move(status));
    }
  }
  return count + device->Poll(wait && count == 0);
}

absl::StatusOr<std::unique_ptr<Scratch>> Scratch::Create(const std::string& pool,
                                                         const aio::OpenOptions& io) {
  OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
  OFFLOAD_ASSIGN_OR_RETURN(PoolDirectory directory, PoolDirectory::Open(pool));
  UniqueFd file(
      openat(directory.fd(), ".", O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC | O_EXCL, 0600));
  if (!file.valid()) {
    return MakeError(RefusalId(errno),
                     absl::StrCat(directory.PathOf(""), ": an unnamed file: ", ErrnoText(errno)));
  }
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  auto impl = std::make_unique<Impl>(std::move(directory), std::move(file), io, std::move(wakeup));
  OFFLOAD_RETURN_IF_ERROR(impl->Reserve(kFirstBytes));
  return std::unique_ptr<Scratch>(new Scratch(std::move(impl)));
}

Scratch::Scratch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scratch::~Scratch() = default;

absl::Status Scratch::Reserve(uint64_t bytes) { return impl_->Reserve(bytes); }
uint64_t Scratch::size_bytes() const { return impl_->size_bytes; }
void Scratch::Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done) {
  impl_->Write(offset_bytes, bytes, std::move(done));
}
void Scratch::Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done) {
  impl_->Read(offset_bytes, bytes, std::move(done));
}
size_t Scratch::Poll(bool wait) { return impl_->Poll(wait); }
int Scratch::event_fd() const { return impl_->wakeup.fd(); }
const aio::Device& Scratch::device() const { return *impl_->device; }

}  // namespace offload::swap
