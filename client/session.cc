#include "client/session.h"

#include <sys/socket.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/connect.h"
#include "client/control.h"
#include "client/health.h"
#include "client/ring_client.h"
#include "client/step_log.h"
#include "client/step_monitor.h"
#include "proto/gpu_words.h"
#include "proto/handshake.h"
#include "proto/shared_memory.h"

namespace offload::client {
namespace {

// The socket of a dying process closes a moment before the process can be asked how it ended.
constexpr int kEndGraceMilliseconds = 200;

proto::SubmissionEntry Transfer(proto::RingOperation operation, uint64_t offset, uint64_t count,
                                uint64_t region_offset) {
  proto::SubmissionEntry entry{};
  entry.operation = operation;
  entry.element_offset = offset;
  entry.element_count = count;
  entry.region_offset = region_offset;
  return entry;
}

// The jobs that sessions of this process have. The lock of a store tells only which daemon has it,
// and behind a time in which a dead run's writes may land: this process would wait for itself.
class OpenJobs {
 public:
  static OpenJobs& Instance() {
    static auto* const kInstance = new OpenJobs;
    return *kInstance;
  }
  // OFD-1205. `health` is the session's, and outlives the entry.
  absl::Status Enter(const Health* health, const JobOptions& options) {
    // Several ranks have it together; and an attempt before may have failed.
    if (options.world.world_size > 1) return absl::OkStatus();
    Leave(health);
    absl::MutexLock lock(&mutex_);
    for (const Entry& entry : entries_) {
      if (entry.job != options.job || entry.pool != options.pool || !entry.health->ok()) continue;
      return MakeError(ErrorId::kStoreLocked,
                       absl::StrCat("job ", options.job, " is open in this process already"),
                       "Attach further modules to the engine that has it, close that first, or "
                       "choose another job name");
    }
    entries_.push_back({health, options.pool, options.job});
    return absl::OkStatus();
  }
  void Leave(const Health* health) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(entries_, [&](const Entry& entry) { return entry.health == health; });
  }

 private:
  struct Entry {
    const Health* health;
    std::string pool, job;
  };
  absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

// Order of members: the ring client's thread uses all the others, so it is the last to be made and
// the first to end; the process is waited for after the socket is closed.
struct Session::Impl {
  PrivateDaemon private_daemon;
  UniqueFd socket;
  proto::Welcome welcome;
  Health health;
  std::unique_ptr<ControlClient> control;
  StepMonitor monitor{&health};
  std::unique_ptr<RingClient> rings;
  size_t tensor_count = 0;
  World world;
  std::atomic<uint64_t> exchanges{0};
  std::unique_ptr<StepLog> step_log;  // null unless somebody wants it
  absl::Mutex command_mutex;          // of the step command in the region
  std::optional<Ticket> announcement ABSL_GUARDED_BY(command_mutex);  // it may not be read yet

  absl::Status Start(Connection connection);
  absl::Status MapMemory(const JobInfo& info);
  absl::Status DescribeEnd(const absl::Status& said);
  void Close();

  absl::Status StartTrace(const std::string& job);
  absl::Status StartStepLog();

  // The command for the ring; missing when it has no room there, and before there is one.
  std::optional<std::string> Encode(const StepCommand& command) const;
  absl::Status Announce(const StepCommand& command);
  absl::Status Step(const StepCommand& command);
  absl::StatusOr<Ticket> Submit(proto::RingOperation operation, const std::string& command)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(command_mutex);

  template <typename Call>
  auto Timed(proto::StallCause cause, const Call& call) {
    const StepMonitor::Stall stall(&monitor, cause);
    return call();
  }
};

absl::Status Session::Impl::Start(Connection connection) {
  private_daemon = std::move(connection.private_daemon);
  socket = std::move(connection.socket);
  welcome = std::move(connection.welcome);
  control = std::make_unique<ControlClient>(welcome.control_path, welcome.token, &health);
  RingClient::Options options{
      .socket = socket.get(),
      .pidfd = private_daemon.pidfd(),
      .health = &health,
      .monitor = &monitor,
      .describe_end = [this](const absl::Status& said) { return DescribeEnd(said); },
      .on_failure = [this] { control->Cancel(); },
      .explain = [this](uint64_t tag) { return control->ExplainFailure(tag); }};
  OFFLOAD_ASSIGN_OR_RETURN(rings, RingClient::Start(std::move(options)));
  return absl::OkStatus();
}

absl::Status Session::Impl::DescribeEnd(const absl::Status& said) {
  if (ErrorIdOf(said) != ErrorId::kDaemonLost) return said;
  const std::string end = private_daemon.DescribeEnd(kEndGraceMilliseconds);
  std::string what = absl::StrCat("the daemon (process ", welcome.daemon_pid, ") is gone");
  if (!end.empty()) absl::StrAppend(&what, ": ", end);
  if (!absl::StartsWith(end, "signal 9 ")) return MakeError(ErrorId::kDaemonLost, what);
  return MakeError(ErrorId::kDaemonLost, what,
                   "Start the run again: it resumes at the last committed epoch. Where nobody "
                   "killed it, the kernel did for want of memory (see dmesg): lower ram, or raise "
                   "the limit of the container");
}

absl::Status Session::Impl::MapMemory(const JobInfo& info) {
  OFFLOAD_ASSIGN_OR_RETURN(proto::SessionMemory memory,
                           proto::RequestMemory(socket.get(), welcome.token));
  if (memory.slab_bytes != info.slab_bytes || memory.region_bytes != info.region_bytes) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("slab and region of ", memory.slab_bytes,
                                                      " and ", memory.region_bytes, " bytes"));
  }
  OFFLOAD_ASSIGN_OR_RETURN(
      MappedRegion slab,
      proto::MapFromDaemon(memory.slab.get(), memory.slab_bytes, /*writable=*/false));
  OFFLOAD_ASSIGN_OR_RETURN(
      MappedRegion region,
      proto::MapFromDaemon(memory.region.get(), memory.region_bytes, /*writable=*/true));
  OFFLOAD_RETURN_IF_ERROR(proto::ConfirmMapped(socket.get()));
  return rings->AttachMemory(std::move(slab), std::move(region), std::move(memory.doorbell));
}

// OFFLOADD_TRACE names the file. The first rank's has the transfers of the daemon.
absl::Status Session::Impl::StartTrace(const std::string& job) {
  const char* const path = std::getenv("OFFLOADD_TRACE");
  if (path == nullptr || *path == 0) return absl::OkStatus();
  static std::atomic<uint32_t> traces_of_process{0};
  StepMonitor::TraceOptions options;
  options.path = TracePath(path, world.rank, traces_of_process.fetch_add(1) + 1);
  options.daemon_pid = static_cast<uint32_t>(welcome.daemon_pid);
  options.job = job;
  if (world.rank == 0) options.take_transfers = [this] { return control->TakeTransfers(); };
  options.resident_bytes = [this] {
    return rings->slab_header().resident_bytes.load(std::memory_order_relaxed);
  };
  return monitor.StartTrace(std::move(options));
}

// OFFLOADD_STEP_LOG names the file; of several ranks and sessions each has its own, as of traces.
absl::Status Session::Impl::StartStepLog() {
  const char* const path = std::getenv("OFFLOADD_STEP_LOG");
  if (path == nullptr || *path == 0) return absl::OkStatus();
  static std::atomic<uint32_t> logs_of_process{0};
  OFFLOAD_ASSIGN_OR_RETURN(
      step_log, StepLog::Open(TracePath(path, world.rank, logs_of_process.fetch_add(1) + 1),
                              proto::StepWordsOf(rings->region()),
                              proto::GpuWordsOf(rings->region()), &rings->slab_header()));
  return absl::OkStatus();
}

// ---- Steps -------------------------------------------------------------------------------------

std::optional<std::string> Session::Impl::Encode(const StepCommand& command) const {
  if (rings->region() == nullptr) return std::nullopt;
  return EncodeStep(command, proto::kStepCommandBytes);
}

absl::StatusOr<Ticket> Session::Impl::Submit(proto::RingOperation operation,
                                             const std::string& command) {
  if (announcement.has_value())
    OFFLOAD_RETURN_IF_ERROR(rings->Wait(*std::exchange(announcement, std::nullopt)));
  OFFLOAD_RETURN_IF_ERROR(rings->status());  // without a session there is no region
  std::memcpy(rings->region() + proto::kStepCommandOffset, command.data(), command.size());
  proto::SubmissionEntry entry{};
  entry.operation = operation;
  entry.element_count = command.size();
  return rings->Submit(entry);
}

absl::Status Session::Impl::Announce(const StepCommand& command) {
  const std::optional<std::string> encoded = Encode(command);
  if (!encoded.has_value()) return control->BeginStep(command);
  absl::MutexLock lock(&command_mutex);
  OFFLOAD_ASSIGN_OR_RETURN(announcement, Submit(proto::RingOperation::kBeginStep, *encoded));
  return absl::OkStatus();
}

// By the ring when the command has room there. What it says is written over by nobody before it is
// answered.
absl::Status Session::Impl::Step(const StepCommand& command) {
  const std::optional<std::string> encoded = Encode(command);
  if (!encoded.has_value()) return control->Step(command);
  absl::MutexLock lock(&command_mutex);
  OFFLOAD_ASSIGN_OR_RETURN(const Ticket ticket, Submit(proto::RingOperation::kStep, *encoded));
  return rings->WaitAwake(ticket);
}

void Session::Impl::Close() {
  OpenJobs::Instance().Leave(&health);
  monitor.StopTrace();
  if (rings != nullptr) rings->Stop();
  // A forked child keeps its copy of the socket open; a shutdown the daemon sees all the same.
  if (socket.valid()) ::shutdown(socket.get(), SHUT_RDWR);
  socket.reset();
  // The daemon's end would wait for an answer of this channel, which nobody drives any more.
  control.reset();
  private_daemon.WaitForEnd();
}

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(const ConnectOptions& options) {
  OpenClosedStreams();
  OFFLOAD_RETURN_IF_ERROR(CheckEnvironment(EnvironmentOfThisProcess()));
  OFFLOAD_ASSIGN_OR_RETURN(Connection connection, ConnectOrStart(options));
  auto impl = std::make_unique<Impl>();
  OFFLOAD_RETURN_IF_ERROR(impl->Start(std::move(connection)));
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() {
  if (impl_->health.forked()) {
    // Threads, locks and the daemon are the parent's: nothing of them may be touched here.
    static_cast<void>(impl_.release());
    return;
  }
  impl_->Close();
}

absl::StatusOr<JobInfo> Session::OpenJob(const JobOptions& options) {
  impl_->world = options.world;
  OFFLOAD_RETURN_IF_ERROR(OpenJobs::Instance().Enter(&impl_->health, options));
  OFFLOAD_ASSIGN_OR_RETURN(JobInfo info, impl_->control->OpenJob(options));
  OFFLOAD_RETURN_IF_ERROR(impl_->MapMemory(info));
  OFFLOAD_RETURN_IF_ERROR(impl_->StartTrace(options.job));
  OFFLOAD_RETURN_IF_ERROR(impl_->StartStepLog());
  return info;
}

absl::Status Session::DeclareTensors(std::span<const proto::Tensor> tensors) {
  OFFLOAD_RETURN_IF_ERROR(impl_->control->DeclareTensors(tensors));
  impl_->tensor_count = tensors.size();
  std::vector<std::string> names;
  for (const proto::Tensor& tensor : tensors) names.push_back(tensor.name);
  impl_->monitor.NameTensors(std::move(names));
  return absl::OkStatus();
}

absl::Status Session::ReserveScratch(uint64_t bytes) {
  return impl_->control->ReserveScratch(bytes);
}

absl::Status Session::Seal(const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan,
                           uint64_t pins_offset,
                           const std::function<void(uint64_t formatted, uint64_t total)>& progress,
                           const OtherTensors* others) {
  OFFLOAD_RETURN_IF_ERROR(impl_->control->Seal(optimizer, plan, pins_offset, progress, others));
  OFFLOAD_RETURN_IF_ERROR(impl_->rings->AttachTensors(impl_->tensor_count, pins_offset));
  return plan.world_size > 1 ? impl_->rings->AttachGradientWords() : absl::OkStatus();
}

absl::Status Session::Publish(const std::string& trainer_state) {
  return impl_->control->Publish(trainer_state);
}

absl::Status Session::EndLoad() {
  return impl_->Timed(proto::StallCause::kTransfer, [&] { return impl_->control->EndLoad(); });
}

absl::Status Session::CountUses(uint64_t use_times_offset) {
  return impl_->rings->AttachUseTimes(use_times_offset);
}

absl::Status Session::SetSchedule(std::span<const uint32_t> tensors) {
  return impl_->control->SetSchedule(tensors);
}

absl::Status Session::SetSquareRoots(const kernels::SquareRoots& roots) {
  return impl_->control->SetSquareRoots(roots);
}

absl::Status Session::BeginStep(const StepCommand& command) { return impl_->Announce(command); }

void Session::ReleaseGradient(uint32_t tensor) { impl_->rings->ReleaseGradient(tensor); }

absl::Status Session::Step(const StepCommand& command) {
  const bool is_alone = impl_->world.world_size <= 1;
  impl_->monitor.Enter(proto::StepPhase::kStep);
  const absl::Status status =
      impl_->Timed(is_alone ? proto::StallCause::kCommit : proto::StallCause::kRanks,
                   [&] { return impl_->Step(command); });
  impl_->monitor.Enter(proto::StepPhase::kForward);
  if (status.ok() && impl_->step_log != nullptr) impl_->step_log->Add(command.step);
  return status;
}

absl::StatusOr<uint64_t> Session::WaitDurable() {
  return impl_->Timed(proto::StallCause::kCommit, [&] { return impl_->control->WaitDurable(); });
}

absl::StatusOr<uint64_t> Session::Checkpoint() { return impl_->control->Checkpoint(); }

absl::StatusOr<std::vector<std::string>> Session::Exchange(const std::string& data) {
  return impl_->Timed(proto::StallCause::kRanks, [&] {
    return impl_->control->Exchange(data, impl_->exchanges.fetch_add(1));
  });
}

const World& Session::world() const { return impl_->world; }

absl::Status Session::CloseJob() {
  OpenJobs::Instance().Leave(&impl_->health);
  impl_->monitor.StopTrace();  // while the daemon still has something to tell
  return impl_->control->CloseJob();
}

absl::StatusOr<const std::byte*> Session::Acquire(uint32_t tensor) {
  return impl_->rings->Acquire(tensor);
}

absl::StatusOr<const std::byte*> Session::TryAcquire(uint32_t tensor) {
  return impl_->rings->TryAcquire(tensor);
}

void Session::Release(uint32_t tensor) { impl_->rings->Release(tensor); }

bool Session::Prefetch(uint32_t tensor) { return impl_->rings->Prefetch(tensor); }

proto::TensorState Session::State(uint32_t tensor) const { return impl_->rings->State(tensor); }

void Session::SetSchedulePosition(uint32_t position) {
  impl_->rings->SetSchedulePosition(position);
}

Ticket Session::PutPlane(uint32_t tensor, proto::Plane plane, uint64_t element_offset,
                         uint64_t element_count, uint64_t region_offset, uint64_t digest) {
  proto::SubmissionEntry entry =
      Transfer(proto::RingOperation::kPut, element_offset, element_count, region_offset);
  entry.tensor = tensor;
  entry.plane = plane;
  entry.digest = digest;
  return impl_->rings->Submit(entry);
}

Ticket Session::FollowPut(uint32_t tensor, uint64_t digest) {
  return PutPlane(tensor, proto::Plane::kWeight, 0, 0, 0, digest);
}

Ticket Session::Get(uint32_t tensor, proto::Plane plane, uint64_t element_offset,
                    uint64_t element_count, uint64_t region_offset) {
  proto::SubmissionEntry entry =
      Transfer(proto::RingOperation::kGet, element_offset, element_count, region_offset);
  entry.tensor = tensor;
  entry.plane = plane;
  return impl_->rings->Submit(entry);
}

Ticket Session::ScratchWrite(uint64_t scratch_offset, uint64_t length_bytes,
                             uint64_t region_offset) {
  return impl_->rings->Submit(
      Transfer(proto::RingOperation::kScratchWrite, scratch_offset, length_bytes, region_offset));
}

Ticket Session::ScratchRead(uint64_t scratch_offset, uint64_t length_bytes,
                            uint64_t region_offset) {
  return impl_->rings->Submit(
      Transfer(proto::RingOperation::kScratchRead, scratch_offset, length_bytes, region_offset));
}

Ticket Session::BeginGradients(uint64_t step) {
  proto::SubmissionEntry entry{};
  entry.operation = proto::RingOperation::kBeginGradients;
  entry.element_offset = step;
  return impl_->rings->Submit(entry);
}

Ticket Session::DeliverGradient(uint32_t tensor, uint32_t pass, proto::GradientStart start,
                                uint64_t element_offset, uint64_t element_count,
                                uint64_t region_offset) {
  proto::SubmissionEntry entry =
      Transfer(proto::RingOperation::kGradient, element_offset, element_count, region_offset);
  entry.tensor = tensor;
  entry.pass = pass;
  entry.start = start;
  return impl_->rings->Submit(entry);
}

Ticket Session::EndPass(uint32_t pass, bool wait) {
  proto::SubmissionEntry entry{};
  entry.operation = proto::RingOperation::kEndPass;
  entry.pass = pass;
  entry.start = static_cast<proto::GradientStart>(wait ? 1 : 0);
  return impl_->rings->Submit(entry);
}

absl::StatusOr<uint64_t> Session::AwaitGradient(uint32_t tensor, uint32_t passes) {
  proto::SubmissionEntry entry{};
  entry.operation = proto::RingOperation::kAwaitGradient;
  entry.tensor = tensor;
  entry.pass = passes;
  return impl_->rings->WaitForValue(impl_->rings->Submit(entry), proto::StallCause::kRanks);
}

Ticket Session::PublishNorm(uint32_t tensor, float norm) {
  proto::SubmissionEntry entry{};
  entry.operation = proto::RingOperation::kPublishNorm;
  entry.tensor = tensor;
  entry.element_offset = std::bit_cast<uint32_t>(norm);
  return impl_->rings->Submit(entry);
}

uint64_t Session::GradientWord(uint32_t tensor) const { return impl_->rings->GradientWord(tensor); }

absl::Status Session::Wait(Ticket ticket) { return impl_->rings->Wait(ticket); }
bool Session::IsDone(Ticket ticket) const { return impl_->rings->IsDone(ticket); }

const std::byte* Session::slab() const { return impl_->rings->slab(); }
uint64_t Session::slab_bytes() const { return impl_->rings->slab_bytes(); }
std::byte* Session::region() const { return impl_->rings->region(); }
uint64_t Session::region_bytes() const { return impl_->rings->region_bytes(); }
const proto::SlabHeader& Session::slab_header() const { return impl_->rings->slab_header(); }
int Session::daemon_pid() const { return impl_->welcome.daemon_pid; }
bool Session::daemon_is_private() const { return impl_->private_daemon.valid(); }
absl::Status Session::health() const { return impl_->rings->status(); }
double Session::wait_seconds() const { return impl_->monitor.stall_seconds(); }

}  // namespace offload::client
