// tests/rank_calls.h
//
// Every control call of a rank as one function, whatever it sends: who calls gives the context,
// with or without a token in it.
//
// Thread safety: as the stub's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/grpc_status.h"
#include "proto/offload.grpc.pb.h"

namespace offload::tests {

namespace v1 = proto::v1;
using Stub = v1::Control::Stub;

// Calls without a stream of requests, and with one that is `messages`.
template <typename Request, typename Reply>
absl::Status Call(Stub& stub,
                  grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                  grpc::ClientContext& context, const Request& request, Reply* reply) {
  return proto::FromGrpc((stub.*method)(&context, request, reply));
}
template <typename Request, typename Reply>
absl::Status CallWith(
    const std::vector<Request>& messages, grpc::ClientContext& context, Reply* reply,
    const std::function<std::unique_ptr<grpc::ClientWriter<Request>>(grpc::ClientContext*, Reply*)>&
        begin) {
  const auto writer = begin(&context, reply);
  for (const Request& message : messages) {
    if (!writer->Write(message)) break;
  }
  writer->WritesDone();
  return proto::FromGrpc(writer->Finish());
}

inline absl::Status DeclareTensors(Stub& stub, grpc::ClientContext& context,
                                   const std::vector<v1::DeclareTensorsRequest>& messages) {
  v1::DeclareTensorsReply reply;
  return CallWith<v1::DeclareTensorsRequest, v1::DeclareTensorsReply>(
      messages, context, &reply,
      [&](auto* begun, auto* answer) { return stub.DeclareTensors(begun, answer); });
}
inline absl::Status SetSchedule(Stub& stub, grpc::ClientContext& context,
                                const std::vector<v1::SetScheduleRequest>& messages) {
  v1::Empty reply;
  return CallWith<v1::SetScheduleRequest, v1::Empty>(
      messages, context, &reply,
      [&](auto* begun, auto* answer) { return stub.SetSchedule(begun, answer); });
}
inline absl::Status SetSquareRoots(Stub& stub, grpc::ClientContext& context,
                                   const std::vector<v1::SetSquareRootsRequest>& messages) {
  v1::Empty reply;
  return CallWith<v1::SetSquareRootsRequest, v1::Empty>(
      messages, context, &reply,
      [&](auto* begun, auto* answer) { return stub.SetSquareRoots(begun, answer); });
}
inline absl::Status Step(Stub& stub, grpc::ClientContext& context,
                         const std::vector<v1::StepRequest>& messages) {
  v1::StepReply reply;
  return CallWith<v1::StepRequest, v1::StepReply>(
      messages, context, &reply,
      [&](auto* begun, auto* answer) { return stub.Step(begun, answer); });
}
inline absl::Status Seal(Stub& stub, grpc::ClientContext& context,
                         const std::vector<v1::SealRequest>& messages) {
  const auto stream = stub.Seal(&context);
  for (const v1::SealRequest& message : messages) {
    if (!stream->Write(message)) break;
  }
  stream->WritesDone();
  v1::SealProgress progress;
  while (stream->Read(&progress)) continue;
  return proto::FromGrpc(stream->Finish());
}
inline absl::Status OpenJob(Stub& stub, grpc::ClientContext& context,
                            const v1::OpenJobRequest& request) {
  v1::OpenJobReply reply;
  return Call(stub, &Stub::OpenJob, context, request, &reply);
}
inline absl::Status ReserveScratch(Stub& stub, grpc::ClientContext& context, uint64_t bytes) {
  v1::ReserveScratchRequest request;
  request.set_bytes(bytes);
  v1::Empty reply;
  return Call(stub, &Stub::ReserveScratch, context, request, &reply);
}
inline absl::Status Publish(Stub& stub, grpc::ClientContext& context, const std::string& state) {
  v1::PublishRequest request;
  request.set_trainer_state(state);
  v1::Empty reply;
  return Call(stub, &Stub::Publish, context, request, &reply);
}
inline absl::Status EndLoad(Stub& stub, grpc::ClientContext& context) {
  v1::Empty reply;
  return Call(stub, &Stub::EndLoad, context, v1::Empty(), &reply);
}
inline absl::Status WaitDurable(Stub& stub, grpc::ClientContext& context) {
  v1::WaitDurableReply reply;
  return Call(stub, &Stub::WaitDurable, context, v1::Empty(), &reply);
}
inline absl::Status Checkpoint(Stub& stub, grpc::ClientContext& context) {
  v1::CheckpointReply reply;
  return Call(stub, &Stub::Checkpoint, context, v1::Empty(), &reply);
}
inline absl::StatusOr<std::string> ExplainFailure(Stub& stub, grpc::ClientContext& context,
                                                  uint64_t tag) {
  v1::ExplainFailureRequest request;
  request.set_tag(tag);
  v1::ExplainFailureReply reply;
  const absl::Status status = Call(stub, &Stub::ExplainFailure, context, request, &reply);
  if (!status.ok()) return status;
  return reply.text();
}
inline absl::Status CloseJob(Stub& stub, grpc::ClientContext& context) {
  v1::Empty reply;
  return Call(stub, &Stub::CloseJob, context, v1::Empty(), &reply);
}

}  // namespace offload::tests
