#include "zero3/torch/exchanged_parts.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"

namespace offload::zero3 {

ExchangedParts::ExchangedParts(DeviceParts* parts, SliceExchange* exchange,
                               std::vector<Tensor> tensors)
    : parts_(parts), exchange_(exchange), tensors_(std::move(tensors)) {}

void ExchangedParts::Begin(uint64_t step) {
  const std::lock_guard lock(start_mutex_);
  if (exchange_ != nullptr && failed().ok()) exchange_->Begin(step);
}

void ExchangedParts::Give(uint32_t tensor, const std::byte* bytes,
                          std::shared_ptr<const void> owner) {
  const std::lock_guard lock(start_mutex_);
  given_[tensor] = {bytes, std::move(owner)};
}

void ExchangedParts::Forget(uint32_t tensor) {
  const std::lock_guard lock(start_mutex_);
  given_.erase(tensor);
}

// ---- Parts -------------------------------------------------------------------------------------

SliceExchange::Gradient ExchangedParts::GradientOf(const Whole& whole) const {
  return {.tensor = whole.tensor,
          .dtype = tensors_[whole.tensor].dtype,
          .element_count = tensors_[whole.tensor].element_count,
          .pass = whole.pass,
          .start = whole.start,
          .bytes = whole.given.bytes,
          .owner = whole.given.owner};
}

client::Ticket ExchangedParts::Start(Part part, accelerator::Stream stream) {
  const std::lock_guard lock(start_mutex_);
  const client::Ticket ticket = next_ticket_++;
  const uint32_t tensor = part.tensor;
  const bool is_first = part.element_offset == 0;
  const bool is_last = part.element_offset + part.element_count == tensors_[tensor].element_count;
  if (is_first) {
    const auto given = given_.find(tensor);
    OFFLOAD_CHECK(given != given_.end()) << "a part of tensor " << tensor << ", which has none";
    CopyCollected();
    collected_ = Whole{.tensor = tensor,
                       .pass = part.pass,
                       .start = part.start,
                       .given = given->second,
                       .stream = stream};
  }
  Whole& whole = *collected_;
  OFFLOAD_CHECK(whole.tensor == tensor) << "parts of tensors " << tensor << ", " << whole.tensor;
  whole.pieces.push_back({ticket, std::move(part)});
  if (is_first && exchange_ != nullptr && tensors_[tensor].takes_slices && failed().ok())
    whole.is_offered = exchange_->MayOffer(GradientOf(whole));
  if (!whole.is_offered) {
    Copy(whole, /*is_declined=*/is_first);
  } else if (is_last) {
    OfferOrCopy();
  }
  if (is_last) collected_.reset();
  if (is_last) ResolveDecided();
  return ticket;
}

void ExchangedParts::OfferOrCopy() {
  using Outcome = SliceExchange::Outcome;
  const SliceExchange::Gradient gradient = GradientOf(*collected_);
  bool has_waited = false;
  for (;;) {
    const absl::StatusOr<Outcome> outcome = exchange_->Offer(gradient, collected_->stream);
    if (!outcome.ok()) return Fail(outcome.status());
    if (*outcome == Outcome::kOffered) return offered_.push_back(*std::move(collected_));
    if (*outcome == Outcome::kRefused) break;
    if (!offered_.empty()) {
      Resolve(0, /*waits=*/true);
    } else if (!std::exchange(has_waited, true)) {
      if (const absl::Status copied = parts_->Flush(); !copied.ok()) return Fail(copied);
    } else {
      break;
    }
    if (!failed().ok()) return;
  }
  Copy(*collected_, /*is_declined=*/true);
}

// What was given in part, before a backward failed.
void ExchangedParts::CopyCollected() {
  if (!collected_.has_value()) return;
  Copy(*collected_, /*is_declined=*/true);
  collected_.reset();
}

// Copies the pieces as they are.
void ExchangedParts::Copy(Whole& whole, bool is_declined) {
  whole.is_offered = false;
  if (is_declined && exchange_ != nullptr && tensors_[whole.tensor].takes_slices &&
      exchange_->Serves(GradientOf(whole)))
    exchange_->Decline(whole.tensor, whole.pass);
  const uint64_t element_bytes = kernels::DtypeBytes(tensors_[whole.tensor].dtype);
  for (const auto& [ticket, part] : std::exchange(whole.pieces, {})) {
    const auto tell = [tell = part.tell, offset = part.element_offset, count = part.element_count] {
      return tell(offset, count);
    };
    copied_[ticket] = CopyOne(whole.tensor, whole.given, part.element_offset * element_bytes,
                              part.element_count * element_bytes, part.host, whole.stream, tell);
  }
}

// The daemon hears of a slice only where the exchange has ended well.
void ExchangedParts::CopySlices(const Whole& whole, const SliceExchange::Summed& summed) {
  const uint64_t element_bytes = kernels::DtypeBytes(tensors_[whole.tensor].dtype);
  OFFLOAD_CHECK(summed.slices.size() == whole.pieces.size()) << "tensor " << whole.tensor;
  for (size_t i = 0; i < summed.slices.size(); ++i) {
    const SliceExchange::Slice& slice = summed.slices[i];
    const auto& [ticket, part] = whole.pieces[i];
    const auto tell = [this, tell = part.tell, offset = slice.element_offset,
                       count = slice.element_count] {
      const absl::Status health = exchange_->Health();
      if (health.ok()) return tell(offset, count);
      Fail(health);
      return kNeverTold;
    };
    copied_[ticket] = CopyOne(whole.tensor, {slice.bytes, summed.owner}, 0,
                              slice.element_count * element_bytes, part.host, summed.stream, tell);
  }
}

client::Ticket ExchangedParts::CopyOne(uint32_t tensor, const Given& given, uint64_t offset_bytes,
                                       uint64_t size_bytes, std::byte* host,
                                       accelerator::Stream stream, DeviceParts::Tell tell) {
  parts_->Give(tensor, given.bytes, given.owner);
  const client::Ticket ticket =
      parts_->Start(tensor, offset_bytes, size_bytes, host, stream, std::move(tell));
  parts_->Forget(tensor);
  return ticket;
}

// ---- What becomes of offers --------------------------------------------------------------------

void ExchangedParts::Resolve(size_t index, bool waits) {
  Whole whole = std::move(offered_[index]);
  offered_.erase(offered_.begin() + static_cast<ptrdiff_t>(index));
  const absl::StatusOr<std::optional<SliceExchange::Summed>> summed =
      exchange_->Resolve(whole.tensor, waits);
  if (!summed.ok()) return Fail(summed.status());
  if (summed->has_value()) {
    CopySlices(whole, **summed);
  } else {
    Copy(whole, /*is_declined=*/false);  // it is, by then
  }
}

void ExchangedParts::ResolveDecided() {
  for (size_t i = 0; i < offered_.size() && failed().ok();) {
    if (exchange_->IsDecided(offered_[i].tensor)) {
      Resolve(i, /*waits=*/false);
    } else {
      ++i;
    }
  }
}

// Of a device that has failed the other ranks are told.
void ExchangedParts::Fail(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    failed_.Update(status);
  }
  if (exchange_ != nullptr) exchange_->Fail(status);
}

absl::Status ExchangedParts::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

// ---- Waits -------------------------------------------------------------------------------------

absl::StatusOr<client::Ticket> ExchangedParts::TicketOf(client::Ticket ticket) {
  client::Ticket of_parts = 0;
  {
    const std::lock_guard lock(start_mutex_);
    const auto has_it = [ticket](const Whole& whole) {
      return std::ranges::find(whole.pieces, ticket, &Piece::ticket) != whole.pieces.end();
    };
    const auto offered = std::ranges::find_if(offered_, has_it);
    if (offered != offered_.end()) {
      Resolve(static_cast<size_t>(offered - offered_.begin()), /*waits=*/true);
    } else if (collected_.has_value() && collected_->is_offered && has_it(*collected_)) {
      Copy(*collected_, /*is_declined=*/true);  // the ring has no room for all of it
    }
    const auto copied = copied_.find(ticket);
    if (copied == copied_.end()) {
      OFFLOAD_RETURN_IF_ERROR(failed());
      OFFLOAD_CHECK(false) << "a part was waited for already";
    }
    of_parts = copied->second;
    copied_.erase(copied);
  }
  return parts_->TicketOf(of_parts);
}

absl::Status ExchangedParts::EndPass(uint32_t pass) {
  {
    const std::lock_guard lock(start_mutex_);
    CopyCollected();
    while (!offered_.empty() && failed().ok()) Resolve(0, /*waits=*/true);
    if (exchange_ != nullptr && failed().ok()) exchange_->EndPass(pass);
  }
  return Flush();
}

absl::Status ExchangedParts::Flush() {
  {
    const std::lock_guard lock(start_mutex_);
    while (!offered_.empty() && failed().ok()) Resolve(0, /*waits=*/true);
  }
  if (const absl::Status copied = parts_->Flush(); !copied.ok()) Fail(copied);
  return failed();
}

uint64_t ExchangedParts::bytes_max_ever() const {
  return parts_->bytes_max_ever() + (exchange_ != nullptr ? exchange_->bytes_max_ever() : 0);
}

}  // namespace offload::zero3
