#include "offloadd/simulated_machine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "aio/memory_device.h"
#include "base/check.h"

namespace offload::daemon {

bool SimulatedMachine::RunOne() {
  if (work_.empty()) return false;
  const auto chosen = work_.begin() + static_cast<ptrdiff_t>(random_.Below(work_.size()));
  const std::function<void()> work = std::move(chosen->work);
  work_.erase(chosen);
  work();
  return true;
}

void SimulatedMachine::DropUnnamedStore() {
  if (!has_store_) drive_.reset();
}

absl::StatusOr<std::unique_ptr<swap::Store>> SimulatedMachine::OpenToRead(
    const std::string& snapshot) {
  return snapshot.empty() ? swap::Store::OpenOn(Traced())
                          : swap::Store::OpenSnapshotOn(Traced(), snapshot);
}

std::unique_ptr<aio::Device> SimulatedMachine::Traced() {
  return std::make_unique<swap::TracedDevice>(drive_.get(), &trace_, &read_ranges_);
}

// What the last copy has been given and has not run is run when it goes.
Executor SimulatedMachine::MakeExecutor(size_t thread_count, const std::string& name) {
  const uint64_t number = ++executors_;
  const std::shared_ptr<void> last(nullptr, [this, number](void*) {
    for (;;) {
      const auto mine = std::ranges::find(work_, number, &Work::executor);
      if (mine == work_.end()) return;
      const std::function<void()> work = std::move(mine->work);
      work_.erase(mine);
      work();
    }
  });
  return [this, number, last, thread_count](std::function<void()> work) {
    OFFLOAD_CHECK(std::ranges::count(work_, number, &Work::executor) <
                  static_cast<ptrdiff_t>(thread_count))
        << "more is given to " << thread_count << " threads than they can begin";
    work_.push_back({number, std::move(work)});
  };
}

absl::StatusOr<proto::SharedMemory> SimulatedMachine::CreateMemory(const std::string& name,
                                                                   uint64_t size_bytes,
                                                                   const Placement& placement) {
  return proto::SharedMemory::CreatePrivate(size_bytes);
}

void SimulatedMachine::SetPollsPerCompletion(uint32_t polls) {
  polls_per_completion_ = polls;
  if (drive_ != nullptr) drive_->SetPollsPerCompletion(polls);
}

absl::StatusOr<std::unique_ptr<swap::Store>> SimulatedMachine::OpenStore(
    const std::string& pool, const std::string& job, const swap::StoreOptions& options) {
  if (!has_store_) return absl::NotFoundError("no store");
  return swap::Store::OpenOn(Traced());
}

absl::StatusOr<std::unique_ptr<swap::Store>> SimulatedMachine::CreateStore(
    const std::string& pool, const swap::StoreSpec& spec, const swap::StoreOptions& options) {
  constexpr uint32_t kSectorBytes = 4096;
  auto memory = std::make_unique<aio::MemoryDevice>(swap::FormattedBytes(spec, kGenerationsMax),
                                                    std::nullopt, kSectorBytes, kSectorBytes);
  drive_ = std::make_unique<aio::FaultyDevice>(
      std::move(memory),
      aio::FaultyDevice::Options{.seed = random_.Next(), .reorders = !random_.OneIn(4)});
  drive_->SetPollsPerCompletion(polls_per_completion_);
  return swap::Store::CreateOn(Traced(), spec, std::array<uint8_t, 16>{7}, options.generations);
}

// The first commit is durable by then.
absl::Status SimulatedMachine::PublishStore(swap::Store& store) {
  has_store_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<swap::Scratch>> SimulatedMachine::CreateScratch(
    const std::string& pool, swap::ScratchOptions options) {
  return swap::Scratch::CreateOn(
      std::make_unique<aio::MemoryDevice>(std::max<uint64_t>(scratch_bytes_, 4096), random_.Next()),
      std::move(options));
}

}  // namespace offload::daemon
