// swap/scrubber.h
//
// Reads all extents of a store in the background, at a bounded rate, and verifies their checksums:
// so that rot is found while a copy still exists, and not in the step that needs the bytes.
//
// Invariants
//   * Writes nothing, and holds back nobody: one read at a time, no more bytes than the rate
//   allows.
//   * An extent of the open epoch is left out: it may be rewritten in place. Snapshots are fsck's
//   to read.
//   * An extent that was written while it was read is not judged: what its reader may have seen is
//   neither the old bytes nor the new ones.
//   * Its buffer exists only while a pass runs.
//
// Thread safety: the thread of the store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/mapped_region.h"
#include "swap/store.h"

namespace offload::swap {

struct ScrubberOptions {
  double bytes_per_second = 16e6;  // 0: never
  double delay_seconds = 0;        // before the first pass
  double pause_seconds = 600;      // between two passes
  // Runs `work` somewhere and then `done` on the store's thread; null: at once.
  std::function<void(std::function<void()> work, std::function<void()> done)> compute;
};

struct ScrubCounts {
  uint64_t passes = 0;  // that looked at everything
  uint64_t extents = 0, bytes = 0;
  uint64_t overtaken = 0;    // written while they were read
  uint64_t bad_extents = 0;  // lost ones, each counted once
  double last_pass_seconds = 0;
};

class Scrubber {
 public:
  static constexpr size_t kNamesMax = 16;

  // The store must outlive the scrubber; a scrubber is destroyed when it is idle().
  Scrubber(Store* store, ScrubberOptions options);

  // Starts what the rate allows now; call it again after the seconds that it returns, which may be
  // infinite, and after completions.
  double Turn(double now_seconds);
  // No more reads are started.
  void Stop() { stopped_ = true; }
  bool idle() const { return !reading_; }
  const ScrubCounts& counts() const { return counts_; }
  // The bad ones, by name, the first kNamesMax of them.
  const std::vector<std::string>& bad_names() const { return bad_names_; }

 private:
  bool BeginPass(double now_seconds);
  void EndPass(double now_seconds);
  bool Next(ExtentId* id);
  void Read(const ExtentId& id);
  void Verify(const ExtentId& id, uint64_t size_bytes);
  void Judge(const ExtentId& id, const absl::Status& status);
  bool IsCurrent(const ExtentId& id) const;

  Store* const store_;
  const ScrubberOptions options_;
  MappedRegion buffer_;
  uint64_t extent_bytes_max_ = 0;
  ExtentId next_;
  size_t next_plane_ = 0;  // in the tensor's spec
  Stamp stamp_;            // of the extent that is being read
  bool begun_ = false, in_pass_ = false, reading_ = false, stopped_ = false;
  double allowed_at_seconds_ = 0, pass_began_seconds_ = 0;
  ScrubCounts counts_;
  std::vector<std::string> bad_names_;
  std::vector<std::pair<ExtentId, uint64_t>> known_bad_;  // with the sequence that was lost
};

}  // namespace offload::swap
