// swap/store_files.h
//
// From a pool and a job to a locked device: what Store::Open and fsck have in common. Internal to
// swap/.
//
// Invariants
//   * The device's descriptor holds the lock of the store, for as long as the device lives.
//   * What a dead owner had written is durable before the first byte is read: nothing may be
//   decided on data that a power cut could still take back.
//
// Thread safety: none.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "aio/device.h"
#include "swap/named_files.h"
#include "swap/pool_directory.h"
#include "swap/store.h"

namespace offload::swap {

struct OpenedFiles {
  PoolDirectory directory;
  std::string path;  // what messages call the store
  uint64_t size_bytes = 0;
  std::unique_ptr<aio::Device> device;
  NamedFiles files;  // not of one that is opened to be read
};

// Judges, locks and makes durable the file of `job`; removes what killed formats of it left.
// Blocking. Errors as Store::Open, up to recovery.
absl::StatusOr<OpenedFiles> OpenStoreFiles(const std::string& pool, const std::string& job,
                                           const StoreOptions& options, bool counts_as_opening);

// Without a lock, beside the owner of the store, for what its owner does not change. A store over
// several pools cannot be opened so: OFD-1212.
absl::StatusOr<OpenedFiles> OpenStoreFileToRead(const std::string& pool, const std::string& job,
                                                const StoreOptions& options);

}  // namespace offload::swap
