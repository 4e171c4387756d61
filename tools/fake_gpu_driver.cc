// For tests: what offloadctl asks of NVIDIA's driver, answered for two devices of 1 and 2 GiB.
#include <cstddef>
#include <cstdio>

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::snprintf(name, size, "Fake GPU %d", device);
  return 0;
}
int cuDeviceGetPCIBusId(char* address, int size, int device) {
  std::snprintf(address, size, "0000:%XA:00.0", device + 1);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* size_bytes, int device) {
  *size_bytes = (device + size_t{1}) << 30;
  return 0;
}
}
