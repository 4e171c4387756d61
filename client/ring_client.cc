#include "client/ring_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/advice.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/handshake.h"

namespace offload::client {
namespace {

using proto::CompletionEntry;
using proto::RingOperation;
using proto::SubmissionEntry;
using proto::TensorState;

// How long a thread looks for a completion itself: about what an awake daemon needs for a step.
constexpr int64_t kLookNanoseconds = 200'000;

// After so long it is found that the program has closed the session's descriptors.
constexpr int kDescriptorsMilliseconds = 1000;

absl::Status Version(const char* memory, uint32_t magic, uint32_t version) {
  return MakeError(ErrorId::kProtocolVersion,
                   absl::StrCat("the ", memory, " has magic ", magic, ", version ", version));
}

}  // namespace

RingClient::Rings::Rings(std::byte* region, proto::Doorbell bell)
    : doorbell(std::move(bell)),
      submissions(proto::SubmissionEntriesOf(region), &proto::HeaderOf(region)->submission_tail,
                  &proto::HeaderOf(region)->submission_head),
      completions(proto::CompletionEntriesOf(region), &proto::HeaderOf(region)->completion_tail,
                  &proto::HeaderOf(region)->completion_head),
      daemon_sleep(&proto::HeaderOf(region)->daemon_sleeping),
      rank_sleep(&proto::HeaderOf(region)->rank_sleeping) {}

absl::StatusOr<std::unique_ptr<RingClient>> RingClient::Start(Options options) {
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", ErrnoText(errno)));
  }
  std::unique_ptr<RingClient> client(new RingClient(std::move(options), std::move(wake)));
  try {
    client->thread_ = std::thread([raw = client.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    return MakeError(ErrorId::kDaemonStart,
                     absl::StrCat("no thread can be started for its answers: ", error.what()),
                     kThreadsFix);
  }
  return client;
}

RingClient::RingClient(Options options, UniqueFd wake)
    : options_(std::move(options)), wake_(std::move(wake)) {}

RingClient::~RingClient() { Stop(); }

void RingClient::Stop() {
  if (!thread_.joinable()) return;
  options_.health->Fail(MakeError(ErrorId::kSessionEnded, "the session was closed"));
  stopping_.store(true, std::memory_order_release);
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
}

absl::Status RingClient::AttachMemory(MappedRegion slab, MappedRegion region,
                                      proto::Doorbell doorbell) {
  if (slab.size() < sizeof(proto::SlabHeader) || region.size() < proto::kRegionFixedBytes) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("slab of ", slab.size(), ", region of ",
                                                      region.size(), " bytes"));
  }
  const auto* slab_header = reinterpret_cast<const proto::SlabHeader*>(slab.data());
  const proto::RegionHeader* region_header = proto::HeaderOf(region.data());
  if (slab_header->magic != proto::kSlabMagic || slab_header->version != proto::kProtocolVersion) {
    return Version("slab", slab_header->magic, slab_header->version);
  }
  if (region_header->magic != proto::kRegionMagic ||
      region_header->version != proto::kProtocolVersion) {
    return Version("region", region_header->magic, region_header->version);
  }
  absl::MutexLock lock(&mutex_);
  slab_ = std::move(slab);
  region_ = std::move(region);
  rings_ = std::make_unique<Rings>(region_.data(), std::move(doorbell));
  options_.monitor->Attach(proto::StepWordsOf(region_.data()));
  ::eventfd_write(wake_.get(), 1);
  return absl::OkStatus();
}

absl::Status RingClient::AttachTensors(size_t tensor_count, uint64_t pins_offset) {
  if (!IsInside(proto::kTensorWordsOffset, tensor_count * sizeof(proto::TensorWord),
                slab_.size()) ||
      !IsAligned(pins_offset, alignof(proto::PinWord)) || pins_offset < proto::kRegionFixedBytes ||
      !IsInside(pins_offset, tensor_count * sizeof(proto::PinWord), region_.size())) {
    return MakeError(ErrorId::kProtocol, absl::StrCat(tensor_count, " tensors with pins at ",
                                                      pins_offset, " in a slab of ", slab_.size(),
                                                      " and a region of ", region_.size()));
  }
  tensor_words_ = reinterpret_cast<proto::TensorWord*>(slab_.data() + proto::kTensorWordsOffset);
  pins_ = reinterpret_cast<proto::PinWord*>(region_.data() + pins_offset);
  tensor_count_ = tensor_count;
  options_.monitor->AttachTensors(tensor_count);
  return absl::OkStatus();
}

absl::Status RingClient::AttachUseTimes(uint64_t offset) {
  proto::StepWords& words = *proto::StepWordsOf(region_.data());
  words.use_times_offset.store(offset, std::memory_order_relaxed);
  if (proto::UseTimesOf(region_.data(), region_.size(), tensor_count_).size() < tensor_count_) {
    words.use_times_offset.store(0, std::memory_order_relaxed);
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("times of use of ", tensor_count_, " tensors at ", offset,
                                  " in a region of ", region_.size()));
  }
  options_.monitor->AttachUseTimes(
      {reinterpret_cast<proto::UseTimes*>(region_.data() + offset), tensor_count_});
  return absl::OkStatus();
}

absl::Status RingClient::AttachGradientWords() {
  const uint64_t offset = proto::GradientWordsOffset(tensor_count_);
  if (!IsInside(offset, tensor_count_ * sizeof(proto::GradientWord), slab_.size())) {
    return MakeError(ErrorId::kProtocol, absl::StrCat(tensor_count_, " gradient words at ", offset,
                                                      " in a slab of ", slab_.size()));
  }
  gradient_words_ = reinterpret_cast<proto::GradientWord*>(slab_.data() + offset);
  return absl::OkStatus();
}

// ---- Tensors ----------------------------------------------------------------------------------

// Null when it is not resident; the pin is there all the same.
absl::StatusOr<const std::byte*> RingClient::PinIfResident(uint32_t tensor) {
  if (tensor >= tensor_count_) {
    return MakeError(ErrorId::kInternal,
                     absl::StrCat("acquiring tensor ", tensor, " of ", tensor_count_));
  }
  if (!options_.health->ok() || slab_header().failure.load(std::memory_order_acquire) != 0) {
    return status();
  }
  // Both sequentially consistent, as the daemon's store of the word and look at the pin are: one of
  // the two sees the other (proto/DESIGN.md).
  pin(tensor)->fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = word(tensor)->load(std::memory_order_seq_cst);
  if (proto::StateOf(seen) == proto::kResident) {
    options_.monitor->Used(tensor);
    return slab_.data() + proto::OffsetOf(seen);
  }
  return nullptr;
}

absl::StatusOr<const std::byte*> RingClient::TryAcquire(uint32_t tensor) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::byte* const present, PinIfResident(tensor));
  if (present == nullptr) Release(tensor);
  return present;
}

absl::StatusOr<const std::byte*> RingClient::Acquire(uint32_t tensor) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::byte* const present, PinIfResident(tensor));
  if (present != nullptr) return present;
  absl::StatusOr<const std::byte*> bytes = AcquireSlowly(tensor, State(tensor) == proto::kPending);
  if (!bytes.ok()) Release(tensor);
  return bytes;
}

absl::StatusOr<const std::byte*> RingClient::AcquireSlowly(uint32_t tensor, bool is_pending) {
  const proto::StallCause cause = options_.monitor->Missed(tensor, is_pending);
  const StepMonitor::Stall stall(options_.monitor, cause, tensor);
  // Sequentially consistent and before the submission: see Release().
  acquires_waiting_.fetch_add(1, std::memory_order_seq_cst);
  SubmissionEntry entry{};
  entry.operation = RingOperation::kAcquire;
  entry.tensor = tensor;
  const std::optional<CompletionEntry> completion = Take(Submit(entry));
  acquires_waiting_.fetch_sub(1, std::memory_order_relaxed);
  OFFLOAD_RETURN_IF_ERROR(StatusOf(completion));
  if (proto::StateOf(completion->value) != proto::kResident) {
    return MakeError(ErrorId::kInternal, absl::StrCat("tensor ", tensor, " was acquired in state ",
                                                      proto::StateOf(completion->value)));
  }
  return slab_.data() + proto::OffsetOf(completion->value);
}

void RingClient::Release(uint32_t tensor) {
  if (tensor >= tensor_count_ || options_.health->forked()) return;
  pin(tensor)->fetch_sub(1, std::memory_order_seq_cst);
  // Somebody else waits for a slot, perhaps for this one: the daemon looks at pins only when it is
  // told. Had the waiter not counted itself yet, it submits after this and the daemon sees the pin.
  if (acquires_waiting_.load(std::memory_order_seq_cst) != 0) {
    absl::MutexLock lock(&mutex_);
    rings_->doorbell.Ring();
  }
}

bool RingClient::Prefetch(uint32_t tensor) {
  if (tensor >= tensor_count_ || !options_.health->ok()) return false;
  if (State(tensor) == proto::kResident) return false;
  SubmissionEntry entry{};
  entry.operation = RingOperation::kPrefetch;
  entry.tensor = tensor;
  absl::MutexLock lock(&mutex_);
  if (!HasRoom()) return false;
  options_.monitor->Asked(tensor);
  SubmitLocked(entry, /*nobody_waits=*/true);
  return true;
}

void RingClient::ReleaseGradient(uint32_t tensor) {
  if (tensor >= tensor_count_ || !options_.health->ok()) return;
  SubmissionEntry entry{};
  entry.operation = RingOperation::kReleaseGradient;
  entry.tensor = tensor;
  absl::MutexLock lock(&mutex_);
  if (HasRoom()) SubmitLocked(entry, /*nobody_waits=*/true);
}

TensorState RingClient::State(uint32_t tensor) const {
  if (tensor >= tensor_count_ || options_.health->forked()) return proto::kAbsent;
  return proto::StateOf(word(tensor)->load(std::memory_order_relaxed));
}

void RingClient::SetSchedulePosition(uint32_t position) {
  if (region_.valid() && !options_.health->forked()) {
    proto::HeaderOf(region_.data())->schedule_position.store(position, std::memory_order_relaxed);
  }
}

// ---- Operations -------------------------------------------------------------------------------

bool RingClient::HasRoom() const {
  if (in_flight_ >= proto::kInFlightMax) return false;
  return rings_ != nullptr && rings_->submissions.Room().value_or(0) > 0;
}

uint64_t RingClient::Submit(SubmissionEntry entry) {
  if (options_.health->forked()) return 0;
  absl::MutexLock lock(&mutex_);
  OFFLOAD_CHECK(rings_ != nullptr) << "an operation before OpenJob";
  while (options_.health->ok() && !HasRoom()) changed_.Wait(&mutex_);
  return SubmitLocked(entry, /*nobody_waits=*/false);
}

// When the session has failed meanwhile the entry goes nowhere, and the operation waits for what
// Take() finds at once.
uint64_t RingClient::SubmitLocked(SubmissionEntry entry, bool nobody_waits) {
  entry.tag = next_tag_++;
  operations_[entry.tag].nobody_waits = nobody_waits;
  if (!HasRoom()) return entry.tag;
  ++in_flight_;
  rings_->submissions.Push(entry);
  rings_->submissions.Publish();
  if (rings_->daemon_sleep.MustWake()) rings_->doorbell.Ring();
  return entry.tag;
}

std::optional<CompletionEntry> RingClient::Take(uint64_t tag) {
  if (options_.health->forked()) return std::nullopt;
  absl::MutexLock lock(&mutex_);
  const auto exists = operations_.find(tag);
  OFFLOAD_CHECK(exists != operations_.end()) << "ticket " << tag << " was waited for already";
  // The table may grow meanwhile: the operation is looked up anew.
  while (!operations_[tag].done && options_.health->ok()) changed_.Wait(&mutex_);
  const Operation operation = operations_[tag];
  operations_.erase(tag);
  if (!operation.done) return std::nullopt;
  return operation.completion;
}

// The daemon has no need to wake the ring client's thread meanwhile, which would have to wake this
// one. What others wait for is handed to them, too. Another thread that is ready runs in between.
std::optional<CompletionEntry> RingClient::TakeAwake(uint64_t tag) {
  if (options_.health->forked()) return std::nullopt;
  const Clock& clock = Clock::Real();
  const int64_t end = clock.NowNanoseconds() + kLookNanoseconds;
  {
    absl::MutexLock lock(&mutex_);
    rings_->rank_sleep.Awake();
  }
  for (bool looks = true; looks;) {
    std::this_thread::yield();
    absl::MutexLock lock(&mutex_);
    Look();
    looks = fault_.ok() && options_.health->ok() && !operations_[tag].done &&
            clock.NowNanoseconds() < end;
  }
  {
    absl::MutexLock lock(&mutex_);
    rings_->rank_sleep.Announce();
    Look();  // what came before the announcement was seen
  }
  return Take(tag);
}

absl::Status RingClient::WaitAwake(uint64_t tag) { return StatusOf(TakeAwake(tag)); }

bool RingClient::IsDone(uint64_t tag) const {
  if (options_.health->forked()) return true;
  absl::MutexLock lock(&mutex_);
  const auto operation = operations_.find(tag);
  return operation == operations_.end() || operation->second.done || !options_.health->ok();
}

absl::Status RingClient::Wait(uint64_t tag) {
  return WaitForValue(tag, proto::StallCause::kTransfer).status();
}

absl::StatusOr<uint64_t> RingClient::WaitForValue(uint64_t tag, proto::StallCause cause) {
  const StepMonitor::Stall stall(options_.monitor, cause);
  const std::optional<CompletionEntry> completion = Take(tag);
  OFFLOAD_RETURN_IF_ERROR(StatusOf(completion));
  return completion->value;
}

uint64_t RingClient::GradientWord(uint32_t tensor) const {
  if (gradient_words_ == nullptr || tensor >= tensor_count_ || options_.health->forked()) return 0;
  return gradient_words_[tensor].load(std::memory_order_acquire);
}

absl::Status RingClient::StatusOf(const std::optional<CompletionEntry>& completion) {
  if (completion.has_value()) return completion->code == 0 ? absl::OkStatus() : TextOf(*completion);
  const absl::Status failure = status();
  OFFLOAD_CHECK(!failure.ok()) << "an operation is not answered and nothing has failed";
  return failure;
}

absl::Status RingClient::TextOf(const CompletionEntry& completion) {
  const auto code = static_cast<absl::StatusCode>(completion.code);
  if (options_.explain) {
    const absl::StatusOr<std::string> text = options_.explain(completion.tag);
    if (text.ok() && !text->empty()) return absl::Status(code, *text);
  }
  const ErrorInfo* info = FindError(completion.error);
  const ErrorId id = info == nullptr ? ErrorId::kInternal : info->id;
  if (id == ErrorId::kDaemonLost) return MakeError(id, "the daemon was told to end (SIGTERM)");
  const absl::Status status =
      MakeError(id, absl::StrCat(std::string(info == nullptr ? "unknown error" : info->text),
                                 " (the daemon that knows more is gone)"));
  return absl::Status(code, status.message());
}

absl::Status RingClient::status() const {
  if (!options_.health->ok()) return options_.health->status();
  if (!slab_.valid()) return absl::OkStatus();
  const uint32_t failure = slab_header().failure.load(std::memory_order_acquire);
  if (failure == 0) return absl::OkStatus();
  const proto::SlabHeader& header = slab_header();
  const std::string text(header.failure_text,
                         ::strnlen(header.failure_text, sizeof(header.failure_text)));
  const ErrorInfo* info = FindError(static_cast<int>(failure));
  return absl::Status(info == nullptr ? absl::StatusCode::kInternal : info->code, text);
}

// ---- The thread -------------------------------------------------------------------------------

void RingClient::Run() {
  for (;;) {
    if (const absl::Status fault = TakeCompletions(); !fault.ok()) return EndSession(fault);
    switch (WaitForEvent()) {
      case Event::kWork:
        break;
      case Event::kDaemonEnded: {
        // What it completed before its end counts.
        absl::Status reason = TakeCompletions();
        if (reason.ok()) reason = proto::ReasonOfEnd(options_.socket);
        return EndSession(options_.describe_end ? options_.describe_end(reason) : reason);
      }
      case Event::kDescriptorsClosed:
        return EndSession(MakeError(
            ErrorId::kSessionEnded, "the program has closed the session's file descriptors",
            "Close those that the program has opened, or all of them before the engine is open"));
      case Event::kStopped:
        return EndSession(options_.health->status());
    }
  }
}

absl::Status RingClient::TakeCompletions() {
  absl::MutexLock lock(&mutex_);
  if (rings_ == nullptr) return absl::OkStatus();
  rings_->rank_sleep.Awake();
  Look();
  rings_->rank_sleep.Announce();
  Look();  // what came before the announcement was seen
  return fault_;
}

// Whoever looks first finds a fault; the ring client's thread ends the session for it.
void RingClient::Look() {
  if (!fault_.ok()) return;
  fault_ = Dispatch();
  if (!fault_.ok()) ::eventfd_write(wake_.get(), 1);
}

absl::Status RingClient::Dispatch() {
  std::optional<uint32_t> available = rings_->completions.Available();
  bool took = false;
  for (; available.value_or(0) > 0; available = rings_->completions.Available()) {
    const CompletionEntry completion = rings_->completions.Take();
    rings_->completions.Publish();
    const auto operation = operations_.find(completion.tag);
    if (in_flight_ == 0 || operation == operations_.end() || operation->second.done) {
      return MakeError(ErrorId::kProtocol,
                       absl::StrCat("a completion for the unknown tag ", completion.tag));
    }
    --in_flight_;
    took = true;
    if (operation->second.nobody_waits) {
      operations_.erase(operation);
    } else {
      operation->second.done = true;
      operation->second.completion = completion;
    }
  }
  if (took) changed_.SignalAll();
  if (available.has_value()) return absl::OkStatus();
  return MakeError(ErrorId::kProtocol, "completion_tail claims more entries than the ring has");
}

RingClient::Event RingClient::WaitForEvent() {
  int doorbell = -1;
  {
    absl::MutexLock lock(&mutex_);
    if (rings_ != nullptr) doorbell = rings_->doorbell.fd();
  }
  // The handshake itself is read elsewhere: here only the end of the socket counts. Descriptors of
  // -1 are ignored.
  pollfd events[] = {{.fd = wake_.get(), .events = POLLIN},
                     {.fd = options_.socket, .events = POLLRDHUP},
                     {.fd = options_.pidfd, .events = POLLIN},
                     {.fd = doorbell, .events = POLLIN}};
  // Looks now and then, as closing a descriptor does not end the poll that waits for it.
  if (::poll(events, std::size(events), kDescriptorsMilliseconds) < 0)
    return Event::kWork;  // EINTR
  for (const pollfd& event : events) {
    if ((event.revents & POLLNVAL) != 0) return Event::kDescriptorsClosed;
  }
  // Emptied before the question is asked: what is written after that wakes the next poll.
  eventfd_t ignored = 0;
  ::eventfd_read(wake_.get(), &ignored);
  if (stopping_.load(std::memory_order_acquire)) return Event::kStopped;
  if (events[1].revents != 0 || events[2].revents != 0) return Event::kDaemonEnded;
  if (events[3].revents != 0) {
    absl::MutexLock lock(&mutex_);
    if (!rings_->doorbell.Drain()) return Event::kDaemonEnded;
  }
  return Event::kWork;
}

void RingClient::EndSession(const absl::Status& reason) {
  options_.health->Fail(reason);
  if (options_.on_failure) options_.on_failure();
  absl::MutexLock lock(&mutex_);
  changed_.SignalAll();
}

}  // namespace offload::client
