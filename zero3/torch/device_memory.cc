#include "zero3/torch/device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/shm_abi.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/log.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

using accelerator::HostAccess;
using accelerator::HostRegistration;

// Of the staging buffer, for weights on their way through it.
constexpr uint64_t kRingBytes = proto::kLoadingStagingBytes / 2;

// "off": each rank copies weights for itself, also where devices reach each other.
constexpr char kPeersVariable[] = "OFFLOADD_GPU_PEERS";

// Of the daemon's window, for all ranks: it needs the rest for what it updates and reads ahead.
constexpr uint64_t kPartForLeases = 4;

// Of every tensor of the job, by number; 0 for buffers, which stay where they are.
std::vector<uint64_t> WeightBytes(const Attachment& attachment) {
  std::vector<uint64_t> sizes;
  for (const GpuTensor& tensor : GpuTensorsOf(attachment.input().catalogue.tensors))
    sizes.push_back(tensor.weight_bytes);
  return sizes;
}

}  // namespace

DeviceMemory::DeviceMemory(Attachment& attachment, c10::Device device,
                           std::shared_ptr<accelerator::Accelerator> accelerator,
                           const GpuPlan& plan)
    : device_(device),
      accelerator_(std::move(accelerator)),
      window_bytes_(plan.window_bytes),
      source_(attachment) {
  Register(attachment);
  const std::vector<uint64_t> weight_bytes = WeightBytes(attachment);
  if (attachment.world_size() > 1) JoinPeers(attachment, weight_bytes.size());
  window_ = ValueOrThrow(
      GpuWindow::Make(accelerator_.get(), &source_, weight_bytes, WindowOptions(attachment, plan)),
      device_.str());
  gradients_ = ValueOrThrow(
      DeviceGradients::Make(accelerator_.get(), plan.gradient_bytes, weight_bytes.size()),
      device_.str());
  if (!attachment.input().AddsGradients()) return;
  parts_ = ValueOrThrow(
      DeviceParts::Make(accelerator_.get(), plan.gradient_bytes, attachment.plan().ring_bytes),
      device_.str());
}

DeviceMemory::~DeviceMemory() {
  parts_.reset();
  gradients_.reset();
  if (peers_ != nullptr && peers_->rank() == 0) {
    const GpuWindow::Counters counters = window_->counters();
    Log().info("weights: {} times gathered, {} times offered and copied", counters.gathers,
               counters.taken_back);
  }
  window_.reset();
}

void DeviceMemory::Register(Attachment& attachment) {
  const auto hold = [&](std::span<const std::byte> range, HostAccess access) {
    return ValueOrThrow(HostRegistration::Register(accelerator_.get(), range, {}, access),
                        device_.str());
  };
  client::Session& session = attachment.session();
  slab_ = hold({session.slab(), session.slab_bytes()}, HostAccess::kReadOnly);
  region_ = hold({session.region(), session.region_bytes()}, HostAccess::kReadWrite);
  if (region_.held()) return;
  ThrowStatus(MakeError(ErrorId::kGpuMissing,
                        absl::StrCat("the ", session.region_bytes(),
                                     " bytes that are shared with the daemon cannot be "
                                     "page-locked for ",
                                     device_.str()),
                        "Allow the process to lock them, or lower ram"));
}

// Whether devices reach each other all ranks have to know, and nobody can before they have a device
// each: so they ask each other now.
void DeviceMemory::JoinPeers(Attachment& attachment, size_t tensor_count) {
  const char* const wish = std::getenv(kPeersVariable);
  const bool takes_part = wish == nullptr || std::string_view(wish) != "off";
  PeerGroup::Joined joined = ValueOrThrow(
      PeerGroup::Join(accelerator_.get(), tensor_count,
                      {.rank = attachment.rank(),
                       .world_size = attachment.world_size(),
                       .takes_part = takes_part},
                      [&](const std::string& says) { return attachment.session().Exchange(says); }),
      device_.str());
  peers_ = std::move(joined.group);
  why_no_peers_ = std::move(joined.why_not);
  if (attachment.rank() == 0) Log().info("{}", DescribeWay());
}

std::string DeviceMemory::DescribeWay() const {
  if (peers_ != nullptr) {
    return absl::StrCat("weights: each of ", peers_->world_size(),
                        " devices copies its part from the slab and gathers the others'");
  }
  if (why_no_peers_.empty()) return "weights: copied from the slab";
  return absl::StrCat("weights: each rank copies them from the slab (", why_no_peers_, ")");
}

GpuWindow::Options DeviceMemory::WindowOptions(Attachment& attachment, const GpuPlan& plan) {
  const uint64_t slab_window_bytes = attachment.plan().memory.window_bytes;
  GpuWindow::Options options{
      .window_bytes = plan.window_bytes,
      .lookahead_bytes = plan.lookahead_bytes,
      .leased_bytes_max = slab_window_bytes == 0
                              ? std::numeric_limits<uint64_t>::max()
                              : slab_window_bytes / kPartForLeases / attachment.world_size(),
      .source_is_shared = attachment.world_size() > 1,
      .peers = peers_.get(),
      .source_begin = attachment.session().slab()};
  if (slab_.held()) return options;
  staging_ = attachment.staging().Take(kRingBytes);
  options.staging = {attachment.region() + staging_.region_offset(), kRingBytes};
  return options;
}

// ---- Weights -----------------------------------------------------------------------------------

std::byte* DeviceMemory::Pin(uint32_t tensor) {
  const accelerator::Stream stream = CurrentStream(device_);
  window_->SetRecording(IsTraining());
  std::unique_lock lock(mutex_);
  for (;;) {
    const uint64_t unpins = unpins_;
    lock.unlock();
    const absl::StatusOr<std::byte*> bytes = window_->Pin(tensor, stream);
    lock.lock();
    if (bytes.ok()) {
      holders_.push_back(std::this_thread::get_id());
      unpinned_.NotifyAll();  // who waits waits for one more
      return *bytes;
    }
    if (ErrorIdOf(bytes.status()) != ErrorId::kWindowExhausted) ThrowStatus(bytes.status());
    if (unpins != unpins_) continue;
    // Who pins with nobody beside it has all the room there is.
    if (holders_.empty() || !unpinned_.Wait(lock, WaitGraph::Needs::kAnyHolder, holders_))
      ThrowStatus(bytes.status());
  }
}

absl::Status DeviceMemory::Unpin(uint32_t tensor) {
  const absl::Status status = window_->Unpin(tensor, CurrentStream(device_));
  const std::lock_guard lock(mutex_);
  holders_.erase(std::find(holders_.begin(), holders_.end(), std::this_thread::get_id()));
  ++unpins_;
  unpinned_.NotifyAll();
  return status;
}

void DeviceMemory::RecordStream(uint32_t tensor, const c10::Stream& stream) {
  ThrowIfError(window_->RecordStream(tensor, StreamOf(stream)));
}

void DeviceMemory::Changed(std::span<const uint32_t> tensors) {
  ThrowIfError(window_->Changed(tensors));
}

void DeviceMemory::EndRound(std::span<const uint32_t> changed) {
  ThrowIfError(window_->EndStep(changed));
}

}  // namespace offload::zero3
