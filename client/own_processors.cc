#include "client/own_processors.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace offload::client {
namespace {

template <typename Function>
Function* Loaded(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

// As the runtime that the process has loaded knows them; none without one, or where it binds
// nothing.
CpuList OpenMpProcessors() {
  auto* const place_count = Loaded<int()>("omp_get_num_places");
  auto* const processor_count = Loaded<int(int)>("omp_get_place_num_procs");
  auto* const processors_of = Loaded<void(int, int*)>("omp_get_place_proc_ids");
  CpuList processors;
  if (place_count == nullptr || processor_count == nullptr || processors_of == nullptr)
    return processors;
  for (int place = 0; place < place_count(); ++place) {
    std::vector<int> numbers(static_cast<size_t>(std::max(processor_count(place), 0)));
    processors_of(place, numbers.data());
    for (const int number : numbers) {
      if (number >= 0) processors = Union(processors, {static_cast<uint32_t>(number)});
    }
  }
  return processors;
}

}  // namespace

CpuList OwnProcessors() {
  CpuList processors = Union(ProcessorsOf(0), OpenMpProcessors());
  std::error_code error;
  for (std::filesystem::directory_iterator thread("/proc/self/task", error), end;
       !error && thread != end; thread.increment(error)) {
    const std::string name = thread->path().filename();
    processors = Union(processors, ProcessorsOf(static_cast<pid_t>(std::atoi(name.c_str()))));
  }
  return processors;
}

}  // namespace offload::client
