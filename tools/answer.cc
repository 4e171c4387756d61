#include "tools/answer.h"

#include <optional>

#include "base/error.h"

namespace offload::tools {

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kDone;
  if (absl::IsDeadlineExceeded(status)) return kTimeout;
  const std::optional<ErrorId> id = ErrorIdOf(status);
  if (!id.has_value()) return absl::IsDataLoss(status) ? kDamaged : kFailed;
  switch (*id) {
    case ErrorId::kUnknownFlag:
    case ErrorId::kBadValue:
    case ErrorId::kConfiguration:
    case ErrorId::kDsConfigText:
    case ErrorId::kDsConfigValue:
    case ErrorId::kDsConfigConflict:
    case ErrorId::kDsConfigUnsupported:
    case ErrorId::kDsConfigMissing:
    case ErrorId::kDsConfigResults:
      return kUsage;
    case ErrorId::kPoolFull:
    case ErrorId::kPoolNoDirectIo:
    case ErrorId::kBudgetTooSmall:
    case ErrorId::kGpuMemory:
      return kDoesNotFit;
    case ErrorId::kDaemonStart:
    case ErrorId::kDaemonLost:
      return kUnreachable;
    case ErrorId::kStoreDamaged:
    case ErrorId::kChecksum:
      return kDamaged;
    default:
      return kFailed;
  }
}

}  // namespace offload::tools
