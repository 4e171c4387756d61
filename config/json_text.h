// config/json_text.h
//
// Reads JSON as people write it into configuration files: comments (//, #, /* */) and trailing
// commas are allowed; a key twice in one object is refused, and so is nesting beyond 32 levels.
//
// Thread safety: a pure function.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace offload::config {

using Json = nlohmann::ordered_json;

// OFD-1101 with the file's name, line and column.
absl::StatusOr<Json> ReadRelaxedJson(std::string_view text, const std::string& name);

}  // namespace offload::config
