// swap/store.h
//
// The crash-safe swap store of one job: one preallocated file of extents with two places each, and
// one more for every spare generation; a checksummed extent table kept twice, and four superblocks
// written two at a time in turn.
// swap/DESIGN.md has the format, a worked example and the crash table.
//
// Invariants
//   * A write never touches a place that the last committed epoch or a snapshot refers to, so a
//   crash at any moment leaves them whole.
//   * Nothing after Create() but Grow() extends, renames or allocates: no ENOSPC at run time.
//   * Every byte that is handed out has a checksum that binds (store, tensor, plane, index,
//   sequence): a torn, misdirected or
//     stale extent is seen. Verification is the caller's duty (Store::Verify), so that it can
//     share a pass over the bytes.
//   * The first failed flush or write makes the store failed: no commit succeeds any more; reads of
//   committed data go on.
//   * At most one process has a store open (flock on the descriptor that does the I/O).
//
// Words: `sequence` counts commits and is what checksums bind; `epoch` is the optimizer step that a
// commit holds. They differ when weights are put without a step.
//
// A snapshot is a name for a committed epoch whose extents, table and blob are kept. It lives in a
// spare generation, of which a store is formatted with some or grows more; making and deleting one
// are commits of their own, so a crash leaves either state whole.
//
// Thread safety: one thread per Store, except Checksum and Stamp, which are values.
#pragma once

#include <array>
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

// What a plane holds. The numbers are part of the format.
enum class Plane : uint8_t {
  kWeight = 0,    // working dtype: fp32 (the master itself) or bf16 (the high half of the master)
  kResidual = 1,  // low half of the fp32 master, 2 bytes per element (bf16 models)
  kState0 = 2,    // what the optimizer keeps, like the other states (proto/plane_set.h)
  kState1 = 3,
  kTies = 4,  // 1 bit per element that needs one; written only for extents whose tie bits exceed
              // Stamp::word (kernels/split.h)
  kState2 = 5,
  kAverage = 6,  // a moving average of the master
};
inline constexpr int kPlaneCount = 7;

struct PlaneSpec {
  Plane plane;
  uint32_t bits_per_element;
  friend bool operator==(const PlaneSpec&, const PlaneSpec&) = default;
};

// A tensor as the store knows it: a bundle of small tensors is one tensor here
// (proto/slab_layout.h).
struct TensorSpec {
  uint64_t element_count = 0;
  std::vector<PlaneSpec>
      planes;  // in the order in which they stand side by side on disk; at most kPlaneCount
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

struct StoreSpec {
  std::string job;  // also the file name; see base/run_names.h
  uint32_t extent_elements =
      0;  // elements of one extent, the same for every plane, a multiple of 32768
  std::vector<TensorSpec> tensors;
  std::string catalogue;  // opaque to the store, immutable, checksummed: what the trainer calls its
                          // tensors; ≤ 64 MiB
};

struct ExtentId {
  uint32_t tensor = 0;
  Plane plane = Plane::kWeight;
  uint32_t index = 0;  // elements [index * extent_elements, …) of the tensor
  friend bool operator==(const ExtentId&, const ExtentId&) = default;
};

// "tensor 3, plane state0, index 17", for messages.
std::string NameOf(const ExtentId& id);

// crc32c over the binding and the bytes of an extent (padding included), a piece at a time in
// order, so that it can be taken tile by tile while the bytes are in cache.
class Checksum {
 public:
  void Update(std::span<const std::byte> bytes);
  uint32_t Finish() const;

 private:
  friend class Store;
  explicit Checksum(uint32_t seed) : state_(seed) {}
  uint32_t state_;
};

// What the table says of an extent's bytes.
struct Stamp {
  uint64_t sequence =
      0;              // commit in which they were written; 0: never written, the bytes are zeros
  uint64_t word = 0;  // given with the write, opaque to the store
  uint32_t crc = 0;
  uint32_t flags = 0;  // kFlag…, given with the write
  bool never_written() const { return sequence == 0; }
};
inline constexpr uint32_t kFlagTiesPlane =
    1;  // the extent's tie bits are in Plane::kTies, not in `word`

struct ReadRequest {
  ExtentId id;
  std::byte* bytes;  // ExtentBytes(id) bytes, aligned to 4096
};
struct WriteRequest {
  ExtentId id;
  const std::byte* bytes;  // ExtentBytes(id) bytes, aligned to 4096
  uint32_t crc;            // Checksum for (id, open_sequence()) over all of them
  uint64_t word = 0;
  uint32_t flags = 0;
  // Not yet meant to last: the next Commit takes it like any other write, but a change of snapshots
  // leaves it out, and open as it was.
  bool tentative = false;
};

struct CommitInfo {
  uint64_t sequence = 0;
  uint64_t epoch = 0;
  std::string blob;  // the trainer's own state, ≤ 1 MiB
};

// What went wrong since the store was opened, one count per kind.
struct ErrorCounts {
  uint64_t checksum_mismatches = 0;  // reads that returned other bytes than were written
  uint64_t read_errors = 0, write_errors = 0, flush_errors = 0;  // of the drive
  uint64_t lost_extents = 0;     // reads that stayed wrong, however often they were tried
  uint64_t repaired_copies = 0;  // taken from their twin when the store was opened
};

inline constexpr uint32_t kGenerationsMax = 14;  // spare ones, and so snapshots, of a store
inline constexpr size_t kSnapshotNameBytesMax = 64;

struct SnapshotInfo {
  std::string name;
  uint64_t sequence = 0;  // of the commit that it names
  uint64_t epoch = 0;
  int64_t created_unix_seconds = 0;
  absl::Status damage;  // not OK: its table is lost, and nothing of it can be read
};

struct StoreOptions {
  aio::OpenOptions io;
  uint32_t generations = 0;  // spare ones that Create formats
  // The job has a store already, which the caller has open; the one that Create makes takes its
  // name with Publish(). In one pool only.
  bool replaces = false;
  double lock_timeout_seconds = 30;  // how long to wait for a killed owner's writes to land
  // Called during Create with bytes formatted and bytes in all; may be null.
  std::function<void(uint64_t, uint64_t)> progress;
  // Asked again and again while Create and Open wait or format; true: nobody wants the store any
  // more, give up and leave nothing behind (OFD-1802). May be null.
  std::function<bool()> cancelled;
  // Of a store that is made over several pools, for tests and simulators; empty: measured.
  std::vector<uint32_t> stripe_weights;
  // Wraps the device, for tests (fault decorator); may be null.
  std::function<std::unique_ptr<aio::Device>(std::unique_ptr<aio::Device>)> decorate;
};

class Store {
 public:
  using Done = std::function<void(absl::Status)>;

  // `pool` may name several, separated by commas: the store is striped over them by their measured
  // bandwidth (SplitPools).
  //
  // Formats a store under a temporary name in `pool`: preallocates and writes every byte, so that
  // it can never run out of space. It becomes a store of that job only with Publish(). Removes
  // leftovers of killed formats of the same job. Blocking. Errors: OFD-1201…1204, 1205 (the job
  // exists or is being built by another process), 1211.
  static absl::StatusOr<std::unique_ptr<Store>> Create(const std::string& pool,
                                                       const StoreSpec& spec,
                                                       const StoreOptions& options);

  // Opens the store of `job`, waits for the lock, recovers the last committed epoch. Writes nothing
  // but the other superblock of that commit, where a crash kept it from being written. Blocking.
  // Errors: NOT_FOUND without an id when there is none; OFD-1201…1203, 1205, 1206, 1207, 1212.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& pool,
                                                     const std::string& job,
                                                     const StoreOptions& options);

  // Opens what a snapshot holds, to be read: committed() is what it names, and every write is
  // refused. Takes no lock and may run beside the owner of the store, who may delete the snapshot
  // meanwhile: then bytes do not match their stamps. (A store over several pools is locked, as by
  // Open.) Blocking. Errors as Open, and OFD-1216.
  static absl::StatusOr<std::unique_ptr<Store>> OpenSnapshot(const std::string& pool,
                                                             const std::string& job,
                                                             const std::string& snapshot,
                                                             const StoreOptions& options);

  // The same over a device of at least FormattedBytes(spec, generations) bytes instead of a file of
  // a pool, for simulators: no lock, no name, nothing to publish, and nothing that differs from one
  // run to the next. CreateOn takes a device of zeros; OpenOn flushes it before it decides
  // anything.
  static absl::StatusOr<std::unique_ptr<Store>> CreateOn(std::unique_ptr<aio::Device> device,
                                                         const StoreSpec& spec,
                                                         const std::array<uint8_t, 16>& uuid,
                                                         uint32_t generations = 0);
  static absl::StatusOr<std::unique_ptr<Store>> OpenOn(std::unique_ptr<aio::Device> device);
  static absl::StatusOr<std::unique_ptr<Store>> OpenSnapshotOn(std::unique_ptr<aio::Device> device,
                                                               const std::string& snapshot);

  ~Store();  // drains I/O; an epoch that is not committed is lost
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Gives a created store its name: rename and directory fsync. Requires a first Commit. Blocking.
  // One that replaces another takes its place at once: there is a whole store of that name at any
  // moment. The other has no name any more, and its bytes are free when it is closed.
  absl::Status Publish();

  const StoreSpec& spec() const;
  // Bytes of an extent on disk and in a buffer: its elements' bytes rounded up to 4096; the last
  // extent of a tensor is shorter.
  uint64_t ExtentBytes(const ExtentId& id) const;
  uint32_t ExtentCount(uint32_t tensor) const;

  // Reads extents, each as it was last written (in the open epoch, else as committed). Neighbours
  // on disk become one transfer. One that fails is tried again, extent by extent, at most three
  // times in all; then OFD-1209 names the extent and the bad sector, and others go on. `stamps` (as
  // many as requests) is filled before this returns: the bytes are good only if … (Verify below).
  // Never-written extents are filled with zeros. `done` runs once, when all have completed, with
  // the first error.
  void Read(std::span<const ReadRequest> requests, std::span<Stamp> stamps, Done done);

  // Writes extents into the open epoch. The caller keeps bytes unchanged until `done`. An extent
  // may be written again in the same epoch after its earlier write is done.
  void Write(std::span<const WriteRequest> requests, Done done);

  // Writes extents to where Write() would, and leaves them out of the open epoch: nothing refers to
  // what is written until Adopt(). An extent must not be part of the open epoch, which its only
  // other place has then; it is written again, or forgotten, freely. Refused (FAILED_PRECONDITION)
  // while a commit runs; counts as a write in flight.
  void WriteAside(std::span<const WriteRequest> requests, Done done);
  // Makes what WriteAside() has written part of the open epoch, as if Write() had: all or, with an
  // error, nothing. `requests` as they were given there (`bytes` may be null), each the last of its
  // extent, and done; `sequence`: open_sequence() at that time. FAILED_PRECONDITION when a commit
  // or another write of the extent came since, or a commit runs.
  absl::Status Adopt(std::span<const WriteRequest> requests, uint64_t sequence);

  // Starts the checksum of an extent as written in `sequence`. Thread safe.
  Checksum StartChecksum(const ExtentId& id, uint64_t sequence) const;
  // True when `bytes` (whole extent) are those of `stamp`. Thread safe.
  bool Verify(const ExtentId& id, const Stamp& stamp, std::span<const std::byte> bytes) const;

  // For an extent whose bytes came with `stamp` and do not match it: reads it again, at most three
  // times in all, until they do. OFD-1208, with the extent's name, when they never do;
  // FAILED_PRECONDITION when it has been written meanwhile.
  void ReadAgain(const ReadRequest& request, const Stamp& stamp, Done done);

  // The sequence that the next Commit will have; writes bind it. Thread safe between commits.
  uint64_t open_sequence() const;
  // What the table says now.
  Stamp stamp(const ExtentId& id) const;

  // Makes the open epoch durable: flush, table, flush, superblock, flush, its twin, flush. Requires
  // that no write is in flight; reads may be. Writes may begin again only after `done`. On failure
  // the store is failed and the last committed epoch stands.
  void Commit(uint64_t epoch, std::string blob, Done done);
  const CommitInfo& committed() const;

  // Names the last commit, so that its state is kept: a commit of its own, of the same epoch and
  // blob, that writes the table and the blob once more and no extent. Requires that nothing but
  // tentative writes came since the last commit, and that none is in flight. OFD-1216: the name is
  // taken or cannot be one, or no generation is free.
  void CreateSnapshot(const std::string& name, int64_t unix_seconds, Done done);
  // Gives a snapshot's generation free, by a commit of its own. Requires as CreateSnapshot.
  // OFD-1216: there is none of that name.
  void DeleteSnapshot(const std::string& name, Done done);
  const std::vector<SnapshotInfo>& snapshots() const;
  uint32_t generation_count() const;  // spare ones
  bool has_free_generation() const { return snapshots().size() < generation_count(); }

  // Makes the file longer by one spare generation and writes zeros there. Reads, writes and commits
  // may go on meanwhile; the next commit names the new length, and until then a crash leaves the
  // old one. When there is no room (OFD-1204, with the numbers), nothing is left behind and the
  // store goes on as it was. `progress` as in StoreOptions; may be null.
  void Grow(std::function<void(uint64_t, uint64_t)> progress, Done done);
  // Ends a growth that is under way: `done` gets CANCELLED, and the file has its old length.
  void CancelGrowth();
  uint64_t generation_bytes() const;  // by which Grow makes the file longer
  bool has_uncommitted_writes() const;
  bool failed() const;
  // What Open found damaged and took from its twin, a line each. On disk it has written only the
  // superblock's twin.
  const std::vector<std::string>& repairs() const;
  ErrorCounts error_counts() const;  // from any thread

  // Told of every Read, Write and Commit from now on. Null: nobody.
  void SetWatch(TransferWatch watch);

  // Runs completions; as Device::Poll.
  size_t Poll(bool wait);
  int event_fd() const;
  const aio::Device& device() const;
  // Device::RegisterBuffer.
  void RegisterBuffer(std::span<std::byte> bytes);
  const std::string& path() const;

  // OFD-1207, with what saves the job, when somebody has removed a file of the store while it is
  // open. Looks at each file once.
  absl::Status CheckFiles() const;
  // Writes files that were removed anew under their names, as the last commit before the device
  // goes. Blocking; requires that nothing is in flight. OK when there are none.
  absl::Status SaveRemovedFiles();

 private:
  struct Impl;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Starts an operation of the store and polls until it is done.
absl::Status RunToEnd(Store& store, const std::function<void(Store::Done)>& start);

// As a job (base/run_names.h), and at most kSnapshotNameBytesMax long.
bool IsValidSnapshotName(std::string_view name);
// OFD-1216, with what a name may be.
absl::Status CheckSnapshotName(const std::string& name);

// Refuses a pool that cannot hold stores: OFD-1201, 1202, 1203. Probes with a real O_DIRECT write
// and read of a temporary file. Of several, each.
absl::Status CheckPool(const std::string& pool);

// Bytes that Create would take; 0 for a spec that it would refuse.
uint64_t FormattedBytes(const StoreSpec& spec, uint32_t generations = 0);

// What a tool can say of a store without its lock.
struct StoreSummary {
  std::string job, path;
  std::vector<std::string> pools;  // of a store over several, as they were when it was made
  uint64_t file_bytes = 0;         // of all members
  CommitInfo committed;            // blob left empty
  std::vector<SnapshotInfo> snapshots;
  uint32_t generation_count = 0;
  uint64_t generation_bytes = 0;  // by which a spare generation makes the file longer
  uint64_t state_bytes = 0;       // of all extents once: what a copy of one epoch moves
  bool in_use = false;            // another process has the lock
  absl::Status damage;            // not OK: what is wrong with it
};
// Those whose file is in one of the pools.
absl::StatusOr<std::vector<StoreSummary>> ListStores(const std::string& pool);
// Removes a job's store, from all its pools. OFD-1205 while it is in use, OFD-1212 when one of the
// pools is not there.
absl::Status RemoveStore(const std::string& pool, const std::string& job);

}  // namespace offload::swap
