#include "accelerator/host_collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
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
  uint64_t whole_bytes, offset_bytes;
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

// What a slot carries of a collective at once.
struct Piece {
  uint64_t number = 0;
  // The same in all ranks, and differs between collectives of other kinds and sizes.
  uint64_t whole_bytes = 0, offset_bytes = 0;
  std::function<void(std::byte* slot)> show;                     // puts this rank's bytes into it
  std::function<void(uint32_t of, const std::byte* slot)> take;  // gets another rank's out of it
};

void Show(const Shared& shared, const Piece& piece) {
  if (shared.HasFailed()) return;
  Seat& seat = shared.seat(shared.rank);
  seat.whole_bytes = piece.whole_bytes;
  seat.offset_bytes = piece.offset_bytes;
  piece.show(shared.slot(shared.rank));
  seat.posted.store(piece.number + 1, std::memory_order_release);  // with all of the above
}

void Take(Shared* shared, const Piece& piece) {
  if (shared->HasFailed()) return;
  for (uint32_t rank = 0; rank < shared->world_size; ++rank) {
    if (rank == shared->rank) continue;
    const Seat& seat = shared->seat(rank);
    if (seat.whole_bytes != piece.whole_bytes || seat.offset_bytes != piece.offset_bytes) {
      if (!shared->differs.exchange(true)) shared->is_reported = false;
      return;
    }
    piece.take(rank, shared->slot(rank));
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
    for (uint64_t offset = 0; offset < part_bytes; offset += kSlotBytes)
      Submit(PieceOfGather(bytes, part_bytes, offset), stream);
    shared_->device->CountCollective();
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status ExchangeSlices(std::span<const SlicedRange> ranges, Stream stream) override {
    const std::lock_guard lock(mutex_);
    OFFLOAD_RETURN_IF_ERROR(AsyncError());
    for (const SlicedRange& range : ranges) {
      uint64_t largest_bytes = 0;
      const uint64_t own_bytes = SliceBytes(range, shared_->rank);
      for (uint32_t rank = 0; rank < shared_->world_size; ++rank) {
        largest_bytes = std::max(largest_bytes, SliceBytes(range, rank));
        if (rank == shared_->rank) continue;
        shared_->device->NoteUse(stream, Use::kRead, range.from + range.offsets_bytes[rank],
                                 SliceBytes(range, rank));
        shared_->device->NoteUse(stream, Use::kWrite, range.to[rank], own_bytes);
      }
      for (uint64_t offset = 0; offset < largest_bytes; offset += SliceOfSlot())
        Submit(PieceOfExchange(range, offset), stream);
    }
    shared_->device->CountExchange();
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
  // In an exchange a slot has room for as many ranks.
  uint64_t SliceOfSlot() const { return kSlotBytes / shared_->world_size; }

  static uint64_t SliceBytes(const SlicedRange& range, uint32_t rank) {
    return range.offsets_bytes[rank + 1] - range.offsets_bytes[rank];
  }

  // [offset_bytes, offset_bytes + kSlotBytes) of every rank's part, as far as it goes.
  Piece PieceOfGather(std::byte* bytes, uint64_t part_bytes, uint64_t offset_bytes) {
    const uint64_t size_bytes = std::min<uint64_t>(kSlotBytes, part_bytes - offset_bytes);
    const auto place = [=](uint32_t rank) { return bytes + rank * part_bytes + offset_bytes; };
    return {.number = next_++,
            .whole_bytes = 2 * part_bytes,
            .offset_bytes = offset_bytes,
            .show =
                [=, own = shared_->rank, world_size = shared_->world_size](std::byte* slot) {
                  for (uint32_t rank = 0; rank < world_size; ++rank) {
                    if (rank != own) std::memset(place(rank), kPoison, size_bytes);
                  }
                  std::memcpy(slot, place(own), size_bytes);
                },
            .take = [=](uint32_t of,
                        const std::byte* slot) { std::memcpy(place(of), slot, size_bytes); }};
  }

  // The same of every slice, as far as it goes.
  Piece PieceOfExchange(const SlicedRange& range, uint64_t offset_bytes) {
    const auto size_bytes = [range, offset_bytes, most = SliceOfSlot()](uint32_t rank) {
      const uint64_t slice_bytes = SliceBytes(range, rank);
      return std::min(most, slice_bytes - std::min(slice_bytes, offset_bytes));
    };
    return {.number = next_++,
            .whole_bytes = 2 * range.offsets_bytes.back() + 1,
            .offset_bytes = offset_bytes,
            .show =
                [=, own = shared_->rank, each_bytes = SliceOfSlot()](std::byte* slot) {
                  for (uint32_t rank = 0; rank < range.to.size(); ++rank) {
                    if (rank == own) continue;
                    std::memset(range.to[rank] + offset_bytes, kPoison, size_bytes(own));
                    std::memcpy(slot + rank * each_bytes,
                                range.from + range.offsets_bytes[rank] + offset_bytes,
                                size_bytes(rank));
                  }
                },
            .take =
                [=, own = shared_->rank, each_bytes = SliceOfSlot()](uint32_t of,
                                                                     const std::byte* slot) {
                  std::memcpy(range.to[of] + offset_bytes, slot + own * each_bytes,
                              size_bytes(own));
                }};
  }

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
