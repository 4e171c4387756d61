// How a simulated rank does what its scripts say: its ring, its beginning, its steps and its end.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "offloadd/job_simulation.h"
#include "proto/daemon_rings.h"

namespace offload::daemon {
namespace {

using proto::Plane;
using proto::RingOperation;
using proto::SubmissionEntry;

// What the script is to be answered.
bool IsRefusal(const StepScript& script, const absl::Status& status) {
  const std::optional<ErrorId> error = ErrorIdOf(status);
  return script.refusal != StepScript::Refusal::kNone &&
         (error == ErrorId::kNonFinite || error == ErrorId::kRanksDiffer);
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

SubmissionEntry SimulatedRank::StepCommand(RingOperation operation,
                                           const proto::v1::StepRequest& message) {
  const std::string command = message.SerializeAsString();
  OFFLOAD_CHECK(command.size() <= proto::kStepCommandBytes) << command.size();
  std::memcpy(region_ + proto::kStepCommandOffset, command.data(), command.size());
  SubmissionEntry entry = Entry(operation);
  entry.element_count = command.size();
  return entry;
}

void SimulatedRank::ApplyStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step) {
  if (durable_step.ok() || IsRefusal(script, durable_step.status()))
    sim_.ApplyStep(script, durable_step);
}

void SimulatedRank::AnsweredStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step) {
  ApplyStep(script, durable_step);
  const absl::Status& status = durable_step.status();
  Answered("Step", IsRefusal(script, status) ? absl::OkStatus() : status);
}

// As a rank does that is awake while it waits. The step of one that dies is taken all the same.
void SimulatedRank::LookForStep() {
  if (is_gone_ || is_ending_ || called_ == nullptr) return;
  if (rank()->calls.step != nullptr && !is_heard_) {
    is_heard_ = true;
    ++called_->calls;
    rank()->calls.step = [this, script = called_, answer = std::move(rank()->calls.step)](
                             const absl::StatusOr<uint64_t>& durable_step) {
      ApplyStep(*script, durable_step);
      answer(durable_step);
    };
  }
  ReadCompletions();
  const auto found = completed_.find(step_tag_);
  if (found == completed_.end()) return;
  const proto::CompletionEntry entry = found->second;
  completed_.erase(found);
  is_heard_ = false;
  const std::shared_ptr<StepScript> script = std::exchange(called_, nullptr);
  if (entry.code == 0) return AnsweredStep(*script, entry.value);
  AnsweredStep(*script, absl::Status(static_cast<absl::StatusCode>(entry.code),
                                     job().ExplainFailure(*rank(), entry.tag)));
}

// By a call, or by its ring.
void SimulatedRank::AddStep(const std::shared_ptr<StepScript>& script) {
  const bool by_ring = sim_.random().OneIn(2);
  Then("steps", [this, script, by_ring] {
    answer_.reset();
    if (by_ring) {
      called_ = script;
      step_tag_ = Submit(StepCommand(RingOperation::kStep, StepMessages(*script).front()));
      return true;
    }
    ++script->calls;
    job().Step(*rank(), StepMessages(*script),
               [this, script](const absl::StatusOr<uint64_t>& durable_step) {
                 AnsweredStep(*script, durable_step);
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
