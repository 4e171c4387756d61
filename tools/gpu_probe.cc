#include "tools/gpu_probe.h"

#include <dlfcn.h>

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"

namespace offload::tools {
namespace {

constexpr int kVersionNeeded = 13000;
constexpr char kInstallDriver[] = "install NVIDIA driver 580 or newer";

// The driver's interface, as its binary has it; cuda.h belongs to a toolkit that is not needed.
class Driver {
 public:
  Driver() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}

  bool is_there() const { return library_ != nullptr; }

  // Calls a function that returns 0 for success; -1 when the driver does not have it.
  template <class... Arguments>
  int Call(const char* function, Arguments... arguments) const {
    using Function = int (*)(Arguments...);
    const auto address = reinterpret_cast<Function>(dlsym(library_, function));
    return address == nullptr ? -1 : address(arguments...);
  }

 private:
  void* const library_;
};

std::optional<GpuDevice> DeviceOf(const Driver& driver, int number) {
  int device = 0;
  char name[256] = {};
  size_t memory_bytes = 0;
  if (driver.Call("cuDeviceGet", &device, number) != 0) return std::nullopt;
  if (driver.Call("cuDeviceGetName", &name[0], static_cast<int>(sizeof(name) - 1), device) != 0)
    return std::nullopt;
  if (driver.Call("cuDeviceTotalMem_v2", &memory_bytes, device) != 0) return std::nullopt;
  return GpuDevice{name, memory_bytes};
}

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

GpuProbe ProbeGpus() {
  GpuProbe probe;
  const Driver driver;
  probe.has_driver = driver.is_there();
  if (!probe.has_driver) return probe;
  driver.Call("cuDriverGetVersion", &probe.driver_version);
  if (const int error = driver.Call("cuInit", 0u); error != 0) {
    probe.trouble = absl::StrCat("cuInit fails with error ", error);
    return probe;
  }
  int count = 0;
  driver.Call("cuDeviceGetCount", &count);
  for (int i = 0; i < count; ++i) {
    const std::optional<GpuDevice> device = DeviceOf(driver, i);
    if (device.has_value()) {
      probe.devices.push_back(*device);
    } else {
      probe.trouble = absl::StrCat("device ", i, " of ", count, " does not answer");
    }
  }
  return probe;
}

std::vector<GpuFinding> GpuFindings(const GpuProbe& probe) {
  if (!probe.has_driver) return {{"none", "no NVIDIA driver (libcuda.so.1)", ""}};
  std::vector<GpuFinding> findings;
  const std::string version = absl::StrCat("driver for CUDA ", VersionText(probe.driver_version));
  if (!probe.trouble.empty()) {
    findings.push_back({"driver", absl::StrCat(version, ": ", probe.trouble),
                        "nvidia-smi, and the kernel log for lines with NVRM"});
  } else if (probe.driver_version < kVersionNeeded) {
    findings.push_back(
        {"driver", absl::StrCat(version, ", and CUDA 13 is needed"), kInstallDriver});
  } else if (probe.devices.empty()) {
    findings.push_back({"none", absl::StrCat(version, ", no devices"), ""});
  }
  for (size_t i = 0; i < probe.devices.size(); ++i) {
    const GpuDevice& device = probe.devices[i];
    findings.push_back(
        {absl::StrCat("cuda:", i),
         absl::StrCat(device.name, ", ", FormatBytes(device.memory_bytes), ", ", version), ""});
  }
  return findings;
}

}  // namespace offload::tools
