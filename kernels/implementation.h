// kernels/implementation.h
//
// What an instruction set has to provide. Internal to kernels/.
//
// Files that are compiled for one instruction set (update_avx2.cc, update_avx512.cc) must define
// nothing that another file may link to by accident: apart from their table they hold templates
// over a type of their own, and call no inline function of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/averaging.h"
#include "kernels/rules/rules.h"
#include "kernels/split.h"
#include "kernels/square_root.h"
#include "kernels/sum.h"
#include "kernels/update.h"

namespace offload::kernels {

using UpdateFunction = void (*)(const Coefficients&, const Run&);
using NormsFunction = void (*)(const Coefficients&, const Run&, Norms*);

// Values are times `scale`, rounded to fp16, and then in fp32 times `unscale`.
struct HalfScales {
  float scale = 1, unscale = 1;
};

struct Implementation {
  UpdateFunction updates[kOptimizerCount];         // in the order of the table
  NormsFunction norms[kOptimizerCount];            // likewise; null where no norms are needed
  UpdateFunction double_updates[kOptimizerCount];  // of fp64 models
  NormsFunction double_norms[kOptimizerCount];
  void (*split)(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo, TieWriter*);
  void (*merge)(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master, TieReader*);
  void (*merge_half)(const Half* weight, const uint32_t* residual, size_t count, float* master);
  void (*split_half)(const float* master, size_t count, Half* weight, uint32_t* residual);
  void (*unscale_halves)(const Half* values, size_t count, const HalfScales&, float* wide);
  bool (*all_finite)(Dtype, const void* values, size_t count);
  bool (*add_parts)(const SumRun&, size_t begin);  // elements [begin, count)
  bool (*takes_roots_by)(RootSequence);            // else roots come from the table
  // By a sequence that it takes roots by; those of subnormal numbers as of normal ones, or nearest.
  void (*take_roots)(RootSequence, bool of_subnormals, const float* values, size_t count,
                     float* roots);
  // kernels/average.h, of masters; any step but kKeep.
  void (*move_average)(const AverageStep&, const float* master, size_t count, float* average);
  void (*move_double_average)(const AverageStep&, const double* master, size_t count,
                              double* average);
};

extern const Implementation kReferenceImplementation;
extern const Implementation kAvx2Implementation;
extern const Implementation kAvx512Implementation;

const Implementation& ImplementationOf(Isa isa);

// The scalar versions, which also say what the vector versions must compute.
void SplitReference(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo,
                    TieWriter* ties);
void MergeReference(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
                    TieReader* ties);
void UnscaleHalvesReference(const Half* values, size_t count, const HalfScales& scales,
                            float* wide);
void MoveAverageReference(const AverageStep& step, const float* master, size_t count,
                          float* average);
void MoveAverageReference(const AverageStep& step, const double* master, size_t count,
                          double* average);
bool AddPartsReference(const SumRun& run, size_t begin);

}  // namespace offload::kernels
