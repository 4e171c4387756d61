#include "tests/raw_rank.h"

#include <poll.h>

#include <utility>

#include "base/status_macros.h"
#include "kernels/optimizer.h"
#include "proto/grpc_status.h"
#include "proto/shared_memory.h"
#include "proto/slab_layout.h"

namespace offload::tests {
namespace {

namespace v1 = proto::v1;

constexpr uint64_t kPinsOffset = proto::kRegionFixedBytes + proto::kLoadingStagingBytes;

}  // namespace

absl::StatusOr<RawRank> RawRank::Greet(const std::string& socket_path) {
  RawRank rank;
  OFFLOAD_ASSIGN_OR_RETURN(rank.socket_, proto::ConnectToDaemon(socket_path));
  OFFLOAD_ASSIGN_OR_RETURN(rank.welcome_, proto::Greet(rank.socket_.get()));
  grpc::ChannelArguments arguments = proto::ControlChannelArguments();
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  rank.stub_ = v1::Control::NewStub(
      grpc::CreateCustomChannel(proto::ControlAddress(rank.welcome_.control_path),
                                grpc::InsecureChannelCredentials(), arguments));
  return rank;
}

absl::Status RawRank::OpenJob(const std::string& job, const std::string& pool) {
  grpc::ClientContext context;
  proto::AddToken(context, token());
  v1::OpenJobRequest request;
  request.set_job(job);
  request.set_pool(pool);
  request.set_ram_bytes(kRamBytes);
  v1::OpenJobReply reply;
  OFFLOAD_RETURN_IF_ERROR(proto::FromGrpc(stub_->OpenJob(&context, request, &reply)));
  OFFLOAD_ASSIGN_OR_RETURN(memory_, proto::RequestMemory(socket(), token()));
  return absl::OkStatus();
}

absl::Status RawRank::Map() {
  OFFLOAD_ASSIGN_OR_RETURN(slab_, proto::MapFromDaemon(slab_fd(), memory_->slab_bytes, false));
  OFFLOAD_ASSIGN_OR_RETURN(region_, proto::MapFromDaemon(region_fd(), memory_->region_bytes, true));
  return proto::ConfirmMapped(socket());
}

absl::Status RawRank::Seal(bool trainable) {
  {
    grpc::ClientContext context;
    proto::AddToken(context, token());
    v1::DeclareTensorsReply reply;
    auto writer = stub_->DeclareTensors(&context, &reply);
    v1::DeclareTensorsRequest request;
    v1::Tensor* tensor = request.add_tensors();
    tensor->set_name("weight");
    tensor->add_shape(kElements);
    tensor->set_trainable(trainable);
    writer->Write(request);
    writer->WritesDone();
    OFFLOAD_RETURN_IF_ERROR(proto::FromGrpc(writer->Finish()));
  }
  grpc::ClientContext context;
  proto::AddToken(context, token());
  auto stream = stub_->Seal(&context);
  v1::SealRequest request;
  *request.mutable_optimizer() = PlainSgd();
  request.set_window_bytes(proto::PaddedBytes(kElements * 4) + (1 << 20));
  request.set_pipeline_blocks(1);
  const uint64_t gradient_offset = allocated_region_bytes();
  request.set_region_bytes(gradient_offset + (trainable ? proto::PaddedBytes(kElements * 4) : 0));
  request.set_pins_offset(kPinsOffset);
  request.add_weight_resident(false);
  request.add_state_resident(0);
  request.add_gradient_home(trainable ? 1 : 0);
  request.add_gradient_offset(trainable ? gradient_offset : 0);
  stream->Write(request);
  stream->WritesDone();
  v1::SealProgress progress;
  while (stream->Read(&progress)) continue;
  return proto::FromGrpc(stream->Finish());
}

proto::v1::Optimizer RawRank::PlainSgd() {
  const kernels::OptimizerSpec sgd("sgd");
  proto::v1::Optimizer message;
  message.set_name(std::string(sgd.name()));
  message.mutable_parameters()->Add(sgd.values().begin(), sgd.values().end());
  return message;
}

absl::StatusOr<RawRank> RawRank::Open(const std::string& socket_path, const std::string& job,
                                      const std::string& pool) {
  OFFLOAD_ASSIGN_OR_RETURN(RawRank rank, Greet(socket_path));
  OFFLOAD_RETURN_IF_ERROR(rank.OpenJob(job, pool));
  OFFLOAD_RETURN_IF_ERROR(rank.Map());
  OFFLOAD_RETURN_IF_ERROR(rank.Seal());
  return rank;
}

uint64_t RawRank::allocated_region_bytes() const { return kPinsOffset + proto::kSectorBytes; }

bool RawRank::IsAlive() const {
  pollfd watched{.fd = socket(), .events = POLLIN | POLLRDHUP};
  return ::poll(&watched, 1, 0) == 0;
}

proto::SubmissionEntry RawRank::GoodEntry(uint64_t tag) {
  proto::SubmissionEntry entry{};
  entry.tag = tag;
  entry.operation = proto::RingOperation::kGet;
  entry.element_count = 1024;
  entry.region_offset = proto::kRegionFixedBytes;
  return entry;
}

}  // namespace offload::tests
