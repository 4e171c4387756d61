#include "offloadd/step_gate.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "offloadd/agreement.h"

namespace offload::daemon {
namespace {

using proto::v1::StepRequest;

absl::Status Difference(const std::string& what) { return MakeError(ErrorId::kRanksDiffer, what); }

// Of a gradient that ought to be the same in all ranks.
absl::Status GradientDifference(const std::string& what, bool is_reduced) {
  if (!is_reduced) return Difference(what);
  return MakeError(
      ErrorId::kRanksDiffer, what,
      "Reduce every gradient, to the same bits in all ranks, between the last backward "
      "and the step");
}

std::string Ranks(uint32_t a, uint32_t b) { return absl::StrCat("ranks ", a, " and ", b); }

// What a rank says of a tensor.
struct Entry {
  uint32_t rank = 0;
  uint32_t group = 0;
  uint64_t update_count = 0;
  double gradient_scale = 1;
  uint64_t own_gradient_offset = 0;  // 0: the sum is updated with
  uint32_t own_gradient_crc = 0;
};
using Entries = std::map<uint32_t, Entry>;  // by tensor

// Lists of gradients may be missing: nothing was written.
bool HasEqualLengths(const StepRequest& message) {
  const int count = message.tensors_size();
  const auto fits = [count](int size) { return size == 0 || size == count; };
  return message.group_of_size() == count && message.update_count_size() == count &&
         message.gradient_scale_size() == count && fits(message.own_gradient_offset_size()) &&
         fits(message.own_gradient_crc_size());
}

absl::StatusOr<Entries> Read(uint32_t rank, const StepMessages& messages) {
  Entries entries;
  for (const StepRequest& message : messages) {
    if (!HasEqualLengths(message))
      return MakeError(ErrorId::kProtocol, "a step whose lists differ in length");
    for (int i = 0; i < message.tensors_size(); ++i) {
      Entry entry{.rank = rank,
                  .group = message.group_of(i),
                  .update_count = message.update_count(i),
                  .gradient_scale = message.gradient_scale(i)};
      if (message.own_gradient_offset_size() > 0)
        entry.own_gradient_offset = message.own_gradient_offset(i);
      if (message.own_gradient_crc_size() > 0) entry.own_gradient_crc = message.own_gradient_crc(i);
      if (!entries.emplace(message.tensors(i), entry).second) {
        return MakeError(ErrorId::kProtocol,
                         absl::StrCat("a step that names tensor ", message.tensors(i), " twice"));
      }
    }
  }
  return entries;
}

absl::Status CompareHeads(uint32_t rank, const StepRequest& head, const StepRequest& first) {
  if (head.step() != first.step()) {
    return Difference(absl::StrCat("rank 0 is at step ", first.step(), " and rank ", rank,
                                   " at step ", head.step()));
  }
  if (head.groups_size() != first.groups_size()) {
    return Difference(absl::StrCat("step ", first.step(), " has ", first.groups_size(),
                                   " groups in rank 0 and ", head.groups_size(), " in rank ",
                                   rank));
  }
  for (int i = 0; i < head.groups_size(); ++i) {
    const std::string difference = DifferenceOf({0, first.groups(i)}, {rank, head.groups(i)});
    if (difference.empty()) continue;
    return Difference(
        absl::StrCat("the optimizer of group ", i, " of step ", first.step(), ": ", difference));
  }
  return absl::OkStatus();
}

absl::Status CompareEntries(const std::string& name, const Entry& a, const Entry& b,
                            bool compares_gradients) {
  const std::string of = absl::StrCat(" of \"", name, "\" differs between ", Ranks(a.rank, b.rank));
  if (a.group != b.group)
    return Difference(absl::StrCat("the group", of, ": ", a.group, " and ", b.group));
  if (a.update_count != b.update_count) {
    return Difference(
        absl::StrCat("the number of updates", of, ": ", a.update_count, " and ", b.update_count));
  }
  if (std::bit_cast<uint64_t>(a.gradient_scale) != std::bit_cast<uint64_t>(b.gradient_scale)) {
    return MakeError(
        ErrorId::kRanksDiffer,
        absl::StrCat("the gradient's scale", of, ": ", a.gradient_scale, " and ", b.gradient_scale),
        "Clip on all ranks alike, each after a backward pass of its own: a rank that "
        "has no batch left makes one with its loss times 0, or it has no gradients to "
        "clip");
  }
  const bool is_own = a.own_gradient_offset != 0;
  if (is_own != (b.own_gradient_offset != 0)) {
    return Difference(absl::StrCat("the gradient", of, ": only rank ", is_own ? a.rank : b.rank,
                                   " has written it"));
  }
  if ((is_own || compares_gradients) && a.own_gradient_crc != b.own_gradient_crc)
    return GradientDifference(absl::StrCat("the gradient", of), compares_gradients);
  return absl::OkStatus();
}

// Whose gradient is the whole one has to have it in all ranks.
absl::Status CheckNamedByAll(const std::string& name, const Entry& entry, uint32_t names,
                             uint32_t world_size, bool compares_gradients) {
  if (names == world_size || (entry.own_gradient_offset == 0 && !compares_gradients))
    return absl::OkStatus();
  return GradientDifference(absl::StrCat("\"", name, "\" has a gradient in rank ", entry.rank,
                                         " and not in all of the ", world_size, " ranks"),
                            compares_gradients);
}

void Append(uint32_t tensor, const Entry& entry, StepRequest& to) {
  to.add_tensors(tensor);
  to.add_group_of(entry.group);
  to.add_update_count(entry.update_count);
  to.add_gradient_scale(entry.gradient_scale);
  to.add_own_gradient_offset(entry.own_gradient_offset);
  to.add_own_gradient_crc(entry.own_gradient_crc);
}

}  // namespace

absl::Status StepGate::Add(uint32_t rank, StepMessages messages) {
  if (requests_[rank].has_value()) return MakeError(ErrorId::kProtocol, "two steps at once");
  if (messages.empty()) return MakeError(ErrorId::kProtocol, "a step without messages");
  requests_[rank] = std::move(messages);
  return absl::OkStatus();
}

bool StepGate::NamesTensors(uint32_t rank) const {
  return Has(rank) && std::any_of(requests_[rank]->begin(), requests_[rank]->end(),
                                  [](const StepRequest& part) { return part.tensors_size() > 0; });
}

bool StepGate::empty() const {
  return std::none_of(requests_.begin(), requests_.end(),
                      [](const auto& request) { return request.has_value(); });
}

bool StepGate::IsComplete() const { return Missing().empty(); }

std::vector<uint32_t> StepGate::Missing() const {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < requests_.size(); ++rank) {
    if (!requests_[rank].has_value()) missing.push_back(rank);
  }
  return missing;
}

void StepGate::Clear() {
  for (std::optional<StepMessages>& request : requests_) request.reset();
}

absl::StatusOr<StepMessages> StepGate::Take() {
  OFFLOAD_CHECK(IsComplete());
  std::vector<StepMessages> all;
  for (std::optional<StepMessages>& request : requests_)
    all.push_back(*std::exchange(request, std::nullopt));
  if (all.size() == 1) return std::move(all.front());
  const auto world_size = static_cast<uint32_t>(all.size());
  Entries merged;
  std::map<uint32_t, uint32_t> names;  // by tensor: ranks that name it
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    OFFLOAD_RETURN_IF_ERROR(CompareHeads(rank, all[rank].front(), all.front().front()));
    OFFLOAD_ASSIGN_OR_RETURN(const Entries entries, Read(rank, all[rank]));
    if (entries.size() != all[rank].front().tensor_count()) {
      return MakeError(ErrorId::kProtocol,
                       absl::StrCat("a step of ", all[rank].front().tensor_count(),
                                    " tensors that names ", entries.size()));
    }
    for (const auto& [tensor, entry] : entries) {
      const auto [first, is_new] = merged.emplace(tensor, entry);
      ++names[tensor];
      if (is_new) continue;
      OFFLOAD_RETURN_IF_ERROR(
          CompareEntries(name_of_(tensor), first->second, entry, compares_gradients_));
    }
  }
  StepRequest request = all.front().front();
  for (auto* list :
       {request.mutable_tensors(), request.mutable_group_of(), request.mutable_own_gradient_crc()})
    list->Clear();
  request.clear_update_count();
  request.clear_gradient_scale();
  request.clear_own_gradient_offset();
  request.set_tensor_count(static_cast<uint32_t>(merged.size()));
  for (const auto& [tensor, entry] : merged) {
    OFFLOAD_RETURN_IF_ERROR(CheckNamedByAll(name_of_(tensor), entry, names.at(tensor), world_size,
                                            compares_gradients_));
    Append(tensor, entry, request);
  }
  return StepMessages{std::move(request)};
}

}  // namespace offload::daemon
