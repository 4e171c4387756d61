#include "base/byte_size.h"

#include <cmath>
#include <optional>
#include <span>

#include "absl/strings/ascii.h"
#include "absl/strings/charconv.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload {
namespace {

constexpr double kTwoTo64 = 18446744073709551616.0;

struct Unit {
  std::string_view name;  // in lower case
  double factor;
};

constexpr Unit kByteUnits[] = {
    {"", 1},         {"b", 1},        {"k", 1e3},      {"kb", 1e3},     {"m", 1e6},
    {"mb", 1e6},     {"g", 1e9},      {"gb", 1e9},     {"t", 1e12},     {"tb", 1e12},
    {"p", 1e15},     {"pb", 1e15},    {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30},
    {"tib", 0x1p40}, {"pib", 0x1p50},
};

constexpr Unit kCountUnits[] = {{"", 1},    {"k", 1e3}, {"m", 1e6},
                                {"b", 1e9}, {"g", 1e9}, {"t", 1e12}};

std::optional<double> FindFactor(std::span<const Unit> units, std::string_view name) {
  for (const Unit& unit : units) {
    if (unit.name == name) return unit.factor;
  }
  return std::nullopt;
}

// A whole number goes through integers, because a double has only 53 bits.
std::optional<uint64_t> Multiply(std::string_view number, double factor) {
  if (number.find_first_not_of("0123456789") == std::string_view::npos) {
    unsigned __int128 product = 0;
    for (const char digit : number) {
      product = product * 10 + static_cast<unsigned>(digit - '0');
      if (product >> 64 != 0) return std::nullopt;
    }
    product *= static_cast<uint64_t>(factor);
    if (product >> 64 != 0) return std::nullopt;
    return static_cast<uint64_t>(product);
  }
  double value = 0;
  const char* end = number.data() + number.size();
  const absl::from_chars_result parsed = absl::from_chars(number.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || !std::isfinite(value)) return std::nullopt;
  value *= factor;
  if (!(value >= 0) || value >= kTwoTo64) return std::nullopt;
  // Who writes 0.5 means a share, or has left the unit out.
  if (value != std::floor(value) && (factor == 1 || value < 1)) return std::nullopt;
  return static_cast<uint64_t>(value);
}

// Splits "1.5e3 GiB" into number and unit. The exponent's `e` belongs to the number only if digits
// follow.
std::optional<uint64_t> Parse(std::string_view text, std::span<const Unit> units) {
  const std::string lower = absl::AsciiStrToLower(absl::StripAsciiWhitespace(ToAbsl(text)));
  size_t end = 0;
  while (end < lower.size()) {
    const char c = lower[end];
    if (absl::ascii_isdigit(c) || c == '.') {
      ++end;
    } else if (c == 'e' && end + 1 < lower.size() &&
               (absl::ascii_isdigit(lower[end + 1]) ||
                (end + 2 < lower.size() && (lower[end + 1] == '+' || lower[end + 1] == '-') &&
                 absl::ascii_isdigit(lower[end + 2])))) {
      end += 2;
    } else {
      break;
    }
  }
  if (end == 0) return std::nullopt;
  const auto unit = absl::StripLeadingAsciiWhitespace(absl::string_view(lower).substr(end));
  const std::optional<double> factor = FindFactor(units, ToStd(unit));
  if (!factor.has_value()) return std::nullopt;
  return Multiply(std::string_view(lower).substr(0, end), *factor);
}

std::string FormatThreeDigits(double value, std::string_view unit) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f %s", decimals, value, unit);
}

}  // namespace

absl::StatusOr<uint64_t> ParseByteSize(std::string_view text) {
  if (const std::optional<uint64_t> bytes = Parse(text, kByteUnits)) return *bytes;
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat("\"", ToAbsl(text), "\" is not a size in bytes"),
                   "Write a size such as 512MiB, 64GiB, 200G or 2T");
}

absl::StatusOr<uint64_t> ParseCount(std::string_view text) {
  if (const std::optional<uint64_t> count = Parse(text, kCountUnits)) return *count;
  return MakeError(ErrorId::kBadValue, absl::StrCat("\"", ToAbsl(text), "\" is not a count"),
                   "Write a count such as 12345, 150M or 7B");
}

std::string FormatBytes(uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes >= uint64_t{1} << 40) return absl::StrFormat("%.2f TiB", value / 0x1p40);
  if (bytes >= uint64_t{1} << 30) return absl::StrFormat("%.1f GiB", value / 0x1p30);
  if (bytes >= uint64_t{1} << 20) return absl::StrFormat("%.1f MiB", value / 0x1p20);
  if (bytes >= uint64_t{1} << 10) return absl::StrFormat("%.1f KiB", value / 0x1p10);
  return absl::StrCat(bytes, " B");
}

std::string FormatDecimalBytes(uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (value >= 1e12) return FormatThreeDigits(value / 1e12, "TB");
  if (value >= 1e9) return FormatThreeDigits(value / 1e9, "GB");
  if (value >= 1e6) return FormatThreeDigits(value / 1e6, "MB");
  if (value >= 1e3) return FormatThreeDigits(value / 1e3, "kB");
  return absl::StrCat(bytes, " B");
}

std::string FormatCount(uint64_t count) {
  const double value = static_cast<double>(count);
  if (value >= 1e12) return absl::StrFormat("%.1f T", value / 1e12);
  if (value >= 1e9) return absl::StrFormat("%.1f B", value / 1e9);
  if (value >= 1e6) return absl::StrFormat("%.1f M", value / 1e6);
  if (value >= 1e4) return absl::StrFormat("%.1f K", value / 1e3);
  return absl::StrCat(count);
}

}  // namespace offload
