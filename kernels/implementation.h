// kernels/implementation.h
//
// What an instruction set has to provide, and the constants of an update as fp32 numbers. Internal
// to kernels/.
//
// Files that are compiled for one instruction set (update_avx2.cc, update_avx512.cc) must define
// nothing that another file may link to by accident: apart from their table they hold templates
// over a type of their own, and call no inline function of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/split.h"
#include "kernels/sum.h"
#include "kernels/update.h"

namespace offload::kernels {

// AdamWParameters, computed in double as torch does and rounded to fp32 once.
struct AdamWCoefficients {
  float decay;  // 1 - lr*weight_decay
  float beta1;
  float exp_avg_weight;  // 1 - beta1
  float beta2;
  float exp_avg_sq_weight;      // 1 - beta2
  float bias_correction2_sqrt;  // sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  bool is_lerp;     // exp_avg moves by lerp; else it is multiplied, then added to
  bool has_tail;    // the last tensor_count mod 8 elements round exp_avg_sq in another order
  bool maximize;
};

// SgdParameters, likewise.
struct SgdCoefficients {
  float lr, momentum, weight_decay;
  float gradient_weight;  // 1 - dampening
  bool has_momentum, has_weight_decay, nesterov, maximize, first;
};

AdamWCoefficients CoefficientsOf(const AdamWParameters& parameters);
SgdCoefficients CoefficientsOf(const SgdParameters& parameters);

struct Implementation {
  void (*adamw)(const AdamWCoefficients&, const Run&);
  void (*sgd)(const SgdCoefficients&, const Run&);
  void (*split)(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo, TieWriter*);
  void (*merge)(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master, TieReader*);
  bool (*all_finite)(Dtype, const void* values, size_t count);
  bool (*add_parts)(const SumRun&, size_t begin);  // elements [begin, count)
};

extern const Implementation kReferenceImplementation;
extern const Implementation kAvx2Implementation;
extern const Implementation kAvx512Implementation;

const Implementation& ImplementationOf(Isa isa);

// How many elements of the run lie before the tail of its tensor.
size_t CountBeforeTail(const Run& run);

// The scalar versions, which also say what the vector versions must compute.
void SplitReference(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo,
                    TieWriter* ties);
void MergeReference(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
                    TieReader* ties);
bool AddPartsReference(const SumRun& run, size_t begin);

}  // namespace offload::kernels
