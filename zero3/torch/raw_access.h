// zero3/torch/raw_access.h
//
// Serves code that reads or writes offloaded tensors through pointers (data_ptr(), accessors,
// custom kernels, torch::save): a pointer taken from a storage points at the tensor's home, a range
// without access, and the first touch of it brings the bytes there. While an operator uses bytes
// that have no place of their own, they are at home, too.
//
// The touch arrives as SIGSEGV on the thread that made it. It is an ordinary point of that thread's
// program, which holds no lock of ours there, so the handler calls the owner of the range like any
// function; it waits as an operator does. Faults of other addresses go to the program's own
// handler, whenever it was installed: sigaction() and signal() are defined in front of the C
// library's (system_calls.cc) and keep it for that. One that comes another way (a library that is
// not linked against ours, as in Python) stands in front of ours until the next attach or step.
//
// What cannot be served (the engine is closed, the daemon is lost) ends the program with the error
// on standard error: no exception can leave an instruction.
//
// A system call that is given such a pointer would fail with EFAULT: a file would be short. So
// read(), write(), send(), recv() and their like, and fread() and fwrite(), are defined in front of
// the C library's (system_calls.cc) and serve their buffers first.
//
// Thread safety: all functions from any thread; a range's owner is not removed while it serves.
#pragma once

#include <signal.h>

#include <cstddef>

namespace offload::zero3 {

class RawOwner {
 public:
  // Makes the range readable, or writable; throws offload::Error.
  virtual void ServeRaw(bool writes) = 0;

 protected:
  ~RawOwner() = default;
};

// From now on `owner` serves touches of the range.
void AddRawRange(const std::byte* begin, size_t size_bytes, RawOwner* owner);
void RemoveRawRange(const std::byte* begin);
// Puts the handler in front of one that was installed without our knowledge, which then gets what
// is not ours.
void StayInFront();
// sigaction() of SIGSEGV; false while there is no handler of ours.
bool KeepForLater(const struct sigaction* action, struct sigaction* before);
// Serves the range that a buffer is in. A failure is said on standard error. What is served may be
// taken away again before the buffer is used.
enum class Served { kNone, kOurs, kFailed };
Served ServeBuffer(const void* buffer, size_t size_bytes, bool writes);

// The bytes of a tensor at its home: page protection and nothing else. The owner's lock is held.
class RawCopy {
 public:
  RawCopy(std::byte* home, size_t size_bytes);
  RawCopy(const RawCopy&) = delete;
  RawCopy& operator=(const RawCopy&) = delete;

  // Memory of the range's size to fill; Show() puts it at home, where everybody sees all of it at
  // once.
  std::byte* Allocate() const;
  void Show(std::byte* filled, bool writable);
  void Discard(std::byte* filled) const;
  // The same for an operator: bytes that it reads, or a second mapping of shared memory, which is
  // `bytes` of whole pages. False: there can be no more mappings, and home has none.
  void Lend(std::byte* filled);
  bool LendMapped(const std::byte* bytes);
  // Unless something is shown since.
  void EndLending();
  void AllowWriting();
  // Whoever writes is stopped from now on, and serves himself again.
  void StopWriting();
  void Remove();
  // Another range is home from now on. Requires that nothing is shown.
  void MoveHome(std::byte* home) { home_ = home; }

  bool is_shown() const { return is_shown_; }
  bool was_written() const { return was_written_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* home_;
  const size_t size_bytes_;  // whole pages
  bool is_shown_ = false, was_written_ = false;
  bool is_lent_ = false;
};

}  // namespace offload::zero3
