#include "offloadd/control_service.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "offloadd/environment.h"
#include "offloadd/limits.h"
#include "offloadd/membership.h"
#include "offloadd/status_reply.h"
#include "proto/grpc_status.h"
#include "swap/store.h"

namespace offload::daemon {
namespace {

namespace v1 = proto::v1;
using proto::ToGrpc;

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

// The same for the same store. A pool that is not there is refused later.
absl::StatusOr<std::string> StoreOf(const std::string& pool, const std::string& job) {
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(pool));
  std::error_code error;
  return absl::StrCat(std::filesystem::canonical(pools.front(), error).string(), "/", job);
}

// Empty for one rank, whose job nobody joins.
std::string RunIdOf(const v1::OpenJobRequest& request) {
  return request.world().world_size() == 1 ? std::string() : request.world().run_id();
}

// Why a job that has ranks is not one's own.
std::string DescribeLaunches(const Job& job, const JobIdentity& ours) {
  const std::string& other = job.identity().run_id;
  if (job.identity().user != ours.user) return " of another user";
  if (other.empty() || ours.run_id.empty()) return "";
  return absl::StrCat(" of launch ", other, ", not of ", ours.run_id);
}

// Runs `work` on the loop of the session's job, with the session's rank of it.
template <typename Answer, typename Work>
Answer OnJob(Session& session, Work work) {
  const std::shared_ptr<Job> job = session.job();
  if (job == nullptr) return session.IsLeaving() ? session.Ended() : NoJob();
  return job->loop().Call<Answer>([&](std::function<void(Answer)> answer) {
    if (session.IsLeaving()) return answer(session.Ended());
    Rank* const rank = job->FindRank(session.id());
    if (rank == nullptr) return answer(NoJob());
    work(*job, *rank, std::move(answer));
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> ControlService::SessionOf(
    const grpc::ServerContext& context) const {
  const std::optional<proto::Token> token = proto::TokenOf(context);
  std::shared_ptr<Session> session = token.has_value() ? sessions_->FindByToken(*token) : nullptr;
  if (session == nullptr && token.has_value() && sessions_->daemon_ends()) return DaemonEnds();
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
  // A rank that waits for others asks again and again.
  std::shared_ptr<Job> job = (*session)->job();
  if (job == nullptr) {
    absl::StatusOr<std::shared_ptr<Job>> taken = TakeJob(**session, request);
    if (!taken.ok()) return ToGrpc(taken.status());
    job = *std::move(taken);
    if (absl::Status joined = (*session)->JoinJob(job); !joined.ok()) return ToGrpc(joined);
  }
  using Answer = absl::StatusOr<v1::OpenJobReply>;
  const Answer answer = job->loop().Call<Answer>([&](std::function<void(Answer)> done) {
    if ((*session)->IsLeaving()) return done((*session)->Ended());
    job->OpenJob((*session)->MemberOfJob(), request, std::move(done));
  });
  if (answer.ok()) {
    *reply = *answer;
  } else if (!job->HasMember((*session)->id())) {
    (*session)->DropJob();
  }
  return ToGrpc(answer.status());
}

// A job that somebody else has open is refused at once instead of waiting for its lock. A rank that
// has just closed its connection gets a moment to be noticed, and one of this launch that has not
// closed the job yet the time that it has to join one.
absl::StatusOr<std::shared_ptr<Job>> ControlService::TakeJob(const Session& session,
                                                             const v1::OpenJobRequest& request) {
  if (session.job() != nullptr) return MakeError(ErrorId::kProtocol, "OpenJob for the second time");
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pool, ChoosePool(pools_, request.pool()));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string store, StoreOf(pool, request.job()));
  const JobIdentity identity{.user = session.peer().uid,
                             .name = request.job(),
                             .pool = pool,
                             .store = store,
                             .run_id = RunIdOf(request),
                             .pid = session.client_pid(),
                             .is_private = is_private_};
  OFFLOAD_ASSIGN_OR_RETURN(const v1::World world, WorldOf(request));
  const double begin = Clock::Real().NowSeconds();
  const double join_timeout = JoinTimeoutSeconds();
  const double deadline = begin + kLimits.holder_patience_seconds;
  for (;;) {
    OFFLOAD_ASSIGN_OR_RETURN(JobTable::Claim claim, jobs_->Take(identity));
    if (claim.is_ours && !claim.job->IsLeftBy(world.rank())) return std::move(claim.job);
    if (claim.is_ours) {  // it is opened anew when the last rank has closed it
      if (session.IsLeaving()) return session.Ended();
      if (Clock::Real().NowSeconds() >= begin + join_timeout) {
        return MakeError(
            ErrorId::kStoreLocked,
            absl::StrCat("rank ", world.rank(), " has closed job \"", request.job(),
                         "\" and opens it again, and another rank has not closed it within ",
                         join_timeout, " s"),
            "Close it on every rank before one opens it again");
      }
      std::this_thread::sleep_for(kClaimPause);
      continue;
    }
    if (Clock::Real().NowSeconds() >= deadline) {
      return MakeError(
          ErrorId::kStoreLocked,
          absl::StrCat("job \"", request.job(), "\" of ", pool, " is in use by process ",
                       claim.job->identity().pid, DescribeLaunches(*claim.job, identity)));
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
  const auto status = OnJob<absl::Status>(
      **session, [&](Job& job, Rank& rank, std::function<void(absl::Status)> done) {
        done(job.DeclareTensors(rank, messages->messages(), &tensor_count));
      });
  reply->set_tensor_count(tensor_count);
  return ToGrpc(status);
}

grpc::Status ControlService::ReserveScratch(grpc::ServerContext* context,
                                            const v1::ReserveScratchRequest* request, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(
      OnJob<absl::Status>(**session, [&](Job& job, Rank&, std::function<void(absl::Status)> done) {
        job.ReserveScratch(request->bytes(), std::move(done));
      }));
}

grpc::Status ControlService::Seal(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::SealProgress, v1::SealRequest>* stream) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::SealRequest>::Read(stream, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  // This thread waits for the one that formats, so the stream is that one's to write meanwhile.
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
  const auto status = OnJob<absl::Status>(
      **session, [&](Job& job, Rank& rank, std::function<void(absl::Status)> done) {
        job.Seal(rank, std::move(messages->messages()), progress, std::move(done));
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
  return ToGrpc(OnJob<absl::Status>(
      **session, [&](Job& job, Rank& rank, std::function<void(absl::Status)> done) {
        job.Publish(rank, request->trainer_state(), std::move(done));
      }));
}

grpc::Status ControlService::EndLoad(grpc::ServerContext* context, const v1::Empty*, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(
      OnJob<absl::Status>(**session, [](Job& job, Rank&, std::function<void(absl::Status)> done) {
        job.EndLoad(std::move(done));
      }));
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
      **session, [&](Job& job, Rank& rank, const std::function<void(absl::Status)>& done) {
        done(job.SetSchedule(rank, tensors));
      }));
}

grpc::Status ControlService::SetSquareRoots(grpc::ServerContext* context,
                                            grpc::ServerReader<v1::SetSquareRootsRequest>* reader,
                                            v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::SetSquareRootsRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  std::string bytes;
  bytes.reserve(kernels::SquareRoots::kBytes);
  for (const v1::SetSquareRootsRequest& message : messages->messages()) bytes += message.part();
  return ToGrpc(OnJob<absl::Status>(
      **session, [&](Job& job, Rank&, const std::function<void(absl::Status)>& done) {
        done(job.SetSquareRoots(square_roots_.Share(bytes)));
      }));
}

grpc::Status ControlService::BeginStep(grpc::ServerContext* context,
                                       grpc::ServerReader<v1::StepRequest>* reader, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::StepRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  return ToGrpc(OnJob<absl::Status>(
      **session, [&](Job& job, Rank&, const std::function<void(absl::Status)>& done) {
        done(job.BeginStep(messages->messages()));
      }));
}

grpc::Status ControlService::Step(grpc::ServerContext* context,
                                  grpc::ServerReader<v1::StepRequest>* reader,
                                  v1::StepReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  auto messages = Stream<v1::StepRequest>::Read(reader, *session);
  if (!messages.ok()) return ToGrpc(messages.status());
  using Answer = absl::StatusOr<uint64_t>;
  const Answer durable =
      OnJob<Answer>(**session, [&](Job& job, Rank& rank, std::function<void(Answer)> done) {
        job.Step(rank, std::move(messages->messages()), std::move(done));
      });
  if (durable.ok()) reply->set_durable_step(*durable);
  return ToGrpc(durable.status());
}

grpc::Status ControlService::WaitDurable(grpc::ServerContext* context, const v1::Empty*,
                                         v1::WaitDurableReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<uint64_t>;
  const Answer durable = OnJob<Answer>(
      **session,
      [](Job& job, Rank&, std::function<void(Answer)> done) { job.WaitDurable(std::move(done)); });
  if (durable.ok()) reply->set_durable_step(*durable);
  return ToGrpc(durable.status());
}

grpc::Status ControlService::Checkpoint(grpc::ServerContext* context, const v1::Empty*,
                                        v1::CheckpointReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<uint64_t>;
  const Answer step = OnJob<Answer>(
      **session,
      [](Job& job, Rank&, const std::function<void(Answer)>& done) { done(job.Checkpoint()); });
  if (step.ok()) reply->set_step(*step);
  return ToGrpc(step.status());
}

grpc::Status ControlService::ExplainFailure(grpc::ServerContext* context,
                                            const v1::ExplainFailureRequest* request,
                                            v1::ExplainFailureReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<std::string>;
  const Answer text =
      OnJob<Answer>(**session, [&](Job& job, Rank& rank, const std::function<void(Answer)>& done) {
        done(job.ExplainFailure(rank, request->tag()));
      });
  if (text.ok()) reply->set_text(*text);
  return ToGrpc(text.status());
}

grpc::Status ControlService::Exchange(grpc::ServerContext* context,
                                      const v1::ExchangeRequest* request,
                                      v1::ExchangeReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  using Answer = absl::StatusOr<std::vector<std::string>>;
  Answer said =
      OnJob<Answer>(**session, [&](Job& job, Rank& rank, std::function<void(Answer)> done) {
        job.Exchange(rank, *request, std::move(done));
      });
  if (!said.ok()) return ToGrpc(said.status());
  for (std::string& data : *said) reply->add_data(std::move(data));
  return grpc::Status::OK;
}

grpc::Status ControlService::TakeTransfers(grpc::ServerContext* context,
                                           const v1::TakeTransfersRequest*,
                                           v1::TakeTransfersReply* reply) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  return ToGrpc(OnJob<absl::Status>(
      **session, [&](Job& job, Rank&, const std::function<void(absl::Status)>& done) {
        job.TakeTransfers(reply);
        done(absl::OkStatus());
      }));
}

grpc::Status ControlService::CloseJob(grpc::ServerContext* context, const v1::Empty*, v1::Empty*) {
  const absl::StatusOr<std::shared_ptr<Session>> session = SessionOf(*context);
  if (!session.ok()) return ToGrpc(session.status());
  if ((*session)->job() == nullptr && !(*session)->IsLeaving())
    return grpc::Status::OK;  // nothing to close
  return ToGrpc(OnJob<absl::Status>(
      **session, [](Job& job, Rank& rank, std::function<void(absl::Status)> done) {
        job.Close(rank, std::move(done));
      }));
}

grpc::Status ControlService::Status(grpc::ServerContext*, const v1::StatusRequest*,
                                    v1::StatusReply* reply) {
  if (const absl::Status status = CheckServesTools(); !status.ok()) return ToGrpc(status);
  *reply = MakeStatusReply(*jobs_, started_seconds_);
  return grpc::Status::OK;
}

grpc::Status ControlService::Report(grpc::ServerContext*, const v1::ReportRequest* request,
                                    grpc::ServerWriter<v1::ReportPart>* writer) {
  const auto job = OpenedJob(request->pool(), request->job(), ErrorId::kBadValue);
  if (!job.ok()) return ToGrpc(job.status());
  using Answer = absl::StatusOr<std::vector<v1::ReportPart>>;
  const Answer parts = (*job)->loop().Call<Answer>(
      [&](const std::function<void(Answer)>& done) { done((*job)->Report()); });
  if (!parts.ok()) return ToGrpc(parts.status());
  for (const v1::ReportPart& part : *parts) {
    if (!writer->Write(part)) break;
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

absl::StatusOr<std::shared_ptr<Job>> ControlService::OpenedJob(const std::string& requested_pool,
                                                               const std::string& name,
                                                               ErrorId otherwise) const {
  OFFLOAD_RETURN_IF_ERROR(CheckServesTools());
  OFFLOAD_ASSIGN_OR_RETURN(const std::string pool, ChoosePool(pools_, requested_pool));
  OFFLOAD_ASSIGN_OR_RETURN(const std::string store, StoreOf(pool, name));
  std::shared_ptr<Job> job = jobs_->Find(store);
  if (job != nullptr) return job;
  return MakeError(otherwise,
                   absl::StrCat("job ", name, " of ", pool, " is not open in this daemon"));
}

grpc::Status ControlService::CreateSnapshot(
    grpc::ServerContext*, const v1::CreateSnapshotRequest* request,
    grpc::ServerWriter<v1::CreateSnapshotProgress>* writer) {
  const auto job = OpenedJob(request->pool(), request->job(), ErrorId::kSnapshot);
  if (!job.ok()) return ToGrpc(job.status());
  // The loop must not wait for a reader: it leaves the numbers here, and this thread sends them.
  struct Shared {
    std::atomic<uint64_t> bytes_formatted{0}, bytes_total{0};
    std::promise<absl::StatusOr<uint64_t>> answer;
  };
  auto shared = std::make_shared<Shared>();
  std::future<absl::StatusOr<uint64_t>> answer = shared->answer.get_future();
  (*job)->loop().Post([raw = job->get(), shared, request = *request] {
    raw->CreateSnapshot(
        request.name(), request.may_grow(),
        [shared](uint64_t bytes_formatted, uint64_t bytes_total) {
          shared->bytes_total = bytes_total;
          shared->bytes_formatted = bytes_formatted;
        },
        [shared](absl::StatusOr<uint64_t> step) { shared->answer.set_value(std::move(step)); });
  });
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
  const auto job = OpenedJob(request->pool(), request->job(), ErrorId::kSnapshot);
  if (!job.ok()) return ToGrpc(job.status());
  using Answer = absl::StatusOr<uint64_t>;
  return ToGrpc((*job)
                    ->loop()
                    .Call<Answer>([&](std::function<void(Answer)> done) {
                      (*job)->DeleteSnapshot(request->name(), std::move(done));
                    })
                    .status());
}

}  // namespace offload::daemon
