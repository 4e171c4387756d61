// base/status_macros.h
//
// Early return of failed statuses.
//
//   OFFLOAD_RETURN_IF_ERROR(device->Open());
//   OFFLOAD_ASSIGN_OR_RETURN(const uint64_t size_bytes, ParseByteSize(text));
//
// Both are statements. A left-hand side with a comma outside parentheses has to be wrapped in
// parentheses or given a name.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define OFFLOAD_RETURN_IF_ERROR(expression)                                   \
  do {                                                                        \
    if (::absl::Status offload_status = (expression); !offload_status.ok()) { \
      return offload_status;                                                  \
    }                                                                         \
  } while (false)

#define OFFLOAD_STATUS_CONCAT_INNER(a, b) a##b
#define OFFLOAD_STATUS_CONCAT(a, b) OFFLOAD_STATUS_CONCAT_INNER(a, b)

#define OFFLOAD_ASSIGN_OR_RETURN(lhs, expression) \
  OFFLOAD_ASSIGN_OR_RETURN_INNER(OFFLOAD_STATUS_CONCAT(offload_result_, __LINE__), lhs, expression)

#define OFFLOAD_ASSIGN_OR_RETURN_INNER(result, lhs, expression) \
  auto result = (expression);                                   \
  if (!result.ok()) return std::move(result).status();          \
  lhs = *std::move(result)
