#include "offloadd/rate_meter.h"

#include <functional>
#include <utility>

#include "absl/status/status.h"

namespace offload::daemon {

RateMeter::Load RateMeter::LoadNow() const {
  if (flushes_ > 0 || reading_bytes_ + writing_bytes_ < busy_bytes_) return Load::kLight;
  if (writing_bytes_ == 0) return Load::kReads;
  return reading_bytes_ == 0 ? Load::kWrites : Load::kBoth;
}

int64_t RateMeter::Advance() {
  const int64_t now = clock_.NowNanoseconds();
  elapsed_[static_cast<size_t>(LoadNow())] += now - std::exchange(now_, now);
  return now;
}

swap::TransferWatch RateMeter::Watch(swap::TransferWatch inner) {
  return [this, inner = std::move(inner)](const swap::Transfer& transfer,
                                          std::function<void(absl::Status)> done) {
    done = inner(transfer, std::move(done));
    using Kind = swap::Transfer::Kind;
    const bool flushes = transfer.kind == Kind::kCommit;
    if (!flushes && transfer.bytes == 0) return done;
    const bool writes = transfer.kind == Kind::kWrite || transfer.kind == Kind::kScratchWrite;
    const int64_t now = Advance();
    const Life life = {transfer.bytes, writes, now, elapsed_};
    flushes_ += flushes ? 1 : 0;
    (writes ? writing_bytes_ : reading_bytes_) += transfer.bytes;
    std::function<void(absl::Status)> ended = [this, life, flushes,
                                               done = std::move(done)](absl::Status status) {
      Advance();
      flushes_ -= flushes ? 1 : 0;
      (life.writes ? writing_bytes_ : reading_bytes_) -= life.bytes;
      if (status.ok()) End(life);
      done(std::move(status));
    };
    return ended;
  };
}

void RateMeter::End(const Life& life) {
  const int64_t lasted = now_ - life.begin;
  if (lasted <= 0) return;
  const double bytes_per_nanosecond = static_cast<double>(life.bytes) / static_cast<double>(lasted);
  for (size_t load = 0; load < kLoads; ++load) {
    const double bytes =
        bytes_per_nanosecond * static_cast<double>(elapsed_[load] - life.before[load]);
    (life.writes ? bytes_[load].written_bytes : bytes_[load].read_bytes) += bytes;
  }
}

RateMeter::Sums RateMeter::TakeOf(Load load) {
  const auto index = static_cast<size_t>(load);
  Sums sums = std::exchange(bytes_[index], {});
  sums.seconds = static_cast<double>(elapsed_[index] - taken_[index]) * 1e-9;
  taken_[index] = elapsed_[index];
  return sums;
}

RateMeter::Measured RateMeter::Take() {
  Advance();
  Measured measured;
  measured.reads = TakeOf(Load::kReads);
  measured.writes = TakeOf(Load::kWrites);
  measured.both = TakeOf(Load::kBoth);
  return measured;
}

}  // namespace offload::daemon
