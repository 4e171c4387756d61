// offloadctl completion: what a shell completes of an offloadctl command line, as a script in that
// shell's language. It is made of the parser's own tree, so that it knows every command, flag and
// value that there is. Everything else is completed to names of files.

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

using Words = std::vector<std::string>;

struct Flag {
  std::string name;  // without dashes
  std::string description;
  bool has_value = false;
  Words values;  // all that the parser takes; none: any
};

struct CommandWords {
  std::string name, description;
  std::vector<Flag> flags;
  Words first_words;  // that the first word after the command's name is one of
};

// Of "TEXT:{bf16,fp16}".
Words ValuesOf(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find('{'), end = type.rfind('}');
  if (begin == std::string::npos || end == std::string::npos) return {};
  return absl::StrSplit(type.substr(begin + 1, end - begin - 1), ',');
}

CommandWords WordsOf(const CLI::App& command) {
  CommandWords words{.name = command.get_name(), .description = command.get_description()};
  bool has_first = false;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_positional() && !has_first) words.first_words = ValuesOf(*option);
    has_first = has_first || option->get_positional();
    for (const std::string& name : option->get_lnames()) {
      words.flags.push_back({.name = name,
                             .description = option->get_description(),
                             .has_value = option->get_items_expected_max() > 0,
                             .values = ValuesOf(*option)});
    }
  }
  return words;
}

std::vector<CommandWords> CommandsOf(const CLI::App& program) {
  std::vector<CommandWords> commands;
  for (const CLI::App* command :
       program.get_subcommands([](const CLI::App* each) { return !each->get_name().empty(); })) {
    commands.push_back(WordsOf(*command));
  }
  return commands;
}

// In single quotes, which end for a quote.
std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

Words FlagsOf(const CommandWords& command) {
  Words flags;
  for (const Flag& flag : command.flags) flags.push_back("--" + flag.name);
  return flags;
}

// The function gets the word and the one in front of it. What it leaves empty are files.
std::string BashScript(const CommandWords& program, const std::vector<CommandWords>& commands) {
  Words names;
  std::string values, words;
  for (const CommandWords& command : commands) {
    names.push_back(command.name);
    Words any_value;
    for (const Flag& flag : command.flags) {
      if (!flag.has_value) continue;
      const std::string place = absl::StrCat(command.name, ":--", flag.name);
      if (flag.values.empty()) {
        any_value.push_back(place);
      } else {
        absl::StrAppend(&values, "    ", place, ") words='", absl::StrJoin(flag.values, " "),
                        "' ;;\n");
      }
    }
    if (!any_value.empty())
      absl::StrAppend(&values, "    ", absl::StrJoin(any_value, " | "), ") return 0 ;;\n");
    if (!command.first_words.empty()) {
      absl::StrAppend(&values, "    ", command.name, ":", command.name, ") words='",
                      absl::StrJoin(command.first_words, " "), "' ;;\n");
    }
    absl::StrAppend(&words, "        ", command.name, ") words='",
                    absl::StrJoin(FlagsOf(command), " "), "' ;;\n");
  }
  return absl::StrCat(
      "# What bash completes of offloadctl.\n"
      "_offloadctl() {\n"
      "  local word=$2 before=$3 words=\n"
      "  COMPREPLY=()\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    COMPREPLY=($(compgen -W '",
      absl::StrJoin(names, " "), " ", absl::StrJoin(FlagsOf(program), " "),
      "' -- \"$word\"))\n"
      "    return\n"
      "  fi\n"
      "  [[ \" ${COMP_WORDS[*]:0:COMP_CWORD} \" == *' -- '* ]] && return 0\n"
      "  case ${COMP_WORDS[1]}:$before in\n",
      values,
      "    *)\n"
      "      [[ $word == -* ]] || return 0\n"
      "      case ${COMP_WORDS[1]} in\n",
      words,
      "      esac ;;\n"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}\n"
      "complete -o default -F _offloadctl offloadctl\n");
}

// Of _arguments, where brackets and colons have a meaning.
std::string ZshText(const std::string& text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
}

std::string ZshValues(const Words& values) {
  return values.empty() ? "_files" : absl::StrCat("(", absl::StrJoin(values, " "), ")");
}

std::string ZshScript(const std::vector<CommandWords>& commands) {
  std::string names, arguments;
  for (const CommandWords& command : commands) {
    absl::StrAppend(&names, "    ", Quoted(absl::StrCat(command.name, ":", command.description)),
                    "\n");
    absl::StrAppend(&arguments, "    ", command.name, ") _arguments -S");
    for (const Flag& flag : command.flags) {
      const std::string value =
          flag.has_value ? absl::StrCat(":value:", ZshValues(flag.values)) : "";
      absl::StrAppend(&arguments, " \\\n      ",
                      Quoted(absl::StrCat("--", flag.name, flag.has_value ? "=[" : "[",
                                          ZshText(flag.description), "]", value)));
    }
    if (!command.first_words.empty()) {
      absl::StrAppend(&arguments, " \\\n      ",
                      Quoted(absl::StrCat("1:word:", ZshValues(command.first_words))));
    }
    absl::StrAppend(&arguments, " \\\n      '*:file:_files' ;;\n");
  }
  return absl::StrCat(
      "#compdef offloadctl\n"
      "_offloadctl() {\n"
      "  local -a commands=(\n",
      names,
      "  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  shift words\n"
      "  ((CURRENT--))\n"
      "  case $words[1] in\n",
      arguments,
      "  esac\n"
      "}\n"
      "if [[ $funcstack[1] == _offloadctl ]]; then _offloadctl; "
      "else compdef _offloadctl offloadctl; fi\n");
}

std::string FishScript(const std::vector<CommandWords>& commands) {
  std::string script = "# What fish completes of offloadctl.\n";
  for (const CommandWords& command : commands) {
    absl::StrAppend(&script, "complete -c offloadctl -n __fish_use_subcommand -f -a ", command.name,
                    " -d ", Quoted(command.description), "\n");
    const std::string of_command =
        absl::StrCat("complete -c offloadctl -n '__fish_seen_subcommand_from ", command.name, "'");
    if (!command.first_words.empty()) {
      absl::StrAppend(&script, of_command, " -a ", Quoted(absl::StrJoin(command.first_words, " ")),
                      "\n");
    }
    for (const Flag& flag : command.flags) {
      absl::StrAppend(&script, of_command, " -l ", flag.name, " -d ", Quoted(flag.description));
      if (!flag.values.empty()) {
        absl::StrAppend(&script, " -xa ", Quoted(absl::StrJoin(flag.values, " ")));
      } else if (flag.has_value) {
        absl::StrAppend(&script, " -r");
      }
      absl::StrAppend(&script, "\n");
    }
  }
  return script;
}

class CompletionCommand : public Command {
 public:
  const char* name() const override { return "completion"; }
  const char* summary() const override { return "Writes what a shell needs to complete commands"; }
  const char* examples() const override {
    return "  source <(offloadctl completion bash)\n"
           "  offloadctl completion fish > ~/.config/fish/completions/offloadctl.fish\n";
  }
  void DefineFlags(CLI::App& app) override {
    app_ = &app;
    app.add_option("SHELL", shell_, "bash, zsh or fish")
        ->required()
        ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  }

  absl::StatusOr<Answer> Run() override {
    const CLI::App& program = *app_->get_parent();
    const std::vector<CommandWords> commands = CommandsOf(program);
    Answer answer;
    answer.text = shell_ == "bash"  ? BashScript(WordsOf(program), commands)
                  : shell_ == "zsh" ? ZshScript(commands)
                                    : FishScript(commands);
    answer.data = {{"shell", shell_}, {"script", answer.text}};
    return answer;
  }

 private:
  const CLI::App* app_ = nullptr;
  std::string shell_;
};

}  // namespace

std::unique_ptr<Command> MakeCompletionCommand() { return std::make_unique<CompletionCommand>(); }

}  // namespace offload::tools
