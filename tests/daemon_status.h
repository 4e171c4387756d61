// tests/daemon_status.h
//
// What a daemon says of its jobs to whoever asks, as `offloadctl status` does.
//
// Thread safety: pure.
#pragma once

#include <grpcpp/grpcpp.h>

#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "proto/grpc_status.h"
#include "proto/offload.grpc.pb.h"

namespace offload {

// `socket` is that of the ranks.
inline proto::v1::StatusReply StatusOfDaemon(const std::string& socket) {
  const std::string folder = std::filesystem::path(socket).parent_path();
  const auto stub = proto::v1::Control::NewStub(grpc::CreateCustomChannel(
      proto::ControlAddress(folder + "/control.sock"), grpc::InsecureChannelCredentials(),
      proto::ControlChannelArguments()));
  proto::v1::StatusReply reply;
  grpc::ClientContext context;
  const grpc::Status status = stub->Status(&context, {}, &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return reply;
}

}  // namespace offload
