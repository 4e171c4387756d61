// tools/gpu_probe.h
//
// What this machine has of GPUs, asked of NVIDIA's driver and of the kernel alone: no library of
// CUDA is linked, and no context is made on a device.
//
// Thread safety: pure functions, and dlopen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace offload::tools {

// How a device is connected.
struct PciLink {
  std::string speed;                 // of a lane, the most that the device can do: "32.0 GT/s"
  int lanes = 0, lanes_at_most = 0;  // in use, and of the device
};

struct GpuDevice {
  std::string name;
  uint64_t memory_bytes = 0;
  std::optional<PciLink> link;  // nothing where the kernel does not say
};

struct GpuProbe {
  bool has_driver = false;  // libcuda.so.1 can be loaded
  std::string trouble;      // why the driver shows no devices; "" when it does
  int driver_version = 0;   // of the newest CUDA that it serves: 13000 for 13.0
  std::vector<GpuDevice> devices;
};

// Asks the driver, and the kernel by its folder of PCI devices.
GpuProbe ProbeGpus(const std::string& pci_folder = "/sys/bus/pci/devices");

// What a person should know of it, one line each; `fix` is empty when nothing is to be done.
struct GpuFinding {
  std::string name, detail, fix;
};
std::vector<GpuFinding> GpuFindings(const GpuProbe& probe);

}  // namespace offload::tools
