#include "swap/scratch.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "swap/building_file.h"
#include "swap/format.h"
#include "swap/pool_directory.h"
#include "swap/store.h"
#include "swap/stripe_map.h"
#include "swap/striped_device.h"
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

  // A file without a name, in one of the pools.
  struct Member {
    PoolDirectory directory;
    UniqueFd file;  // the device has a duplicate, so that it can be replaced when the file grows
  };
  // A write that completes when its bytes are on their way and its checksum is taken.
  struct Written {
    int left = 2;
    Chunk chunk;
    absl::Status status;
    Done done;
  };

  Impl(std::vector<Member> unnamed_files, StripeMap stripe_map, ScratchOptions scratch_options,
       Wakeup scratch_wakeup)
      : members(std::move(unnamed_files)),
        map(std::move(stripe_map)),
        options(std::move(scratch_options)),
        wakeup(std::move(scratch_wakeup)) {}
  ~Impl() { Drain(); }

  absl::Status Reserve(uint64_t bytes);
  // Makes a member's file hold its part of the first `bytes` bytes.
  absl::Status Allocate(uint32_t member, uint64_t bytes);
  absl::StatusOr<std::unique_ptr<aio::Device>> OpenMember(const Member& member) const;
  absl::StatusOr<std::unique_ptr<aio::Device>> OpenMembers(uint64_t bytes) const;
  // Runs everything that is under way.
  void Drain();
  void Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done);
  void Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done);
  // Forgets the checksums of all chunks that [offset, offset + size) touches.
  void Forget(uint64_t offset_bytes, uint64_t size_bytes);
  // The chunks that make up [offset, offset + size) exactly; empty when none do.
  std::vector<std::pair<uint64_t, Chunk>> ChunksOf(uint64_t offset_bytes,
                                                   uint64_t size_bytes) const;
  absl::Status Verify(uint64_t offset_bytes, std::span<const std::byte> bytes,
                      std::span<const std::pair<uint64_t, Chunk>> expected) const;
  void FinishWrite(uint64_t offset_bytes, Written& written, const absl::Status& status);
  void Compute(std::function<void()> work, std::function<void()> done) const;
  // The pools as messages name them.
  std::string Name() const;
  void Defer(Done done, absl::Status status);
  size_t Poll(bool wait);

  std::vector<Member> members;
  const StripeMap map;
  const ScratchOptions options;
  uint64_t size_bytes = 0;
  std::map<uint64_t, Chunk> chunks;  // by offset; disjoint
  std::deque<std::pair<Done, absl::Status>> deferred;
  Wakeup wakeup;
  mutable std::mutex device_mutex;      // of the pointer, which other threads copy
  std::shared_ptr<aio::Device> device;  // null at first only
  TransferWatch watch;
};

void Scratch::Impl::Drain() {
  if (device == nullptr) return;
  while (device->in_flight() > 0 || !deferred.empty()) Poll(/*wait=*/true);
  wakeup.Forget(device->event_fd());
}

std::string Scratch::Impl::Name() const {
  std::string name;
  for (const Member& member : members)
    absl::StrAppend(&name, name.empty() ? "" : ",", member.directory.PathOf(""));
  return name;
}

absl::Status Scratch::Impl::Allocate(uint32_t member, uint64_t bytes) {
  const int file = members[member].file.get();
  const uint64_t before_bytes = map.MemberBytes(member, size_bytes);
  const uint64_t member_bytes = map.MemberBytes(member, bytes);
  if (member_bytes <= before_bytes) return absl::OkStatus();
  int result;
  do {
    result = fallocate(file, 0, 0, static_cast<off_t>(member_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  const int error = errno;
  // A refused allocation may have taken part of the space.
  [[maybe_unused]] const int truncated = ftruncate(file, static_cast<off_t>(before_bytes));
  return AllocationRefused(
      {.what = absl::StrCat(members[member].directory.PathOf(""), ": scratch space"),
       .needed = absl::StrCat(member_bytes - before_bytes, " bytes more"),
       .file_bytes = member_bytes,
       .free_bytes = FreeBytes(file)},
      error);
}

absl::StatusOr<std::unique_ptr<aio::Device>> Scratch::Impl::OpenMember(const Member& member) const {
  UniqueFd duplicate(fcntl(member.file.get(), F_DUPFD_CLOEXEC, 0));
  if (!duplicate.valid())
    return MakeError(RefusalId(errno), absl::StrCat("dup: ", ErrnoText(errno)));
  return aio::OpenDevice(duplicate.release(), options.io);
}

absl::StatusOr<std::unique_ptr<aio::Device>> Scratch::Impl::OpenMembers(uint64_t bytes) const {
  if (members.size() == 1) return OpenMember(members.front());
  std::vector<StripeMember> opened;
  for (const Member& member : members) {
    OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> device, OpenMember(member));
    opened.push_back(
        {.device = std::move(device), .name = member.directory.PathOf(""), .offset_bytes = 0});
  }
  return StripedDevice::Make(std::move(opened), map, bytes);
}

absl::Status Scratch::Impl::Reserve(uint64_t bytes) {
  bytes = RoundUpToPage(std::max(bytes, kFirstBytes * members.size()));
  if (bytes <= size_bytes) return absl::OkStatus();
  if (members.empty())
    return MakeError(ErrorId::kPoolFull, absl::StrCat("scratch space of ", bytes, " bytes"));
  for (uint32_t member = 0; member < members.size(); ++member)
    OFFLOAD_RETURN_IF_ERROR(Allocate(member, bytes));
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<aio::Device> grown, OpenMembers(bytes));
  OFFLOAD_RETURN_IF_ERROR(wakeup.Watch(grown->event_fd()));
  Drain();
  {
    const std::lock_guard<std::mutex> lock(device_mutex);
    device = std::move(grown);
  }
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
  const auto written = std::make_shared<Written>();
  written->chunk.size_bytes = bytes.size();
  written->done = std::move(done);
  const iovec memory{const_cast<std::byte*>(bytes.data()), bytes.size()};
  device->Write(offset_bytes, {&memory, 1}, [this, offset_bytes, written](absl::Status status) {
    FinishWrite(offset_bytes, *written, status);
  });
  Compute([written, offset_bytes, bytes] { written->chunk.crc = ChunkCrc(offset_bytes, bytes); },
          [this, offset_bytes, written] { FinishWrite(offset_bytes, *written, absl::OkStatus()); });
}

void Scratch::Impl::FinishWrite(uint64_t offset_bytes, Written& written,
                                const absl::Status& status) {
  written.status.Update(status);
  if (--written.left > 0) return;
  if (written.status.ok()) chunks[offset_bytes] = written.chunk;
  std::exchange(written.done, nullptr)(written.status);
}

void Scratch::Impl::Compute(std::function<void()> work, std::function<void()> done) const {
  if (options.compute) return options.compute(std::move(work), std::move(done));
  work();
  done();
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
                 if (!status.ok()) return done(std::move(status));
                 const auto verdict = std::make_shared<absl::Status>();
                 Compute([this, verdict, offset_bytes, bytes,
                          expected] { *verdict = Verify(offset_bytes, bytes, expected); },
                         [verdict, done] { done(*verdict); });
               });
}

absl::Status Scratch::Impl::Verify(uint64_t offset_bytes, std::span<const std::byte> bytes,
                                   std::span<const std::pair<uint64_t, Chunk>> expected) const {
  for (const auto& [chunk_offset, chunk] : expected) {
    if (ChunkCrc(chunk_offset, bytes.subspan(chunk_offset - offset_bytes, chunk.size_bytes)) ==
        chunk.crc)
      continue;
    return MakeError(ErrorId::kChecksum,
                     absl::StrCat("scratch space of ", Name(), " at ", chunk_offset, ", ",
                                  chunk.size_bytes, " bytes"));
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

absl::StatusOr<std::unique_ptr<Scratch>> Scratch::Create(const std::vector<std::string>& pools,
                                                         ScratchOptions options) {
  std::vector<Impl::Member> members;
  for (const std::string& pool : pools) {
    OFFLOAD_RETURN_IF_ERROR(CheckPool(pool));
    OFFLOAD_ASSIGN_OR_RETURN(PoolDirectory directory, PoolDirectory::Open(pool));
    UniqueFd file(
        openat(directory.fd(), ".", O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC | O_EXCL, 0600));
    if (!file.valid()) {
      return MakeError(RefusalId(errno),
                       absl::StrCat(directory.PathOf(""), ": an unnamed file: ", ErrnoText(errno)));
    }
    members.push_back({std::move(directory), std::move(file)});
  }
  OFFLOAD_ASSIGN_OR_RETURN(
      StripeMap map,
      StripeMap::Make({.head_bytes = 0, .weights = std::vector<uint32_t>(pools.size(), 1)}));
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  auto impl = std::make_unique<Impl>(std::move(members), std::move(map), std::move(options),
                                     std::move(wakeup));
  OFFLOAD_RETURN_IF_ERROR(impl->Reserve(kFirstBytes));
  return std::unique_ptr<Scratch>(new Scratch(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Scratch>> Scratch::CreateOn(std::unique_ptr<aio::Device> device,
                                                           ScratchOptions options) {
  OFFLOAD_ASSIGN_OR_RETURN(StripeMap map, StripeMap::Make({.head_bytes = 0, .weights = {1}}));
  OFFLOAD_ASSIGN_OR_RETURN(Wakeup wakeup, Wakeup::Make());
  auto impl = std::make_unique<Impl>(std::vector<Impl::Member>(), std::move(map),
                                     std::move(options), std::move(wakeup));
  impl->size_bytes = device->geometry().size_bytes;
  impl->device = std::move(device);
  return std::unique_ptr<Scratch>(new Scratch(std::move(impl)));
}

Scratch::Scratch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scratch::~Scratch() = default;

absl::Status Scratch::Reserve(uint64_t bytes) { return impl_->Reserve(bytes); }
uint64_t Scratch::size_bytes() const { return impl_->size_bytes; }
void Scratch::Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done) {
  if (impl_->watch) {
    done = impl_->watch({.kind = Transfer::Kind::kScratchWrite, .bytes = bytes.size()},
                        std::move(done));
  }
  impl_->Write(offset_bytes, bytes, std::move(done));
}
void Scratch::Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done) {
  if (impl_->watch)
    done = impl_->watch({.kind = Transfer::Kind::kScratchRead, .bytes = bytes.size()},
                        std::move(done));
  impl_->Read(offset_bytes, bytes, std::move(done));
}
void Scratch::SetWatch(TransferWatch watch) { impl_->watch = std::move(watch); }
size_t Scratch::Poll(bool wait) { return impl_->Poll(wait); }
int Scratch::event_fd() const { return impl_->wakeup.fd(); }
std::shared_ptr<const aio::Device> Scratch::device() const {
  const std::lock_guard<std::mutex> lock(impl_->device_mutex);
  return impl_->device;
}

}  // namespace offload::swap
