#include "swap/unmounted_drive.h"

#include <mntent.h>
#include <stdio.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::swap {
namespace {

bool IsAtOrAbove(const std::string& directory, const std::string& path) {
  return path.starts_with(directory) &&
         (path.size() == directory.size() || path[directory.size()] == '/');
}

// Of those that a table names; "" when there is none but the root.
std::string DeepestAbove(const std::string& path, const std::string& table) {
  std::string deepest;
  std::string text = table;
  FILE* const file = text.empty() ? nullptr : fmemopen(text.data(), text.size(), "r");
  if (file == nullptr) return deepest;
  std::vector<char> line(text.size() + 1);
  mntent entry;
  while (getmntent_r(file, &entry, line.data(), static_cast<int>(line.size())) != nullptr) {
    std::string directory = entry.mnt_dir;
    while (directory.ends_with('/')) directory.pop_back();
    if (directory.size() > deepest.size() && IsAtOrAbove(directory, path)) deepest = directory;
  }
  fclose(file);
  return deepest;
}

std::string TextOf(const char* file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

std::optional<std::string> UnmountedAbove(const std::string& path, const std::string& fstab,
                                          const std::string& mounts) {
  const std::string named = DeepestAbove(path, fstab);
  if (named.size() <= DeepestAbove(path, mounts).size()) return std::nullopt;
  return named;
}

absl::Status CheckIsMounted(const std::string& pool) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(pool, error);
  const std::string mounts = TextOf("/proc/self/mounts");
  if (error || mounts.empty()) return absl::OkStatus();
  const std::optional<std::string> unmounted =
      UnmountedAbove(path.string(), TextOf("/etc/fstab"), mounts);
  if (!unmounted.has_value()) return absl::OkStatus();
  return MakeError(ErrorId::kPoolMissing,
                   absl::StrCat("nvme_path ", pool, ": /etc/fstab has a drive at ", *unmounted,
                                ", which is not mounted, and a new job would begin on another"),
                   absl::StrCat("Mount it (mount ", *unmounted,
                                "): a job that is there goes on. Or take its line out of "
                                "/etc/fstab, or name another directory"));
}

}  // namespace offload::swap
