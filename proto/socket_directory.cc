#include "proto/socket_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace offload::proto {
namespace {

constexpr const char* kSocketNames[] = {"/offloadd.sock", "/control.sock", "/metrics.sock"};

UniqueFd Open(const std::string& directory) {
  return UniqueFd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

}  // namespace

bool LockSocketDirectory(const UniqueFd& opened, const std::string& directory) {
  struct stat ours = {}, there = {};
  return opened.valid() && ::flock(opened.get(), LOCK_EX | LOCK_NB) == 0 &&
         ::fstat(opened.get(), &ours) == 0 && ::stat(directory.c_str(), &there) == 0 &&
         ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
}

void RemoveSocketDirectory(const std::string& directory) {
  const UniqueFd opened = Open(directory);
  if (!LockSocketDirectory(opened, directory)) return;
  for (const char* name : kSocketNames) ::unlink((directory + name).c_str());
  ::rmdir(directory.c_str());
}

void RemoveEmptySocketDirectory(const std::string& directory) {
  const UniqueFd opened = Open(directory);
  if (LockSocketDirectory(opened, directory)) ::rmdir(directory.c_str());
}

}  // namespace offload::proto
