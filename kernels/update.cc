// Chooses the implementation.
#include "kernels/update.h"

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "kernels/implementation.h"

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
  OFFLOAD_CHECK(run.count <= run.tensor_count && run.begin <= run.tensor_count - run.count)
      << "run of " << run.count << " elements at " << run.begin << " of " << run.tensor_count;
  OFFLOAD_CHECK(run.weight_dtype == Dtype::kFloat32 ||
                (run.residual != nullptr && run.ties_in != nullptr && run.ties_out != nullptr))
      << "a bf16 run needs its residual and tie bits";
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    OFFLOAD_CHECK(run.count == 0 || run.state[i] != nullptr || optimizer.Plane(i) == nullptr)
        << optimizer.name() << " needs " << optimizer.Plane(i)->name;
  }
}

}  // namespace

bool IsSupported(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
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
  Coefficients coefficients;
  optimizer.row().prepare(optimizer.values().data(), step, &coefficients);
  ImplementationOf(isa).updates[optimizer.index()](coefficients, run);
}

void Update(const OptimizerSpec& optimizer, int64_t step, const Run& run) {
  Update(BestIsa(), optimizer, step, run);
}

bool NeedsNorms(const OptimizerSpec& optimizer) {
  return kReferenceImplementation.norms[optimizer.index()] != nullptr;
}

void AddNorms(Isa isa, const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms) {
  CheckRun(optimizer, run);
  OFFLOAD_CHECK(NeedsNorms(optimizer)) << optimizer.name();
  Coefficients coefficients;
  optimizer.row().prepare(optimizer.values().data(), step, &coefficients);
  ImplementationOf(isa).norms[optimizer.index()](coefficients, run, norms);
}

void AddNorms(const OptimizerSpec& optimizer, int64_t step, const Run& run, Norms* norms) {
  AddNorms(BestIsa(), optimizer, step, run, norms);
}

double TrustRatio(std::span<const Norms> blocks) {
  const auto sum = [](const double(&lanes)[Norms::kLanes]) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
           ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  };
  double weight = 0, update = 0;
  for (const Norms& block : blocks) {
    weight += sum(block.weight);
    update += sum(block.update);
  }
  return weight > 0 && update > 0 ? std::sqrt(weight) / std::sqrt(update) : 1;
}

bool AllFinite(Isa isa, Dtype dtype, const void* values, size_t count) {
  return ImplementationOf(isa).all_finite(dtype, values, count);
}

bool AllFinite(Dtype dtype, const void* values, size_t count) {
  return AllFinite(BestIsa(), dtype, values, count);
}

}  // namespace offload::kernels
