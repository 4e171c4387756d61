// zero3/torch/throw_status.h
//
// The border between statuses and exceptions: below it absl::Status, above it offload::Error with
// the same text.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload::zero3 {

// Throws offload::Error with the identifier and the text of a failed status; `subject` ("parameter
// 'x'") is added when the text does not name it.
[[noreturn]] void ThrowStatus(const absl::Status& status, std::string_view subject = "");

inline void ThrowIfError(const absl::Status& status, std::string_view subject = "") {
  if (!status.ok()) ThrowStatus(status, subject);
}
template <typename T>
T ValueOrThrow(absl::StatusOr<T> result, std::string_view subject = "") {
  if (!result.ok()) ThrowStatus(result.status(), subject);
  return *std::move(result);
}

}  // namespace offload::zero3
