// aio/file_device.h
//
// What the engines over a file descriptor have in common. Internal to aio/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "aio/device.h"
#include "aio/transfer.h"
#include "base/unique_fd.h"

namespace offload::aio {

// A device over a file that it borrows until it is told to own it: so a probe that failed leaves
// the file open.
class FileDevice : public Device {
 public:
  const Geometry& geometry() const override { return geometry_; }
  int event_fd() const override { return event_fd_.get(); }

  absl::Status Resize(uint64_t size_bytes) override;

  // Closes `file`, the one that the device was made with, after the engine has stopped.
  void Own(UniqueFd file) { owned_file_ = std::move(file); }

 protected:
  explicit FileDevice(const Geometry& geometry) : geometry_(geometry) {}

  // Transfer::Advance, counted. Thread safe.
  std::optional<absl::Status> Advance(Transfer& transfer, int64_t result);

  absl::Status MakeEvent();

  // Makes the (non-blocking) event descriptor readable, or not.
  void SignalReady() override;
  void ClearEvent();

  Geometry geometry_;
  UniqueFd event_fd_;

 private:
  UniqueFd owned_file_;
};

// Fails with the text of the call that was refused. The file must outlive the device.
absl::StatusOr<std::unique_ptr<FileDevice>> MakeThreadDevice(int fd, const Geometry& geometry,
                                                             const OpenOptions& options);

}  // namespace offload::aio
