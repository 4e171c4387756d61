// swap/unmounted_drive.h
//
// Whether a pool is to be on a drive that is not mounted: a job that is there would not be found,
// and a new one would begin in the bare mount point, on another drive.
//
// Thread safety: UnmountedAbove() is pure.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace offload::swap {

// The deepest mount point at or above an absolute, canonical path that `fstab` names, where nothing
// is mounted there or below, up to the path. `fstab` and `mounts` are texts as fstab(5) has them:
// of /etc/fstab and /proc/self/mounts.
std::optional<std::string> UnmountedAbove(const std::string& path, const std::string& fstab,
                                          const std::string& mounts);

// OFD-1201 for such a pool on this machine, by name. A machine that does not tell has none.
absl::Status CheckIsMounted(const std::string& pool);

}  // namespace offload::swap
