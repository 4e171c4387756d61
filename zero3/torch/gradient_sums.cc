#include "zero3/torch/gradient_sums.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "zero3/torch/device_memory.h"
#include "zero3/torch/devices.h"
#include "zero3/torch/exchanged_parts.h"
#include "zero3/torch/summed_gradient.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// The start of a sum as kernels know it.
kernels::SumStart KernelStart(proto::GradientStart start) {
  switch (start) {
    case proto::GradientStart::kNothing:
      return kernels::SumStart::kNothing;
    case proto::GradientStart::kZeros:
      return kernels::SumStart::kZeros;
    case proto::GradientStart::kPrevious:
      break;
  }
  return kernels::SumStart::kSum;
}

}  // namespace

// The session, while the engine lives. Parts of a model on a device are copied into the ring by the
// device, or slices of the ranks' sum (exchanged_parts.h): the daemon hears of them, in their
// order, when they are there, and of everything that follows after them. Who waits for the daemon,
// and so for other ranks, lets go of what the device's window holds.
class GradientSums::Channel final : public GradientChannel {
 public:
  explicit Channel(std::shared_ptr<Attachment> attachment) : attachment_(std::move(attachment)) {}

  client::Ticket BeginGradients(uint64_t step) override {
    if (DeviceMemory* const device = attachment_->device()) device->parts().Begin(step);
    return session().BeginGradients(step);
  }
  client::Ticket DeliverGradient(uint32_t tensor, uint32_t pass, proto::GradientStart start,
                                 uint64_t element_offset, uint64_t element_count,
                                 uint64_t region_offset) override {
    const auto tell = [=, this](uint64_t offset, uint64_t count) {
      return session().DeliverGradient(tensor, pass, start, offset, count, region_offset);
    };
    DeviceMemory* const device = attachment_->device();
    if (device == nullptr) return tell(element_offset, element_count);
    return device->parts().Start({.tensor = tensor,
                                  .pass = pass,
                                  .start = KernelStart(start),
                                  .element_offset = element_offset,
                                  .element_count = element_count,
                                  .host = attachment_->region() + region_offset,
                                  .tell = tell},
                                 CurrentStream(device->device()));
  }
  // After a failure of the device the daemon does not hear of the end, and every wait here says so.
  client::Ticket EndPass(uint32_t pass, bool wait) override {
    DeviceMemory* const device = attachment_->device();
    if (device != nullptr && !device->parts().EndPass(pass).ok()) return kNeverTold;
    return session().EndPass(pass, wait);
  }
  absl::StatusOr<uint64_t> AwaitGradient(uint32_t tensor, uint32_t passes) override {
    OFFLOAD_RETURN_IF_ERROR(FinishCopies());
    const DaemonWait wait(*attachment_);
    return session().AwaitGradient(tensor, passes);
  }
  client::Ticket PublishNorm(uint32_t tensor, float norm) override {
    return session().PublishNorm(tensor, norm);
  }
  uint64_t GradientWord(uint32_t tensor) const override { return session().GradientWord(tensor); }
  absl::Status Wait(client::Ticket ticket) override {
    if (ExchangedParts::IsOwn(ticket)) {
      OFFLOAD_ASSIGN_OR_RETURN(ticket, attachment_->device()->parts().TicketOf(ticket));
    }
    if (ticket == kNeverTold) return FinishCopies();
    const DaemonWait wait(*attachment_);
    return session().Wait(ticket);
  }

 private:
  static constexpr client::Ticket kNeverTold = ExchangedParts::kNeverTold;

  client::Session& session() const { return attachment_->session(); }
  absl::Status FinishCopies() const {
    DeviceMemory* const device = attachment_->device();
    return device != nullptr ? device->parts().Flush() : absl::OkStatus();
  }
  const std::shared_ptr<Attachment> attachment_;
};

// Held by torch's callback for the end of a backward: called when it succeeds, and destroyed either
// way before the caller of backward() goes on.
class GradientSums::BackwardEnd {
 public:
  BackwardEnd(std::shared_ptr<GradientSums> sums, int64_t backward)
      : sums_(std::move(sums)), backward_(backward) {}
  ~BackwardEnd() {
    if (has_ended_) return;
    try {
      sums_->EndBackward(backward_, /*failed=*/true);
    } catch (const std::exception&) {  // the backward is failing already, with its own reason
    }
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  void End() {
    has_ended_ = true;
    sums_->EndBackward(backward_, /*failed=*/false);
  }

 private:
  const std::shared_ptr<GradientSums> sums_;
  const int64_t backward_;
  bool has_ended_ = false;
};

namespace {

GradientStream::Options StreamOptions(Attachment& attachment, uint64_t step) {
  const Plan& plan = attachment.plan();
  GradientStream::Options options{.rank = attachment.rank(),
                                  .world_size = plan.memory.world_size,
                                  .step = step,
                                  .region = attachment.region(),
                                  .ring_offset = plan.ring_offset,
                                  .ring_bytes = plan.ring_bytes};
  for (const proto::Tensor& tensor : attachment.input().catalogue.tensors) {
    options.tensors.push_back({.name = tensor.name,
                               .element_count = tensor.element_count,
                               .element_bytes = proto::DtypeBytes(tensor.dtype),
                               .trainable = tensor.trainable});
  }
  return options;
}

}  // namespace

GradientSums::GradientSums(std::shared_ptr<Attachment> attachment, uint64_t step)
    : attachment_(std::move(attachment)),
      channel_(std::make_shared<Channel>(attachment_)),
      stream_(channel_.get(), this, StreamOptions(*attachment_, step)),
      gradients_(attachment_->input().catalogue.tensors.size()) {}

void GradientSums::Add(uint32_t tensor, SummedGradient* gradient) { gradients_[tensor] = gradient; }

void GradientSums::Close() { gradients_.clear(); }

const std::byte* GradientSums::SumOf(uint32_t tensor) const {
  return attachment_->session().slab() + attachment_->plan().slab.sum_offset[tensor];
}

void GradientSums::EnterBackward() {
  const int64_t backward = torch::autograd::get_current_graph_task_id();
  OFFLOAD_CHECK(backward >= 0) << "accumulation outside of a backward";
  ThrowIfError(stream_.EnterBackward(backward));
}

void GradientSums::WatchEnd(int64_t backward) {
  auto end = std::make_shared<BackwardEnd>(shared_from_this(), backward);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->End(); });
}

void GradientSums::EndBackward(int64_t backward, bool failed) {
  for (const uint32_t tensor : ValueOrThrow(stream_.LeaveBackward(backward, failed))) {
    if (tensor < gradients_.size() && gradients_[tensor] != nullptr)
      gradients_[tensor]->NoteExisting();
  }
}

bool GradientSums::HasZeroed() {
  for (SummedGradient* gradient : gradients_) {
    if (gradient != nullptr && gradient->IsZeroed()) return true;
  }
  return false;
}

absl::Status GradientSums::LetGoOfSums() {
  for (SummedGradient* gradient : gradients_) {
    if (gradient != nullptr) gradient->LetGoOfSum();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<float>> GradientSums::ComputeNorm(uint32_t tensor) {
  if (tensor >= gradients_.size() || gradients_[tensor] == nullptr) return std::nullopt;
  return gradients_[tensor]->NormOfSum();
}

}  // namespace offload::zero3
