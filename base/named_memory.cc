#include "base/named_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload {

absl::StatusOr<NamedMemory> NamedMemory::Make(size_t size_bytes) {
  UniqueFd fd(memfd_create("offload", MFD_CLOEXEC));
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0)
    return absl::ResourceExhaustedError(
        absl::StrCat("shared memory of ", size_bytes, " B: ", ErrnoText(errno)));
  std::string name = absl::StrCat("/proc/", getpid(), "/fd/", fd.get());
  return Map(std::move(fd), std::move(name), size_bytes);
}

absl::StatusOr<NamedMemory> NamedMemory::Open(const std::string& name, size_t size_bytes) {
  UniqueFd fd(open(name.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) return absl::NotFoundError(absl::StrCat(name, ": ", ErrnoText(errno)));
  struct stat file = {};
  if (fstat(fd.get(), &file) != 0 || static_cast<size_t>(file.st_size) != size_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", file.st_size, " B instead of ", size_bytes));
  }
  return Map(std::move(fd), name, size_bytes);
}

absl::StatusOr<NamedMemory> NamedMemory::Map(UniqueFd fd, std::string name, size_t size_bytes) {
  NamedMemory memory;
  OFFLOAD_ASSIGN_OR_RETURN(memory.region_, MappedRegion::Map(fd.get(), 0, size_bytes,
                                                             PROT_READ | PROT_WRITE, MAP_SHARED));
  memory.fd_ = std::move(fd);
  memory.name_ = std::move(name);
  return memory;
}

}  // namespace offload
