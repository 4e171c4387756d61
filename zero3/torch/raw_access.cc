#include "zero3/torch/raw_access.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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

// ---- Handlers of others -------------------------------------------------------------------------

// The program's own, newest last. One that was put in front of ours later is called after it, and
// may call the one that it had found, which is ours again: the next older one's turn.
struct Handlers {
  static constexpr int kMax = 8;
  std::mutex mutex;
  std::array<struct sigaction, kMax> all = {};
  std::atomic<int> count = 0;
};
Handlers& AllHandlers() {
  static auto* const kHandlers = new Handlers;
  return *kHandlers;
}

// libc's, and the kernel's: ours stands in front of it for the program.
int RealSigaction(int signal, const struct sigaction* action, struct sigaction* before) {
  using Function = int (*)(int, const struct sigaction*, struct sigaction*);
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "sigaction"));
  return next(signal, action, before);
}

// How many handlers have had a signal is noted in a field that the kernel leaves zero, since the
// chain is one of plain calls.
constexpr int kTurnMark = 0x0ff1'0ad0;

void CallHandlerBefore(int signal, siginfo_t* info, void* context) {
  Handlers& handlers = AllHandlers();
  const int turns = (info->si_errno & ~0xf) == kTurnMark ? info->si_errno & 0xf : 0;
  const int at = handlers.count.load(std::memory_order_acquire) - 1 - turns;
  struct sigaction before = {};
  before.sa_handler = SIG_DFL;
  if (at >= 0) before = handlers.all[at];
  info->si_errno = kTurnMark | (turns + 1);
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    return before.sa_sigaction(signal, info, context);
  if (before.sa_handler == SIG_IGN && info->si_code <= 0) return;  // kill() and raise()
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN && before.sa_handler != nullptr)
    return before.sa_handler(signal);
  before.sa_handler = SIG_DFL;
  RealSigaction(signal, &before, nullptr);
  // The instruction faults again, without us; what was sent has to be sent again.
  if (info->si_code <= 0) ::raise(signal);
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

struct sigaction OwnAction() {
  struct sigaction action = {};
  action.sa_sigaction = &OnFault;
  // On the stack of the program: an alternate one (Python's faulthandler has 16 KiB) is too small.
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigemptyset(&action.sa_mask);
  return action;
}

bool IsOwn(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &OnFault;
}

// Every one is kept while others may call it. Of more than there is room for the newest counts.
void AddHandler(const struct sigaction& action) {
  Handlers& handlers = AllHandlers();
  const int count = handlers.count.load(std::memory_order_relaxed);
  if (count > 0 && handlers.all[count - 1].sa_sigaction == action.sa_sigaction) return;
  handlers.all[std::min(count, Handlers::kMax - 1)] = action;
  handlers.count.store(std::min(count + 1, Handlers::kMax), std::memory_order_release);
}

std::atomic<bool> is_installed = false;

}  // namespace

void StayInFront() {
  if (!is_installed.load(std::memory_order_acquire)) return;
  struct sigaction now = {};
  if (RealSigaction(SIGSEGV, nullptr, &now) != 0 || IsOwn(now)) return;
  Handlers& handlers = AllHandlers();
  std::lock_guard lock(handlers.mutex);
  const struct sigaction own = OwnAction();
  OFFLOAD_CHECK(RealSigaction(SIGSEGV, &own, &now) == 0) << errno;
  if (!IsOwn(now)) AddHandler(now);
}

bool KeepForLater(const struct sigaction* action, struct sigaction* before) {
  if (!is_installed.load(std::memory_order_acquire)) return false;
  StayInFront();
  Handlers& handlers = AllHandlers();
  std::lock_guard lock(handlers.mutex);
  const int count = handlers.count.load(std::memory_order_relaxed);
  const struct sigaction newest = handlers.all[count - 1];
  // The program sees its own, and has no way to call ours: its one takes the other's place.
  if (action != nullptr) handlers.all[count - 1] = *action;
  if (before != nullptr) *before = newest;
  return true;
}

void AddRawRange(const std::byte* begin, size_t size_bytes, RawOwner* owner) {
  static std::once_flag installed;
  std::call_once(installed, [] {
    struct sigaction before = {};
    const struct sigaction own = OwnAction();
    OFFLOAD_CHECK(RealSigaction(SIGSEGV, &own, &before) == 0) << errno;
    AddHandler(before);
    is_installed.store(true, std::memory_order_release);
  });
  StayInFront();
  Ranges& ranges = AllRanges();
  std::lock_guard lock(ranges.mutex);
  ranges.by_begin[begin] = {.size_bytes = WholePages(size_bytes), .owner = owner};
  const auto address = reinterpret_cast<uintptr_t>(begin);
  lowest = std::min(lowest.load(), address);
  highest = std::max(highest.load(), address + WholePages(size_bytes));
}

Served ServeBuffer(const void* buffer, size_t size_bytes, bool writes) {
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  if (size_bytes == 0 || address >= highest.load(std::memory_order_relaxed) ||
      address + size_bytes <= lowest.load(std::memory_order_relaxed) || serving)
    return Served::kNone;
  RawOwner* const owner = OwnerOf(static_cast<const std::byte*>(buffer));
  if (owner == nullptr) return Served::kNone;
  serving = true;
  Served served = Served::kOurs;
  try {
    owner->ServeRaw(writes);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "a system call's buffer cannot be served: %s\n", failure.what());
    served = Served::kFailed;
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
  is_lent_ = false;
  was_written_ = writable;
}

void RawCopy::Lend(std::byte* filled) {
  Show(filled, /*writable=*/false);
  is_shown_ = false;
  is_lent_ = true;
}

bool RawCopy::LendMapped(const std::byte* bytes) {
  // Of none of its bytes: what is mapped stays where it is.
  is_lent_ = ::mremap(const_cast<std::byte*>(bytes), 0, size_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED,
                      home_) == home_;
  if (!is_lent_) Remove();
  return is_lent_;
}

void RawCopy::EndLending() {
  if (is_lent_) Remove();
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
  is_shown_ = was_written_ = is_lent_ = false;
}

}  // namespace offload::zero3
