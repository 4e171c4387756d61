// tools/universal_source.h
//
// Reads a universal checkpoint of DeepSpeed without torch, as python/offloadd/universal.py does:
// universal.h has its folders. A file holds a tensor in the parameter's shape, or flat, or
// {"param": tensor, …}; step.pt may hold a number.
//
// Errors: OFD-1401 malformed, OFD-1402 does not fit, OFD-1405 cannot be read.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/slab_layout.h"
#include "zero3/saved_file.h"

namespace offload::tools {

class UniversalSource {
 public:
  // A folder of latest_universal, which names the checkpoint, or the checkpoint's own.
  static absl::StatusOr<UniversalSource> Open(const std::string& folder);

  const std::string& path() const { return zero_; }
  // Of the parameters, in order.
  absl::StatusOr<std::vector<std::string>> Names() const;
  bool Has(const std::string& name) const;
  // What its folder has beside fp32 and step: "exp_avg".
  absl::StatusOr<std::set<std::string>> StatesOf(const std::string& name) const;
  // How often a parameter was updated, by its own step.pt; none when it has none.
  absl::StatusOr<std::optional<uint64_t>> StepOf(const std::string& name) const;
  // How often they were, as the optimizer's own state says: one number for all, or none. Several
  // are of groups that nobody can tell apart.
  absl::StatusOr<std::set<uint64_t>> CommonSteps();

  // A tensor of the folder of `parameter`: "fp32", "exp_avg".
  absl::StatusOr<zero3::SavedTensorReader> Tensor(const proto::Tensor& parameter,
                                                  const std::string& file) const;

 private:
  explicit UniversalSource(std::string zero) : zero_(std::move(zero)) {}

  std::string zero_;                                // the folder whose folders are parameters
  std::optional<std::set<uint64_t>> common_steps_;  // once they are known
};

}  // namespace offload::tools
