// config/ds_config_values.h
//
// The values of a DeepSpeed configuration, read as generously as DeepSpeed and its users write
// them.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/ds_config_keys.h"
#include "config/json_text.h"

namespace offload::config {

bool IsAuto(const Json& value);

// As JSON, shortened.
std::string Shown(const Json& value);

// "an integer", for messages.
const char* ShapeName(Shape shape);

// The number that a text is; nothing when it is none.
std::optional<double> NumberIn(const std::string& text);
// The integer that a number is, 1e9 included.
std::optional<int64_t> IntegerIn(const Json& value);

// The value in the shape of its key, "auto" as it is; nothing when it does not fit. `note` tells of
// quotes that were taken off.
std::optional<Json> Fitted(Shape shape, const Json& value, std::string& note);

bool IsListOfTexts(const Json& value);

// True for what switches a feature on: true, a number above 1, a text, a list, or a section that
// says so (by "enabled" where it has one, otherwise by being there with something in it).
bool IsSet(const Json& value);

}  // namespace offload::config
