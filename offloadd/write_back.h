// offloadd/write_back.h
//
// Writes, before a commit, what steps inside an interval have changed in memory only: planes that
// stay there for good (ResidentState::Leaves). A tensor is written as soon as the step that is to
// be committed has updated it, beside the updates of others and the steps that follow: those change
// a tensor only once it is written (Awaits()).
//
// Invariants
//   * An extent is written at most once for a commit, however many steps have changed it, and its
//   checksums are taken then.
//   * Until its write is done an extent counts as unwritten.
//
// Thread safety: the loop's thread only; checksums are taken on workers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "offloadd/job_context.h"
#include "offloadd/resident_state.h"
#include "offloadd/weight_cache.h"

namespace offload::daemon {

class WriteBack {
 public:
  WriteBack(JobContext* context, WeightCache* cache, ResidentState* state)
      : context_(context), cache_(cache), state_(state) {}

  // What is unwritten of the tensor is to be in the next commit.
  void Allow(uint32_t store_tensor);
  // Of all tensors.
  void AllowAll();
  // True until what was allowed of the tensor is written: it must not change.
  bool Awaits(uint32_t store_tensor) const;
  // Somebody waits to change it: it goes first.
  void Hasten(uint32_t store_tensor);
  // True when all that was allowed is written.
  bool done() const { return queue_.empty() && in_flight_ == 0; }

 private:
  // Of one extent: what is written, its checksums to be filled in on a worker.
  struct Work {
    ResidentState::Key key;
    uint64_t sequence = 0;
    std::vector<swap::WriteRequest> requests;
  };

  void Queue(ResidentState::Key key, ResidentState::Unwritten& unwritten);
  void StartNext();
  std::shared_ptr<Work> MakeWork(ResidentState::Key key) const;
  void TakeChecksums(Work& work) const;
  void Write(const std::shared_ptr<Work>& work);
  void Finish(const Work& work, const absl::Status& status);

  JobContext* context_;
  WeightCache* cache_;
  ResidentState* state_;
  std::deque<ResidentState::Key> queue_;
  uint32_t in_flight_ = 0;
};

}  // namespace offload::daemon
