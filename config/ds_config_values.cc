#include "config/ds_config_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/ascii.h"

namespace offload::config {
namespace {

constexpr size_t kShownMax = 60;

}  // namespace

bool IsAuto(const Json& value) { return value.is_string() && value == "auto"; }

std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShownMax) text = text.substr(0, kShownMax) + "…";
  return text;
}

const char* ShapeName(Shape shape) {
  switch (shape) {
    case Shape::kAny:
      return "anything";
    case Shape::kBool:
      return "true or false";
    case Shape::kInteger:
      return "an integer";
    case Shape::kNumber:
      return "a number";
    case Shape::kText:
      return "a text";
    case Shape::kList:
      return "a list";
    case Shape::kSection:
      return "a section";
  }
  return "";
}

std::optional<double> NumberIn(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(number))
    return std::nullopt;
  return number;
}

std::optional<int64_t> IntegerIn(const Json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX})
    return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (std::abs(number) >= 9e18 || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

std::optional<Json> Fitted(Shape shape, const Json& value, std::string& note) {
  if (shape == Shape::kAny || IsAuto(value)) return value;
  Json plain = value;
  const bool wants_number = shape == Shape::kInteger || shape == Shape::kNumber;
  if (value.is_string() && shape == Shape::kBool) {
    const std::string word = absl::AsciiStrToLower(value.get<std::string>());
    if (word == "true" || word == "false") plain = word == "true", note = "read without quotes";
  } else if (value.is_string() && wants_number) {
    if (const auto number = NumberIn(value.get<std::string>())) {
      plain = *number;
      note = "read without quotes";
    }
  }
  switch (shape) {
    case Shape::kBool:
      // 0 and 1 are what Python takes them for.
      if (plain.is_number_integer() && (plain == 0 || plain == 1)) plain = plain == 1;
      return plain.is_boolean() ? std::optional(plain) : std::nullopt;
    case Shape::kInteger:
      if (const auto integer = IntegerIn(plain)) return Json(*integer);
      return std::nullopt;
    case Shape::kNumber:
      return plain.is_number() && std::isfinite(plain.get<double>()) ? std::optional(plain)
                                                                     : std::nullopt;
    case Shape::kText:
      return plain.is_string() ? std::optional(plain) : std::nullopt;
    case Shape::kList:
      return plain.is_array() ? std::optional(plain) : std::nullopt;
    case Shape::kSection:
      return plain.is_object() ? std::optional(plain) : std::nullopt;
    case Shape::kAny:
      break;
  }
  return plain;
}

bool IsListOfTexts(const Json& value) {
  return value.is_array() &&
         std::all_of(value.begin(), value.end(), [](const Json& each) { return each.is_string(); });
}

bool IsSet(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() > 1;
  if (value.is_string()) return !IsAuto(value) && value != "" && value != "none";
  if (value.is_array()) return !value.empty();
  if (!value.is_object()) return false;
  if (const auto enabled = value.find("enabled"); enabled != value.end())
    return IsSet(*enabled) && *enabled != "false";
  return std::any_of(value.begin(), value.end(), [](const Json& member) { return IsSet(member); });
}

}  // namespace offload::config
