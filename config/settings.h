// config/settings.h
//
// The settings of a run and where each came from: arguments win over the environment, that over a
// configuration file, that over defaults. What is here is what the engine can take
// (offload::Options, except the ranks, which the launcher decides); nothing else is a setting.
//
// A setting is held as checked text, so that a table of them can be printed, written as TOML and
// handed to another language without a conversion of its own for each.
//
// Thread safety: a Settings belongs to one thread at a time; AllKeys() is constant.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace offload::config {

enum class KeyType {
  kJob,         // a name that a job may have
  kDevice,      // "cuda:0"
  kSize,        // "8GiB", 8e9; or the default, "auto"
  kCount,       // an integer from 0
  kChoice,      // one of Key::choices
  kHome,        // "auto", "ram", "nvme", or the share between 0 and 1 that stays in memory
  kPools,       // directories, separated by commas
  kDurability,  // as ParseDurability reads it
  kAverage,     // as ParseAveraging reads it
};

struct Key {
  const char* name;         // in offloadd.toml, with its section: "memory.ram"
  const char* environment;  // the variable that sets it; null when there is none
  KeyType type;
  const char* otherwise;  // the default; "" where there is none
  const char* choices;    // of kChoice: "auto|nvme"; of kCount: the most, "14"; else ""
  const char* help;       // a line without a full stop
};

// In the order in which they are printed.
std::span<const Key> AllKeys();
// Null when there is none.
const Key* FindKey(std::string_view name);

struct Setting {
  std::string value;
  std::string origin;  // "flag --ram", "env OFFLOADD_RAM", "offloadd.toml:4", "ds.json", "default"
};

class Settings {
 public:
  // Sets a key, replacing what it had. OFD-1003 that begins with the origin, for a key that there
  // is not or a value that does not fit it.
  absl::Status Set(std::string_view key, std::string_view value, std::string_view origin);

  // What was set; its default ("" where it has none) otherwise.
  Setting Get(std::string_view key) const;
  bool has(std::string_view key) const { return set_.find(key) != set_.end(); }

  // What was set, as names and values of offload::Options.
  std::vector<std::pair<std::string, std::string>> EngineOptions() const;

  // Sets here whatever is set there.
  void Override(const Settings& stronger);

  // One line a setting: key, value, origin. Only those that were set, unless `with_defaults`.
  std::string Table(bool with_defaults) const;
  // An offloadd.toml that says the same, with origins as comments.
  std::string ToToml() const;

 private:
  std::map<std::string, Setting, std::less<>> set_;
};

// Reads the variables of AllKeys(); an empty one counts as absent.
absl::Status ReadEnvironment(const std::map<std::string, std::string>& environment,
                             Settings& settings);

}  // namespace offload::config
