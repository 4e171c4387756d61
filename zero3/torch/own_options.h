// zero3/torch/own_options.h
//
// The options of the optimizers of <offload/torch.h> that torch does not have: a part of an
// optimizer's public name, beside its functions in named_optimizer.cc.
#pragma once

#include <type_traits>

namespace offload {

struct LionOptions;
struct LAMBOptions;

namespace zero3 {

template <class... Options>
struct OptionsList {
  template <class Other>
  static constexpr bool kHas = (std::is_same_v<Options, Other> || ...);
};

using OwnOptions = OptionsList<LionOptions, LAMBOptions>;

}  // namespace zero3
}  // namespace offload
