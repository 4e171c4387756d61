#include "zero3/torch/option_text.h"

#include <map>
#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using Member =
    std::variant<std::string Options::*, int Options::*, int64_t Options::*, bool Options::*>;

const std::map<std::string, Member>& Members() {
  static const auto* const kMembers = new std::map<std::string, Member>{
      {"nvme_path", &Options::nvme_path},
      {"ram", &Options::ram},
      {"gpu_ram", &Options::gpu_ram},
      {"device", &Options::device},
      {"job", &Options::job},
      {"io", &Options::io},
      {"durability", &Options::durability},
      {"average", &Options::average},
      {"update_in_backward", &Options::update_in_backward},
      {"raw_access", &Options::raw_access},
      {"weights_at_close", &Options::weights_at_close},
      {"run_id", &Options::run_id},
      {"generations", &Options::generations},
      {"update_threads", &Options::update_threads},
      {"rank", &Options::rank},
      {"world_size", &Options::world_size},
      {"local_rank", &Options::local_rank},
      {"local_world_size", &Options::local_world_size},
      {"spill_gradients", &Options::spill_gradients},
      {"zero_stage", &Options::zero_stage},
      {"weights_home", &Options::weights_home},
      {"state_home", &Options::state_home},
      {"persistence", &Options::persistence},
      {"prefetch", &Options::prefetch},
      {"max_live", &Options::max_live},
      {"gradients", &Options::gradients},
      {"gradient_average", &Options::gradient_average},
  };
  return *kMembers;
}

template <typename Integer>
Integer IntegerOf(const std::string& name, const std::string& text) {
  Integer value = 0;
  if (absl::SimpleAtoi(text, &value)) return value;
  ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat(name, " is ", text, ", not a number")));
}

}  // namespace

void SetOption(Options& options, const std::string& name, const std::string& text) {
  const auto found = Members().find(name);
  if (found == Members().end())
    ThrowStatus(MakeError(ErrorId::kBadValue, absl::StrCat("there is no option ", name)));
  const Member& member = found->second;
  if (const auto* const words = std::get_if<std::string Options::*>(&member)) {
    options.*(*words) = text;
  } else if (const auto* const number = std::get_if<int Options::*>(&member)) {
    options.*(*number) = IntegerOf<int>(name, text);
  } else if (const auto* const count = std::get_if<int64_t Options::*>(&member)) {
    options.*(*count) = IntegerOf<int64_t>(name, text);
  } else {
    options.*std::get<bool Options::*>(member) = IntegerOf<int>(name, text) != 0;
  }
}

}  // namespace offload::zero3
