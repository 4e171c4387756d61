// tools/command.h
//
// What a command of offloadctl is: flags in, an answer out. Commands neither print nor exit; the
// main program turns their answer into text or into one JSON object, and their errors into exit
// codes.
//
// Thread safety: none needed; one command runs per process.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
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
  kDamaged = 6,  // data on the drive
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

class Command {
 public:
  virtual ~Command() = default;
  virtual const char* name() const = 0;
  virtual const char* summary() const = 0;   // a line without a full stop
  virtual const char* examples() const = 0;  // lines that --help starts with
  virtual void DefineFlags(CLI::App& app) = 0;
  // Runs once, after the flags are parsed. A failed status is printed and decides the exit code.
  virtual absl::StatusOr<Answer> Run() = 0;
};

std::unique_ptr<Command> MakeDoctorCommand();  // doctor.cc
std::unique_ptr<Command> MakePlanCommand();    // plan.cc
std::unique_ptr<Command> MakeStatusCommand();  // status.cc
std::unique_ptr<Command> MakeTopCommand();     // top.cc
std::unique_ptr<Command> MakeReportCommand();  // report.cc
std::unique_ptr<Command> MakeListCommand();    // jobs.cc
std::unique_ptr<Command> MakeRemoveCommand();  // jobs.cc
std::unique_ptr<Command> MakeFsckCommand();    // fsck.cc
std::unique_ptr<Command> MakeSnapshotCommand();
std::unique_ptr<Command> MakeExportCommand();   // export.cc
std::unique_ptr<Command> MakeImportCommand();   // import.cc
std::unique_ptr<Command> MakeConfigCommand();   // config.cc
std::unique_ptr<Command> MakeRunCommand();      // run.cc
std::unique_ptr<Command> MakeExplainCommand();  // explain.cc
std::unique_ptr<Command> MakeVersionCommand();  // explain.cc

}  // namespace offload::tools
