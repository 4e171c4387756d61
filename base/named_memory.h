// base/named_memory.h
//
// Memory that processes of one user share by a name: for as long as the one that made it lives and
// keeps it, others may map it, too. Nothing is left in a file system when they end.
//
// Thread safety: the object as a pointer; the memory is the callers' business.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/mapped_region.h"
#include "base/unique_fd.h"

namespace offload {

class NamedMemory {
 public:
  // New memory, zeroes.
  static absl::StatusOr<NamedMemory> Make(size_t size_bytes);
  // Maps what another one made, of that size. NOT_FOUND when it is not there any more, or cannot be
  // seen from here (another user, another PID namespace), INVALID_ARGUMENT for another size.
  static absl::StatusOr<NamedMemory> Open(const std::string& name, size_t size_bytes);

  NamedMemory() = default;

  // For Open(), in any process.
  const std::string& name() const { return name_; }
  std::span<std::byte> span() const { return region_.span(); }

 private:
  static absl::StatusOr<NamedMemory> Map(UniqueFd fd, std::string name, size_t size_bytes);

  UniqueFd fd_;
  std::string name_;
  MappedRegion region_;
};

}  // namespace offload
