#include "config/toml_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace offload::config {
namespace {

constexpr size_t kFileBytesMax = size_t{16} << 20;

// Keys that other releases or other documents know, and why there is none of that name here.
struct Absent {
  const char* name;
  const char* why;
};
constexpr Absent kAbsent[] = {
    {"memory.gpu", "the memory of a GPU is gpu.ram"},
    {"pool.max", "a job's file is as large as its state; offloadctl plan says how large"},
    {"train.clip_norm", "clipping is the trainer's: torch::nn::utils::clip_grad_norm_"},
    {"train.accumulate", "accumulation is the trainer's: call step() after the last micro-batch"},
    {"limits.endurance_tb", "no such limit is built; offloadctl status shows what was written"},
    {"metrics.listen", "no such port is built; offloadctl status --json has the counters"},
    {"metrics.textfile", "no such file is built; offloadctl status --json has the counters"},
};

class TomlReader {
 public:
  TomlReader(std::string name, Settings& settings) : name_(std::move(name)), settings_(settings) {}

  absl::Status Table(const toml::table& table, const std::string& prefix) {
    for (const auto& [key, node] : table) {
      const std::string path = absl::StrCat(prefix, std::string(key.str()));
      if (path == "pool") {
        OFFLOAD_RETURN_IF_ERROR(Pools(node));
      } else if (node.is_table() && FindKey(path) == nullptr) {
        OFFLOAD_RETURN_IF_ERROR(Section(*node.as_table(), path, key.source()));
      } else {
        OFFLOAD_RETURN_IF_ERROR(Value(path, node, key.source()));
      }
    }
    return absl::OkStatus();
  }

 private:
  std::string At(const toml::source_region& source) const {
    return absl::StrCat(name_, ":", source.begin.line, ":", source.begin.column);
  }
  std::string LineOf(const toml::source_region& source) const {
    return absl::StrCat(name_, ":", source.begin.line);
  }

  absl::Status Wrong(const toml::source_region& source, const std::string& what,
                     const std::string& fix) const {
    return MakeError(ErrorId::kConfiguration, absl::StrCat(At(source), " ", what), fix);
  }

  // A section that holds no key of ours is named itself, which says more than its first key.
  absl::Status Section(const toml::table& table, const std::string& path,
                       const toml::source_region& source) {
    for (const Key& key : AllKeys()) {
      if (std::string_view(key.name).starts_with(path + ".")) return Table(table, path + ".");
    }
    if (table.empty()) return Unknown(path, source);
    for (const auto& [key, node] : table)
      return Unknown(absl::StrCat(path, ".", std::string(key.str())), key.source());
    return absl::OkStatus();
  }

  absl::Status Unknown(const std::string& path, const toml::source_region& source) const {
    for (const Absent& absent : kAbsent) {
      if (path == absent.name)
        return Wrong(source, absl::StrCat("there is no key \"", path, "\": ", absent.why),
                     "Remove the key");
    }
    Settings nothing;
    const absl::Status status = nothing.Set(path, "", At(source));
    return status;
  }

  absl::Status Value(const std::string& path, const toml::node& node,
                     const toml::source_region& source) {
    const Key* const key = FindKey(path);
    if (key == nullptr) return Unknown(path, source);
    std::string text;
    // A choice may be between numbers, a home may be a share.
    const bool takes_integer = key->type == KeyType::kSize || key->type == KeyType::kCount ||
                               key->type == KeyType::kHome || key->type == KeyType::kChoice;
    if (const auto* value = node.as_string(); value != nullptr && key->type != KeyType::kCount) {
      text = value->get();
    } else if (const auto* number = node.as_integer(); number != nullptr && takes_integer) {
      text = absl::StrCat(number->get());
    } else if (const auto* number = node.as_floating_point();
               number != nullptr && key->type == KeyType::kSize) {
      text = absl::StrFormat("%.0f", number->get());
    } else if (const auto* share = node.as_floating_point();
               share != nullptr && key->type == KeyType::kHome) {
      text = absl::StrCat(share->get());
    } else {
      return Wrong(source,
                   absl::StrCat("\"", path, "\" has ", TypeName(node), " where ",
                                key->type == KeyType::kCount  ? "an integer"
                                : key->type == KeyType::kSize ? "a size"
                                : key->type == KeyType::kHome ? "a home"
                                                              : "a text",
                                " belongs"),
                   absl::StrCat("It means: ", key->help));
    }
    if (absl::Status checked = Settings().Set(path, text, At(source)); !checked.ok())
      return checked;
    return settings_.Set(path, text, LineOf(source));
  }

  static std::string TypeName(const toml::node& node) {
    if (node.is_table()) return "a table";
    if (node.is_array()) return "a list";
    if (node.is_boolean()) return "a boolean";
    if (node.is_number()) return "a number";
    if (node.is_string()) return "a text";
    return "a date";
  }

  absl::Status Pools(const toml::node& node) {
    std::vector<std::string> pools;
    if (const auto* list = node.as_array()) {
      for (const toml::node& member : *list) OFFLOAD_RETURN_IF_ERROR(Pool(member, pools));
    } else {
      OFFLOAD_RETURN_IF_ERROR(Pool(node, pools));
    }
    std::string joined;
    for (const std::string& pool : pools) absl::StrAppend(&joined, joined.empty() ? "" : ",", pool);
    if (absl::Status checked = Settings().Set("pool", joined, At(node.source())); !checked.ok())
      return checked;
    return settings_.Set("pool", joined, LineOf(node.source()));
  }

  absl::Status Pool(const toml::node& node, std::vector<std::string>& pools) {
    const toml::node* path = &node;
    if (const auto* table = node.as_table()) {
      path = nullptr;
      for (const auto& [key, value] : *table) {
        if (key.str() != "path")
          return Unknown(absl::StrCat("pool.", std::string(key.str())), key.source());
        path = &value;
      }
    }
    const auto* text = path == nullptr ? nullptr : path->as_string();
    if (text == nullptr)
      return Wrong(node.source(), "a pool has no path", "Write pool = [{ path = \"/nvme0\" }]");
    // Several are one setting, separated by commas, for the engine, too.
    if (text->get().find(',') != std::string::npos && path != &node)
      return Wrong(node.source(),
                   absl::StrCat("pool \"", text->get(), "\" has a comma in its path"),
                   "Choose another directory");
    pools.push_back(text->get());
    return absl::OkStatus();
  }

  const std::string name_;
  Settings& settings_;
};

std::string Variable(const std::map<std::string, std::string>& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

}  // namespace

absl::Status ReadToml(std::string_view text, const std::string& name, Settings& settings) {
  const toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return MakeError(
        ErrorId::kConfiguration,
        absl::StrCat(name, ":", error.source().begin.line, ":", error.source().begin.column,
                     " is no TOML: ", ToAbsl(error.description())),
        "Correct the line");
  }
  return TomlReader(name, settings).Table(parsed.table(), "");
}

std::vector<std::string> FilesToRead(const std::string& named,
                                     const std::map<std::string, std::string>& environment) {
  if (!named.empty()) return {named};
  if (std::string chosen = Variable(environment, "OFFLOADD_CONFIG"); !chosen.empty())
    return {chosen};
  std::vector<std::string> files = {"/etc/offloadd/offloadd.toml"};
  std::string home = Variable(environment, "XDG_CONFIG_HOME");
  if (home.empty() && !Variable(environment, "HOME").empty())
    home = Variable(environment, "HOME") + "/.config";
  if (!home.empty()) files.push_back(home + "/offloadd/offloadd.toml");
  return files;
}

absl::StatusOr<Settings> ReadFiles(const std::string& named,
                                   const std::map<std::string, std::string>& environment) {
  const bool must_exist = !named.empty() || !Variable(environment, "OFFLOADD_CONFIG").empty();
  Settings settings;
  for (const std::string& path : FilesToRead(named, environment)) {
    std::error_code error;
    if (!must_exist && !std::filesystem::exists(path, error)) continue;
    OFFLOAD_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path));
    OFFLOAD_RETURN_IF_ERROR(ReadToml(text, path, settings));
  }
  return settings;
}

absl::StatusOr<Settings> ReadFilesAndEnvironment(
    const std::string& named, const std::map<std::string, std::string>& environment) {
  OFFLOAD_ASSIGN_OR_RETURN(Settings settings, ReadFiles(named, environment));
  OFFLOAD_RETURN_IF_ERROR(ReadEnvironment(environment, settings));
  return settings;
}

std::map<std::string, std::string> ProcessEnvironment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t end = text.find('=');
    if (end != std::string_view::npos) variables.emplace(text.substr(0, end), text.substr(end + 1));
  }
  return variables;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open() || is_folder)
    return MakeError(ErrorId::kFileRead,
                     absl::StrCat(path, " cannot be read", is_folder ? ": it is a folder" : ""));
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return MakeError(ErrorId::kFileRead, absl::StrCat(path, " cannot be read"));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kFileBytesMax)
    return MakeError(ErrorId::kConfiguration, absl::StrCat(path, " is larger than 16 MiB"));
  return text;
}

}  // namespace offload::config
