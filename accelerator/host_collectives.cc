#include "accelerator/host_collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/named_memory.h"
#include "base/status_macros.h"

namespace offload::accelerator {
namespace {

constexpr size_t kSlotBytes = 64 << 10;  // what a rank shows to the others at once
constexpr int kPoison = 0xFF;
constexpr std::chrono::microseconds kPause(50);
constexpr std::chrono::seconds kJoinPatience(60);

// Of a rank, in shared memory. It alone writes it.
struct alignas(64) Seat {
  std::atomic<uint32_t> is_here;
  std::atomic<uint64_t> posted;    // pieces that it has shown
  std::atomic<uint64_t> consumed;  // pieces that it has taken from all others
  // Of the piece shown last.
  uint64_t part_bytes, offset_bytes;
};

size_t MemoryBytes(uint32_t world_size) { return world_size * (sizeof(Seat) + kSlotBytes); }

// What commands of the device use: it outlives the end of the connection.
struct Shared {
  HostAccelerator* device = nullptr;
  NamedMemory memory;
  uint32_t rank = 0, world_size = 0;
  std::atomic<bool> is_aborted{false}, differs{false};
  std::atomic<bool> is_reported{true};  // that they differ

  Seat& seat(uint32_t of) const { return reinterpret_cast<Seat*>(memory.span().data())[of]; }
  std::byte* slot(uint32_t of) const {
    return memory.span().data() + world_size * sizeof(Seat) + of * kSlotBytes;
  }
  bool HasFailed() const { return is_aborted || differs; }
  bool All(std::atomic<uint64_t> Seat::*count, uint64_t least) const {
    for (uint32_t of = 0; of < world_size; ++of) {
      if ((seat(of).*count).load(std::memory_order_acquire) < least) return false;
    }
    return true;
  }
};

// A piece of every rank's part: [offset_bytes, offset_bytes + size_bytes) of it.
struct Piece {
  uint64_t number = 0;
  std::byte* bytes = nullptr;
  uint64_t part_bytes = 0, offset_bytes = 0, size_bytes = 0;
  std::byte* Of(uint32_t rank) const { return bytes + rank * part_bytes + offset_bytes; }
};

void Show(const Shared& shared, const Piece& piece) {
  if (shared.HasFailed()) return;
  Seat& seat = shared.seat(shared.rank);
  seat.part_bytes = piece.part_bytes;
  seat.offset_bytes = piece.offset_bytes;
  for (uint32_t rank = 0; rank < shared.world_size; ++rank) {
    if (rank != shared.rank) std::memset(piece.Of(rank), kPoison, piece.size_bytes);
  }
  std::memcpy(shared.slot(shared.rank), piece.Of(shared.rank), piece.size_bytes);
  seat.posted.store(piece.number + 1, std::memory_order_release);  // with all of the above
}

void Take(Shared* shared, const Piece& piece) {
  if (shared->HasFailed()) return;
  for (uint32_t rank = 0; rank < shared->world_size; ++rank) {
    if (rank == shared->rank) continue;
    const Seat& seat = shared->seat(rank);
    if (seat.part_bytes != piece.part_bytes || seat.offset_bytes != piece.offset_bytes) {
      if (!shared->differs.exchange(true)) shared->is_reported = false;
      return;
    }
    std::memcpy(piece.Of(rank), shared->slot(rank), piece.size_bytes);
  }
  shared->seat(shared->rank).consumed.store(piece.number + 1, std::memory_order_release);
}

class HostCollectives final : public Collectives {
 public:
  explicit HostCollectives(std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)), mover_([this] { Move(); }) {}

  ~HostCollectives() override {
    Abort();
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    mover_.join();
  }

  absl::Status AllGather(std::byte* bytes, size_t part_bytes, Stream stream) override {
    const std::lock_guard lock(mutex_);
    OFFLOAD_RETURN_IF_ERROR(AsyncError());
    for (uint32_t rank = 0; rank < shared_->world_size; ++rank) {
      shared_->device->NoteUse(stream, rank == shared_->rank ? Use::kRead : Use::kWrite,
                               bytes + rank * part_bytes, part_bytes);
    }
    for (uint64_t offset = 0; offset < part_bytes; offset += kSlotBytes) {
      Submit({.number = next_++,
              .bytes = bytes,
              .part_bytes = part_bytes,
              .offset_bytes = offset,
              .size_bytes = std::min<uint64_t>(kSlotBytes, part_bytes - offset)},
             stream);
    }
    shared_->device->CountCollective();
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status AsyncError() override {
    if (shared_->differs)
      return MakeError(ErrorId::kGpuFailed, "the ranks' collectives differ in order or size");
    if (shared_->is_aborted)
      return MakeError(ErrorId::kGpuFailed, "the connection between the ranks' devices was ended");
    return absl::OkStatus();
  }

  void Abort() override { shared_->is_aborted = true; }

 private:
  void Submit(const Piece& piece, Stream stream) {
    const std::shared_ptr<Shared> shared = shared_;
    shared->device->LaunchWhenReady(
        stream,
        [shared, piece] {
          return shared->HasFailed() || shared->All(&Seat::consumed, piece.number);
        },
        [shared, piece] { Show(*shared, piece); });
    shared->device->LaunchWhenReady(
        stream,
        [shared, piece] {
          return shared->HasFailed() || shared->All(&Seat::posted, piece.number + 1);
        },
        [shared, piece] { Take(shared.get(), piece); });
  }

  // As a GPU goes on by itself: executes what there is while something is under way. Commands run
  // under the device's lock, so it hears of what they found from here.
  void Move() {
    std::unique_lock lock(mutex_);
    const auto is_under_way = [this] {
      return !shared_->HasFailed() &&
             shared_->seat(shared_->rank).consumed.load(std::memory_order_acquire) < next_;
    };
    for (;;) {
      changed_.wait(lock, [&] { return is_over_ || is_under_way(); });
      lock.unlock();
      shared_->device->RunAll();
      if (!shared_->is_reported.exchange(true))
        shared_->device->AddViolation("collectives that differ between ranks");
      std::this_thread::sleep_for(kPause);
      lock.lock();
      if (is_over_) return;
    }
  }

  const std::shared_ptr<Shared> shared_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0;  // pieces submitted
  bool is_over_ = false;
  std::thread mover_;
};

}  // namespace

struct HostPeers::Made {
  std::mutex mutex;
  std::map<std::string, NamedMemory> by_id;
};

HostPeers::HostPeers(HostAccelerator* device, std::string address)
    : device_(device), address_(std::move(address)), made_(std::make_unique<Made>()) {}

HostPeers::~HostPeers() = default;

bool HostPeers::CanAccess(const std::string& address) const {
  return !address.empty() && address != address_;
}

absl::StatusOr<std::string> HostPeers::MakeId(uint32_t world_size) {
  OFFLOAD_ASSIGN_OR_RETURN(NamedMemory memory, NamedMemory::Make(MemoryBytes(world_size)));
  for (uint32_t rank = 0; rank < world_size; ++rank)
    new (memory.span().data() + rank * sizeof(Seat)) Seat{};
  std::string id = memory.name();
  const std::lock_guard lock(made_->mutex);
  made_->by_id[id] = std::move(memory);
  return id;
}

absl::StatusOr<std::unique_ptr<Collectives>> HostPeers::Join(const std::string& id, uint32_t rank,
                                                             uint32_t world_size) {
  auto shared = std::make_shared<Shared>();
  shared->device = device_;
  shared->rank = rank;
  shared->world_size = world_size;
  OFFLOAD_ASSIGN_OR_RETURN(shared->memory, NamedMemory::Open(id, MemoryBytes(world_size)));
  shared->seat(rank).is_here = 1;
  const auto deadline = std::chrono::steady_clock::now() + kJoinPatience;
  for (uint32_t other = 0; other < world_size; ++other) {
    while (shared->seat(other).is_here == 0) {
      if (std::chrono::steady_clock::now() > deadline)
        return MakeError(ErrorId::kGpuFailed, absl::StrCat("rank ", other, " does not come"));
      std::this_thread::sleep_for(kPause);
    }
  }
  const std::lock_guard lock(made_->mutex);
  made_->by_id.erase(id);  // everybody has it
  return std::make_unique<HostCollectives>(std::move(shared));
}

}  // namespace offload::accelerator
