#include "tools/gpu_probe.h"

#include <dlfcn.h>

#include <cstddef>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"

namespace offload::tools {
namespace {

constexpr int kVersionNeeded = 13000;
constexpr char kInstanceText[] =
    "; an instance of a divided GPU (MIG): it shares the link with the others, reaches none of "
    "them, and is the only one that a process sees";
constexpr char kNoDevicesText[] =
    ". Of a GPU that is divided (MIG) CUDA_VISIBLE_DEVICES names an instance (nvidia-smi -L)";
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

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<PciLink> LinkOf(const Driver& driver, int device, const std::string& pci_folder) {
  char address[64] = {};
  if (driver.Call("cuDeviceGetPCIBusId", &address[0], static_cast<int>(sizeof(address)), device) !=
      0)
    return std::nullopt;
  const std::string folder = absl::StrCat(pci_folder, "/", absl::AsciiStrToLower(address), "/");
  PciLink link;
  // "32.0 GT/s PCIe". The present one falls while nothing is copied.
  link.speed = FirstLine(folder + "max_link_speed");
  if (const size_t end = link.speed.find(" PCIe"); end != std::string::npos) link.speed.resize(end);
  if (link.speed.empty() ||
      !absl::SimpleAtoi(FirstLine(folder + "current_link_width"), &link.lanes))
    return std::nullopt;
  if (!absl::SimpleAtoi(FirstLine(folder + "max_link_width"), &link.lanes_at_most))
    link.lanes_at_most = link.lanes;
  return link;
}

std::optional<GpuDevice> DeviceOf(const Driver& driver, int number, const std::string& pci_folder) {
  int device = 0;
  char name[256] = {};
  size_t memory_bytes = 0;
  if (driver.Call("cuDeviceGet", &device, number) != 0) return std::nullopt;
  if (driver.Call("cuDeviceGetName", &name[0], static_cast<int>(sizeof(name) - 1), device) != 0)
    return std::nullopt;
  if (driver.Call("cuDeviceTotalMem_v2", &memory_bytes, device) != 0) return std::nullopt;
  return GpuDevice{name, memory_bytes, LinkOf(driver, device, pci_folder)};
}

std::string LinkText(const PciLink& link) {
  const std::string of =
      link.lanes < link.lanes_at_most ? absl::StrCat(" of x", link.lanes_at_most) : std::string();
  return absl::StrCat(", PCIe ", link.speed, " x", link.lanes, of);
}

// The driver names an instance of a divided GPU "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
bool IsInstance(const GpuDevice& device) { return device.name.find(" MIG ") != std::string::npos; }

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

GpuProbe ProbeGpus(const std::string& pci_folder) {
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
    const std::optional<GpuDevice> device = DeviceOf(driver, i, pci_folder);
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
    findings.push_back({"none", absl::StrCat(version, ", no devices", kNoDevicesText), ""});
  }
  for (size_t i = 0; i < probe.devices.size(); ++i) {
    const GpuDevice& device = probe.devices[i];
    const bool is_narrow =
        device.link.has_value() && device.link->lanes < device.link->lanes_at_most;
    findings.push_back(
        {absl::StrCat("cuda:", i),
         absl::StrCat(device.name, ", ", FormatBytes(device.memory_bytes),
                      device.link.has_value() ? LinkText(*device.link) : "", ", ", version,
                      IsInstance(device) ? kInstanceText : ""),
         is_narrow ? "a slot with more lanes: weights and gradients go over this link" : ""});
  }
  return findings;
}

}  // namespace offload::tools
