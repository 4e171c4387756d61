#include "tests/honest_neighbour.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload::tests {
namespace {

constexpr uint32_t kTensors = 4;
constexpr uint64_t kElements = 2 * proto::kExtentElements;
constexpr uint64_t kWords = kElements * sizeof(float) / sizeof(uint64_t);
constexpr uint64_t kStagingOffset = proto::kRegionFixedBytes;
constexpr uint64_t kPinsOffset = kStagingOffset + proto::kLoadingStagingBytes;

}  // namespace

absl::StatusOr<std::unique_ptr<HonestNeighbour>> HonestNeighbour::Open(const std::string& job,
                                                                       const std::string& pool) {
  std::unique_ptr<HonestNeighbour> neighbour(new HonestNeighbour);
  auto session = client::Session::Connect({.allow_private = false});
  if (!session.ok()) return session.status();
  neighbour->session_ = *std::move(session);
  client::Session& rank = *neighbour->session_;
  const auto info = rank.OpenJob({.job = job, .pool = pool, .ram_bytes = 64ull << 20});
  if (!info.ok()) return info.status();
  std::vector<proto::Tensor> tensors;
  proto::MemoryPlan plan;
  for (uint32_t i = 0; i < kTensors; ++i) {
    tensors.push_back({.name = absl::StrCat("weight", i),
                       .shape = {static_cast<int64_t>(kElements)},
                       .trainable = false});
    plan.weight_resident.push_back(false);
    plan.state_resident.push_back(0);
    plan.gradients.push_back({});
  }
  plan.window_bytes = kTensors / 2 * kElements * sizeof(float);
  plan.pipeline_blocks = 1;
  plan.region_bytes = kPinsOffset + proto::kSectorBytes;
  absl::Status status = rank.DeclareTensors(tensors);
  if (status.ok())
    status = rank.Seal(kernels::OptimizerSpec("sgd"), plan, kPinsOffset, /*progress=*/nullptr);
  if (status.ok()) status = neighbour->PutWeights();
  if (status.ok()) status = rank.Publish("");
  if (!status.ok()) return status;
  return neighbour;
}

absl::Status HonestNeighbour::PutWeights() {
  auto* words = reinterpret_cast<uint64_t*>(session_->region() + kStagingOffset);
  std::fill_n(words, proto::kExtentElements * sizeof(float) / sizeof(uint64_t), kCanary);
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    for (uint64_t begin = 0; begin < kElements; begin += proto::kExtentElements) {
      const absl::Status status =
          session_->Wait(session_->Put(tensor, begin, proto::kExtentElements, kStagingOffset));
      if (!status.ok()) return status;
    }
  }
  std::fill_n(words, proto::kExtentElements * sizeof(float) / sizeof(uint64_t), uint64_t{0});
  return absl::OkStatus();
}

void HonestNeighbour::Start() {
  thread_ = std::thread([this] {
    while (!stop_.load() && status_.ok()) status_ = ReadAll();
  });
}

absl::Status HonestNeighbour::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  return status_;
}

absl::Status HonestNeighbour::ReadAll() {
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    const auto begin = std::chrono::steady_clock::now();
    const absl::StatusOr<const std::byte*> bytes = session_->Acquire(tensor);
    latencies_seconds_.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (!bytes.ok()) return bytes.status();
    const auto* words = reinterpret_cast<const uint64_t*>(*bytes);
    const bool right =
        std::all_of(words, words + kWords, [](uint64_t word) { return word == kCanary; });
    session_->Release(tensor);
    if (!right) return absl::DataLossError(absl::StrCat("wrong bytes in tensor ", tensor));
    reads_.fetch_add(1);
  }
  return absl::OkStatus();
}

}  // namespace offload::tests
