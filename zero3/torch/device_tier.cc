#include "zero3/torch/device_tier.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "kernels/device_update.h"
#include "kernels/split.h"
#include "proto/buffer_tensors.h"
#include "zero3/torch/attachment.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/storage_swap.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using accelerator::Stream;
using proto::Plane;

bool Contains(const std::vector<Stream>& streams, Stream stream) {
  return std::ranges::find(streams, stream) != streams.end();
}

// Masters of one extent in the form of kernels/split.h, with a device's tie bits.
struct SplitMasters {
  explicit SplitMasters(uint64_t count)
      : hi(count), lo(count), ties(kernels::TieWords(count)), packed(count / 8 + 1) {}

  std::vector<uint16_t> hi;
  std::vector<int16_t> lo;
  std::vector<uint32_t> ties;
  std::vector<uint8_t> packed;
};

template <class T>
const std::byte* BytesOf(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}
template <class T>
std::byte* BytesOf(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

uint64_t TieBytes(uint64_t count) { return kernels::TieWords(count) * sizeof(uint32_t); }

}  // namespace

DeviceTier::DeviceTier(Attachment& attachment, c10::Device device,
                       accelerator::Accelerator* accelerator, const GpuPlan& plan)
    : attachment_(attachment),
      device_(device),
      accelerator_(accelerator),
      size_bytes_(plan.tier_bytes()) {
  updated_ = ValueOrThrow(accelerator_->EventCreate(), device_.str());
  used_ = ValueOrThrow(accelerator_->EventCreate(), device_.str());
  bytes_ = ValueOrThrow(accelerator_->Malloc(size_bytes_), device_.str());
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
  table_ = next;
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
  Order(stream);
  for (const Stream other : std::exchange(used_on_, {})) {
    if (other == stream) continue;
    ThrowIfError(accelerator_->EventRecord(used_, other), device_.str());
    ThrowIfError(accelerator_->StreamWaitEvent(stream, used_), device_.str());
  }
  Place& place = *places_[tensor];
  if (!place.has_state) FetchState(tensor);
  const proto::Tensor& declared = attachment_.tensor(tensor);
  kernels::DeviceRun run;
  run.count = run.tensor_count = declared.element_count;
  run.weight_dtype = run.gradient_dtype = declared.dtype;
  run.weight = place.weight;
  run.residual = reinterpret_cast<int16_t*>(PlaneOf(place, place.offsets.residual));
  run.ties = reinterpret_cast<uint32_t*>(PlaneOf(place, place.offsets.ties));
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i)
    run.state[i] = reinterpret_cast<float*>(PlaneOf(place, place.offsets.state[i]));
  run.gradient = gradient.const_data_ptr();
  run.gradient_scale = scale;
  run.roots = Roots(optimizer);
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
    CopyToDevice(table_, reinterpret_cast<const std::byte*>(roots.corrections()),
                 kernels::SquareRoots::kBytes, device_);
  }
  return reinterpret_cast<const uint32_t*>(table_);
}

bool DeviceTier::has_news() const {
  const Lock lock(mutex_);
  return std::ranges::any_of(
      places_, [](const auto& place) { return place.has_value() && place->is_newer; });
}

void DeviceTier::PutAll() {
  CheckWhole();
  const Lock lock(mutex_);
  for (uint32_t tensor = 0; tensor < places_.size(); ++tensor) {
    if (Has(tensor) && places_[tensor]->is_newer) Put(tensor);
  }
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
  if (Has(tensor) && places_[tensor]->is_newer) Put(tensor);
}

void DeviceTier::BeforePut(uint32_t tensor) {
  CheckWhole();
  const Lock lock(mutex_);
  if (being_put_.has_value() || proto::IsBufferTensor(attachment_.tensor(tensor).name)) return;
  Settle();
  Changed(tensor);
}

void DeviceTier::Changed(uint32_t tensor) {
  const Lock lock(mutex_);
  if (!Has(tensor) || places_[tensor]->is_newer) return;
  places_[tensor]->has_weight = places_[tensor]->has_state = false;
}

// ---- Transfers ---------------------------------------------------------------------------------

// Without the keys that would look for an offloaded tensor behind the bytes.
class PlainCopies {
  const c10::impl::ExcludeDispatchKeyGuard plain_{kManagedKey};
  const c10::AutoGradMode no_grad_{false};
};

void DeviceTier::FetchWeight(uint32_t tensor) {
  const PlainCopies plain;
  Place& place = *places_[tensor];
  const uint64_t element_bytes = proto::DtypeBytes(attachment_.tensor(tensor).dtype);
  ThrowIfError(attachment_.StreamOut(tensor, Plane::kWeight, element_bytes,
                                     [&](uint64_t begin, uint64_t count, const std::byte* bytes) {
                                       CopyToDevice(place.weight + begin * element_bytes, bytes,
                                                    count * element_bytes, device_);
                                       return absl::OkStatus();
                                     }));
  place.has_weight = true;
}

void DeviceTier::FetchState(uint32_t tensor) {
  const PlainCopies plain;
  Place& place = *places_[tensor];
  if (place.offsets.residual.has_value()) {
    FetchMaster(tensor);
  } else if (!place.has_weight) {
    FetchWeight(tensor);
  }
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    std::byte* const state = PlaneOf(place, place.offsets.state[i]);
    if (state == nullptr) continue;
    ThrowIfError(attachment_.StreamOut(tensor, proto::kStatePlanes[i], sizeof(float),
                                       [&](uint64_t begin, uint64_t count, const std::byte* bytes) {
                                         CopyToDevice(state + begin * sizeof(float), bytes,
                                                      count * sizeof(float), device_);
                                         return absl::OkStatus();
                                       }));
  }
  place.has_state = true;
}

// Extents begin at whole words of tie bits.
void DeviceTier::FetchMaster(uint32_t tensor) {
  Place& place = *places_[tensor];
  std::byte* const residual = PlaneOf(place, place.offsets.residual);
  std::byte* const ties = PlaneOf(place, place.offsets.ties);
  ThrowIfError(attachment_.StreamOut(
      tensor, Plane::kMaster, sizeof(float),
      [&](uint64_t begin, uint64_t count, const std::byte* bytes) {
        SplitMasters split(count);
        kernels::TieWriter writer{split.packed.data()};
        kernels::Split(reinterpret_cast<const uint32_t*>(bytes), count, split.hi.data(),
                       split.lo.data(), &writer);
        kernels::TieReader reader{split.packed.data()};
        kernels::UnpackTies(split.lo.data(), count, &reader, split.ties.data());
        CopyToDevice(place.weight + begin * sizeof(uint16_t), BytesOf(split.hi),
                     count * sizeof(uint16_t), device_);
        CopyToDevice(residual + begin * sizeof(int16_t), BytesOf(split.lo), count * sizeof(int16_t),
                     device_);
        CopyToDevice(ties + TieBytes(begin), BytesOf(split.ties), TieBytes(count), device_);
        return absl::OkStatus();
      }));
  place.has_weight = true;
}

void DeviceTier::Put(uint32_t tensor) {
  const PlainCopies plain;
  Order(CurrentStream(device_));
  being_put_ = tensor;
  const absl::Cleanup end = [this] { being_put_.reset(); };
  Place& place = *places_[tensor];
  const auto put = [&](Plane plane, const std::byte* from, uint64_t element_bytes) {
    const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
      CopyToHost(target, from + begin * element_bytes, count * element_bytes, device_);
      return absl::OkStatus();
    };
    ThrowIfError(attachment_.StreamIn(tensor, plane, fill, /*digest=*/0));
  };
  if (place.offsets.residual.has_value()) {
    PutMaster(tensor);
  } else {
    put(Plane::kWeight, place.weight, proto::DtypeBytes(attachment_.tensor(tensor).dtype));
  }
  FaultPoint("tier.put");
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    if (const std::byte* const state = PlaneOf(place, place.offsets.state[i]))
      put(proto::kStatePlanes[i], state, sizeof(float));
  }
  place.is_newer = false;
}

void DeviceTier::PutMaster(uint32_t tensor) {
  const Place& place = *places_[tensor];
  const std::byte* const residual = PlaneOf(place, place.offsets.residual);
  const std::byte* const ties = PlaneOf(place, place.offsets.ties);
  const auto fill = [&](uint64_t begin, uint64_t count, std::byte* target) {
    SplitMasters split(count);
    CopyToHost(BytesOf(split.hi), place.weight + begin * sizeof(uint16_t), count * sizeof(uint16_t),
               device_);
    CopyToHost(BytesOf(split.lo), residual + begin * sizeof(int16_t), count * sizeof(int16_t),
               device_);
    CopyToHost(BytesOf(split.ties), ties + TieBytes(begin), TieBytes(count), device_);
    kernels::TieWriter writer{split.packed.data()};
    kernels::PackTies(split.lo.data(), count, split.ties.data(), &writer);
    kernels::TieReader reader{split.packed.data()};
    kernels::Merge(split.hi.data(), split.lo.data(), count, reinterpret_cast<uint32_t*>(target),
                   &reader);
    return absl::OkStatus();
  };
  ThrowIfError(attachment_.StreamIn(tensor, Plane::kMaster, fill, /*digest=*/0));
}

}  // namespace offload::zero3
