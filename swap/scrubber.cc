#include "swap/scrubber.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/string_view.h"
#include "spdlog/spdlog.h"

namespace offload::swap {

Scrubber::Scrubber(Store* store, ScrubberOptions options)
    : store_(store), options_(std::move(options)) {
  for (uint32_t tensor = 0; tensor < store_->spec().tensors.size(); ++tensor) {
    for (const PlaneSpec& plane : store_->spec().tensors[tensor].planes) {
      extent_bytes_max_ =
          std::max(extent_bytes_max_, store_->ExtentBytes({tensor, plane.plane, 0}));
    }
  }
}

double Scrubber::Turn(double now_seconds) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (stopped_ || options_.bytes_per_second <= 0 || extent_bytes_max_ == 0) return kNever;
  if (reading_) return kNever;  // its completion calls again
  if (!begun_) allowed_at_seconds_ = now_seconds + options_.delay_seconds;
  begun_ = true;
  if (now_seconds < allowed_at_seconds_) return allowed_at_seconds_ - now_seconds;
  if (!in_pass_ && !BeginPass(now_seconds)) return options_.pause_seconds;
  ExtentId id;
  while (Next(&id)) {
    stamp_ = store_->stamp(id);
    // What is not committed may be rewritten where it stands at any moment.
    if (stamp_.never_written() || stamp_.sequence == store_->open_sequence()) continue;
    allowed_at_seconds_ =
        now_seconds + static_cast<double>(store_->ExtentBytes(id)) / options_.bytes_per_second;
    Read(id);
    return kNever;
  }
  EndPass(now_seconds);
  return options_.pause_seconds;
}

bool Scrubber::BeginPass(double now_seconds) {
  absl::StatusOr<MappedRegion> buffer = MappedRegion::Anonymous(extent_bytes_max_);
  if (!buffer.ok()) {  // no memory is no news of the drive
    allowed_at_seconds_ = now_seconds + options_.pause_seconds;
    return false;
  }
  buffer_ = *std::move(buffer);
  in_pass_ = true;
  next_ = {};
  next_plane_ = 0;
  pass_began_seconds_ = now_seconds;
  return true;
}

void Scrubber::EndPass(double now_seconds) {
  in_pass_ = false;
  buffer_ = MappedRegion();
  ++counts_.passes;
  counts_.last_pass_seconds = now_seconds - pass_began_seconds_;
  allowed_at_seconds_ = now_seconds + options_.pause_seconds;
}

// In the order in which extents stand on the drive.
bool Scrubber::Next(ExtentId* id) {
  const std::vector<TensorSpec>& tensors = store_->spec().tensors;
  for (; next_.tensor < tensors.size(); ++next_.tensor, next_.index = 0) {
    const std::vector<PlaneSpec>& planes = tensors[next_.tensor].planes;
    for (; next_.index < store_->ExtentCount(next_.tensor); ++next_.index, next_plane_ = 0) {
      if (next_plane_ == planes.size()) continue;
      *id = {next_.tensor, planes[next_plane_++].plane, next_.index};
      return true;
    }
  }
  return false;
}

void Scrubber::Read(const ExtentId& id) {
  reading_ = true;
  const ReadRequest request{id, buffer_.data()};
  const uint64_t size_bytes = store_->ExtentBytes(id);
  store_->Read({&request, 1}, {&stamp_, 1}, [this, id, size_bytes](absl::Status status) {
    if (!status.ok()) return Judge(id, status);
    Verify(id, size_bytes);
  });
}

void Scrubber::Verify(const ExtentId& id, uint64_t size_bytes) {
  auto good = std::make_shared<bool>(false);
  auto work = [this, id, size_bytes, good] {
    *good = store_->Verify(id, stamp_, buffer_.span().first(size_bytes));
  };
  auto done = [this, id, good] {
    if (*good || !IsCurrent(id)) return Judge(id, absl::OkStatus());
    store_->ReadAgain({id, buffer_.data()}, stamp_,
                      [this, id](absl::Status status) { Judge(id, status); });
  };
  if (options_.compute) return options_.compute(std::move(work), std::move(done));
  work();
  done();
}

bool Scrubber::IsCurrent(const ExtentId& id) const {
  const Stamp now = store_->stamp(id);
  return now.sequence == stamp_.sequence && now.crc == stamp_.crc;
}

void Scrubber::Judge(const ExtentId& id, const absl::Status& status) {
  reading_ = false;
  ++counts_.extents;
  counts_.bytes += store_->ExtentBytes(id);
  if (!IsCurrent(id)) {
    ++counts_.overtaken;
    return;
  }
  if (status.ok()) return;
  const std::pair<ExtentId, uint64_t> lost(id, stamp_.sequence);
  if (std::find(known_bad_.begin(), known_bad_.end(), lost) != known_bad_.end()) return;
  ++counts_.bad_extents;
  known_bad_.push_back(lost);
  if (bad_names_.size() < kNamesMax) bad_names_.push_back(NameOf(id));
  spdlog::error("found by the scrubber: {}", ToStd(status.message()));
}

}  // namespace offload::swap
