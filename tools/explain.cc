// offloadctl explain and version: what needs nothing but the program itself.

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"
#include "base/suggest.h"
#include "base/version.h"
#include "proto/shm_abi.h"
#include "swap/format.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

std::string IdText(ErrorId id) { return absl::StrCat("OFD-", static_cast<int>(id)); }

// "OFD-1203", "ofd-1203" or "1203".
const ErrorInfo* FindByText(const std::string& text) {
  std::string digits = text;
  std::transform(digits.begin(), digits.end(), digits.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  if (digits.starts_with("OFD-")) digits.erase(0, 4);
  int number = 0;
  return absl::SimpleAtoi(digits, &number) ? FindError(number) : nullptr;
}

absl::Status UnknownIdentifier(const std::string& text) {
  std::vector<std::string> known;
  for (const ErrorInfo& info : AllErrors()) known.push_back(IdText(info.id));
  const std::string nearest = NearestWord(text, known);
  const std::string fix = "offloadctl explain lists all";
  return MakeError(ErrorId::kBadValue, absl::StrCat("\"", text, "\" is not an error identifier"),
                   nearest.empty() ? fix : absl::StrCat("Did you mean ", nearest, "? ", fix));
}

class ExplainCommand : public Command {
 public:
  const char* name() const override { return "explain"; }
  const char* summary() const override { return "Says what an error means and what to do"; }
  const char* examples() const override {
    return "  offloadctl explain OFD-1203\n  offloadctl explain\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("ID", id_, "OFD-1203; nothing: all of them");
  }

  absl::StatusOr<Answer> Run() override {
    Answer answer;
    if (id_.empty()) {
      answer.data["errors"] = Json::array();
      for (const ErrorInfo& info : AllErrors()) {
        answer.data["errors"].push_back(Describe(info));
        absl::StrAppend(&answer.text, IdText(info.id), "  ", ToAbsl(info.text), "\n");
      }
      return answer;
    }
    const ErrorInfo* info = FindByText(id_);
    if (info == nullptr) return UnknownIdentifier(id_);
    answer.data = Describe(*info);
    answer.text = absl::StrCat(IdText(info->id), "  ", ToAbsl(info->text), "\nCause  ",
                               ToAbsl(info->cause), "\nFix    ", ToAbsl(info->fix), "\n");
    return answer;
  }

 private:
  static Json Describe(const ErrorInfo& info) {
    return {{"id", IdText(info.id)}, {"text", info.text}, {"cause", info.cause}, {"fix", info.fix}};
  }

  std::string id_;
};

class VersionCommand : public Command {
 public:
  const char* name() const override { return "version"; }
  const char* summary() const override { return "Says which release this is"; }
  const char* examples() const override { return "  offloadctl version\n"; }
  void DefineFlags(CLI::App&) override {}

  absl::StatusOr<Answer> Run() override {
    Answer answer;
    answer.data = {{"version", kVersion},
                   {"protocol", proto::kProtocolVersion},
                   {"store_format", swap::kFormatVersion}};
    answer.text = absl::StrCat("offloadctl ", kVersion, ", protocol ", proto::kProtocolVersion,
                               ", store format ", swap::kFormatVersion, "\n");
    return answer;
  }
};

}  // namespace

std::unique_ptr<Command> MakeExplainCommand() { return std::make_unique<ExplainCommand>(); }
std::unique_ptr<Command> MakeVersionCommand() { return std::make_unique<VersionCommand>(); }

}  // namespace offload::tools
