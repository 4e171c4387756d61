#include "offloadd/step_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/update.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

absl::Status Violation(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }

using Groups = std::vector<std::shared_ptr<const kernels::OptimizerSpec>>;

absl::StatusOr<Groups> ReadGroups(const proto::v1::StepRequest& first,
                                  const kernels::OptimizerSpec& sealed) {
  if (first.groups_size() > static_cast<int>(kLimits.groups_max)) {
    return Violation(absl::StrCat("a step with ", first.groups_size(), " groups"));
  }
  Groups groups;
  for (const proto::v1::Optimizer& group : first.groups()) {
    OFFLOAD_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, OptimizerFromMessage(group));
    // Planes have their places by number: those that another kind takes are looked at for each
    // tensor. A tensor's bundle is updated in one way, with norms or without.
    if (kernels::NeedsNorms(optimizer) != kernels::NeedsNorms(sealed)) {
      return MakeError(ErrorId::kUnsupportedOptimizer,
                       absl::StrCat("a step of ", group.name(), " for a job that was sealed for ",
                                    std::string(sealed.name())));
    }
    if (optimizer.averaging() != sealed.averaging()) {
      return Violation(absl::StrCat("a step with average \"", optimizer.averaging().Text(),
                                    "\" of a job with \"", sealed.averaging().Text(), "\""));
    }
    groups.push_back(std::make_shared<const kernels::OptimizerSpec>(optimizer));
  }
  return groups;
}

// What the optimizer keeps has to be there for this tensor.
absl::Status CheckPlanes(const std::string& tensor, const proto::PlaneSet& planes,
                         const kernels::OptimizerSpec& optimizer) {
  for (size_t i = 0; i < proto::kStatePlanes.size(); ++i) {
    const kernels::StatePlane* const needed = optimizer.Plane(i);
    if (needed == nullptr || planes.Has(proto::kStatePlanes[i])) continue;
    return MakeError(
        ErrorId::kUnsupportedOptimizer,
        absl::StrCat(std::string(optimizer.name()), " with these parameters needs ", needed->name,
                     " of \"", tensor, "\", the job was sealed without it"));
  }
  return absl::OkStatus();
}

// Where the gradient of a tensor is. `own_offset` ≠ 0: in the first rank's region, since the
// trainer has written it itself.
absl::Status PlaceGradient(uint32_t tensor, uint64_t own_offset, const JobContext& context,
                           MemberUpdate& update, TaskPlan& task) {
  using proto::GradientHome;
  const proto::GradientPlacement& gradient = context.plan.gradients[tensor];
  const RankMemory& first = context.ranks.front();
  if (own_offset != 0) {
    const proto::Tensor& declared = context.catalogue.tensors[tensor];
    if (!IsAligned(own_offset, 64) || own_offset < proto::kRegionFixedBytes ||
        !IsInside(own_offset, declared.element_count * proto::DtypeBytes(declared.dtype),
                  first.region_bytes)) {
      return Violation(
          absl::StrCat("a step with a gradient of \"", declared.name, "\" at ", own_offset));
    }
    update.gradient = first.region + own_offset;
  } else if (gradient.home == GradientHome::kSlab) {
    update.gradient = context.slab + context.layout.sum_offset[tensor];
  } else if (gradient.home == GradientHome::kRegion) {
    update.gradient = first.region + gradient.offset_bytes;
  } else {
    task.spilled = true;
    task.scratch_offset = gradient.offset_bytes;
  }
  return absl::OkStatus();
}

// The tensors of one message, put into their tasks.
absl::Status AddTensors(const proto::v1::StepRequest& message, const Groups& groups,
                        const JobContext& context, std::vector<bool>& seen,
                        std::map<uint32_t, TaskPlan>& tasks) {
  const int count = message.tensors_size();
  const int own_count = message.own_gradient_offset_size();
  if (message.group_of_size() != count || message.update_count_size() != count ||
      message.gradient_scale_size() != count || (own_count != 0 && own_count != count)) {
    return Violation("a step whose lists differ in length");
  }
  for (int i = 0; i < count; ++i) {
    const uint32_t tensor = message.tensors(i);
    const uint32_t group = message.group_of(i);
    if (tensor >= context.catalogue.tensors.size() || group >= groups.size() ||
        message.update_count(i) == 0 || message.update_count(i) > (uint64_t{1} << 53)) {
      return Violation(absl::StrCat("a step for tensor ", tensor, ", group ", group, ", update ",
                                    message.update_count(i)));
    }
    const proto::Tensor& declared = context.catalogue.tensors[tensor];
    if (!declared.trainable || seen[tensor]) {
      return Violation(absl::StrCat("a step for \"", declared.name, "\", which is ",
                                    seen[tensor] ? "named twice" : "frozen"));
    }
    seen[tensor] = true;
    OFFLOAD_RETURN_IF_ERROR(
        CheckPlanes(declared.name, context.catalogue.planes(tensor), *groups[group]));
    const proto::Placement& placement = context.catalogue.placements[tensor];
    MemberUpdate update;
    update.optimizer = groups[group];
    update.begin = placement.element_offset;
    update.count = declared.element_count;
    update.step = static_cast<int64_t>(message.update_count(i));
    update.gradient_scale = message.gradient_scale(i);
    TaskPlan& task = tasks[placement.store_tensor];
    task.store_tensor = placement.store_tensor;
    OFFLOAD_RETURN_IF_ERROR(PlaceGradient(
        tensor, i < own_count ? message.own_gradient_offset(i) : 0, context, update, task));
    task.tensors.push_back(tensor);
    task.members.push_back(std::move(update));
  }
  return absl::OkStatus();
}

void SortMembers(TaskPlan& task, const proto::Catalogue& catalogue) {
  std::sort(task.members.begin(), task.members.end(),
            [](const MemberUpdate& a, const MemberUpdate& b) { return a.begin < b.begin; });
  std::sort(task.tensors.begin(), task.tensors.end(), [&catalogue](uint32_t a, uint32_t b) {
    return catalogue.placements[a].element_offset < catalogue.placements[b].element_offset;
  });
}

}  // namespace

absl::StatusOr<StepPlan> MakeStepPlan(const std::vector<proto::v1::StepRequest>& messages,
                                      const JobContext& context) {
  if (messages.empty()) return Violation("a step without messages");
  const proto::v1::StepRequest& first = messages.front();
  StepPlan plan;
  plan.step = first.step();
  if (first.has_trainer_state()) plan.trainer_state = first.trainer_state();
  if (first.trainer_state().size() > kLimits.trainer_state_bytes_max) {
    return Violation(absl::StrCat("a trainer state of ", first.trainer_state().size(), " bytes"));
  }
  plan.is_partial = first.partial();
  if (plan.is_partial && (context.ranks.size() > 1 || !context.durability.has_intervals()))
    return Violation("a partial step of several ranks, or outside of an interval");
  OFFLOAD_ASSIGN_OR_RETURN(const Groups groups, ReadGroups(first, context.optimizer));
  std::vector<bool> seen(context.catalogue.tensors.size(), false);
  std::map<uint32_t, TaskPlan> tasks;
  for (const proto::v1::StepRequest& message : messages) {
    OFFLOAD_RETURN_IF_ERROR(AddTensors(message, groups, context, seen, tasks));
  }
  const auto named = std::count(seen.begin(), seen.end(), true);
  if (named != static_cast<int64_t>(first.tensor_count())) {
    return Violation(
        absl::StrCat("a step of ", first.tensor_count(), " tensors that names ", named));
  }
  for (auto& [store_tensor, task] : tasks) {
    SortMembers(task, context.catalogue);
    plan.tasks.push_back(std::move(task));
  }
  return plan;
}

}  // namespace offload::daemon
