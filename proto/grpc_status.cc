#include "proto/grpc_status.h"

#include "base/string_view.h"
#include "proto/cut_text.h"

namespace offload::proto {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(CutText(ToStd(status.message()), kControlMetadataBytesMax / 4)));
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
