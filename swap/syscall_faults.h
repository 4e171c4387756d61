// swap/syscall_faults.h
//
// For tests: makes system calls of this thread fail. A program that links this has functions of the
// C library replaced by ones that forward to them, or fail as a SyscallFaults object says.
//
//   SyscallFaults faults(SyscallFault::kBroken, /*position=*/3);
//   faults.Arm();
//   const absl::Status status = operation();
//   faults.Disarm();  // before anything that must not fail, such as a test's own buffers
//   if (!faults.fired()) …  // the operation makes no third call that can fail so
//
// Only calls that swap, and what it stands on, makes on the thread that armed: transfers of an I/O
// engine have faults of their own (aio/faulty_device.h). close, munmap and the like never fail.
// fsync and fdatasync do nothing when they succeed: nobody cuts the power here, and there are
// thousands of them.
//
// Thread safety: an object belongs to the thread that made it; at most one is armed per thread.
#pragma once

#include <cstdint>
#include <string>

namespace offload::swap {

// What goes wrong; each call answers with the errno that it would have.
enum class SyscallFault {
  kBroken,       // the drive or the file system
  kExhausted,    // descriptors, memory, locks
  kFull,         // no space
  kInterrupted,  // EINTR, only where a caller has to try again
  kRefused,      // no permission, or not supported
  kGone,         // no such file
  kBusy,         // somebody has the lock, or the name
};
inline constexpr int kSyscallFaultCount = 7;
const char* NameOf(SyscallFault fault);

class SyscallFaults {
 public:
  // The `position`-th call (from 1) that can fail so does; with `forever` all later ones, too.
  SyscallFaults(SyscallFault fault, uint64_t position, bool forever = false)
      : fault_(fault), position_(position), forever_(forever) {}
  ~SyscallFaults() { Disarm(); }
  SyscallFaults(const SyscallFaults&) = delete;
  SyscallFaults& operator=(const SyscallFaults&) = delete;

  // Calls are counted and fail between the two; the count goes on where it was.
  void Arm();
  void Disarm();

  uint64_t call_count() const { return call_count_; }
  bool fired() const { return call_count_ >= position_; }
  // The first that failed: "fsync". Empty when none has.
  const std::string& failed_call() const { return failed_call_; }

  // For the replaced functions.
  struct Errors {
    int broken = 0, exhausted = 0, full = 0, interrupted = 0, refused = 0, gone = 0, busy = 0;
  };
  // True, and errno is set, when this call of the current thread has to fail.
  static bool Fails(const char* call, const Errors& errors);

 private:
  const SyscallFault fault_;
  const uint64_t position_;
  const bool forever_;
  uint64_t call_count_ = 0;
  std::string failed_call_;
};

}  // namespace offload::swap
