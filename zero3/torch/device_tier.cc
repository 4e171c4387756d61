#include "zero3/torch/device_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "kernels/device_update.h"
#include "proto/buffer_tensors.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using accelerator::Stream;
using proto::Plane;

bool Contains(const std::vector<Stream>& streams, Stream stream) {
  return std::ranges::find(streams, stream) != streams.end();
}

}  // namespace

DeviceTier::DeviceTier(Attachment& attachment, c10::Device device,
                       accelerator::Accelerator* accelerator, const GpuPlan& plan)
    : attachment_(attachment),
      device_(device),
      accelerator_(accelerator),
      size_bytes_(plan.tier_bytes()),
      transfers_(attachment, accelerator) {
  // First: it is what may fail on a device that works.
  bytes_ = ValueOrThrow(accelerator_->Malloc(size_bytes_), device_.str());
  updated_ = ValueOrThrow(accelerator_->EventCreate(), device_.str());
  used_ = ValueOrThrow(accelerator_->EventCreate(), device_.str());
  std::byte* next = bytes_;
  const proto::Catalogue& catalogue = attachment.input().catalogue;
  for (uint32_t i = 0; i < catalogue.tensors.size(); ++i) {
    places_.emplace_back();
    if (!plan.Stays(i)) continue;
    const proto::Tensor& tensor = catalogue.tensors[i];
    Place& place = places_.back().emplace();
    place.weight = next;
    next += DeviceBytes(tensor.element_count * proto::DtypeBytes(tensor.dtype));
    place.offsets = TierPlanesOf(catalogue.planes(i), tensor.element_count);
    place.state = next;
    next += place.offsets.size_bytes;
  }
  shared_ = next;
}

// A device that has failed executes nothing any more.
DeviceTier::~DeviceTier() {
  used_on_.push_back(CurrentStream(device_));
  if (updated_on_.has_value()) used_on_.push_back(*updated_on_);
  for (const Stream stream : used_on_) {
    if (accelerator_->EventRecord(used_, stream).ok())
      accelerator_->EventSynchronize(used_).IgnoreError();
  }
  if (bytes_ != nullptr) accelerator_->Free(bytes_).IgnoreError();
  accelerator_->EventDestroy(updated_).IgnoreError();
  accelerator_->EventDestroy(used_).IgnoreError();
}

// ---- Weights -----------------------------------------------------------------------------------

std::byte* DeviceTier::Pin(uint32_t tensor) {
  CheckWhole();
  const Lock lock(mutex_);
  Place& place = *places_[tensor];
  Order(CurrentStream(device_));
  if (!place.has_weight) FetchWeight(tensor);
  return place.weight;
}

void DeviceTier::Unpin() {
  const Stream stream = CurrentStream(device_);
  const Lock lock(mutex_);
  if (!Contains(used_on_, stream)) used_on_.push_back(stream);
}

// The stream's next commands come after what was launched here.
void DeviceTier::Order(Stream stream) {
  if (!updated_on_.has_value() || stream == *updated_on_ || Contains(ordered_, stream)) return;
  ThrowIfError(accelerator_->StreamWaitEvent(stream, updated_), device_.str());
  ordered_.push_back(stream);
}

// ---- Steps -------------------------------------------------------------------------------------

void DeviceTier::Update(uint32_t tensor, const kernels::OptimizerSpec& optimizer, uint64_t count,
                        const at::Tensor& gradient, double scale) {
  CheckWhole();
  const Lock lock(mutex_);
  const Stream stream = CurrentStream(device_);
  Place& place = *places_[tensor];
  if (!place.has_state) FetchState(tensor);
  Order(stream);
  for (const Stream other : std::exchange(used_on_, {})) {
    if (other == stream) continue;
    ThrowIfError(accelerator_->EventRecord(used_, other), device_.str());
    ThrowIfError(accelerator_->StreamWaitEvent(stream, used_), device_.str());
  }
  const proto::Tensor& declared = attachment_.tensor(tensor);
  kernels::DeviceRun run;
  run.count = run.tensor_count = declared.element_count;
  run.weight_dtype = run.gradient_dtype = declared.dtype;
  run.weight = place.weight;
  std::byte* const residual = PlaneOf(place, place.offsets.residual);
  if (declared.dtype == proto::Dtype::kFloat16) {
    run.half_residual = reinterpret_cast<uint32_t*>(residual);
  } else {
    run.residual = reinterpret_cast<int16_t*>(residual);
  }
  run.ties = reinterpret_cast<uint32_t*>(PlaneOf(place, place.offsets.ties));
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    std::byte* const state = PlaneOf(place, place.offsets.state[i]);
    if (declared.dtype == proto::Dtype::kFloat64) {
      run.double_state[i] = reinterpret_cast<double*>(state);
    } else {
      run.state[i] = reinterpret_cast<float*>(state);
    }
  }
  run.gradient = gradient.const_data_ptr();
  run.gradient_scale = scale;
  run.roots = Roots(optimizer);
  if (kernels::NeedsNorms(optimizer)) run.norms = reinterpret_cast<double*>(shared_);
  is_ahead_ = true;
  ThrowIfError(accelerator_->Update(optimizer, static_cast<int64_t>(count), run, stream),
               device_.str());
  place.is_newer = true;
  ThrowIfError(accelerator_->EventRecord(updated_, stream), device_.str());
  updated_on_ = stream;
  ordered_.clear();
}

// Null: the nearest.
const uint32_t* DeviceTier::Roots(const kernels::OptimizerSpec& optimizer) {
  if (!optimizer.TakesLibraryRoots()) return nullptr;
  const kernels::SquareRoots& roots = TorchSquareRoots();
  if (roots.AreNearest()) return nullptr;
  if (!std::exchange(has_table_, true)) {
    ThrowIfError(
        transfers_.Upload(shared_, {reinterpret_cast<const std::byte*>(roots.corrections()),
                                    kernels::SquareRoots::kBytes}),
        device_.str());
  }
  return reinterpret_cast<const uint32_t*>(shared_);
}

bool DeviceTier::has_news() const {
  const Lock lock(mutex_);
  return std::ranges::any_of(
      places_, [](const auto& place) { return place.has_value() && place->is_newer; });
}

void DeviceTier::PutAll() {
  CheckWhole();
  const Lock lock(mutex_);
  std::vector<uint32_t> newer;
  for (uint32_t tensor = 0; tensor < places_.size(); ++tensor) {
    if (Has(tensor) && places_[tensor]->is_newer) newer.push_back(tensor);
  }
  Put(newer);
}

void DeviceTier::Stepped(bool is_partial) {
  const Lock lock(mutex_);
  is_partial_ = is_partial;
  is_ahead_ = false;
}

void DeviceTier::StepFailed(uint64_t step) {
  const Lock lock(mutex_);
  if (is_ahead_) failed_step_ = step;
}

void DeviceTier::CheckWhole() const {
  const uint64_t step = failed_step_;
  if (step == 0) return;
  ThrowStatus(
      MakeError(ErrorId::kSessionEnded,
                absl::StrCat("step ", step, " has failed when ", device_.str(),
                             " had updated tensors of it, which are ahead of the job now"),
                "See the error of that step, then start the run again: it resumes at the last "
                "committed epoch"));
}

void DeviceTier::Settle() {
  CheckWhole();
  const Lock lock(mutex_);
  if (!is_partial_) return;
  PutAll();
  const DaemonWait wait(attachment_);
  ThrowIfError(attachment_.session().EndLoad());
  is_partial_ = false;
}

// ---- The daemon's planes -----------------------------------------------------------------------

void DeviceTier::BeforeRead(uint32_t tensor) {
  CheckWhole();
  const Lock lock(mutex_);
  if (Has(tensor) && places_[tensor]->is_newer) Put({&tensor, 1});
}

void DeviceTier::BeforePut(uint32_t tensor) {
  CheckWhole();
  const Lock lock(mutex_);
  if (proto::IsBufferTensor(attachment_.tensor(tensor).name)) return;
  Settle();
  Changed(tensor);
}

void DeviceTier::Changed(uint32_t tensor) {
  const Lock lock(mutex_);
  if (!Has(tensor) || places_[tensor]->is_newer) return;
  places_[tensor]->has_weight = places_[tensor]->has_state = false;
}

// ---- Transfers ---------------------------------------------------------------------------------

TierTransfers::Source DeviceTier::MasterOf(uint32_t tensor) const {
  const Place& place = *places_[tensor];
  const bool is_in_parts = place.offsets.residual.has_value();
  return {.tensor = tensor,
          .plane = is_in_parts ? Plane::kMaster : Plane::kWeight,
          .bytes = place.weight,
          .residual = PlaneOf(place, place.offsets.residual),
          .ties = PlaneOf(place, place.offsets.ties)};
}

void DeviceTier::AddState(uint32_t tensor, std::vector<TierTransfers::Source>& sources) const {
  const Place& place = *places_[tensor];
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    if (std::byte* const state = PlaneOf(place, place.offsets.state[i]))
      sources.push_back({.tensor = tensor, .plane = proto::kStatePlanes[i], .bytes = state});
  }
}

void DeviceTier::FetchWeight(uint32_t tensor) {
  Place& place = *places_[tensor];
  const TierTransfers::Source weight{.tensor = tensor, .bytes = place.weight};
  Fetch({&weight, 1});
  place.has_weight = true;
}

void DeviceTier::FetchState(uint32_t tensor) {
  Place& place = *places_[tensor];
  std::vector<TierTransfers::Source> sources;
  if (place.offsets.residual.has_value() || !place.has_weight) sources.push_back(MasterOf(tensor));
  AddState(tensor, sources);
  Fetch(sources);
  place.has_weight = place.has_state = true;
}

// Behind whoever uses the weights or updates them. The host knows when it has come, so whatever is
// launched later comes behind it.
void DeviceTier::Fetch(std::span<const TierTransfers::Source> sources) {
  for (const Stream other : used_on_) {
    ThrowIfError(accelerator_->EventRecord(used_, other), device_.str());
    ThrowIfError(accelerator_->StreamWaitEvent(transfers_.stream(), used_), device_.str());
  }
  if (updated_on_.has_value())
    ThrowIfError(accelerator_->StreamWaitEvent(transfers_.stream(), updated_), device_.str());
  ThrowIfError(transfers_.Fetch(sources));
}

void DeviceTier::Put(std::span<const uint32_t> tensors) {
  if (updated_on_.has_value())
    ThrowIfError(accelerator_->StreamWaitEvent(transfers_.stream(), updated_), device_.str());
  std::vector<TierTransfers::Source> sources;
  for (const uint32_t tensor : tensors) {
    attachment_.NotePut(tensor);
    sources.push_back(MasterOf(tensor));
    AddState(tensor, sources);
  }
  ThrowIfError(transfers_.Put(sources));
  for (const uint32_t tensor : tensors) places_[tensor]->is_newer = false;
}

}  // namespace offload::zero3
