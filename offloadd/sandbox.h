// offloadd/sandbox.h
//
// What the daemon gives up, so that whoever makes it run other code than ours gains little.
//
//   DropPrivileges          before the first thread: no new privileges, no capability in any set.
//   RestrictSystemCalls     when everything is set up: all threads, and those that they start, may
//                           only do what serving takes. No program is run, no process forked, no
//                           socket but AF_UNIX made and none connected or bound, nothing traced,
//                           mounted or made executable.
//
// Files are opened with the rights of the daemon's user and nothing more, also by root: without
// CAP_DAC_OVERRIDE root opens what root owns. The list is of system calls: what io_uring does in
// the kernel is not seen by it and is bounded by the rings' own restrictions (aio).
//
// Thread safety: main thread, once each.
#pragma once

#include <optional>
#include <string_view>

#include "absl/status/status.h"

namespace offload::daemon {

enum class SandboxMode {
  kOff,     // for debuggers and sanitizers
  kOn,      // a forbidden system call fails with EPERM
  kStrict,  // a forbidden system call ends the process (SIGSYS); what cannot be set up is an error
};
// "off", "on" or "strict".
std::optional<SandboxMode> ParseSandboxMode(std::string_view text);

// Errors say which part this kernel or container refuses; the other parts are in force then.
absl::Status DropPrivileges();
// Requires a mode other than kOff.
absl::Status RestrictSystemCalls(SandboxMode mode);

}  // namespace offload::daemon
