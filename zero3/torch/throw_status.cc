#include "zero3/torch/throw_status.h"

#include <offload/torch.h>

#include <optional>
#include <string>

#include "base/error.h"

namespace offload::zero3 {

void ThrowStatus(const absl::Status& status, std::string_view subject) {
  const std::optional<ErrorId> id = ErrorIdOf(status);
  std::string text(status.message());
  if (!id.has_value()) text = status.ToString();
  if (!subject.empty() && text.find(subject) == std::string::npos)
    text += " [" + std::string(subject) + "]";
  throw Error(id.has_value() ? static_cast<int>(*id) : 0, text);
}

}  // namespace offload::zero3
