// How a simulated rank does what its scripts say.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "kernels/update.h"
#include "offloadd/job_simulation.h"
#include "proto/daemon_rings.h"

namespace offload::daemon {
namespace {

using proto::GradientHome;
using proto::Plane;
using proto::RingOperation;
using proto::SubmissionEntry;

bool IsFinite(proto::Dtype dtype, const Bytes& values) {
  return kernels::AllFinite(dtype, values.data(), values.size() / proto::DtypeBytes(dtype));
}

}  // namespace

SimulatedRank::SimulatedRank(Simulation* simulation, uint32_t number)
    : sim_(*simulation), number_(number), slot_tags_(sim_.plan().slots, 0) {
  Join();
}

Job& SimulatedRank::job() const { return sim_.job(); }
Rank* SimulatedRank::rank() const { return sim_.job().FindRank(session()); }

proto::PinWord& SimulatedRank::pin(uint32_t tensor) const {
  return reinterpret_cast<proto::PinWord*>(region_ + sim_.plan().pins_offset)[tensor];
}

uint64_t SimulatedRank::tensor_word(uint32_t tensor) const {
  const std::byte* const words = sim_.slab() + sim_.plan().layout.tensor_words_offset;
  return reinterpret_cast<const proto::TensorWord*>(words)[tensor].load();
}

bool SimulatedRank::Act() {
  if (is_gone_) return false;
  ReadCompletions();
  if (actions_.empty() && !is_ending_) {
    const std::shared_ptr<StepScript> script = sim_.Script(scripts_);
    ++scripts_;
    script != nullptr ? AddScript(script) : AddEnd();
  }
  const bool is_done = !is_ending_ && actions_.front().action();
  if (is_ending_) {  // perhaps by now
    actions_.clear();
    if (sim_.random().OneIn(4)) Leave();
    return false;
  }
  if (is_done) actions_.pop_front();
  return is_done;
}

void SimulatedRank::Die() {
  if (is_gone_) return;
  is_gone_ = true;
  actions_.clear();
  job().Leave(session(), "its process has ended", [] {});
}

std::string SimulatedRank::Describe() const {
  const char* const what = is_gone_           ? "is gone"
                           : is_ending_       ? "ends"
                           : actions_.empty() ? "looks around"
                                              : actions_.front().what;
  return absl::StrCat("rank ", number_, " ", what, " in script ", scripts_);
}

void SimulatedRank::Leave() {
  is_gone_ = true;
  job().Leave(session(), "it has closed its connection", [] {});
}

void SimulatedRank::Fail(const std::string& what, const absl::Status& status) {
  is_ending_ = true;
  sim_.trace().Add(static_cast<uint64_t>(status.code()));
  if (!sim_.MayFail())
    sim_.Violate(absl::StrCat("rank ", number_, ": ", what, ": ", status.ToString()));
}

void SimulatedRank::Answered(const char* call, const absl::Status& status) {
  sim_.trace().Add(number_ << 8 | static_cast<uint64_t>(status.code()));
  if (!status.ok()) return Fail(call, status);
  answer_ = status;
}

// ---- Its ring ----------------------------------------------------------------------------------

// Of a put that is made from the old value.
static uint64_t DigestOf(const StepScript& script, uint32_t tensor) {
  return script.changes.contains(tensor) ? script.id : 0;
}

static SubmissionEntry EndOfPuts(uint32_t tensor, uint64_t digest) {
  SubmissionEntry entry{};
  entry.operation = RingOperation::kPut;
  entry.tensor = tensor;
  entry.digest = digest;
  return entry;
}

SubmissionEntry SimulatedRank::Entry(RingOperation operation, uint32_t tensor) {
  SubmissionEntry entry{};
  entry.operation = operation;
  entry.tensor = tensor;
  return entry;
}

uint64_t SimulatedRank::Submit(SubmissionEntry entry) {
  entry.tag = ++tags_;
  submissions_->Push(entry);
  submissions_->Publish();
  return entry.tag;
}

void SimulatedRank::ReadCompletions() {
  if (!completions_.has_value()) return;
  while (completions_->Available().value_or(0) > 0) {
    const proto::CompletionEntry entry = completions_->Take();
    completions_->Publish();
    sim_.trace().Add(uint64_t{number_} << 32 | entry.tag);
    sim_.trace().Add(static_cast<uint64_t>(entry.code));
    const auto slot = std::find(slot_tags_.begin(), slot_tags_.end(), entry.tag);
    if (slot == slot_tags_.end() && unwatched_.erase(entry.tag) == 0) {
      completed_[entry.tag] = entry;
      continue;
    }
    if (slot != slot_tags_.end()) *slot = 0;
    if (entry.code != 0) {
      Fail("an operation of its ring", absl::Status(static_cast<absl::StatusCode>(entry.code),
                                                    job().ExplainFailure(*rank(), entry.tag)));
    }
  }
}

std::optional<uint64_t> SimulatedRank::Completed(uint64_t tag) {
  const auto found = completed_.find(tag);
  if (found == completed_.end()) return std::nullopt;
  const proto::CompletionEntry entry = found->second;
  completed_.erase(found);
  if (entry.code == 0) return entry.value;
  Fail("an operation of its ring",
       absl::Status(static_cast<absl::StatusCode>(entry.code), job().ExplainFailure(*rank(), tag)));
  return std::nullopt;
}

void SimulatedRank::Await(const char* what, std::function<SubmissionEntry()> entry,
                          std::function<void(uint64_t)> then) {
  Then(what, [this, entry = std::move(entry), then = std::move(then), tag = uint64_t{0}]() mutable {
    if (tag == 0) {
      tag = Submit(entry());
      return false;
    }
    const std::optional<uint64_t> value = Completed(tag);
    if (!value.has_value()) return false;
    if (then) then(*value);
    return true;
  });
}

void SimulatedRank::AwaitRefusal(const char* what, const SubmissionEntry& entry, ErrorId error) {
  Then(what, [this, what, entry, error, tag = uint64_t{0}]() mutable {
    if (tag == 0) {
      tag = Submit(entry);
      return false;
    }
    const auto found = completed_.find(tag);
    if (found == completed_.end()) return false;
    if (found->second.code == 0) sim_.Violate(absl::StrCat("rank ", number_, " ", what));
    if (found->second.error != static_cast<int32_t>(error)) return Completed(tag).has_value();
    completed_.erase(found);
    ++sim_.result().refused_puts;
    return true;
  });
}

// ---- Joining -----------------------------------------------------------------------------------

void SimulatedRank::Join() {
  Open();
  Then("joins", [this] { return Seal(); });
  Then("joins", [this] { return answer_.has_value(); });
  Then("joins", [this] {
    if (!sim_.is_new()) return true;
    if (number_ == 0) PutAll();
    Publish();
    return true;
  });
}

void SimulatedRank::Open() {
  Then("opens the job", [this, is_waiting = false]() mutable {
    if (has_opened_) return true;
    if (is_waiting && !answer_.has_value()) return false;
    is_waiting = true;
    answer_.reset();
    const Rank::Member member{.session = session(),
                              .pid = static_cast<pid_t>(1000 + number_),
                              .number = number_,
                              .end_session = [this] { sim_.Violate("a session is told to end"); }};
    job().OpenJob(member, sim_.OpenRequest(number_),
                  [this](const absl::StatusOr<proto::v1::OpenJobReply>& reply) {
                    Answered("OpenJob", reply.status());
                    has_opened_ = reply.ok() && reply->missing_ranks_size() == 0;
                    if (has_opened_) sim_.JudgeOpening(number_, *reply);
                  });
    return false;
  });
}

bool SimulatedRank::Seal() {
  auto bells = proto::Doorbell::CreatePair();
  OFFLOAD_CHECK(bells.ok()) << bells.status().ToString();
  bell_ = std::move(bells->second);
  Rank& me = *rank();
  region_ = me.region().data();
  proto::RegionHeader* const header = proto::HeaderOf(region_);
  submissions_.emplace(proto::SubmissionEntriesOf(region_), &header->submission_tail,
                       &header->submission_head);
  completions_.emplace(proto::CompletionEntriesOf(region_), &header->completion_tail,
                       &header->completion_head);
  absl::Status status = job().Map(me, std::move(bells->first));
  proto::v1::DeclareTensorsRequest request;
  for (const proto::Tensor& tensor : sim_.plan().catalogue.tensors) {
    proto::v1::Tensor* const message = request.add_tensors();
    message->set_name(tensor.name);
    message->add_shape(tensor.shape.front());
    message->set_dtype(static_cast<proto::v1::Dtype>(tensor.dtype));
    message->set_trainable(tensor.trainable);
  }
  uint64_t count = 0;
  if (status.ok()) status = job().DeclareTensors(me, {request}, &count);
  answer_.reset();
  if (!status.ok()) {
    Fail("Map", status);
    return false;
  }
  job().Seal(
      me, sim_.SealMessages(), [](uint64_t, uint64_t) {},
      [this](const absl::Status& sealed) { Answered("Seal", sealed); });
  return true;
}

void SimulatedRank::PutAll() {
  for (uint32_t tensor = 0; tensor < sim_.plan().catalogue.tensors.size(); ++tensor) {
    Then("puts", [this, tensor] {
      sim_.SetInitial(tensor);
      return true;
    });
    Put(nullptr, tensor);
  }
}

void SimulatedRank::Publish() {
  Then("publishes", [this] {
    if (number_ == 0) sim_.BeginPublish();
    answer_.reset();
    job().Publish(*rank(), sim_.FirstState(number_),
                  [this](const absl::Status& status) { Answered("Publish", status); });
    return true;
  });
  Then("publishes", [this] { return answer_.has_value(); });
}

// ---- A script ----------------------------------------------------------------------------------

void SimulatedRank::AddScript(const std::shared_ptr<StepScript>& script) {
  Random& random = sim_.random();
  const SimulatedPlan& plan = sim_.plan();
  if (script->exchanges) Exchange();
  for (const uint32_t tensor : script->differing) Differ(script, tensor);
  if (!script->puts.empty()) {
    for (const uint32_t tensor : script->puts) {
      if (number_ == 0) {
        Put(script, tensor);
      } else if (!script->followed_by_exchange) {
        Follow(script, tensor);
      }
    }
    if (script->followed_by_exchange) Exchange();
    if (script->ends_load && number_ == 0) {
      Then("ends a load", [this] {
        answer_.reset();
        sim_.BeginEndLoad();
        job().EndLoad([this](const absl::Status& status) {
          sim_.EndEndLoad(status);
          Answered("EndLoad", status);
        });
        sim_.EndLoadHasBegun();
        return true;
      });
      Then("ends a load", [this] { return answer_.has_value(); });
    }
  }
  if (!random.OneIn(3)) AddForward();
  if (plan.world_size == 1) {
    AddGradientsOfOne(script);
  } else {
    for (uint32_t round = 0; round < script->rounds.size(); ++round) AddRound(script, round);
    for (const uint32_t tensor : script->own) WriteOwn(script, tensor);
  }
  if (random.OneIn(4)) AddForward();  // an evaluation
  if (plan.holds_all && random.OneIn(4)) AddHold();
  AddStep(script);
  if (random.OneIn(6)) AddCheckpoint();
}

void SimulatedRank::AddForward() {
  Random& random = sim_.random();
  const auto count = static_cast<uint32_t>(sim_.plan().catalogue.tensors.size());
  std::vector<uint32_t> path;
  for (uint32_t tensor = 0; tensor < count; ++tensor) {
    if (!random.OneIn(4)) path.push_back(tensor);
  }
  if (random.OneIn(3)) std::shuffle(path.begin(), path.end(), random);
  if (random.OneIn(4)) {
    Then("reads ahead", [this, path] {
      const absl::Status status = job().SetSchedule(*rank(), path);
      touches_ = 0;
      if (!status.ok()) Fail("SetSchedule", status);
      return true;
    });
  }
  for (const uint32_t tensor : path) {
    if (random.OneIn(5)) {
      Then("reads ahead", [this, tensor] {
        unwatched_.insert(Submit(Entry(RingOperation::kPrefetch, tensor)));
        return true;
      });
    }
    Use(tensor);
    if (!random.OneIn(8)) continue;
    const proto::PlaneSet& planes = sim_.plan().catalogue.planes(tensor);
    Plane plane = proto::kUpdatedPlanes[random.Below(proto::kUpdatedPlanes.size())];
    if (!planes.Has(plane) || plane == Plane::kResidual)
      plane = sim_.plan().catalogue.tensors[tensor].trainable ? Plane::kMaster : Plane::kWeight;
    Get(tensor, plane);
  }
}

// As a thread does that goes on with a weight while another one steps.
void SimulatedRank::AddHold() {
  const auto tensor =
      static_cast<uint32_t>(sim_.random().Below(sim_.plan().catalogue.tensors.size()));
  Use(tensor);
  Then("keeps a pin", [this, tensor] {
    pin(tensor).fetch_add(1);
    if (proto::StateOf(tensor_word(tensor)) != proto::kResident) {
      pin(tensor).fetch_sub(1);
      return true;
    }
    held_ = tensor;
    held_values_ = sim_.share(tensor);
    held_word_ = tensor_word(tensor);
    return true;
  });
}

// Pins, looks, waits if it has to, and reads for a while.
void SimulatedRank::Use(uint32_t tensor) {
  Then("uses a weight", [this, tensor, turns = sim_.random().Below(4), tag = uint64_t{0},
                         word = uint64_t{0}, has_begun = false]() mutable {
    if (!has_begun) {
      has_begun = true;
      ++sim_.result().uses;
      pin(tensor).fetch_add(1);
      word = tensor_word(tensor);
      proto::HeaderOf(region_)->schedule_position.store(++touches_, std::memory_order_relaxed);
      if (proto::StateOf(word) != proto::kResident) {
        ++sim_.result().acquires;
        tag = Submit(Entry(RingOperation::kAcquire, tensor));
        return false;
      }
    }
    if (tag != 0) {
      const std::optional<uint64_t> value = Completed(tag);
      if (!value.has_value()) return false;
      word = *value;
      tag = 0;
    }
    CheckUse(tensor, word);
    if (turns > 0) {
      --turns;
      return false;
    }
    pin(tensor).fetch_sub(1);
    return true;
  });
}

void SimulatedRank::CheckUse(uint32_t tensor, uint64_t word) {
  const Bytes& weights = sim_.now(tensor).weights;
  if (proto::StateOf(word) == proto::kResident &&
      std::memcmp(sim_.slab() + proto::OffsetOf(word), weights.data(), weights.size()) == 0)
    return;
  sim_.Violate(absl::StrCat("rank ", number_, " has other bytes of tensor ", tensor,
                            " under its pin, its word is ", word));
}

// ---- Gradients ---------------------------------------------------------------------------------

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
      const std::string command = messages().front().SerializeAsString();
      OFFLOAD_CHECK(command.size() <= proto::kStepCommandBytes) << command.size();
      std::memcpy(region_ + proto::kStepCommandOffset, command.data(), command.size());
      SubmissionEntry entry = Entry(RingOperation::kBeginStep);
      entry.element_count = command.size();
      return entry;
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

// ---- Transfers ---------------------------------------------------------------------------------

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

// ---- The step, and the end ---------------------------------------------------------------------

std::vector<proto::v1::StepRequest> SimulatedRank::StepMessages(const StepScript& script) const {
  const SimulatedPlan& plan = sim_.plan();
  proto::v1::StepRequest message;
  message.set_step(script.step);
  for (kernels::OptimizerSpec group : plan.groups) {
    const bool differs = script.refusal == StepScript::Refusal::kRanksDiffer && number_ == 1;
    if (differs) group.Set("lr", 0.7);
    proto::v1::Optimizer* const optimizer = message.add_groups();
    optimizer->set_name(std::string(group.name()));
    for (const double value : group.values()) optimizer->add_parameters(value);
  }
  if (script.trainer_states[number_].has_value()) {
    message.set_has_trainer_state(true);
    message.set_trainer_state(*script.trainer_states[number_]);
  }
  message.set_partial(script.is_partial && !script.hides_partial);
  message.set_tensor_count(static_cast<uint32_t>(script.named[number_].size()));
  for (const uint32_t tensor : script.named[number_]) {
    message.add_tensors(tensor);
    message.add_group_of(tensor % static_cast<uint32_t>(plan.groups.size()));
    message.add_update_count(sim_.now(tensor).updates + 1);
    message.add_gradient_scale(script.gradient_scale);
    const bool is_own = script.own.count(tensor) != 0;
    const uint64_t offset_bytes = plan.own_offset[tensor];
    const uint64_t size_bytes = sim_.now(tensor).weights.size();
    message.add_own_gradient_offset(is_own ? offset_bytes : 0);
    message.add_own_gradient_crc(is_own ? Crc32c(0, region_ + offset_bytes, size_bytes) : 0);
  }
  return {message};
}

void SimulatedRank::AddStep(const std::shared_ptr<StepScript>& script) {
  Then("steps", [this, script] {
    answer_.reset();
    ++script->calls;
    job().Step(*rank(), StepMessages(*script),
               [this, script](const absl::StatusOr<uint64_t>& durable_step) {
                 const bool is_refusal = ErrorIdOf(durable_step.status()) == ErrorId::kNonFinite ||
                                         ErrorIdOf(durable_step.status()) == ErrorId::kRanksDiffer;
                 const bool is_expected = script->refusal != StepScript::Refusal::kNone;
                 if (durable_step.ok() || (is_refusal && is_expected))
                   sim_.ApplyStep(*script, durable_step);
                 Answered("Step",
                          is_refusal && is_expected ? absl::OkStatus() : durable_step.status());
               });
    return true;
  });
  Then("steps", [this] { return answer_.has_value(); });
  Then("keeps a pin", [this, turns = sim_.random().Below(30)]() mutable {
    if (!held_.has_value()) return true;
    const Bytes& weights = held_values_->weights;
    if (std::memcmp(sim_.slab() + proto::OffsetOf(held_word_), weights.data(), weights.size()) != 0)
      sim_.Violate(absl::StrCat("rank ", number_, " sees a step under the pin that it has kept"));
    if (turns > 0) {
      --turns;
      return false;
    }
    pin(*held_).fetch_sub(1);
    held_.reset();
    return true;
  });
}

void SimulatedRank::AddCheckpoint() {
  Then("asks for a checkpoint", [this] {
    const absl::StatusOr<uint64_t> step = job().Checkpoint();
    if (sim_.is_partial()) {
      if (step.ok()) sim_.Violate("a checkpoint of a partial step");
      return true;
    }
    Answered("Checkpoint", step.status());
    if (!step.ok()) return true;
    if (*step != sim_.epoch()) sim_.Violate("a checkpoint is of another step");
    ++sim_.result().checkpoints;
    return true;
  });
}

void SimulatedRank::AddEnd() {
  if (sim_.random().OneIn(2)) {
    Then("closes the job", [this] {
      answer_.reset();
      job().WaitDurable([this](const absl::StatusOr<uint64_t>& step) {
        if (sim_.is_partial()) {
          if (step.ok()) sim_.Violate("a partial step is durable");
          answer_ = absl::OkStatus();
          return;
        }
        if (step.ok()) sim_.KnowDurable(*step);
        Answered("WaitDurable", step.status());
      });
      return true;
    });
    Then("closes the job", [this] { return answer_.has_value(); });
  }
  Then("closes the job", [this] {
    answer_.reset();
    job().Close(*rank(), [this](const absl::Status& status) { Answered("Close", status); });
    return true;
  });
  Then("closes the job", [this] { return answer_.has_value(); });
  Then("closes the job", [this] {
    Leave();
    return false;
  });
}

}  // namespace offload::daemon
