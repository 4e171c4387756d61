#include "offloadd/step_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "offloadd/limits.h"

namespace offload::daemon {
namespace {

absl::Status Violation(std::string_view what) { return MakeError(ErrorId::kProtocol, what); }

bool AllAreFinite(std::initializer_list<double> values) {
  return std::all_of(values.begin(), values.end(),
                     [](double value) { return std::isfinite(value); });
}

absl::StatusOr<MemberUpdate> AdamWUpdate(const proto::v1::AdamW& group,
                                         proto::OptimizerState state) {
  if (state != proto::OptimizerState::kAdam) {
    return MakeError(ErrorId::kUnsupportedOptimizer,
                     "AdamW needs two moments, the job was sealed without them");
  }
  if (!AllAreFinite(
          {group.lr(), group.beta1(), group.beta2(), group.eps(), group.weight_decay()}) ||
      group.flavour() > 2) {
    return Violation(absl::StrCat("AdamW with lr ", group.lr(), ", beta1 ", group.beta1(),
                                  ", beta2 ", group.beta2(), ", eps ", group.eps(),
                                  ", weight_decay ", group.weight_decay(), ", flavour ",
                                  group.flavour()));
  }
  MemberUpdate update;
  update.is_adamw = true;
  update.adamw.lr = group.lr();
  update.adamw.beta1 = group.beta1();
  update.adamw.beta2 = group.beta2();
  update.adamw.eps = group.eps();
  update.adamw.weight_decay = group.weight_decay();
  update.adamw.flavour = static_cast<kernels::AdamWFlavour>(group.flavour());
  return update;
}

absl::StatusOr<MemberUpdate> SgdUpdate(const proto::v1::Sgd& group, proto::OptimizerState state) {
  if (!AllAreFinite({group.lr(), group.momentum(), group.dampening(), group.weight_decay()})) {
    return Violation(absl::StrCat("SGD with lr ", group.lr(), ", momentum ", group.momentum(),
                                  ", dampening ", group.dampening(), ", weight_decay ",
                                  group.weight_decay()));
  }
  if (group.momentum() != 0 && state == proto::OptimizerState::kNone) {
    return MakeError(ErrorId::kUnsupportedOptimizer,
                     "SGD with momentum needs a buffer, the job was sealed without one");
  }
  MemberUpdate update;
  update.is_adamw = false;
  update.sgd.lr = group.lr();
  update.sgd.momentum = group.momentum();
  update.sgd.dampening = group.dampening();
  update.sgd.weight_decay = group.weight_decay();
  update.sgd.nesterov = group.nesterov();
  update.has_momentum = group.momentum() != 0;
  return update;
}

absl::StatusOr<std::vector<MemberUpdate>> ReadGroups(const proto::v1::StepRequest& first,
                                                     proto::OptimizerState state) {
  if (first.groups_size() > static_cast<int>(kLimits.groups_max)) {
    return Violation(absl::StrCat("a step with ", first.groups_size(), " groups"));
  }
  std::vector<MemberUpdate> groups;
  for (const proto::v1::Group& group : first.groups()) {
    if (group.has_adamw()) {
      OFFLOAD_ASSIGN_OR_RETURN(MemberUpdate update, AdamWUpdate(group.adamw(), state));
      groups.push_back(update);
    } else if (group.has_sgd()) {
      OFFLOAD_ASSIGN_OR_RETURN(MemberUpdate update, SgdUpdate(group.sgd(), state));
      groups.push_back(update);
    } else {
      return Violation("a step with a group without optimizer");
    }
  }
  return groups;
}

// The tensors of one message, put into their tasks.
absl::Status AddTensors(const proto::v1::StepRequest& message,
                        const std::vector<MemberUpdate>& groups, const JobContext& context,
                        std::vector<bool>& seen, std::map<uint32_t, TaskPlan>& tasks) {
  const int count = message.tensors_size();
  if (message.group_of_size() != count || message.update_count_size() != count ||
      message.gradient_scale_size() != count) {
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
    const proto::Placement& placement = context.catalogue.placements[tensor];
    const proto::GradientPlacement& gradient = context.plan.gradients[tensor];
    MemberUpdate update = groups[group];
    update.begin = placement.element_offset;
    update.count = declared.element_count;
    update.adamw.step = static_cast<int64_t>(message.update_count(i));
    update.sgd.first = message.update_count(i) == 1;
    update.gradient_scale = message.gradient_scale(i);
    TaskPlan& task = tasks[placement.store_tensor];
    task.store_tensor = placement.store_tensor;
    if (gradient.home == proto::GradientHome::kScratch) {
      task.spilled = true;
      task.scratch_offset = gradient.offset_bytes;
    } else {
      update.gradient = context.ranks.front().region + gradient.offset_bytes;
    }
    task.tensors.push_back(tensor);
    task.members.push_back(update);
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
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<MemberUpdate> groups,
                           ReadGroups(first, context.optimizer));
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
