// zero3/torch/boundaries.h
//
// What blocks of a model give each other, kept between their forward and their backward: in memory,
// or in a file without a name (offload/vertical.h).
//
// Thread safety: from one thread at a time.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace offload::zero3 {

class Boundaries {
 public:
  // With a folder: tensors on the CPU whose elements lie densely go into a file there, which nobody
  // else sees and which is gone with this object. A folder that cannot hold them: OFD-1201, 1202,
  // 1204 or 1209, from here or from Put() and Get().
  Boundaries(size_t count, const std::string& folder);

  // Keeps number `index` until Drop(). No graph is kept with it.
  void Put(size_t index, const torch::Tensor& tensor);
  // The same values with the same strides, which may not be written into.
  torch::Tensor Get(size_t index) const;
  void Drop(size_t index) { kept_[index] = Kept(); }

 private:
  struct Kept {
    torch::Tensor
        tensor;  // on the meta device, for sizes, strides and type, when it is in the file
    std::optional<uint64_t> offset_bytes;
  };

  UniqueFd file_;  // none: in memory
  std::string folder_;
  uint64_t end_bytes_ = 0;  // of the file
  std::vector<Kept> kept_;
};

}  // namespace offload::zero3
