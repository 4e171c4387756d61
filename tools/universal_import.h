// tools/universal_import.h
//
// Makes a job of a universal checkpoint of DeepSpeed, without torch and trainer: a new one with the
// model and the optimizer of a job that is there, and the values of the checkpoint.
//
// Invariants
//   * The new store gets its name when everything is in it and committed: whatever happens before
//     leaves no job.
//   * What is in memory meanwhile is a few extents; of a parameter that does not lie row by row,
//     all of it.
//   * The values are those that a trainer has after handle.load_universal(): masters and moments
//     bit for bit, weights their casts.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/store.h"
#include "tools/stored_model.h"
#include "tools/universal_source.h"

namespace offload::tools {

struct CheckedImport {
  std::vector<uint64_t> update_counts;  // by tensor of the catalogue
  uint64_t step = 0;                    // the largest of them, or what the optimizer's state says
  uint64_t bytes = 0;                   // of all values as fp32, of fp64 models fp64
};

// Whether the checkpoint has what the job has, and nothing else: names, shapes, what its optimizer
// keeps. Looks into every file. OFD-1401, 1402, 1405.
absl::StatusOr<CheckedImport> CheckImport(const StoredModel& model, UniversalSource& source);

// Makes the job that spec names, in `pool`. Errors as swap::Store::Create, those of a checkpoint
// that changes or is damaged, OFD-1208 for a buffer of the job that is.
absl::Status ImportUniversal(StoredModel& model, const UniversalSource& source,
                             const CheckedImport& checked, uint64_t step, const std::string& pool,
                             const std::string& job, const swap::StoreOptions& options);

}  // namespace offload::tools
