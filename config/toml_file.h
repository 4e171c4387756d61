// config/toml_file.h
//
// Reads offloadd.toml. Strict: a key that there is not, a value of another type, or a key twice is
// OFD-1003 with file, line, column and the nearest key that there is.
//
// `pool` is a directory, a list of directories, or tables with a `path` (also [[pool]]).
//
// Thread safety: pure functions, except ReadFiles().
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/settings.h"

namespace offload::config {

// Reads the text of a file; origins of settings are "name:line". Settings that were there and are
// not in the text stay.
absl::Status ReadToml(std::string_view text, const std::string& name, Settings& settings);

// The configuration files of this user, weakest first: the one named (an argument, else
// OFFLOADD_CONFIG) alone; else the machine's and the user's.
std::vector<std::string> FilesToRead(const std::string& named,
                                     const std::map<std::string, std::string>& environment);

// What the files say. One that was named must be there (OFD-1405); the others may.
absl::StatusOr<Settings> ReadFiles(const std::string& named,
                                   const std::map<std::string, std::string>& environment);
// The same under the environment.
absl::StatusOr<Settings> ReadFilesAndEnvironment(
    const std::string& named, const std::map<std::string, std::string>& environment);

// The variables of this process.
std::map<std::string, std::string> ProcessEnvironment();

// All of a small file: OFD-1405 when it cannot be read, OFD-1003 above 16 MiB.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace offload::config
