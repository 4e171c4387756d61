#include "zero3/torch/throw_status.h"

#include <offload/torch.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "zero3/torch/throw_hook.h"

namespace offload::zero3 {
namespace {

ThrowHook throw_hook = nullptr;

}  // namespace

void SetThrowHook(ThrowHook hook) { throw_hook = hook; }

void ThrowStatus(const absl::Status& status, std::string_view subject) {
  const std::optional<ErrorId> id = ErrorIdOf(status);
  std::string text(status.message());
  if (!id.has_value()) text = status.ToString();
  if (!subject.empty() && text.find(subject) == std::string::npos)
    text += " [" + std::string(subject) + "]";
  if (throw_hook != nullptr) throw_hook(text);
  throw Error(id.has_value() ? static_cast<int>(*id) : 0, text);
}

}  // namespace offload::zero3
