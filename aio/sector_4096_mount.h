// aio/sector_4096_mount.h
//
// A file system on a drive of 4 KiB sectors, for tests: ext4 on a loop device, seen by this process
// alone, so that nothing is left behind even when it is killed. Needs root.
//
// Thread safety: none. Only threads that the maker's thread starts later see it.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace offload::aio {

class Sector4096Mount {
 public:
  // The same mount at every call; why there can be none otherwise.
  static const absl::StatusOr<std::string>& Folder();

 private:
  static absl::StatusOr<std::string> Make();
};

}  // namespace offload::aio
