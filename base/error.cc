#include "base/error.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/string_view.h"

namespace offload {
namespace {

constexpr ErrorInfo kErrors[] = {
#define OFFLOAD_ERROR(number, name, code, text, cause, fix) \
  {ErrorId::name, absl::StatusCode::code, text, cause, fix},
#include "base/errors.def"
#undef OFFLOAD_ERROR
};

constexpr std::string_view kPrefix = "OFD-";
constexpr size_t kDigitCount = 4;

}  // namespace

std::span<const ErrorInfo> AllErrors() { return kErrors; }

const ErrorInfo* FindError(int number) {
  for (const ErrorInfo& info : kErrors) {
    if (static_cast<int>(info.id) == number) return &info;
  }
  return nullptr;
}

absl::Status MakeError(ErrorId id, std::string_view what) {
  const ErrorInfo* info = FindError(static_cast<int>(id));
  return MakeError(id, what, info == nullptr ? std::string_view() : info->fix);
}

absl::Status MakeError(ErrorId id, std::string_view what, std::string_view fix) {
  const ErrorInfo* info = FindError(static_cast<int>(id));
  if (what.empty() && info != nullptr) what = info->text;
  std::string message = absl::StrFormat("%s%04d %s.", kPrefix, static_cast<int>(id), what);
  if (!fix.empty()) absl::StrAppend(&message, " ", ToAbsl(fix), ".");
  return absl::Status(info == nullptr ? absl::StatusCode::kInternal : info->code, message);
}

// The text alone carries the identifier: code and message are what gRPC and exceptions keep.
std::optional<ErrorId> ErrorIdOf(const absl::Status& status) {
  const std::string_view message = ToStd(status.message());
  if (message.size() < kPrefix.size() + kDigitCount || !message.starts_with(kPrefix)) {
    return std::nullopt;
  }
  const std::string_view rest = message.substr(kPrefix.size());
  if (rest.size() > kDigitCount && rest[kDigitCount] != ' ') return std::nullopt;
  int number = 0;
  for (const char digit : rest.substr(0, kDigitCount)) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + (digit - '0');
  }
  const ErrorInfo* info = FindError(number);
  if (info == nullptr) return std::nullopt;
  return info->id;
}

std::string ErrnoText(int error_number) {
  const char* name = ::strerrorname_np(error_number);
  const char* description = ::strerrordesc_np(error_number);
  if (name == nullptr || description == nullptr) return absl::StrCat("errno ", error_number);
  return absl::StrCat(name, " (", description, ")");
}

}  // namespace offload
