#include "swap/fork.h"

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"

namespace offload::swap {
namespace {

constexpr uint64_t kBatchBytes = uint64_t{32} << 20;

// The extents that have been written, as they stand on disk.
std::vector<ExtentId> WrittenExtents(const Store& store) {
  std::vector<ExtentId> ids;
  for (uint32_t tensor = 0; tensor < store.spec().tensors.size(); ++tensor) {
    for (uint32_t index = 0; index < store.ExtentCount(tensor); ++index) {
      for (const PlaneSpec& plane : store.spec().tensors[tensor].planes) {
        const ExtentId id{tensor, plane.plane, index};
        if (!store.stamp(id).never_written()) ids.push_back(id);
      }
    }
  }
  return ids;
}

class Copy {
 public:
  Copy(Store* source, Store* target, const StoreOptions& options)
      : source_(*source),
        target_(*target),
        options_(options),
        total_bytes_(WrittenBytes(*source)) {}

  absl::Status Run() {
    const std::vector<ExtentId> ids = WrittenExtents(source_);
    for (size_t begin = 0, end; begin < ids.size(); begin = end) {
      uint64_t size_bytes = 0;
      for (end = begin; end < ids.size() && (end == begin || size_bytes < kBatchBytes); ++end)
        size_bytes += source_.ExtentBytes(ids[end]);
      OFFLOAD_RETURN_IF_ERROR(CopyBatch({ids.data() + begin, end - begin}, size_bytes));
      done_bytes_ += size_bytes;
      if (options_.progress) options_.progress(done_bytes_, total_bytes_);
      if (options_.cancelled && options_.cancelled()) return absl::CancelledError("cancelled");
    }
    return absl::OkStatus();
  }

 private:
  absl::Status CopyBatch(std::span<const ExtentId> ids, uint64_t size_bytes) {
    if (buffer_.size() < size_bytes) {
      OFFLOAD_ASSIGN_OR_RETURN(buffer_, MappedRegion::Anonymous(size_bytes));
    }
    std::vector<ReadRequest> reads;
    std::byte* at = buffer_.data();
    for (const ExtentId& id : ids) {
      reads.push_back({id, at});
      at += source_.ExtentBytes(id);
    }
    std::vector<Stamp> stamps(ids.size());
    OFFLOAD_RETURN_IF_ERROR(
        RunToEnd(source_, [&](Store::Done done) { source_.Read(reads, stamps, std::move(done)); }));
    std::vector<WriteRequest> writes;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::span<const std::byte> bytes(reads[i].bytes, source_.ExtentBytes(ids[i]));
      if (!source_.Verify(ids[i], stamps[i], bytes)) return Damaged(ids[i]);
      Checksum checksum = target_.StartChecksum(ids[i], target_.open_sequence());
      checksum.Update(bytes);
      writes.push_back(
          {ids[i], reads[i].bytes, checksum.Finish(), stamps[i].word, stamps[i].flags});
    }
    return RunToEnd(target_, [&](Store::Done done) { target_.Write(writes, std::move(done)); });
  }

  absl::Status Damaged(const ExtentId& id) const {
    return MakeError(
        ErrorId::kChecksum,
        absl::StrCat(source_.path(), ": tensor ", id.tensor, ", plane ", static_cast<int>(id.plane),
                     ", index ", id.index, " is damaged, or its snapshot was deleted meanwhile"));
  }

  Store& source_;
  Store& target_;
  const StoreOptions& options_;
  const uint64_t total_bytes_;
  uint64_t done_bytes_ = 0;
  MappedRegion buffer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenForkSource(const std::string& pool,
                                                      const std::string& job,
                                                      const std::string& snapshot,
                                                      const StoreOptions& options) {
  return snapshot.empty() ? Store::Open(pool, job, options)
                          : Store::OpenSnapshot(pool, job, snapshot, options);
}

uint64_t WrittenBytes(const Store& source) {
  uint64_t size_bytes = 0;
  for (const ExtentId& id : WrittenExtents(source)) size_bytes += source.ExtentBytes(id);
  return size_bytes;
}

absl::Status Fork(Store& source, const std::string& pool, const std::string& job,
                  const StoreOptions& options) {
  StoreSpec spec = source.spec();
  spec.job = job;
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> target, Store::Create(pool, spec, options));
  OFFLOAD_RETURN_IF_ERROR(Copy(&source, target.get(), options).Run());
  FaultPoint("fork.copied");
  const CommitInfo& committed = source.committed();
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(*target, [&](Store::Done done) {
    target->Commit(committed.epoch, committed.blob, std::move(done));
  }));
  return target->Publish();
}

}  // namespace offload::swap
