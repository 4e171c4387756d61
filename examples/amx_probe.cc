#include "examples/amx_probe.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace offload::examples {
namespace {

constexpr char kVariable[] = "ONEDNN_MAX_CPU_ISA";
constexpr char kWithoutAmx[] = "AVX512_CORE_BF16";

bool AnnouncesAmx() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags")) return line.find(" amx_bf16") != std::string::npos;
  }
  return false;
}

}  // namespace

bool SurvivesInChild(const std::function<void()>& probe) {
  const pid_t child = fork();
  if (child < 0) return true;  // cannot tell: behave as without a probe
  if (child == 0) {
    const rlimit no_core_dump{0, 0};
    setrlimit(RLIMIT_CORE, &no_core_dump);
    probe();
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return true;
  }
  return !WIFSIGNALED(status);
}

void AvoidBrokenAmx(char** argv, const std::function<void()>& multiply) {
  if (std::getenv(kVariable) != nullptr || !AnnouncesAmx() || SurvivesInChild(multiply)) return;
  std::fprintf(stderr, "AMX does not work on this machine: going on with %s=%s\n", kVariable,
               kWithoutAmx);
  setenv(kVariable, kWithoutAmx, /*overwrite=*/1);
  execv("/proc/self/exe", argv);
  std::perror("cannot start again without AMX");
}

}  // namespace offload::examples
