// tools/answer.h
//
// What a command of offloadctl has found: JSON, and a text for people.
//
// Thread safety: as a struct.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload::tools {

enum ExitCode : int {
  kDone = 0,
  kFailed = 1,
  kUsage = 2,        // a flag, an argument or a configuration is wrong
  kDoesNotFit = 3,   // or a check failed
  kUnreachable = 4,  // no daemon answers
  kTimeout = 5,
  kDamaged = 6,       // data on the drive
  kNotStarted = 125,  // of `run`, whose codes are otherwise the program's
};

// The exit code that a failed status stands for.
ExitCode ExitCodeOf(const absl::Status& status);

using Json = nlohmann::ordered_json;

struct Answer {
  Json data =
      Json::object();    // after schema_version and command; bytes and seconds are plain numbers
  std::string text;      // the same for people, on stdout
  std::string advice;    // one line on stderr: what to do next
  absl::Status problem;  // on stderr, too: the command has an answer and yet did not succeed
  ExitCode exit_code = kDone;
  // Of a command that goes on: waits and makes the next answer. Asked again and again where a
  // terminal can be redrawn, and never with --json.
  std::function<absl::StatusOr<Answer>()> next;
};

}  // namespace offload::tools
