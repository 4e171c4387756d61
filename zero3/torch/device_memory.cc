#include "zero3/torch/device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "proto/shm_abi.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/gpu/slice_exchange.h"
#include "zero3/torch/device_parts.h"
#include "zero3/torch/device_tier.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/exchanged_parts.h"
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

// What ranks agree on of a tensor: its weight, and its gradient.
constexpr size_t kItemsPerTensor = 2;

constexpr uint64_t kPartsOfGradientBytes = 3;

// Of the window of spilled gradients, for those whose copies are waited for together.
constexpr uint64_t kPartForBuckets = 8;

// Pins between two tellings of the daemon.
constexpr uint64_t kUnpinsUntold = 64;

// Of every tensor of the job, by number; 0 for buffers, and for what is in the tier, which stay
// where they are.
std::vector<uint64_t> WeightBytes(const Attachment& attachment, const GpuPlan& plan) {
  std::vector<uint64_t> sizes;
  for (const GpuTensor& tensor : GpuTensorsOf(attachment.input().catalogue.tensors))
    sizes.push_back(plan.Stays(sizes.size()) ? 0 : tensor.weight_bytes);
  return sizes;
}

// Null where all have room. One half of it is for those that come back, the other for those on
// their way to the host.
std::unique_ptr<GradientsAhead> MakeGradientsAhead(const Attachment& attachment,
                                                   const GpuPlan& plan) {
  std::vector<uint64_t> slots, spilled;
  uint64_t all_bytes = 0;
  for (const GpuTensor& tensor : GpuTensorsOf(attachment.input().catalogue.tensors)) {
    const size_t i = slots.size();
    all_bytes += DeviceBytes(tensor.gradient_bytes);
    slots.push_back(plan.Stays(i) ? 0 : DeviceBytes(tensor.gradient_bytes));
    const bool is_spilled =
        attachment.plan().memory.gradients[i].home == proto::GradientHome::kScratch;
    spilled.push_back(is_spilled ? slots.back() : 0);
  }
  if (all_bytes <= plan.gradient_bytes) return nullptr;
  const uint64_t ahead_bytes = plan.gradient_bytes / 2;
  return std::make_unique<GradientsAhead>(
      std::move(slots), ahead_bytes, std::move(spilled),
      ahead_bytes + attachment.plan().gradient_window_bytes / 2);
}

// Spilled gradients are written as soon as they are known to have come to their window.
uint64_t BucketBytes(const Attachment& attachment) {
  const uint64_t bucket_bytes = GradientReturn::Options().bucket_bytes;
  if (!attachment.plan().gradients_spilled) return bucket_bytes;
  return std::min(bucket_bytes, attachment.plan().gradient_window_bytes / kPartForBuckets);
}

// Where copies begin and end at the latest: none crosses from one registration into another.
std::vector<uint64_t> SlabBorders(const proto::SlabLayout& slab) {
  std::vector<uint64_t> borders = slab.weight_offset;
  borders.insert(borders.end(), slab.sum_offset.begin(), slab.sum_offset.end());
  borders.insert(borders.end(), {slab.window_offset, slab.pipeline_offset, slab.sum_blocks_offset});
  return borders;
}

std::vector<uint64_t> RegionBorders(const Plan& plan) {
  std::vector<uint64_t> borders = {plan.staging_offset, plan.pins_offset,
                                   plan.gradient_window_offset, plan.ring_offset,
                                   plan.first_staging_offset};
  for (const proto::GradientPlacement& gradient : plan.memory.gradients) {
    if (gradient.home == proto::GradientHome::kRegion) borders.push_back(gradient.offset_bytes);
  }
  return borders;
}

}  // namespace

DeviceMemory::DeviceMemory(Attachment& attachment, c10::Device device,
                           std::shared_ptr<accelerator::Accelerator> accelerator,
                           const GpuPlan& plan, uint64_t gpu_ram_bytes, bool averages_gradients)
    : device_(device),
      accelerator_(std::move(accelerator)),
      window_bytes_(plan.window_bytes),
      source_(attachment),
      gpu_ram_bytes_(gpu_ram_bytes),
      words_(*proto::GpuWordsOf(attachment.region())) {
  Register(attachment);
  const std::vector<uint64_t> weight_bytes = WeightBytes(attachment, plan);
  if (attachment.world_size() > 1) JoinPeers(attachment, weight_bytes.size());
  MakeExchange(attachment, plan, averages_gradients);
  if (attachment.rank() == 0 && attachment.world_size() > 1) {
    for (const absl::string_view way : absl::StrSplit(DescribeWay(), '\n'))
      Log().info("{}", std::string(way));
  }
  window_ = ValueOrThrow(
      GpuWindow::Make(accelerator_.get(), &source_, weight_bytes, WindowOptions(attachment, plan)),
      device_.str());
  if (!plan.stays.empty())
    tier_ = std::make_unique<DeviceTier>(attachment, device_, accelerator_.get(), plan);
  gradients_ =
      ValueOrThrow(DeviceGradients::Make(accelerator_.get(), plan.gradient_bytes,
                                         weight_bytes.size(), BucketBytes(attachment), plan.stays),
                   device_.str());
  gradients_ahead_ = MakeGradientsAhead(attachment, plan);
  if (attachment.input().AddsGradients()) MakeParts(attachment, plan);
  Publish();
}

// The window's thread follows the other ranks until nothing of an exchange is under way.
DeviceMemory::~DeviceMemory() {
  exchanged_parts_.reset();
  parts_.reset();
  if (exchange_ != nullptr) exchange_->Drain();
  if (gradients_ != nullptr) {
    const DeviceGradients::Counters counters = gradients_->counters();
    if (counters.fetched + counters.fetched_ahead > 0) {
      Log().info("gradients: {} times back on the device ahead of their use, {} times for it",
                 counters.fetched_ahead, counters.fetched);
    }
    if (counters.read + counters.read_ahead > 0) {
      Log().info("gradients: {} times read from the drive ahead of their use, {} times for it",
                 counters.read_ahead, counters.read);
    }
  }
  gradients_.reset();
  if (peers_ != nullptr && peers_->rank() == 0) {
    const GpuWindow::Counters counters = window_->counters();
    Log().info("weights: {} times gathered, {} times offered and copied", counters.gathers,
               counters.taken_back);
  }
  if (exchange_ != nullptr && peers_->rank() == 0) {
    const SliceExchange::Counters counters = exchange_->counters();
    Log().info("gradients: {} times exchanged, {} times offered and copied", counters.exchanged,
               counters.taken_back);
  }
  window_.reset();
  tier_.reset();
  exchange_.reset();
}

// Of what gpu_ram has for gradients a third each: slices and their sums, gradients that are
// offered, and copies on their way.
void DeviceMemory::MakeExchange(Attachment& attachment, const GpuPlan& plan,
                                bool averages_gradients) {
  if (peers_ == nullptr || !attachment.input().AddsGradients()) return;
  const size_t tensor_count = attachment.input().catalogue.tensors.size();
  exchange_ = ValueOrThrow(
      SliceExchange::Make(accelerator_.get(),
                          {.peers = peers_.get(),
                           .first_item = static_cast<uint32_t>(tensor_count),
                           .tensor_count = tensor_count,
                           .area_bytes = plan.gradient_bytes / kPartsOfGradientBytes,
                           .factor = averages_gradients ? 1.0 / attachment.world_size() : 1.0}),
      device_.str());
}

void DeviceMemory::MakeParts(Attachment& attachment, const GpuPlan& plan) {
  const uint64_t copied_bytes =
      exchange_ == nullptr ? plan.gradient_bytes : plan.gradient_bytes / kPartsOfGradientBytes;
  parts_ = ValueOrThrow(
      DeviceParts::Make(accelerator_.get(), copied_bytes, attachment.plan().ring_bytes),
      device_.str());
  std::vector<ExchangedParts::Tensor> tensors;
  for (const proto::Tensor& tensor : attachment.input().catalogue.tensors)
    tensors.push_back({.dtype = tensor.dtype, .element_count = tensor.element_count});
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].takes_slices =
        attachment.plan().memory.gradients[i].home == proto::GradientHome::kSlab;
  }
  exchanged_parts_ =
      std::make_unique<ExchangedParts>(parts_.get(), exchange_.get(), std::move(tensors));
  if (exchange_ != nullptr) exchange_->Connect([this] { return window_->FollowAgreement(); });
}

uint64_t DeviceMemory::bytes_max_ever() const {
  return window_bytes_ + (tier_ != nullptr ? tier_->size_bytes() : 0) +
         gradients_->bytes_max_ever() +
         (exchanged_parts_ != nullptr ? exchanged_parts_->bytes_max_ever() : 0);
}

// What is planned and no more: behind that there are addresses without memory, which page-locking
// would bring.
void DeviceMemory::Register(Attachment& attachment) {
  const auto hold = [&](std::span<const std::byte> range, std::vector<uint64_t> borders,
                        HostAccess access) {
    std::sort(borders.begin(), borders.end());
    return ValueOrThrow(HostRegistration::Register(accelerator_.get(), range, borders, access),
                        device_.str());
  };
  const client::Session& session = attachment.session();
  const Plan& plan = attachment.plan();
  slab_ =
      hold({session.slab(), plan.slab.total_bytes}, SlabBorders(plan.slab), HostAccess::kReadOnly);
  const uint64_t region_bytes =
      attachment.rank() == 0 ? plan.memory.region_bytes : plan.memory.other_region_bytes;
  region_ = hold({attachment.region(), region_bytes}, RegionBorders(plan), HostAccess::kReadWrite);
  if (region_.held()) return;
  ThrowStatus(MakeError(ErrorId::kGpuMissing,
                        absl::StrCat("the ", region_bytes,
                                     " bytes that are shared with the daemon cannot be "
                                     "page-locked for ",
                                     device_.str()),
                        "Allow the process to lock them, or lower ram"));
}

// Whether devices reach each other all ranks have to know, and nobody can before they have a device
// each: so they ask each other now.
void DeviceMemory::JoinPeers(Attachment& attachment, size_t tensor_count) {
  const char* const wish = std::getenv(kPeersVariable);
  const std::string_view peers = wish == nullptr ? "" : wish;
  PeerGroup::Joined joined = ValueOrThrow(
      PeerGroup::Join(accelerator_.get(), kItemsPerTensor * tensor_count,
                      {.rank = attachment.rank(),
                       .world_size = attachment.world_size(),
                       .takes_part = peers != "off",
                       .asks = peers != "always"},
                      [&](const std::string& says) { return attachment.session().Exchange(says); }),
      device_.str());
  peers_ = std::move(joined.group);
  why_no_peers_ = std::move(joined.why_not);
}

std::string DeviceMemory::DescribeWay() const {
  if (peers_ != nullptr) {
    return absl::StrCat(
        "weights: each of ", peers_->world_size(),
        " devices copies its part from the slab and gathers the others'",
        exchange_ == nullptr
            ? ""
            : absl::StrCat("\ngradients: each of ", peers_->world_size(),
                           " devices adds a slice of all ranks', in ",
                           FormatBytes(exchange_->area_bytes()), " of gpu_ram, and copies that"));
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
      .other_work = exchange_.get(),
      .source_begin = attachment.session().slab()};
  if (slab_.held()) return options;
  staging_ = attachment.staging().Take(kRingBytes);
  options.staging = {attachment.region() + staging_.region_offset(), kRingBytes};
  return options;
}

// ---- Weights -----------------------------------------------------------------------------------

std::byte* DeviceMemory::Pin(uint32_t tensor) {
  if (tier_ != nullptr) tier_->CheckWhole();
  const accelerator::Stream stream = CurrentStream(device_);
  if (Stays(tensor)) {
    ThrowIfError(CheckIsNotCaptured(*accelerator_, tensor, stream));
    return tier_->Pin(tensor);
  }
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
  if (Stays(tensor)) {
    tier_->Unpin();
    return absl::OkStatus();
  }
  const absl::Status status = window_->Unpin(tensor, CurrentStream(device_));
  std::unique_lock lock(mutex_);
  holders_.erase(std::find(holders_.begin(), holders_.end(), std::this_thread::get_id()));
  const bool tells = ++unpins_ % kUnpinsUntold == 0;
  unpinned_.NotifyAll();
  lock.unlock();
  if (tells) Publish();
  return status;
}

void DeviceMemory::RecordStream(uint32_t tensor, const c10::Stream& stream) {
  if (Stays(tensor)) return;  // its memory is nobody else's
  ThrowIfError(window_->RecordStream(tensor, StreamOf(stream)));
}

bool DeviceMemory::Stays(uint32_t tensor) const { return tier_ != nullptr && tier_->Has(tensor); }

void DeviceMemory::BeforeRead(uint32_t tensor) {
  if (tier_ != nullptr) tier_->BeforeRead(tensor);
}

void DeviceMemory::BeforePut(uint32_t tensor) {
  if (tier_ != nullptr) tier_->BeforePut(tensor);
}

void DeviceMemory::Changed(std::span<const uint32_t> tensors) {
  for (const uint32_t tensor : tensors) {
    if (Stays(tensor)) tier_->Changed(tensor);
  }
  ThrowIfError(window_->Changed(tensors));
}

void DeviceMemory::EndRound(std::span<const uint32_t> changed) {
  ThrowIfError(window_->EndStep(changed));
  if (gradients_ahead_ != nullptr) gradients_ahead_->EndStep();
  Publish();
}

void DeviceMemory::Publish() {
  constexpr double kNanosecond = 1e-9;
  const GpuWindow::Counters window = window_->counters();
  const DeviceGradients::Counters gradients = gradients_->counters();
  const GradientReturn::Counters parts =
      exchanged_parts_ != nullptr ? exchanged_parts_->counters() : GradientReturn::Counters();
  const double stall_seconds = window.stall_seconds + gradients.stall_seconds + parts.stall_seconds;
  proto::StoreGpuWords(
      {.device = device_.str(),
       .gpu_ram_bytes = gpu_ram_bytes_,
       .window_bytes = window_bytes_,
       .used_bytes =
           window.used_bytes + gradients_->bytes() + (tier_ != nullptr ? tier_->size_bytes() : 0),
       .peak_bytes = bytes_max_ever(),
       .bytes_to_device = window.bytes_to_device + gradients.fetched_bytes + fetched_bytes_,
       .bytes_to_host = gradients_->bytes_to_host() + parts.bytes_to_host,
       .stall_nanoseconds = static_cast<uint64_t>(stall_seconds / kNanosecond),
       .host_waits = window.host_waits},
      words_);
}

}  // namespace offload::zero3
