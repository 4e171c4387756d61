// swap/transfer_watch.h
//
// What a store or a scratch file tells of each call that moves bytes, for whoever counts or draws
// them. Its cost without a watch is one look at an empty function.
//
// Thread safety: the thread of the store.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace offload::swap {

struct Transfer {
  enum class Kind : uint8_t { kRead, kWrite, kCommit, kScratchRead, kScratchWrite };
  Kind kind = Kind::kRead;
  // Of reads and writes of extents, which all belong to one tensor of the store; the first of them.
  uint32_t tensor = 0, index = 0;
  // Padding included. Of a read only what has ever been written; of a commit 0.
  uint64_t bytes = 0;
};

// Called before a transfer begins with the function that will be called at its end; what it returns
// is called instead.
using TransferWatch = std::function<std::function<void(absl::Status)>(
    const Transfer& transfer, std::function<void(absl::Status)> done)>;

}  // namespace offload::swap
