#include "zero3/zero_policy.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::zero3 {
namespace {

std::string TextOf(double share) {
  if (share == 0) return "nvme";
  return share == 1 ? "ram" : absl::StrCat(share);
}

}  // namespace

absl::StatusOr<Home> ParseHome(std::string_view name, std::string_view text) {
  if (text == "auto") return Home();
  if (text == "ram") return Home(1.0);
  if (text == "nvme") return Home(0.0);
  double share = 0;
  if (absl::SimpleAtod(ToAbsl(text), &share) && share >= 0 && share <= 1) return Home(share);
  return MakeError(ErrorId::kBadValue, absl::StrCat(ToAbsl(name), " is \"", ToAbsl(text), "\""),
                   "Use auto, ram, nvme, or the share that stays in memory, such as 0.25");
}

absl::StatusOr<std::optional<int>> CheckStage(int64_t stage) {
  if (stage == -1) return std::optional<int>();
  if (stage >= 0 && stage <= kZeroStageMax) return std::optional<int>(static_cast<int>(stage));
  return MakeError(ErrorId::kBadValue, absl::StrCat("ZeRO stage ", stage),
                   "Use 0, 1, 2 or 3, or -1 for what saves most");
}

std::string DescribePolicy(const ZeroPolicy& policy) {
  std::vector<std::string> parts;
  if (policy.stage.has_value()) parts.push_back(absl::StrCat("ZeRO stage ", *policy.stage));
  for (const auto& [name, home] :
       {std::pair{"weights ", policy.weights}, {"state ", policy.state}}) {
    if (home.has_value()) parts.push_back(absl::StrCat(name, TextOf(*home)));
  }
  for (const auto& [name, elements] : {std::pair{"persistence ", policy.persistence},
                                       {"prefetch ", policy.prefetch},
                                       {"max_live ", policy.max_live}}) {
    if (elements > 0) parts.push_back(absl::StrCat(name, FormatCount(elements)));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace offload::zero3
