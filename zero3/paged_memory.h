// zero3/paged_memory.h
//
// Memory of this process whose bytes lie in a file without a name, so that the kernel may write
// them out and take the pages for others: blocks larger than memory can be had, and cost time
// instead.
//
// A block is an ordinary range of addresses, readable and writable at any time by any thread.
// While a Use lives, a thread of it holds the pages that are mapped near a bound: what is above
// goes back to the kernel, which has it in its cache for as long as it likes.
//
// Room on the drive is taken with a block, so that a full drive is an error of Allocate() and not
// of a write to memory. A drive that fails to read ends the process (SIGBUS), as one of the
// kernel's swap would; one that fails to write is an error of Check().
//
// A child that was forked may not touch the blocks (SIGSEGV): what it reads would change under it.
//
// Thread safety: any thread.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "base/range_allocator.h"
#include "base/unique_fd.h"

namespace offload::zero3 {

class PagedMemory {
 public:
  // In a file in `folder`, of a file system that can make files without a name and give them room
  // (ext4, xfs, btrfs, tmpfs); another is an error, as is a folder that this process may not write.
  static absl::StatusOr<std::shared_ptr<PagedMemory>> Open(const std::string& folder,
                                                           uint64_t resident_bytes_max);
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;
  ~PagedMemory();  // no block is lent

  // Page aligned, of undefined value. RESOURCE_EXHAUSTED when the drive, or the address space, is
  // full.
  absl::StatusOr<std::byte*> Allocate(uint64_t size_bytes);
  // The whole of what Allocate() gave.
  void Free(std::byte* block);

  // That blocks are being worked with. They may be nested.
  class Use {
   public:
    explicit Use(std::shared_ptr<PagedMemory> memory);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const std::shared_ptr<PagedMemory> memory_;
  };

  // Whether all that was written out so far has arrived. Blocks until what is on its way has. Each
  // failure is told of once.
  absl::Status Check();

  uint64_t allocated_bytes() const;

 private:
  struct Block {
    MappedRegion memory;
    uint64_t offset = 0;  // in the file
  };

  PagedMemory(UniqueFd file, uint64_t resident_bytes_max);
  bool IsOfThisProcess() const { return process_ == ::getpid(); }
  // Around a fork.
  struct Every;
  void CloseInChild();
  absl::StatusOr<Block> Make(uint64_t size_bytes);
  void Drop(Block block);
  void ReturnRoom(uint64_t offset, uint64_t size_bytes);
  void Watch(const std::stop_token& stop);
  void GivePagesBack(uint64_t above);

  const pid_t process_ = ::getpid();
  const UniqueFd file_;
  const uint64_t resident_bytes_max_;

  mutable std::mutex mutex_;
  // Of files that are mapped besides, programs and libraries.
  uint64_t other_pages_bytes_;
  RangeAllocator room_;
  int uses_ = 0;
  std::jthread watch_;  // while there are uses
  uint64_t allocated_bytes_ = 0;
  std::unordered_map<const std::byte*, Block> blocks_;
  // Free ones whose pages are there, by size: of results on the way, one follows another.
  std::multimap<uint64_t, Block> cached_;
  uint64_t cached_bytes_ = 0;
};

}  // namespace offload::zero3
