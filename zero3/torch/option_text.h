// zero3/torch/option_text.h
//
// offload::Options by name and text, for those that read them from elsewhere: configuration files
// (initialize.cc) and Python (python_binding.cc).
#pragma once

#include <offload/torch.h>

#include <string>

namespace offload::zero3 {

// Sets the option `name`. Flags are numbers: "0" is false. OFD-1002 for a name that there is not,
// and for a text that is no number where one is needed.
void SetOption(Options& options, const std::string& name, const std::string& text);

}  // namespace offload::zero3
