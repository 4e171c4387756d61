#include "accelerator/host_accelerator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "accelerator/host_collectives.h"
#include "base/check.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace offload::accelerator {
namespace {

constexpr size_t kAlignment = 256;
constexpr int kPoison = 0xFF;
constexpr uint64_t kCommandsAtOnce = 4;
constexpr std::chrono::microseconds kOthersPause(50);

const char* UseName(Use use) { return use == Use::kWrite ? "write" : "read"; }

std::string PartyName(size_t index) {
  return index == 0 ? "the host" : absl::StrCat("stream ", index - 1);
}

bool Overlap(const std::byte* begin, const std::byte* end, const std::byte* other_begin,
             const std::byte* other_end) {
  return begin < other_end && other_begin < end;
}

}  // namespace

HostAccelerator::HostAccelerator(const Options& options)
    : options_(options), random_(options.seed), memory_bytes_(options.memory_bytes) {
  streams_.push_back(std::make_unique<StreamState>());  // the default stream
  if (!options.peer_address.empty())
    peers_ = std::make_unique<HostPeers>(this, options.peer_address);
}

HostAccelerator::~HostAccelerator() {
  for (const auto& [bytes, size_bytes] : allocations_) std::free(const_cast<std::byte*>(bytes));
  for (const std::byte* const bytes : freed_in_use_) std::free(const_cast<std::byte*>(bytes));
}

// ---- Memory --------------------------------------------------------------------------------

absl::StatusOr<MemoryInfo> HostAccelerator::MemGetInfo() {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  return MemoryInfo{memory_bytes_ - std::min(memory_bytes_, allocated_bytes_), memory_bytes_};
}

void HostAccelerator::SetMemoryBytes(uint64_t memory_bytes) {
  const std::lock_guard lock(mutex_);
  memory_bytes_ = memory_bytes;
}

absl::StatusOr<std::byte*> HostAccelerator::Malloc(size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const size_t rounded_bytes = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const uint64_t free_bytes = memory_bytes_ - std::min(memory_bytes_, allocated_bytes_);
  if (rounded_bytes == 0 || rounded_bytes > free_bytes) {
    return MakeError(
        ErrorId::kGpuMemory,
        absl::StrCat("the stand-in has ", free_bytes, " B free, and ", size_bytes, " B are asked"));
  }
  auto* const bytes = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded_bytes));
  OFFLOAD_CHECK(bytes != nullptr) << rounded_bytes << " B";
  std::memset(bytes, kPoison, rounded_bytes);
  allocations_[bytes] = rounded_bytes;
  allocated_bytes_ += rounded_bytes;
  counters_.allocated_bytes_max = std::max(counters_.allocated_bytes_max, allocated_bytes_);
  return bytes;
}

absl::Status HostAccelerator::Free(std::byte* bytes) {
  const std::lock_guard lock(mutex_);
  const auto allocation = allocations_.find(bytes);
  OFFLOAD_CHECK(allocation != allocations_.end()) << "not allocated";
  const bool is_unused = CheckUnused(bytes, allocation->second, host_clock_, "memory freed in use");
  // What was submitted still has to find its bytes.
  while (RunOne()) continue;
  Forget(allocation, is_unused);
  return Broken();
}

void HostAccelerator::FreeAsync(std::byte* bytes, Stream stream) {
  std::unique_lock lock(mutex_);
  const auto allocation = allocations_.find(bytes);
  OFFLOAD_CHECK(allocation != allocations_.end()) << "not allocated";
  Join(&StateOf(stream).clock, host_clock_);
  const bool is_unused =
      CheckUnused(bytes, allocation->second, StateOf(stream).clock, "memory freed in use");
  RunTo(stream, lock);
  Forget(allocation, is_unused);
}

void HostAccelerator::Forget(std::map<const std::byte*, size_t>::iterator allocation,
                             bool is_unused) {
  const std::byte* const bytes = allocation->first;
  std::erase_if(accesses_, [&](const Access& access) {
    return Overlap(access.begin, access.end, bytes, bytes + allocation->second);
  });
  allocated_bytes_ -= allocation->second;
  allocations_.erase(allocation);
  if (is_unused) {
    std::free(const_cast<std::byte*>(bytes));
  } else {
    freed_in_use_.push_back(bytes);
  }
}

namespace {

// What is page-locked has pages, also where nobody has touched it.
void BringPages(const std::byte* bytes, size_t size_bytes, HostAccess access) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(bytes);
  const uint64_t begin = AlignDown(address, page_bytes);
  const uint64_t end = AlignUp(address + size_bytes, page_bytes);
  madvise(reinterpret_cast<void*>(begin), end - begin,
          access == HostAccess::kReadOnly ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
}

}  // namespace

absl::StatusOr<bool> HostAccelerator::HostRegister(const std::byte* bytes, size_t size_bytes,
                                                   HostAccess access) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const bool can = access == HostAccess::kReadOnly ? options_.registers_read_only
                                                   : options_.registers_read_write;
  if (!can) return false;
  OFFLOAD_CHECK(registrations_.emplace(bytes, size_bytes).second) << "registered twice";
  BringPages(bytes, size_bytes, access);
  return true;
}

absl::Status HostAccelerator::HostUnregister(const std::byte* bytes) {
  const std::lock_guard lock(mutex_);
  const auto registration = registrations_.find(bytes);
  OFFLOAD_CHECK(registration != registrations_.end()) << "not registered";
  CheckUnused(bytes, registration->second, host_clock_, "registration given back in use");
  registrations_.erase(registration);
  return Broken();
}

// ---- Streams and events --------------------------------------------------------------------

HostAccelerator::StreamState& HostAccelerator::StateOf(Stream stream) {
  OFFLOAD_CHECK(stream.handle < streams_.size() && !streams_[stream.handle]->is_destroyed)
      << "no stream " << stream.handle;
  return *streams_[stream.handle];
}

absl::StatusOr<Stream> HostAccelerator::StreamCreate() {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  streams_.push_back(std::make_unique<StreamState>());
  return Stream{streams_.size() - 1};
}

absl::Status HostAccelerator::StreamDestroy(Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(stream.handle != 0) << "the default stream";
  StateOf(stream).is_destroyed = true;  // what is in its queue still runs, as in CUDA
  return Broken();
}

absl::StatusOr<bool> HostAccelerator::StreamIsCapturing(Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  return StateOf(stream).is_capturing;
}

void HostAccelerator::SetCapturing(Stream stream, bool capturing) {
  const std::lock_guard lock(mutex_);
  StateOf(stream).is_capturing = capturing;
}

absl::StatusOr<Event> HostAccelerator::EventCreate() {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const Event event{next_event_++};
  events_[event.handle] = std::make_shared<Record>(Record{.is_done = true, .clock = {}});
  return event;
}

absl::Status HostAccelerator::EventDestroy(Event event) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_CHECK(events_.erase(event.handle) == 1) << "no event " << event.handle;
  return Broken();
}

absl::Status HostAccelerator::EventRecord(Event event, Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  StreamState& of = StateOf(stream);
  Join(&of.clock, host_clock_);
  const auto record = std::make_shared<Record>(Record{.is_done = false, .clock = of.clock});
  events_.at(event.handle) = record;
  Submit(stream, [this, record] {
    record->is_done = true;
    record->seconds = seconds_;
  });
  Advance();
  return absl::OkStatus();
}

absl::Status HostAccelerator::StreamWaitEvent(Stream stream, Event event) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  ++counters_.waits;
  const std::shared_ptr<const Record> record = events_.at(event.handle);
  Submit(
      stream, [] {}, record);
  Join(&StateOf(stream).clock, record->clock);
  Advance();
  return absl::OkStatus();
}

absl::StatusOr<bool> HostAccelerator::EventQuery(Event event) {
  const std::lock_guard lock(mutex_);
  Advance();
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const Record& record = *events_.at(event.handle);
  if (!record.is_done) return false;
  if (options_.queries_are_late) {
    for (size_t i = 0; i < record.clock.size(); ++i) {
      if (At(host_clock_, i) < record.clock[i]) return false;
    }
  }
  Join(&host_clock_, record.clock);
  return true;
}

absl::Status HostAccelerator::EventSynchronize(Event event) {
  std::unique_lock lock(mutex_);
  ++counters_.synchronizes;
  const std::shared_ptr<const Record> record = events_.at(event.handle);
  while (!record->is_done) {
    if (RunOneOrWait(lock)) continue;
    Report("a wait that can never end");
    break;
  }
  Join(&host_clock_, record->clock);
  return Broken();
}

absl::StatusOr<std::optional<double>> HostAccelerator::SecondsBetween(Event begin, Event end) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const Record &first = *events_.at(begin.handle), &last = *events_.at(end.handle);
  if (!first.is_done || !last.is_done) return std::nullopt;
  return last.seconds - first.seconds;
}

// ---- The scheduler -------------------------------------------------------------------------

void HostAccelerator::Submit(Stream stream, std::function<void()> run,
                             std::shared_ptr<const Record> waited_for) {
  StreamState& state = StateOf(stream);
  if (state.is_capturing) Report("a command on a stream that is being captured");
  state.commands.push_back({std::move(run), std::move(waited_for), nullptr});
}

// Executes the next command of some stream. False when none can be executed.
bool HostAccelerator::RunOne() {
  std::vector<StreamState*> ready;
  for (const auto& stream : streams_) {
    if (stream->commands.empty()) continue;
    const Command& next = stream->commands.front();
    const bool is_ordered = next.waited_for == nullptr || next.waited_for->is_done;
    if (is_ordered && (!next.is_ready || is_broken_ || next.is_ready()))
      ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  StreamState& chosen = *ready[random_.Below(ready.size())];
  const Command command = std::move(chosen.commands.front());
  chosen.commands.pop_front();
  command.run();
  return true;
}

// The same, or waits a while for others that decide when one can be. False when that is no use.
bool HostAccelerator::RunOneOrWait(std::unique_lock<std::mutex>& lock) {
  if (RunOne()) return true;
  const bool waits_for_others = std::ranges::any_of(streams_, [](const auto& stream) {
    return !stream->commands.empty() && stream->commands.front().is_ready;
  });
  if (!waits_for_others) return false;
  lock.unlock();
  std::this_thread::sleep_for(kOthersPause);
  lock.lock();
  return true;
}

void HostAccelerator::Advance() {
  switch (options_.pace) {
    case Pace::kEager:
      while (RunOne()) continue;
      break;
    case Pace::kRandom:
      for (uint64_t count = random_.Below(kCommandsAtOnce); count > 0 && RunOne(); --count)
        continue;
      break;
    case Pace::kLate:
      break;
  }
}

void HostAccelerator::RunAll() {
  const std::lock_guard lock(mutex_);
  while (RunOne()) continue;
}

void HostAccelerator::RunStream(Stream stream) {
  std::unique_lock lock(mutex_);
  RunTo(stream, lock);
}

// Others run, too, as the seed says.
void HostAccelerator::RunTo(Stream stream, std::unique_lock<std::mutex>& lock) {
  const StreamState& state = StateOf(stream);
  while (!state.commands.empty()) {
    if (RunOneOrWait(lock)) continue;
    Report("a wait that can never end");
    return;
  }
}

absl::Status HostAccelerator::Broken() const {
  if (!is_broken_) return absl::OkStatus();
  return MakeError(ErrorId::kGpuFailed, "the stand-in is broken, as it was asked to be");
}

// ---- Commands ------------------------------------------------------------------------------

absl::Status HostAccelerator::MemcpyToDevice(std::byte* device, const std::byte* host,
                                             size_t size_bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  CheckRange(allocations_, device, size_bytes, "a copy outside of device memory");
  CheckRange(registrations_, host, size_bytes, "a copy of host memory that is not registered");
  ++counters_.copies_to_device;
  counters_.bytes_to_device += size_bytes;
  Copy(device, host, size_bytes, stream, /*to_device=*/true);
  Advance();
  return absl::OkStatus();
}

absl::Status HostAccelerator::MemcpyToHost(std::byte* host, const std::byte* device,
                                           size_t size_bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  CheckRange(allocations_, device, size_bytes, "a copy outside of device memory");
  CheckRange(registrations_, host, size_bytes, "a copy to host memory that is not registered");
  ++counters_.copies_to_host;
  counters_.bytes_to_host += size_bytes;
  Copy(host, device, size_bytes, stream, /*to_device=*/false);
  Advance();
  return absl::OkStatus();
}

void HostAccelerator::Copy(std::byte* to, const std::byte* from, size_t size_bytes, Stream stream,
                           bool to_device) {
  Check(IndexOf(stream), Use::kRead, from, size_bytes);
  Check(IndexOf(stream), Use::kWrite, to, size_bytes);
  const bool fails = ++copies_ == options_.failing_copy;
  counters_.copies_under_way_max = std::max(counters_.copies_under_way_max, ++copies_under_way_);
  std::vector<std::byte> promised;
  if (to_device) promised.assign(from, from + size_bytes);
  Submit(stream, [this, to, size_bytes, fails] {
    is_broken_ |= fails;
    if (!is_broken_) std::memset(to, kPoison, size_bytes);
  });
  Submit(stream, [this, to, from, size_bytes, promised = std::move(promised)] {
    --copies_under_way_;
    seconds_ += static_cast<double>(size_bytes) / kCopiedBytesPerSecond;
    if (is_broken_) return;
    std::memcpy(to, from, size_bytes);
    if (!promised.empty() && std::memcmp(to, promised.data(), size_bytes) != 0)
      Report("host memory that changed under a copy");
  });
}

void HostAccelerator::CountCopy(const std::byte* host, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  if (!IsInside(registrations_, host, size_bytes)) ++counters_.pageable_copies;
}

absl::Status HostAccelerator::Memset(std::byte* device, uint8_t value, size_t size_bytes,
                                     Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  CheckRange(allocations_, device, size_bytes, "a fill outside of device memory");
  Check(IndexOf(stream), Use::kWrite, device, size_bytes);
  Submit(stream, [this, device, value, size_bytes] {
    if (!is_broken_) std::memset(device, value, size_bytes);
  });
  Advance();
  return absl::OkStatus();
}

absl::Status HostAccelerator::Update(const kernels::OptimizerSpec& optimizer, int64_t step,
                                     const kernels::DeviceRun& run, Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  CheckRun(optimizer, run, stream);
  Submit(stream, [this, optimizer, step, run] {
    if (!is_broken_) kernels::UpdateOnHost(optimizer, step, run);
  });
  Advance();
  return absl::OkStatus();
}

absl::Status HostAccelerator::AddParts(const kernels::DeviceSum& sum, Stream stream) {
  const std::lock_guard lock(mutex_);
  OFFLOAD_RETURN_IF_ERROR(Broken());
  const auto check = [&](Use use, const void* array) {
    const auto* const bytes = static_cast<const std::byte*>(array);
    const size_t size_bytes = sum.count * kernels::DtypeBytes(sum.dtype);
    CheckRange(allocations_, bytes, size_bytes, "a sum outside of device memory");
    Check(IndexOf(stream), use, bytes, size_bytes);
  };
  for (uint32_t part = 0; part < sum.part_count; ++part) check(Use::kRead, sum.parts[part]);
  check(Use::kWrite, sum.sum);
  Submit(stream, [this, sum] {
    if (!is_broken_) kernels::AddPartsOnHost(sum);
  });
  Advance();
  return absl::OkStatus();
}

void HostAccelerator::CheckRun(const kernels::OptimizerSpec& optimizer,
                               const kernels::DeviceRun& run, Stream stream) {
  const auto check = [&](Use use, const void* array, uint64_t size_bytes) {
    if (array == nullptr || size_bytes == 0) return;
    const auto* const bytes = static_cast<const std::byte*>(array);
    CheckRange(allocations_, bytes, size_bytes, "an update outside of device memory");
    Check(IndexOf(stream), use, bytes, size_bytes);
  };
  const bool is_double = run.weight_dtype == kernels::Dtype::kFloat64;
  check(Use::kRead, run.gradient, run.count * kernels::DtypeBytes(run.gradient_dtype));
  check(Use::kRead, run.gradient_scale_on_device, sizeof(float));
  check(Use::kWrite, run.weight, run.count * kernels::DtypeBytes(run.weight_dtype));
  check(Use::kWrite, run.residual, run.count * sizeof(int16_t));
  check(Use::kWrite, run.half_residual, run.count * sizeof(uint32_t));
  check(Use::kWrite, run.ties, kernels::TieWords(run.count) * sizeof(uint32_t));
  check(Use::kWrite, run.norms, kernels::NormBytes(run.count));
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    if (optimizer.Plane(i) == nullptr) continue;
    const void* const state = is_double ? static_cast<void*>(run.double_state[i]) : run.state[i];
    check(Use::kWrite, state, run.count * kernels::MasterBytes(run.weight_dtype));
  }
}

void HostAccelerator::Launch(Stream stream, std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  Submit(stream, [this, kernel = std::move(kernel)] {
    if (!is_broken_) kernel();
  });
  Advance();
}

void HostAccelerator::LaunchWhenReady(Stream stream, std::function<bool()> is_ready,
                                      std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  Submit(stream, [this, kernel = std::move(kernel)] {
    if (!is_broken_) kernel();
  });
  StateOf(stream).commands.back().is_ready = std::move(is_ready);
  Advance();
}

// ---- The checker ---------------------------------------------------------------------------

void HostAccelerator::NoteUse(Stream stream, Use use, const std::byte* device, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  CheckRange(allocations_, device, size_bytes, "an operator outside of device memory");
  Check(IndexOf(stream), use, device, size_bytes);
}

void HostAccelerator::NoteHostUse(Use use, const std::byte* bytes, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  Check(kHost, use, bytes, size_bytes);
}

void HostAccelerator::Check(size_t index, Use use, const std::byte* bytes, size_t size_bytes) {
  if (is_broken_) return;  // nothing runs any more
  Clock* const clock = index == kHost ? &host_clock_ : &streams_[index - 1]->clock;
  if (index != kHost) Join(clock, host_clock_);
  const std::byte* const end = bytes + size_bytes;
  std::vector<Access> kept;
  for (const Access& access : accesses_) {
    const bool overlap = Overlap(access.begin, access.end, bytes, end);
    const bool conflict = use == Use::kWrite || access.use == Use::kWrite;
    if (overlap && conflict && access.index != index && At(*clock, access.index) < access.count) {
      Report(absl::StrCat("a ", UseName(use), " by ", PartyName(index),
                          " that no event orders after a ", UseName(access.use), " by ",
                          PartyName(access.index)));
    }
    // What comes after a write comes after what the write came after; a party's later read says
    // more than its earlier ones.
    const bool replaced =
        overlap && (use == Use::kWrite || (access.use == Use::kRead && access.index == index));
    if (!replaced) {
      kept.push_back(access);
      continue;
    }
    if (access.begin < bytes)
      kept.push_back({access.begin, bytes, access.use, access.index, access.count});
    if (end < access.end) kept.push_back({end, access.end, access.use, access.index, access.count});
  }
  if (clock->size() <= index) clock->resize(index + 1);
  kept.push_back({bytes, end, use, index, ++(*clock)[index]});
  accesses_ = std::move(kept);
}

bool HostAccelerator::IsInside(const std::map<const std::byte*, size_t>& ranges,
                               const std::byte* bytes, size_t size_bytes) {
  auto range = ranges.upper_bound(bytes);
  if (range == ranges.begin()) return false;
  --range;
  return bytes + size_bytes <= range->first + range->second;
}

void HostAccelerator::CheckRange(const std::map<const std::byte*, size_t>& ranges,
                                 const std::byte* bytes, size_t size_bytes, const char* finding) {
  if (!IsInside(ranges, bytes, size_bytes)) Report(finding);
}

bool HostAccelerator::CheckUnused(const std::byte* bytes, size_t size_bytes, const Clock& known,
                                  const char* finding) {
  if (is_broken_) return true;  // nothing runs any more
  bool is_unused = true;
  for (const Access& access : accesses_) {
    const bool is_known = access.index == kHost || At(known, access.index) >= access.count;
    if (is_known || !Overlap(access.begin, access.end, bytes, bytes + size_bytes)) continue;
    Report(finding);
    is_unused = false;
  }
  return is_unused;
}

void HostAccelerator::Report(const std::string& finding) { ++violations_[finding]; }

void HostAccelerator::CountCollective() {
  const std::lock_guard lock(mutex_);
  ++counters_.collectives;
}

void HostAccelerator::CountExchange() {
  const std::lock_guard lock(mutex_);
  ++counters_.exchanges;
}

void HostAccelerator::AddViolation(const std::string& finding) {
  const std::lock_guard lock(mutex_);
  Report(finding);
}

std::vector<std::string> HostAccelerator::Violations() {
  const std::lock_guard lock(mutex_);
  while (RunOne()) continue;
  std::vector<std::string> violations;
  for (const auto& [finding, count] : violations_)
    violations.push_back(absl::StrCat(finding, " (", count, ")"));
  return violations;
}

std::vector<std::string> HostAccelerator::Leftovers() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> leftovers;
  const auto add = [&](size_t count, const char* what) {
    if (count > 0) leftovers.push_back(absl::StrCat(count, " ", what));
  };
  add(allocations_.size(), "allocations");
  add(registrations_.size(), "registrations");
  add(events_.size(), "events");
  add(std::count_if(streams_.begin() + 1, streams_.end(),
                    [](const auto& stream) { return !stream->is_destroyed; }),
      "streams");
  return leftovers;
}

HostAccelerator::Counters HostAccelerator::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void HostAccelerator::Join(Clock* clock, const Clock& other) {
  if (clock->size() < other.size()) clock->resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

uint64_t HostAccelerator::At(const Clock& clock, size_t index) {
  return index < clock.size() ? clock[index] : 0;
}

}  // namespace offload::accelerator
