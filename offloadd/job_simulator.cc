// The simulator's launches, and what is found after each of them.

#include "offloadd/job_simulator.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "offloadd/job_simulation.h"
#include "proto/trainer_states.h"

namespace offload::daemon {
namespace {

constexpr uint64_t kLaunchesMax = 3;
constexpr uint64_t kTurnsMax = 400'000;  // of a launch: beyond it something waits for ever

// A run makes and drops many arrays of some megabytes, and the kernel would clear each one's pages.
void KeepFreedMemory() {
  constexpr int kBytes = 1 << 25;
  mallopt(M_MMAP_THRESHOLD, kBytes);
  mallopt(M_TRIM_THRESHOLD, kBytes);
}

}  // namespace

Simulation::Simulation(const JobSimulationOptions& options)
    : options_(options), random_(options.seed), machine_(&random_, &trace_) {
  ChooseModel();
}

void Simulation::Violate(std::string what) {
  if (!ended()) result_.violation = absl::StrCat(what, " (launch ", result_.launches, ")");
}

JobSimulationResult Simulation::Run() {
  for (uint64_t launches = 1 + random_.Below(kLaunchesMax); launches > 0 && !ended(); --launches)
    Launch();
  result_.trace_hash = trace_.hash();
  return std::move(result_);
}

// ---- A launch ----------------------------------------------------------------------------------

void Simulation::Launch() {
  run_id_ = absl::StrCat("run.", ++result_.launches);
  ChooseLaunch();
  is_new_ = !machine_.has_store();
  if (is_new_) now_.tensors.assign(tensors_.size(), nullptr);
  trainer_states_ = proto::DecodeTrainerStates(now_.blob);
  trainer_states_.resize(plan_.world_size);
  sums_.assign(tensors_.size(), {});
  scripts_.clear();
  turns_ = 0;
  has_mistaken_ = false;
  has_met_fate_ = is_dead_ = may_fail_ = drive_failed_ = has_unsettled_puts_ = is_loading_ = false;
  is_partial_ = false;
  fate_ = static_cast<Fate>(random_.OneIn(3) ? 0 : random_.Below(5));
  fate_turn_ = random_.Below(800 * (1 + steps_left_));
  uint64_t fault_turn = random_.OneIn(10) ? 1 + random_.Below(3000) : 0;
  if (favours_replans_ && !random_.OneIn(4)) fate_ = Fate::kCloses;
  // Who looks for a mistake must not take it for what a fault or a death leaves.
  if (options_.mistake != PlantedMistake::kNone) fate_ = Fate::kCloses, fault_turn = 0;
  auto job = Job::Create({.name = "job", .pool = "memory", .store = "job"}, machine_);
  OFFLOAD_CHECK(job.ok()) << job.status().ToString();
  job_ = *std::move(job);
  for (uint32_t rank = 0; rank < plan_.world_size; ++rank)
    ranks_.push_back(std::make_unique<SimulatedRank>(this, rank));
  while (!IsOver() && !ended()) {
    Turn();
    if (options_.mistake != PlantedMistake::kNone && !has_mistaken_) PlantMistake();
    if (turns_ >= fate_turn_ && !has_met_fate_ && IsFateful()) MeetFate();
    if (turns_ == fault_turn) AddFault();
    if (turns_ > kTurnsMax) SayWhoWaits();
  }
  EndLaunch();
}

bool Simulation::IsOver() const { return AllAreGone() && job_->phase() == JobPhase::kDrained; }

bool Simulation::AllAreGone() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const auto& rank) { return rank->is_gone(); });
}

void Simulation::SayWhoWaits() {
  std::string text =
      absl::StrCat("somebody waits for ever; the job is ", std::string(NameOf(job_->phase())));
  for (const auto& rank : ranks_) absl::StrAppend(&text, ", ", rank->Describe());
  Violate(std::move(text));
}

void Simulation::Turn() {
  ++turns_;
  ++result_.turns;
  // As the last session does that lets go of a job, also one whose ranks it has never seen.
  if (AllAreGone() && !IsClosing(job_->phase())) job_->Shutdown([] {});
  switch (random_.Below(8)) {
    case 0:
    case 1:
    case 2:
      job_->loop().RunOnce();
      for (const auto& rank : ranks_) rank->LookForStep();
      return;
    case 3:
    case 4:
      machine_.RunOne();
      return;
    case 5:
      AdvanceClock();
      if (random_.OneIn(60)) ChangeSnapshots();
      return;
    default:
      return ActSome();
  }
}

// Quickly while ranks join, whose patience is long: more so when one will never come.
void Simulation::AdvanceClock() {
  const bool is_opening = job_->phase() == JobPhase::kOpening;
  const double seconds_max = !is_opening ? 0.002 : may_fail_ ? 10 : 0.5;
  machine_.fake_clock().AdvanceSeconds(random_.Unit() * seconds_max);
}

void Simulation::ActSome() {
  SimulatedRank& rank = *ranks_[random_.Below(ranks_.size())];
  if (!random_.OneIn(slowness_[rank.number()])) return;
  for (uint64_t acts = 1 + random_.Below(8); acts > 0 && rank.Act(); --acts) continue;
}

// Half of the ranks that are lost are lost while all have called for a step.
bool Simulation::IsFateful() const {
  if (fate_ != Fate::kLosesRank || fate_turn_ % 2 == 0) return true;
  return !scripts_.empty() && CalledByAll(*scripts_.back());
}

bool Simulation::CalledByAll(const StepScript& script) const {
  return script.calls == plan_.world_size && !script.is_done;
}

void Simulation::MeetFate() {
  has_met_fate_ = true;
  if (fate_ == Fate::kCloses) return;
  if (IsOver()) return;
  may_fail_ = true;
  if (!scripts_.empty() && CalledByAll(*scripts_.back())) called_by_all_ = scripts_.back();
  if (fate_ == Fate::kLosesRank) {
    ++result_.deaths;
    return ranks_[random_.Below(ranks_.size())]->Die();
  }
  if (fate_ == Fate::kKilled || fate_ == Fate::kPowerCut) {
    is_dead_ = true;
    ++(fate_ == Fate::kKilled ? result_.kills : result_.power_cuts);
    if (machine_.drive() != nullptr) {
      machine_.drive()->PowerCut(fate_ == Fate::kKilled ? aio::FaultyDevice::Survivors::kAll
                                                        : aio::FaultyDevice::Survivors::kRandom);
    }
  }
  for (const auto& rank : ranks_) rank->Die();
}

void Simulation::AddFault() {
  using aio::FaultKind;
  static constexpr FaultKind kKinds[] = {FaultKind::kReadError, FaultKind::kWriteError,
                                         FaultKind::kFlushError, FaultKind::kBitFlip};
  if (machine_.drive() == nullptr || is_dead_) return;
  may_fail_ = drive_failed_ = true;
  ++result_.drive_faults;
  const FaultKind kind = kKinds[random_.Below(std::size(kKinds))];
  machine_.drive()->AddFault(
      {kind, 1 + random_.Below(8), kind != FaultKind::kBitFlip && random_.OneIn(2)});
}

void Simulation::EndLaunch() {
  if (ended()) {
    // Whatever is under way must end before what it works on may go.
    if (machine_.drive() != nullptr) machine_.drive()->PowerCut();
    for (const auto& rank : ranks_) rank->Die();
    for (uint64_t turn = 0; turn < kTurnsMax && !IsOver(); ++turn) {
      Turn();
    }
    OFFLOAD_CHECK(IsOver()) << "seed " << options_.seed << ": " << result_.violation;
  }
  while (machine_.RunOne()) continue;
  result_.puts_dropped += has_unsettled_puts_;
  result_.partial_dropped += is_partial_;
  proto::v1::JobStatus status;
  job_->FillStatus(&status);
  result_.replans += status.plan().replans();
  result_.used_ahead += status.updates_ahead().used();
  result_.lost_ahead += status.updates_ahead().lost();
  if (UpdateExecutor* const executor = job_->executor(); executor != nullptr) {
    result_.places_taken += executor->exchange().taken();
    result_.places_given += executor->exchange().given();
    if (const std::string wrong = executor->AuditPlaces(); !wrong.empty()) Violate(wrong);
  }
  job_.reset();
  ranks_.clear();
  changing_snapshots_ = false;
  const bool is_taken = called_by_all_ == nullptr || called_by_all_->is_done;
  if (!is_taken && !is_dead_ && !drive_failed_)
    Violate("a step that all ranks had called for is not taken");
  called_by_all_ = nullptr;
  if (!ended()) Judge();
}

// ---- The model ---------------------------------------------------------------------------------

void Simulation::SetInitial(uint32_t tensor) {
  const proto::Tensor& declared = tensors_[tensor];
  std::shared_ptr<const TensorValues>& values = now_.tensors[tensor];
  values = PutWeights(plan_.catalogue, tensor,
                      MakeValues(declared.dtype, declared.element_count, tensor + 1), nullptr);
  for (size_t i = 0; BeginsWithStates(tensor) && i < proto::kStatePlanes.size(); ++i) {
    if (plan_.catalogue.planes(tensor).Has(proto::kStatePlanes[i]))
      values = PutState(*values, i, StateValues(tensor, uint64_t{tensor} << 8 | i));
  }
}

std::string Simulation::FirstState(uint32_t rank) const {
  return absl::StrCat("rank ", rank, " of ", run_id_);
}

void Simulation::BeginPublish() {
  for (uint32_t rank = 0; rank < plan_.world_size; ++rank) trainer_states_[rank] = FirstState(rank);
  now_.epoch = 0;
  now_.blob = proto::EncodeTrainerStates(trainer_states_);
  versions_ = {{now_}};
  durable_ = 0;
}

void Simulation::JudgeOpening(uint32_t rank, const proto::v1::OpenJobReply& reply) {
  if (reply.exists() == is_new_) return Violate("a job exists, or does not");
  if (is_new_) return;
  const proto::ResumedState state = proto::StateOfRank(proto::DecodeTrainerStates(now_.blob), rank);
  if (reply.step() != now_.epoch || reply.trainer_state() != state.state ||
      reply.trainer_state_is_own() != state.is_own) {
    Violate(absl::StrCat("rank ", rank, " is told to go on at step ", reply.step(),
                         ", or with another state"));
  }
}

uint64_t Simulation::Key(const StepScript& script, uint64_t what, uint64_t a, uint64_t b,
                         uint64_t c) const {
  uint64_t key = options_.seed;
  for (const uint64_t number : {script.id, what, a, b, c}) key = SplitMix64(key) ^ number;
  return key;
}

Bytes Simulation::PartValues(const StepScript& script, uint32_t round, uint32_t pass, uint32_t rank,
                             uint32_t tensor) const {
  const proto::Tensor& declared = tensors_[tensor];
  Bytes values = MakeValues(declared.dtype, declared.element_count,
                            Key(script, /*what=*/1, round, uint64_t{pass} << 32 | rank, tensor));
  const bool is_bad = script.refusal == StepScript::Refusal::kNotFinite &&
                      tensor == *script.given.begin() &&
                      script.rounds[round].beginning == script.rounds.back().beginning;
  // The upper half of an infinity, of either dtype.
  const uint16_t infinity = 0x7f80;
  if (is_bad)
    std::memcpy(values.data() + proto::DtypeBytes(declared.dtype) - 2, &infinity, sizeof(infinity));
  return values;
}

const Bytes& Simulation::Sum(StepScript& script, uint32_t last, uint32_t tensor) {
  const auto [entry, is_new] = script.sums.try_emplace({last, tensor});
  if (!is_new) return entry->second;
  const uint32_t beginning = script.rounds[last].beginning;
  std::vector<GradientPart> parts;
  for (uint32_t i = 0; i <= last; ++i) {
    const StepScript::Round& round = script.rounds[i];
    if (round.beginning != beginning) continue;
    for (uint32_t rank = 0; rank < plan_.world_size; ++rank) {
      for (uint32_t pass = 0; pass < round.given[rank].size(); ++pass) {
        const std::vector<uint32_t>& given = round.given[rank][pass];
        if (std::find(given.begin(), given.end(), tensor) == given.end()) continue;
        parts.push_back({i, round.first_pass + pass, rank, script.starts[beginning][tensor],
                         PartValues(script, i, pass, rank, tensor)});
      }
    }
  }
  if (parts.empty()) return entry->second;
  std::vector<const GradientPart*> pointers;
  for (const GradientPart& part : parts) pointers.push_back(&part);
  entry->second = SumParts(tensors_[tensor].dtype, std::move(pointers), plan_.factor(),
                           beginning == 0 ? sums_[tensor] : Bytes());
  return entry->second;
}

Bytes Simulation::PutValues(const StepScript& script, uint32_t tensor) const {
  return MakeValues(tensors_[tensor].dtype, tensors_[tensor].element_count,
                    Key(script, /*what=*/3, tensor));
}

// Not negative, since some optimizers take their roots.
Bytes Simulation::StateValues(uint32_t tensor, uint64_t key) const {
  Bytes values = MakeValues(proto::Dtype::kFloat32, tensors_[tensor].element_count, key);
  auto* const floats = reinterpret_cast<float*>(values.data());
  std::transform(floats, floats + tensors_[tensor].element_count, floats,
                 [](float value) { return std::fabs(value); });
  return values;
}

// Every fifth is right between two bf16.
Bytes Simulation::PutMasterValues(const StepScript& script, uint32_t tensor) const {
  Bytes values = MakeValues(proto::Dtype::kFloat32, tensors_[tensor].element_count,
                            Key(script, /*what=*/5, tensor));
  auto* const bits = reinterpret_cast<uint32_t*>(values.data());
  for (uint64_t i = 0; i < tensors_[tensor].element_count; i += 5)
    bits[i] = (bits[i] & 0xffff0000) | 0x8000;
  return values;
}

Bytes Simulation::PutStateValues(const StepScript& script, uint32_t tensor, size_t state) const {
  return StateValues(tensor, Key(script, /*what=*/4, tensor, state));
}

void Simulation::ApplyPut(StepScript& script, uint32_t tensor) {
  if (!script.puts_done.insert(tensor).second) return;
  now_.tensors[tensor] = script.puts_masters.contains(tensor)
                             ? PutMasters(*now_.tensors[tensor], PutMasterValues(script, tensor))
                             : PutWeights(plan_.catalogue, tensor, PutValues(script, tensor),
                                          now_.tensors[tensor].get());
  for (size_t i = 0; script.puts_states.contains(tensor) && i < proto::kStatePlanes.size(); ++i) {
    if (plan_.catalogue.planes(tensor).Has(proto::kStatePlanes[i]))
      now_.tensors[tensor] = PutState(*now_.tensors[tensor], i, PutStateValues(script, tensor, i));
  }
  has_unsettled_puts_ = true;
}

void Simulation::BeginEndLoad() {
  was_partial_ = is_partial_;
  had_unsettled_puts_ = has_unsettled_puts_;
  is_loading_ = has_unsettled_puts_ || is_partial_;
  is_load_begun_ = false;
  if (!is_loading_) return;
  has_unsettled_puts_ = is_partial_ = false;
  versions_.push_back({now_, /*is_load=*/true});
}

void Simulation::EndEndLoad(const absl::Status& status) {
  if (!is_loading_) return;
  is_loading_ = false;
  if (!status.ok() && !is_load_begun_) {  // refused: nothing has changed
    versions_.pop_back();
    has_unsettled_puts_ = had_unsettled_puts_;
    is_partial_ = was_partial_;
  }
  if (!status.ok()) return;
  result_.partial_loads += was_partial_;
  durable_ = versions_.size() - 1;
  ++result_.loads;
}

void Simulation::KnowDurable(uint64_t step) {
  for (size_t i = durable_ + 1; i < versions_.size(); ++i) {
    const Version& version = versions_[i];
    if (!version.is_load && !version.is_partial && version.state.epoch <= step) durable_ = i;
  }
}

void Simulation::ApplyStep(StepScript& script, const absl::StatusOr<uint64_t>& durable_step) {
  if (script.is_done) return;
  script.is_done = true;
  trace_.Add(durable_step.ok() ? *durable_step : UINT64_MAX);
  for (uint32_t round = 0; round < script.rounds.size(); ++round) {
    const bool is_last = round + 1 == script.rounds.size() ||
                         script.rounds[round + 1].beginning != script.rounds[round].beginning;
    for (uint32_t tensor = 0; is_last && tensor < tensors_.size(); ++tensor) {
      const Bytes& sum = Sum(script, round, tensor);
      if (!sum.empty()) sums_[tensor] = sum;
    }
  }
  if (durable_step.ok() != (script.refusal == StepScript::Refusal::kNone))
    return Violate(absl::StrCat("step ", script.step, ": ", durable_step.status().ToString()));
  if (!durable_step.ok()) {
    ++result_.refused_steps;
    return;
  }
  for (const uint32_t tensor : script.given) {
    const bool is_own = script.own.count(tensor) != 0;
    const Bytes gradient = is_own
                               ? MakeValues(tensors_[tensor].dtype, tensors_[tensor].element_count,
                                            Key(script, /*what=*/2, tensor))
                               : sums_[tensor];
    now_.tensors[tensor] =
        UpdateValues(plan_.catalogue, tensor, *now_.tensors[tensor],
                     plan_.groups[tensor % plan_.groups.size()], gradient, script.gradient_scale);
  }
  bool has_states = false;
  for (uint32_t rank = 0; rank < plan_.world_size; ++rank) {
    if (!script.trainer_states[rank].has_value()) continue;
    trainer_states_[rank] = *script.trainer_states[rank];
    has_states = true;
  }
  if (has_states) now_.blob = proto::EncodeTrainerStates(trainer_states_);
  now_.epoch = script.step;
  has_unsettled_puts_ = false;
  is_partial_ = script.is_partial;
  versions_.push_back({now_, /*is_load=*/false, is_partial_});
  KnowDurable(*durable_step);
  ++result_.steps;
  result_.partial_steps += is_partial_;
  result_.steps_beside_checkpoints +=
      plan_.interval > 1 && *durable_step < (script.step - 1) / plan_.interval * plan_.interval;
}

// ---- Snapshots ---------------------------------------------------------------------------------

void Simulation::ChangeSnapshots() {
  if (job_->phase() != JobPhase::kTraining || is_dead_ || changing_snapshots_) return;
  changing_snapshots_ = true;
  if (!snapshots_.empty() && random_.OneIn(3)) {
    const std::string name = snapshots_.begin()->first;
    snapshots_.begin()->second.is_sure = false;
    return job_->DeleteSnapshot(name, [this, name](const absl::StatusOr<uint64_t>& step) {
      changing_snapshots_ = false;
      if (step.ok()) snapshots_.erase(name);
    });
  }
  const std::string name = absl::StrCat("snapshot.", ++snapshots_named_);
  snapshots_[name];
  const bool may_grow = snapshots_.size() <= SimulatedMachine::kGenerationsMax;
  job_->CreateSnapshot(
      name, may_grow, [](uint64_t, uint64_t) {},
      [this, name](const absl::StatusOr<uint64_t>& step) {
        changing_snapshots_ = false;
        Snapshot& snapshot = snapshots_[name];
        const bool is_refused = ErrorIdOf(step.status()) == ErrorId::kSnapshot ||
                                ErrorIdOf(step.status()) == ErrorId::kSessionEnded ||
                                ErrorIdOf(step.status()) == ErrorId::kRankLost;
        if (!step.ok() && !is_refused && !may_fail_) Violate(step.status().ToString());
        // A failed drive leaves open whether it is there.
        if (!step.ok() && !may_fail_) {
          snapshots_.erase(name);
          return;
        }
        snapshot.candidates = StatesThatMayBeFound();
        snapshot.is_sure = step.ok();
        result_.snapshots += step.ok();
      });
}

void Simulation::JudgeSnapshots(swap::Store& store) {
  std::set<std::string> found;
  for (const swap::SnapshotInfo& info : store.snapshots()) {
    found.insert(info.name);
    const auto known = snapshots_.find(info.name);
    if (known == snapshots_.end()) return Violate(absl::StrCat("an unknown ", info.name));
    auto held = machine_.OpenToRead(info.name);
    if (!held.ok()) return Violate(held.status().ToString());
    std::vector<JobState> matching;
    std::string difference = "it can hold nothing";
    for (const JobState& candidate : known->second.candidates) {
      difference = CompareWithStore(plan_.catalogue, candidate, **held);
      if (!difference.empty()) continue;
      matching = {candidate};
      break;
    }
    if (matching.empty()) return Violate(absl::StrCat(info.name, ": ", difference));
    known->second = {std::move(matching), /*is_sure=*/true};
    ++result_.snapshots_read;
  }
  for (const auto& [name, snapshot] : snapshots_) {
    if (snapshot.is_sure && found.count(name) == 0) return Violate(absl::StrCat(name, " is gone"));
  }
  std::erase_if(snapshots_, [&](const auto& entry) { return found.count(entry.first) == 0; });
}

// ---- After a launch ----------------------------------------------------------------------------

std::vector<JobState> Simulation::StatesThatMayBeFound() const {
  std::vector<JobState> states;
  for (size_t i = durable_; i < versions_.size(); ++i) {
    if (!versions_[i].is_partial) states.push_back(versions_[i].state);
  }
  return states;
}

// Of a launch that has ended with partial steps it is the last checkpoint before them.
size_t Simulation::OldestThatMayBeFound() const {
  if (is_dead_ || drive_failed_) return durable_;
  if (!is_partial_) return versions_.size() - 1;
  size_t oldest = durable_;
  for (size_t i = durable_; i < versions_.size(); ++i) {
    const Version& version = versions_[i];
    if (!version.is_partial && !version.is_load && version.state.epoch % plan_.interval == 0)
      oldest = i;
  }
  return oldest;
}

void Simulation::Judge() {
  machine_.DropUnnamedStore();
  if (!machine_.has_store()) {
    now_ = {};
    versions_.clear();
    return;
  }
  // What was under way when it ended may be there.
  for (auto& [name, snapshot] : snapshots_) {
    if (!snapshot.candidates.empty()) continue;
    snapshot.candidates = StatesThatMayBeFound();
  }
  machine_.drive()->ClearFaults();
  if (machine_.drive()->is_cut()) machine_.drive()->RestorePower();
  auto store = machine_.OpenToRead();
  if (!store.ok()) return Violate(store.status().ToString());
  const size_t oldest = OldestThatMayBeFound();
  std::string difference;
  size_t found = versions_.size();
  while (found > oldest) {
    const std::string other =
        versions_[found - 1].is_partial
            ? "the last step is partial"
            : CompareWithStore(plan_.catalogue, versions_[found - 1].state, **store);
    if (other.empty()) break;
    absl::StrAppend(&difference, difference.empty() ? "" : "; ", other);
    --found;
  }
  if (found == oldest) {
    return Violate(absl::StrCat("found is none of the ", versions_.size() - oldest,
                                " states that may be there: ", difference));
  }
  result_.newer_states_found += found - 1 > durable_;
  trace_.Add(found);
  now_ = versions_[found - 1].state;
  versions_ = {{now_}};
  durable_ = 0;
  JudgeSnapshots(**store);
}

// ---- Results -----------------------------------------------------------------------------------

void JobSimulationResult::Add(const JobSimulationResult& other) {
  launches += other.launches;
  turns += other.turns;
  steps += other.steps;
  refused_steps += other.refused_steps;
  uses += other.uses;
  acquires += other.acquires;
  parts += other.parts;
  looks += other.looks;
  rounds_anew += other.rounds_anew;
  spilled_looks += other.spilled_looks;
  own_gradients += other.own_gradients;
  puts += other.puts;
  refused_puts += other.refused_puts;
  state_puts += other.state_puts;
  master_puts += other.master_puts;
  loads += other.loads;
  gets += other.gets;
  exchanges += other.exchanges;
  checkpoints += other.checkpoints;
  steps_beside_checkpoints += other.steps_beside_checkpoints;
  partial_steps += other.partial_steps;
  partial_dropped += other.partial_dropped;
  partial_loads += other.partial_loads;
  snapshots += other.snapshots;
  snapshots_read += other.snapshots_read;
  deaths += other.deaths;
  kills += other.kills;
  power_cuts += other.power_cuts;
  drive_faults += other.drive_faults;
  replans += other.replans;
  places_taken += other.places_taken;
  places_given += other.places_given;
  mistakes += other.mistakes;
  used_ahead += other.used_ahead;
  lost_ahead += other.lost_ahead;
  newer_states_found += other.newer_states_found;
  puts_dropped += other.puts_dropped;
}

JobSimulationResult SimulateJob(const JobSimulationOptions& options) {
  static const bool is_kept = (KeepFreedMemory(), true);
  return is_kept ? Simulation(options).Run() : JobSimulationResult();
}

}  // namespace offload::daemon
