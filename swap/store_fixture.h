// swap/store_fixture.h
//
// For tests: a pool on a real file system, a small store, and a script of epochs whose bytes are a
// function of (extent, sequence), so that a test knows what a store must hold after any number of
// commits without remembering anything.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "aio/device.h"
#include "base/mapped_region.h"
#include "swap/store.h"

namespace offload::swap {

// A folder of its own under TEST_TMPDIR, removed with the object.
class TemporaryPool {
 public:
  TemporaryPool();
  ~TemporaryPool();
  TemporaryPool(const TemporaryPool&) = delete;
  const std::string& path() const { return path_; }
  // Everything in it, hidden files too.
  std::vector<std::string> Files() const;

 private:
  std::string path_;
};

// Three tensors: bf16 with all five planes and a short last extent, fp32 of exactly one extent, and
// one of a few elements.
StoreSpec SmallSpec(const std::string& job = "job");
StoreOptions QuickOptions();
std::vector<ExtentId> AllExtents(const Store& store);

MappedRegion Buffer(uint64_t size_bytes);

// Hands all operations on, so that the bytes outlive a store over it.
class BorrowedDevice final : public aio::Device {
 public:
  explicit BorrowedDevice(aio::Device* behind) : behind_(behind) {}
  ~BorrowedDevice() override { Drain(); }
  size_t Poll(bool wait) override;
  int event_fd() const override { return -1; }
  const aio::Geometry& geometry() const override { return behind_->geometry(); }
  std::string_view engine() const override { return behind_->engine(); }

 protected:
  void Start(std::unique_ptr<Op> op) override;

 private:
  aio::Device* const behind_;
};

// Whether the script writes the extent in that commit (about two in three), and the bytes it then
// has.
bool IsWrittenIn(const ExtentId& id, uint64_t sequence);
void FillExtent(const ExtentId& id, uint64_t sequence, std::span<std::byte> bytes);
std::string BlobOf(uint64_t sequence);
uint64_t EpochOf(uint64_t sequence);

// Blocking forms.
absl::Status WriteNow(Store& store, std::span<const WriteRequest> requests);
absl::Status CommitNow(Store& store, uint64_t epoch, const std::string& blob);
absl::Status ReadNow(Store& store, const ExtentId& id, std::span<std::byte> bytes, Stamp* stamp);

// What the script writes in the open sequence, with the memory of the bytes.
struct ScriptWrites {
  std::vector<MappedRegion> buffers;
  std::vector<WriteRequest> requests;
};
ScriptWrites MakeScriptWrites(const Store& store);
// Writes the script's extents of the open sequence; commits them.
absl::Status WriteScript(Store& store);
absl::Status CommitScript(Store& store);

// OK when every extent, the epoch and the blob are those that the script leaves after `sequence`
// commits.
absl::Status CheckScript(Store& store, uint64_t sequence);

}  // namespace offload::swap
