// zero3/torch/parameter_text.h
//
// How the texts of errors name parameters, and refuse one.
//
// Thread safety: pure functions.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/string_view.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// 'encoder.weight'
inline std::string Quoted(std::string_view name) { return absl::StrCat("'", ToAbsl(name), "'"); }

// Throws OFD-1601: parameter 'encoder.weight' `why`.
[[noreturn]] inline void ThrowUnsupported(std::string_view name, std::string_view why,
                                          std::string fix) {
  ThrowStatus(MakeError(ErrorId::kUnsupportedModel,
                        absl::StrCat("parameter ", Quoted(name), " ", ToAbsl(why)),
                        std::move(fix)));
}

}  // namespace offload::zero3
