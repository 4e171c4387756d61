// swap/scratch.h
//
// Space on the pool for bytes that need not survive a crash: weights while a model is being built,
// and gradients that do not fit into memory. One unnamed file (O_TMPFILE) in each pool,
// preallocated, gone with the process; the bytes go round the pools in stripe units, so that all
// drives work. Checksums of what was written are kept in memory.
//
// Thread safety: one thread per Scratch; checksums are taken wherever ScratchOptions::compute runs
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device.h"
#include "swap/transfer_watch.h"

namespace offload::swap {

struct ScratchOptions {
  aio::OpenOptions io;
  // Runs `work` anywhere and then `done` on the scratch's thread. Without it checksums are taken on
  // that thread, in the call that starts or completes a transfer.
  std::function<void(std::function<void()> work, std::function<void()> done)> compute;
};

class Scratch {
 public:
  using Done = std::function<void(absl::Status)>;

  // In one pool or striped over several.
  static absl::StatusOr<std::unique_ptr<Scratch>> Create(const std::vector<std::string>& pools,
                                                         ScratchOptions options);
  // Over a device instead of files of a pool, which is all the room there is: for simulators.
  static absl::StatusOr<std::unique_ptr<Scratch>> CreateOn(std::unique_ptr<aio::Device> device,
                                                           ScratchOptions options);
  // No transfer or computation may be under way.
  ~Scratch();

  // Makes room for at least `bytes` in all (blocking; only grows). OFD-1204 when the pool has no
  // room.
  absl::Status Reserve(uint64_t bytes);
  uint64_t size_bytes() const;

  // Transfers one chunk; offset, length and address are multiples of 4096. A read must begin and
  // end where one write or a run of neighbouring writes did; `crc` of each written chunk is checked
  // on the way back (OFD-1208 on a mismatch).
  void Write(uint64_t offset_bytes, std::span<const std::byte> bytes, Done done);
  void Read(uint64_t offset_bytes, std::span<std::byte> bytes, Done done);

  // Told of every Write and Read from now on. Null: nobody.
  void SetWatch(TransferWatch watch);

  size_t Poll(bool wait);
  int event_fd() const;
  // From any thread, also while another one runs Reserve(), which opens it anew. Never null.
  std::shared_ptr<const aio::Device> device() const;

 private:
  struct Impl;
  explicit Scratch(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace offload::swap
