#include "kernels/sum.h"

#include <cstring>

#include "base/check.h"
#include "kernels/implementation.h"

namespace offload::kernels {

bool AddParts(Isa isa, const SumRun& run) {
  OFFLOAD_CHECK(run.part_count > 0) << "a sum of no parts";
  if (run.start == SumStart::kNothing && run.part_count == 1 && run.factor == 1) {
    std::memcpy(run.sum, run.parts[0], run.count * DtypeBytes(run.dtype));
    return AllFinite(isa, run.dtype, run.sum, run.count);
  }
  return ImplementationOf(isa).add_parts(run, 0);
}

bool AddParts(const SumRun& run) { return AddParts(BestIsa(), run); }

}  // namespace offload::kernels
