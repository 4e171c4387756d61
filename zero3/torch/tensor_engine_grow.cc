#include <malloc.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/buffer_tensors.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/log.h"
#include "zero3/torch/parameter_text.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {

// Parameters that come when the store is made: it is laid out anew, with the further ones behind
// those that it has. A job that was laid out so says in its state what its store holds, in which
// order: a model that is built with them at once has them in another one. What no step was taken
// with may be missing in the model of the next run, which may have ended before them.

// ---- While the job runs ------------------------------------------------------------------------

std::string_view TensorEngine::why_fixed() const {
  if (attachment_->world_size() > 1) return "there are several ranks";
  if (attachment_->device() != nullptr || device_plan_.is_made()) return "the job is on a device";
  if (absl::StrContains(options_.nvme_path, ',')) return "its store lies over several pools";
  return "";
}

void TensorEngine::CheckGrows(const Parameter& first) const {
  if (may_grow()) return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat("parameter ", Quoted(first.name), " is attached after the store of job ",
                   Quoted(options_.job), " was made, and ", std::string(why_fixed())),
      "Attach all that is trained at some time before the first step, frozen at first"));
}

bool TensorEngine::Grow(std::span<const NamedTensor> tensors,
                        std::span<const NamedTensor> buffers) {
  if (!attached_.sealed) {
    const bool has_new = Attach(tensors, optimizer_, buffers, /*takes_now=*/true);
    AttachBuffers(buffers);
    return has_new;
  }
  std::vector<Parameter> parameters = FindNew(tensors);
  if (parameters.empty()) {
    NameForFilesAnew(tensors, buffers);
    return false;
  }
  CheckDoubleRoots(optimizer_, parameters);
  AddLater(std::move(parameters), tensors, buffers, /*are_all=*/true);
  return true;
}

// The parameters that the job has, as the store is to call them. Nobody looks there for one whose
// name another has, or that no model has any more.
std::vector<proto::Tensor> TensorEngine::NamedAnew(std::span<const NamedTensor> tensors,
                                                   const std::vector<Parameter>& added,
                                                   bool are_all) const {
  std::vector<proto::Tensor> named = declared_;
  std::unordered_set<std::string> taken;
  for (const Parameter& parameter : added) taken.insert(parameter.name);
  std::vector<bool> has_name(named.size());
  for (const NamedTensor& tensor : tensors) {
    const auto known = ids_.find(tensor.tensor.unsafeGetTensorImpl());
    if (!are_all || known == ids_.end() || has_name[known->second]) continue;
    has_name[known->second] = true;
    named[known->second].name = tensor.name;
    taken.insert(tensor.name);
  }
  for (const proto::Tensor& tensor : named) {
    if (proto::IsReplacedTensor(tensor.name)) taken.insert(tensor.name);
  }
  for (size_t id = 0; id < named.size(); ++id) {
    const bool is_gone = are_all || taken.contains(named[id].name);
    if (has_name[id] || !is_gone || proto::IsReplacedTensor(named[id].name)) continue;
    do {  // several of one name since the last step
      named[id].name = proto::ReplacedTensorName(named[id].name, step_);
    } while (!taken.insert(named[id].name).second);
  }
  return named;
}

void TensorEngine::AddLater(std::vector<Parameter> parameters, std::span<const NamedTensor> tensors,
                            std::span<const NamedTensor> buffers, bool are_all) {
  CheckGrows(parameters.front());
  CheckWhole();
  SettleGiven(/*writes=*/true);
  const LayoutPass alone(*this);
  attachment_->EndRaw();
  const auto first = static_cast<uint32_t>(declared_.size());
  const BeforeGrowth before = TakeBeforeGrowth();
  try {
    CheckLeavable("parameters are added",
                  "Attach the module of those that are new, with an optimizer, after zero_grad() "
                  "and before the backward pass");
    if (are_all) buffers_.Rename(buffers);
    buffers_.AddLater(buffers, SmallBuffersBytes());
    declared_ = NamedAnew(tensors, parameters, are_all);
    PlanInput input = DescribeJob(parameters, optimizer_, buffers_);
    ThrowIfError(MakePlan(input).status());
    declared_ = std::move(input.catalogue.tensors);
    declared_.resize(first + parameters.size());  // without buffers
  } catch (...) {
    declared_ = before.declared;
    buffers_ = before.buffers;
    throw;
  }
  Log().info("parameter '{}'{} is trained from step {} on: the store of job {} is laid out anew",
             parameters.front().name,
             parameters.size() == 1 ? "" : absl::StrCat(" and ", parameters.size() - 1, " more"),
             step_ + 1, options_.job);
  BringHome(attachment_.get());
  if (!before.edits.has_value()) KeepEdits();
  std::vector<at::Tensor> trained = LeaveGradients();
  for (Parameter& parameter : parameters) {
    trained.push_back(parameter.trainable ? parameter.tensor : at::Tensor());
    Adopt(std::move(parameter), /*takes_now=*/true);
  }
  MarkAliases(tensors);
  NameLaterForFiles(tensors, are_all ? 0 : first, buffers_);
  LayOutMore(before, trained);
}

TensorEngine::BeforeGrowth TensorEngine::TakeBeforeGrowth() {
  std::vector<KeptState> unsettled = GatherUnsettled();
  std::optional<std::vector<Edit>> edits = GatherEdits();
  return {std::move(unsettled), std::move(edits), declared_, buffers_};
}

void TensorEngine::LayOutMore(const BeforeGrowth& before, std::span<const at::Tensor> trained) {
  LayOutAnew([&] {
    const client::OtherTensors more = MoreTensors(before.declared, before.buffers);
    Reopen(&more);
    PutNew(static_cast<uint32_t>(before.declared.size()));
    WatchGradients(trained);
    if (before.edits.has_value()) PutEdits(*before.edits);
    PutStates(before.unsettled);
  });
  attached_ = {.sealed = true};
  malloc_trim(0);
}

// The state begins with the new tensors: what is read with them is of one epoch.
client::OtherTensors TensorEngine::MoreTensors(const std::vector<proto::Tensor>& before,
                                               const Buffers& kept) {
  client::OtherTensors more;
  std::vector<LaidOutTensor> layout;
  const auto add = [&](std::string name, std::string stored_name) {
    const auto known = absl::c_find_if(
        state_.layout, [&](const LaidOutTensor& tensor) { return tensor.name == stored_name; });
    LaidOutTensor tensor = {.name = std::move(name), .is_new = stored_name.empty()};
    if (known != state_.layout.end()) {
      tensor.is_new = known->is_new;
      tensor.former_name = known->former_name;
    }
    if (!tensor.is_new && tensor.former_name.empty() && tensor.name != stored_name)
      tensor.former_name = stored_name;
    layout.push_back(std::move(tensor));
    more.stored_names.push_back(std::move(stored_name));
  };
  for (size_t id = 0; id < declared_.size(); ++id)
    add(declared_[id].name, id < before.size() ? before[id].name : "");
  for (const Buffers::Large& buffer : buffers_.large()) {
    const auto stored = absl::c_find_if(kept.large(), [&](const Buffers::Large& each) {
      return buffer.slot.has_value() ? each.slot == buffer.slot
                                     : each.tensor.is_same(buffer.tensor);
    });
    add(proto::BufferTensorName(buffer.name),
        stored != kept.large().end() ? proto::BufferTensorName(stored->name) : "");
  }
  epoch_state_.layout = state_.layout = std::move(layout);
  state_.update_counts.resize(declared_.size(), 0);
  epoch_state_.update_counts.resize(declared_.size(), 0);
  more.trainer_state = Encoded(epoch_state_);
  return more;
}

void TensorEngine::PutNew(uint32_t first) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  for (uint32_t id = first; id < weights_.size(); ++id) {
    LoadInitial(id);
    weights_[id]->Start(/*goes_on=*/false);
  }
  StoreLargeBuffers(/*new_ones_only=*/true);  // of the others the epoch has what the last step left
  ThrowIfError(attachment_->session().EndLoad());
  attachment_->EndEpoch();
}

// Modules may have changed places.
void TensorEngine::NameForFilesAnew(std::span<const NamedTensor> tensors,
                                    std::span<const NamedTensor> buffers) {
  if (!attached_.sealed) return;
  Buffers named = buffers_;
  named.Rename(buffers);
  NameLaterForFiles(tensors, 0, named);
}

// Files have the tensors from number `first` on under the names of the list.
void TensorEngine::NameLaterForFiles(std::span<const NamedTensor> tensors, uint32_t first,
                                     const Buffers& buffers) {
  std::vector<NamedTensor> named;
  std::unordered_set<std::string> names;
  for (const NamedTensor& each : tensors) {
    if (!each.tensor.defined()) continue;
    const auto known = ids_.find(each.tensor.unsafeGetTensorImpl());
    const bool is_later =
        known != ids_.end() ? known->second >= first : first == 0 && each.tensor.numel() == 0;
    if (is_later && names.insert(each.name).second) named.push_back(each);
  }
  std::erase_if(file_weights_, [&](const FileWeight& weight) {
    return first == 0 || weight.is_buffer || names.contains(weight.name);
  });
  for (FileWeight& weight : ValueOrThrow(FindFileWeights(named))) {
    if (weight.ElementCount() > 0)
      file_ids_[weight.name] = ids_.at(weight.tensor.unsafeGetTensorImpl());
    weight.tensor.reset();
    file_weights_.push_back(std::move(weight));
  }
  ThrowIfError(AddFileBuffers(buffers.all(), file_weights_));
}

// ---- When it goes on ---------------------------------------------------------------------------

// A model of the last step has the former names.
const LaidOutTensor* TensorEngine::FindLaidOut(std::string_view name) const {
  const LaidOutTensor* found = nullptr;
  for (const LaidOutTensor& tensor : state_.layout) {
    if (tensor.former_name == name) return &tensor;
    if (tensor.name == name) found = &tensor;
  }
  return found;
}

bool TensorEngine::WasTrained(const std::string& name, size_t id) const {
  if (!state_.layout.empty()) {
    const LaidOutTensor* const found = FindLaidOut(name);
    id = found != nullptr ? found - state_.layout.data() : stored_trainable_.size();
  }
  return id < stored_trainable_.size() && stored_trainable_[id] && attachment_->world_size() == 1;
}

bool TensorEngine::IsNewInStore(uint32_t id) const {
  return id < state_.layout.size() && state_.layout[id].is_new;
}

void TensorEngine::SortAsLaidOut(std::vector<Parameter>& parameters) const {
  if (state_.layout.empty() || attached_.sealed) return;
  std::unordered_map<std::string_view, size_t> places;
  for (size_t i = 0; i < state_.layout.size(); ++i) places.emplace(state_.layout[i].name, i);
  const auto place = [&](const Parameter& parameter) {
    const auto found = places.find(parameter.name);
    return found != places.end() ? found->second : places.size();
  };
  std::ranges::stable_sort(parameters, {}, place);
}

std::vector<std::string> TensorEngine::NamesInStore(const Buffers& buffers) const {
  std::vector<std::string> names;
  for (const proto::Tensor& tensor : declared_) names.push_back(tensor.name);
  for (const Buffers::Large& buffer : buffers.large())
    names.push_back(proto::BufferTensorName(buffer.name));
  return names;
}

// What the model has to have.
static bool IsNeeded(const LaidOutTensor& tensor) {
  return !tensor.is_new && !proto::IsReplacedTensor(tensor.name);
}

bool TensorEngine::HasAllOfStore() const {
  if (state_.layout.empty()) return declared_.size() == state_.update_counts.size();
  const std::unordered_map<std::string_view, uint32_t> ids = IdsByName();
  return absl::c_all_of(state_.layout, [&](const LaidOutTensor& tensor) {
    return !IsNeeded(tensor) || proto::IsBufferTensor(tensor.name) || ids.contains(tensor.name) ||
           ids.contains(tensor.former_name);
  });
}

bool TensorEngine::HasBuffersInStore() const {
  if (state_.layout.empty()) return StoredBuffers() > 0;
  return absl::c_any_of(state_.layout, [](const LaidOutTensor& tensor) {
    return proto::IsBufferTensor(tensor.name) && IsNeeded(tensor);
  });
}

// Whether there is no step yet since the store was laid out, and the model is that of before.
bool TensorEngine::IsOfBefore() const {
  std::unordered_set<std::string_view> before;
  bool has_new = false;
  for (const LaidOutTensor& tensor : state_.layout) {
    has_new |= tensor.is_new;
    const std::string_view name = tensor.former_name.empty() ? tensor.name : tensor.former_name;
    if (!tensor.is_new && !proto::IsBufferTensor(name) && !proto::IsReplacedTensor(name))
      before.insert(name);
  }
  return has_new && before.size() == declared_.size() &&
         absl::c_all_of(declared_,
                        [&](const proto::Tensor& tensor) { return before.contains(tensor.name); });
}

// Small buffers have the names of the last step.
void TensorEngine::CheckNamesOfLastStep() const {
  const auto came = std::ranges::find_if(state_.layout, &LaidOutTensor::is_new);
  const bool has_renamed = absl::c_any_of(state_.layout, [](const LaidOutTensor& tensor) {
    return !tensor.former_name.empty() && !proto::IsReplacedTensor(tensor.name);
  });
  if (came == state_.layout.end() || !has_renamed) return;
  ThrowStatus(
      MakeError(ErrorId::kOtherModel,
                absl::StrCat("job ", Quoted(options_.job), " has taken no step with parameter ",
                             Quoted(came->name),
                             ", which has changed the names of others, and the model has "
                             "it already"),
                "Build the model as it was at the last step, and add it after it is attached"));
}

// Which tensor of the store each of the model is, by the names of the model.
void TensorEngine::SettleLayout() {
  stored_names_.clear();
  const bool is_of_before = IsOfBefore();
  if (!is_of_before) CheckNamesOfLastStep();
  std::vector<LaidOutTensor> layout;
  std::vector<uint64_t> counts;
  for (size_t i = 0; i < state_.layout.size(); ++i) {
    LaidOutTensor tensor = state_.layout[i];
    if (is_of_before) {
      if (tensor.is_new) continue;
      if (!tensor.former_name.empty()) tensor.name = std::exchange(tensor.former_name, "");
    }
    stored_names_.emplace(tensor.name, state_.layout[i].name);
    layout.push_back(std::move(tensor));
    if (i < state_.update_counts.size()) counts.push_back(state_.update_counts[i]);
  }
  if (!is_of_before) return;
  state_.layout = std::move(layout);
  state_.update_counts = std::move(counts);
}

std::optional<client::OtherTensors> TensorEngine::MatchLayout(
    const std::vector<LaidOutTensor>& in_store) {
  if (in_store.empty()) return std::nullopt;
  const std::vector<std::string> names = NamesInStore(buffers_);
  const bool is_same = absl::c_equal(
      names, in_store,
      [](const std::string& name, const LaidOutTensor& tensor) { return name == tensor.name; });
  const bool has_new = std::ranges::any_of(in_store, &LaidOutTensor::is_new);
  if (is_same && !has_new) return std::nullopt;
  const auto refuse = [&](const std::string& what, const std::string& way_out) {
    ThrowStatus(
        MakeError(ErrorId::kOtherModel, absl::StrCat("job ", Quoted(options_.job), what), way_out));
  };
  const std::unordered_set<std::string> known(names.begin(), names.end());
  for (const LaidOutTensor& tensor : state_.layout) {
    if (IsNeeded(tensor) && !known.contains(tensor.name)) {
      refuse(absl::StrCat(" has parameter ", Quoted(tensor.name), ", the model has not"),
             "Parameters were added to the model while the job was trained: build it with them, "
             "before it is attached");
    }
  }
  if (attachment_->world_size() > 1) {
    refuse(
        " was laid out anew for other parameters than this model has, or has taken no step with "
        "them, and there are several ranks",
        "Take a step with one process first, which lays it out for this model");
  }
  if (is_same) return std::nullopt;
  struct TrainerState next = state_;
  next.layout.clear();
  next.update_counts.clear();
  client::OtherTensors others;
  for (const std::string& name : names) {
    const auto found = absl::c_find_if(
        state_.layout, [&name](const LaidOutTensor& tensor) { return tensor.name == name; });
    if (found == state_.layout.end())
      refuse(absl::StrCat(" has no parameter ", Quoted(name), ", the model has it"),
             "Add it after the first step, or begin a new job with these weights");
    if (!proto::IsBufferTensor(name))
      next.update_counts.push_back(state_.update_counts.at(found - state_.layout.begin()));
    next.layout.push_back(*found);
    others.stored_names.push_back(found->is_new ? "" : stored_names_.at(name));
  }
  epoch_state_.layout = next.layout;
  epoch_state_.update_counts = next.update_counts;
  others.trainer_state = Encoded(epoch_state_);
  state_ = std::move(next);
  return others;
}

}  // namespace offload::zero3
