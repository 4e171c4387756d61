#include "zero3/torch/process_memory.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/byte_size.h"
#include "base/error.h"
#include "zero3/torch/log.h"
#include "zero3/torch/raw_access.h"
#include "zero3/torch/throw_status.h"

namespace offload::zero3 {
namespace {

// Smaller ones are not worth a range of pages.
constexpr size_t kPagedBytesMin = 64 << 10;

thread_local bool has_passes_inside = false;
thread_local ProcessMemory::Use* use_of_thread = nullptr;  // the last one
thread_local std::unique_ptr<ProcessMemory::Use> step_of_thread;

// Of pages: a forked child that touches them is told why it may not. In the process that has them
// nobody comes here but for the buffer of a system call, which is there.
class RefusesChildren final : public RawOwner {
 public:
  void ServeRaw(bool) override {
    if (process_ == ::getpid()) return;
    ThrowStatus(MakeError(
        ErrorId::kSessionEnded,
        "this process was forked, and what an optimizer keeps is paged in its parent",
        "Use it there, give this process a copy that was made before (copy.deepcopy of "
        "state_dict()), or set OFFLOADD_BESIDE_RAM to a size that has room for it in memory"));
  }

 private:
  const pid_t process_ = ::getpid();
};

bool IsInsidePass() {
  return torch::autograd::get_current_graph_task_id() != -1 ||
         (has_passes_inside && c10::GradMode::is_enabled());
}

}  // namespace

std::shared_ptr<ProcessMemory> ProcessMemory::Make(std::string pool, uint64_t bytes_max) {
  return std::shared_ptr<ProcessMemory>(new ProcessMemory(std::move(pool), bytes_max));
}

ProcessMemory::ProcessMemory(std::string pool, uint64_t bytes_max)
    : pool_(std::move(pool)), bytes_max_(bytes_max) {}

c10::DataPtr ProcessMemory::Allocate(size_t size_bytes) {
  if (size_bytes < kPagedBytesMin || IsInsidePass()) return {};
  if ((ordinary_bytes_ += size_bytes) > bytes_max_) {
    ordinary_bytes_ -= size_bytes;
    return AllocatePaged(size_bytes);
  }
  std::shared_ptr<c10::DataPtr> ordinary;
  try {
    ordinary = std::make_shared<c10::DataPtr>(AllocateOrdinary(size_bytes));
  } catch (...) {
    ordinary_bytes_ -= size_bytes;
    throw;
  }
  void* const data = ordinary->get();
  return MakeDataPtr(data, [its = shared_from_this(), ordinary, size_bytes] {
    ordinary->clear();
    its->ordinary_bytes_ -= size_bytes;
  });
}

c10::DataPtr ProcessMemory::AllocatePaged(size_t size_bytes) {
  const std::shared_ptr<PagedMemory> memory = paged(/*makes=*/true);
  absl::StatusOr<std::byte*> data = absl::UnavailableError("");
  if (memory != nullptr) {
    if (use_of_thread != nullptr && !use_of_thread->paged_.has_value())
      use_of_thread->paged_.emplace(memory);
    data = memory->Allocate(size_bytes);
  }
  SayOnce(data.status());
  if (!data.ok()) return {};
  const auto refuses = std::make_shared<RefusesChildren>();
  AddRawRange(*data, size_bytes, refuses.get());
  return MakeDataPtr(*data, [memory, refuses, block = *data] {
    RemoveRawRange(block);
    memory->Free(block);
  });
}

std::shared_ptr<PagedMemory> ProcessMemory::paged(bool makes) {
  std::lock_guard lock(mutex_);
  if (paged_ != nullptr || !makes || !cannot_open_.ok()) return paged_;
  absl::StatusOr<std::shared_ptr<PagedMemory>> made =
      PagedMemory::Open(pool_, std::max<uint64_t>(bytes_max_, 1 << 20));
  if (made.ok()) return paged_ = *std::move(made);
  cannot_open_ = made.status();
  return nullptr;
}

void ProcessMemory::SayOnce(const absl::Status& allocated) {
  std::lock_guard lock(mutex_);
  if (allocated.ok()) {
    if (std::exchange(has_said_, true)) return;
    Log().info("more than {} beside ram is needed in this process: the rest is paged to {}",
               FormatBytes(bytes_max_), pool_);
  } else if (!std::exchange(has_warned_, true)) {
    const absl::Status& reason = cannot_open_.ok() ? allocated : cannot_open_;
    Log().warn("more than {} beside ram is needed in this process, and stays in memory: {}",
               FormatBytes(bytes_max_), std::string(reason.message()));
  }
}

absl::Status ProcessMemory::Check() {
  const std::shared_ptr<PagedMemory> memory = paged(/*makes=*/false);
  return memory != nullptr ? memory->Check() : absl::OkStatus();
}

// ---- Uses --------------------------------------------------------------------------------------

ProcessMemory::Use::Use(std::shared_ptr<ProcessMemory> memory, bool inside_passes)
    : memory_(std::move(memory)),
      former_inside_passes_(std::exchange(has_passes_inside, inside_passes)),
      former_use_(std::exchange(use_of_thread, this)),
      former_source_(SetMemorySource(memory_.get())) {
  if (const auto paged = memory_->paged(/*makes=*/false)) paged_.emplace(paged);
}

ProcessMemory::Use::~Use() {
  SetMemorySource(former_source_);
  use_of_thread = former_use_;
  has_passes_inside = former_inside_passes_;
}

void ProcessMemory::BeginStep(bool inside_passes) {
  EndStep();
  step_of_thread = std::make_unique<Use>(shared_from_this(), inside_passes);
}

void ProcessMemory::EndStep() { step_of_thread.reset(); }

}  // namespace offload::zero3
