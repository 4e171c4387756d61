// How fast the daemon alone takes steps: bf16 AdamW, all state on the drive, weights through a
// window, a rank that touches every tensor in forward and backward order and computes nothing.
// Prints seconds and bytes per step.
//
//   spine_benchmark POOL [PARAMETERS_IN_MI=64] [STEPS=6] [BLOCKS=8] [WINDOW_IN_MIB=32]
//   [STATE_RESIDENT_EXTENTS=0]

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.h"
#include "client/session.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace {

using namespace offload;  // NOLINT: a program of one page

template <typename T>
T OrDie(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::exit(1);
}
void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

uint64_t Argument(int argc, char** argv, int index, uint64_t otherwise) {
  return argc > index ? std::strtoull(argv[index], nullptr, 10) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string pool = argc > 1 ? argv[1] : ".";
  const uint64_t mi_parameters = Argument(argc, argv, 2, 64), steps = Argument(argc, argv, 3, 6);
  constexpr int64_t kRows = 1024, kColumns = 2048;
  std::vector<proto::Tensor> tensors;
  for (uint64_t i = 0; i < mi_parameters / 2; ++i) {
    tensors.push_back({.name = "w" + std::to_string(i),
                       .shape = {kRows, kColumns},
                       .dtype = proto::Dtype::kBFloat16});
  }
  const proto::Catalogue catalogue = OrDie(proto::BuildCatalogue(tensors));
  proto::MemoryPlan plan;
  plan.pipeline_blocks = static_cast<uint32_t>(Argument(argc, argv, 4, 8));
  plan.window_bytes = Argument(argc, argv, 5, 32) << 20;
  const uint64_t pins_offset = proto::kRegionFixedBytes + proto::kLoadingStagingBytes;
  plan.region_bytes = pins_offset + proto::PaddedBytes(catalogue.tensors.size() * 4);
  for (const proto::StoreTensor& tensor : catalogue.store_tensors) {
    plan.weight_resident.push_back(false);
    plan.state_resident.push_back(static_cast<uint32_t>(Argument(argc, argv, 6, 0)));
    plan.gradients.push_back({proto::GradientHome::kRegion, plan.region_bytes});
    plan.region_bytes += proto::WeightSlotBytes(tensor);
  }
  auto session = OrDie(client::Session::Connect({.only_private = true}));
  OrDie(session->OpenJob({.job = "benchmark", .pool = pool, .ram_bytes = 8ull << 30}));
  OrDie(session->DeclareTensors(catalogue.tensors));
  OrDie(session->Seal(proto::OptimizerState::kAdam, plan, pins_offset, nullptr));
  OrDie(session->Publish(""));
  std::vector<uint32_t> touches;
  const auto count = static_cast<uint32_t>(catalogue.tensors.size());
  for (uint32_t i = 0; i < count; ++i) touches.push_back(i);
  for (uint32_t i = count; i > 0; --i) touches.push_back(i - 1);
  OrDie(session->SetSchedule(touches));
  const uint32_t ahead = static_cast<uint32_t>(
      plan.window_bytes / proto::WeightSlotBytes(catalogue.store_tensors[0]) / 2);
  double last = Clock::Real().NowSeconds();
  uint64_t last_read = 0, last_written = 0;
  for (uint64_t step = session->slab_header().durable_step + 1, end = step + steps; step < end;
       ++step) {
    for (uint32_t position = 0; position < touches.size(); ++position) {
      session->SetSchedulePosition(position);
      if (position + ahead < touches.size()) session->Prefetch(touches[position + ahead]);
      OrDie(session->Acquire(touches[position]));
      session->Release(touches[position]);
    }
    session->SetSchedulePosition(0);
    client::StepCommand command{.step = step,
                                .groups = {{.adamw = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0}}}};
    for (uint32_t i = 0; i < count; ++i) command.updates.push_back({i, 0, step, 1.0f});
    OrDie(session->Step(command));
    const double now = Clock::Real().NowSeconds();
    const uint64_t read = session->slab_header().bytes_read,
                   written = session->slab_header().bytes_written;
    const double parameters = static_cast<double>(mi_parameters) * (1 << 20);
    std::printf(
        "step %lu: %.3f s, %.2f B read, %.2f B written per parameter, %.0f MB/s\n", step,
        now - last, static_cast<double>(read - last_read) / parameters,
        static_cast<double>(written - last_written) / parameters,
        static_cast<double>(read - last_read + written - last_written) / (now - last) / 1e6);
    last = now;
    last_read = read;
    last_written = written;
  }
  OrDie(session->WaitDurable());
  OrDie(session->CloseJob());
  return 0;
}
