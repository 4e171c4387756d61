#include "offloadd/write_back.h"

#include <algorithm>

#include "base/fault_point.h"

namespace offload::daemon {

void WriteBack::Allow(uint32_t store_tensor) {
  auto& unwritten = state_->unwritten();
  for (auto each = unwritten.lower_bound({store_tensor, 0});
       each != unwritten.end() && each->first.first == store_tensor; ++each)
    Queue(each->first, each->second);
  StartNext();
}

void WriteBack::AllowAll() {
  for (auto& [key, unwritten] : state_->unwritten()) Queue(key, unwritten);
  StartNext();
}

bool WriteBack::Awaits(uint32_t store_tensor) const {
  const auto& unwritten = state_->unwritten();
  for (auto each = unwritten.lower_bound({store_tensor, 0});
       each != unwritten.end() && each->first.first == store_tensor; ++each) {
    if (each->second.queued) return true;
  }
  return false;
}

void WriteBack::Hasten(uint32_t store_tensor) {
  if (queue_.empty() || queue_.front().first == store_tensor) return;
  std::stable_partition(
      queue_.begin(), queue_.end(),
      [store_tensor](const ResidentState::Key& key) { return key.first == store_tensor; });
}

void WriteBack::Queue(ResidentState::Key key, ResidentState::Unwritten& unwritten) {
  if (unwritten.queued) return;
  unwritten.queued = true;
  queue_.push_back(key);
}

void WriteBack::StartNext() {
  while (!queue_.empty() && in_flight_ < context_->depths.write_backs && !context_->failed()) {
    const std::shared_ptr<Work> work = MakeWork(queue_.front());
    queue_.pop_front();
    ++in_flight_;
    FaultPoint("job.write_back");
    context_->Compute([this, work] { TakeChecksums(*work); }, [this, work] { Write(work); });
  }
}

std::shared_ptr<WriteBack::Work> WriteBack::MakeWork(ResidentState::Key key) const {
  const auto [store_tensor, index] = key;
  const proto::StoreTensor& tensor = context_->store_tensor(store_tensor);
  const ResidentState::Unwritten& unwritten = state_->unwritten().at(key);
  auto work = std::make_shared<Work>();
  work->key = key;
  work->sequence = context_->store->open_sequence();
  if (unwritten.weight) {
    const std::byte* weight = cache_->slot(store_tensor) + WeightExtentOffset(tensor, index);
    work->requests.push_back({ExtentIdOf(store_tensor, proto::Plane::kWeight, index), weight, 0});
  }
  if (!unwritten.state) return work;
  const ExtentPlanes planes = state_->Planes(store_tensor, index);
  for (const proto::Plane plane : proto::kUpdateOnlyPlanes) {
    if (planes[plane].bytes == nullptr) continue;
    swap::WriteRequest& request = work->requests.emplace_back();
    request = {ExtentIdOf(store_tensor, plane, index), planes[plane].bytes, 0};
    if (plane != proto::Plane::kResidual) continue;
    request.word = unwritten.tie_word;
    request.flags = unwritten.tie_flags;
  }
  return work;
}

void WriteBack::TakeChecksums(Work& work) const {
  for (swap::WriteRequest& request : work.requests) {
    swap::Checksum checksum = context_->store->StartChecksum(request.id, work.sequence);
    checksum.Update({request.bytes, context_->store->ExtentBytes(request.id)});
    request.crc = checksum.Finish();
  }
}

void WriteBack::Write(const std::shared_ptr<Work>& work) {
  if (context_->failed()) return Finish(*work, context_->failure);
  context_->store->Write(
      work->requests,
      context_->CountedWrite([this, work](const absl::Status& status) { Finish(*work, status); }));
}

void WriteBack::Finish(const Work& work, const absl::Status& status) {
  --in_flight_;
  if (!status.ok()) context_->fail(status);
  if (context_->failed()) return;
  state_->SetWritten(work.key);
  StartNext();
}

}  // namespace offload::daemon
