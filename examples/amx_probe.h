// examples/amx_probe.h
//
// Finds out whether this machine really runs the matrix instructions it announces.
//
// Some virtual machines announce AMX and kill the process that uses it. So a child process tries
// first; when it dies, the program starts itself again with oneDNN told to leave AMX alone.
//
// Thread safety: call from main(), before there are threads.
#pragma once

#include <functional>

namespace offload::examples {

// True when a child process that calls `probe` ends by itself, false when a signal ends it.
bool SurvivesInChild(const std::function<void()>& probe);

// Returns at once when the processor announces no AMX or ONEDNN_MAX_CPU_ISA is set. Otherwise
// runs `multiply` (any bf16 matrix product) in a child; when that dies says so on stderr, sets
// ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and executes this program again with the same arguments.
void AvoidBrokenAmx(char** argv, const std::function<void()>& multiply);

}  // namespace offload::examples
