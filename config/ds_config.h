// config/ds_config.h
//
// Reads a DeepSpeed configuration and says of every key what becomes of it: mapped to a setting or
// to what the trainer's loop does, ignored (with the reason), left to the trainer, or rejected
// (with the reason). Nothing is dropped without a line.
//
// Values are read as generously as DeepSpeed and its users write them: "auto" everywhere, 1e9 for
// an integer, numbers and booleans in quotes, keys of stage 3 with and without their prefix, aio
// inside zero_optimization, null for an absent section, old names. What would train something else
// than was asked for is rejected.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "config/json_text.h"
#include "config/settings.h"

namespace offload::config {

enum class Verdict { kMapped, kIgnored, kTrainer, kRejected };

// What became of one key.
struct Fate {
  std::string key, value;  // as in the file; the value as JSON, shortened
  Verdict verdict = Verdict::kIgnored;
  std::string target;            // of kMapped: "policy.optimizer = auto"
  std::string note;              // the reason; may be empty for kMapped and kTrainer
  std::optional<ErrorId> error;  // of kRejected

  // Makes a rejection of what was something else.
  void Refuse(ErrorId id, const std::string& why);
};

// What the trainer's loop does: offload::Engine has no options for it, the doors for DeepSpeed's
// programs do it. Absent values were "auto": somebody else decides them.
struct Training {
  std::optional<int64_t> batch_size, micro_batch_size, accumulation;
  std::optional<double> gradient_clipping;  // 0: none
  std::optional<bool> bf16;
  bool autocast = false;  // torch.autocast to bfloat16 around forward passes
  // AdamW, Adam, SGD, Adagrad, RMSprop or Lion; empty: the trainer's own. Params are checked and
  // complete, named as torch.optim names them; one may still be "auto".
  std::string optimizer;
  Json optimizer_params = Json::object();
  std::string scheduler;  // as in the file; empty: the trainer's own
  Json scheduler_params = Json::object();
  bool load_universal = false;  // the checkpoints that are loaded are universal ones
};

struct Import {
  Settings settings;
  Training training;
  std::vector<Fate> fates;            // of every key, in the order of the file
  std::vector<std::string> warnings;  // what a user should see even when all is well

  size_t Count(Verdict verdict) const;
  // OK, or the first rejection with its way out; says how many more there are.
  absl::Status Problem() const;
};

struct ImportOptions {
  std::string name = "ds_config.json";  // for messages
  int64_t world_size = 1;
  int processors = 1;     // that cpuadam_cores_perc counts
  bool has_pool = false;  // somebody else names the pool
};

// JSON (config/json_text.h), or that in url-safe base64. Fails with OFD-1101 when it cannot be
// read; what is wrong with single keys is in the result.
absl::StatusOr<Import> ImportDsConfig(std::string_view text, const ImportOptions& options);

// The word of the table: "mapped", "ignored", "trainer", "rejected".
const char* VerdictName(Verdict verdict);
// One line a key, and a sum.
std::string ImportTable(const Import& import);
// All of it for another language; `rejected` holds texts that begin with an identifier.
Json ImportAsJson(const Import& import);

}  // namespace offload::config
