// Bytes of a fuzzer as control messages of a job: tensors, plan and steps, in the order in which
// the daemon checks them. Each message is a byte that tells its kind, two of length, and its
// content.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "offloadd/job_catalogue.h"
#include "offloadd/job_context.h"
#include "offloadd/step_plan.h"

namespace {

using namespace offload;          // NOLINT: a fuzz target
using namespace offload::daemon;  // NOLINT
namespace v1 = offload::proto::v1;

int accepted_steps = 0;

struct Messages {
  std::vector<v1::DeclareTensorsRequest> tensors;
  std::vector<v1::SealRequest> plan;
  std::vector<v1::StepRequest> step;
};

template <typename Message>
void Add(std::string_view bytes, std::vector<Message>& messages) {
  Message message;
  if (message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    messages.push_back(std::move(message));
}

Messages Split(std::string_view input) {
  Messages messages;
  while (input.size() >= 3) {
    uint16_t length = 0;
    std::memcpy(&length, input.data() + 1, 2);
    const std::string_view bytes = input.substr(3, length);
    switch (static_cast<uint8_t>(input[0]) % 3) {
      case 0:
        Add(bytes, messages.tensors);
        break;
      case 1:
        Add(bytes, messages.plan);
        break;
      default:
        Add(bytes, messages.step);
        break;
    }
    input.remove_prefix(3 + bytes.size());
  }
  return messages;
}

std::optional<proto::Catalogue> Declare(const std::vector<v1::DeclareTensorsRequest>& messages,
                                        const kernels::OptimizerSpec& optimizer) {
  std::vector<proto::Tensor> tensors;
  for (const v1::DeclareTensorsRequest& message : messages) {
    for (const v1::Tensor& tensor : message.tensors()) {
      auto declared = TensorFromMessage(tensor);
      if (!declared.ok()) return std::nullopt;
      tensors.push_back(*std::move(declared));
    }
  }
  auto catalogue = proto::BuildCatalogue(std::move(tensors), optimizer);
  if (!catalogue.ok()) return std::nullopt;
  return *std::move(catalogue);
}

// What was declared and is kept in the store comes back.
void CheckStored(const proto::Catalogue& catalogue, const kernels::OptimizerSpec& optimizer) {
  const auto stored = DecodeCatalogue(EncodeCatalogue(catalogue, optimizer));
  OFFLOAD_CHECK(stored.ok()) << stored.status();
  OFFLOAD_CHECK(CompareWithStored("job", *stored, catalogue, optimizer).ok());
}

}  // namespace

extern "C" int AcceptedInputs() { return accepted_steps; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  DecodeCatalogue(input).status().IgnoreError();
  Messages messages = Split(input);
  auto sealed = PlanFromMessages(messages.plan);
  if (!sealed.ok()) return 0;
  std::optional<proto::Catalogue> catalogue = Declare(messages.tensors, sealed->optimizer);
  if (!catalogue.has_value()) return 0;
  CheckStored(*catalogue, sealed->optimizer);
  auto layout = proto::ComputeSlabLayout(*catalogue, sealed->plan);
  if (!layout.ok()) return 0;
  OFFLOAD_CHECK(layout->window_offset + layout->window_bytes <= layout->total_bytes);
  JobContext context;
  context.ranks.resize(1);
  context.catalogue = *std::move(catalogue);
  context.optimizer = sealed->optimizer;
  context.plan = std::move(sealed->plan);
  context.layout = *std::move(layout);
  const auto step = MakeStepPlan(messages.step, context);
  if (!step.ok()) return 0;
  ++accepted_steps;
  for (const TaskPlan& task : step->tasks) {
    OFFLOAD_CHECK(task.store_tensor < context.catalogue.store_tensors.size());
    OFFLOAD_CHECK(task.tensors.size() == task.members.size());
    for (const uint32_t tensor : task.tensors)
      OFFLOAD_CHECK(tensor < context.catalogue.tensors.size());
  }
  return 0;
}
