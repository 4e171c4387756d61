// base/parse_averaging.h
//
// An average of weights (averaging.h) as its user says it.
//
// Thread safety: a pure function.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "base/averaging.h"

namespace offload {

// Of "" none. OFD-1002 for anything that Averaging::Text() does not say.
absl::StatusOr<Averaging> ParseAveraging(std::string_view text);

}  // namespace offload
