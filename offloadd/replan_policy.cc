#include "offloadd/replan_policy.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace offload::daemon {
namespace {

constexpr double kDiffers = 0.25;  // of what is assumed
constexpr uint32_t kGapMax = 1024;

// Of a direction that moved `bytes` beside another one that would have taken `other_seconds` alone.
double Within(double assumed, double bytes, double seconds, double other_seconds) {
  const double least = bytes / seconds;
  const double left = seconds - other_seconds;
  const double most = left > 0 ? bytes / left : std::numeric_limits<double>::infinity();
  return std::clamp(assumed, least, std::max(least, most));
}

}  // namespace

RatesFound FindRates(const RateMeter::Measured& measured, const proto::MachineRates& assumed,
                     double bytes) {
  RatesFound found;
  const RateMeter::Sums &reads = measured.reads, &writes = measured.writes, &both = measured.both;
  if (reads.seconds > 0 && reads.read_bytes >= bytes) found.read = reads.read_bytes / reads.seconds;
  if (writes.seconds > 0 && writes.written_bytes >= bytes)
    found.write = writes.written_bytes / writes.seconds;
  if (both.seconds <= 0 || std::min(both.read_bytes, both.written_bytes) < bytes / 2) return found;
  const double read = found.read.value_or(assumed.read_bytes_per_second);
  const double write = found.write.value_or(assumed.write_bytes_per_second);
  const double read_seconds = both.read_bytes / read, write_seconds = both.written_bytes / write;
  if (!found.read.has_value() && !found.write.has_value()) {
    // Both alike, as far as one after the other would have been faster.
    const double speed = std::min(1.0, (read_seconds + write_seconds) / both.seconds);
    found.read = std::max(speed * read, both.read_bytes / both.seconds);
    found.write = std::max(speed * write, both.written_bytes / both.seconds);
  } else if (!found.read.has_value()) {
    found.read = Within(read, both.read_bytes, both.seconds, write_seconds);
  } else if (!found.write.has_value()) {
    found.write = Within(write, both.written_bytes, both.seconds, read_seconds);
  }
  return found;
}

int ReplanPolicy::SideOf(const std::optional<double>& found, double assumed) {
  if (!found.has_value()) return 0;
  return *found < (1 - kDiffers) * assumed ? -1 : *found > (1 + kDiffers) * assumed ? 1 : 0;
}

std::optional<proto::MachineRates> ReplanPolicy::Step(const RateMeter::Measured& measured) {
  if (assumed_.read_bytes_per_second <= 0 || assumed_.write_bytes_per_second <= 0 ||
      options_.bytes <= 0)
    return std::nullopt;
  now_.Add(measured);
  if (pause_ > 0) --pause_;
  if (++steps_ < options_.steps) return std::nullopt;
  const RatesFound found = FindRates(now_, assumed_, options_.bytes);
  if (!found.read.has_value() && !found.write.has_value()) return std::nullopt;  // more steps
  found_ = found;
  return Judge();
}

std::optional<proto::MachineRates> ReplanPolicy::Judge() {
  steps_ = 0;
  const int read_before = read_side_, write_before = write_side_;
  read_side_ = SideOf(found_.read, assumed_.read_bytes_per_second);
  write_side_ = SideOf(found_.write, assumed_.write_bytes_per_second);
  const bool reads_differ = read_side_ != 0 && read_side_ == read_before;
  const bool writes_differ = write_side_ != 0 && write_side_ == write_before;
  RateMeter::Measured together = std::exchange(before_, std::exchange(now_, {}));
  if ((!reads_differ && !writes_differ) || pause_ > 0) return std::nullopt;
  together.Add(before_);
  const RatesFound found = FindRates(together, assumed_, options_.bytes);
  // What one judgement alone has found is taken, too, where there is to be a change.
  assumed_.read_bytes_per_second = found.read.value_or(assumed_.read_bytes_per_second);
  assumed_.write_bytes_per_second = found.write.value_or(assumed_.write_bytes_per_second);
  read_side_ = write_side_ = 0;
  pause_ = std::exchange(gap_, std::min(2 * gap_, kGapMax));
  return assumed_;
}

}  // namespace offload::daemon
