// base/error.h
//
// Error identifiers (OFD-nnnn) and the one way to make an absl::Status that carries one.
//
// base/errors.def is the registry: identifier, name, canonical code, text, cause, fix. Identifiers
// never change meaning and are never reused: 10xx command and config, 11xx DeepSpeed's
// configuration and interface, 12xx pool and I/O, 13xx
// memory, 14xx checkpoints and formats, 15xx connection and protocol, 16xx attach, 17xx numerics,
// 18xx daemon and system, 19xx internal, 20xx GPUs.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace offload {

enum class ErrorId : int {
#define OFFLOAD_ERROR(id, name, code, text, cause, fix) name = id,
#include "base/errors.def"
#undef OFFLOAD_ERROR
};

struct ErrorInfo {
  ErrorId id;
  absl::StatusCode code;
  std::string_view text;   // what, in a few words
  std::string_view cause;  // why it happens
  std::string_view fix;    // what to do next
};

// Every registered error, in ascending order of its number.
std::span<const ErrorInfo> AllErrors();

// Finds an error by its number (1203 for OFD-1203); null when it is not registered.
const ErrorInfo* FindError(int number);

// Makes "OFD-1203 <what>. <fix of the registry>" with the registered code; `what` names the thing
// and ends with its values and has no full stop.
absl::Status MakeError(ErrorId id, std::string_view what);

// As above, with a fix that fits the case better than the registered one.
absl::Status MakeError(ErrorId id, std::string_view what, std::string_view fix);

// Reads the identifier back from a status made by MakeError, also after its text has crossed a
// process border.
std::optional<ErrorId> ErrorIdOf(const absl::Status& status);

// Names an errno for a message: "EIO (Input/output error)".
std::string ErrnoText(int error_number);

}  // namespace offload
