// aio/probe.h
//
// What this machine and a folder on it can do for us: every engine is tried with a real write and
// read of a scratch file without a name. For people who ask why something is slow or refused;
// OpenDevice needs none of it.
//
// Thread safety: pure; blocks for some milliseconds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device.h"

namespace offload::aio {

struct EngineCapability {
  Engine engine;
  absl::Status status;             // OK: what was written was read back
  bool registers_buffers = false;  // within the limit of locked memory
};

struct Capabilities {
  std::string kernel_release;
  int uring_disabled = 0;                 // sysctl kernel.io_uring_disabled; 0 where there is none
  bool has_seccomp_filter = false;        // what it forbids shows in `engines`
  std::optional<uint64_t> memlock_bytes;  // none: no limit
  bool ignores_memlock = false;           // CAP_IPC_LOCK
  uint64_t aio_requests_free = 0;         // fs.aio-max-nr less those in use, of all processes
  Geometry geometry;                      // of the scratch file
  bool geometry_is_known = false;  // the kernel told (STATX_DIOALIGN: 6.1); else 4096 is used
  std::vector<EngineCapability> engines;  // in the order in which OpenDevice tries them
};

// Tries a file in `folder`, or one in memory when that is "". Fails only where no file can be made.
absl::StatusOr<Capabilities> ProbeCapabilities(const std::string& folder);

}  // namespace offload::aio
