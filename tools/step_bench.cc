// step_bench: a rank without torch that has the daemon move a training job's bytes, as standard
// input says, so that tools/drive_bench can let it and fio take turns: "read|write|mixed SECONDS"
// is answered with bytes per second that went through the store.
//
//   read   weights acquired and released in the order of forward and backward, through a window
//   that
//          holds half of them; every byte is verified
//   write  parts of tensors put, then committed: each rewrites masters and weights
//   mixed  whole steps: forward, backward, and the AdamW update of a bf16 model with all state on
//          the drive, each committed
//
// The model has --parameters Mi of them in tensors of 2 Mi; the daemon is its own. "steps N" prints
// what each of N steps took instead.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <deque>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/session.h"
#include "kernels/optimizer.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::tools {
namespace {

constexpr int64_t kRows = 1024, kColumns = 2048;

struct Options {
  std::string pool = ".", engine = "auto";
  uint64_t mi_parameters = 32;
  uint32_t pipeline_blocks = 8;
  uint32_t update_threads = 0;
};

class StepBench {
 public:
  explicit StepBench(const Options& options) : options_(options) {}

  absl::Status Open() {
    std::vector<proto::Tensor> tensors;
    const uint64_t elements = options_.mi_parameters << 20;
    for (uint64_t at = 0; at < elements; at += kRows * kColumns) {
      tensors.push_back({.name = "w" + std::to_string(tensors.size()),
                         .shape = {kRows, kColumns},
                         .dtype = proto::Dtype::kBFloat16});
    }
    OFFLOAD_ASSIGN_OR_RETURN(const proto::Catalogue catalogue, proto::BuildCatalogue(tensors));
    count_ = static_cast<uint32_t>(tensors.size());
    proto::MemoryPlan plan;
    plan.pipeline_blocks = options_.pipeline_blocks;
    const uint64_t slot_bytes = proto::WeightSlotBytes(catalogue.store_tensors[0]);
    plan.window_bytes = std::max<uint64_t>(3, count_ / 2) * slot_bytes;
    ahead_ = static_cast<uint32_t>(plan.window_bytes / slot_bytes / 2);
    const uint64_t pins_offset = proto::kRegionFixedBytes + proto::kLoadingStagingBytes;
    plan.region_bytes = pins_offset + proto::PaddedBytes(count_ * sizeof(proto::PinWord));
    for (const proto::StoreTensor& tensor : catalogue.store_tensors) {
      plan.weight_resident.push_back(false);
      plan.state_resident.push_back(0);
      plan.gradients.push_back({proto::GradientHome::kRegion, plan.region_bytes});
      plan.region_bytes += proto::WeightSlotBytes(tensor);
    }
    OFFLOAD_ASSIGN_OR_RETURN(session_, client::Session::Connect({.only_private = true}));
    OFFLOAD_RETURN_IF_ERROR(session_
                                ->OpenJob({.job = "step_bench",
                                           .pool = options_.pool,
                                           .ram_bytes = 64 * plan.region_bytes,
                                           .io_engine = options_.engine,
                                           .update_threads = options_.update_threads})
                                .status());
    OFFLOAD_RETURN_IF_ERROR(session_->DeclareTensors(catalogue.tensors));
    OFFLOAD_RETURN_IF_ERROR(session_->Seal(kernels::OptimizerSpec(), plan, pins_offset, nullptr));
    OFFLOAD_RETURN_IF_ERROR(session_->Publish(""));
    for (uint32_t i = 0; i < count_; ++i) touches_.push_back(i);
    for (uint32_t i = count_; i > 0; --i) touches_.push_back(i - 1);
    OFFLOAD_RETURN_IF_ERROR(session_->SetSchedule(touches_));
    // Places that were never written are not read from the drive: the moments are there after a
    // step, in both places after two.
    for (int i = 0; i < 2; ++i) OFFLOAD_RETURN_IF_ERROR(Step());
    return session_->WaitDurable().status();
  }

  // `goes_on`: the next round follows at once, and is read ahead.
  absl::Status Touch(bool goes_on) {
    const auto size = static_cast<uint32_t>(touches_.size());
    for (uint32_t position = 0; position < size; ++position) {
      session_->SetSchedulePosition(position);
      if (goes_on || position + ahead_ < size)
        session_->Prefetch(touches_[(position + ahead_) % size]);
      OFFLOAD_RETURN_IF_ERROR(session_->Acquire(touches_[position]).status());
      session_->Release(touches_[position]);
    }
    session_->SetSchedulePosition(0);
    return absl::OkStatus();
  }

  absl::Status Step() {
    OFFLOAD_RETURN_IF_ERROR(Touch(/*goes_on=*/false));
    client::StepCommand command{
        .step = ++step_,
        .groups = {kernels::OptimizerSpec("adamw",
                                          {{"lr", 1e-3}, {"beta2", 0.95}, {"weight_decay", 0.1}})}};
    for (uint32_t i = 0; i < count_; ++i) command.updates.push_back({i, 0, step_, 1.0f});
    return session_->Step(command);
  }

  absl::Status Put() {
    constexpr size_t kPutsUnderWay = 16;
    std::deque<client::Ticket> tickets;
    absl::Status status;
    for (uint32_t tensor = 0; tensor < count_; ++tensor) {
      for (uint64_t at = 0; at < kRows * kColumns; at += proto::kExtentElements) {
        tickets.push_back(
            session_->Put(tensor, at, proto::kExtentElements, proto::kRegionFixedBytes));
        if (tickets.size() <= kPutsUnderWay) continue;
        status.Update(session_->Wait(tickets.front()));
        tickets.pop_front();
      }
    }
    for (const client::Ticket ticket : tickets) status.Update(session_->Wait(ticket));
    OFFLOAD_RETURN_IF_ERROR(status);
    return session_->WaitDurable().status();
  }

  // Bytes per second of as many rounds as begin in the time.
  absl::StatusOr<double> Run(const std::string& pattern, double seconds) {
    const double begin = Clock::Real().NowSeconds();
    const uint64_t bytes_before = Bytes();
    do {
      OFFLOAD_RETURN_IF_ERROR(pattern == "read"    ? Touch(/*goes_on=*/true)
                                 : pattern == "write" ? Put()
                                                   : Step());
    } while (Clock::Real().NowSeconds() - begin < seconds);
    if (pattern == "mixed") OFFLOAD_RETURN_IF_ERROR(session_->WaitDurable().status());
    return static_cast<double>(Bytes() - bytes_before) / (Clock::Real().NowSeconds() - begin);
  }

  absl::Status PrintSteps(uint64_t steps) {
    const auto parameters = static_cast<double>(count_ * kRows * kColumns);
    for (; steps > 0; --steps) {
      const double begin = Clock::Real().NowSeconds();
      const proto::SlabHeader& header = session_->slab_header();
      const uint64_t read = header.bytes_read, written = header.bytes_written;
      OFFLOAD_RETURN_IF_ERROR(Step());
      const double seconds = Clock::Real().NowSeconds() - begin;
      std::printf("step %lu: %.3f s, %.2f B read, %.2f B written per parameter, %.0f MB/s\n", step_,
                  seconds, static_cast<double>(header.bytes_read - read) / parameters,
                  static_cast<double>(header.bytes_written - written) / parameters,
                  static_cast<double>(header.bytes_read - read + header.bytes_written - written) /
                      seconds / 1e6);
    }
    return session_->WaitDurable().status();
  }

  absl::Status Close() { return session_->CloseJob(); }

 private:
  uint64_t Bytes() const {
    return session_->slab_header().bytes_read + session_->slab_header().bytes_written;
  }

  const Options options_;
  std::unique_ptr<client::Session> session_;
  std::vector<uint32_t> touches_;
  uint32_t count_ = 0, ahead_ = 0;
  uint64_t step_ = 0;
};

absl::Status RunLines(StepBench& bench) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string pattern;
    double number = 0;
    words >> pattern >> number;
    if (words && pattern == "steps") {
      OFFLOAD_RETURN_IF_ERROR(bench.PrintSteps(static_cast<uint64_t>(number)));
    } else if (words && (pattern == "read" || pattern == "write" || pattern == "mixed")) {
      OFFLOAD_ASSIGN_OR_RETURN(const double rate, bench.Run(pattern, number));
      std::cout << rate << std::endl;
    } else {
      return absl::InvalidArgumentError("say: read|write|mixed SECONDS, or steps COUNT");
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "For example:\n  echo mixed 5 | step_bench --path /nvme0\n\n"
      "Has a daemon move a training job's bytes, as standard input says.");
  app.name("step_bench");
  app.add_option("--path", options.pool, "a directory on the drive");
  app.add_option("--parameters", options.mi_parameters, "of the model, in Mi (default 32)");
  app.add_option("--io", options.engine, "uring, libaio or threads");
  app.add_option("--blocks", options.pipeline_blocks, "of the update's pipeline");
  app.add_option("--update-threads", options.update_threads, "0: what the daemon chooses");
  CLI11_PARSE(app, argc, argv);
  StepBench bench(options);
  absl::Status status = bench.Open();
  if (status.ok()) status = RunLines(bench);
  if (status.ok()) status = bench.Close();
  if (status.ok()) return 0;
  std::cerr << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) { return offload::tools::Main(argc, argv); }
