// offloadd/shared_square_roots.h
//
// The square roots that trainers say (kernels/square_root.h), each table once: all trainers of a
// node say the same one, and it is 4 MiB long. A table lives as long as a job has it.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/square_root.h"

namespace offload::daemon {

class SharedSquareRoots {
 public:
  // Null when these bytes are no table.
  std::shared_ptr<const kernels::SquareRoots> Share(std::string_view bytes);

 private:
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<const kernels::SquareRoots>> tables_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace offload::daemon
