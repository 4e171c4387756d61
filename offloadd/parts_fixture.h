// offloadd/parts_fixture.h
//
// For tests: the parts of a sealed job over a simulated machine, without the job. One thread, whose
// turns are a job's; computations, transfers and time wait until the test lets them go on. What the
// job must hold is computed beside it (job_model.h).
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "offloadd/activity_log.h"
#include "offloadd/job_context.h"
#include "offloadd/job_model.h"
#include "offloadd/resident_state.h"
#include "offloadd/simulated_machine.h"
#include "offloadd/transfers.h"
#include "offloadd/update_executor.h"
#include "offloadd/weight_cache.h"
#include "swap/traced_device.h"

namespace offload::daemon {

// A tensor of one dimension.
proto::Tensor TestTensor(const std::string& name, uint64_t elements,
                         proto::Dtype dtype = proto::Dtype::kFloat32);

struct PartsOptions {
  std::vector<proto::Tensor> tensors;
  kernels::OptimizerSpec optimizer;
  uint64_t window_bytes = 0;    // for weights that are no bundles
  bool keeps_weights = false;   // for good, instead
  bool keeps_state = false;     // for good
  uint32_t keeps_state_of = 0;  // else of so many first tensors of the store
  uint32_t pipeline_blocks = 2;
  uint32_t ranks = 1;
  Durability durability;
  bool reads_ahead = false;
  bool updates_ahead = false;
  proto::Depths depths;
};

class Parts {
 public:
  // A job of step 0 whose tensors have values of their own, all of them on the drive; bundles are
  // in the slab, too.
  explicit Parts(PartsOptions options);
  ~Parts();

  // ---- Time. A turn is one of the job's loop; Run goes on until nothing is under way.
  void Turn();
  void Run();
  // Runs no computation meanwhile.
  void RunWithoutWorkers();

  // ---- Ranks.
  struct Answer {
    absl::Status status;
    uint64_t value = 0;
  };
  // Pins and asks; returns the tag.
  uint64_t Acquire(uint32_t tensor, uint32_t rank = 0);
  void Release(uint32_t tensor, uint32_t rank = 0) { --Pin(tensor, rank); }
  // Asks for a whole tensor of one extent.
  uint64_t Put(uint32_t tensor, const Bytes& values, uint32_t rank = 0, uint64_t digest = 0);
  // Ends the puts of the first rank, or follows them.
  uint64_t EndPuts(uint32_t tensor, uint32_t rank = 0, uint64_t digest = 0);
  uint64_t Get(uint32_t tensor, proto::Plane plane, uint32_t rank = 0);
  // What a Get has brought.
  Bytes Got(uint64_t tag) const;

  bool IsAnswered(uint64_t tag) const { return answers_.count(tag) != 0; }
  // OK only after a good answer.
  absl::Status StatusOf(uint64_t tag) const;
  // In the order in which they came.
  const std::vector<uint64_t>& answered() const { return answered_; }

  // ---- Steps.
  // Begins one that updates these tensors with gradients of its own, and says so to the model.
  void Begin(uint64_t step, const std::vector<uint32_t>& tensors, bool is_partial = false);
  // Says that it will come, and that these gradients of it are final.
  void Announce(uint64_t step, const std::vector<uint32_t>& tensors);
  // Made when it is asked for first; not changed after Begin().
  Bytes& GradientOf(uint64_t step, uint32_t tensor);
  std::vector<uint64_t> written, committed;  // steps, as they were reported
  std::vector<uint32_t> computed;            // tensors

  // ---- What is there.
  proto::TensorState StateOf(uint32_t tensor) const;
  // The weights where the tensor word says that they are.
  Bytes InSlab(uint32_t tensor) const;
  // What the last commit differs in from `state`; empty: nothing.
  std::string CompareDurable(const JobState& state);
  // The model, after all that was begun and put.
  JobState now;

  JobContext context;
  WeightCache& cache() { return *cache_; }
  Transfers& transfers() { return *transfers_; }
  UpdateExecutor& executor() { return *executor_; }
  ResidentState& state() { return *state_; }
  aio::FaultyDevice& drive() { return *machine_.drive(); }
  FakeClock& clock() { return machine_.fake_clock(); }
  // Store tensors whose update a rank asked for.
  std::vector<uint32_t> on_demand;

 private:
  void MakePlan(const PartsOptions& options);
  void MakeMemory();
  void MakeStore();
  void Load();
  void MakeParts(bool new_store);
  bool RunOnce(bool with_workers);
  void Complete(uint32_t rank, uint64_t tag, const absl::Status& status, uint64_t value);
  void Fail(const absl::Status& status);
  proto::PinWord& Pin(uint32_t tensor, uint32_t rank);
  uint64_t Submit(uint32_t rank, proto::SubmissionEntry entry);
  uint64_t TakeRoom(uint64_t size_bytes);
  StepPlan MakePlanOf(uint64_t step, const std::vector<uint32_t>& tensors);
  TaskPlan MakeTask(uint32_t store_tensor, const std::vector<uint32_t>& tensors, uint64_t step);

  Random random_{1};
  swap::Trace trace_;
  SimulatedMachine machine_{&random_, &trace_};
  ActivityLog activity_{&machine_.clock()};
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<swap::Store> store_;
  MappedRegion slab_;
  std::vector<MappedRegion> regions_;
  uint64_t room_used_bytes_ = 0;  // of a region
  std::map<uint64_t, Bytes> gradients_;
  std::unique_ptr<WeightCache> cache_;
  std::unique_ptr<ResidentState> state_;
  std::unique_ptr<UpdateExecutor> executor_;
  std::unique_ptr<Transfers> transfers_;
  uint64_t tags_ = 0;
  std::map<uint64_t, Answer> answers_;
  std::vector<uint64_t> answered_;
  struct Buffer {
    uint32_t rank;
    uint64_t offset, size_bytes;
  };
  std::map<uint64_t, Buffer> buffers_;  // by tag
};

}  // namespace offload::daemon
