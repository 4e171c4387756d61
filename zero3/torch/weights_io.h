// zero3/torch/weights_io.h
//
// Weights of a module in safetensors files: what they are called there, and their bytes in the
// type of the model. Shared by the engine, whose weights are in the daemon, and by modules in
// memory.
//
// A weight has the name that module.named_parameters() gives it first; under its other names
// (tied weights) it is not written, and not looked at when a file has it. Buffers stand behind the
// weights, under the names of module.named_buffers(); a file that has none of them leaves them as
// they are.
//
// Invariants
//   * A WeightFile that was opened fits the model: every name, shape and type has been checked.
//   * Memory does not grow with the file: one buffer of a fixed size.
//
// Thread safety: one thread per object.
#pragma once

#include <offload/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero3/hf_layout.h"

namespace offload::zero3 {

// A weight as files see it.
struct FileWeight {
  std::string name;
  std::vector<std::string> other_names;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  at::Tensor tensor;  // undefined where the bytes are in the daemon
  bool is_buffer = false;

  uint64_t ElementCount() const;
};

// What a tensor is called: by its module, a file, or whoever attaches it.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The parameters of a module in its order, under all their names, each with `prefix` before it.
std::vector<NamedTensor> NamedParameters(const torch::nn::Module& module,
                                         const std::string& prefix = "");

// The same of its buffers.
std::vector<NamedTensor> NamedBuffers(const torch::nn::Module& module,
                                      const std::string& prefix = "");

// The tensors of a list, a tied one once, those without elements included. OFD-1601 for types
// other than float32, bfloat16 and float16.
absl::StatusOr<std::vector<FileWeight>> FindFileWeights(std::span<const NamedTensor> tensors);
// Buffers, behind weights; they may be of any type that files have. OFD-1601 for others.
absl::Status AddFileBuffers(std::span<const NamedTensor> buffers, std::vector<FileWeight>& weights);

// A checkpoint that is about to be loaded.
class WeightFile {
 public:
  // Opens a folder or a file, and checks all of it against the weights, without reading data.
  // OFD-1401, 1402, 1403, 1405.
  static absl::StatusOr<WeightFile> Open(const std::string& path,
                                         const std::vector<FileWeight>& weights,
                                         const LoadOptions& options);

  // Whether the file has it; all weights, and all buffers or none.
  bool Has(const FileWeight& weight) const { return checkpoint_.Find(weight.name) != nullptr; }
  // Reads a buffer.
  absl::Status ReadBuffer(const FileWeight& buffer);
  // Reads elements of a weight into memory, in the type of the model.
  absl::Status Read(const FileWeight& weight, uint64_t first_element, uint64_t element_count,
                    std::byte* target);

 private:
  explicit WeightFile(HfCheckpoint checkpoint);

  HfCheckpoint checkpoint_;
  std::vector<std::byte> buffer_;  // bytes of the file's type, before conversion
};

// Whether averages of the weights are saved. OFD-1002 for a plane that files do not take, or that
// the job does not keep.
bool SavesAverage(const SaveOptions& options, bool keeps_average);

// Begins a checkpoint of these weights. OFD-1404.
absl::StatusOr<std::unique_ptr<HfCheckpointWriter>> CreateWeightFiles(
    const std::string& folder, const std::vector<FileWeight>& weights, const SaveOptions& options);

// The bytes of a buffer, in order, for the file.
absl::Status AppendBuffer(const FileWeight& buffer, HfCheckpointWriter& writer);

// Weights in memory, from and to files; throw offload::Error.
void LoadIntoMemory(const std::vector<FileWeight>& weights, const std::string& path,
                    const LoadOptions& options);
void SaveFromMemory(const std::vector<FileWeight>& weights, const std::string& folder,
                    const SaveOptions& options);

}  // namespace offload::zero3
