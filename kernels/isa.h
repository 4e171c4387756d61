// kernels/isa.h
//
// The instruction sets that the kernels are written for, and the choice among them.
//
// Thread safety: all functions may be called from any thread.
#pragma once

namespace offload::kernels {

enum class Isa { kReference, kAvx2, kAvx512 };

// The best that this processor has; OFFLOADD_ISA=reference|avx2|avx512 lowers it, never raises it.
// Decided once.
Isa BestIsa();
// True when this processor can run `isa`, whatever OFFLOADD_ISA says.
bool IsSupported(Isa isa);
const char* IsaName(Isa isa);

}  // namespace offload::kernels
