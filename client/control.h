// client/control.h
//
// The control calls of a session, over gRPC on the daemon's Unix socket.
//
// Calls that wait for the drive have no time limit: their end is the daemon's answer or its death,
// which Cancel() tells. All others have one. A failed transport is reported as what it means,
// OFD-1801.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/health.h"
#include "client/session.h"
#include "client/step_monitor.h"
#include "proto/grpc_status.h"
#include "proto/handshake.h"
#include "proto/offload.grpc.pb.h"

namespace offload::client {

// The command as a message for the ring; missing when it would take more than `bytes_max`.
std::optional<std::string> EncodeStep(const StepCommand& command, size_t bytes_max);

class ControlClient {
 public:
  // Connects lazily. `health` outlives the object.
  ControlClient(const std::string& path, const proto::Token& token, const Health* health);

  absl::StatusOr<JobInfo> OpenJob(const JobOptions& options);
  absl::Status DeclareTensors(std::span<const proto::Tensor> tensors);
  absl::Status ReserveScratch(uint64_t bytes);
  absl::Status Seal(const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan,
                    uint64_t pins_offset,
                    const std::function<void(uint64_t formatted, uint64_t total)>& progress,
                    const OtherTensors* others);
  absl::Status Publish(const std::string& trainer_state);
  absl::Status EndLoad();
  absl::Status SetSchedule(std::span<const uint32_t> tensors);
  absl::Status SetSquareRoots(const kernels::SquareRoots& roots);
  absl::Status BeginStep(const StepCommand& command);
  absl::Status Step(const StepCommand& command);
  absl::StatusOr<uint64_t> WaitDurable();
  absl::StatusOr<uint64_t> Checkpoint();
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& data, uint64_t number);
  absl::Status CloseJob();
  // What the job's files have moved since the last call.
  absl::StatusOr<TakenTransfers> TakeTransfers();
  // The text of a failed operation.
  absl::StatusOr<std::string> ExplainFailure(uint64_t tag);

  // Ends all calls, also later ones: the session has failed (its health says why).
  void Cancel();

 private:
  using Stub = proto::v1::Control::Stub;
  using Limit = std::optional<std::chrono::seconds>;

  // Runs one call with a context that Cancel() reaches.
  absl::Status Run(const char* name, Limit limit,
                   const std::function<grpc::Status(grpc::ClientContext&)>& call);
  // Makes a transport error what it means; errors of the daemon pass.
  absl::Status Explain(const char* name, const grpc::Status& status) const;

  const proto::Token token_;
  const Health* const health_;
  std::unique_ptr<Stub> stub_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace offload::client
