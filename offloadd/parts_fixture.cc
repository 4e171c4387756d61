#include "offloadd/parts_fixture.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "gtest/gtest.h"
#include "offloadd/job_catalogue.h"

namespace offload::daemon {
namespace {

constexpr uint64_t kRegionBytes = 64ull << 20;
constexpr int kTurnsMax = 100'000;  // beyond it something is under way for ever

template <typename T>
T Must(absl::StatusOr<T> value) {
  OFFLOAD_CHECK(value.ok()) << value.status().ToString();
  return *std::move(value);
}

}  // namespace

proto::Tensor TestTensor(const std::string& name, uint64_t elements, proto::Dtype dtype) {
  return {.name = name, .shape = {static_cast<int64_t>(elements)}, .dtype = dtype};
}

Parts::Parts(PartsOptions options) : loop_(Must(EventLoop::Create())) {
  context.loop = loop_.get();
  context.clock = &machine_.clock();
  context.activity = &activity_;
  const uint32_t threads = options.depths.update_threads;
  context.workers.Start(machine_.MakeExecutor(threads, "update"), threads);
  context.durability = options.durability;
  context.reads_ahead = options.reads_ahead;
  context.updates_ahead = options.updates_ahead;
  context.depths = options.depths;
  context.room_timeout_seconds = 30;
  context.optimizer = options.optimizer;
  context.catalogue = Must(proto::BuildCatalogue(std::move(options.tensors), options.optimizer));
  context.complete = [this](uint32_t rank, uint64_t tag, const absl::Status& status,
                            uint64_t value) { Complete(rank, tag, status, value); };
  context.fail = [this](const absl::Status& status) { Fail(status); };
  MakePlan(options);
  MakeMemory();
  context.ranks.resize(options.ranks);
  for (RankMemory& rank : context.ranks) {
    regions_.push_back(Must(MappedRegion::Anonymous(kRegionBytes)));
    rank = {.region = regions_.back().data(),
            .region_bytes = kRegionBytes,
            .pins = reinterpret_cast<const proto::PinWord*>(regions_.back().data()),
            .is_here = true};
  }
  room_used_bytes_ = proto::PaddedBytes(context.catalogue.tensors.size() * sizeof(proto::PinWord));
  MakeStore();
  loop_->SetTurn([this] {
    transfers_->Turn();
    cache_->Turn();
    executor_->Turn();
    return 0;
  });
  MakeParts(/*new_store=*/true);
  Load();
  MakeParts(/*new_store=*/false);
}

Parts::~Parts() { Run(); }

void Parts::MakePlan(const PartsOptions& options) {
  const size_t store_count = context.catalogue.store_tensors.size();
  activity_.SetTensorCount(store_count);
  proto::MemoryPlan& plan = context.plan;
  plan.window_bytes = options.window_bytes;
  plan.pipeline_blocks = options.pipeline_blocks;
  plan.region_bytes = kRegionBytes;
  plan.gradients.resize(context.catalogue.tensors.size(),
                        {proto::GradientHome::kRegion, proto::kRegionFixedBytes});
  for (size_t i = 0; i < store_count; ++i) {
    const proto::StoreTensor& tensor = context.catalogue.store_tensors[i];
    plan.weight_resident.push_back(tensor.bundle || options.keeps_weights);
    const bool keeps_state = options.keeps_state || i < options.keeps_state_of;
    plan.state_resident.push_back(keeps_state ? proto::ExtentCount(tensor.element_count) : 0);
  }
  context.layout = Must(proto::ComputeSlabLayout(context.catalogue, plan));
}

void Parts::MakeMemory() {
  slab_ = Must(MappedRegion::Anonymous(context.layout.total_bytes));
  context.slab = slab_.data();
}

void Parts::MakeStore() {
  store_ = Must(machine_.CreateStore(
      "memory", MakeStoreSpec("parts", context.catalogue, context.optimizer), {}));
  context.store = store_.get();
}

// As a new job's weights come there.
void Parts::Load() {
  now.tensors.resize(context.catalogue.tensors.size());
  for (uint32_t tensor = 0; tensor < now.tensors.size(); ++tensor) {
    const proto::Tensor& declared = context.catalogue.tensors[tensor];
    Put(tensor, MakeValues(declared.dtype, declared.element_count, /*key=*/tensor + 1));
    Run();
  }
  absl::Status status = absl::UnknownError("not committed");
  transfers_->WriteBundles([this, &status](const absl::Status& written) {
    OFFLOAD_CHECK(written.ok()) << written.ToString();
    store_->Commit(0, "", context.Counted([&status](absl::Status done) { status = done; }));
  });
  Run();
  OFFLOAD_CHECK(status.ok()) << status.ToString();
  status = machine_.PublishStore(*store_);
  OFFLOAD_CHECK(status.ok()) << status.ToString();
  context.published = true;
}

void Parts::MakeParts(bool new_store) {
  transfers_.reset();
  executor_.reset();
  state_.reset();
  std::fill_n(slab_.data(), slab_.size(), std::byte{0});
  cache_ = std::make_unique<WeightCache>(&context, new_store);
  state_ = std::make_unique<ResidentState>(&context);
  executor_ = std::make_unique<UpdateExecutor>(
      &context, cache_.get(), state_.get(),
      UpdateExecutor::Events{.on_computed =
                                 [this](std::span<const uint32_t> tensors) {
                                   computed.insert(computed.end(), tensors.begin(), tensors.end());
                                 },
                             .on_updated = [](uint64_t) {},
                             .on_written = [this](uint64_t step) { written.push_back(step); },
                             .on_committed = [this](uint64_t step) { committed.push_back(step); }});
  cache_->SetOnDemand([this](uint32_t store_tensor) {
    on_demand.push_back(store_tensor);
    executor_->Demand(store_tensor);
  });
  transfers_ = std::make_unique<Transfers>(&context, cache_.get(), state_.get(), executor_.get());
}

// ---- Time --------------------------------------------------------------------------------------

// True when something may follow of itself.
bool Parts::RunOnce(bool with_workers) {
  loop_->RunOnce();
  const bool has_polled = store_->Poll(/*wait=*/false) > 0;
  const bool has_worked = with_workers && machine_.RunOne();
  return has_polled || has_worked || (with_workers && context.outstanding > 0);
}

void Parts::Turn() { RunOnce(/*with_workers=*/true); }

void Parts::Run() {
  for (int turn = 0; turn < kTurnsMax; ++turn) {
    if (!RunOnce(/*with_workers=*/true)) return;
  }
  ADD_FAILURE() << context.outstanding << " operations are under way for ever";
}

void Parts::RunWithoutWorkers() {
  while (RunOnce(/*with_workers=*/false)) continue;
}

// ---- Ranks -------------------------------------------------------------------------------------

proto::PinWord& Parts::Pin(uint32_t tensor, uint32_t rank) {
  return reinterpret_cast<proto::PinWord*>(regions_[rank].data())[tensor];
}

void Parts::Complete(uint32_t, uint64_t tag, const absl::Status& status, uint64_t value) {
  EXPECT_TRUE(answers_.emplace(tag, Answer{status, value}).second) << tag << " for the second time";
  answered_.push_back(tag);
}

// As a job does it.
void Parts::Fail(const absl::Status& status) {
  if (context.failed()) return;
  context.failure = status;
  cache_->FailWaiters(status);
  transfers_->FailQueued(status);
}

absl::Status Parts::StatusOf(uint64_t tag) const {
  const auto found = answers_.find(tag);
  return found == answers_.end() ? absl::UnknownError("no answer") : found->second.status;
}

uint64_t Parts::Acquire(uint32_t tensor, uint32_t rank) {
  ++Pin(tensor, rank);
  cache_->Acquire(rank, tensor, ++tags_);
  return tags_;
}

uint64_t Parts::Submit(uint32_t rank, proto::SubmissionEntry entry) {
  entry.tag = ++tags_;
  transfers_->Add(rank, entry);
  return entry.tag;
}

uint64_t Parts::TakeRoom(uint64_t size_bytes) {
  const uint64_t offset = room_used_bytes_;
  room_used_bytes_ += proto::PaddedBytes(size_bytes);
  OFFLOAD_CHECK(room_used_bytes_ <= kRegionBytes) << room_used_bytes_;
  return offset;
}

// Every extent is put by itself.
uint64_t Parts::Put(uint32_t tensor, const Bytes& values, uint32_t rank, uint64_t digest) {
  const proto::Tensor& declared = context.catalogue.tensors[tensor];
  const uint64_t element_bytes = proto::DtypeBytes(declared.dtype);
  uint64_t tag = 0;
  for (uint64_t begin = 0; begin < declared.element_count; begin += proto::kExtentElements) {
    const uint64_t count =
        std::min<uint64_t>(declared.element_count - begin, proto::kExtentElements);
    const uint64_t offset = TakeRoom(count * element_bytes);
    std::memcpy(regions_[rank].data() + offset, values.data() + begin * element_bytes,
                count * element_bytes);
    tag = Submit(rank, {.operation = proto::RingOperation::kPut,
                        .tensor = tensor,
                        .element_offset = begin,
                        .element_count = count,
                        .region_offset = offset,
                        .digest = digest});
  }
  if (rank == 0)
    now.tensors[tensor] = PutWeights(context.catalogue, tensor, values, now.tensors[tensor].get());
  return tag;
}

uint64_t Parts::EndPuts(uint32_t tensor, uint32_t rank, uint64_t digest) {
  return Submit(rank,
                {.operation = proto::RingOperation::kPut, .tensor = tensor, .digest = digest});
}

uint64_t Parts::Get(uint32_t tensor, proto::Plane plane, uint32_t rank) {
  const proto::Tensor& declared = context.catalogue.tensors[tensor];
  const uint64_t size_bytes = context.catalogue.planes(tensor).Bytes(plane, declared.element_count);
  const uint64_t offset = TakeRoom(size_bytes);
  const uint64_t tag = Submit(rank, {.operation = proto::RingOperation::kGet,
                                     .tensor = tensor,
                                     .plane = plane,
                                     .element_count = declared.element_count,
                                     .region_offset = offset});
  buffers_[tag] = {rank, offset, size_bytes};
  return tag;
}

Bytes Parts::Got(uint64_t tag) const {
  const Buffer& buffer = buffers_.at(tag);
  const std::byte* const bytes = regions_[buffer.rank].data() + buffer.offset;
  return {bytes, bytes + buffer.size_bytes};
}

// ---- Steps -------------------------------------------------------------------------------------

Bytes& Parts::GradientOf(uint64_t step, uint32_t tensor) {
  const proto::Tensor& declared = context.catalogue.tensors[tensor];
  Bytes& gradient = gradients_[step << 32 | tensor];
  if (gradient.empty())
    gradient = MakeValues(declared.dtype, declared.element_count, /*key=*/1000 * step + tensor);
  return gradient;
}

TaskPlan Parts::MakeTask(uint32_t store_tensor, const std::vector<uint32_t>& tensors,
                         uint64_t step) {
  const proto::Catalogue& catalogue = context.catalogue;
  const auto optimizer = std::make_shared<kernels::OptimizerSpec>(context.optimizer);
  TaskPlan task{.store_tensor = store_tensor};
  for (const uint32_t tensor : catalogue.store_tensors[store_tensor].members) {
    if (std::find(tensors.begin(), tensors.end(), tensor) == tensors.end()) continue;
    task.tensors.push_back(tensor);
    task.members.push_back({.begin = catalogue.placements[tensor].element_offset,
                            .count = catalogue.tensors[tensor].element_count,
                            .optimizer = optimizer,
                            .step = static_cast<int64_t>(now.tensors[tensor]->updates) + 1,
                            .gradient = GradientOf(step, tensor).data()});
  }
  return task;
}

StepPlan Parts::MakePlanOf(uint64_t step, const std::vector<uint32_t>& tensors) {
  StepPlan plan{.step = step};
  for (uint32_t i = 0; i < context.catalogue.store_tensors.size(); ++i) {
    TaskPlan task = MakeTask(i, tensors, step);
    if (!task.tensors.empty()) plan.tasks.push_back(std::move(task));
  }
  return plan;
}

void Parts::Begin(uint64_t step, const std::vector<uint32_t>& tensors, bool is_partial) {
  StepPlan plan = MakePlanOf(step, tensors);
  plan.is_partial = is_partial;
  for (const uint32_t tensor : tensors) {
    now.tensors[tensor] = UpdateValues(context.catalogue, tensor, *now.tensors[tensor],
                                       context.optimizer, GradientOf(step, tensor), 1.0f);
  }
  now.epoch = step;
  executor_->Begin(std::move(plan));
}

void Parts::Announce(uint64_t step, const std::vector<uint32_t>& tensors) {
  executor_->Expect(MakePlanOf(step, tensors));
  for (const uint32_t tensor : tensors) executor_->ReleaseGradient(tensor);
}

// ---- What is there -----------------------------------------------------------------------------

proto::TensorState Parts::StateOf(uint32_t tensor) const {
  const auto* const words =
      reinterpret_cast<const proto::TensorWord*>(slab_.data() + context.layout.tensor_words_offset);
  return proto::StateOf(words[tensor].load());
}

Bytes Parts::InSlab(uint32_t tensor) const {
  const auto* const words =
      reinterpret_cast<const proto::TensorWord*>(slab_.data() + context.layout.tensor_words_offset);
  const std::byte* const weights = slab_.data() + proto::OffsetOf(words[tensor].load());
  const proto::Tensor& declared = context.catalogue.tensors[tensor];
  return {weights, weights + declared.element_count * proto::DtypeBytes(declared.dtype)};
}

std::string Parts::CompareDurable(const JobState& state) {
  const auto store = machine_.OpenToRead();
  if (!store.ok()) return store.status().ToString();
  return CompareWithStore(context.catalogue, state, **store);
}

}  // namespace offload::daemon
