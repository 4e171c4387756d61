#include "swap/member_page.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/string_view.h"

namespace offload::swap {
namespace {

absl::Status Damaged(std::string_view what) { return absl::DataLossError(ToAbsl(what)); }

uint32_t CrcOf(MemberPage page) {
  page.prefix.crc = 0;
  return Crc32c(0, &page, sizeof(page));
}

}  // namespace

void SealMemberPage(MemberPage* page) {
  page->prefix.magic = MemberPage::kMagic;
  page->prefix.version = kFormatVersion;
  page->prefix.crc = CrcOf(*page);
}

absl::StatusOr<MemberPage> DecodeMemberPage(ConstPageBytes bytes, uint32_t copy) {
  MemberPage page;
  std::memcpy(&page, bytes.data(), sizeof(page));
  if (page.prefix.magic != MemberPage::kMagic) return Damaged("not a member page");
  if (page.prefix.crc != CrcOf(page)) return Damaged("member page checksum");
  if (page.prefix.version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("format version ", page.prefix.version));
  }
  const bool nonzero = page.zero != 0 || std::any_of(std::begin(page.zeros), std::end(page.zeros),
                                                     [](uint8_t byte) { return byte != 0; });
  if (page.copy != copy || page.revision == 0 || page.member_count < 2 ||
      page.member_count > kMembersMax || page.member >= page.member_count || page.opening > 1 ||
      page.store_bytes > kStripedBytesMax || nonzero ||
      page.paths[MemberPage::kPathsBytes - 1] != 0 || !StripeMap::Make(NumbersOf(page)).ok() ||
      PathsOf(page).size() != page.member_count) {
    return Damaged("member page fields");
  }
  return page;
}

StripeNumbers NumbersOf(const MemberPage& page) {
  const size_t count = std::min<size_t>(page.member_count, kMembersMax);
  return {.head_bytes = page.head_bytes,
          .unit_bytes = page.unit_bytes,
          .weights = {page.weights.begin(), page.weights.begin() + count}};
}

std::vector<std::string> PathsOf(const MemberPage& page) {
  std::vector<std::string> paths;
  const char* const end = page.paths + MemberPage::kPathsBytes;
  for (const char* at = page.paths; at < end && *at != 0;) {
    const char* const stop = std::find(at, end, '\0');
    paths.emplace_back(at, stop);
    at = stop + 1;  // the last byte of a page that was accepted is zero
  }
  return paths;
}

absl::Status SetPaths(const std::vector<std::string>& paths, MemberPage* page) {
  std::memset(page->paths, 0, sizeof(page->paths));
  size_t at = 0;
  for (const std::string& path : paths) {
    if (path.empty() || at + path.size() + 2 > sizeof(page->paths)) {
      return MakeError(ErrorId::kBadValue, "the paths of the pools are too long together",
                       "Use shorter ones, by mount points or links");
    }
    std::memcpy(page->paths + at, path.c_str(), path.size() + 1);
    at += path.size() + 1;
  }
  return absl::OkStatus();
}

}  // namespace offload::swap
