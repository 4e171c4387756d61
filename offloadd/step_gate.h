// offloadd/step_gate.h
//
// One step from the requests of all ranks: pure. They have to agree, bit by bit, on its number, its
// groups and, for every tensor that two of them name, on group, count, scale and the bytes of a
// gradient that they wrote themselves. A tensor that only some name is updated all the same: the
// others' part of its gradient is nothing.
//
// Thread safety: none; one owner.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/offload.pb.h"

namespace offload::daemon {

using StepMessages = std::vector<proto::v1::StepRequest>;

class StepGate {
 public:
  // `name_of` names tensors, also those that are none. `compares_gradients`: every rank has the
  // whole gradient and says its checksum (gradients that the trainer reduces).
  StepGate(uint32_t world_size, bool compares_gradients,
           std::function<std::string(uint32_t tensor)> name_of)
      : requests_(world_size),
        compares_gradients_(compares_gradients),
        name_of_(std::move(name_of)) {}

  // OFD-1503 for the second step of a rank at once.
  absl::Status Add(uint32_t rank, StepMessages messages);
  bool empty() const;
  bool IsComplete() const;
  bool Has(uint32_t rank) const { return requests_[rank].has_value(); }
  // The rank has called for a step with gradients.
  bool NamesTensors(uint32_t rank) const;
  std::vector<uint32_t> Missing() const;

  // Requires IsComplete(), and empties the gate. The messages of one rank that ask for what all do;
  // gradients that the trainer wrote are the first rank's. OFD-1805 naming the first difference and
  // both ranks, OFD-1503 for lists that differ in length.
  absl::StatusOr<StepMessages> Take();
  void Clear();

 private:
  std::vector<std::optional<StepMessages>> requests_;  // by rank
  bool compares_gradients_;
  std::function<std::string(uint32_t)> name_of_;
};

}  // namespace offload::daemon
