// kernels/dtype.h
//
// The number formats of weights and their gradients, and of what an optimizer computes with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::kernels {

// The numbers are part of the requests of sessions and never change.
enum class Dtype : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat64 = 2, kFloat16 = 3 };
inline constexpr size_t kDtypeCount = 4;

// Of one weight, and of one element of its gradient.
inline constexpr uint32_t DtypeBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return 4;
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
      return 2;
    case Dtype::kFloat64:
      break;
  }
  return 8;
}

// Of one master and of one element of a state: fp64 models are trained in fp64, all others in fp32.
inline constexpr uint32_t MasterBytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

// As torch calls it.
inline constexpr const char* DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kBFloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kFloat64:
      break;
  }
  return "float64";
}

// The bits of an fp16 number; those of a bf16 number are plain uint16_t.
struct Half {
  uint16_t bits;
};

}  // namespace offload::kernels
