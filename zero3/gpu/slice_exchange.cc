#include "zero3/gpu/slice_exchange.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/gradient_slices.h"
#include "proto/slab_layout.h"
#include "zero3/gpu/gpu_plan.h"

namespace offload::zero3 {
namespace {

// Between two looks at whether others may yet offer.
constexpr std::chrono::milliseconds kPause(10);

// A position counts steps, beginnings of sums in one, and passes. Two bits of the stamp that has to
// be the same in all ranks are for what sums begin with.
constexpr uint64_t kPassBits = 18, kBeginBits = 10, kStartBits = 2;

uint64_t BytesOf(const SliceExchange::Gradient& gradient) {
  return gradient.element_count * kernels::DtypeBytes(gradient.dtype);
}

uint32_t ExtentsOf(uint64_t element_count) {
  return static_cast<uint32_t>((element_count + proto::kExtentElements - 1) /
                               proto::kExtentElements);
}

}  // namespace

// Keeps a gradient, and the slices of its sum.
class SliceExchange::Holder {
 public:
  Holder(SliceExchange* exchange, const Gradient& gradient)
      : exchange_(exchange),
        tensor_(gradient.tensor),
        gradient_bytes_(BytesOf(gradient)),
        owner_(gradient.owner) {}
  ~Holder() {
    owner_.reset();
    exchange_->LetGo(tensor_, gradient_bytes_);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

 private:
  SliceExchange* const exchange_;
  const uint32_t tensor_;
  const uint64_t gradient_bytes_;
  std::shared_ptr<const void> owner_;
};

SliceExchange::SliceExchange(accelerator::Accelerator* accelerator, const Options& options)
    : accelerator_(accelerator),
      sums_(accelerator::SummingDeviceOf(accelerator)),
      options_(options),
      events_(accelerator),
      free_(kDeviceAlignment),
      histories_(options.tensor_count),
      offers_(options.tensor_count) {}

absl::StatusOr<std::unique_ptr<SliceExchange>> SliceExchange::Make(
    accelerator::Accelerator* accelerator, const Options& options) {
  OFFLOAD_CHECK(accelerator::SummingDeviceOf(accelerator) != nullptr) << "a device that cannot add";
  std::unique_ptr<SliceExchange> made(new SliceExchange(accelerator, options));
  const uint64_t area_bytes = options.area_bytes / kDeviceAlignment * kDeviceAlignment;
  if (area_bytes == 0) return made;
  OFFLOAD_ASSIGN_OR_RETURN(made->area_, accelerator->Malloc(area_bytes));
  made->free_.Add(0, area_bytes);
  return made;
}

SliceExchange::~SliceExchange() {
  Drain();
  issued_ = nullptr;
  offers_.clear();
  if (area_ != nullptr) accelerator_->Free(area_).IgnoreError();
}

void SliceExchange::Connect(std::function<absl::Status()> issue) {
  const std::lock_guard lock(mutex_);
  issue_ = std::move(issue);
}

// ---- Positions ---------------------------------------------------------------------------------

void SliceExchange::Begin(uint64_t step) {
  const std::lock_guard lock(mutex_);
  begins_ = step == step_ ? begins_ + 1 : 0;
  step_ = step;
  ++generation_;
  patience_left_ = options_.patience;
  for (uint32_t tensor = 0; tensor < histories_.size(); ++tensor) {
    OFFLOAD_CHECK(offers_[tensor] == nullptr) << "tensor " << tensor << " is offered";
    DropSum(histories_[tensor]);
  }
}

uint64_t SliceExchange::PositionOf(uint32_t pass) const {
  return (step_ << kBeginBits | begins_) << kPassBits | pass;
}

// Its sums may have begun anew since it was looked at.
SliceExchange::History& SliceExchange::HistoryOf(uint32_t tensor) {
  History& history = histories_[tensor];
  if (history.generation != generation_) {
    DropSum(history);
    history.generation = generation_;
    history.way = Way::kNone;
  }
  return history;
}

// ---- Room --------------------------------------------------------------------------------------

uint64_t SliceExchange::SlicesBytes(const Gradient& gradient) const {
  const PeerGroup& peers = *options_.peers;
  uint64_t size_bytes = 0;
  for (uint32_t extent = 0; extent < ExtentsOf(gradient.element_count); ++extent) {
    const uint64_t elements = proto::ExtentElements(gradient.element_count, extent);
    size_bytes += DeviceBytes(proto::SliceElements(elements, peers.world_size(), peers.rank()) *
                              kernels::DtypeBytes(gradient.dtype));
  }
  return size_bytes;
}

// Sums of earlier passes make room for new ones.
std::optional<SliceExchange::Room> SliceExchange::TakeRoom(uint64_t size_bytes, uint32_t but) {
  for (;;) {
    if (const std::optional<uint64_t> offset = free_.Take(size_bytes))
      return Room{*offset, size_bytes};
    if (!DropOldestSum(but)) return std::nullopt;
  }
}

bool SliceExchange::DropOldestSum(uint32_t but) {
  History* oldest = nullptr;
  for (uint32_t tensor = 0; tensor < histories_.size(); ++tensor) {
    History& history = histories_[tensor];
    if (tensor == but || !history.sum.has_value() || history.holders > 0) continue;
    if (offers_[tensor] != nullptr) continue;  // goes on with it
    if (oldest == nullptr || history.last_use < oldest->last_use) oldest = &history;
  }
  if (oldest == nullptr) return false;
  DropSum(*oldest);
  return true;
}

// Of one that somebody holds when they let go.
void SliceExchange::DropSum(History& history) {
  history.way = history.way == Way::kNone ? Way::kNone : Way::kWhole;
  if (!history.sum.has_value() || history.holders > 0) return;
  free_.Return(history.sum->offset, history.sum->size_bytes);
  history.sum.reset();
}

void SliceExchange::LetGo(uint32_t tensor, uint64_t gradient_bytes) {
  const std::lock_guard lock(mutex_);
  held_bytes_ -= gradient_bytes;
  History& history = histories_[tensor];
  OFFLOAD_CHECK(history.holders > 0) << "tensor " << tensor;
  --history.holders;
  if (history.generation != generation_ || history.way == Way::kWhole) DropSum(history);
}

// ---- Offers ------------------------------------------------------------------------------------

bool SliceExchange::Serves(const Gradient& gradient) const {
  const bool is_added =
      gradient.dtype == kernels::Dtype::kFloat32 || gradient.dtype == kernels::Dtype::kBFloat16;
  if (!is_added || BytesOf(gradient) < options_.exchanged_bytes_min) return false;
  const uint64_t last =
      proto::ExtentElements(gradient.element_count, ExtentsOf(gradient.element_count) - 1);
  return proto::CanBeSliced(last, options_.peers->world_size()) &&
         options_.peers->world_size() * SlicesBytes(gradient) <= options_.area_bytes;
}

bool SliceExchange::MayOffer(const Gradient& gradient) const {
  if (!Serves(gradient)) return false;
  const std::lock_guard lock(mutex_);
  if (gradient.pass >> kPassBits != 0 || begins_ >> kBeginBits != 0) return false;
  if (issue_ == nullptr || step_ == 0) return false;
  const History& history = histories_[gradient.tensor];
  if (history.holders > 0 || offers_[gradient.tensor] != nullptr) return false;
  if (history.generation != generation_ || history.way == Way::kNone)
    return gradient.start != kernels::SumStart::kSum;  // the sum of the step before is the daemon's
  return history.way == Way::kExchanged && history.sum.has_value();
}

absl::StatusOr<SliceExchange::Outcome> SliceExchange::Offer(const Gradient& gradient,
                                                            accelerator::Stream stream) {
  if (!MayOffer(gradient)) return Outcome::kRefused;
  GatherAgreement& agreement = options_.peers->agreement();
  uint64_t stamp = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!agreement.MayBeAgreed(ItemOf(gradient.tensor), PositionOf(gradient.pass)))
      return Outcome::kRefused;
    OFFLOAD_ASSIGN_OR_RETURN(const Outcome outcome, TakeOfferedRoom(gradient, stream));
    if (outcome != Outcome::kOffered) return outcome;
    const Offered& offered = *offers_[gradient.tensor];
    stamp = offered.position << kStartBits | static_cast<uint64_t>(offered.gradient.start);
  }
  if (agreement.Offer(ItemOf(gradient.tensor), stamp)) {
    OFFLOAD_RETURN_IF_ERROR(issue_());
    return Outcome::kOffered;
  }
  const std::lock_guard lock(mutex_);
  EndOffer(gradient.tensor);
  return Outcome::kRefused;
}

absl::StatusOr<SliceExchange::Outcome> SliceExchange::TakeOfferedRoom(const Gradient& gradient,
                                                                      accelerator::Stream stream) {
  if (held_bytes_ + BytesOf(gradient) > options_.area_bytes) return Outcome::kNoRoom;
  History& history = HistoryOf(gradient.tensor);
  auto offered = std::make_unique<Offered>(Offered{.gradient = gradient});
  offered->position = PositionOf(gradient.pass);
  offered->keeps_sum = history.way == Way::kExchanged;
  if (offered->keeps_sum) offered->gradient.start = kernels::SumStart::kSum;
  const uint64_t slices_bytes = SlicesBytes(gradient);
  const std::optional<Room> received =
      TakeRoom((options_.peers->world_size() - 1) * slices_bytes, gradient.tensor);
  if (!received.has_value()) return Outcome::kNoRoom;
  const std::optional<Room> sum =
      offered->keeps_sum ? history.sum : TakeRoom(slices_bytes, gradient.tensor);
  if (!sum.has_value()) {
    free_.Return(received->offset, received->size_bytes);
    return Outcome::kNoRoom;
  }
  offered->received = *received;
  offered->sum = *sum;
  OFFLOAD_ASSIGN_OR_RETURN(offered->written, events_.Record(stream));
  history.sum = *sum;
  held_bytes_ += BytesOf(gradient);
  held_bytes_max_ = std::max(held_bytes_max_, held_bytes_);
  offers_[gradient.tensor] = std::move(offered);
  return Outcome::kOffered;
}

void SliceExchange::EndOffer(uint32_t tensor) {
  const std::unique_ptr<Offered> offered = std::exchange(offers_[tensor], nullptr);
  if (offered->summed.has_value()) return;  // who has the sum lets go of the rest
  held_bytes_ -= BytesOf(offered->gradient);
  free_.Return(offered->received.offset, offered->received.size_bytes);
  History& history = histories_[tensor];
  if (!offered->keeps_sum) DropSum(history);
}

void SliceExchange::Decline(uint32_t tensor, uint32_t pass) {
  uint64_t position = 0;
  {
    const std::lock_guard lock(mutex_);
    History& history = HistoryOf(tensor);
    history.way = Way::kWhole;
    DropSum(history);
    position = PositionOf(pass);
  }
  options_.peers->agreement().Decline(ItemOf(tensor), position);
}

bool SliceExchange::IsDecided(uint32_t tensor) const {
  const std::lock_guard lock(mutex_);
  const Offered& offered = *offers_[tensor];
  return offered.summed.has_value() ||
         !options_.peers->agreement().MayBeAgreed(ItemOf(tensor), offered.position);
}

absl::StatusOr<std::optional<SliceExchange::Summed>> SliceExchange::Resolve(uint32_t tensor,
                                                                            bool waits) {
  GatherAgreement& agreement = options_.peers->agreement();
  for (;;) {
    const uint32_t seen = agreement.news();
    OFFLOAD_RETURN_IF_ERROR(issue_());
    bool has_patience = false;
    uint32_t pass = 0;
    {
      const std::lock_guard lock(mutex_);
      Offered& offered = *offers_[tensor];
      if (offered.summed.has_value()) {
        std::optional<Summed> summed = std::move(offered.summed);
        offered.summed.emplace();
        EndOffer(tensor);
        return summed;
      }
      pass = offered.gradient.pass;
      has_patience = waits && patience_left_.count() > 0 &&
                     agreement.MayBeAgreed(ItemOf(tensor), offered.position);
    }
    if (!has_patience) {
      if (!agreement.Withdraw(ItemOf(tensor))) continue;  // it is agreed: issued by now, or next
      {
        const std::lock_guard lock(mutex_);
        EndOffer(tensor);
        ++counters_.taken_back;
      }
      Decline(tensor, pass);
      return std::nullopt;
    }
    const auto begun = std::chrono::steady_clock::now();
    agreement.WaitForNews(seen, kPause);
    if (agreement.news() != seen) continue;  // others make their way
    const std::lock_guard lock(mutex_);
    patience_left_ -= std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - begun);
  }
}

void SliceExchange::EndPass(uint32_t pass) {
  uint64_t position = 0;
  {
    const std::lock_guard lock(mutex_);
    position = PositionOf(pass);
    patience_left_ = options_.patience;
  }
  options_.peers->agreement().Pass(position);
}

// ---- Exchanges ---------------------------------------------------------------------------------

absl::Status SliceExchange::Issue(uint32_t item, accelerator::Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(item < offers_.size() && offers_[item] != nullptr)
      << "tensor " << item << " is agreed, and not offered";
  return Exchange(*offers_[item], stream);
}

absl::Status SliceExchange::Exchange(Offered& offered, accelerator::Stream stream) {
  const Gradient& gradient = offered.gradient;
  const uint32_t world_size = options_.peers->world_size(), rank = options_.peers->rank();
  const uint64_t element_bytes = kernels::DtypeBytes(gradient.dtype);
  std::vector<accelerator::SlicedRange> ranges;
  std::vector<kernels::DeviceSum> sums;
  Summed summed{.stream = stream};
  std::byte* received = area_ + offered.received.offset;
  std::byte* sum = area_ + offered.sum.offset;
  for (uint32_t extent = 0; extent < ExtentsOf(gradient.element_count); ++extent) {
    const uint64_t first = uint64_t{extent} * proto::kExtentElements;
    const uint64_t elements = proto::ExtentElements(gradient.element_count, extent);
    const uint64_t begin = proto::SliceBegin(elements, world_size, rank);
    const uint64_t count = proto::SliceElements(elements, world_size, rank);
    accelerator::SlicedRange range{.from = gradient.bytes + first * element_bytes};
    kernels::DeviceSum addition{.dtype = gradient.dtype,
                                .start = gradient.start,
                                .part_count = world_size,
                                .count = count,
                                .sum = sum,
                                .factor = options_.factor};
    for (uint32_t of = 0; of < world_size; ++of) {
      range.offsets_bytes.push_back(proto::SliceBegin(elements, world_size, of) * element_bytes);
      range.to.push_back(of == rank ? nullptr : received);
      addition.parts[of] = of == rank ? range.from + begin * element_bytes : received;
      if (of != rank) received += DeviceBytes(count * element_bytes);
    }
    range.offsets_bytes.push_back(elements * element_bytes);
    summed.slices.push_back({first + begin, count, sum});
    sum += DeviceBytes(count * element_bytes);
    ranges.push_back(std::move(range));
    sums.push_back(addition);
  }
  OFFLOAD_RETURN_IF_ERROR(accelerator_->StreamWaitEvent(stream, *offered.written));
  if (const absl::Status exchanged = options_.peers->collectives().ExchangeSlices(ranges, stream);
      !exchanged.ok()) {
    const absl::Status reason = options_.peers->Health();
    return reason.ok() ? exchanged : reason;
  }
  for (const kernels::DeviceSum& addition : sums)
    OFFLOAD_RETURN_IF_ERROR(sums_->AddParts(addition, stream));
  OFFLOAD_ASSIGN_OR_RETURN(issued_, events_.Record(stream));
  // Whatever is received there next comes behind this on the same stream.
  free_.Return(offered.received.offset, offered.received.size_bytes);
  History& history = histories_[gradient.tensor];
  history.way = Way::kExchanged;
  history.last_use = ++uses_;
  ++history.holders;
  summed.owner = std::make_shared<const Holder>(this, gradient);
  offered.summed = std::move(summed);
  ++counters_.exchanged;
  return absl::OkStatus();
}

absl::Status SliceExchange::Health() {
  const absl::Status status = options_.peers->collectives().AsyncError();
  if (status.ok()) return status;
  const absl::Status reason = options_.peers->Health();
  return reason.ok() ? status : reason;
}

// Of a rank that is gone the others know themselves.
void SliceExchange::Fail(const absl::Status& status) {
  if (ErrorIdOf(status) != ErrorId::kRankLost) options_.peers->agreement().Fail();
}

void SliceExchange::Drain() {
  RecordedEvent last;
  {
    const std::lock_guard lock(mutex_);
    last = issued_;
  }
  if (last != nullptr) accelerator_->EventSynchronize(*last).IgnoreError();
  const std::lock_guard lock(mutex_);
  last = nullptr;  // events are dropped under the lock
}

SliceExchange::Counters SliceExchange::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

uint64_t SliceExchange::bytes_max_ever() const {
  const std::lock_guard lock(mutex_);
  return options_.area_bytes + held_bytes_max_;
}

}  // namespace offload::zero3
