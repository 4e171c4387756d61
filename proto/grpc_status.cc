#include "proto/grpc_status.h"

namespace offload::proto {
namespace {

// Cut at the beginning of a UTF-8 character: gRPC escapes bytes, people read characters.
std::string CutText(absl::string_view text, size_t length_max) {
  if (text.size() <= length_max) return std::string(text);
  size_t length = length_max;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  return std::string(text.substr(0, length));
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      CutText(status.message(), kControlMetadataBytesMax / 4));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void AddToken(grpc::ClientContext& context, const Token& token) {
  context.AddMetadata(kTokenMetadataKey, TokenText(token));
}

std::optional<Token> TokenOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  if (metadata.count(kTokenMetadataKey) != 1) return std::nullopt;
  const grpc::string_ref text = metadata.find(kTokenMetadataKey)->second;
  return ParseToken(std::string_view(text.data(), text.size()));
}

std::string ControlAddress(const std::string& path) { return "unix:" + path; }

grpc::ChannelArguments ControlChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kControlMetadataBytesMax);
  arguments.SetMaxReceiveMessageSize(kControlMessageBytesMax);
  arguments.SetMaxSendMessageSize(kControlMessageBytesMax);
  // A channel of its own: sessions of one process must not share the end of one of them.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

}  // namespace offload::proto
