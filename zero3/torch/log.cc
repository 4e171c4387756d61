#include "zero3/torch/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <memory>

namespace offload::zero3 {

spdlog::logger& Log() {
  static const auto* const kLogger =
      new std::shared_ptr<spdlog::logger>(std::make_shared<spdlog::logger>(
          "offload", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  return **kLogger;
}

}  // namespace offload::zero3
