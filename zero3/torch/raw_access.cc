#include "zero3/torch/raw_access.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <new>

#include "base/check.h"

namespace offload::zero3 {
namespace {

constexpr size_t kPageBytes = 4096;

size_t WholePages(size_t size_bytes) {
  return (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

struct Ranges {
  struct Range {
    size_t size_bytes;
    RawOwner* owner;
  };
  std::mutex mutex;
  std::map<const std::byte*, Range> by_begin;
  struct sigaction before = {};
};
Ranges& AllRanges() {
  static auto* const kRanges = new Ranges;
  return *kRanges;
}

RawOwner* OwnerOf(const std::byte* address) {
  Ranges& ranges = AllRanges();
  std::lock_guard lock(ranges.mutex);
  auto found = ranges.by_begin.upper_bound(address);
  if (found == ranges.by_begin.begin()) return nullptr;
  --found;
  return address < found->first + found->second.size_bytes ? found->second.owner : nullptr;
}

bool IsWrite(const void* context) {
#if defined(__x86_64__)
  constexpr uint64_t kWriteBit = 2;  // of the page fault's error code
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWriteBit) != 0;
#else
  return true;
#endif
}

void CallHandlerBefore(int signal, siginfo_t* info, void* context) {
  const struct sigaction& before = AllRanges().before;
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN && before.sa_handler != nullptr)
    return before.sa_handler(signal);
  ::sigaction(signal, &before, nullptr);  // the instruction faults again, without us
}

thread_local bool serving = false;

// Where ranges were ever, so that other addresses cost nothing.
std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};

void OnFault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  RawOwner* const owner = serving ? nullptr : OwnerOf(static_cast<const std::byte*>(info->si_addr));
  if (owner == nullptr) return CallHandlerBefore(signal, info, context);
  serving = true;
  try {
    owner->ServeRaw(IsWrite(context));
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "an access through a raw pointer cannot be served: %s\n", failure.what());
    std::abort();
  }
  serving = false;
  errno = error;
}

void Install() {
  struct sigaction action = {};
  action.sa_sigaction = &OnFault;
  // On the stack of the program: an alternate one (Python's faulthandler has 16 KiB) is too small.
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigemptyset(&action.sa_mask);
  OFFLOAD_CHECK(::sigaction(SIGSEGV, &action, &AllRanges().before) == 0) << errno;
}

}  // namespace

void AddRawRange(const std::byte* begin, size_t size_bytes, RawOwner* owner) {
  static std::once_flag installed;
  std::call_once(installed, &Install);
  Ranges& ranges = AllRanges();
  std::lock_guard lock(ranges.mutex);
  ranges.by_begin[begin] = {.size_bytes = WholePages(size_bytes), .owner = owner};
  const auto address = reinterpret_cast<uintptr_t>(begin);
  lowest = std::min(lowest.load(), address);
  highest = std::max(highest.load(), address + WholePages(size_bytes));
}

bool ServeBuffer(const void* buffer, size_t size_bytes, bool writes) {
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  if (size_bytes == 0 || address >= highest.load(std::memory_order_relaxed) ||
      address + size_bytes <= lowest.load(std::memory_order_relaxed) || serving)
    return true;
  RawOwner* const owner = OwnerOf(static_cast<const std::byte*>(buffer));
  if (owner == nullptr) return true;
  serving = true;
  bool served = true;
  try {
    owner->ServeRaw(writes);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "a system call's buffer cannot be served: %s\n", failure.what());
    served = false;
  }
  serving = false;
  return served;
}

void RemoveRawRange(const std::byte* begin) {
  Ranges& ranges = AllRanges();
  std::lock_guard lock(ranges.mutex);
  ranges.by_begin.erase(begin);
}

RawCopy::RawCopy(std::byte* home, size_t size_bytes)
    : home_(home), size_bytes_(WholePages(size_bytes)) {}

std::byte* RawCopy::Allocate() const {
  void* const memory =
      ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

void RawCopy::Discard(std::byte* filled) const { ::munmap(filled, size_bytes_); }

void RawCopy::Show(std::byte* filled, bool writable) {
  if (!writable) OFFLOAD_CHECK(::mprotect(filled, size_bytes_, PROT_READ) == 0) << errno;
  void* const shown =
      ::mremap(filled, size_bytes_, size_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, home_);
  OFFLOAD_CHECK(shown == home_) << errno;
  is_shown_ = true;
  was_written_ = writable;
}

void RawCopy::AllowWriting() {
  OFFLOAD_CHECK(::mprotect(home_, size_bytes_, PROT_READ | PROT_WRITE) == 0) << errno;
  was_written_ = true;
}

void RawCopy::StopWriting() {
  OFFLOAD_CHECK(::mprotect(home_, size_bytes_, PROT_READ) == 0) << errno;
}

void RawCopy::Remove() {
  void* const reserved = ::mmap(home_, size_bytes_, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  OFFLOAD_CHECK(reserved == home_) << errno;
  is_shown_ = was_written_ = false;
}

}  // namespace offload::zero3
