#include "kernels/split.h"

#include "kernels/implementation.h"

namespace offload::kernels {

void Split(Isa isa, const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo,
           TieWriter* ties) {
  ImplementationOf(isa).split(master, count, hi, lo, ties);
}

void Merge(Isa isa, const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master,
           TieReader* ties) {
  ImplementationOf(isa).merge(hi, lo, count, master, ties);
}

void Split(const uint32_t* master, size_t count, uint16_t* hi, int16_t* lo, TieWriter* ties) {
  Split(BestIsa(), master, count, hi, lo, ties);
}

void Merge(const uint16_t* hi, const int16_t* lo, size_t count, uint32_t* master, TieReader* ties) {
  Merge(BestIsa(), hi, lo, count, master, ties);
}

}  // namespace offload::kernels
