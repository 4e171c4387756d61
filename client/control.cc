#include "client/control.h"

#include <google/protobuf/stubs/common.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/advice.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "client/fork_safe_transport.h"
#include "client/own_processors.h"
#include "proto/depths.h"
#include "proto/pool_path.h"

namespace offload::client {
namespace {

namespace v1 = proto::v1;

constexpr std::chrono::seconds kCallLimit{30};
constexpr std::chrono::seconds kExplainLimit{5};
// The transport may notice the daemon's end before the session does.
constexpr std::chrono::seconds kHealthGrace{1};

// Bounds of one streamed message, far below kControlMessageBytesMax.
constexpr size_t kTensorsPerMessage = 1024;
constexpr size_t kTensorBytesPerMessage = 1 << 20;
constexpr size_t kListEntriesPerMessage = 64 << 10;

const char* NameOf(v1::Transfer::Kind kind) {
  switch (kind) {
    case v1::Transfer::READ:
      return "read";
    case v1::Transfer::WRITE:
      return "write";
    case v1::Transfer::COMMIT:
      return "commit";
    case v1::Transfer::SCRATCH_READ:
      return "scratch read";
    case v1::Transfer::SCRATCH_WRITE:
      return "scratch write";
    default:
      return "transfer";
  }
}

// The daemon cannot read a message with another text.
bool IsUtf8(const std::string& text) {
  return google::protobuf::internal::IsStructurallyValidUTF8(text);
}

absl::Status CheckTexts(const JobOptions& options) {
  for (const auto& [name, text] :
       {std::pair("nvme_path", &options.pool), std::pair("job", &options.job),
        std::pair("io", &options.io_engine), std::pair("durability", &options.durability),
        std::pair("update_in_backward", &options.update_in_backward),
        std::pair("run_id", &options.world.run_id)}) {
    if (text->find('\0') != std::string::npos) {
      return MakeError(
          text == &options.pool ? ErrorId::kPoolMissing : ErrorId::kBadValue,
          absl::StrCat(name, " is '", absl::CHexEscape(*text), "', which has a NUL byte"),
          "Leave it out: no name has one");
    }
    if (IsUtf8(*text)) continue;
    return MakeError(text == &options.pool ? ErrorId::kPoolMissing : ErrorId::kBadValue,
                     absl::StrCat(name, " is '", absl::CHexEscape(*text), "', which is not UTF-8"),
                     "Give it a name in UTF-8");
  }
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(options.job));
  return SplitPools(options.pool).status();
}

// What gRPC answers in the daemon's name when no thread can be started for the call.
constexpr absl::string_view kNoThread = "Server Threadpool Exhausted";

absl::Status CheckNames(std::span<const proto::Tensor> tensors) {
  for (const proto::Tensor& tensor : tensors) {
    if (IsUtf8(tensor.name)) continue;
    return MakeError(
        ErrorId::kUnsupportedModel,
        absl::StrCat("the name '", absl::CHexEscape(tensor.name), "' of a tensor is not UTF-8"),
        "Register it under another name");
  }
  return absl::OkStatus();
}

v1::Tensor ToMessage(const proto::Tensor& tensor) {
  v1::Tensor message;
  message.set_name(tensor.name);
  message.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  message.set_dtype(static_cast<v1::Dtype>(tensor.dtype));
  message.set_trainable(tensor.trainable);
  message.mutable_dimension_order()->Add(tensor.dimension_order.begin(),
                                         tensor.dimension_order.end());
  return message;
}

v1::Optimizer ToMessage(const kernels::OptimizerSpec& optimizer) {
  v1::Optimizer message;
  message.set_name(std::string(optimizer.name()));
  message.mutable_parameters()->Add(optimizer.values().begin(), optimizer.values().end());
  if (optimizer.averaging().is_on()) message.set_average(optimizer.averaging().Text());
  return message;
}

// Appends entries [begin, begin + kListEntriesPerMessage) of a list, as far as there are any.
template <typename List, typename Append>
void AppendPart(const List& list, size_t begin, const Append& append) {
  const size_t end = std::min(list.size(), begin + kListEntriesPerMessage);
  for (size_t i = begin; i < end; ++i) append(list[i]);
}

v1::SealRequest SealHead(const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan,
                         uint64_t pins_offset) {
  v1::SealRequest request;
  *request.mutable_optimizer() = ToMessage(optimizer);
  request.set_window_bytes(plan.window_bytes);
  request.set_pipeline_blocks(plan.pipeline_blocks);
  request.set_pipeline_gradients(plan.pipeline_gradients);
  request.set_scratch_bytes(plan.scratch_bytes);
  request.set_region_bytes(plan.region_bytes);
  request.set_pins_offset(pins_offset);
  request.set_world_size(plan.world_size);
  request.set_other_region_bytes(plan.other_region_bytes);
  request.set_sum_blocks(plan.sum_blocks);
  return request;
}

void AppendLists(const proto::MemoryPlan& plan, const OtherTensors* others, size_t begin,
                 v1::SealRequest& request) {
  AppendPart(plan.weight_resident, begin,
             [&](bool resident) { request.add_weight_resident(resident); });
  AppendPart(plan.state_resident, begin,
             [&](uint32_t extents) { request.add_state_resident(extents); });
  AppendPart(plan.gradients, begin, [&](const proto::GradientPlacement& gradient) {
    request.add_gradient_home(static_cast<uint32_t>(gradient.home));
    request.add_gradient_offset(gradient.offset_bytes);
  });
  if (others == nullptr) return;
  AppendPart(others->stored_names, begin,
             [&](const std::string& name) { request.add_stored_name(name); });
}

v1::StepRequest StepHead(const StepCommand& command) {
  v1::StepRequest request;
  request.set_step(command.step);
  for (const Group& group : command.groups) *request.add_groups() = ToMessage(group);
  request.set_has_trainer_state(command.has_trainer_state);
  if (command.has_trainer_state) request.set_trainer_state(command.trainer_state);
  request.set_tensor_count(static_cast<uint32_t>(command.updates.size()));
  request.set_passes(command.passes);
  request.set_partial(command.is_partial);
  return request;
}

// One rank says nothing of worlds.
void SetWorld(const JobOptions& options, v1::OpenJobRequest& request) {
  if (options.world.world_size == 1) return;
  v1::World& world = *request.mutable_world();
  world.set_run_id(options.world.run_id);
  world.set_rank(options.world.rank);
  world.set_world_size(options.world.world_size);
  world.set_local_rank(options.world.local_rank);
  world.set_local_world_size(options.world.local_world_size);
  world.set_launcher(options.world.launcher);
  world.set_library_version(kVersion);
  world.set_gradient_sum(options.gradient_sum);
  world.set_gradients_reduced(options.gradients_reduced);
}

void SayWait(const JobOptions& options, const v1::OpenJobReply& reply) {
  const std::string text =
      absl::StrCat("rank ", options.world.rank, " waits for ",
                   reply.missing_ranks_size() == 1 ? "rank " : "ranks ",
                   absl::StrJoin(reply.missing_ranks(), ", "), " of ", options.world.world_size);
  if (options.on_wait) return options.on_wait(text);
  std::fprintf(stderr, "offload: %s\n", text.c_str());
}

void AppendUpdates(const StepCommand& command, size_t begin, v1::StepRequest& request) {
  const bool has_own =
      std::any_of(command.updates.begin(), command.updates.end(), [](const TensorUpdate& update) {
        return update.own_gradient_offset != 0 || update.own_gradient_crc != 0;
      });
  AppendPart(command.updates, begin, [&](const TensorUpdate& update) {
    request.add_tensors(update.tensor);
    request.add_group_of(update.group);
    request.add_update_count(update.update_count);
    request.add_gradient_scale(update.gradient_scale);
    if (!has_own) return;
    request.add_own_gradient_offset(update.own_gradient_offset);
    request.add_own_gradient_crc(update.own_gradient_crc);
  });
}

// Where one message says it all, as nearly always, the whole call is one write to the socket, and
// wakes the daemon once: the context's initial metadata are corked, and the last message ends the
// stream.
grpc::Status WriteStep(const StepCommand& command, grpc::ClientWriter<v1::StepRequest>& writer) {
  v1::StepRequest request = StepHead(command);
  for (size_t begin = 0; begin == 0 || begin < command.updates.size();
       begin += kListEntriesPerMessage) {
    AppendUpdates(command, begin, request);
    grpc::WriteOptions options;
    if (command.updates.size() - begin <= kListEntriesPerMessage) options.set_last_message();
    if (!writer.Write(request, options)) break;
    request.Clear();
  }
  return writer.Finish();
}

}  // namespace

std::optional<std::string> EncodeStep(const StepCommand& command, size_t bytes_max) {
  // Of what an update takes in the message, its scale alone is this long.
  if (command.updates.size() > bytes_max / sizeof(double)) return std::nullopt;
  v1::StepRequest request = StepHead(command);
  AppendUpdates(command, 0, request);
  if (request.ByteSizeLong() > bytes_max) return std::nullopt;
  return request.SerializeAsString();
}

ControlClient::ControlClient(const std::string& path, const proto::Token& token,
                             const Health* health)
    : token_(token), health_(health) {
  StartForkSafeTransport();
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(proto::ControlAddress(path), grpc::InsecureChannelCredentials(),
                                proto::ControlChannelArguments());
  stub_ = v1::Control::NewStub(channel);
}

absl::StatusOr<JobInfo> ControlClient::OpenJob(const JobOptions& options) {
  OFFLOAD_RETURN_IF_ERROR(CheckTexts(options));
  v1::OpenJobRequest request;
  request.set_job(options.job);
  request.set_pool(proto::AbsolutePools(options.pool));
  request.set_ram_bytes(options.ram_bytes);
  request.set_io_engine(options.io_engine);
  request.set_update_threads(options.update_threads);
  request.set_durability(options.durability);
  request.set_update_in_backward(options.update_in_backward);
  request.set_generations(options.generations);
  request.set_processors(FormatCpuList(OwnProcessors()));
  SetWorld(options, request);
  v1::OpenJobReply reply;
  for (;;) {
    OFFLOAD_RETURN_IF_ERROR(Run("OpenJob", std::nullopt, [&](grpc::ClientContext& context) {
      return stub_->OpenJob(&context, request, &reply);
    }));
    if (reply.missing_ranks_size() == 0) break;
    SayWait(options, reply);
  }
  return JobInfo{
      .exists = reply.exists(),
      .step = reply.step(),
      .trainer_state = reply.trainer_state(),
      .trainer_state_is_own = reply.trainer_state_is_own(),
      .slab_bytes = reply.slab_bytes(),
      .region_bytes = reply.region_bytes(),
      .io_engine = reply.io_engine(),
      .pipeline_blocks = reply.pipeline_blocks(),
      .write_cost = reply.write_cost() > 0 ? reply.write_cost() : proto::kWriteCost,
      .trainable = std::vector<bool>(reply.trainable().begin(), reply.trainable().end())};
}

absl::Status ControlClient::DeclareTensors(std::span<const proto::Tensor> tensors) {
  OFFLOAD_RETURN_IF_ERROR(CheckNames(tensors));
  v1::DeclareTensorsReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("DeclareTensors", kCallLimit, [&](grpc::ClientContext& context) {
    const auto writer = stub_->DeclareTensors(&context, &reply);
    v1::DeclareTensorsRequest request;
    size_t bytes = 0;
    for (const proto::Tensor& tensor : tensors) {
      *request.add_tensors() = ToMessage(tensor);
      bytes += request.tensors(request.tensors_size() - 1).ByteSizeLong();
      if (request.tensors_size() < static_cast<int>(kTensorsPerMessage) &&
          bytes < kTensorBytesPerMessage) {
        continue;
      }
      if (!writer->Write(request)) return writer->Finish();
      request.Clear();
      bytes = 0;
    }
    if (request.tensors_size() > 0) writer->Write(request);  // Finish() tells when it failed
    writer->WritesDone();
    return writer->Finish();
  }));
  if (reply.tensor_count() == tensors.size()) return absl::OkStatus();
  return MakeError(ErrorId::kInternal, absl::StrCat("the daemon knows ", reply.tensor_count(),
                                                    " tensors of ", tensors.size()));
}

absl::Status ControlClient::ReserveScratch(uint64_t bytes) {
  v1::ReserveScratchRequest request;
  request.set_bytes(bytes);
  v1::Empty reply;
  return Run("ReserveScratch", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->ReserveScratch(&context, request, &reply);
  });
}

absl::Status ControlClient::Seal(
    const kernels::OptimizerSpec& optimizer, const proto::MemoryPlan& plan, uint64_t pins_offset,
    const std::function<void(uint64_t formatted, uint64_t total)>& progress,
    const OtherTensors* others) {
  const size_t entries =
      std::max({plan.weight_resident.size(), plan.state_resident.size(), plan.gradients.size()});
  bool done = false;
  OFFLOAD_RETURN_IF_ERROR(Run("Seal", std::nullopt, [&](grpc::ClientContext& context) {
    const auto stream = stub_->Seal(&context);
    v1::SealRequest request = SealHead(optimizer, plan, pins_offset);
    if (others != nullptr) {
      request.set_other_tensors(true);
      request.set_trainer_state(others->trainer_state);
    }
    for (size_t begin = 0; begin == 0 || begin < entries; begin += kListEntriesPerMessage) {
      AppendLists(plan, others, begin, request);
      if (!stream->Write(request)) return stream->Finish();
      request.Clear();
    }
    stream->WritesDone();
    v1::SealProgress message;
    while (stream->Read(&message)) {
      done = message.done();
      // With nothing to make there is no progress.
      if (progress && message.bytes_total() > 0)
        progress(message.bytes_formatted(), message.bytes_total());
    }
    return stream->Finish();
  }));
  if (done) return absl::OkStatus();
  return MakeError(ErrorId::kInternal, "the daemon ended Seal before it was done");
}

absl::Status ControlClient::Publish(const std::string& trainer_state) {
  v1::PublishRequest request;
  request.set_trainer_state(trainer_state);
  v1::Empty reply;
  return Run("Publish", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->Publish(&context, request, &reply);
  });
}

absl::Status ControlClient::SetSchedule(std::span<const uint32_t> tensors) {
  v1::Empty reply;
  return Run("SetSchedule", kCallLimit, [&](grpc::ClientContext& context) {
    const auto writer = stub_->SetSchedule(&context, &reply);
    for (size_t begin = 0; begin == 0 || begin < tensors.size(); begin += kListEntriesPerMessage) {
      v1::SetScheduleRequest request;
      request.set_first(begin == 0);
      AppendPart(tensors, begin, [&](uint32_t tensor) { request.add_tensors(tensor); });
      if (!writer->Write(request)) return writer->Finish();
    }
    writer->WritesDone();
    return writer->Finish();
  });
}

absl::Status ControlClient::SetSquareRoots(const kernels::SquareRoots& roots) {
  constexpr size_t kPartBytes = 1 << 20;
  v1::Empty reply;
  return Run("SetSquareRoots", kCallLimit, [&](grpc::ClientContext& context) {
    const auto writer = stub_->SetSquareRoots(&context, &reply);
    const std::string_view bytes = roots.bytes();
    for (size_t begin = 0; begin < bytes.size(); begin += kPartBytes) {
      v1::SetSquareRootsRequest request;
      request.set_part(std::string(bytes.substr(begin, kPartBytes)));
      if (!writer->Write(request)) return writer->Finish();
    }
    writer->WritesDone();
    return writer->Finish();
  });
}

absl::Status ControlClient::BeginStep(const StepCommand& command) {
  v1::Empty reply;
  return Run("BeginStep", std::nullopt, [&](grpc::ClientContext& context) {
    context.set_initial_metadata_corked(true);
    return WriteStep(command, *stub_->BeginStep(&context, &reply));
  });
}

absl::Status ControlClient::Step(const StepCommand& command) {
  v1::StepReply reply;
  return Run("Step", std::nullopt, [&](grpc::ClientContext& context) {
    context.set_initial_metadata_corked(true);
    return WriteStep(command, *stub_->Step(&context, &reply));
  });
}

absl::StatusOr<uint64_t> ControlClient::WaitDurable() {
  v1::WaitDurableReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("WaitDurable", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->WaitDurable(&context, v1::Empty(), &reply);
  }));
  return reply.durable_step();
}

absl::StatusOr<uint64_t> ControlClient::Checkpoint() {
  v1::CheckpointReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("Checkpoint", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->Checkpoint(&context, v1::Empty(), &reply);
  }));
  return reply.step();
}

absl::StatusOr<std::vector<std::string>> ControlClient::Exchange(const std::string& data,
                                                                 uint64_t number) {
  v1::ExchangeRequest request;
  request.set_data(data);
  request.set_number(number);
  v1::ExchangeReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("Exchange", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->Exchange(&context, request, &reply);
  }));
  return std::vector<std::string>(reply.data().begin(), reply.data().end());
}

absl::Status ControlClient::EndLoad() {
  v1::Empty reply;
  return Run("EndLoad", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->EndLoad(&context, v1::Empty(), &reply);
  });
}

absl::Status ControlClient::CloseJob() {
  v1::Empty reply;
  return Run("CloseJob", std::nullopt, [&](grpc::ClientContext& context) {
    return stub_->CloseJob(&context, v1::Empty(), &reply);
  });
}

absl::StatusOr<TakenTransfers> ControlClient::TakeTransfers() {
  v1::TakeTransfersReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("TakeTransfers", kExplainLimit, [&](grpc::ClientContext& context) {
    return stub_->TakeTransfers(&context, v1::TakeTransfersRequest(), &reply);
  }));
  TakenTransfers taken{.dropped = reply.dropped(), .more = reply.more()};
  for (const v1::Transfer& transfer : reply.transfers()) {
    const bool has_tensor =
        transfer.kind() == v1::Transfer::READ || transfer.kind() == v1::Transfer::WRITE;
    taken.transfers.push_back({.name = NameOf(transfer.kind()),
                               .tensor = has_tensor ? transfer.tensor() : TraceEvent::kNoTensor,
                               .extent = transfer.extent(),
                               .bytes = transfer.bytes(),
                               .begin_nanoseconds = transfer.begin_nanoseconds(),
                               .end_nanoseconds = transfer.end_nanoseconds()});
  }
  return taken;
}

absl::StatusOr<std::string> ControlClient::ExplainFailure(uint64_t tag) {
  v1::ExplainFailureRequest request;
  request.set_tag(tag);
  v1::ExplainFailureReply reply;
  OFFLOAD_RETURN_IF_ERROR(Run("ExplainFailure", kExplainLimit, [&](grpc::ClientContext& context) {
    return stub_->ExplainFailure(&context, request, &reply);
  }));
  return reply.text();
}

void ControlClient::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  for (grpc::ClientContext* context : running_) context->TryCancel();
}

absl::Status ControlClient::Run(const char* name, Limit limit,
                                const std::function<grpc::Status(grpc::ClientContext&)>& call) {
  if (!health_->ok()) return health_->status();
  grpc::ClientContext context;
  proto::AddToken(context, token_);
  if (limit.has_value()) context.set_deadline(std::chrono::system_clock::now() + *limit);
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_) return health_->status();
    running_.insert(&context);
  }
  const grpc::Status status = call(context);
  {
    absl::MutexLock lock(&mutex_);
    running_.erase(&context);
  }
  return Explain(name, status);
}

absl::Status ControlClient::Explain(const char* name, const grpc::Status& status) const {
  absl::Status translated = proto::FromGrpc(status);
  if (translated.ok() || ErrorIdOf(translated).has_value()) return translated;
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return MakeError(ErrorId::kDaemonLost, absl::StrCat("the daemon did not answer ", name));
  }
  if (status.error_message() == kNoThread) {
    return MakeError(ErrorId::kRefused,
                     absl::StrCat("the daemon can start no further thread, which ", name, " needs"),
                     kThreadsFix);
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + kHealthGrace;
  while (health_->ok() && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (!health_->ok()) return health_->status();
  return MakeError(ErrorId::kDaemonLost, absl::StrCat(name, " failed: ", status.error_message()));
}

}  // namespace offload::client
