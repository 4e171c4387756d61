// tests/spine_fixture.h
//
// A trainer's job at the real daemon beside the same one in memory: it takes steps over any kind of
// plan and compares, plane by plane and bit by bit, with the kernels run over fp32 (fp64) masters.
//
// Thread safety: one thread.
#pragma once

#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/averaging.h"
#include "base/crc32c.h"
#include "client/session.h"
#include "gtest/gtest.h"
#include "kernels/sum.h"
#include "kernels/update.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "proto/step_words.h"

namespace offload {

using kernels::OptimizerSpec;
using proto::Dtype;

constexpr uint64_t kRamBytes = 128ull << 20;

// The bf16 that a trainer casts to: nearest, ties to even. Finite values only.
inline uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float FromBFloat16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

inline const OptimizerSpec kAdamW("adamw", {{"beta2", 0.95}, {"weight_decay", 0.1}});
inline const OptimizerSpec kPlainSgd("sgd", {{"weight_decay", 0.01}});
inline const OptimizerSpec kMomentum("sgd", {{"momentum", 0.9}, {"weight_decay", 0.01}});

inline const OptimizerSpec kLamb("lamb", {{"weight_decay", 0.1}});
inline const OptimizerSpec kHalfSteps("sgd", {});

// A step that has no room in the region: it goes by a call, and the rank writes nothing to its
// ring.
inline client::StepCommand StepByCall(uint64_t step) {
  return {.step = step,
          .has_trainer_state = true,
          .trainer_state = std::string(proto::kStepCommandBytes, 's')};
}

struct Variant {
  Dtype dtype = Dtype::kFloat32;
  OptimizerSpec optimizer = kAdamW;
  uint32_t pipeline_blocks = 2;
  uint32_t state_resident = 0;  // leading extents of every tensor
  bool weights_resident = false;
  bool spill = false;  // gradients of big tensors
  bool schedule = true;
  std::string io_engine = "auto";
  std::string durability = "step";
  uint32_t generations = 0;
  // Of several ranks: every one has the whole gradient, as if the trainer had reduced it.
  client::World world;
  // Or every one has its own, in two backward passes, and the daemon adds them up.
  bool sums = false;
  // With kHalfSteps: gradients of half the distance between two bf16, so that the masters of every
  // other step are right between them.
  bool half_steps = false;
  // Tensors that a new job has with what an optimizer kept of them before.
  std::vector<uint32_t> begins_with_states = {};
};

struct TensorShape {
  const char* name;
  std::vector<int64_t> shape;
  bool trainable;
};
// Two extents with a tail, odd lengths, bundled ones, frozen ones.
inline const TensorShape kShapes[] = {
    {"embedding", {300, 1001}, true}, {"norm.weight", {333}, true}, {"attention", {256, 390}, true},
    {"norm.bias", {5}, true},         {"frozen", {35000}, false},   {"mlp", {70001}, true},
    {"frozen.bias", {77}, false},     {"head", {3, 16384}, true},   {"scale", {32768}, true},
};

// A tensor as a trainer in memory has it: master and state, which are fp32 numbers but for fp64.
struct Reference {
  std::vector<double> master;
  std::array<std::vector<double>, kernels::kStatePlanesMax> state;
  std::vector<double> average;  // where one is kept
  uint64_t update_count = 0;
};
using References = std::vector<Reference>;

class Job {
 public:
  Job(std::string pool, std::string name, Variant variant)
      : pool_(std::move(pool)), name_(std::move(name)), variant_(std::move(variant)) {
    std::vector<proto::Tensor> tensors;
    for (const TensorShape& shape : kShapes) {
      tensors.push_back({.name = shape.name,
                         .shape = shape.shape,
                         .dtype = variant_.dtype,
                         .trainable = shape.trainable});
    }
    catalogue_ = *proto::BuildCatalogue(std::move(tensors), variant_.optimizer);
    connect_.world = variant_.world;
    MakePlan();
  }

  // Connects, opens, and for a new job puts the initial weights.
  absl::Status TryOpen() {
    auto session = client::Session::Connect(connect_);
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    auto info = session_->OpenJob(Options());
    if (!info.ok()) return info.status();
    info_ = *info;
    absl::Status status = session_->DeclareTensors(catalogue_.tensors);
    to_format_.clear();
    if (status.ok()) {
      status = session_->Seal(variant_.optimizer, plan_, pins_offset_,
                              [this](uint64_t, uint64_t total) { to_format_.push_back(total); });
    }
    if (status.ok())
      status = session_->CountUses(proto::UseTimesOffset(pins_offset_, catalogue_.tensors.size()));
    step_ = info_.step;
    if (!status.ok() || info_.exists) return status;
    references_ = InitialWeights();
    for (const uint32_t tensor : variant_.begins_with_states) SetStates(tensor, /*update_count=*/7);
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size() && status.ok(); ++tensor) {
      if (rank() == 0) status = TryPut(tensor);
    }
    for (const uint32_t tensor : variant_.begins_with_states) status.Update(TryPutStates(tensor));
    if (status.ok()) status = session_->Publish(StateOfRank("begin"));
    history_ = {references_};
    return status;
  }
  void Open() {
    const absl::Status opened = TryOpen();
    ASSERT_TRUE(opened.ok()) << opened;
  }

  client::JobOptions Options() const {
    return {.job = name_,
            .pool = pool_,
            .ram_bytes = kRamBytes,
            .io_engine = variant_.io_engine,
            .durability = variant_.durability,
            .generations = variant_.generations,
            .world = variant_.world,
            .gradients_reduced = variant_.world.world_size > 1 && !variant_.sums};
  }

  // Takes the working bytes of a tensor from its reference.
  absl::Status TryPut(uint32_t tensor) {
    return TryPutPlane(tensor, proto::Plane::kWeight, WorkingBytes(tensor));
  }
  absl::Status TryPutPlane(uint32_t tensor, proto::Plane plane,
                           const std::vector<std::byte>& bytes) {
    const uint64_t element_bytes = bytes.size() / count(tensor);
    for (uint64_t begin = 0; begin < count(tensor); begin += proto::kExtentElements) {
      const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count(tensor) - begin);
      std::memcpy(session_->region() + staging_offset_, bytes.data() + begin * element_bytes,
                  elements * element_bytes);
      const absl::Status status =
          session_->Wait(session_->PutPlane(tensor, plane, begin, elements, staging_offset_));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  // Of a bf16 tensor.
  absl::Status TryPutMaster(uint32_t tensor) {
    return TryPutPlane(tensor, proto::Plane::kMaster, BytesOf(references_[tensor].master));
  }
  // What the optimizer keeps of a tensor, from its reference.
  absl::Status TryPutStates(uint32_t tensor) {
    absl::Status status;
    for (size_t i = 0; i < proto::kStatePlanes.size() && status.ok(); ++i) {
      if (catalogue_.planes(tensor).Has(proto::kStatePlanes[i]))
        status = TryPutPlane(tensor, proto::kStatePlanes[i], BytesOf(references_[tensor].state[i]));
    }
    return status;
  }
  void Put(uint32_t tensor) {
    const absl::Status put = TryPut(tensor);
    ASSERT_TRUE(put.ok()) << put;
  }

  // One step with random gradients; the reference takes it, too. `skipped` tensors have none.
  void Step(const std::vector<uint32_t>& skipped = {}) {
    client::StepCommand command;
    ASSERT_TRUE(MakeStep(skipped, true, &command).ok());
    const absl::Status status = session_->Step(command);
    ASSERT_TRUE(status.ok()) << status;
    history_.push_back(references_);
  }
  // The same, with gradients that depend on nothing but the number of the step.
  absl::Status NumberedStep() {
    client::StepCommand command;
    SeedByStep();
    const absl::Status handed_over = MakeStep({}, true, &command);
    return handed_over.ok() ? session_->Step(command) : handed_over;
  }
  // The same, announced before it is called for, and called for when the daemon has done what it
  // can ahead; until then everything is as before. `changes`: what is announced are other
  // gradients.
  absl::Status AnnouncedStep(bool changes = false) {
    const References before = references_;
    client::StepCommand command;
    SeedByStep();
    absl::Status status = MakeStep({}, /*hands_over=*/true, &command);
    const References after = std::exchange(references_, before);
    if (changes) ComplementGradients();
    if (status.ok()) status = session_->BeginStep(command);
    if (status.ok()) status = ReleaseGradients(command);
    if (!status.ok()) return status;
    Forward();
    ExpectEqual();
    if (changes) ComplementGradients();
    references_ = after;
    return session_->Step(command);
  }
  // Takes numbered steps of a new job in memory only, as far as `step`.
  void SkipTo(uint64_t step) {
    if (references_.empty()) references_ = InitialWeights();
    while (step_ < step) {
      client::StepCommand command;
      SeedByStep();
      ASSERT_TRUE(MakeStep({}, false, &command).ok());
    }
    history_ = {references_};
  }

  // Touches every tensor in the order of a forward and checks its bytes.
  void Forward() {
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      session_->SetSchedulePosition(tensor);
      if (tensor + 1 < catalogue_.tensors.size()) session_->Prefetch(tensor + 1);
      auto bytes = session_->Acquire(tensor);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      const std::vector<std::byte> expected = WorkingBytes(tensor);
      EXPECT_EQ(std::memcmp(*bytes, expected.data(), expected.size()), 0)
          << catalogue_.tensors[tensor].name;
      session_->Release(tensor);
    }
    session_->SetSchedulePosition(0);
  }

  void SetSchedule() {
    std::vector<uint32_t> touches;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor)
      touches.push_back(tensor);
    for (uint32_t tensor = catalogue_.tensors.size(); tensor > 0; --tensor)
      touches.push_back(tensor - 1);
    ASSERT_TRUE(session_->SetSchedule(touches).ok());
  }

  // Compares every plane of every tensor.
  void ExpectEqual() {
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      SCOPED_TRACE(catalogue_.tensors[tensor].name);
      ExpectPlane(tensor, proto::Plane::kWeight, WorkingBytes(tensor));
      if (!catalogue_.tensors[tensor].trainable) continue;
      ExpectPlane(tensor, proto::Plane::kMaster, BytesOf(references_[tensor].master));
      for (size_t i = 0; i < proto::kStatePlanes.size(); ++i) {
        if (variant_.optimizer.Plane(i) == nullptr) continue;
        ExpectPlane(tensor, proto::kStatePlanes[i], BytesOf(references_[tensor].state[i]));
      }
      if (catalogue_.planes(tensor).Has(proto::Plane::kAverage))
        ExpectPlane(tensor, proto::Plane::kAverage, BytesOf(AverageOf(tensor)));
    }
  }

  // Zeros before the first update.
  std::vector<double> AverageOf(uint32_t tensor) const {
    std::vector<double> average = references_[tensor].average;
    average.resize(count(tensor));
    return average;
  }

  void Close() {
    const absl::Status status = session_->CloseJob();
    EXPECT_TRUE(status.ok()) << status;
    session_.reset();
  }

  // Connects to the daemon of OFFLOADD_SOCKET instead of a private one.
  void UseNodeDaemon() { connect_ = {.allow_private = false, .world = variant_.world}; }

  // Ends the session without closing the job.
  void Leave() { session_.reset(); }

  absl::Status SealOn(client::Session& session) {
    return session.Seal(variant_.optimizer, plan_, pins_offset_, nullptr);
  }

  void KillDaemon() {
    ASSERT_EQ(kill(session_->daemon_pid(), SIGKILL), 0);
    session_.reset();
  }

  // After a resume: the state in memory is the one of that step.
  void ReturnToStep(uint64_t step) {
    ASSERT_LT(step, history_.size());
    step_ = step;
    history_.resize(step + 1);
    references_ = history_.back();
  }

  // Knows what the other one knows: for a job that was made of it.
  void Follow(const Job& other) {
    history_ = other.history_;
    references_ = other.references_;
  }

  // What a Put() then takes; part of the history with the next step, or at the end of a load.
  void ChangeWeights(uint32_t tensor, float by) {
    for (double& value : references_[tensor].master) value = Rounded(value + by);
  }
  // As another trainer has left them, after so many updates: what TryPutStates() then takes.
  void SetStates(uint32_t tensor, uint64_t update_count) {
    references_[tensor].update_count = update_count;
    for (std::vector<double>& plane : references_[tensor].state) {
      for (double& value : plane) value = std::fabs(normal_(random_));
    }
  }
  // Masters that a trainer may have, every third right between two bf16.
  void SetMasters(uint32_t tensor) {
    std::vector<double>& master = references_[tensor].master;
    for (size_t i = 0; i < master.size(); ++i) {
      auto bits = std::bit_cast<uint32_t>(normal_(random_));
      if (i % 3 == 0) bits = (bits & 0xffff0000) | 0x8000;
      master[i] = std::bit_cast<float>(bits);
    }
  }
  void SetWeights(uint32_t tensor, std::vector<float> values) {
    references_[tensor].master.assign(values.begin(), values.end());
  }
  void EndLoad() {
    const absl::Status status = session_->EndLoad();
    ASSERT_TRUE(status.ok()) << status;
    history_.back() = references_;
  }

  uint32_t rank() const { return variant_.world.rank; }
  // What the trainer keeps: of every rank its own.
  std::string StateOfRank(const std::string& state) const {
    return variant_.world.world_size == 1 ? state : absl::StrCat(state, " in rank ", rank());
  }
  client::Session& session() { return *session_; }
  const client::JobInfo& info() const { return info_; }
  // Bytes of the store that is made, as often as Open() was told of its progress.
  const std::vector<uint64_t>& to_format() const { return to_format_; }
  uint64_t step() const { return step_; }
  const proto::Catalogue& catalogue() const { return catalogue_; }
  const proto::MemoryPlan& plan() const { return plan_; }
  uint64_t pins_offset() const { return pins_offset_; }

 private:
  uint64_t count(uint32_t tensor) const { return catalogue_.tensors[tensor].element_count; }

  void MakePlan() {
    plan_.pipeline_blocks = variant_.pipeline_blocks;
    plan_.pipeline_gradients = variant_.spill;
    uint64_t largest_slot = 0;
    for (const proto::StoreTensor& tensor : catalogue_.store_tensors) {
      plan_.weight_resident.push_back(tensor.bundle || variant_.weights_resident);
      const uint32_t extents = proto::ExtentCount(tensor.element_count);
      plan_.state_resident.push_back(tensor.trainable ? std::min(extents, variant_.state_resident)
                                                      : 0);
      largest_slot = std::max(largest_slot, proto::WeightSlotBytes(tensor));
    }
    plan_.window_bytes =
        variant_.weights_resident ? 0 : largest_slot + 65536;  // far smaller than the model
    staging_offset_ = proto::kRegionFixedBytes;
    pins_offset_ = staging_offset_ + proto::kLoadingStagingBytes;
    uint64_t end = pins_offset_ + 4096;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      proto::GradientPlacement placement;
      const uint64_t bytes = proto::PaddedBytes(count(tensor) * proto::DtypeBytes(variant_.dtype));
      const bool bundled =
          catalogue_.store_tensors[catalogue_.placements[tensor].store_tensor].bundle;
      if (catalogue_.tensors[tensor].trainable) {
        const bool spilled = variant_.spill && !bundled;
        placement.home = spilled ? proto::GradientHome::kScratch : proto::GradientHome::kRegion;
        if (variant_.sums)
          placement.home = spilled ? proto::GradientHome::kSlabScratch : proto::GradientHome::kSlab;
        uint64_t& cursor = spilled ? plan_.scratch_bytes : end;
        if (placement.home != proto::GradientHome::kSlab)
          placement.offset_bytes = std::exchange(cursor, cursor + bytes);
      }
      plan_.gradients.push_back(placement);
    }
    ring_offset_ = end;
    if (variant_.sums) end += kRingExtents * kRingSlotBytes;
    if (variant_.sums && variant_.spill) plan_.sum_blocks = 2;
    plan_.region_bytes = end;
    plan_.world_size = variant_.world.world_size;
    if (plan_.world_size > 1) plan_.other_region_bytes = end;
    for (const proto::Tensor& tensor : catalogue_.tensors)
      sums_.emplace_back(tensor.element_count * proto::DtypeBytes(variant_.dtype));
  }

  References InitialWeights() {
    References references;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      Reference reference;
      reference.master.resize(count(tensor));
      for (double& value : reference.master) value = Rounded(Value());
      for (std::vector<double>& plane : reference.state) plane.resize(count(tensor), 0);
      references.push_back(std::move(reference));
    }
    return references;
  }

  template <class To>
  static std::vector<std::byte> BytesAs(const std::vector<double>& values,
                                        To (*cast)(double value)) {
    std::vector<std::byte> bytes(values.size() * sizeof(To));
    for (size_t i = 0; i < values.size(); ++i) {
      const To value = cast(values[i]);
      std::memcpy(bytes.data() + i * sizeof(To), &value, sizeof(To));
    }
    return bytes;
  }

  // Of masters and states.
  std::vector<std::byte> BytesOf(const std::vector<double>& values) const {
    if (variant_.dtype == Dtype::kFloat64)
      return BytesAs<double>(values, [](double value) { return value; });
    return BytesAs<float>(values, [](double value) { return static_cast<float>(value); });
  }

  // Of weights and gradients.
  std::vector<std::byte> CastBytes(const std::vector<double>& values) const {
    switch (variant_.dtype) {
      case Dtype::kBFloat16:
        return BytesAs<uint16_t>(
            values, [](double value) { return ToBFloat16(static_cast<float>(value)); });
      case Dtype::kFloat16:
        return BytesAs<kernels::Half>(
            values, [](double value) { return kernels::ToHalf(static_cast<float>(value)); });
      case Dtype::kFloat32:
      case Dtype::kFloat64:
        break;
    }
    return BytesOf(values);
  }

  // A number of any kind that the dtype has; of fp64 one that fp32 has not.
  double Value() {
    return variant_.dtype == Dtype::kFloat64 ? normal_(random_) / 3.0 : normal_(random_);
  }
  // The nearest number of the dtype.
  double Rounded(double value) const {
    switch (variant_.dtype) {
      case Dtype::kBFloat16:
        return FromBFloat16(ToBFloat16(static_cast<float>(value)));
      case Dtype::kFloat16:
        return kernels::FromHalf(kernels::ToHalf(static_cast<float>(value)));
      case Dtype::kFloat32:
        return static_cast<float>(value);
      case Dtype::kFloat64:
        break;
    }
    return value;
  }
  std::vector<std::byte> WorkingBytes(uint32_t tensor) const {
    return CastBytes(references_[tensor].master);
  }

  std::vector<std::byte> Gradient(uint32_t tensor) {
    std::vector<double> values(count(tensor));
    for (double& value : values) value = Value();
    if (variant_.half_steps) {
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = std::ldexp(1.0f, std::ilogb(references_[tensor].master[i]) - 8);
    }
    return CastBytes(values);
  }

  absl::Status HandOver(uint32_t tensor, const std::vector<std::byte>& gradient) {
    const proto::GradientPlacement& placement = plan_.gradients[tensor];
    // The update of the step before may still be reading the gradient: a tensor that is not pending
    // any more has taken it.
    if (session_->State(tensor) == proto::kPending) {
      if (const auto acquired = session_->Acquire(tensor); !acquired.ok()) return acquired.status();
      session_->Release(tensor);
    }
    if (placement.home == proto::GradientHome::kRegion) {
      std::memcpy(session_->region() + placement.offset_bytes, gradient.data(), gradient.size());
      return absl::OkStatus();
    }
    const uint64_t bytes = proto::PaddedBytes(gradient.size());
    std::memcpy(session_->region() + staging_offset_, gradient.data(), gradient.size());
    return session_->Wait(session_->ScratchWrite(placement.offset_bytes, bytes, staging_offset_));
  }

  void ComplementGradients() {
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      if (plan_.gradients[tensor].home != proto::GradientHome::kRegion) continue;
      std::byte* const gradient = session_->region() + plan_.gradients[tensor].offset_bytes;
      for (uint64_t i = 0; i < count(tensor) * proto::DtypeBytes(variant_.dtype); ++i)
        gradient[i] ^= std::byte{1};
    }
  }

  // Returns when the state of all that are no bundles is written once more, or the job has failed.
  absl::Status ReleaseGradients(const client::StepCommand& command) {
    const proto::SlabHeader& header = session_->slab_header();
    while (header.durable_step.load() + 1 < command.step && session_->health().ok())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    uint64_t expected = header.bytes_written.load();
    for (const client::TensorUpdate& update : command.updates) {
      const proto::Placement& placement = catalogue_.placements[update.tensor];
      const proto::StoreTensor& tensor = catalogue_.store_tensors[placement.store_tensor];
      if (tensor.bundle) continue;
      expected += proto::WeightSlotBytes(tensor);
      for (uint32_t i = 0; i < proto::ExtentCount(tensor.element_count); ++i)
        expected += proto::StateBytes(tensor, i);
      session_->ReleaseGradient(update.tensor);
    }
    while (header.bytes_written.load() < expected && session_->health().ok())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return session_->health();
  }

  void SeedByStep() {
    random_.seed(static_cast<uint32_t>(step_ + 1));
    normal_.reset();
  }

  // ---- Gradients that the daemon adds up.

  static constexpr uint64_t kRingExtents = 3, kRingSlotBytes = proto::kExtentElements * 8;
  static constexpr uint32_t kPasses = 2;

  // What a rank's pass gives for a tensor in this step; sometimes nothing.
  bool Gives(uint32_t tensor, uint32_t pass, uint32_t rank) const {
    return (step_ * 7 + tensor * 5 + pass * 3 + rank) % 6 != 0;
  }
  std::vector<std::byte> PartOf(uint32_t tensor, uint32_t pass, uint32_t rank) const {
    std::minstd_rand random(static_cast<uint32_t>(((step_ * 64 + tensor) * 8 + pass) * 8 + rank));
    std::vector<double> values(count(tensor));
    for (double& value : values) value = static_cast<float>(random()) * 0x1p-30f - 1.0f;
    return CastBytes(values);
  }
  proto::GradientStart Start() const { return static_cast<proto::GradientStart>(step_ % 3); }

  // What one process makes of all parts, in the order of passes and ranks. True when there are any.
  bool AddUp(uint32_t tensor) {
    bool exists = false;
    for (uint32_t pass = 0; pass < kPasses; ++pass) {
      for (uint32_t rank = 0; rank < plan_.world_size; ++rank) {
        if (!Gives(tensor, pass, rank)) continue;
        const std::vector<std::byte> part = PartOf(tensor, pass, rank);
        const void* const parts[] = {part.data()};
        const proto::GradientStart start =
            std::exchange(exists, true) ? proto::GradientStart::kPrevious : Start();
        kernels::AddParts(kernels::Isa::kReference, {.dtype = variant_.dtype,
                                                     .count = count(tensor),
                                                     .sum = sums_[tensor].data(),
                                                     .start = static_cast<kernels::SumStart>(start),
                                                     .parts = parts,
                                                     .part_count = 1,
                                                     .factor = 1.0 / plan_.world_size});
      }
    }
    return exists;
  }

  absl::Status DeliverPart(uint32_t tensor, uint32_t pass) {
    const std::vector<std::byte> part = PartOf(tensor, pass, rank());
    const uint64_t element_bytes = proto::DtypeBytes(variant_.dtype);
    for (uint64_t begin = 0; begin < count(tensor); begin += proto::kExtentElements) {
      client::Ticket& slot = ring_[ring_next_ % kRingExtents];
      if (slot != 0) {
        const absl::Status added = session_->Wait(std::exchange(slot, 0));
        if (!added.ok()) return added;
      }
      const uint64_t place = ring_offset_ + ring_next_++ % kRingExtents * kRingSlotBytes;
      const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count(tensor) - begin);
      std::memcpy(session_->region() + place, part.data() + begin * element_bytes,
                  elements * element_bytes);
      slot = session_->DeliverGradient(tensor, pass, Start(), begin, elements, place);
    }
    return absl::OkStatus();
  }

  // Ranks give their tensors in different orders.
  absl::Status DeliverAll() {
    absl::Status status = session_->Wait(session_->BeginGradients(step_));
    const auto tensors = static_cast<uint32_t>(catalogue_.tensors.size());
    for (uint32_t pass = 0; pass < kPasses; ++pass) {
      for (uint32_t i = 0; status.ok() && i < tensors; ++i) {
        const uint32_t tensor = rank() % 2 == 0 ? i : tensors - 1 - i;
        if (catalogue_.tensors[tensor].trainable && Gives(tensor, pass, rank()))
          status = DeliverPart(tensor, pass);
      }
      if (status.ok()) status = session_->Wait(session_->EndPass(pass, /*wait=*/pass == 0));
    }
    for (client::Ticket& slot : ring_) {
      if (slot != 0) status.Update(session_->Wait(std::exchange(slot, 0)));
    }
    return status;
  }

  // Looks at a sum as a rank does.
  void ExpectSum(uint32_t tensor) {
    const auto word = session_->AwaitGradient(tensor, kPasses);
    ASSERT_TRUE(word.ok()) << word.status();
    EXPECT_EQ(*word, proto::MakeGradientWord(
                         proto::kGradientExists | proto::kGradientFinal | proto::kGradientFinite,
                         step_, 0));
    EXPECT_EQ(*word, session_->GradientWord(tensor));
    const std::vector<std::byte>& expected = sums_[tensor];
    if (plan_.gradients[tensor].home == proto::GradientHome::kSlab) {
      const auto layout = proto::ComputeSlabLayout(catalogue_, plan_);
      EXPECT_EQ(std::memcmp(session_->slab() + layout->sum_offset[tensor], expected.data(),
                            expected.size()),
                0)
          << catalogue_.tensors[tensor].name;
      return;
    }
    const absl::Status read =
        session_->Wait(session_->ScratchRead(plan_.gradients[tensor].offset_bytes,
                                             proto::PaddedBytes(expected.size()), staging_offset_));
    ASSERT_TRUE(read.ok()) << read;
    EXPECT_EQ(std::memcmp(session_->region() + staging_offset_, expected.data(), expected.size()),
              0)
        << catalogue_.tensors[tensor].name;
  }

  // One rank may look at what it likes before the step, in every other step.
  absl::Status MakeSummedStep(client::StepCommand* command) {
    if (const absl::Status status = DeliverAll(); !status.ok()) return status;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      if (!catalogue_.tensors[tensor].trainable || !AddUp(tensor)) continue;
      if (step_ % 2 == 0 && tensor % plan_.world_size == rank()) ExpectSum(tensor);
      AddUpdate(tensor, sums_[tensor], command);
    }
    return absl::OkStatus();
  }

  void AddUpdate(uint32_t tensor, const std::vector<std::byte>& gradient,
                 client::StepCommand* command) {
    const float scale = tensor % 2 == 0 || variant_.half_steps ? 1.0f : 0.37f;
    const uint32_t group = tensor % 3 == 0 ? 1 : 0;
    Update(tensor, command->groups[group], gradient, scale);
    command->updates.push_back({tensor, group, references_[tensor].update_count, scale});
  }

  absl::Status MakeStep(const std::vector<uint32_t>& skipped, bool hands_over,
                        client::StepCommand* command) {
    command->step = ++step_;
    command->groups = {Group(1e-2), Group(3e-2)};
    command->has_trainer_state = true;
    command->trainer_state = StateOfRank(absl::StrCat("after ", step_));
    if (variant_.sums) return MakeSummedStep(command);
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      if (!catalogue_.tensors[tensor].trainable ||
          std::count(skipped.begin(), skipped.end(), tensor) != 0)
        continue;
      const std::vector<std::byte> gradient = Gradient(tensor);
      if (hands_over) {
        if (const absl::Status status = HandOver(tensor, gradient); !status.ok()) return status;
      }
      AddUpdate(tensor, gradient, command);
      if (variant_.world.world_size > 1) {
        command->updates.back().own_gradient_crc = Crc32c(0, gradient.data(), gradient.size());
      }
    }
    return absl::OkStatus();
  }

  client::Group Group(double lr) const {
    return OptimizerSpec(variant_.optimizer).Set("lr", variant_.half_steps ? 1 : lr);
  }

  void Update(uint32_t tensor, const client::Group& group, const std::vector<std::byte>& gradient,
              float scale) {
    Reference& reference = references_[tensor];
    ++reference.update_count;
    kernels::Run run;
    run.count = run.tensor_count = reference.master.size();
    run.gradient_dtype = variant_.dtype;
    run.gradient = gradient.data();
    run.gradient_scale = scale;
    if (variant_.dtype == Dtype::kFloat64) {
      run.weight_dtype = Dtype::kFloat64;
      run.weight = reference.master.data();
      for (size_t i = 0; i < reference.state.size(); ++i)
        run.double_state[i] = reference.state[i].data();
      Run(reference, group, run);
    } else {
      UpdateInFp32(reference, group, run);
    }
    MoveAverage(reference, group.averaging(), variant_.dtype == Dtype::kFloat64);
  }

  // Element by element, in the arithmetic of the master.
  static void MoveAverage(Reference& reference, const Averaging& averaging, bool is_double) {
    if (!averaging.is_on()) return;
    const AverageStep step = StepOf(averaging, static_cast<int64_t>(reference.update_count));
    reference.average.resize(reference.master.size());
    for (size_t i = 0; i < reference.average.size(); ++i) {
      double& average = reference.average[i];
      average = is_double ? Moved<double>(step, average, reference.master[i])
                          : Moved<float>(step, static_cast<float>(average),
                                         static_cast<float>(reference.master[i]));
    }
  }
  template <class T>
  static T Moved(const AverageStep& step, T average, T master) {
    const T value = static_cast<T>(step.value), distance = master - average;
    switch (step.kind) {
      case AverageStep::Kind::kKeep:
        return average;
      case AverageStep::Kind::kTake:
        return master;
      case AverageStep::Kind::kMean:
        return average + distance / value;
      case AverageStep::Kind::kLerp:
        break;
    }
    return value < T{0.5} ? std::fma(value, distance, average)
                          : std::fma(value - T{1}, distance, master);
  }

  // Over fp32 masters, whatever the weights are. The kernels take fp16 gradients with fp16 weights
  // only: here they are scaled before.
  static void UpdateInFp32(Reference& reference, const client::Group& group, kernels::Run run) {
    std::vector<float> master(reference.master.begin(), reference.master.end()), gradient;
    std::array<std::vector<float>, kernels::kStatePlanesMax> state;
    for (size_t i = 0; i < state.size(); ++i) {
      state[i].assign(reference.state[i].begin(), reference.state[i].end());
      run.state[i] = state[i].data();
    }
    run.weight = master.data();
    if (run.gradient_dtype == Dtype::kFloat16) {
      const auto scale = static_cast<float>(std::exchange(run.gradient_scale, 1));
      for (size_t i = 0; i < run.count; ++i) {
        const float value = kernels::FromHalf(static_cast<const kernels::Half*>(run.gradient)[i]);
        gradient.push_back(kernels::FromHalf(kernels::ToHalf(value * scale)));
      }
      run.gradient_dtype = Dtype::kFloat32;
      run.gradient = gradient.data();
    }
    Run(reference, group, run);
    reference.master.assign(master.begin(), master.end());
    for (size_t i = 0; i < state.size(); ++i)
      reference.state[i].assign(state[i].begin(), state[i].end());
  }

  static void Run(const Reference& reference, const client::Group& group, kernels::Run run) {
    const auto step = static_cast<int64_t>(reference.update_count);
    if (kernels::NeedsNorms(group)) run.trust_ratio = TrustRatio(group, step, run);
    kernels::Update(group, step, run);
  }

  // Of the whole tensor, block by block.
  static double TrustRatio(const client::Group& group, int64_t step, const kernels::Run& whole) {
    const uint64_t gradient_bytes = proto::DtypeBytes(whole.gradient_dtype);
    const uint64_t weight_bytes = proto::DtypeBytes(whole.weight_dtype);
    std::vector<kernels::Norms> blocks;
    for (uint64_t begin = 0; begin < whole.count; begin += kernels::Norms::kBlockElements) {
      kernels::Run run = whole;
      run.begin = begin;
      run.count = std::min<uint64_t>(kernels::Norms::kBlockElements, whole.count - begin);
      run.weight = static_cast<std::byte*>(whole.weight) + begin * weight_bytes;
      run.gradient = static_cast<const std::byte*>(whole.gradient) + begin * gradient_bytes;
      for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
        run.state[i] = whole.state[i] == nullptr ? nullptr : whole.state[i] + begin;
        run.double_state[i] =
            whole.double_state[i] == nullptr ? nullptr : whole.double_state[i] + begin;
      }
      kernels::AddNorms(group, step, run, &blocks.emplace_back());
    }
    return kernels::TrustRatio(blocks);
  }

  void ExpectPlane(uint32_t tensor, proto::Plane plane, const std::vector<std::byte>& expected) {
    const uint64_t element_bytes = expected.size() / count(tensor);
    for (uint64_t begin = 0; begin < count(tensor); begin += proto::kExtentElements) {
      const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count(tensor) - begin);
      const absl::Status status =
          session_->Wait(session_->Get(tensor, plane, begin, elements, staging_offset_));
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(std::memcmp(session_->region() + staging_offset_,
                            expected.data() + begin * element_bytes, elements * element_bytes),
                0)
          << "plane " << static_cast<int>(plane) << " from element " << begin;
    }
  }

  uint64_t ring_offset_ = 0, ring_next_ = 0;
  client::Ticket ring_[kRingExtents] = {};
  std::vector<std::vector<std::byte>> sums_;  // of gradients, per tensor
  std::string pool_, name_;
  Variant variant_;
  proto::Catalogue catalogue_;
  proto::MemoryPlan plan_;
  uint64_t staging_offset_ = 0, pins_offset_ = 0;
  client::ConnectOptions connect_ = {.only_private = true};
  std::unique_ptr<client::Session> session_;
  client::JobInfo info_;
  std::vector<uint64_t> to_format_;
  uint64_t step_ = 0;
  References references_;
  std::vector<References> history_;  // by step
  std::mt19937 random_{20240817};
  std::normal_distribution<float> normal_{0.0f, 0.1f};
};

class SpineFixture : public testing::Test {
 protected:
  void SetUp() override {
    const char* base = getenv("TEST_TMPDIR");
    ASSERT_NE(base, nullptr);
    pool_ = absl::StrCat(base, "/", testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(pool_);
    const char* binary = getenv("OFFLOADD_BINARY");
    ASSERT_NE(binary, nullptr);
    setenv("OFFLOADD_BINARY", std::filesystem::absolute(binary).c_str(), 1);
  }
  void TearDown() override { std::filesystem::remove_all(pool_); }

  std::string pool_;
};

}  // namespace offload
