// config/ds_config_batches.h
//
// How sizes of batches complete each other, as in DeepSpeed: batch = micro-batch × accumulation ×
// ranks.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/ds_config.h"

namespace offload::config {

// What contradicts what; nothing when all is well. `others_complete`: somebody else decides one of
// them, and what is absent stays so.
std::optional<std::string> CompleteBatches(Training& training, int64_t ranks, bool others_complete);

}  // namespace offload::config
