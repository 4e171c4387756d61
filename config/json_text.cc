#include "config/json_text.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::config {
namespace {

constexpr int kDepthMax = 32;
// As Python writes it; accelerate's steps_per_print is.
constexpr std::string_view kInfinity = "Infinity", kLargest = "1.0e+308";

// Replaces comments and trailing commas by spaces, and Python's Infinity by the largest number, so
// that positions stay what they were.
class Blanker {
 public:
  explicit Blanker(std::string_view text) : text_(text) {}

  std::string Run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"') {
        SkipString();
      } else if (Starts("//") || c == '#') {
        Blank(std::min(text_.find('\n', at_), text_.size()));
      } else if (Starts("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        Blank(end == std::string::npos ? text_.size() : end + 2);
      } else if (Starts(kInfinity)) {
        text_.replace(at_, kInfinity.size(), kLargest);
        at_ += kInfinity.size();
      } else {
        Symbol(c);
      }
    }
    return std::move(text_);
  }

 private:
  bool Starts(std::string_view prefix) const {
    return std::string_view(text_).substr(at_).starts_with(prefix);
  }
  void SkipString() {
    comma_.reset();
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    ++at_;
  }
  void Blank(size_t end) {
    for (; at_ < end; ++at_) {
      if (text_[at_] != '\n') text_[at_] = ' ';
    }
  }
  void Symbol(char c) {
    if (c == ',') {
      comma_ = at_;
    } else if ((c == '}' || c == ']') && comma_.has_value()) {
      text_[*comma_] = ' ';
      comma_.reset();
    } else if (c != ' ' && c != '\t' && c != '\n' && c != '\r') {
      comma_.reset();
    }
    ++at_;
  }

  std::string text_;
  size_t at_ = 0;
  std::optional<size_t> comma_;  // the last symbol, when it was one
};

std::string Position(std::string_view text, size_t byte) {
  byte = std::min(byte, text.size());
  const std::string_view before = text.substr(0, byte);
  const size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
  const size_t start = before.rfind('\n');
  const size_t column = start == std::string_view::npos ? byte + 1 : byte - start;
  return absl::StrCat(line, ":", column);
}

}  // namespace

absl::StatusOr<Json> ReadRelaxedJson(std::string_view text, const std::string& name) {
  const std::string plain = Blanker(text).Run();
  std::vector<std::set<std::string>> keys;
  std::string problem;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key &&
        !keys.back().insert(parsed.get<std::string>()).second && problem.empty())
      problem = absl::StrCat("has the key \"", parsed.get<std::string>(), "\" twice");
    if (depth > kDepthMax && problem.empty())
      problem = absl::StrCat("is nested deeper than ", kDepthMax, " levels");
    return problem.empty();
  };
  Json value;
  try {
    value = Json::parse(plain, watch);
  } catch (const nlohmann::json::out_of_range& error) {
    const std::string said = error.what();  // "… number overflow parsing '1e400'"
    problem = absl::StrCat("has the number ", said.substr(said.find('\'')), ", which is too large");
  } catch (const nlohmann::json::parse_error& error) {
    if (problem.empty()) {
      return MakeError(ErrorId::kDsConfigText,
                       absl::StrCat(name, ":", Position(text, error.byte == 0 ? 0 : error.byte - 1),
                                    " is no JSON"));
    }
  }
  if (!problem.empty()) return MakeError(ErrorId::kDsConfigText, absl::StrCat(name, " ", problem));
  return value;
}

}  // namespace offload::config
