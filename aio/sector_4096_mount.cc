#include "aio/sector_4096_mount.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::aio {
namespace {

// The first line that a command prints.
absl::StatusOr<std::string> Output(const std::string& command) {
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return absl::UnavailableError(absl::StrCat(command, ": ", ErrnoText(errno)));
  std::array<char, 512> line = {};
  std::string text = std::fgets(line.data(), line.size(), pipe) != nullptr ? line.data() : "";
  if (!text.empty() && text.back() == '\n') text.pop_back();
  if (::pclose(pipe) == 0) return text;
  return absl::UnavailableError(absl::StrCat(command, ": ", text));
}

}  // namespace

const absl::StatusOr<std::string>& Sector4096Mount::Folder() {
  static const absl::StatusOr<std::string> folder = Make();
  return folder;
}

// The device is detached while it is mounted: the kernel does it with the last unmount, which is
// the end of this process.
absl::StatusOr<std::string> Sector4096Mount::Make() {
  if (::geteuid() != 0) return absl::UnavailableError("a loop mount needs root");
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return absl::UnavailableError(absl::StrCat("no mounts of our own: ", ErrnoText(errno)));
  }
  const char* const scratch = std::getenv("TEST_TMPDIR");
  std::string folder = absl::StrCat(scratch == nullptr ? "." : scratch, "/sector4096_XXXXXX");
  if (::mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat(folder, ": ", ErrnoText(errno)));
  }
  const std::string image = absl::StrCat(folder, "/image");
  OFFLOAD_RETURN_IF_ERROR(Output(absl::StrCat("truncate -s 96M ", image)).status());
  OFFLOAD_ASSIGN_OR_RETURN(
      const std::string device,
      Output(absl::StrCat("losetup -f --show --direct-io=on --sector-size 4096 ", image)));
  const std::string mount_point = absl::StrCat(folder, "/mount");
  const auto mounted = Output(absl::StrCat("mkfs.ext4 -q -b 4096 ", device, " && mkdir ",
                                           mount_point, " && mount ", device, " ", mount_point));
  const auto detached = Output(absl::StrCat("losetup -d ", device));
  const auto removed = Output(absl::StrCat("rm ", image));
  for (const auto& outcome : {mounted, detached, removed})
    OFFLOAD_RETURN_IF_ERROR(outcome.status());
  return mount_point;
}

}  // namespace offload::aio
