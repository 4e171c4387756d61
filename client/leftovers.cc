#include "client/leftovers.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "proto/socket_directory.h"

namespace offload::client {
namespace {

constexpr std::string_view kPrefix = "offloadd-";
constexpr std::string_view kRanksPrefix = "offloadd-ranks-";
constexpr size_t kRandomLetters = 6;
constexpr char kSocketName[] = "/offloadd.sock";

// A private daemon's, or that of the ranks of a launch.
bool HasOurName(const std::string& name) {
  if (name.starts_with(kRanksPrefix)) return true;
  return name.starts_with(kPrefix) && name.size() == kPrefix.size() + kRandomLetters &&
         std::all_of(name.begin() + kPrefix.size(), name.end(),
                     [](unsigned char letter) { return std::isalnum(letter) != 0; });
}

bool IsOursAndOld(const std::string& directory, std::chrono::seconds minimum_age) {
  struct stat status = {};
  if (::lstat(directory.c_str(), &status) != 0) return false;
  // time() may be a tick behind what a file system writes.
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() &&
         now.tv_sec - status.st_mtime >= minimum_age.count();
}

// Connects with another socket type than the daemon's: the kernel refuses either way, with
// ECONNREFUSED when no process has the socket bound, and a daemon that lives notices nothing.
bool IsUnbound(const std::string& socket_path) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (socket_path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size() + 1);
  const UniqueFd probe(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return false;
  const int result =
      ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  return result != 0 && (errno == ECONNREFUSED || errno == ENOENT);
}

}  // namespace

void RemoveLeftovers(const std::string& parent, std::chrono::seconds minimum_age) {
  std::error_code error;
  std::filesystem::directory_iterator entries(parent, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string directory = entries->path();
    if (!HasOurName(entries->path().filename()) || !IsOursAndOld(directory, minimum_age)) continue;
    if (IsUnbound(directory + kSocketName)) proto::RemoveSocketDirectory(directory);
  }
}

}  // namespace offload::client
