// proto/grpc_status.h
//
// Carries statuses and the session's token through gRPC calls, on both sides.
//
// Thread safety: pure functions; the contexts as gRPC says.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "proto/handshake.h"

namespace offload::proto {

inline constexpr char kTokenMetadataKey[] = "offload-token";
inline constexpr int kControlMessageBytesMax = 4 << 20;
// Error texts travel in trailing metadata, whose default limit is 8 KiB; a text is cut at a quarter
// of this, since every byte may be escaped. Both sides set it as GRPC_ARG_MAX_METADATA_SIZE.
inline constexpr int kControlMetadataBytesMax = 64 << 10;

// Code and message survive the way there and back (the numbers of both enumerations are the same by
// definition).
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

void AddToken(grpc::ClientContext& context, const Token& token);
// Missing when the call carries none, several, or one that is malformed.
std::optional<Token> TokenOf(const grpc::ServerContext& context);

// "unix:PATH", for clients and servers.
std::string ControlAddress(const std::string& path);
// Channel options of the rank: no proxy, sizes as above.
grpc::ChannelArguments ControlChannelArguments();

}  // namespace offload::proto
