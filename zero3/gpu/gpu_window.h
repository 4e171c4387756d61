// zero3/gpu/gpu_window.h
//
// The window of device memory in which weights wait for their operators. Weights are copied from
// host memory on a stream of the window's own, in the order of the schedule and ahead of use; an
// operator's stream waits, on the device, for the copy that it needs; a place is filled again
// behind whatever still reads it; a lease on host memory goes back when its copy is known to be
// done. In steady state the host waits for none of it.
//
// Invariants
//   * One allocation for the life of the window, window_bytes long: it never holds more.
//   * Only the copy stream, and the stream of gathers behind it, write into the window.
//   * A place that was given up is written again only behind the last event of every stream that
//     used it.
//   * A weight's place does not change while it is pinned, and a pinned weight is never evicted.
//
// With peers, ranks whose devices reach each other, what is brought ahead of use is offered to
// them: when all have offered a weight each copies its part and gathers the rest
// (gather_agreement.h). An operator that comes before that takes the offer back, and the weight is
// copied whole; no rank ever waits for another one to make its way. A thread issues what was agreed
// while nobody calls.
//
// What the window decides (who stays, who makes room, what comes next) are base/residency.h and
// zero3/schedule.h, which know no device; this file moves bytes.
//
// Errors: OFD-1303 when pinned weights leave no room, and OFD-2005 for a stream that is being
// captured, change nothing. Any other, of the device or of the source, is final: every later call
// returns it.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "accelerator/accelerator.h"
#include "base/residency.h"
#include "zero3/gpu/event_pool.h"
#include "zero3/gpu/peer_group.h"
#include "zero3/gpu/staging_ring.h"
#include "zero3/gpu/stream_stalls.h"
#include "zero3/gpu/weight_source.h"
#include "zero3/schedule.h"

namespace offload::zero3 {

// What ranks agree on beside weights (slice_exchange.h).
class AgreedWork {
 public:
  virtual ~AgreedWork() = default;
  // Gives item `item`, counted from behind the weights, to the stream of collectives. Called under
  // the window's lock, in the order of the agreement; must neither call the window nor wait.
  virtual absl::Status Issue(uint32_t item, accelerator::Stream stream) = 0;
};

// OFD-2005 while `stream` records a CUDA graph: that would keep an address which holds another
// weight later.
absl::Status CheckIsNotCaptured(accelerator::Accelerator& accelerator, uint32_t tensor,
                                accelerator::Stream stream);

class GpuWindow {
 public:
  struct Options {
    uint64_t window_bytes = 0;     // GpuPlan
    uint64_t lookahead_bytes = 0;  // GpuPlan
    // Host memory that leases of copies under way may hold at once.
    uint64_t leased_bytes_max = 0;
    // Others lease from the source, too, and may need room while nobody calls this window: after a
    // call no more is held than that. Otherwise one weight alone may be larger.
    bool source_is_shared = false;
    // Empty where the source's memory is registered. Otherwise registered memory, which outlives
    // the window: weights pass through it.
    std::span<std::byte> staging;
    // Fills places that were given up with NaN, to find what reads them too late. For debugging:
    // costs the GPU's bandwidth.
    bool poisons = false;
    // Those who gather weights together; null: there is nobody. It outlives the window.
    PeerGroup* peers = nullptr;
    // With peers: of the agreement's items behind the weights; outlives the window. May be null
    // when there are none.
    AgreedWork* other_work = nullptr;
    // With peers: where the source begins, of which all ranks have the same bytes at the same
    // offsets.
    const std::byte* source_begin = nullptr;
    // Smaller weights are not worth a gather.
    uint64_t gathered_bytes_min = uint64_t{16} << 10;
  };
  struct Counters {
    uint64_t pins = 0;
    uint64_t misses = 0;      // pins whose weight was not in the window
    uint64_t prefetches = 0;  // copies ahead of use
    uint64_t host_waits = 0;  // for copies, not for the source
    uint64_t source_waits = 0;
    uint64_t gathers = 0;     // weights that came with the peers, once each
    uint64_t taken_back = 0;  // offers that no gather came of
    uint64_t bytes_to_device = 0;
    uint64_t used_bytes = 0;   // by weights, now
    double stall_seconds = 0;  // of operators' streams, for copies that were not done
  };

  // `weight_bytes`: of each tensor; 0 for those that never come here. Accelerator and source
  // outlive the window.
  static absl::StatusOr<std::unique_ptr<GpuWindow>> Make(accelerator::Accelerator* accelerator,
                                                         WeightSource* source,
                                                         std::span<const uint64_t> weight_bytes,
                                                         const Options& options);
  // Waits for the device. Nothing may be pinned.
  ~GpuWindow();
  GpuWindow(const GpuWindow&) = delete;
  GpuWindow& operator=(const GpuWindow&) = delete;

  // Before an operator on `stream`: the device address of a weight, good until Unpin for whatever
  // is submitted to that stream. Waits on the host only for a weight that nothing announced.
  absl::StatusOr<std::byte*> Pin(uint32_t tensor, accelerator::Stream stream);
  // After the operator was launched. As often as Pin, with the same stream.
  absl::Status Unpin(uint32_t tensor, accelerator::Stream stream);
  // Between the two: what `stream` is given until the weight makes room uses it as well (torch's
  // record_stream).
  absl::Status RecordStream(uint32_t tensor, accelerator::Stream stream);

  // Whether what is pinned from now on belongs to a step, whose order is recorded.
  void SetRecording(bool recording);

  // The source's bytes of these weights have changed: they are read anew. Of one that is pinned
  // that counts when it no longer is.
  absl::Status Changed(std::span<const uint32_t> tensors);
  // After the optimizer's step, whose updates have changed these weights. The order of the step
  // becomes the schedule.
  absl::Status EndStep(std::span<const uint32_t> changed);

  // The host is about to wait for the source, outside of the window: from now on, until as many
  // EndSourceWait(), nothing is leased but during a Pin(). Waits for copies. A source that has to
  // make room, or to change bytes, could else wait for what the window holds and nobody returns.
  void BeginSourceWait();
  void EndSourceWait();

  // With peers: issues what is agreed so far. Waits for nothing.
  absl::Status FollowAgreement();

  Counters counters() const;
  uint64_t leased_bytes() const;

 private:
  struct Use {
    accelerator::Stream stream;
    RecordedEvent last;
  };
  struct Weight {
    uint64_t slot_bytes = 0, size_bytes = 0;
    uint32_t pins = 0;
    bool is_old = false;                        // the source's bytes have changed
    uint64_t arrival = 0;                       // order of copies
    RecordedEvent copied;                       // null when it is not in the window
    bool is_known_copied = false;               // the host knows that `copied` is done
    const std::byte* offered = nullptr;         // its leased bytes, while it is: it has a place
    bool is_gathered = false;                   // `copied` is of the stream of gathers
    std::vector<accelerator::Stream> ordered;   // streams that wait for `copied`
    std::vector<Use> uses;                      // since then
    std::vector<accelerator::Stream> recorded;  // RecordStream
  };
  // A place that was given up, until the copy stream waits for its last users.
  struct Retired {
    uint64_t begin, end;
    std::vector<RecordedEvent> uses;
  };
  struct CopyUnderWay {
    uint32_t tensor;
    RecordedEvent copied;
  };

  GpuWindow(accelerator::Accelerator* accelerator, WeightSource* source,
            std::span<const uint64_t> weight_bytes, const Options& options);

  absl::Status BringNow(uint32_t tensor);
  absl::Status BringAhead();
  absl::StatusOr<bool> MayCopyAhead(const Weight& weight);
  absl::StatusOr<const std::byte*> LeaseNow(uint32_t tensor);
  std::optional<WeightWindow::Room> FindPlace(uint32_t tensor,
                                              std::optional<uint64_t> needed) const;
  absl::Status Fill(uint32_t tensor, const WeightWindow::Room& place, const std::byte* host);
  absl::Status CopyIn(uint32_t tensor, uint64_t offset_bytes, const std::byte* host);
  absl::Status WaitForUsers(uint64_t begin, uint64_t end);
  absl::Status Evict(uint32_t tensor);
  absl::Status EvictOld(std::span<const uint32_t> tensors);
  absl::Status ReturnCopied();
  absl::Status ReturnOldest();
  absl::Status ReturnAll();
  void ReturnUnfinished();

  // ---- With peers; gpu_window_peers.cc
  bool MayOffer(const Weight& weight) const;
  absl::Status Offer(uint32_t tensor, const WeightWindow::Room& place, const std::byte* host);
  absl::Status TakeBack(uint32_t tensor, bool keeps_lease = false);
  absl::Status TakeBackAll();
  absl::Status CopyOldOffers();
  absl::Status IssueAgreed();
  absl::Status Issue(uint32_t item);
  absl::Status Gather(uint32_t tensor);
  const std::byte* EndOffer(uint32_t tensor);
  absl::Status CopyPiece(std::byte* device, const std::byte* host, uint64_t size_bytes);
  void LeavePeers();
  void FollowPeers();

  static constexpr uint8_t kNanByte = 0xFF;  // of which NaN is made in fp32, bf16 and fp16

  uint64_t NextUse(uint32_t tensor) const;
  absl::Status Keep(absl::Status status);

  accelerator::Accelerator* const accelerator_;
  WeightSource* const source_;
  const Options options_;
  mutable std::mutex mutex_;
  EventPool events_;
  mutable StreamStalls stalls_;
  std::optional<StagingRing> ring_;
  std::byte* bytes_ = nullptr;
  accelerator::Stream copies_;
  Schedule schedule_;
  UseOrder order_;
  WeightWindow places_;
  std::vector<Weight> weights_;
  std::deque<uint32_t> wanted_;  // to be copied ahead, in the schedule's order
  std::vector<Retired> retired_;
  std::deque<CopyUnderWay> under_way_;  // whose leases are held, in the order of the copy stream
  uint64_t leased_bytes_ = 0;
  int source_waits_ = 0;  // BeginSourceWait()
  uint64_t arrivals_ = 0;
  Counters counters_;
  absl::Status failed_;
  accelerator::Stream gathers_;
  std::deque<uint32_t> offers_;  // oldest first
  uint64_t offered_bytes_ = 0;   // leased, beside leased_bytes_
  std::atomic<bool> is_closing_{false};
  std::thread follower_;
};

}  // namespace offload::zero3
