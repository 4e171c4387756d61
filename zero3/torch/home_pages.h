// zero3/torch/home_pages.h
//
// Memory of whole pages for a tensor that may be attached later: its range becomes the tensor's
// home (raw_access.h) then, so that pointers which were taken before stay good.
//
// Thread safety: none; the tensors are the caller's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>

#include "base/mapped_region.h"

namespace offload::zero3 {

class HomePages {
 public:
  // Moves the bytes of a tensor of the host there, if they are in torch's ordinary memory. Nobody
  // may have a pointer to them yet.
  static void Give(const at::Tensor& tensor);

  // The range in which a storage has its bytes; null when they are elsewhere. Whoever has it keeps
  // it, without access once the bytes are freed.
  static std::shared_ptr<MappedRegion> Of(c10::StorageImpl& storage);
};

}  // namespace offload::zero3
