#include "zero3/paged_memory.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace offload::zero3 {
namespace {

constexpr uint64_t kPageBytes = 4096;
// Of offsets; less than ext4's largest file with pages of 4 KiB.
constexpr uint64_t kFileBytesMax = 8ull << 40;
// Each is a mapping, of which a process may have some 65 thousand.
constexpr size_t kBlocksMax = 20'000;
// How much of the bound other files' pages are taken to have grown by at most, at one look.
constexpr uint64_t kGrowthParts = 4;
constexpr auto kWatchInterval = std::chrono::milliseconds(10);

absl::Status Refused(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

// Pages of mapped files that this process has in memory; of shared memory, too, they are not.
uint64_t ResidentFileBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssFile:")) return std::strtoull(line.c_str() + 8, nullptr, 10) << 10;
  }
  return 0;
}

// Where a file is written elsewhere each time (btrfs), its room would not be that of what is
// written.
void WriteInPlace(int file) {
  int flags = 0;
  if (::ioctl(file, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  ::ioctl(file, FS_IOC_SETFLAGS, &flags);  // others have no such flag
}

// Whoever asks for more is sent a signal, which ends the process.
bool MayBeSoLarge(uint64_t file_bytes) {
  struct rlimit limit {};
  return ::getrlimit(RLIMIT_FSIZE, &limit) != 0 || file_bytes <= limit.rlim_cur;
}

}  // namespace

// ---- Forks -------------------------------------------------------------------------------------

// No other thread is at work in any of them while the process forks.
struct PagedMemory::Every {
  static Every& OfProcess() {
    static auto* const kEvery = new Every;
    return *kEvery;
  }

  Every() {
    ::pthread_atfork(
        [] {
          OfProcess().mutex.lock();
          for (PagedMemory* const memory : OfProcess().memories) memory->mutex_.lock();
        },
        [] { OfProcess().Unlock(); },
        [] {
          for (PagedMemory* const memory : OfProcess().memories) memory->CloseInChild();
          OfProcess().Unlock();
        });
  }
  void Unlock() {
    for (PagedMemory* const memory : memories) memory->mutex_.unlock();
    mutex.unlock();
  }

  std::mutex mutex;
  std::unordered_set<PagedMemory*> memories;
};

// Nothing else of the child's comes to be where it takes a block to be.
void PagedMemory::CloseInChild() {
  for (const auto& [data, block] : blocks_) {
    ::mmap(block.memory.data(), block.memory.size(), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
}

// ---- Blocks ------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<PagedMemory>> PagedMemory::Open(const std::string& folder,
                                                               uint64_t resident_bytes_max) {
  UniqueFd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file.valid()) return Refused(absl::StrCat("a file without a name in ", folder));
  WriteInPlace(file.get());
  // Some can make the file and give it no room (ext3).
  if (::fallocate(file.get(), FALLOC_FL_KEEP_SIZE, 0, kPageBytes) != 0)
    return Refused(absl::StrCat("room for a file in ", folder));
  return std::shared_ptr<PagedMemory>(new PagedMemory(std::move(file), resident_bytes_max));
}

PagedMemory::PagedMemory(UniqueFd file, uint64_t resident_bytes_max)
    : file_(std::move(file)),
      resident_bytes_max_(resident_bytes_max),
      other_pages_bytes_(ResidentFileBytes()),
      room_(kPageBytes) {
  room_.Add(0, kFileBytesMax);
  Every& every = Every::OfProcess();
  std::lock_guard lock(every.mutex);
  every.memories.insert(this);
}

PagedMemory::~PagedMemory() {
  Every& every = Every::OfProcess();
  {
    std::lock_guard lock(every.mutex);
    every.memories.erase(this);
  }
  if (!IsOfThisProcess()) {
    if (watch_.joinable()) watch_.detach();  // there is none
    return;
  }
  OFFLOAD_CHECK(blocks_.empty()) << blocks_.size() << " blocks";
}

absl::StatusOr<std::byte*> PagedMemory::Allocate(uint64_t size_bytes) {
  if (!IsOfThisProcess()) return absl::FailedPreconditionError("of the parent process");
  if (size_bytes > kFileBytesMax)
    return absl::ResourceExhaustedError(absl::StrCat("a block of ", size_bytes, " bytes"));
  size_bytes = std::max((size_bytes + kPageBytes - 1) / kPageBytes, uint64_t{1}) * kPageBytes;
  std::lock_guard lock(mutex_);
  if (blocks_.size() >= kBlocksMax)
    return absl::ResourceExhaustedError(absl::StrCat(kBlocksMax, " tensors are paged already"));
  Block block;
  if (auto found = cached_.extract(size_bytes)) {
    cached_bytes_ -= size_bytes;
    block = std::move(found.mapped());
  } else {
    OFFLOAD_ASSIGN_OR_RETURN(block, Make(size_bytes));
  }
  allocated_bytes_ += size_bytes;
  std::byte* const data = block.memory.data();
  blocks_.emplace(data, std::move(block));
  return data;
}

absl::StatusOr<PagedMemory::Block> PagedMemory::Make(uint64_t size_bytes) {
  const std::optional<uint64_t> offset = room_.Take(size_bytes);
  if (!offset.has_value()) return absl::ResourceExhaustedError("the file is as large as can be");
  const auto fail = [&](absl::Status failure) {
    ReturnRoom(*offset, size_bytes);
    return failure;
  };
  if (!MayBeSoLarge(*offset + size_bytes))
    return fail(absl::ResourceExhaustedError("the limit of file sizes (ulimit -f)"));
  struct statfs drive {};
  if (::fstatfs(file_.get(), &drive) == 0 && size_bytes / drive.f_bsize >= drive.f_bavail)
    return fail(absl::ResourceExhaustedError(absl::StrCat("no room for ", size_bytes, " bytes")));
  if (::fallocate(file_.get(), 0, static_cast<off_t>(*offset), static_cast<off_t>(size_bytes)) != 0)
    return fail(Refused(absl::StrCat("room for ", size_bytes, " bytes")));
  absl::StatusOr<MappedRegion> memory =
      MappedRegion::Map(file_.get(), *offset, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  if (!memory.ok()) return fail(memory.status());
  return Block{*std::move(memory), *offset};
}

void PagedMemory::Free(std::byte* data) {
  if (!IsOfThisProcess()) return;
  std::lock_guard lock(mutex_);
  auto found = blocks_.extract(data);
  OFFLOAD_CHECK(!found.empty()) << "a block that is not lent";
  const uint64_t size_bytes = found.mapped().memory.size();
  allocated_bytes_ -= size_bytes;
  if (uses_ > 0 && cached_bytes_ + size_bytes <= resident_bytes_max_ / 2) {
    cached_bytes_ += size_bytes;
    cached_.emplace(size_bytes, std::move(found.mapped()));
  } else {
    Drop(std::move(found.mapped()));
  }
}

// Without writing it out.
void PagedMemory::Drop(Block block) {
  const uint64_t size_bytes = block.memory.size();
  block.memory.Unmap();
  ReturnRoom(block.offset, size_bytes);
}

void PagedMemory::ReturnRoom(uint64_t offset, uint64_t size_bytes) {
  ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(size_bytes));
  room_.Return(offset, size_bytes);
}

uint64_t PagedMemory::allocated_bytes() const {
  std::lock_guard lock(mutex_);
  return allocated_bytes_;
}

absl::Status PagedMemory::Check() {
  if (::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE) != 0)
    return Refused("writing memory out");
  return absl::OkStatus();
}

// ---- Pages that are mapped ---------------------------------------------------------------------

PagedMemory::Use::Use(std::shared_ptr<PagedMemory> memory) : memory_(std::move(memory)) {
  if (!memory_->IsOfThisProcess()) return;
  std::lock_guard lock(memory_->mutex_);
  if (memory_->uses_++ > 0) return;
  try {
    memory_->watch_ =
        std::jthread([its = memory_.get()](const std::stop_token& stop) { its->Watch(stop); });
  } catch (const std::system_error&) {
    // No further thread may be made: pages stay mapped until the kernel wants them.
  }
}

PagedMemory::Use::~Use() {
  if (!memory_->IsOfThisProcess()) return;
  std::jthread watch;  // ends without the lock, which it takes
  std::lock_guard lock(memory_->mutex_);
  if (--memory_->uses_ > 0) return;
  for (auto& [size_bytes, block] : memory_->cached_) memory_->Drop(std::move(block));
  memory_->cached_.clear();
  memory_->cached_bytes_ = 0;
  watch = std::move(memory_->watch_);
}

void PagedMemory::Watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  do {
    GivePagesBack(/*above=*/resident_bytes_max_);
    wake.wait_for(lock, stop, kWatchInterval, [] { return false; });
  } while (!stop.stop_requested());
  GivePagesBack(/*above=*/0);
}

// They stay in the kernel's cache, dirty ones until they are written: who touches one has it back.
void PagedMemory::GivePagesBack(uint64_t above) {
  std::lock_guard lock(mutex_);
  if (above > 0 && ResidentFileBytes() <= other_pages_bytes_ + above) return;
  for (const auto& [data, block] : blocks_)
    ::madvise(block.memory.data(), block.memory.size(), MADV_DONTNEED);
  // Others may have touched blocks since: what cannot be told from their pages moves the bound by
  // little, and is looked at anew when it is met.
  other_pages_bytes_ =
      std::min(ResidentFileBytes(), other_pages_bytes_ + resident_bytes_max_ / kGrowthParts);
}

}  // namespace offload::zero3
