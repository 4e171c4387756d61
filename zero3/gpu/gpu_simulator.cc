#include "zero3/gpu/gpu_simulator.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "accelerator/host_accelerator.h"
#include "accelerator/host_registration.h"
#include "base/error.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "zero3/gpu/careless_accelerator.h"
#include "zero3/gpu/gpu_plan.h"
#include "zero3/gpu/gpu_window.h"
#include "zero3/gpu/gradient_return.h"
#include "zero3/gpu/simulated_slab.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccelerator;
using accelerator::HostRegistration;
using accelerator::Pace;
using accelerator::Stream;
using accelerator::Use;

constexpr uint64_t kGradientSeed = 1000;  // versions of gradients, apart from those of weights

struct Tensor {
  uint64_t weight_bytes = 0;
  bool is_frozen = false;
  std::vector<std::byte> gradient;  // host memory; empty when frozen
  uint64_t arrived = 0;             // gradients, in all
};

// What the seed decides before anything runs.
struct Scene {
  std::vector<Tensor> tensors;
  uint64_t gpu_ram_bytes = 0;
  GpuPlan plan;
  size_t slot_count = 0, stream_count = 0, step_count = 0;
  bool is_staged = false, poisons = false;
  uint64_t leased_bytes_max = 0, bucket_bytes = 0;
  HostAccelerator::Options device;
};

Scene MakeScene(const GpuSimulationOptions& options, Random* random) {
  const bool is_honest = options.mistake == Mistake::kNone;
  Scene scene;
  // Larger than the window at its floor, so that places are used again.
  scene.tensors.resize(6 + random->Below(6));
  std::vector<GpuTensor> planned;
  for (Tensor& tensor : scene.tensors) {
    tensor.weight_bytes = 4 * (1 + random->Below(512));
    // A model with nothing to train has no gradient to lose.
    tensor.is_frozen = &tensor != &scene.tensors.front() && random->OneIn(5);
    if (!tensor.is_frozen) tensor.gradient.resize(tensor.weight_bytes);
    planned.push_back({tensor.weight_bytes, tensor.gradient.size()});
  }
  const uint64_t floor_bytes = MakeGpuPlan(planned, UINT64_MAX / 2)->floor_bytes;
  const uint64_t all_bytes = MakeGpuPlan(planned, UINT64_MAX / 2)->weight_bytes;
  // A window that holds everything has no use for leases and places but once.
  scene.gpu_ram_bytes = floor_bytes + (is_honest ? random->Below(4) * all_bytes / 3 : 0);
  scene.plan = *MakeGpuPlan(planned, scene.gpu_ram_bytes);
  scene.slot_count = 2 + random->Below(3);
  scene.stream_count = 1 + random->Below(3);
  scene.step_count = 3 + random->Below(3);
  scene.is_staged = is_honest && random->OneIn(3);
  scene.poisons = is_honest && random->OneIn(4);
  scene.leased_bytes_max = 2048 * (1 + random->Below(3));
  scene.bucket_bytes = 256 << random->Below(5);
  scene.device = {.seed = random->Next(),
                  .pace = static_cast<Pace>(random->Below(3)),
                  .queries_are_late = !is_honest || random->OneIn(2),
                  .registers_read_only = !scene.is_staged};
  uint64_t largest_gradient_bytes = 0;
  for (const Tensor& tensor : scene.tensors)
    largest_gradient_bytes = std::max(largest_gradient_bytes, DeviceBytes(tensor.gradient.size()));
  scene.device.memory_bytes = scene.gpu_ram_bytes + largest_gradient_bytes;
  if (is_honest && random->OneIn(4)) scene.device.failing_copy = 1 + random->Below(100);
  return scene;
}

CarelessAccelerator::Mistakes OfTheWindow(Mistake mistake) {
  return {.others_wait = mistake != Mistake::kNoWait,
          .own_wait = mistake != Mistake::kEarlyReuse,
          .asks_for_done = mistake != Mistake::kEarlyLeaseReturn};
}
CarelessAccelerator::Mistakes OfTheGradients(Mistake mistake) {
  return {.own_wait = mistake != Mistake::kEarlyGradientCopy,
          .asks_for_done = mistake != Mistake::kEarlyDelivery};
}

class Simulation {
 public:
  explicit Simulation(const GpuSimulationOptions& options)
      : options_(options),
        random_(options.seed),
        scene_(MakeScene(options, &random_)),
        device_(scene_.device),
        window_device_(&device_, OfTheWindow(options.mistake)),
        gradient_device_(&device_, OfTheGradients(options.mistake)),
        slab_(&device_, WeightBytes(), scene_.slot_count, random_.Next()),
        staging_(1024 + random_.Below(4096)) {}

  GpuSimulationResult Run() {
    const absl::Status status = Train();
    const bool may_break = scene_.device.failing_copy > 0;
    if (!status.ok() && !(may_break && ErrorIdOf(status) == ErrorId::kGpuFailed))
      Fail(std::string(status.message()));
    result_.broken_devices = status.ok() ? 0 : 1;
    if (!status.ok()) TryAgain();
    Close();
    Judge();
    return result_;
  }

 private:
  std::vector<uint64_t> WeightBytes() const {
    std::vector<uint64_t> sizes;
    for (const Tensor& tensor : scene_.tensors) sizes.push_back(tensor.weight_bytes);
    return sizes;
  }

  absl::Status Open() {
    OFFLOAD_RETURN_IF_ERROR(Register());
    for (size_t i = 1; i < scene_.stream_count; ++i) {
      OFFLOAD_ASSIGN_OR_RETURN(const Stream stream, device_.StreamCreate());
      streams_.push_back(stream);
    }
    OFFLOAD_ASSIGN_OR_RETURN(side_, device_.StreamCreate());
    OFFLOAD_ASSIGN_OR_RETURN(side_event_, device_.EventCreate());
    const GpuWindow::Options window = {
        .window_bytes = scene_.plan.window_bytes,
        .lookahead_bytes = scene_.plan.lookahead_bytes,
        .leased_bytes_max = scene_.leased_bytes_max,
        .staging = scene_.is_staged ? std::span(staging_) : std::span<std::byte>(),
        .poisons = scene_.poisons};
    OFFLOAD_ASSIGN_OR_RETURN(window_,
                             GpuWindow::Make(&window_device_, &slab_, WeightBytes(), window));
    OFFLOAD_ASSIGN_OR_RETURN(gradients_,
                             GradientReturn::Make(&gradient_device_,
                                                  {.bucket_bytes = scene_.bucket_bytes,
                                                   .held_bytes_max = scene_.plan.gradient_bytes},
                                                  [this](uint32_t tensor) { Deliver(tensor); }));
    return absl::OkStatus();
  }

  absl::Status Register() {
    const auto hold = [&](std::span<const std::byte> range, std::span<const uint64_t> borders,
                          accelerator::HostAccess access) -> absl::Status {
      OFFLOAD_ASSIGN_OR_RETURN(
          HostRegistration held,
          HostRegistration::Register(&device_, range, borders, access, /*max_bytes=*/8192));
      registrations_.push_back(std::move(held));
      return absl::OkStatus();
    };
    const std::vector<uint64_t> borders = slab_.borders();
    OFFLOAD_RETURN_IF_ERROR(hold(slab_.memory(), borders, accelerator::HostAccess::kReadOnly));
    if (registrations_.back().held() == scene_.is_staged) Fail("the slab's registration");
    OFFLOAD_RETURN_IF_ERROR(hold(staging_, {}, accelerator::HostAccess::kReadWrite));
    for (const Tensor& tensor : scene_.tensors) {
      if (!tensor.is_frozen)
        OFFLOAD_RETURN_IF_ERROR(hold(tensor.gradient, {}, accelerator::HostAccess::kReadWrite));
    }
    return absl::OkStatus();
  }

  absl::Status Train() {
    OFFLOAD_RETURN_IF_ERROR(Open());
    for (step_ = 1; step_ <= scene_.step_count; ++step_) {
      OFFLOAD_RETURN_IF_ERROR(ForwardAndBackward());
      OFFLOAD_RETURN_IF_ERROR(Step());
    }
    return absl::OkStatus();
  }

  absl::Status ForwardAndBackward() {
    const auto count = static_cast<uint32_t>(scene_.tensors.size());
    // Now and then a step takes another path than the recorded one.
    const bool deviates = random_.OneIn(4);
    for (uint32_t tensor = 0; tensor < count; ++tensor) {
      if (deviates && random_.OneIn(4)) continue;
      OFFLOAD_RETURN_IF_ERROR(Operator(tensor, /*is_backward=*/false));
    }
    for (uint32_t tensor = count; tensor-- > 0;)
      OFFLOAD_RETURN_IF_ERROR(Operator(tensor, /*is_backward=*/true));
    return absl::OkStatus();
  }

  // An operator of one weight, or of a weight and the one before it.
  absl::Status Operator(uint32_t tensor, bool is_backward) {
    const Stream stream = streams_[random_.Below(streams_.size())];
    if (random_.OneIn(16)) OFFLOAD_RETURN_IF_ERROR(TryUnderCapture(tensor, stream));
    std::vector<uint32_t> used = {tensor};
    if (tensor > 0 && random_.OneIn(4)) used.push_back(tensor - 1);
    for (size_t i = 0; i < used.size(); ++i) {
      const absl::StatusOr<std::byte*> bytes = window_->Pin(used[i], stream);
      if (!bytes.ok()) {
        while (i-- > 0) window_->Unpin(used[i], stream).IgnoreError();
        return bytes.status();
      }
      Read(used[i], stream, *bytes);
      // The test of a stream that the window is not told of needs one before every reuse.
      const bool by_force = options_.mistake == Mistake::kMissingRecordStream;
      if (by_force || random_.OneIn(6)) UseOnSideStream(used[i], stream, *bytes);
    }
    ++result_.operators;
    absl::Status status;
    for (const uint32_t each : used) status.Update(window_->Unpin(each, stream));
    OFFLOAD_RETURN_IF_ERROR(status);
    return is_backward ? GradientOf(tensor, stream) : absl::OkStatus();
  }

  void Read(uint32_t tensor, Stream stream, const std::byte* bytes) {
    const uint64_t size_bytes = scene_.tensors[tensor].weight_bytes;
    device_.NoteUse(stream, Use::kRead, bytes, size_bytes);
    device_.Launch(stream, [this, tensor, bytes, size_bytes, version = slab_.version(tensor)] {
      result_.wrong_weights += HasPattern({bytes, size_bytes}, tensor, version) ? 0 : 1;
    });
  }

  // As a trainer's own kernel on another stream, of which the trainer tells with record_stream.
  void UseOnSideStream(uint32_t tensor, Stream stream, const std::byte* bytes) {
    ++result_.side_streams;
    if (!device_.EventRecord(side_event_, stream).ok()) return;
    if (!device_.StreamWaitEvent(side_, side_event_).ok()) return;
    const bool is_told_first = random_.OneIn(2);
    if (is_told_first) Tell(tensor);
    Read(tensor, side_, bytes);
    if (!is_told_first) Tell(tensor);
  }
  void Tell(uint32_t tensor) {
    if (options_.mistake != Mistake::kMissingRecordStream)
      window_->RecordStream(tensor, side_).IgnoreError();
  }

  absl::Status TryUnderCapture(uint32_t tensor, Stream stream) {
    device_.SetCapturing(stream, true);
    const absl::Status status = window_->Pin(tensor, stream).status();
    device_.SetCapturing(stream, false);
    if (ErrorIdOf(status) != ErrorId::kGpuCapture) {
      if (status.ok()) Fail("a weight was pinned for a stream under capture");
      return status;
    }
    ++result_.refused_captures;
    return absl::OkStatus();
  }

  absl::Status GradientOf(uint32_t number, Stream stream) {
    Tensor& tensor = scene_.tensors[number];
    if (tensor.is_frozen) return absl::OkStatus();
    const uint64_t size_bytes = tensor.gradient.size();
    OFFLOAD_ASSIGN_OR_RETURN(std::byte* const bytes, device_.Malloc(size_bytes));
    device_.NoteUse(stream, Use::kWrite, bytes, size_bytes);
    device_.Launch(stream, [bytes, size_bytes, number, version = kGradientSeed + step_] {
      FillPattern({bytes, size_bytes}, number, version);
    });
    ++result_.gradients;
    return gradients_->Add({.tensor = number,
                            .device = bytes,
                            .host = tensor.gradient.data(),
                            .size_bytes = size_bytes,
                            .drop = [this, bytes] { device_.Free(bytes).IgnoreError(); }},
                           stream);
  }

  void Deliver(uint32_t number) {
    Tensor& tensor = scene_.tensors[number];
    ++tensor.arrived;
    device_.NoteHostUse(Use::kRead, tensor.gradient.data(), tensor.gradient.size());
    if (!HasPattern(tensor.gradient, number, kGradientSeed + step_)) ++result_.wrong_gradients;
  }

  absl::Status Step() {
    OFFLOAD_RETURN_IF_ERROR(gradients_->Flush());
    std::vector<uint32_t> changed;
    for (uint32_t i = 0; i < scene_.tensors.size(); ++i) {
      if (scene_.tensors[i].is_frozen) continue;
      if (scene_.tensors[i].arrived != step_) Fail(absl::StrCat("gradient ", i, " is missing"));
      slab_.Change(i);
      changed.push_back(i);
    }
    ++result_.steps;
    return window_->EndStep(changed);
  }

  // After a failure every call repeats it.
  void TryAgain() {
    if (window_ == nullptr || gradients_ == nullptr) return;
    const absl::Status pin = window_->Pin(0, Stream{}).status();
    if (ErrorIdOf(pin) != ErrorId::kGpuFailed) Fail("a pin on a broken device");
    if (ErrorIdOf(window_->EndStep({})) != ErrorId::kGpuFailed) Fail("a step on a broken device");
  }

  void Close() {
    if (window_ != nullptr) result_ = WithCounters(result_, window_->counters());
    // Whoever used the device on streams of its own knows when it is done.
    gradients_.reset();
    SynchronizeStreams();
    window_.reset();
    registrations_.clear();
    if (side_event_ != accelerator::Event{}) device_.EventDestroy(side_event_).IgnoreError();
    for (size_t i = 1; i < streams_.size(); ++i) device_.StreamDestroy(streams_[i]).IgnoreError();
    if (side_ != Stream{}) device_.StreamDestroy(side_).IgnoreError();
  }

  void SynchronizeStreams() {
    if (side_event_ == accelerator::Event{}) return;
    std::vector<Stream> all = streams_;
    all.push_back(side_);
    for (const Stream stream : all) {
      if (device_.EventRecord(side_event_, stream).ok())
        device_.EventSynchronize(side_event_).IgnoreError();
    }
  }

  static GpuSimulationResult WithCounters(GpuSimulationResult result,
                                          const GpuWindow::Counters& counters) {
    result.misses = counters.misses;
    result.prefetches = counters.prefetches;
    result.host_waits = counters.host_waits;
    result.source_waits = counters.source_waits;
    return result;
  }

  void Judge() {
    result_.staged_runs = scene_.is_staged ? 1 : 0;
    for (const std::string& finding : device_.Violations()) Fail(finding);
    for (const std::string& leftover : device_.Leftovers()) Fail("left over: " + leftover);
    if (!slab_.violation().empty()) Fail(slab_.violation());
    if (slab_.lease_count() > 0) Fail(absl::StrCat(slab_.lease_count(), " leases not returned"));
    if (result_.wrong_weights > 0) Fail("an operator has read wrong weights");
    if (result_.wrong_gradients > 0) Fail("a wrong gradient was delivered");
    if (device_.counters().allocated_bytes_max > scene_.device.memory_bytes)
      Fail("gpu_ram was exceeded");
    const HostAccelerator::Counters counters = device_.counters();
    for (const uint64_t number :
         {counters.synchronizes, counters.waits, counters.copies_to_device,
          counters.bytes_to_device, counters.bytes_to_host, result_.misses, result_.prefetches}) {
      result_.trace_hash = SplitMix64(result_.trace_hash) ^ number;
    }
  }

  void Fail(const std::string& violation) {
    if (result_.violation.empty()) result_.violation = violation;
  }

  const GpuSimulationOptions options_;
  Random random_;
  Scene scene_;
  HostAccelerator device_;
  CarelessAccelerator window_device_, gradient_device_;
  SimulatedSlab slab_;
  std::vector<std::byte> staging_;
  std::vector<HostRegistration> registrations_;
  std::vector<Stream> streams_ = {Stream{}};
  Stream side_;
  accelerator::Event side_event_;
  std::unique_ptr<GpuWindow> window_;
  std::unique_ptr<GradientReturn> gradients_;
  uint64_t step_ = 0;
  GpuSimulationResult result_;
};

}  // namespace

const char* MistakeName(Mistake mistake) {
  switch (mistake) {
    case Mistake::kNone:
      return "none";
    case Mistake::kNoWait:
      return "no wait";
    case Mistake::kEarlyReuse:
      return "early reuse";
    case Mistake::kEarlyLeaseReturn:
      return "early lease return";
    case Mistake::kMissingRecordStream:
      return "missing record_stream";
    case Mistake::kEarlyGradientCopy:
      return "early gradient copy";
    case Mistake::kEarlyDelivery:
      return "early delivery";
  }
  return "unknown";
}

void GpuSimulationResult::Add(const GpuSimulationResult& other) {
  wrong_weights += other.wrong_weights;
  wrong_gradients += other.wrong_gradients;
  steps += other.steps;
  operators += other.operators;
  misses += other.misses;
  prefetches += other.prefetches;
  gradients += other.gradients;
  side_streams += other.side_streams;
  refused_captures += other.refused_captures;
  staged_runs += other.staged_runs;
  broken_devices += other.broken_devices;
  host_waits += other.host_waits;
  source_waits += other.source_waits;
}

GpuSimulationResult SimulateGpu(const GpuSimulationOptions& options) {
  return Simulation(options).Run();
}

}  // namespace offload::zero3
