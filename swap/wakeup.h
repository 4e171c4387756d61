// swap/wakeup.h
//
// One descriptor to wait on for two reasons: the device has completions, or we ourselves have
// something to run in the next Poll(). It stays the same when the device behind it is replaced.
//
// Thread safety: one thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace offload::swap {

class Wakeup {
 public:
  static absl::StatusOr<Wakeup> Make();

  // Watches a device's descriptor; -1 (a device that completes only in Poll) watches nothing.
  absl::Status Watch(int device_fd);
  void Forget(int device_fd);

  // Makes fd() readable until Clear().
  void Signal();
  void Clear();

  // Readable when there may be something to run. Owned by this object.
  int fd() const { return epoll_.get(); }

 private:
  UniqueFd epoll_;
  UniqueFd event_;
};

}  // namespace offload::swap
