// swap/named_files.h
//
// The files of an open store, and what to do when somebody removes one meanwhile (rm, in place of
// offloadctl rm): it lives on without a name, and would be gone with its last descriptor. No
// system call gives such a file a name again, so its bytes are written into a new one.
//
// Internal to swap/. Thread safety: none.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"

namespace offload::swap {

class NamedFiles {
 public:
  // `name` in `pool` is what `fd`, which is duplicated, has been opened as, or will be published
  // as.
  absl::Status Add(int fd, std::string pool, std::string name);

  // OFD-1207, with what saves them, when some have no name any more.
  absl::Status Check() const;

  // Writes those anew under their names. A pool that is gone, too, is not made: whoever removes a
  // folder may well mean it, and who does not makes it again, as Check() says. Nobody may write to
  // them meanwhile. Where another file has the name by now, under that name with ".saved" behind
  // it. Blocking. OFD-1201, OFD-1202, OFD-1204, OFD-1209: what is not saved is gone with this
  // object and the device.
  absl::Status Save(const std::string& job) const;

 private:
  struct File {
    UniqueFd fd;
    std::string pool, name;
  };
  static bool IsRemoved(const File& file);
  static absl::Status SaveOne(const File& file, const std::string& job);

  std::vector<File> files_;
};

}  // namespace offload::swap
