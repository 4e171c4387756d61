// zero3/hf_layout.h
//
// Checkpoints as Hugging Face lays them out: one model.safetensors, or shards with an index that
// says which tensor is in which.
//
//   model-00001-of-00003.safetensors …
//   model.safetensors.index.json   {"metadata": {"total_size", …}, "weight_map": {name: file}}
//
// Index and shards must agree exactly: every tensor of a shard is in the index with that shard, and
// the other way round. Nothing is opened outside of the folder.
//
// Errors: those of safetensors.h, and OFD-1402 when a checkpoint does not fit a model.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero3/safetensors.h"

namespace offload::zero3 {

inline constexpr char kSingleFileName[] = "model.safetensors";
inline constexpr char kIndexFileName[] = "model.safetensors.index.json";

// "model-00002-of-00003.safetensors" for index 1 of 3; kSingleFileName when there is one shard.
std::string ShardFileName(size_t index, size_t count);

struct HfIndex {
  std::unordered_map<std::string, std::string> file_by_tensor;
};

// Checks the text of an index: file names are plain names that end in ".safetensors". A pure
// function; errors begin with `path`.
absl::StatusOr<HfIndex> ParseIndex(std::string_view json, const std::string& path);

// Thread safety: immutable after Open(); Read() may be called from several threads.
class HfCheckpoint {
 public:
  // Opens a folder with an index or a single file, or a safetensors file itself.
  static absl::StatusOr<HfCheckpoint> Open(const std::string& path);

  // Names of all tensors, shard after shard, in the order of their data: the cheapest order to
  // read.
  std::vector<std::string> Names() const;

  // Null when there is no tensor of that name.
  const FileEntry* Find(std::string_view name) const;

  // Reads part of a tensor. NOT_FOUND when there is none of that name; the part must lie inside of
  // it.
  absl::Status Read(std::string_view name, uint64_t offset_bytes, std::span<std::byte> bytes) const;

  size_t tensor_count() const { return locations_.size(); }

 private:
  struct Location {
    const SafetensorsReader* shard;
    const FileEntry* entry;
  };

  absl::Status AddShard(const std::string& path);
  absl::Status CheckIndex(const HfIndex& index, const std::string& path) const;

  std::vector<std::unique_ptr<SafetensorsReader>> shards_;
  std::unordered_map<std::string_view, Location> locations_;  // views of names in shards_
};

// A small text file beside the tensors, such as config.json. Written durably under its name, or not
// at all.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);
absl::Status WriteTextFile(const std::string& path, const std::string& text);

// OFD-1404 when a folder holds a checkpoint already, which the writer would refuse; a folder that
// is not there is fine. Asked before long work whose result goes there.
absl::Status CheckHoldsNoCheckpoint(const std::string& folder);

// A tensor that a model wants from a checkpoint.
struct WantedTensor {
  std::string name;
  std::vector<uint64_t> shape;
  bool is_double = false;  // F64 fits, too
  bool any_type = false;   // whoever reads it looks at that
};

// OFD-1402 with the first difference: a tensor that is missing, has another shape, or that nobody
// wants. Names in `ignored` may be there or not (the output matrix of a tied model), and so may
// tables of rotary frequencies, which old checkpoints hold. OFD-1403 for a type other than F32, F16
// and BF16, which a weight takes, and F64 for a weight that is not fp64 itself.
absl::Status CheckFits(const HfCheckpoint& checkpoint, std::span<const WantedTensor> wanted,
                       std::span<const std::string> ignored = {});

// Writes a checkpoint: shards of bounded size, and an index when there is more than one. Names
// appear only at Commit(), the index last, so a folder never holds half a checkpoint under an
// index.
//
// Thread safety: one thread.
class HfCheckpointWriter {
 public:
  struct Settings {
    uint64_t shard_bytes =
        5'000'000'000;  // one tensor may be larger and then has a shard for itself
  };

  // Makes the folder when it is not there; refuses one that already holds a checkpoint (OFD-1404).
  static absl::StatusOr<std::unique_ptr<HfCheckpointWriter>> Create(const std::string& folder,
                                                                    std::vector<FileTensor> tensors,
                                                                    const Settings& settings);
  static absl::StatusOr<std::unique_ptr<HfCheckpointWriter>> Create(
      const std::string& folder, std::vector<FileTensor> tensors) {
    return Create(folder, std::move(tensors), Settings());
  }

  // Appends the next bytes of a tensor, as SafetensorsWriter::Append().
  absl::Status Append(std::string_view name, std::span<const std::byte> bytes);

  // Refuses when a tensor is not complete; then nothing has a name yet.
  absl::Status Commit();

 private:
  HfCheckpointWriter() = default;
  absl::Status WriteIndex() const;

  std::string folder_;
  std::vector<std::unique_ptr<SafetensorsWriter>> shards_;
  std::unordered_map<std::string, size_t> shard_by_tensor_;
  uint64_t total_bytes_ = 0;
  uint64_t total_parameters_ = 0;
};

}  // namespace offload::zero3
