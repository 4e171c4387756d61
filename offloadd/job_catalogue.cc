#include "offloadd/job_catalogue.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/parse_averaging.h"
#include "base/status_macros.h"

namespace offload::daemon {
namespace {

// "adamw (exp_avg, exp_avg_sq)"
std::string DescribeOptimizer(std::string_view name, const proto::KeptPlanes& planes) {
  std::vector<std::string> names;
  for (const auto& [plane, plane_name] : planes) names.push_back(plane_name);
  return absl::StrCat(std::string(name), " (",
                      names.empty() ? "no state" : absl::StrJoin(names, ", "), ")");
}

std::string Describe(const proto::Tensor& tensor) {
  return absl::StrCat("\"", tensor.name, "\" [", absl::StrJoin(tensor.shape, ", "), "] ",
                      proto::DtypeName(tensor.dtype), tensor.trainable ? "" : " frozen");
}

bool HasBecome(const proto::Tensor& before, const proto::Tensor& now) {
  return before.shape == now.shape && before.dtype == now.dtype &&
         (now.trainable || !before.trainable);
}

std::string DescribeOrder(const proto::Tensor& tensor) {
  if (tensor.dimension_order.empty()) return "row by row";
  return absl::StrCat("with its dimensions in the order ",
                      absl::StrJoin(tensor.dimension_order, ", "));
}

absl::Status CompareOrder(const std::string& job, const proto::Tensor& before,
                          const proto::Tensor& now) {
  if (before.dimension_order == now.dimension_order) return absl::OkStatus();
  return MakeError(
      ErrorId::kOtherModel,
      absl::StrCat("parameter \"", now.name, "\" lies in memory ", DescribeOrder(now),
                   ", in job \"", job, "\" it lies ", DescribeOrder(before)),
      "Lay the model out as when the job was made (memory_format), or choose another job name");
}

bool KeepsAverage(const proto::KeptPlanes& planes) {
  return std::any_of(planes.begin(), planes.end(),
                     [](const auto& kept) { return kept.first == proto::Plane::kAverage; });
}

absl::Status CompareOptimizer(const std::string& job, const StoredCatalogue& stored,
                              const kernels::OptimizerSpec& optimizer) {
  const proto::KeptPlanes planes = proto::KeptBy(optimizer);
  if (stored.optimizer == optimizer.name() && stored.planes == planes) return absl::OkStatus();
  const bool keeps_average = KeepsAverage(stored.planes);
  if (keeps_average != optimizer.averaging().is_on()) {
    return MakeError(
        ErrorId::kOtherModel,
        keeps_average
            ? absl::StrCat("job \"", job, "\" keeps an average of its weights, and average is none")
            : absl::StrCat("job \"", job, "\" keeps no average of its weights, and average is ",
                           optimizer.averaging().Text()),
        keeps_average ? "Set average, as when the job was made (ema:DECAY or swa:FROM:EVERY)"
                      : "Leave average out, or begin a job with it under another name");
  }
  return MakeError(ErrorId::kOtherModel,
                   absl::StrCat("job \"", job, "\" was trained with ",
                                DescribeOptimizer(stored.optimizer, stored.planes),
                                ", the trainer has ", DescribeOptimizer(optimizer.name(), planes)));
}

// The numbers are one set: those of the store's format.
swap::Plane StorePlane(proto::Plane plane) {
  static_assert(static_cast<int>(proto::Plane::kWeight) == static_cast<int>(swap::Plane::kWeight));
  static_assert(static_cast<int>(proto::Plane::kResidual) ==
                static_cast<int>(swap::Plane::kResidual));
  static_assert(static_cast<int>(proto::Plane::kState0) == static_cast<int>(swap::Plane::kState0));
  static_assert(static_cast<int>(proto::Plane::kState1) == static_cast<int>(swap::Plane::kState1));
  static_assert(static_cast<int>(proto::Plane::kState2) == static_cast<int>(swap::Plane::kState2));
  static_assert(static_cast<int>(proto::Plane::kAverage) ==
                static_cast<int>(swap::Plane::kAverage));
  static_assert(static_cast<int>(proto::Plane::kTies) == static_cast<int>(swap::Plane::kTies));
  static_assert(proto::kPlaneCount == swap::kPlaneCount);
  return static_cast<swap::Plane>(plane);
}

}  // namespace

absl::StatusOr<kernels::OptimizerSpec> OptimizerFromMessage(const proto::v1::Optimizer& message) {
  kernels::OptimizerSpec optimizer;
  const std::string wrong = kernels::OptimizerSpec::Read(
      message.name(), {message.parameters().data(), static_cast<size_t>(message.parameters_size())},
      &optimizer);
  if (!wrong.empty())
    return MakeError(ErrorId::kProtocol, absl::StrCat("an optimizer that cannot be: ", wrong));
  const absl::StatusOr<Averaging> averaging = ParseAveraging(message.average());
  if (!averaging.ok())
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("an average that cannot be: ", message.average()));
  optimizer.SetAveraging(*averaging);
  return optimizer;
}

absl::StatusOr<SealedPlan> PlanFromMessages(const std::vector<proto::v1::SealRequest>& messages) {
  if (messages.empty()) return MakeError(ErrorId::kProtocol, "a Seal without plan");
  const proto::v1::SealRequest& first = messages.front();
  SealedPlan sealed;
  OFFLOAD_ASSIGN_OR_RETURN(sealed.optimizer, OptimizerFromMessage(first.optimizer()));
  sealed.pins_offset = first.pins_offset();
  proto::MemoryPlan& plan = sealed.plan;
  plan.window_bytes = first.window_bytes();
  plan.pipeline_blocks = first.pipeline_blocks();
  plan.pipeline_gradients = first.pipeline_gradients();
  plan.scratch_bytes = first.scratch_bytes();
  plan.region_bytes = first.region_bytes();
  plan.world_size = std::max(first.world_size(), 1u);
  plan.other_region_bytes = first.other_region_bytes();
  if (first.sum_blocks() > UINT32_MAX) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan with ", first.sum_blocks(), " sum_blocks"));
  }
  plan.sum_blocks = static_cast<uint32_t>(first.sum_blocks());
  if (first.other_tensors())
    sealed.other_tensors = OtherTensors{.stored_names = {}, .trainer_state = first.trainer_state()};
  std::vector<uint32_t> homes;
  for (const proto::v1::SealRequest& message : messages) {
    if (sealed.other_tensors.has_value()) {
      std::vector<std::string>& names = sealed.other_tensors->stored_names;
      names.insert(names.end(), message.stored_name().begin(), message.stored_name().end());
    }
    plan.weight_resident.insert(plan.weight_resident.end(), message.weight_resident().begin(),
                                message.weight_resident().end());
    plan.state_resident.insert(plan.state_resident.end(), message.state_resident().begin(),
                               message.state_resident().end());
    homes.insert(homes.end(), message.gradient_home().begin(), message.gradient_home().end());
    for (const uint64_t offset : message.gradient_offset())
      plan.gradients.push_back({.offset_bytes = offset});
    const size_t name_count =
        sealed.other_tensors.has_value() ? sealed.other_tensors->stored_names.size() : 0;
    if (std::max({plan.weight_resident.size(), plan.state_resident.size(), homes.size(),
                  plan.gradients.size(), name_count}) > proto::kTensorsMax) {
      return MakeError(ErrorId::kProtocol, "a plan for too many tensors");
    }
  }
  if (homes.size() != plan.gradients.size()) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a plan with ", homes.size(), " homes and ",
                                  plan.gradients.size(), " offsets of gradients"));
  }
  for (size_t i = 0; i < homes.size(); ++i) {
    if (homes[i] > static_cast<uint32_t>(proto::GradientHome::kSlabScratch)) {
      return MakeError(ErrorId::kProtocol, absl::StrCat("a gradient at home ", homes[i]));
    }
    plan.gradients[i].home = static_cast<proto::GradientHome>(homes[i]);
  }
  return sealed;
}

swap::StoreSpec MakeStoreSpec(const std::string& job, const proto::Catalogue& catalogue,
                              const kernels::OptimizerSpec& optimizer) {
  swap::StoreSpec spec;
  spec.job = job;
  spec.extent_elements = proto::kExtentElements;
  spec.catalogue = EncodeCatalogue(catalogue, optimizer);
  for (const proto::StoreTensor& tensor : catalogue.store_tensors) {
    swap::TensorSpec planes{tensor.element_count, {}};
    for (const proto::Plane plane : proto::kUpdatedPlanes) {
      if (tensor.planes.Has(plane))
        planes.planes.push_back({StorePlane(plane), tensor.planes.Bits(plane)});
    }
    if (tensor.planes.Has(proto::Plane::kTies))
      planes.planes.push_back({swap::Plane::kTies, tensor.planes.Bits(proto::Plane::kTies)});
    spec.tensors.push_back(std::move(planes));
  }
  return spec;
}

absl::Status CompareWithStored(const std::string& job, const StoredCatalogue& stored,
                               const proto::Catalogue& catalogue,
                               const kernels::OptimizerSpec& optimizer) {
  const size_t common = std::min(stored.tensors.size(), catalogue.tensors.size());
  for (size_t i = 0; i < common; ++i) {
    const proto::Tensor &before = stored.tensors[i], &now = catalogue.tensors[i];
    if (before.name == now.name && HasBecome(before, now)) {
      OFFLOAD_RETURN_IF_ERROR(CompareOrder(job, before, now));
      continue;
    }
    return MakeError(ErrorId::kOtherModel,
                     absl::StrCat("job \"", job, "\" has ", Describe(before), " as parameter ", i,
                                  ", the model has ", Describe(now)));
  }
  if (stored.tensors.size() > common) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat("job \"", job, "\" has ", Describe(stored.tensors[common]), " as parameter ",
                     common, ", the model has only ", common, " parameters"));
  }
  if (catalogue.tensors.size() > common) {
    return MakeError(
        ErrorId::kOtherModel,
        absl::StrCat("the model has ", Describe(catalogue.tensors[common]), " as parameter ",
                     common, ", job \"", job, "\" has only ", common, " parameters"));
  }
  return CompareOptimizer(job, stored, optimizer);
}

bool HasThawed(const StoredCatalogue& stored, const proto::Catalogue& catalogue) {
  return !std::equal(stored.tensors.begin(), stored.tensors.end(), catalogue.tensors.begin(),
                     catalogue.tensors.end(),
                     [](const proto::Tensor& before, const proto::Tensor& now) {
                       return before.trainable == now.trainable;
                     });
}

absl::StatusOr<std::vector<std::optional<uint32_t>>> FindSources(
    const std::string& job, const StoredCatalogue& stored, const proto::Catalogue& catalogue,
    const kernels::OptimizerSpec& optimizer, const std::vector<std::string>& stored_names) {
  if (stored_names.size() != catalogue.tensors.size()) {
    return MakeError(ErrorId::kProtocol, absl::StrCat(stored_names.size(), " stored names of ",
                                                      catalogue.tensors.size(), " tensors"));
  }
  std::unordered_map<std::string_view, uint32_t> unused;
  for (uint32_t i = 0; i < stored.tensors.size(); ++i) unused.emplace(stored.tensors[i].name, i);
  std::vector<std::optional<uint32_t>> sources(catalogue.tensors.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    if (stored_names[i].empty()) continue;
    const auto found = unused.find(stored_names[i]);
    if (found == unused.end()) {
      return MakeError(ErrorId::kProtocol, absl::StrCat("stored name \"", stored_names[i],
                                                        "\", which no other tensor has"));
    }
    const proto::Tensor &before = stored.tensors[found->second], &now = catalogue.tensors[i];
    if (!HasBecome(before, now)) {
      return MakeError(ErrorId::kOtherModel,
                       absl::StrCat("job \"", job, "\" has ", Describe(before), ", the model has ",
                                    Describe(now)));
    }
    OFFLOAD_RETURN_IF_ERROR(CompareOrder(job, before, now));
    sources[i] = found->second;
    unused.erase(found);
  }
  OFFLOAD_RETURN_IF_ERROR(CompareOptimizer(job, stored, optimizer));
  return sources;
}

}  // namespace offload::daemon
