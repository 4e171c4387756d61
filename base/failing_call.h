// base/failing_call.h
//
// For tests: makes a function of the C library fail. A program that links this has those functions
// replaced by ones that forward to them, or fail as the one FailingCall that exists says.
//
//   const FailingCall failing("ftruncate", ENOSPC);
//   EXPECT_FALSE(SharedMemory::Create("name", 4096).ok());
//   EXPECT_EQ(failing.failures(), 1);  // the call was made at all
//
// Calls of all threads count. A name that is not replaced never fails: ask failures().
//
// Thread safety: one object at a time, whose calls may come from any thread.
#pragma once

namespace offload {

class FailingCall {
 public:
  struct Which {
    int after = 0;  // so many calls are forwarded first
    int times = 1;  // then so many fail
  };
  // `name` is a literal.
  FailingCall(const char* name, int error_number, Which which);
  FailingCall(const char* name, int error_number) : FailingCall(name, error_number, Which()) {}
  ~FailingCall();
  FailingCall(const FailingCall&) = delete;
  FailingCall& operator=(const FailingCall&) = delete;

  // How many have failed.
  int failures() const;
};

}  // namespace offload
