// zero3/torch/log.h
//
// Where the library says what its user should know: standard error.
//
// Thread safety: any thread.
#pragma once

#include <spdlog/spdlog.h>

namespace offload::zero3 {

spdlog::logger& Log();

}  // namespace offload::zero3
