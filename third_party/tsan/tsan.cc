// Tells the thread sanitizer what the Debian packages of Abseil and gRPC do not: they are not
// compiled for it, so that it sees neither who waited for whom at an absl::Mutex nor what went
// through gRPC's queues. Abseil's functions are defined here once more, for the whole program and
// its libraries; they call the real ones. The mangled names are those of Debian's Abseil; one that
// it does not have ends the program at its first use.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace {

template <class Function>
Function* Real(const char* symbol) {
  void* const function = dlsym(RTLD_NEXT, symbol);
  if (function == nullptr) {
    std::fprintf(stderr, "no %s behind the thread sanitizer\n", symbol);
    std::abort();
  }
  return reinterpret_cast<Function*>(function);
}

}  // namespace

// Defines a function under the name of a member of Abseil's, with the object as its first argument.
#define OF_ABSEIL(result, name, symbol, ...)               \
  extern "C" result name(__VA_ARGS__) __asm__(symbol);     \
  namespace {                                              \
  auto Real##name() {                                      \
    static const auto real = Real<decltype(name)>(symbol); \
    return real;                                           \
  }                                                        \
  }                                                        \
  extern "C" result name(__VA_ARGS__)

// ---- Mutex -------------------------------------------------------------------------------------

OF_ABSEIL(void, Lock, "_ZN4absl7debian35Mutex4LockEv", absl::Mutex* mutex) {
  RealLock()(mutex);
  __tsan_acquire(mutex);
}
OF_ABSEIL(void, Unlock, "_ZN4absl7debian35Mutex6UnlockEv", absl::Mutex* mutex) {
  __tsan_release(mutex);
  RealUnlock()(mutex);
}
OF_ABSEIL(bool, TryLock, "_ZN4absl7debian35Mutex7TryLockEv", absl::Mutex* mutex) {
  const bool is_locked = RealTryLock()(mutex);
  if (is_locked) __tsan_acquire(mutex);
  return is_locked;
}
OF_ABSEIL(void, ReaderLock, "_ZN4absl7debian35Mutex10ReaderLockEv", absl::Mutex* mutex) {
  RealReaderLock()(mutex);
  __tsan_acquire(mutex);
}
OF_ABSEIL(void, ReaderUnlock, "_ZN4absl7debian35Mutex12ReaderUnlockEv", absl::Mutex* mutex) {
  __tsan_release(mutex);
  RealReaderUnlock()(mutex);
}
OF_ABSEIL(void, LockWhen, "_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE", absl::Mutex* mutex,
          const absl::Condition& condition) {
  RealLockWhen()(mutex, condition);
  __tsan_acquire(mutex);
}
OF_ABSEIL(void, Await, "_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE", absl::Mutex* mutex,
          const absl::Condition& condition) {
  __tsan_release(mutex);
  RealAwait()(mutex, condition);
  __tsan_acquire(mutex);
}
OF_ABSEIL(bool, AwaitWithTimeout,
          "_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE",
          absl::Mutex* mutex, const absl::Condition& condition, absl::Duration timeout) {
  __tsan_release(mutex);
  const bool holds = RealAwaitWithTimeout()(mutex, condition, timeout);
  __tsan_acquire(mutex);
  return holds;
}
OF_ABSEIL(bool, AwaitWithDeadline,
          "_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE",
          absl::Mutex* mutex, const absl::Condition& condition, absl::Time deadline) {
  __tsan_release(mutex);
  const bool holds = RealAwaitWithDeadline()(mutex, condition, deadline);
  __tsan_acquire(mutex);
  return holds;
}

// ---- CondVar -----------------------------------------------------------------------------------

OF_ABSEIL(void, Wait, "_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE", absl::CondVar* changed,
          absl::Mutex* mutex) {
  __tsan_release(mutex);
  RealWait()(changed, mutex);
  __tsan_acquire(mutex);
}
OF_ABSEIL(bool, WaitWithTimeout,
          "_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE",
          absl::CondVar* changed, absl::Mutex* mutex, absl::Duration timeout) {
  __tsan_release(mutex);
  const bool is_late = RealWaitWithTimeout()(changed, mutex, timeout);
  __tsan_acquire(mutex);
  return is_late;
}
OF_ABSEIL(bool, WaitWithDeadline,
          "_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE",
          absl::CondVar* changed, absl::Mutex* mutex, absl::Time deadline) {
  __tsan_release(mutex);
  const bool is_late = RealWaitWithDeadline()(changed, mutex, deadline);
  __tsan_acquire(mutex);
  return is_late;
}

// ---- Notification ------------------------------------------------------------------------------

OF_ABSEIL(void, Notify, "_ZN4absl7debian312Notification6NotifyEv", absl::Notification* event) {
  __tsan_release(event);
  RealNotify()(event);
}
OF_ABSEIL(void, WaitForNotification, "_ZNK4absl7debian312Notification19WaitForNotificationEv",
          const absl::Notification* event) {
  RealWaitForNotification()(event);
  __tsan_acquire(const_cast<absl::Notification*>(event));
}
OF_ABSEIL(bool, WaitForNotificationWithTimeout,
          "_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
          const absl::Notification* event, absl::Duration timeout) {
  const bool is_there = RealWaitForNotificationWithTimeout()(event, timeout);
  if (is_there) __tsan_acquire(const_cast<absl::Notification*>(event));
  return is_there;
}

// ---- Status ------------------------------------------------------------------------------------

// The last one who lets a status go frees it.
OF_ABSEIL(void, UnrefNonInlined, "_ZN4absl7debian36Status15UnrefNonInlinedEm", uintptr_t rep) {
  __tsan_release(reinterpret_cast<void*>(rep));
  __tsan_acquire(reinterpret_cast<void*>(rep));
  RealUnrefNonInlined()(rep);
}

// ---- Reports that are not ours -----------------------------------------------------------------

// gRPC hands calls from thread to thread by atomics that the sanitizer does not see, and with them
// what is sent and received. A frame of it anywhere in a stack is enough, so that what a handler of
// a call does is seen only in tests that call it without gRPC. Its threads are not all joined when
// the process ends. Functions that a Condition calls run under their mutex, also in the threads
// that let it go, within Unlock(). Abseil's own record of the order in which locks are taken has a
// spin lock of its own.
extern "C" const char* __tsan_default_suppressions() {
  return "race:^grpc::\n"
         "race:^grpc_core::\n"
         "race:^grpc_\n"
         "thread:^grpc_core::\n"
         "race:^bool absl::*Condition::\n"
         "race:^absl::*::GraphCycles::\n";
}
