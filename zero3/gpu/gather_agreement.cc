#include "zero3/gpu/gather_agreement.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <ctime>
#include <new>

#include "base/check.h"

namespace offload::zero3 {

namespace {

constexpr uint64_t kUnknownRank = ~uint64_t{0};

// A tensor can be agreed again only when every rank has issued it: so many can be under way.
size_t RingSize(size_t tensor_count) { return tensor_count + 1; }

uint64_t Bit(uint32_t rank) { return uint64_t{1} << rank; }

}  // namespace

// Written under the lock; what is atomic is read without.
struct GatherAgreement::Header {
  pthread_mutex_t mutex;  // robust: whose owner has ended says so
  uint32_t world_size, tensor_count;
  std::atomic<uint32_t> news;
  std::atomic<uint64_t> left;    // ranks, as bits
  std::atomic<uint64_t> failed;  // a rank, or kUnknownRank
  std::atomic<uint64_t> agreed_count;
  uint64_t issued_counts[kRanksMax];
  std::atomic<uint64_t> passed[kRanksMax];  // positions; 0: none
};

struct GatherAgreement::Entry {
  uint64_t offered_by;  // ranks
  uint64_t source_offset;
  std::atomic<uint64_t> declined;  // the last position at which a rank has; 0: none
};

class GatherAgreement::Lock {
 public:
  explicit Lock(Header* header) : header_(header) {
    const int error = pthread_mutex_lock(&header->mutex);
    if (error == EOWNERDEAD) {
      pthread_mutex_consistent(&header->mutex);
      header->failed = kUnknownRank;  // what it was about to write may be there in part
    } else {
      OFFLOAD_CHECK(error == 0) << error;
    }
  }
  ~Lock() { pthread_mutex_unlock(&header_->mutex); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Header* const header_;
};

size_t GatherAgreement::MemoryBytes(size_t tensor_count) {
  return sizeof(Header) + tensor_count * sizeof(Entry) + RingSize(tensor_count) * sizeof(uint32_t);
}

void GatherAgreement::Format(std::span<std::byte> memory, size_t tensor_count,
                             uint32_t world_size) {
  OFFLOAD_CHECK(memory.size() >= MemoryBytes(tensor_count) && world_size <= kRanksMax);
  auto* const header = new (memory.data()) Header{};
  header->world_size = world_size;
  header->tensor_count = static_cast<uint32_t>(tensor_count);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

GatherAgreement::GatherAgreement(std::span<std::byte> memory, uint32_t rank)
    : header_(reinterpret_cast<Header*>(memory.data())),
      entries_(reinterpret_cast<Entry*>(memory.data() + sizeof(Header))),
      agreed_(reinterpret_cast<uint32_t*>(memory.data() + sizeof(Header) +
                                          header_->tensor_count * sizeof(Entry))),
      rank_(rank) {
  OFFLOAD_CHECK(rank < header_->world_size) << rank;
}

bool GatherAgreement::IsOpen() const { return header_->left == 0 && header_->failed == 0; }

bool GatherAgreement::Offer(uint32_t tensor, uint64_t source_offset) {
  const Lock lock(header_);
  Entry& entry = entries_[tensor];
  OFFLOAD_CHECK((entry.offered_by & Bit(rank_)) == 0) << "tensor " << tensor << " is offered";
  if (!IsOpen()) return false;
  if (entry.offered_by != 0 && entry.source_offset != source_offset) return false;
  entry.offered_by |= Bit(rank_);
  entry.source_offset = source_offset;
  if (static_cast<uint32_t>(std::popcount(entry.offered_by)) < header_->world_size) return true;
  entry.offered_by = 0;
  const uint64_t count = header_->agreed_count;
  agreed_[count % RingSize(header_->tensor_count)] = tensor;
  header_->agreed_count = count + 1;
  Announce();
  return true;
}

bool GatherAgreement::Withdraw(uint32_t tensor) {
  const Lock lock(header_);
  Entry& entry = entries_[tensor];
  if ((entry.offered_by & Bit(rank_)) == 0) return false;
  entry.offered_by &= ~Bit(rank_);
  return true;
}

void GatherAgreement::Decline(uint32_t tensor, uint64_t position) {
  const Lock lock(header_);
  std::atomic<uint64_t>& declined = entries_[tensor].declined;
  if (declined >= position) return;
  declined = position;
  Announce();
}

void GatherAgreement::Pass(uint64_t position) {
  const Lock lock(header_);
  header_->passed[rank_] = position;
  Announce();
}

bool GatherAgreement::MayBeAgreed(uint32_t tensor, uint64_t position) const {
  if (!IsOpen() || entries_[tensor].declined >= position) return false;
  for (uint32_t rank = 0; rank < header_->world_size; ++rank) {
    if (rank != rank_ && header_->passed[rank] >= position) return false;
  }
  return true;
}

std::optional<uint32_t> GatherAgreement::TakeNext() {
  uint64_t& issued_count = header_->issued_counts[rank_];  // this rank's own
  if (header_->agreed_count == issued_count) return std::nullopt;
  const Lock lock(header_);
  return agreed_[issued_count++ % RingSize(header_->tensor_count)];
}

void GatherAgreement::Leave() {
  const Lock lock(header_);
  header_->left |= Bit(rank_);
}

bool GatherAgreement::HasLeft(uint32_t rank) const { return (header_->left & Bit(rank)) != 0; }

void GatherAgreement::Fail() {
  const Lock lock(header_);
  if (header_->failed == 0) header_->failed = Bit(rank_);
  Announce();
}

std::optional<uint32_t> GatherAgreement::FailedRank() const {
  const uint64_t failed = header_->failed;
  if (failed == 0) return std::nullopt;
  return failed == kUnknownRank ? kRanksMax : static_cast<uint32_t>(std::countr_zero(failed));
}

// ---- News --------------------------------------------------------------------------------------

uint32_t GatherAgreement::news() const { return header_->news; }

void GatherAgreement::Announce() {
  ++header_->news;
  syscall(SYS_futex, &header_->news, FUTEX_WAKE, static_cast<int>(kRanksMax), nullptr, nullptr, 0);
}

void GatherAgreement::WaitForNews(uint32_t seen, std::chrono::milliseconds patience) const {
  const timespec timeout{.tv_sec = patience.count() / 1000,
                         .tv_nsec = patience.count() % 1000 * 1'000'000};
  syscall(SYS_futex, &header_->news, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace offload::zero3
