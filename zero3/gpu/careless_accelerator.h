// zero3/gpu/careless_accelerator.h
//
// For tests: a device that hears less than it is told, as if the code above it had forgotten a
// call.
//
// Thread safety: as the device's.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "accelerator/accelerator.h"
#include "accelerator/sums.h"

namespace offload::zero3 {

class CarelessAccelerator final : public accelerator::Accelerator,
                                  public accelerator::SummingDevice {
 public:
  struct Mistakes {
    bool others_wait = true;    // streams that were not created here wait for events
    bool own_wait = true;       // those that were do
    bool asks_for_done = true;  // otherwise everything counts as done at once
  };
  CarelessAccelerator(accelerator::Accelerator* device, Mistakes mistakes)
      : device_(device), mistakes_(mistakes) {}

  std::string Name() const override { return device_->Name(); }
  absl::StatusOr<accelerator::MemoryInfo> MemGetInfo() override { return device_->MemGetInfo(); }
  absl::StatusOr<std::byte*> Malloc(size_t size_bytes) override {
    return device_->Malloc(size_bytes);
  }
  absl::Status Free(std::byte* bytes) override { return device_->Free(bytes); }
  absl::StatusOr<bool> HostRegister(const std::byte* bytes, size_t size_bytes,
                                    accelerator::HostAccess access) override {
    return device_->HostRegister(bytes, size_bytes, access);
  }
  absl::Status HostUnregister(const std::byte* bytes) override {
    return device_->HostUnregister(bytes);
  }
  absl::StatusOr<accelerator::Stream> StreamCreate() override {
    absl::StatusOr<accelerator::Stream> stream = device_->StreamCreate();
    if (stream.ok()) own_.push_back(*stream);
    return stream;
  }
  absl::Status StreamDestroy(accelerator::Stream stream) override {
    return device_->StreamDestroy(stream);
  }
  absl::StatusOr<bool> StreamIsCapturing(accelerator::Stream stream) override {
    return device_->StreamIsCapturing(stream);
  }
  absl::StatusOr<accelerator::Event> EventCreate() override { return device_->EventCreate(); }
  absl::Status EventDestroy(accelerator::Event event) override {
    return device_->EventDestroy(event);
  }
  absl::Status EventRecord(accelerator::Event event, accelerator::Stream stream) override {
    return device_->EventRecord(event, stream);
  }
  absl::Status StreamWaitEvent(accelerator::Stream stream, accelerator::Event event) override {
    const bool is_own = std::ranges::find(own_, stream) != own_.end();
    if (!(is_own ? mistakes_.own_wait : mistakes_.others_wait)) return absl::OkStatus();
    return device_->StreamWaitEvent(stream, event);
  }
  absl::StatusOr<bool> EventQuery(accelerator::Event event) override {
    if (!mistakes_.asks_for_done) return true;
    return device_->EventQuery(event);
  }
  absl::Status EventSynchronize(accelerator::Event event) override {
    if (!mistakes_.asks_for_done) return absl::OkStatus();
    return device_->EventSynchronize(event);
  }
  absl::Status MemcpyToDevice(std::byte* device, const std::byte* host, size_t size_bytes,
                              accelerator::Stream stream) override {
    return device_->MemcpyToDevice(device, host, size_bytes, stream);
  }
  absl::Status MemcpyToHost(std::byte* host, const std::byte* device, size_t size_bytes,
                            accelerator::Stream stream) override {
    return device_->MemcpyToHost(host, device, size_bytes, stream);
  }
  absl::Status Memset(std::byte* device, uint8_t value, size_t size_bytes,
                      accelerator::Stream stream) override {
    return device_->Memset(device, value, size_bytes, stream);
  }
  absl::Status Update(const kernels::OptimizerSpec& optimizer, int64_t step,
                      const kernels::DeviceRun& run, accelerator::Stream stream) override {
    return device_->Update(optimizer, step, run, stream);
  }
  absl::Status AddParts(const kernels::DeviceSum& sum, accelerator::Stream stream) override {
    return accelerator::SummingDeviceOf(device_)->AddParts(sum, stream);
  }
  void NoteUse(accelerator::Stream stream, accelerator::Use use, const std::byte* device,
               size_t size_bytes) override {
    device_->NoteUse(stream, use, device, size_bytes);
  }
  void NoteHostUse(accelerator::Use use, const std::byte* bytes, size_t size_bytes) override {
    device_->NoteHostUse(use, bytes, size_bytes);
  }

 private:
  accelerator::Accelerator* const device_;
  const Mistakes mistakes_;
  std::vector<accelerator::Stream> own_;
};

}  // namespace offload::zero3
