// offloadctl: what a machine can do, what a run would need, what runs, and what a pool holds.

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/suggest.h"
#include "base/version.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

constexpr int kSchemaVersion = 1;

std::vector<std::unique_ptr<Command>> AllCommands() {
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(MakeDoctorCommand());
  commands.push_back(MakePlanCommand());
  commands.push_back(MakeStatusCommand());
  commands.push_back(MakeTopCommand());
  commands.push_back(MakeReportCommand());
  commands.push_back(MakeListCommand());
  commands.push_back(MakeRemoveCommand());
  commands.push_back(MakeFsckCommand());
  commands.push_back(MakeSnapshotCommand());
  commands.push_back(MakeExportCommand());
  commands.push_back(MakeImportCommand());
  commands.push_back(MakeConfigCommand());
  commands.push_back(MakeRunCommand());
  commands.push_back(MakeExplainCommand());
  commands.push_back(MakeCompletionCommand());
  commands.push_back(MakeVersionCommand());
  return commands;
}

// Prints answers and errors; with --json everything on stdout is one object.
class Printer {
 public:
  explicit Printer(bool json) : json_(json) {}

  int Print(const std::string& command, const absl::StatusOr<Answer>& answer) const {
    if (!answer.ok()) return PrintError(command, answer.status());
    if (json_) {
      Json object = Header(command);
      object.update(answer->data);
      if (!answer->problem.ok()) object["error"] = ErrorObject(command, answer->problem);
      std::cout << object.dump(2, ' ', false, Json::error_handler_t::replace) << std::endl;
    } else if (answer->next && isatty(STDOUT_FILENO) == 1) {
      return Redraw(command, *answer);
    } else {
      std::cout << answer->text << std::flush;
    }
    if (!answer->problem.ok()) std::cerr << answer->problem.message() << std::endl;
    if (!answer->advice.empty()) std::cerr << answer->advice << std::endl;
    return answer->exit_code;
  }

  // Until the terminal's interrupt, or an answer that is an error.
  int Redraw(const std::string& command, Answer answer) const {
    std::cout << "\x1b[2J";
    for (;;) {
      std::cout << "\x1b[H" << absl::StrReplaceAll(answer.text, {{"\n", "\x1b[K\n"}}) << "\x1b[J"
                << std::flush;
      absl::StatusOr<Answer> next = answer.next();
      if (!next.ok()) return PrintError(command, next.status());
      answer = *std::move(next);
    }
  }

  int PrintError(const std::string& command, const absl::Status& status) const {
    if (json_) {
      Json object = Header(command);
      object["error"] = ErrorObject(command, status);
      std::cout << object.dump(2, ' ', false, Json::error_handler_t::replace) << std::endl;
    }
    std::cerr << status.message() << std::endl;
    return CodeOf(command, status);
  }

 private:
  static Json Header(const std::string& command) {
    return {{"schema_version", kSchemaVersion}, {"command", command}};
  }
  static ExitCode CodeOf(const std::string& command, const absl::Status& status) {
    return command == "run" ? kNotStarted : ExitCodeOf(status);
  }
  static Json ErrorObject(const std::string& command, const absl::Status& status) {
    const std::optional<ErrorId> id = ErrorIdOf(status);
    Json object;
    object["id"] =
        id.has_value() ? Json(absl::StrCat("OFD-", static_cast<int>(*id))) : Json(nullptr);
    object["text"] = std::string(status.message());
    object["exit_code"] = static_cast<int>(CodeOf(command, status));
    return object;
  }

  const bool json_;
};

// The command that was named, or the program.
const CLI::App& Chosen(const CLI::App& app) {
  const std::vector<const CLI::App*> commands =
      app.get_subcommands([](const CLI::App* command) { return command->parsed(); });
  return commands.empty() ? app : *commands.front();
}

// As it is typed.
std::string PathOf(const CLI::App& app) {
  return app.get_parent() == nullptr ? "offloadctl" : absl::StrCat("offloadctl ", app.get_name());
}

// Turns what the parser did not know into an error with the nearest word that it does know.
absl::Status UnknownWord(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  const bool is_flag = word.starts_with("-");
  const std::string name = word.substr(0, word.find('='));
  if (is_flag) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& long_name : option->get_lnames()) known.push_back("--" + long_name);
    }
  } else {
    for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  }
  const std::string nearest = NearestWord(name, known);
  const std::string help = absl::StrCat(PathOf(app), " --help lists all");
  return MakeError(is_flag ? ErrorId::kUnknownFlag : ErrorId::kBadValue,
                   absl::StrCat(is_flag         ? "unknown flag "
                                : known.empty() ? "unexpected argument "
                                                : "unknown command ",
                                name),
                   nearest.empty() ? help : absl::StrCat("Did you mean ", nearest, "? ", help));
}

// What the parser has left over; the mark in front of words that are no flags is among it.
std::vector<std::string> LeftWords(const CLI::App& app) {
  std::vector<std::string> words = app.remaining();
  std::erase(words, "--");
  return words;
}

absl::Status FindUnknownWord(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    if (const std::vector<std::string> words = LeftWords(*command); !words.empty()) {
      return UnknownWord(*command, words.front());
    }
  }
  const std::vector<std::string> words = LeftWords(app);
  return words.empty() ? absl::OkStatus() : UnknownWord(app, words.front());
}

// A terminal's, and where a flag's explanation begins.
constexpr size_t kColumns = 80, kExplanationColumn = 30;

// Of a line that is longer the rest goes below its explanation. Commands stay whole, to be copied.
std::string Wrapped(const std::string& help) {
  std::vector<std::string> lines;
  std::vector<std::string> all = absl::StrSplit(help, '\n');
  for (std::string& line : all) {
    const bool is_command = line.starts_with("  offloadctl ");
    const size_t indent = line.starts_with(" ") ? kExplanationColumn : 0;
    while (line.size() > kColumns && !is_command) {
      const size_t space = line.rfind(' ', kColumns);
      if (space == std::string::npos || space <= indent) break;
      lines.push_back(line.substr(0, space));
      line.replace(0, space + 1, indent, ' ');
    }
    lines.push_back(std::move(line));
  }
  return absl::StrJoin(lines, "\n");
}

struct CommandLine {
  CommandLine()
      : app(absl::StrCat("For example:\n"
                         "  offloadctl doctor --pool /nvme0\n"
                         "  offloadctl plan --params 8B --ram 32GiB --pool /nvme0\n"
                         "  offloadctl status\n\n"
                         "Looks after offloadd ",
                         kVersion, " on this machine.")) {
    app.name("offloadctl");
    app.allow_extras();
    app.require_subcommand(0, 1);
    app.set_version_flag("--version", std::string("offloadctl ") + kVersion);
    for (const std::unique_ptr<Command>& command : commands) {
      CLI::App* child = app.add_subcommand(command->name(), command->summary());
      child->allow_extras();
      child->option_defaults()->always_capture_default();
      child->add_flag("--json", json, "one JSON object on stdout")->always_capture_default(false);
      command->DefineFlags(*child);
      for (CLI::Option* option : child->get_options()) {
        if (option->get_default_str() == "[]") option->default_str("");
      }
    }
  }

  // Of the chosen command, or of the program; begins with examples.
  std::string Help() {
    for (const std::unique_ptr<Command>& command : commands) {
      CLI::App* child = app.get_subcommand(command->name());
      if (!child->parsed()) continue;
      child->description(
          absl::StrCat("For example:\n", command->examples(), "\n", command->summary(), "."));
    }
    return Wrapped(app.help());
  }

  bool json = false;
  std::vector<std::unique_ptr<Command>> commands = AllCommands();
  CLI::App app;
};

bool WantsJson(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--json") return true;
  }
  return false;
}

int Main(int argc, char** argv) {
  // Logs of the libraries are messages: they never mix with the data on stdout.
  spdlog::set_default_logger(spdlog::stderr_logger_st("offloadctl"));
  spdlog::set_level(spdlog::level::warn);

  CommandLine line;
  const Printer printer(WantsJson(argc, argv));
  absl::Status parsed;
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << line.Help();
    return kDone;
  } catch (const CLI::CallForVersion& version) {
    std::cout << version.what() << std::endl;
    return kDone;
  } catch (const CLI::ParseError& error) {
    parsed = MakeError(ErrorId::kBadValue, error.what(),
                       absl::StrCat("See ", PathOf(Chosen(line.app)), " --help"));
  }
  const auto chosen = line.app.get_subcommands();
  const std::string name = chosen.empty() ? "" : chosen.front()->get_name();
  // A mistyped flag explains a missing one, so it is named first.
  if (absl::Status unknown = FindUnknownWord(line.app); !unknown.ok()) parsed = unknown;
  if (!parsed.ok()) return printer.PrintError(name, parsed);
  // A write beyond a limit is an error, not the end. A program that is run inherits this.
  if (name != "run") std::signal(SIGXFSZ, SIG_IGN);
  for (const std::unique_ptr<Command>& command : line.commands) {
    if (command->name() == name) return printer.Print(name, command->Run());
  }
  return printer.PrintError(
      "", MakeError(ErrorId::kBadValue, "no command is given", "See offloadctl --help"));
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  const int code = offload::tools::Main(argc, argv);
  std::cout.flush();
  if (std::cout || code != offload::tools::kDone) return code;
  // A full drive, for example: what was asked for is not there.
  std::cerr << offload::MakeError(offload::ErrorId::kFileWrite, "standard output cannot be written",
                                  "Write it where there is room")
                   .message()
            << std::endl;
  return offload::tools::kFailed;
}
