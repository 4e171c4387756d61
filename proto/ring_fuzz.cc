// Bytes of a fuzzer as the region of a rank: SubmissionReader must return entries within their
// limits or a fault, and nothing else.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "proto/ring.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "proto/submission_reader.h"

namespace {

using offload::proto::SubmissionEntry;
using offload::proto::SubmissionLimits;
using offload::proto::SubmissionReader;

const offload::proto::Catalogue& Model() {
  using offload::proto::Dtype;
  static const auto* catalogue = new offload::proto::Catalogue(*offload::proto::BuildCatalogue(
      {{.name = "a", .shape = {3 * 262144 + 5}, .dtype = Dtype::kBFloat16},
       {.name = "b", .shape = {7}, .dtype = Dtype::kFloat32},
       {.name = "c", .shape = {9}, .dtype = Dtype::kBFloat16, .trainable = false}}));
  return *catalogue;
}

int accepted_entries = 0;

void CheckEntry(const SubmissionEntry& entry, const SubmissionLimits& limits) {
  const uint64_t bytes = offload::proto::TransferBytes(entry, limits);
  if (bytes == 0) return;
  ++accepted_entries;
  OFFLOAD_CHECK(entry.region_offset >= offload::proto::kRegionFixedBytes);
  OFFLOAD_CHECK(entry.region_offset <= limits.region_bytes);
  OFFLOAD_CHECK(bytes <= limits.region_bytes - entry.region_offset);
}

}  // namespace

extern "C" int AcceptedInputs() { return accepted_entries; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  alignas(4096) static std::byte region[offload::proto::kRegionFixedBytes];
  std::memset(region, 0, sizeof(region));
  // The first four bytes are the cursor, the rest are entries.
  uint32_t tail = 0;
  if (size < sizeof(tail)) return 0;
  std::memcpy(&tail, data, sizeof(tail));
  const size_t entry_bytes = std::min<size_t>(
      size - sizeof(tail), offload::proto::kSubmissionEntries * sizeof(SubmissionEntry));
  std::memcpy(offload::proto::SubmissionEntriesOf(region), data + sizeof(tail), entry_bytes);
  offload::proto::HeaderOf(region)->submission_tail = tail;

  SubmissionReader reader(region);
  SubmissionLimits limits;
  limits.catalogue = &Model();
  limits.scratch_bytes = 1 << 20;
  limits.adds_gradients = true;
  reader.SetLimits(limits);
  for (auto next = reader.Next(); next.ok() && next->has_value(); next = reader.Next()) {
    CheckEntry(**next, limits);
    reader.CountCompletion();
  }
  return 0;
}
