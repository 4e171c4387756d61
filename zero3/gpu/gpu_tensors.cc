#include "zero3/gpu/gpu_tensors.h"

#include "proto/buffer_tensors.h"

namespace offload::zero3 {

std::vector<GpuTensor> GpuTensorsOf(std::span<const proto::Tensor> tensors) {
  std::vector<GpuTensor> needs;
  for (const proto::Tensor& tensor : tensors) {
    const uint64_t size_bytes = proto::IsBufferTensor(tensor.name)
                                    ? 0
                                    : tensor.element_count * proto::DtypeBytes(tensor.dtype);
    needs.push_back({size_bytes, tensor.trainable ? size_bytes : 0});
  }
  return needs;
}

}  // namespace offload::zero3
