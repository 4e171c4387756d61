#include "config/ds_config_batches.h"

#include "absl/strings/str_cat.h"

namespace offload::config {

std::optional<std::string> CompleteBatches(Training& training, int64_t ranks,
                                           bool others_complete) {
  std::optional<int64_t>&batch = training.batch_size, &micro = training.micro_batch_size,
  &accumulation = training.accumulation;
  if (batch && micro && accumulation) {
    if (*batch % *micro == 0 && *batch / *micro % *accumulation == 0 &&
        *batch / *micro / *accumulation == ranks)
      return std::nullopt;
    return absl::StrCat("train_batch_size ", *batch, " is not ", *micro, " × ", *accumulation,
                        " × ", ranks, " ranks");
  }
  if (others_complete) return std::nullopt;
  if (batch && micro) {
    if (*batch % *micro != 0 || *batch / *micro % ranks != 0)
      return absl::StrCat("train_batch_size ", *batch, " is no multiple of ", *micro, " × ", ranks,
                          " ranks");
    accumulation = *batch / *micro / ranks;
  } else if (batch && accumulation) {
    if (*batch % *accumulation != 0 || *batch / *accumulation % ranks != 0)
      return absl::StrCat("train_batch_size ", *batch, " is no multiple of ", *accumulation, " × ",
                          ranks, " ranks");
    micro = *batch / *accumulation / ranks;
  } else if (batch) {
    if (*batch % ranks != 0)
      return absl::StrCat("train_batch_size ", *batch, " is no multiple of ", ranks, " ranks");
    micro = *batch / ranks;
    accumulation = 1;
  } else if (!accumulation) {
    accumulation = 1;
  }
  return std::nullopt;
}

}  // namespace offload::config
