// What a simulated rank puts, follows, asks for and exchanges.

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "offloadd/job_simulation.h"

namespace offload::daemon {
namespace {

using proto::Plane;
using proto::RingOperation;
using proto::SubmissionEntry;

// Of a put that is made from the old value.
uint64_t DigestOf(const StepScript& script, uint32_t tensor) {
  return script.changes.contains(tensor) ? script.id : 0;
}

SubmissionEntry EndOfPuts(uint32_t tensor, uint64_t digest) {
  SubmissionEntry entry{};
  entry.operation = RingOperation::kPut;
  entry.tensor = tensor;
  entry.digest = digest;
  return entry;
}

}  // namespace

void SimulatedRank::Put(const std::shared_ptr<StepScript>& script, uint32_t tensor) {
  const bool puts_masters = script != nullptr && script->puts_masters.contains(tensor);
  const uint64_t digest = script != nullptr ? DigestOf(*script, tensor) : 0;
  PutPlane(tensor, puts_masters ? Plane::kMaster : Plane::kWeight, digest, [=, this] {
    if (script == nullptr) return sim_.now(tensor).weights;
    return puts_masters ? sim_.PutMasterValues(*script, tensor) : sim_.PutValues(*script, tensor);
  });
  const bool puts_states =
      script == nullptr ? sim_.BeginsWithStates(tensor) : script->puts_states.contains(tensor);
  for (size_t i = 0; puts_states && i < proto::kStatePlanes.size(); ++i) {
    const Plane plane = proto::kStatePlanes[i];
    if (!sim_.plan().catalogue.planes(tensor).Has(plane)) continue;
    PutPlane(tensor, plane, digest, [this, script, tensor, plane, i] {
      return script == nullptr ? PlaneBytes(sim_.plan().catalogue, tensor, sim_.now(tensor), plane)
                               : sim_.PutStateValues(*script, tensor, i);
    });
  }
  if (script != nullptr && sim_.plan().world_size > 1)
    Await("puts", [=] { return EndOfPuts(tensor, digest); });
  Then("puts", [this, script, tensor, puts_states, puts_masters] {
    ++sim_.result().puts;
    sim_.result().state_puts += puts_states;
    sim_.result().master_puts += puts_masters;
    if (script != nullptr) sim_.ApplyPut(*script, tensor);
    return true;
  });
}

void SimulatedRank::PutPlane(uint32_t tensor, Plane plane, uint64_t digest,
                             const std::function<Bytes()>& values) {
  const uint64_t element_count = sim_.plan().catalogue.tensors[tensor].element_count;
  const uint64_t element_bytes = sim_.plan().catalogue.planes(tensor).Bits(plane) / 8;
  for (uint32_t extent = 0; extent < proto::ExtentCount(element_count); ++extent) {
    Await("puts", [=, this] {
      const Bytes bytes = values();
      SubmissionEntry entry = Entry(RingOperation::kPut, tensor);
      entry.plane = plane;
      entry.element_offset = uint64_t{extent} * proto::kExtentElements;
      entry.element_count = proto::ExtentElements(element_count, extent);
      entry.region_offset = sim_.plan().transfer_offset;
      entry.digest = digest;
      std::memcpy(region_ + entry.region_offset,
                  bytes.data() + entry.element_offset * element_bytes,
                  entry.element_count * element_bytes);
      return entry;
    });
  }
}

void SimulatedRank::Follow(const std::shared_ptr<StepScript>& script, uint32_t tensor) {
  Await(
      "follows a put", [=] { return EndOfPuts(tensor, DigestOf(*script, tensor)); },
      [this, script, tensor](uint64_t) { sim_.ApplyPut(*script, tensor); });
}

// Nothing of it is put, and all are told so.
void SimulatedRank::Differ(const std::shared_ptr<StepScript>& script, uint32_t tensor) {
  const bool is_last = number_ + 1 == sim_.plan().world_size;
  if (number_ == 0) {
    SubmissionEntry entry = EndOfPuts(tensor, script->id);
    entry.element_count =
        proto::ExtentElements(sim_.plan().catalogue.tensors[tensor].element_count, /*extent=*/0);
    entry.region_offset = sim_.plan().transfer_offset;
    AwaitRefusal("puts what differs", entry, ErrorId::kWeightOfRanks);
  }
  AwaitRefusal("changes what differs", EndOfPuts(tensor, script->id + (is_last ? 1 : 0)),
               ErrorId::kWeightOfRanks);
}

void SimulatedRank::Get(uint32_t tensor, Plane plane) {
  const proto::Tensor& declared = sim_.plan().catalogue.tensors[tensor];
  for (uint32_t extent = 0; extent < proto::ExtentCount(declared.element_count); ++extent) {
    SubmissionEntry entry = Entry(RingOperation::kGet, tensor);
    entry.plane = plane;
    entry.element_offset = uint64_t{extent} * proto::kExtentElements;
    entry.element_count = proto::ExtentElements(declared.element_count, extent);
    entry.region_offset = sim_.plan().transfer_offset;
    Await(
        "gets", [entry] { return entry; },
        [this, entry, tensor, plane](uint64_t) {
          ++sim_.result().gets;
          const proto::Catalogue& catalogue = sim_.plan().catalogue;
          const Bytes expected = PlaneBytes(catalogue, tensor, sim_.now(tensor), plane);
          const uint64_t element_bytes = expected.size() / catalogue.tensors[tensor].element_count;
          if (std::memcmp(region_ + entry.region_offset,
                          expected.data() + entry.element_offset * element_bytes,
                          entry.element_count * element_bytes) != 0) {
            sim_.Violate(absl::StrCat("rank ", number_, " gets another plane ",
                                      static_cast<uint32_t>(plane), " of tensor ", tensor));
          }
        });
  }
}

void SimulatedRank::Exchange() {
  Then("exchanges", [this] {
    proto::v1::ExchangeRequest request;
    request.set_number(exchanges_++);
    request.set_data(absl::StrCat(number_, ":", request.number()));
    answer_.reset();
    ++sim_.result().exchanges;
    job().Exchange(
        *rank(), request,
        [this, number = request.number()](const absl::StatusOr<std::vector<std::string>>& said) {
          Answered("Exchange", said.status());
          for (uint32_t i = 0; said.ok() && i < sim_.plan().world_size; ++i) {
            if ((*said)[i] != absl::StrCat(i, ":", number))
              sim_.Violate("an exchange gives something else");
          }
        });
    return true;
  });
  Then("exchanges", [this] { return answer_.has_value(); });
}

}  // namespace offload::daemon
