// offloadctl config: checks a configuration file, shows what counts and from where, and reads
// DeepSpeed's.

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "config/ds_config.h"
#include "config/settings.h"
#include "config/toml_file.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

constexpr char kStandardInput[] = "-";

class ConfigCommand : public Command {
 public:
  const char* name() const override { return "config"; }
  const char* summary() const override {
    return "Checks an offloadd.toml, dumps the settings that count, imports a DeepSpeed "
           "configuration, or lists the keys";
  }
  const char* examples() const override {
    return "  offloadctl config check offloadd.toml\n"
           "  offloadctl config dump --origin\n"
           "  offloadctl config import ds_config.json -o offloadd.toml\n"
           "  offloadctl config schema\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("ACTION", action_, "check, dump, import or schema")
        ->required()
        ->check(CLI::IsMember({"check", "dump", "import", "schema"}));
    app.add_option("FILE", file_,
                   "check and dump: an offloadd.toml; import: a DeepSpeed configuration, - for "
                   "standard input");
    app.add_flag("--origin", origin_, "dump: also say where each setting comes from")
        ->always_capture_default(false);
    app.add_option("--set", assignments_,
                   "dump: KEY=VALUE, as an argument would set it (repeatable)");
    app.add_option("-o,--output", output_, "import: the offloadd.toml to write");
    app.add_option("--world-size", world_size_, "import: how many ranks batch sizes are divided by")
        ->check(CLI::Range(1, 1 << 20));
    app.add_flag("--strict", strict_, "import: keys that DeepSpeed does not know are errors")
        ->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    if (action_ == "check") return Check();
    if (action_ == "dump") return Dump();
    if (action_ == "import") return Import();
    return Schema();
  }

 private:
  absl::Status NeedFile() const {
    return file_.empty()
               ? MakeError(ErrorId::kBadValue, absl::StrCat("config ", action_, " needs a file"),
                           absl::StrCat("Name it: offloadctl config ", action_, " FILE"))
               : absl::OkStatus();
  }

  static Json SettingsAsJson(const config::Settings& settings, bool with_defaults) {
    Json list = Json::array();
    for (const config::Key& key : config::AllKeys()) {
      if (!with_defaults && !settings.has(key.name)) continue;
      const config::Setting setting = settings.Get(key.name);
      list.push_back({{"key", key.name}, {"value", setting.value}, {"origin", setting.origin}});
    }
    return list;
  }

  absl::StatusOr<Answer> Check() const {
    OFFLOAD_RETURN_IF_ERROR(NeedFile());
    OFFLOAD_ASSIGN_OR_RETURN(const std::string text, config::ReadSmallFile(file_));
    config::Settings settings;
    OFFLOAD_RETURN_IF_ERROR(config::ReadToml(text, file_, settings));
    Answer answer;
    answer.data = {{"file", file_}, {"settings", SettingsAsJson(settings, false)}};
    answer.text = absl::StrCat(settings.Table(false), file_, ": ", answer.data["settings"].size(),
                               " settings, all good\n");
    return answer;
  }

  absl::StatusOr<Answer> Dump() const {
    OFFLOAD_ASSIGN_OR_RETURN(config::Settings settings,
                             config::ReadFilesAndEnvironment(file_, config::ProcessEnvironment()));
    config::Settings arguments;
    for (const std::string& assignment : assignments_) {
      const size_t equals = assignment.find('=');
      if (equals == std::string::npos)
        return MakeError(ErrorId::kBadValue, absl::StrCat("--set ", assignment, " has no ="));
      OFFLOAD_RETURN_IF_ERROR(
          arguments.Set(assignment.substr(0, equals), assignment.substr(equals + 1), "flag --set"));
    }
    settings.Override(arguments);
    Answer answer;
    answer.data["settings"] = SettingsAsJson(settings, true);
    if (origin_) {
      answer.text = settings.Table(true);
      return answer;
    }
    for (const config::Key& key : config::AllKeys()) {
      const std::string value = settings.Get(key.name).value;
      absl::StrAppend(&answer.text,
                      absl::StrFormat("%-18s %s\n", key.name, value.empty() ? "-" : value));
    }
    return answer;
  }

  absl::StatusOr<std::string> ReadInput() const {
    if (file_ != kStandardInput) return config::ReadSmallFile(file_);
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = ::read(STDIN_FILENO, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(count));
      if (text.size() > size_t{16} << 20)
        return MakeError(ErrorId::kDsConfigText, "standard input is larger than 16 MiB");
    }
    return text;
  }

  absl::StatusOr<Answer> Import() const {
    OFFLOAD_RETURN_IF_ERROR(NeedFile());
    OFFLOAD_ASSIGN_OR_RETURN(const std::string text, ReadInput());
    OFFLOAD_ASSIGN_OR_RETURN(const config::Settings around,
                             config::ReadFilesAndEnvironment("", config::ProcessEnvironment()));
    config::ImportOptions options;
    options.name = file_ == kStandardInput ? "ds_config" : file_;
    options.world_size = world_size_;
    options.processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    options.has_pool = around.has("pool");
    OFFLOAD_ASSIGN_OR_RETURN(const config::Import import, config::ImportDsConfig(text, options));
    Answer answer;
    answer.data = config::ImportAsJson(import);
    answer.text = config::ImportTable(import);
    answer.problem = import.Problem();
    if (answer.problem.ok() && strict_ && HasUnknown(import))
      answer.problem =
          MakeError(ErrorId::kDsConfigValue,
                    absl::StrCat(options.name, " has keys that DeepSpeed does not know"),
                    "Correct or remove them");
    if (!answer.problem.ok()) {
      answer.exit_code = kUsage;
      answer.advice = output_.empty() ? "" : "Nothing was written.";
      return answer;
    }
    OFFLOAD_RETURN_IF_ERROR(Write(import, answer));
    return answer;
  }

  static bool HasUnknown(const config::Import& import) {
    for (const config::Fate& fate : import.fates) {
      if (fate.note.starts_with("DeepSpeed has no such key")) return true;
    }
    return false;
  }

  absl::Status Write(const config::Import& import, Answer& answer) const {
    if (output_.empty()) return absl::OkStatus();
    std::ofstream file(output_, std::ios::binary | std::ios::trunc);
    file << import.settings.ToToml() << std::flush;
    if (!file.good())
      return MakeError(ErrorId::kFileWrite, absl::StrCat(output_, " cannot be written"),
                       "Name a file in a folder that this user may write to");
    answer.data["output"] = output_;
    answer.advice = absl::StrCat("written to ", output_,
                                 "; what is training's stays in the DeepSpeed configuration");
    return absl::OkStatus();
  }

  static absl::StatusOr<Answer> Schema() {
    Answer answer;
    answer.data["keys"] = Json::array();
    size_t type_width = 0, environment_width = 0;
    for (const config::Key& key : config::AllKeys()) {
      type_width = std::max(type_width, TypeText(key).size());
      environment_width = std::max(environment_width, EnvironmentText(key).size());
    }
    for (const config::Key& key : config::AllKeys()) {
      const bool is_choice = key.type == config::KeyType::kChoice;
      const char* const environment = key.environment == nullptr ? "" : key.environment;
      answer.data["keys"].push_back({{"key", key.name},
                                     {"type", TypeName(key.type)},
                                     {"choices", is_choice ? key.choices : ""},
                                     {"default", key.otherwise},
                                     {"environment", environment},
                                     {"help", key.help}});
      absl::StrAppend(&answer.text,
                      absl::StrFormat("%-18s %-*s %-10s %-*s %s\n", key.name, type_width,
                                      TypeText(key), *key.otherwise == '\0' ? "-" : key.otherwise,
                                      environment_width, EnvironmentText(key), key.help));
    }
    return answer;
  }

  static std::string TypeText(const config::Key& key) {
    return key.type == config::KeyType::kChoice ? key.choices : TypeName(key.type);
  }
  static std::string EnvironmentText(const config::Key& key) {
    return key.environment == nullptr ? "-" : key.environment;
  }

  static const char* TypeName(config::KeyType type) {
    switch (type) {
      case config::KeyType::kJob:
        return "name";
      case config::KeyType::kDevice:
        return "device";
      case config::KeyType::kSize:
        return "size";
      case config::KeyType::kCount:
        return "count";
      case config::KeyType::kChoice:
        return "choice";
      case config::KeyType::kHome:
        return "auto, ram, nvme or a share";
      case config::KeyType::kPools:
        return "directories";
      case config::KeyType::kDurability:
        return "step or checkpoint:N";
      case config::KeyType::kAverage:
        return "none, ema:DECAY or swa:FROM:EVERY";
    }
    return "";
  }

  std::string action_, file_, output_;
  std::vector<std::string> assignments_;
  int world_size_ = 1;
  bool origin_ = false, strict_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeConfigCommand() { return std::make_unique<ConfigCommand>(); }

}  // namespace offload::tools
