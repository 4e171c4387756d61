#include "zero3/torch/gradient_stream.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/slab_layout.h"

namespace offload::zero3 {
namespace {

constexpr std::chrono::microseconds kNormPause{50};

std::optional<float> NormOf(uint64_t word) {
  if ((proto::GradientBitsOf(word) & proto::kGradientNorm) == 0) return std::nullopt;
  return std::bit_cast<float>(proto::GradientNormOf(word));
}

// Every rank makes the same list: the tensors by size, dealt out like cards.
std::vector<uint32_t> ShareOf(const GradientStream::Options& options) {
  std::vector<uint32_t> by_size(options.tensors.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  const auto size_bytes = [&](uint32_t tensor) {
    return options.tensors[tensor].element_count * options.tensors[tensor].element_bytes;
  };
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](uint32_t a, uint32_t b) { return size_bytes(a) > size_bytes(b); });
  std::erase_if(by_size, [&](uint32_t tensor) { return !options.tensors[tensor].trainable; });
  std::vector<uint32_t> share;
  for (size_t i = options.rank; i < by_size.size(); i += options.world_size) {
    share.push_back(by_size[i]);
  }
  return share;
}

}  // namespace

GradientStream::GradientStream(GradientChannel* channel, GradientOwner* owner, Options options)
    : channel_(channel),
      owner_(owner),
      options_(std::move(options)),
      share_(ShareOf(options_)),
      ring_(options_.ring_offset, options_.ring_bytes,
            [channel](client::Ticket ticket) { return channel->Wait(ticket); }),
      step_(options_.step),
      patience_left_(options_.norm_patience),
      progress_(options_.tensors.size()) {}

// ---- Backward ----------------------------------------------------------------------------------

absl::Status GradientStream::EnterBackward(int64_t backward) {
  absl::MutexLock order(&order_mutex_);
  bool outermost = false, begun = false;
  {
    absl::MutexLock lock(&mutex_);
    OFFLOAD_RETURN_IF_ERROR(broken_);
    if (backwards_.contains(backward)) return absl::OkStatus();
    outermost = backwards_.empty();
    begun = begun_;
  }
  if (outermost && (!begun || owner_->HasZeroed())) OFFLOAD_RETURN_IF_ERROR(BeginGeneration());
  owner_->WatchEnd(backward);
  if (outermost) OpenPass();
  absl::MutexLock lock(&mutex_);
  backwards_.insert(backward);
  return absl::OkStatus();
}

absl::Status GradientStream::BeginGeneration() {
  OFFLOAD_RETURN_IF_ERROR(owner_->LetGoOfSums());
  uint64_t step = 0;
  {
    absl::MutexLock lock(&mutex_);
    begun_ = true;
    passes_ = shared_ = 0;
    patience_left_ = options_.norm_patience;
    progress_.assign(progress_.size(), Progress());
    step = step_;
  }
  Keep(channel_->BeginGradients(step));
  return absl::OkStatus();
}

void GradientStream::OpenPass() {
  absl::MutexLock lock(&mutex_);
  pass_runs_ = true;
  pass_begin_ = passes_;
  for (Progress& progress : progress_) progress.norm.reset();
}

uint32_t GradientStream::EnterPart(uint32_t tensor, proto::GradientStart& start) {
  std::optional<uint32_t> ended;
  uint32_t pass = 0;
  {
    absl::MutexLock lock(&mutex_);
    OFFLOAD_CHECK(pass_runs_) << options_.tensors[tensor].name << " without a backward";
    Progress& progress = progress_[tensor];
    if (progress.delivered == passes_ + 1) ended = passes_++;
    if (!std::exchange(progress.given, true)) progress.start = start;
    start = progress.start;
    progress.delivered = passes_ + 1;
    pass = passes_;
  }
  if (ended.has_value()) Keep(channel_->EndPass(*ended, /*wait=*/false));
  return pass;
}

absl::Status GradientStream::Deliver(uint32_t tensor, proto::GradientStart start,
                                     const std::byte* bytes) {
  absl::MutexLock order(&order_mutex_);
  {
    absl::MutexLock lock(&mutex_);
    OFFLOAD_RETURN_IF_ERROR(broken_);
  }
  const uint32_t pass = EnterPart(tensor, start);
  const uint64_t element_count = options_.tensors[tensor].element_count;
  const uint64_t element_bytes = options_.tensors[tensor].element_bytes;
  for (uint64_t begin = 0; begin < element_count; begin += proto::kExtentElements) {
    const uint64_t count = std::min<uint64_t>(element_count - begin, proto::kExtentElements);
    const absl::StatusOr<uint64_t> room = ring_.Take(count * element_bytes);
    if (!room.ok()) {
      absl::MutexLock lock(&mutex_);
      if (begin > 0) broken_ = room.status();
      return room.status();
    }
    const uint64_t offset = *room;
    if (bytes != nullptr)  // otherwise the channel brings them, from a device
      std::memcpy(options_.region + offset, bytes + begin * element_bytes, count * element_bytes);
    ring_.Deliver(offset, count * element_bytes,
                  channel_->DeliverGradient(tensor, pass, start, begin, count, offset));
  }
  return absl::OkStatus();
}

std::vector<uint32_t> GradientStream::MissingTensors() const {
  std::vector<uint32_t> missing;
  for (uint32_t tensor = 0; tensor < progress_.size(); ++tensor) {
    if (options_.tensors[tensor].trainable && progress_[tensor].delivered <= pass_begin_)
      missing.push_back(tensor);
  }
  return missing;
}

absl::StatusOr<std::vector<uint32_t>> GradientStream::LeaveBackward(int64_t backward, bool failed) {
  std::vector<uint32_t> missing;
  client::Ticket ended = 0;
  uint32_t pass = 0;
  {
    absl::MutexLock order(&order_mutex_);
    {
      absl::MutexLock lock(&mutex_);
      if (backwards_.erase(backward) == 0 || !backwards_.empty()) return missing;
      if (!failed) missing = MissingTensors();
      pass = passes_++;
      pass_runs_ = false;
      if (!broken_.ok()) return failed ? absl::StatusOr<std::vector<uint32_t>>(missing) : broken_;
    }
    ended = channel_->EndPass(pass, /*wait=*/!missing.empty());
  }
  if (missing.empty()) {
    Keep(ended);
  } else {
    OFFLOAD_RETURN_IF_ERROR(channel_->Wait(ended));
  }
  // Others may have gone on: what they give in a later pass is not there for this rank yet.
  absl::MutexLock lock(&mutex_);
  std::erase_if(missing, [&](uint32_t tensor) {
    const uint64_t word = channel_->GradientWord(tensor);
    return !IsOfThisStep(word) || !proto::HasBegunBy(word, pass);
  });
  return missing;
}

// ---- Looking -----------------------------------------------------------------------------------

absl::StatusOr<uint64_t> GradientStream::Look(uint32_t tensor) {
  uint32_t passes = 0;
  {
    absl::MutexLock lock(&mutex_);
    OFFLOAD_RETURN_IF_ERROR(broken_);
    if (!begun_) return channel_->GradientWord(tensor);  // the step has waited for the sums
    if (pass_runs_) {
      return MakeError(
          ErrorId::kGradientOfRanks,
          absl::StrCat("the gradient of parameter '", options_.tensors[tensor].name,
                       "' is read while backward runs, and the other ranks' parts are not there"),
          "Read gradients after backward() has returned");
    }
    if (progress_[tensor].looked == passes_ + 1) return channel_->GradientWord(tensor);
    passes = passes_;
  }
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t word, channel_->AwaitGradient(tensor, passes));
  absl::MutexLock lock(&mutex_);
  progress_[tensor].looked = passes + 1;
  return word;
}

bool GradientStream::IsOfThisStep(uint64_t word) const {
  const uint64_t step = begun_ ? step_ : step_ - 1;
  return (proto::GradientBitsOf(word) & proto::kGradientExists) != 0 &&
         proto::GradientStepOf(word) == (step & 0xffffff);
}

bool GradientStream::Exists(uint32_t tensor) const {
  absl::MutexLock lock(&mutex_);
  return IsOfThisStep(channel_->GradientWord(tensor));
}

absl::StatusOr<float> GradientStream::Norm(uint32_t tensor) {
  OFFLOAD_ASSIGN_OR_RETURN(uint64_t word, Look(tensor));
  OFFLOAD_RETURN_IF_ERROR(TakeShare());
  std::optional<float> norm;
  {
    absl::MutexLock lock(&mutex_);
    norm = progress_[tensor].norm;
  }
  if (!norm.has_value()) norm = WaitForNorm(tensor);
  if (norm.has_value()) return *norm;
  OFFLOAD_ASSIGN_OR_RETURN(norm, TakeNorm(tensor, word));
  OFFLOAD_CHECK(norm.has_value()) << options_.tensors[tensor].name << " has no gradient";
  return *norm;
}

absl::Status GradientStream::TakeShare() {
  {
    absl::MutexLock lock(&mutex_);
    if (!begun_ || std::exchange(shared_, passes_ + 1) == passes_ + 1) return absl::OkStatus();
  }
  for (const uint32_t tensor : share_) {
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t word, Look(tensor));
    if (NormOf(word).has_value()) continue;
    OFFLOAD_RETURN_IF_ERROR(TakeNorm(tensor, word).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<float>> GradientStream::TakeNorm(uint32_t tensor, uint64_t word) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::optional<float> norm, owner_->ComputeNorm(tensor));
  if (!norm.has_value()) return norm;
  bool publishes = false;
  {
    absl::MutexLock lock(&mutex_);
    progress_[tensor].norm = norm;
    publishes = begun_ && IsOfThisStep(word);
  }
  if (publishes) Keep(channel_->PublishNorm(tensor, *norm));
  return norm;
}

// Only sums of this step are shared: nobody else takes the norm of another.
std::optional<float> GradientStream::WaitForNorm(uint32_t tensor) {
  for (;;) {
    const uint64_t word = channel_->GradientWord(tensor);
    if (const std::optional<float> norm = NormOf(word)) return norm;
    {
      absl::MutexLock lock(&mutex_);
      if (!begun_ || !IsOfThisStep(word) || patience_left_ <= kNormPause) return std::nullopt;
      patience_left_ -= kNormPause;
    }
    std::this_thread::sleep_for(kNormPause);
  }
}

// ---- The step ----------------------------------------------------------------------------------

absl::Status GradientStream::EnterStep() {
  absl::MutexLock order(&order_mutex_);
  {
    absl::MutexLock lock(&mutex_);
    OFFLOAD_RETURN_IF_ERROR(broken_);
    if (begun_) return absl::OkStatus();
  }
  return BeginGeneration();
}

uint32_t GradientStream::passes() const {
  absl::MutexLock lock(&mutex_);
  return passes_;
}

uint64_t GradientStream::step() const {
  absl::MutexLock lock(&mutex_);
  return step_;
}

absl::Status GradientStream::Stepped() {
  {
    absl::MutexLock lock(&mutex_);
    ++step_;
    begun_ = false;
    passes_ = shared_ = 0;
  }
  return ring_.WaitForAll();
}

}  // namespace offload::zero3
