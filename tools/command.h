// tools/command.h
//
// What a command of offloadctl is: flags in, an answer out. Commands neither print nor exit; the
// main program turns their answer into text or into one JSON object, and their errors into exit
// codes.
//
// Thread safety: none needed; one command runs per process.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

#include "absl/status/statusor.h"
#include "tools/answer.h"

namespace offload::tools {

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
std::unique_ptr<Command> MakeExportCommand();      // export.cc
std::unique_ptr<Command> MakeImportCommand();      // import.cc
std::unique_ptr<Command> MakeConfigCommand();      // config.cc
std::unique_ptr<Command> MakeRunCommand();         // run.cc
std::unique_ptr<Command> MakeExplainCommand();     // explain.cc
std::unique_ptr<Command> MakeCompletionCommand();  // completion.cc
std::unique_ptr<Command> MakeVersionCommand();     // explain.cc

}  // namespace offload::tools
