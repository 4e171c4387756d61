// base/check.h
//
// Assertions that stay on in every build. They catch our own mistakes, never a value that came from
// a peer, the kernel, the disk or a user: those are absl::Status.
//
//   OFFLOAD_CHECK(slot < slot_count_) << "slot " << slot << " of " << slot_count_;
//   OFFLOAD_CHECK_OK(device->Start());
//
// A failed one writes file, line, condition and values to stderr and aborts. The condition is
// evaluated once; the values only when it failed.
#pragma once

#include <ostream>
#include <sstream>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload::internal {

// Collects the text of a failed check; its destructor prints it and aborts.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  CheckFailure(const CheckFailure&) = delete;
  CheckFailure& operator=(const CheckFailure&) = delete;
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Makes the type of a streamed expression void, so that both branches of ?: agree; & binds looser
// than <<.
struct Voidify {
  void operator&(std::ostream&) const {}
};

inline absl::Status StatusOf(absl::Status status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace offload::internal

#define OFFLOAD_CHECK(condition)                      \
  (__builtin_expect(static_cast<bool>(condition), 1)) \
      ? static_cast<void>(0)                          \
      : ::offload::internal::Voidify() &              \
            ::offload::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

// The switch keeps an `else` after an unbraced `if` from binding to the one in here.
#define OFFLOAD_CHECK_OK(expression)                                                           \
  switch (0)                                                                                   \
  case 0:                                                                                      \
  default:                                                                                     \
    if (const ::absl::Status offload_check_status = ::offload::internal::StatusOf(expression); \
        offload_check_status.ok()) {                                                           \
    } else /* NOLINT */                                                                        \
      ::offload::internal::CheckFailure(__FILE__, __LINE__, #expression " is OK").stream()     \
          << offload_check_status.ToString() << " "
