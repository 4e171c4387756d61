#include "base/run_names.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload {
namespace {

std::vector<std::string> PiecesOf(std::string_view pool) {
  std::vector<std::string> pools = absl::StrSplit(ToAbsl(pool), ',');
  if (pools.size() == 1) return pools;
  for (std::string& each : pools) each = std::string(absl::StripAsciiWhitespace(each));
  return pools;
}

// "/nvme0/" is "/nvme0".
std::filesystem::path PlainPath(const std::string& pool) {
  const std::filesystem::path path = std::filesystem::path(pool).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

std::string WithoutTilde(const std::string& pool) {
  const char* const home = std::getenv("HOME");
  if (home == nullptr || *home == '\0' || (pool.size() > 1 && pool[1] != '/')) return "";
  return absl::StrCat(home, pool.substr(1));
}

}  // namespace

bool IsValidJobName(std::string_view job) {
  if (job.empty() || job.size() > kJobNameBytesMax || job.front() == '.') return false;
  return std::all_of(job.begin(), job.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' ||
           c == '#';
  });
}

std::optional<NameComplaint> ComplainOfJob(std::string_view job) {
  if (IsValidJobName(job)) return std::nullopt;
  return NameComplaint{"is no name of a job",
                       absl::StrCat("Use letters, digits and . _ - #, at most ", kJobNameBytesMax,
                                    ", not beginning with a dot")};
}

absl::Status CheckJobName(std::string_view job) {
  const std::optional<NameComplaint> complaint = ComplainOfJob(job);
  if (!complaint.has_value()) return absl::OkStatus();
  return MakeError(ErrorId::kBadValue, absl::StrCat("job name \"", ToAbsl(job), "\""),
                   complaint->fix);
}

std::optional<NameComplaint> ComplainOfPools(std::string_view pool) {
  const std::vector<std::string> pools = PiecesOf(pool);
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i].empty() && pools.size() > 1) {
      return NameComplaint{"has a comma with no path on one side of it",
                           "Leave it out, or give a directory there"};
    }
    if (pools[i].starts_with('~')) {
      const std::string meant = WithoutTilde(pools[i]);
      return NameComplaint{
          "begins with the ~ of shells, which is no directory here",
          absl::StrCat("Write the directory in full",
                       meant.empty() ? std::string() : absl::StrCat(", such as ", meant))};
    }
    const auto end = pools.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::any_of(pools.begin(), end, [&](const std::string& before) {
          return PlainPath(before) == PlainPath(pools[i]);
        })) {
      return NameComplaint{absl::StrCat("names ", pools[i], " twice"),
                           "Name each directory once: the state is striped over all of them"};
    }
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<std::string>> SplitPools(std::string_view pool) {
  const std::optional<NameComplaint> complaint = ComplainOfPools(pool);
  if (!complaint.has_value()) return PiecesOf(pool);
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat("nvme_path \"", ToAbsl(pool), "\" ", complaint->what),
                   complaint->fix);
}

std::optional<NameComplaint> ComplainOfDevice(std::string_view device) {
  const std::string_view kind = device.substr(0, device.find(':'));
  const std::string_view number = device.substr(std::min(kind.size() + 1, device.size()));
  const bool is_numbered = kind.size() < device.size();
  const bool is_number =
      !number.empty() && number.size() < 4 && std::all_of(number.begin(), number.end(), [](char c) {
        return absl::ascii_isdigit(static_cast<unsigned char>(c));
      });
  // The last is what programs that bring a device of their own call it.
  const bool is_kind = kind == "cuda" || kind == "cpu" || kind == "privateuseone";
  if (is_kind && is_number == is_numbered) return std::nullopt;
  return NameComplaint{"is no device of torch that is served",
                       "Write cuda:0 for the first GPU, or leave it out"};
}

}  // namespace offload
