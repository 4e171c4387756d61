#include "zero3/torch/kept_state.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"

namespace offload::zero3 {

absl::Status CheckFits(const KeptState& state, std::string_view name) {
  std::vector<at::Tensor> all(state.planes.begin(), state.planes.end());
  all.push_back(state.master);
  for (const at::Tensor& plane : all) {
    if (!plane.defined()) continue;
    const bool is_dense = plane.layout() == at::kStrided && plane.device().is_cpu();
    if (is_dense && plane.is_floating_point() && plane.sizes() == state.parameter.sizes()) continue;
    const std::string subject =
        name.empty() ? "a parameter" : absl::StrCat("parameter '", std::string(name), "'");
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("what the optimizer keeps of ", subject, " of shape [",
                                  absl::StrJoin(state.parameter.sizes(), ", "), "] is ",
                                  plane.toString(), " [", absl::StrJoin(plane.sizes(), ", "), "]"),
                     "Give the optimizer a state of this model, dense and on the CPU");
  }
  return absl::OkStatus();
}

}  // namespace offload::zero3
