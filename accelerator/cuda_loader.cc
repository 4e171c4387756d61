#include "accelerator/cuda_loader.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <set>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "accelerator/cuda_plugin.h"
#include "base/error.h"
#include "base/version.h"

namespace offload::accelerator {
namespace {

constexpr char kPlugin[] = "liboffload_cuda.so";
constexpr std::string_view kRuntime = "libcudart.so.";
constexpr std::string_view kRuntimeOfOurs = "libcudart.so.13";
constexpr std::string_view kTorch = "libc10_cuda.so";

std::string_view FileName(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// "libcudart.so.13" of "libcudart.so.13.0.96".
std::string_view SoName(std::string_view file) {
  return file.substr(0, file.find('.', kRuntime.size()));
}

std::vector<std::string> LoadedLibraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        if (info->dlpi_name != nullptr && *info->dlpi_name != '\0')
          static_cast<std::vector<std::string>*>(to)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

// The library or program that this code was linked into.
std::string OwnFile() {
  Dl_info here = {};
  dladdr(reinterpret_cast<const void*>(&CudaPluginPath), &here);
  const std::string file = here.dli_fname == nullptr ? "" : here.dli_fname;
  if (file.find('/') != std::string::npos) return file;
  char path[PATH_MAX];  // a program, by the name that it was called with
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length <= 0 ? file : std::string(path, static_cast<size_t>(length));
}

absl::Status PluginError(const std::string& what) { return MakeError(ErrorId::kGpuPlugin, what); }

}  // namespace

std::string CudaPluginPath() {
  if (const char* const path = std::getenv("OFFLOADD_CUDA_PLUGIN");
      path != nullptr && *path != '\0')
    return path;
  const std::string file = OwnFile();
  const std::string folder = file.substr(0, file.rfind('/') + 1);
  const std::string beside = folder + kPlugin, in_prefix = folder + "../lib/" + kPlugin;
  return access(beside.c_str(), F_OK) != 0 && access(in_prefix.c_str(), F_OK) == 0 ? in_prefix
                                                                                   : beside;
}

std::string RuntimeConflict(std::span<const std::string> libraries) {
  std::set<std::string> torches;
  for (const std::string& path : libraries) {
    const std::string_view file = FileName(path);
    if (file == kTorch) torches.insert(path);
    if (file.starts_with(kRuntime) && SoName(file) != kRuntimeOfOurs)
      return absl::StrCat("the process has loaded ", path, ", and the plug-in is for CUDA 13");
  }
  if (torches.size() < 2) return "";
  return absl::StrCat("the process has loaded two copies of torch: ", *torches.begin(), " and ",
                      *torches.rbegin());
}

absl::StatusOr<std::unique_ptr<Accelerator>> OpenCuda(int device, const std::string& path) {
  if (const std::string conflict = RuntimeConflict(LoadedLibraries()); !conflict.empty())
    return PluginError(conflict);
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) return PluginError(dlerror());
  const auto release =
      reinterpret_cast<decltype(&offload_cuda_release)>(dlsym(library, "offload_cuda_release"));
  const auto open =
      reinterpret_cast<decltype(&offload_cuda_open)>(dlsym(library, "offload_cuda_open"));
  if (release == nullptr || open == nullptr)
    return PluginError(absl::StrCat(path, " is not our plug-in"));
  if (std::string_view(release()) != kVersion) {
    return PluginError(
        absl::StrCat(path, " is of release ", release(), ", and this is ", kVersion));
  }
  absl::StatusOr<std::unique_ptr<Accelerator>> accelerator = nullptr;
  open(device, &accelerator);
  return accelerator;
}

}  // namespace offload::accelerator
