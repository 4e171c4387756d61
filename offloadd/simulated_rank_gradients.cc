// A simulated rank's gradients: rounds of several ranks' sums, and one rank's own.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "kernels/update.h"
#include "offloadd/job_simulation.h"

namespace offload::daemon {
namespace {

using proto::GradientHome;
using proto::RingOperation;
using proto::SubmissionEntry;

bool IsFinite(proto::Dtype dtype, const Bytes& values) {
  return kernels::AllFinite(dtype, values.data(), values.size() / proto::DtypeBytes(dtype));
}

}  // namespace

void SimulatedRank::AddRound(const std::shared_ptr<StepScript>& script, uint32_t round) {
  Random& random = sim_.random();
  const StepScript::Round& what = script->rounds[round];
  if (round == 0 || what.begins_anew) {
    Then("ends a pass", [this, script] {
      SubmissionEntry entry = Entry(RingOperation::kBeginGradients);
      entry.element_offset = script->step;
      unwatched_.insert(Submit(entry));
      return true;
    });
    if (what.begins_anew && number_ == 0) ++sim_.result().rounds_anew;
  }
  const auto& passes = what.given[number_];
  for (uint32_t i = 0; i < passes.size(); ++i) {
    std::vector<uint32_t> order = passes[i];
    if (random.OneIn(2)) std::shuffle(order.begin(), order.end(), random);
    for (const uint32_t tensor : order) {
      if (random.OneIn(2)) Use(tensor);
      Give(script, round, i, tensor);
    }
    SubmissionEntry end = Entry(RingOperation::kEndPass);
    end.pass = what.first_pass + i;
    end.start = random.OneIn(3) ? proto::GradientStart::kZeros : proto::GradientStart::kNothing;
    if (end.start == proto::GradientStart::kZeros) {  // waits
      Await("ends a pass", [end] { return end; });
    } else {
      Then("ends a pass", [this, end] {
        unwatched_.insert(Submit(end));
        return true;
      });
    }
  }
  for (const uint32_t tensor : what.looks[number_]) Look(script, round, tensor);
}

void SimulatedRank::Give(const std::shared_ptr<StepScript>& script, uint32_t round, uint32_t pass,
                         uint32_t tensor) {
  const proto::Tensor& declared = sim_.plan().catalogue.tensors[tensor];
  const StepScript::Round& what = script->rounds[round];
  Then("gives a gradient", [this, &declared, script, round, pass, tensor,
                            number = what.first_pass + pass,
                            start = script->starts[what.beginning][tensor], extent = uint32_t{0},
                            values = Bytes()]() mutable {
    const SimulatedPlan& plan = sim_.plan();
    const auto slot = std::find(slot_tags_.begin(), slot_tags_.end(), 0u);
    if (slot == slot_tags_.end()) return false;
    if (values.empty()) values = sim_.PartValues(*script, round, pass, number_, tensor);
    SubmissionEntry entry = Entry(RingOperation::kGradient, tensor);
    entry.pass = number;
    entry.start = start;
    entry.element_offset = uint64_t{extent} * proto::kExtentElements;
    entry.element_count = proto::ExtentElements(declared.element_count, extent);
    entry.region_offset =
        plan.slots_offset + static_cast<uint64_t>(slot - slot_tags_.begin()) * plan.slot_bytes;
    const uint64_t element_bytes = proto::DtypeBytes(declared.dtype);
    std::memcpy(region_ + entry.region_offset, values.data() + entry.element_offset * element_bytes,
                entry.element_count * element_bytes);
    *slot = Submit(entry);
    ++sim_.result().parts;
    return ++extent == proto::ExtentCount(declared.element_count);
  });
}

void SimulatedRank::Look(const std::shared_ptr<StepScript>& script, uint32_t round,
                         uint32_t tensor) {
  const StepScript::Round& what = script->rounds[round];
  SubmissionEntry entry = Entry(RingOperation::kAwaitGradient, tensor);
  entry.pass = what.first_pass + static_cast<uint32_t>(what.given[number_].size());
  Await(
      "looks at a gradient", [entry] { return entry; },
      [this, script, round, tensor](uint64_t word) { JudgeLook(*script, round, tensor, word); });
  if (sim_.plan().memory.gradients[tensor].home == GradientHome::kSlabScratch)
    ReadSpilled(script, round, tensor);
}

void SimulatedRank::JudgeLook(const StepScript& script, uint32_t round, uint32_t tensor,
                              uint64_t word) {
  ++sim_.result().looks;
  const SimulatedPlan& plan = sim_.plan();
  const Bytes& sum = sim_.Sum(const_cast<StepScript&>(script), round, tensor);
  const auto judge = [&](bool is_good, const char* what) {
    if (is_good) return;
    sim_.Violate(absl::StrCat("rank ", number_, " looks at the gradient of tensor ", tensor,
                              " after round ", round, " of script ", script.id, ": ", what));
  };
  const uint8_t bits = proto::GradientBitsOf(word);
  judge((bits & proto::kGradientFinal) != 0, "it is not final");
  judge(((bits & proto::kGradientExists) != 0) == !sum.empty(), "it exists for one of us only");
  judge(proto::GradientStepOf(word) == script.step, "it is of another step");
  if (sum.empty()) return;
  const proto::Dtype dtype = plan.catalogue.tensors[tensor].dtype;
  judge(((bits & proto::kGradientFinite) != 0) == IsFinite(dtype, sum), "finite for one of us");
  const uint32_t norm = Crc32c(0, sum.data(), sum.size());
  judge((bits & proto::kGradientNorm) == 0 || proto::GradientNormOf(word) == norm,
        "another sum's norm");
  if (plan.memory.gradients[tensor].home == GradientHome::kSlab) {
    judge(std::memcmp(sim_.slab() + plan.layout.sum_offset[tensor], sum.data(), sum.size()) == 0,
          "it is another sum");
  }
  if (sim_.random().OneIn(2)) return;
  SubmissionEntry publish = Entry(RingOperation::kPublishNorm, tensor);
  publish.element_offset = norm;
  unwatched_.insert(Submit(publish));
}

void SimulatedRank::ReadSpilled(const std::shared_ptr<StepScript>& script, uint32_t round,
                                uint32_t tensor) {
  const proto::Tensor& declared = sim_.plan().catalogue.tensors[tensor];
  bool exists = false;
  for (uint32_t i = 0; i <= round; ++i) {
    if (script->rounds[i].beginning != script->rounds[round].beginning) continue;
    for (const auto& passes : script->rounds[i].given) {
      for (const std::vector<uint32_t>& tensors : passes)
        exists |= std::find(tensors.begin(), tensors.end(), tensor) != tensors.end();
    }
  }
  if (!exists) return;
  const uint64_t element_bytes = proto::DtypeBytes(declared.dtype);
  for (uint32_t extent = 0; extent < proto::ExtentCount(declared.element_count); ++extent) {
    const uint64_t begin_bytes = uint64_t{extent} * proto::kExtentElements * element_bytes;
    const uint64_t size_bytes =
        proto::ExtentElements(declared.element_count, extent) * element_bytes;
    SubmissionEntry entry = Entry(RingOperation::kScratchRead);
    entry.element_offset = sim_.plan().memory.gradients[tensor].offset_bytes + begin_bytes;
    entry.element_count = proto::PaddedBytes(size_bytes);
    entry.region_offset = sim_.plan().transfer_offset;
    Await(
        "reads a spilled sum", [entry] { return entry; },
        [this, script, round, tensor, begin_bytes, size_bytes](uint64_t) {
          ++sim_.result().spilled_looks;
          const Bytes& sum = sim_.Sum(*script, round, tensor);
          if (std::memcmp(region_ + sim_.plan().transfer_offset, sum.data() + begin_bytes,
                          size_bytes) != 0)
            sim_.Violate(
                absl::StrCat("rank ", number_, " reads another spilled sum of tensor ", tensor));
        });
  }
}

// A rank alone writes the whole gradient where it is at home, when the update before has read it.
// Says now and then what the step will be, rightly or not, and which gradients are final, of which
// some change all the same.
void SimulatedRank::AddGradientsOfOne(const std::shared_ptr<StepScript>& script) {
  Random& random = sim_.random();
  const bool announces = !random.OneIn(3);
  if (announces) AnnounceStep(script);
  for (const uint32_t tensor : script->rounds[0].given[0][0]) {
    Use(tensor);
    const bool is_in_place = sim_.plan().memory.gradients[tensor].home == GradientHome::kRegion;
    if (announces && is_in_place && random.OneIn(4)) {
      WriteInRegion(tensor, [this, script, tensor] {
        return sim_.PartValues(*script, 0, /*pass=*/1, 0, tensor);
      });
      Release(tensor);
      if (random.OneIn(2)) AddForward();
    }
    AddGradientOfOne(script, tensor);
    if (announces && !random.OneIn(5)) Release(tensor);
  }
  if (announces && random.OneIn(2)) AddForward();
  if (announces && random.OneIn(2)) AddPause();
  if (announces && random.OneIn(8)) AnnounceStep(script);  // the gradients before it count no more
}

// By a call, or by its ring.
void SimulatedRank::AnnounceStep(const std::shared_ptr<StepScript>& script) {
  const bool is_right = !sim_.random().OneIn(4), by_ring = sim_.random().OneIn(2);
  const auto messages = [this, script, is_right] {
    std::vector<proto::v1::StepRequest> messages = StepMessages(*script);
    if (!is_right) {
      proto::v1::Optimizer group = messages.front().groups(0);
      group.set_parameters(0, group.parameters(0) / 2);  // of every optimizer the learning rate
      *messages.front().mutable_groups(0) = group;
    }
    return messages;
  };
  if (by_ring) {
    return Await("announces a step by its ring", [this, messages] {
      return StepCommand(RingOperation::kBeginStep, messages().front());
    });
  }
  Then("announces a step", [this, messages] {
    const absl::Status status = job().BeginStep(messages());
    if (!status.ok()) Fail("BeginStep", status);
    return true;
  });
}

// Time for what may be done ahead.
void SimulatedRank::AddPause() {
  const auto turns = std::make_shared<uint64_t>(sim_.random().Below(200));
  Then("computes", [turns] { return *turns == 0 || --*turns == 0; });
}

void SimulatedRank::Release(uint32_t tensor) {
  Then("releases a gradient", [this, tensor] {
    unwatched_.insert(Submit(Entry(RingOperation::kReleaseGradient, tensor)));
    return true;
  });
}

void SimulatedRank::WriteInRegion(uint32_t tensor, const std::function<Bytes()>& values) {
  Then("writes its gradient", [this, tensor, values] {
    const Bytes bytes = values();
    std::memcpy(region_ + sim_.plan().memory.gradients[tensor].offset_bytes, bytes.data(),
                bytes.size());
    return true;
  });
}

void SimulatedRank::AddGradientOfOne(const std::shared_ptr<StepScript>& script, uint32_t tensor) {
  const proto::Tensor& declared = sim_.plan().catalogue.tensors[tensor];
  const proto::GradientPlacement& home = sim_.plan().memory.gradients[tensor];
  const auto part = [this, script, tensor] { return sim_.PartValues(*script, 0, 0, 0, tensor); };
  if (home.home == GradientHome::kRegion) return WriteInRegion(tensor, part);
  const uint64_t element_bytes = proto::DtypeBytes(declared.dtype);
  for (uint32_t extent = 0; extent < proto::ExtentCount(declared.element_count); ++extent) {
    const uint64_t begin_bytes = uint64_t{extent} * proto::kExtentElements * element_bytes;
    const uint64_t size_bytes =
        proto::ExtentElements(declared.element_count, extent) * element_bytes;
    Await("writes its gradient",
          [this, part, begin_bytes, size_bytes, offset_bytes = home.offset_bytes] {
            const Bytes values = part();
            SubmissionEntry entry = Entry(RingOperation::kScratchWrite);
            entry.element_offset = offset_bytes + begin_bytes;
            entry.element_count = proto::PaddedBytes(size_bytes);
            entry.region_offset = sim_.plan().transfer_offset;
            std::memcpy(region_ + entry.region_offset, values.data() + begin_bytes, size_bytes);
            return entry;
          });
  }
}

// The trainer's own gradient, when the update before has read the last one.
void SimulatedRank::WriteOwn(const std::shared_ptr<StepScript>& script, uint32_t tensor) {
  Use(tensor);
  Then("writes its gradient", [this, script, tensor] {
    const proto::Tensor& declared = sim_.plan().catalogue.tensors[tensor];
    const Bytes values =
        MakeValues(declared.dtype, declared.element_count, sim_.Key(*script, /*what=*/2, tensor));
    std::memcpy(region_ + sim_.plan().own_offset[tensor], values.data(), values.size());
    ++sim_.result().own_gradients;
    return true;
  });
}

}  // namespace offload::daemon
