// tools/program.h
//
// What has to be known of a program before libraries are put in front of it: whether the loader
// will load them at all, and which libtorch the program runs with.
//
// Thread safety: pure functions of files.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace offload::tools {

// A shared library that the loader would load, and from where; no path when it is not found.
struct LoadedLibrary {
  std::string name;
  std::string path;
};
// Reads what the loader prints with LD_TRACE_LOADED_OBJECTS=1.
std::vector<LoadedLibrary> ParseLoaderTrace(std::string_view trace);

// How a file begins.
struct ProgramKind {
  enum { kDynamic, kStatic, kScript, kOther } kind = kOther;
  std::string interpreter;  // of kDynamic: the loader; of kScript: the rest of the first line
};
// OFD-1002 when it cannot be read.
absl::StatusOr<ProgramKind> KindOf(const std::string& path);

// Finds a program as a shell does: a name without a slash on PATH. OFD-1002 when there is none.
absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& path_variable);

// "2.11" of the libtorch that a libtorch_cpu.so is part of, as the files beside it say; "" when
// they do not.
std::string TorchRelease(const std::string& library);

// OFD-1601 for a program that cannot be attached by preloading `offload_library`: with what to do.
absl::Status CheckPreloadable(const std::string& program, const std::string& offload_library);

}  // namespace offload::tools
