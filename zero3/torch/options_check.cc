#include "zero3/torch/options_check.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/durability.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/parse_averaging.h"
#include "base/run_names.h"
#include "zero3/torch/device_plan.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

uint64_t HintOf(const char* name, int64_t elements) {
  if (elements >= 0) return static_cast<uint64_t>(elements);
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat(name, " is ", elements),
                        "Set it to a number of elements, or leave it out"));
}

void CheckWeightsAtClose(const std::string& value) {
  if (value == "released" || value == "memory") return;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("weights_at_close is '", value, "'"),
                        "Set it to released or memory"));
}

}  // namespace

ZeroPolicy PolicyOf(const Options& options) {
  return {.stage = ValueOrThrow(CheckStage(options.zero_stage)),
          .weights = ValueOrThrow(ParseHome("weights_home", options.weights_home)),
          .state = ValueOrThrow(ParseHome("state_home", options.state_home)),
          .persistence = HintOf("persistence", options.persistence),
          .prefetch = HintOf("prefetch", options.prefetch),
          .max_live = HintOf("max_live", options.max_live)};
}

bool IsDisabled() {
  const char* const value = std::getenv("OFFLOADD_DISABLE");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

Averaging AveragingOf(const Options& options) {
  return ValueOrThrow(ParseAveraging(options.average));
}

bool ServesRaw(const Options& options) {
  if (options.raw_access == "serve") return true;
  if (options.raw_access == "error") return false;
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("raw_access is '", options.raw_access, "'"),
                        "Set it to serve or error"));
}

uint64_t CheckOptions(const Options& options) {
  ThrowIfError(CheckEnvironment(EnvironmentOfThisProcess()));
  const uint64_t ram_bytes = ValueOrThrow(ParseByteSize(options.ram), "ram");
  ThrowIfError(CheckJobName(options.job));
  ValueOrThrow(SplitPools(options.nvme_path));
  DevicePlan(options.gpu_ram, options.device);
  PolicyOf(options);
  ServesRaw(options);
  ReducesGradients(options);
  CheckWeightsAtClose(options.weights_at_close);
  ValueOrThrow(ParseDurability(options.durability));
  AveragingOf(options);
  return ram_bytes;
}

}  // namespace offload::zero3
