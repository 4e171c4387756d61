// accelerator/accelerator.h
//
// What offloading needs of a GPU, in CUDA's words. CudaAccelerator translates and is tested where
// there is a GPU; HostAccelerator stands in everywhere else and checks who uses it.
//
// A stream executes its commands in order; commands of two streams have an order only through
// events. Everything but Malloc, Free, HostRegister, HostUnregister and EventSynchronize returns
// without waiting for the device. Addresses of device memory are not to be dereferenced.
//
// Errors
//   OFD-2001 no device, OFD-2003 no memory on it, OFD-2004 for everything that a call reports,
//   which may be the failure of an earlier command; then every later call fails, too.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device_update.h"

namespace offload::accelerator {

// cudaStream_t; 0 is the default stream.
struct Stream {
  uintptr_t handle = 0;
  bool operator==(const Stream&) const = default;
};
// cudaEvent_t.
struct Event {
  uintptr_t handle = 0;
  bool operator==(const Event&) const = default;
};

// What the device may do to registered host memory: a slab that is mapped read-only, or the rank's
// own region.
enum class HostAccess : uint8_t { kReadOnly, kReadWrite };
enum class Use : uint8_t { kRead, kWrite };

struct MemoryInfo {
  uint64_t free_bytes = 0, total_bytes = 0;
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  virtual std::string Name() const = 0;
  virtual absl::StatusOr<MemoryInfo> MemGetInfo() = 0;

  // Device memory, aligned to 256 bytes, the caller's until Free(). Free() needs that the host
  // knows, from events, that nothing uses it any more.
  virtual absl::StatusOr<std::byte*> Malloc(size_t size_bytes) = 0;
  virtual absl::Status Free(std::byte* bytes) = 0;

  // Page-locks host memory, so that copies from and to it are asynchronous, until it is
  // unregistered by the same address. False: this machine cannot (HostRegistration in
  // accelerator/host_registration.h; then a staging ring that can be registered is copied through).
  virtual absl::StatusOr<bool> HostRegister(const std::byte* bytes, size_t size_bytes,
                                            HostAccess access) = 0;
  virtual absl::Status HostUnregister(const std::byte* bytes) = 0;

  // A stream of the highest priority that does not wait for the default stream.
  virtual absl::StatusOr<Stream> StreamCreate() = 0;
  virtual absl::Status StreamDestroy(Stream stream) = 0;
  // True while the stream records a CUDA graph.
  virtual absl::StatusOr<bool> StreamIsCapturing(Stream stream) = 0;

  // An event without timing. One that was never recorded counts as done.
  virtual absl::StatusOr<Event> EventCreate() = 0;
  virtual absl::Status EventDestroy(Event event) = 0;
  // The event now stands for all commands submitted to `stream` so far.
  virtual absl::Status EventRecord(Event event, Stream stream) = 0;
  // Commands submitted to `stream` from now on execute after what the event stands for now.
  virtual absl::Status StreamWaitEvent(Stream stream, Event event) = 0;
  // Whether what the event stands for is done. Does not disturb the capture of a graph elsewhere.
  virtual absl::StatusOr<bool> EventQuery(Event event) = 0;
  // Waits until it is.
  virtual absl::Status EventSynchronize(Event event) = 0;

  // The host side must be registered, and stay as it is until the copy is known to be done.
  virtual absl::Status MemcpyToDevice(std::byte* device, const std::byte* host, size_t size_bytes,
                                      Stream stream) = 0;
  virtual absl::Status MemcpyToHost(std::byte* host, const std::byte* device, size_t size_bytes,
                                    Stream stream) = 0;
  virtual absl::Status Memset(std::byte* device, uint8_t value, size_t size_bytes,
                              Stream stream) = 0;

  // Launches update number `step` of a run of elements whose planes are in device memory.
  virtual absl::Status Update(const kernels::OptimizerSpec& optimizer, int64_t step,
                              const kernels::DeviceRun& run, Stream stream) = 0;

  // Says that the commands which the caller launches on `stream` next, by means of its own, use
  // this range: for the checker of the stand-in. Nothing on CUDA.
  virtual void NoteUse(Stream stream, Use use, const std::byte* device, size_t size_bytes) {}
  // Says that the host reads or writes memory that copies use, too.
  virtual void NoteHostUse(Use use, const std::byte* bytes, size_t size_bytes) {}
};

}  // namespace offload::accelerator
