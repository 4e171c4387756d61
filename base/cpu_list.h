// base/cpu_list.h
//
// Sets of processors and of NUMA nodes, as the kernel numbers and writes them: "0-3,8".
//
// Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace offload {

// Ascending, each once.
using CpuList = std::vector<uint32_t>;

// As many as any kernel has.
inline constexpr uint32_t kCpusMax = 8192;

// A newline may follow. Missing: not such a list, or numbers from kCpusMax on. Empty text is the
// empty list.
std::optional<CpuList> ParseCpuList(std::string_view text);
std::string FormatCpuList(const CpuList& list);

// Of both lists, and of either.
CpuList Intersection(const CpuList& a, const CpuList& b);
CpuList Union(const CpuList& a, const CpuList& b);

// Processors that a thread may run on, of this process or another; 0: the calling one. Empty when
// there is no such thread.
CpuList ProcessorsOf(pid_t thread);
// The calling thread runs on these only, and so do those that it starts. False when the kernel
// allows none of them.
bool RunOn(const CpuList& processors);

}  // namespace offload
