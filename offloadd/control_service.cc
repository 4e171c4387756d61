#include "offloadd/control_service.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "offloadd/limits.h"
#include "proto/grpc_status.h"
#include "swap/store.h"

namespace offload::daemon {
namespace {

namespace v1 = proto::v1;
using proto::ToGrpc;

constexpr auto kStatusPatience = std::chrono::milliseconds(500);
constexpr auto kProgressPause = std::chrono::milliseconds(200);
constexpr auto kClaimPause = std::chrono::milliseconds(20);

absl::Status NoJob() { return MakeError(ErrorId::kProtocol, "a call before OpenJob"); }

// What a client streamed, counted against its session for as long as it is kept.
template <typename Message>
class Stream {
 public:
  // Reads all of it.
  template <typename Reader>
  static absl::StatusOr<Stream> Read(Reader* reader, std::shared_ptr<Session> session) {
    Stream stream(std::move(session));
    Message message;
    while (reader->Read(&message)) {
      const uint64_t bytes = message.SpaceUsedLong();
      if (!stream.session_->TakeStreamMemory(bytes)) {
        return MakeError(ErrorId::kProtocol,
                         absl::StrCat("streams of more than ", kLimits.stream_bytes_max, " bytes"));
      }
      stream.bytes_ += bytes;
      stream.messages_.push_back(std::move(message));
      message.Clear();
    }
    return stream;
  }
  Stream(Stream&& other) noexcept
      : session_(std::move(other.session_)),
        messages_(std::move(other.messages_)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  ~Stream() {
    if (session_ != nullptr) session_->ReturnStreamMemory(bytes_);
  }

  std::vector<Message>& messages() { return messages_; }

 private:
  explicit Stream(std::shared_ptr<Session> session) : session_(std::move(session)) {}

  std::shared_ptr<Session> session_;
  std::vector<Message> messages_;
  uint64_t bytes_ = 0;
};

// What a job is claimed by: the same for the same store. A pool that is not there is refused later.
absl::StatusOr<std::string> ClaimOf(const std::string& pool, const std::string& job) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, swap::SplitPools(pool));
  std::error_code error;
  return absl::StrCat(std::filesystem::canonical(pools.front(), error).string(), "/", job);
}

// Runs `work` on the session's loop with its job.
template <typename Answer, typename Work>
Answer OnJob(Session& session, Work work) {
  return session.loop().Call<Answer>(
      [&session, work = std::move(work)](std::function<void(Answer)> answer) mutable {
        if (session.job() == nullptr) return answer(NoJob());
        work(*session.job(), std::move(answer));
      });
}

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> ControlService::SessionOf(
    const grpc::ServerContext& context) const {
  const std::optional<proto::Token> token = proto::TokenOf(context);
  std::shared_ptr<Session> session = token.has_value() ? sessions_->FindByToken(*token) : nullptr;
  if (session == nullptr) return MakeError(ErrorId::kRefused, "the call has no session's token");
  if (!session->BeginCall()) {
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("the session has ", kLimits.calls_per_session_max,
                                  " calls under way already"));
  }
  Session* const raw = session.get();
  return std::shared_ptr<Session>(raw, [session = std::move(session)](Session*) mutable {
    session->EndCall();
    session.reset();
  });
}

absl::Status ControlService::CheckServesTools() const {
  if (serves_tools_) return absl::OkStatus();
  return MakeError(ErrorId::kRefused, "only the daemon's own user may ask for this");
}

grpc::Status ControlService::OpenJob(grpc::ServerContext* context, const v1::OpenJobRequest* asked,
                                     v1::OpenJobReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  v1::OpenJobRequest request = *asked;
  request.set_job((*session)->StoredName(asked->job()));
  if (const absl::Status claimed = ClaimJob(*session, request); !claimed.ok())
    return ToGrpc(claimed);
  using Answer = absl::StatusOr<v1::OpenJobReply>;
  const Answer answer = (*session)->loop().Call<Answer>(
      [&](std::function<void(Answer)> done) { done((*session)->OpenJob(request)); });
  if (answer.ok()) {
    *reply = *answer;
  } else {
    sessions_->DropClaim(*session);
  }
  return ToGrpc(answer.status());
}

// A job that another session has open is refused at once instead of waiting for its lock. A rank
// that has just closed its connection gets a moment to be noticed.
absl::Status ControlService::ClaimJob(const std::shared_ptr<Session>& session,
                                      const v1::OpenJobRequest& request) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pool, ChoosePool(pools_, request.pool()));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string job, ClaimOf(pool, request.job()));
  const double deadline = Clock::Real().NowSeconds() + kLimits.holder_patience_seconds;
  for (;;) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::optional<pid_t> holder, sessions_->Claim(session, job));
    if (!holder.has_value()) return absl::OkStatus();
    if (Clock::Real().NowSeconds() >= deadline) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat("job \"", request.job(), "\" of ", pool,
                                                           " is in use by process ", *holder));
    }
    std::this_thread::sleep_for(kClaimPause);
  }
}

grpc::Status ControlService::DeclareTensors(grpc::ServerContext* context,
                                            grpc::ServerReader<v1::DeclareTensorsRequest>* reader,
                                            v1::DeclareTensorsReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::DeclareTensorsRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  uint64_t tensor_count = 0;
  const auto status =
      OnJob<absl::Status>(**session, [&](Job& job, std::function<void(absl::Status)> done) {
        done(job.DeclareTensors(messages->messages(), &tensor_count));
      });
  reply->set_tensor_count(tensor_count);
  return ToGrpc(status);
}

grpc::Status ControlService::ReserveScratch(grpc::ServerContext* context,
                                            const v1::ReserveScratchRequest* request, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(
      OnJob<absl::Status>(**session, [&](Job& job, std::function<void(absl::Status)> done) {
        done(job.ReserveScratch(request->bytes()));
      }));
}

grpc::Status ControlService::Seal(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::SealProgress, v1::SealRequest>* stream) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::SealRequest>::Read(stream, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  // The loop formats and this thread waits for it, so the stream is the loop's to write meanwhile.
  double reported_seconds = 0;
  const Job::Progress progress = [&](uint64_t bytes_formatted, uint64_t bytes_total) {
    const double now = Clock::Real().NowSeconds();
    if (now - reported_seconds < 0.1) return;
    reported_seconds = now;
    v1::SealProgress message;
    message.set_bytes_formatted(bytes_formatted);
    message.set_bytes_total(bytes_total);
    stream->Write(message);
  };
  const auto status =
      OnJob<absl::Status>(**session, [&](Job& job, std::function<void(absl::Status)> done) {
        done(job.Seal(messages->messages(), progress));
      });
  if (!status.ok()) return ToGrpc(status);
  v1::SealProgress last;
  last.set_done(true);
  stream->Write(last);
  return grpc::Status::OK;
}

grpc::Status ControlService::Publish(grpc::ServerContext* context,
                                     const v1::PublishRequest* request, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(
      OnJob<absl::Status>(**session, [&](Job& job, std::function<void(absl::Status)> done) {
        job.Publish(request->trainer_state(), std::move(done));
      }));
}

grpc::Status ControlService::EndLoad(grpc::ServerContext* context, const v1::Empty*, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(OnJob<absl::Status>(
      **session,
      [](Job& job, std::function<void(absl::Status)> done) { job.EndLoad(std::move(done)); }));
}

grpc::Status ControlService::SetSchedule(grpc::ServerContext* context,
                                         grpc::ServerReader<v1::SetScheduleRequest>* reader,
                                         v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::SetScheduleRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  std::vector<uint32_t> tensors;
  for (const v1::SetScheduleRequest& message : messages->messages()) {
    if (message.first()) tensors.clear();
    tensors.insert(tensors.end(), message.tensors().begin(), message.tensors().end());
  }
  return ToGrpc(OnJob<absl::Status>(
      **session,
      [&](Job& job, std::function<void(absl::Status)> done) { done(job.SetSchedule(tensors)); }));
}

grpc::Status ControlService::Step(grpc::ServerContext* context,
                                  grpc::ServerReader<v1::StepRequest>* reader,
                                  v1::StepReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::StepRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  using Answer = absl::StatusOr<uint64_t>;
  const Answer durable = OnJob<Answer>(**session, [&](Job& job, std::function<void(Answer)> done) {
    job.Step(std::move(messages->messages()), std::move(done));
  });
  if (durable.ok()) reply->set_durable_step(*durable);
  return ToGrpc(durable.status());
}

grpc::Status ControlService::WaitDurable(grpc::ServerContext* context, const v1::Empty*,
                                         v1::WaitDurableReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<uint64_t>;
  const Answer durable = OnJob<Answer>(**session, [](Job& job, std::function<void(Answer)> done) {
    job.WaitDurable(std::move(done));
  });
  if (durable.ok()) reply->set_durable_step(*durable);
  return ToGrpc(durable.status());
}

grpc::Status ControlService::ExplainFailure(grpc::ServerContext* context,
                                            const v1::ExplainFailureRequest* request,
                                            v1::ExplainFailureReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<std::string>;
  const Answer text = OnJob<Answer>(**session, [&](Job& job, std::function<void(Answer)> done) {
    done(job.ExplainFailure(request->tag()));
  });
  if (text.ok()) reply->set_text(*text);
  return ToGrpc(text.status());
}

grpc::Status ControlService::CloseJob(grpc::ServerContext* context, const v1::Empty*, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc((*session)->loop().Call<absl::Status>(
      [&](std::function<void(absl::Status)> done) { (*session)->CloseJob(std::move(done)); }));
}

grpc::Status ControlService::Status(grpc::ServerContext*, const v1::StatusRequest*,
                                    v1::StatusReply* reply) {
  if (const absl::Status status = CheckServesTools(); !status.ok()) return ToGrpc(status);
  reply->set_version(kVersion);
  reply->set_pid(static_cast<uint32_t>(getpid()));
  reply->set_uptime_seconds(Clock::Real().NowSeconds() - started_seconds_);
  for (const std::shared_ptr<Session>& session : sessions_->All()) {
    auto promise = std::make_shared<std::promise<std::optional<v1::JobStatus>>>();
    std::future<std::optional<v1::JobStatus>> future = promise->get_future();
    const bool posted = session->loop().Post([session, promise] {
      std::optional<v1::JobStatus> status;
      if (session->job() != nullptr) session->job()->FillStatus(&status.emplace());
      promise->set_value(std::move(status));
    });
    // A loop that is formatting a store answers later; the others must not wait for it.
    if (!posted) continue;
    if (future.wait_for(kStatusPatience) == std::future_status::timeout) {
      reply->add_jobs()->set_phase("busy");
    } else if (std::optional<v1::JobStatus> status = future.get()) {
      *reply->add_jobs() = *std::move(status);
    } else {
      continue;
    }
    reply->mutable_jobs(reply->jobs_size() - 1)
        ->set_client_pid(static_cast<uint32_t>(session->client_pid()));
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                                      v1::ListJobsReply* reply) {
  if (const absl::Status status = CheckServesTools(); !status.ok()) return ToGrpc(status);
  const absl::StatusOr<std::string> pool = ChoosePool(pools_, request->pool());
  if (!pool.ok()) return ToGrpc(pool.status());
  const absl::StatusOr<std::vector<swap::StoreSummary>> stores = swap::ListStores(*pool);
  if (!stores.ok()) return ToGrpc(stores.status());
  for (const swap::StoreSummary& store : *stores) {
    v1::JobSummary* job = reply->add_jobs();
    job->set_job(store.job);
    job->set_file_bytes(store.file_bytes);
    job->set_step(store.committed.epoch);
    job->set_in_use(store.in_use);
    if (!store.damage.ok()) job->set_damage(std::string(store.damage.message()));
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::RemoveJob(grpc::ServerContext*, const v1::RemoveJobRequest* request,
                                       v1::Empty*) {
  if (const absl::Status status = CheckServesTools(); !status.ok()) return ToGrpc(status);
  const absl::StatusOr<std::string> pool = ChoosePool(pools_, request->pool());
  if (!pool.ok()) return ToGrpc(pool.status());
  return ToGrpc(swap::RemoveStore(*pool, request->job()));
}

absl::StatusOr<std::shared_ptr<Session>> ControlService::SessionOfJob(
    const std::string& requested_pool, const std::string& job) const {
  OFFLOAD_RETURN_IF_ERROR(CheckServesTools());
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pool, ChoosePool(pools_, requested_pool));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string claim, ClaimOf(pool, job));
  std::shared_ptr<Session> session = sessions_->FindByClaim(claim);
  if (session != nullptr) return session;
  return MakeError(ErrorId::kSnapshot,
                   absl::StrCat("job ", job, " of ", pool, " is not open in this daemon"));
}

grpc::Status ControlService::CreateSnapshot(
    grpc::ServerContext*, const v1::CreateSnapshotRequest* request,
    grpc::ServerWriter<v1::CreateSnapshotProgress>* writer) {
  const auto session = SessionOfJob(request->pool(), request->job());
  if (!session.ok()) return ToGrpc(session.status());
  // The loop must not wait for a reader: it leaves the numbers here, and this thread sends them.
  struct Shared {
    std::atomic<uint64_t> bytes_formatted{0}, bytes_total{0};
    std::promise<absl::StatusOr<uint64_t>> answer;
  };
  auto shared = std::make_shared<Shared>();
  std::future<absl::StatusOr<uint64_t>> answer = shared->answer.get_future();
  const bool posted = (*session)->loop().Post([session = *session, shared, request = *request] {
    if (session->job() == nullptr) return shared->answer.set_value(NoJob());
    session->job()->CreateSnapshot(
        request.name(), request.may_grow(),
        [shared](uint64_t bytes_formatted, uint64_t bytes_total) {
          shared->bytes_total = bytes_total;
          shared->bytes_formatted = bytes_formatted;
        },
        [shared](absl::StatusOr<uint64_t> step) { shared->answer.set_value(std::move(step)); });
  });
  if (!posted) return ToGrpc(MakeError(ErrorId::kSessionEnded, "the session is closed"));
  v1::CreateSnapshotProgress message;
  while (answer.wait_for(kProgressPause) == std::future_status::timeout) {
    if (shared->bytes_total == 0) continue;
    message.set_bytes_formatted(shared->bytes_formatted);
    message.set_bytes_total(shared->bytes_total);
    writer->Write(message);
  }
  const absl::StatusOr<uint64_t> step = answer.get();
  if (!step.ok()) return ToGrpc(step.status());
  message.set_done(true);
  message.set_step(*step);
  writer->Write(message);
  return grpc::Status::OK;
}

grpc::Status ControlService::DeleteSnapshot(grpc::ServerContext*,
                                            const v1::DeleteSnapshotRequest* request, v1::Empty*) {
  const auto session = SessionOfJob(request->pool(), request->job());
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<uint64_t>;
  return ToGrpc(OnJob<Answer>(**session, [&](Job& job, std::function<void(Answer)> done) {
                  job.DeleteSnapshot(request->name(), std::move(done));
                }).status());
}

}  // namespace offload::daemon
