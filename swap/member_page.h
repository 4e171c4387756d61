// swap/member_page.h
//
// The two pages that each file of a striped store begins with: which store it belongs to, which
// member it is, and how the store's bytes are dealt out. A store in one pool has none.
//
// Written in place, one copy after the other and each durable before the next is touched; of two
// intact ones the higher revision counts.
//
// `age` counts the openings of the store and is the same in all members, but for the moment in
// which an opening raises it: member 0 announces that (`opening`), the others follow, then member
// 0. A member that was put back from an older copy has another age and is refused.
//
// Thread safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "swap/format.h"
#include "swap/stripe_map.h"

namespace offload::swap {

struct MemberPage {
  static constexpr uint64_t kMagic = 0x424D454D44464F00;  // "\0OFDMEMB"
  static constexpr size_t kPathsBytes = 3072;
  PagePrefix prefix;
  StoreUuid uuid;        // of the store
  uint64_t revision;     // counts the writes of this page, from 1
  uint64_t age;          // counts openings
  uint64_t head_bytes;   // of the stripe map
  uint64_t store_bytes;  // of all members together, without these pages; 0 while being built
  uint32_t copy;         // 0 or 1
  uint32_t member;
  uint32_t member_count;
  uint32_t unit_bytes;
  uint32_t opening;  // 1, in member 0: age + 1 is being written
  std::array<uint8_t, kMembersMax> weights;
  uint32_t zero;
  char paths[kPathsBytes];  // of the pools at format, each ended by a zero byte
  uint8_t zeros[kPageBytes - 104 - kPathsBytes];
};
static_assert(sizeof(MemberPage) == kPageBytes && std::is_trivially_copyable_v<MemberPage>);
static_assert(offsetof(MemberPage, paths) == 104);

inline constexpr uint32_t kMemberPageCopies = 2;
inline constexpr uint64_t kMemberHeadBytes = kMemberPageCopies * kPageBytes;

// Fills in magic, version and checksum.
void SealMemberPage(MemberPage* page);
// `copy` is where the page was read from. DATA_LOSS; FAILED_PRECONDITION for an intact page of
// another version.
absl::StatusOr<MemberPage> DecodeMemberPage(ConstPageBytes bytes, uint32_t copy);

StripeNumbers NumbersOf(const MemberPage& page);
std::vector<std::string> PathsOf(const MemberPage& page);
// OFD-1002 when they do not fit.
absl::Status SetPaths(const std::vector<std::string>& paths, MemberPage* page);

}  // namespace offload::swap
