// Chooses the implementation.
#include "kernels/update.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "kernels/implementation.h"
#include "kernels/run_checks.h"
#include "kernels/split.h"
#include "kernels/trust_ratio.h"

namespace offload::kernels {
namespace {

constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kReference};

// An unknown name means no limit.
Isa LimitFromEnvironment() {
  const char* limit = std::getenv("OFFLOADD_ISA");
  for (const Isa isa : kBestFirst) {
    if (limit != nullptr && std::string_view(limit) == IsaName(isa)) return isa;
  }
  return Isa::kAvx512;
}

Isa ChooseIsa() {
  const Isa limit = LimitFromEnvironment();
  for (const Isa isa : kBestFirst) {
    if (isa <= limit && IsSupported(isa)) return isa;
  }
  return Isa::kReference;
}

void CheckRun(const OptimizerSpec& optimizer, const Run& run) {
  CheckPlanes(optimizer, run, run.ties_in != nullptr && run.ties_out != nullptr);
}

// Updates piece by piece, with masters that are merged and gradients that are widened and unscaled
// before, as those of an fp32 model: the arithmetic is the same. Pieces end where vectors do, so
// that the tail of the tensor is the last one's.
template <class Function>
void UpdateUnscaled(const Implementation& implementation, const Run& run, float unscale,
                    const Function& update) {
  constexpr size_t kPiece = 2048;
  alignas(64) float master[kPiece], gradient[kPiece];
  const HalfScales scales{static_cast<float>(run.gradient_scale), unscale};
  for (size_t begin = 0; begin < run.count; begin += kPiece) {
    const size_t count = std::min(kPiece, run.count - begin);
    Half* const weight = static_cast<Half*>(run.weight) + begin;
    const Half* const narrow = static_cast<const Half*>(run.gradient) + begin;
    implementation.merge_half(weight, run.half_residual + begin, count, master);
    implementation.unscale_halves(narrow, count, scales, gradient);
    Run piece = run;
    piece.begin += begin;
    piece.count = count;
    for (float*& state : piece.state) state = state == nullptr ? nullptr : state + begin;
    piece.weight_dtype = piece.gradient_dtype = Dtype::kFloat32;
    piece.weight = master;
    piece.gradient = gradient;
    piece.gradient_scale = 1;
    update(piece);
    implementation.split_half(master, count, weight, run.half_residual + begin);
  }
}

}  // namespace

bool IsSupported(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kReference:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
}

Isa BestIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return "reference";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const Implementation& ImplementationOf(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      break;
    case Isa::kAvx2:
      return kAvx2Implementation;
    case Isa::kAvx512:
      return kAvx512Implementation;
  }
  return kReferenceImplementation;
}

void Update(Isa isa, const OptimizerSpec& optimizer, int64_t step, const Run& run) {
  CheckRun(optimizer, run);
  const Implementation& implementation = ImplementationOf(isa);
  const auto& updates =
      run.weight_dtype == Dtype::kFloat64 ? implementation.double_updates : implementation.updates;
  const auto update = updates[optimizer.index()];
  const Coefficients coefficients = CoefficientsOf(optimizer, step, run.weight_dtype);
  const float unscale = UnscaleOf(optimizer, run.gradient_dtype);
  if (unscale == 1) return update(coefficients, run);
  UpdateUnscaled(implementation, run, unscale,
                 [&](const Run& piece) { update(coefficients, piece); });
}

void Update(const OptimizerSpec& optimizer, int64_t step, const Run& run) {
  Update(BestIsa(), optimizer, step, run);
}

float UnscaleOf(const OptimizerSpec& optimizer, Dtype gradient_dtype) {
  if (gradient_dtype != Dtype::kFloat16) return 1;
  for (size_t i = optimizer.values().size(); i-- > 0;) {
    if (std::string_view(optimizer.row().parameters[i].name) == "unscale")
      return static_cast<float>(optimizer.values()[i]);
  }
  return 1;
}

bool NeedsNorms(const OptimizerSpec& optimizer) {
  return kReferenceImplementation.norms[optimizer.index()] != nullptr;
}

void AddNorms(Isa isa, const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms) {
  CheckRun(optimizer, run);
  OFFLOAD_CHECK(NeedsNorms(optimizer)) << optimizer.name();
  const Implementation& implementation = ImplementationOf(isa);
  const auto& functions =
      run.weight_dtype == Dtype::kFloat64 ? implementation.double_norms : implementation.norms;
  functions[optimizer.index()](CoefficientsOf(optimizer, step, run.weight_dtype), run, norms);
}

void AddNorms(const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms) {
  AddNorms(BestIsa(), optimizer, step, run, norms);
}

double TrustRatio(std::span<const Norms> blocks) {
  double weight = 0, update = 0;
  for (const Norms& block : blocks) {
    weight += SumOfLanes(block.weight);
    update += SumOfLanes(block.update);
  }
  return RatioOfSums(weight, update);
}

bool AllFinite(Isa isa, Dtype dtype, const void* values, size_t count) {
  return ImplementationOf(isa).all_finite(dtype, values, count);
}

bool AllFinite(Dtype dtype, const void* values, size_t count) {
  return AllFinite(BestIsa(), dtype, values, count);
}

}  // namespace offload::kernels
