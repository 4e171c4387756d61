#include "kernels/optimizer.h"

#include <charconv>
#include <cmath>

#include "base/check.h"
#include "kernels/rules/rules.h"

namespace offload::kernels {
namespace {

template <class... Rule>
constexpr std::array<const Optimizer*, kOptimizerCount> RowsOf(RuleList<Rule...>) {
  return {&Rule::kRow...};
}
constexpr std::array<const Optimizer*, kOptimizerCount> kRows = RowsOf(Rules());

int FindRow(std::string_view name) {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (name == kRows[i]->name) return static_cast<int>(i);
  }
  return -1;
}

size_t ParameterIndex(const Optimizer& row, std::string_view name) {
  for (size_t i = 0; i < row.parameters.size(); ++i) {
    if (name == row.parameters[i].name) return i;
  }
  OFFLOAD_CHECK(false) << row.name << " has no parameter " << name;
  return 0;
}

bool IsWithin(Range range, double value, bool is_new) {
  if (!std::isfinite(value)) return false;
  switch (range) {
    case Range::kFinite:
      return true;
    case Range::kNotNegative:
      return value >= 0;
    case Range::kRate:
      return !is_new || value >= 0;
    case Range::kFraction:
      return !is_new || (value >= 0 && value < 1);
    case Range::kFlag:
      return value == 0 || value == 1;
    case Range::kFlavour:
      return value == 0 || value == 1 || value == 2;
  }
  return false;
}

const char* TextOf(Range range, bool is_new) {
  const char* const finite = "a finite number";
  switch (range) {
    case Range::kFinite:
      return finite;
    case Range::kNotNegative:
      return "a finite number, not less than 0";
    case Range::kRate:
      return is_new ? "a finite number, not less than 0" : finite;
    case Range::kFraction:
      return is_new ? "at least 0 and less than 1" : finite;
    case Range::kFlag:
      return "0 or 1";
    case Range::kFlavour:
      return "0, 1 or 2";
  }
  return "";
}

// In the same digits with every locale.
std::string Text(double value) {
  char text[32];
  constexpr int kDigits = 6;
  const auto written =
      std::to_chars(text, text + sizeof(text), value, std::chars_format::general, kDigits);
  return std::string(text, written.ptr);
}

}  // namespace

OptimizerSpec::OptimizerSpec() : OptimizerSpec("adamw") {}

OptimizerSpec::OptimizerSpec(std::string_view name,
                             std::initializer_list<std::pair<std::string_view, double>> values) {
  const int index = FindRow(name);
  OFFLOAD_CHECK(index >= 0) << "no optimizer " << name;
  index_ = static_cast<uint8_t>(index);
  const Optimizer& row = *kRows[index_];
  OFFLOAD_CHECK(row.parameters.size() <= kParametersMax && row.planes.size() <= kStatePlanesMax);
  for (size_t i = 0; i < row.parameters.size(); ++i) values_[i] = row.parameters[i].initial;
  for (const auto& [parameter, value] : values) Set(parameter, value);
}

std::string OptimizerSpec::Read(std::string_view name, std::span<const double> values,
                                OptimizerSpec* spec) {
  const int index = FindRow(name);
  if (index < 0) return "unknown optimizer \"" + std::string(name) + "\"";
  *spec = OptimizerSpec(name);
  if (values.size() != spec->values().size()) {
    return std::string(name) + " with " + std::to_string(values.size()) + " parameters";
  }
  for (size_t i = 0; i < values.size(); ++i) spec->values_[i] = values[i];
  return spec->Violation();
}

const Optimizer& OptimizerSpec::row() const { return *kRows[index_]; }

double OptimizerSpec::Get(std::string_view parameter) const {
  return values_[ParameterIndex(row(), parameter)];
}

OptimizerSpec& OptimizerSpec::Set(std::string_view parameter, double value) {
  values_[ParameterIndex(row(), parameter)] = value;
  return *this;
}

static std::string OutOfRange(const OptimizerSpec& spec, bool is_new) {
  for (size_t i = 0; i < spec.values().size(); ++i) {
    const Parameter& parameter = spec.row().parameters[i];
    const double value = spec.values()[i];
    if (IsWithin(parameter.range, value, is_new)) continue;
    return std::string(spec.name()) + " with " + parameter.name + " " + Text(value) +
           ", which has to be " + TextOf(parameter.range, is_new);
  }
  return "";
}

std::string OptimizerSpec::Violation() const { return OutOfRange(*this, /*is_new=*/false); }

std::string OptimizerSpec::ViolationWhenNew() const {
  std::string violation = OutOfRange(*this, /*is_new=*/true);
  if (!violation.empty()) return violation;
  const char* const conflict = row().conflict == nullptr ? nullptr : row().conflict(values_.data());
  return conflict == nullptr ? "" : std::string(row().name) + ": " + conflict;
}

const StatePlane* OptimizerSpec::Plane(size_t number) const {
  if (number >= row().planes.size()) return nullptr;
  const StatePlane& plane = row().planes[number];
  return plane.kept_if >= 0 && values_[plane.kept_if] == 0 ? nullptr : &plane;
}

bool OptimizerSpec::KeepsAnything() const {
  for (size_t i = 0; i < kStatePlanesMax; ++i) {
    if (Plane(i) != nullptr) return true;
  }
  return false;
}

bool OptimizerSpec::TakesLibraryRoots() const {
  return row().takes_library_roots != nullptr && row().takes_library_roots(values_.data());
}

void OptimizerSpec::KeepToo(const OptimizerSpec& other) {
  OFFLOAD_CHECK(index_ == other.index_) << name() << " and " << other.name();
  for (const StatePlane& plane : row().planes) {
    if (plane.kept_if >= 0 && values_[plane.kept_if] == 0)
      values_[plane.kept_if] = other.values_[plane.kept_if];
  }
}

std::span<const std::string_view> OptimizerNames() {
  static const std::array<std::string_view, kOptimizerCount> kNames = [] {
    std::array<std::string_view, kOptimizerCount> names;
    for (size_t i = 0; i < names.size(); ++i) names[i] = kRows[i]->name;
    return names;
  }();
  return kNames;
}

}  // namespace offload::kernels
