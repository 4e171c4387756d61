// offloadd/control_service.h
//
// The gRPC service of proto/offload.proto: reads messages, finds the session of the token and its
// job, lets the job's loop work and waits for it.
//
// Thread safety: gRPC calls it from many threads; what it owns but the tables' pointers
// may be used by any thread, too.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/error.h"
#include "offloadd/job_table.h"
#include "offloadd/pool_policy.h"
#include "offloadd/session_table.h"
#include "offloadd/shared_square_roots.h"
#include "proto/offload.grpc.pb.h"

namespace offload::daemon {

class ControlService final : public proto::v1::Control::Service {
 public:
  // `sessions` and `jobs` outlive the service.
  // `serves_tools`: answers calls that need no session, too.
  // `is_private`: the daemon serves one launch only.
  ControlService(SessionTable* sessions, JobTable* jobs, PoolPolicy pools, bool serves_tools,
                 bool is_private)
      : sessions_(sessions),
        jobs_(jobs),
        pools_(std::move(pools)),
        serves_tools_(serves_tools),
        is_private_(is_private),
        started_seconds_(Clock::Real().NowSeconds()) {}

  grpc::Status OpenJob(grpc::ServerContext* context, const proto::v1::OpenJobRequest* request,
                       proto::v1::OpenJobReply* reply) override;
  grpc::Status DeclareTensors(grpc::ServerContext* context,
                              grpc::ServerReader<proto::v1::DeclareTensorsRequest>* reader,
                              proto::v1::DeclareTensorsReply* reply) override;
  grpc::Status ReserveScratch(grpc::ServerContext* context,
                              const proto::v1::ReserveScratchRequest* request,
                              proto::v1::Empty* reply) override;
  grpc::Status Seal(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<proto::v1::SealProgress, proto::v1::SealRequest>* stream) override;
  grpc::Status Publish(grpc::ServerContext* context, const proto::v1::PublishRequest* request,
                       proto::v1::Empty* reply) override;
  grpc::Status EndLoad(grpc::ServerContext* context, const proto::v1::Empty* request,
                       proto::v1::Empty* reply) override;
  grpc::Status SetSchedule(grpc::ServerContext* context,
                           grpc::ServerReader<proto::v1::SetScheduleRequest>* reader,
                           proto::v1::Empty* reply) override;
  grpc::Status SetSquareRoots(grpc::ServerContext* context,
                              grpc::ServerReader<proto::v1::SetSquareRootsRequest>* reader,
                              proto::v1::Empty* reply) override;
  grpc::Status BeginStep(grpc::ServerContext* context,
                         grpc::ServerReader<proto::v1::StepRequest>* reader,
                         proto::v1::Empty* reply) override;
  grpc::Status Step(grpc::ServerContext* context,
                    grpc::ServerReader<proto::v1::StepRequest>* reader,
                    proto::v1::StepReply* reply) override;
  grpc::Status WaitDurable(grpc::ServerContext* context, const proto::v1::Empty* request,
                           proto::v1::WaitDurableReply* reply) override;
  grpc::Status Checkpoint(grpc::ServerContext* context, const proto::v1::Empty* request,
                          proto::v1::CheckpointReply* reply) override;
  grpc::Status ExplainFailure(grpc::ServerContext* context,
                              const proto::v1::ExplainFailureRequest* request,
                              proto::v1::ExplainFailureReply* reply) override;
  grpc::Status Exchange(grpc::ServerContext* context, const proto::v1::ExchangeRequest* request,
                        proto::v1::ExchangeReply* reply) override;
  grpc::Status TakeTransfers(grpc::ServerContext* context,
                             const proto::v1::TakeTransfersRequest* request,
                             proto::v1::TakeTransfersReply* reply) override;
  grpc::Status CloseJob(grpc::ServerContext* context, const proto::v1::Empty* request,
                        proto::v1::Empty* reply) override;
  grpc::Status Status(grpc::ServerContext* context, const proto::v1::StatusRequest* request,
                      proto::v1::StatusReply* reply) override;
  grpc::Status Report(grpc::ServerContext* context, const proto::v1::ReportRequest* request,
                      grpc::ServerWriter<proto::v1::ReportPart>* writer) override;
  grpc::Status ListJobs(grpc::ServerContext* context, const proto::v1::ListJobsRequest* request,
                        proto::v1::ListJobsReply* reply) override;
  grpc::Status RemoveJob(grpc::ServerContext* context, const proto::v1::RemoveJobRequest* request,
                         proto::v1::Empty* reply) override;
  grpc::Status CreateSnapshot(
      grpc::ServerContext* context, const proto::v1::CreateSnapshotRequest* request,
      grpc::ServerWriter<proto::v1::CreateSnapshotProgress>* writer) override;
  grpc::Status DeleteSnapshot(grpc::ServerContext* context,
                              const proto::v1::DeleteSnapshotRequest* request,
                              proto::v1::Empty* reply) override;

 private:
  // The session of the call's token. One call of it ends with the last copy of the pointer.
  absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::ServerContext& context) const;
  absl::Status CheckServesTools() const;
  // That is open here; the error `otherwise` when it is not.
  absl::StatusOr<std::shared_ptr<Job>> OpenedJob(const std::string& requested_pool,
                                                 const std::string& job, ErrorId otherwise) const;
  // The job that the session asks for: new, or opened by others of its launch.
  absl::StatusOr<std::shared_ptr<Job>> TakeJob(const Session& session,
                                               const proto::v1::OpenJobRequest& request);

  SessionTable* sessions_;
  JobTable* jobs_;
  PoolPolicy pools_;
  bool serves_tools_, is_private_;
  double started_seconds_;
  SharedSquareRoots square_roots_;
};

}  // namespace offload::daemon
