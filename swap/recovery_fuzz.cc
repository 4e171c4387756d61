// Bytes of a fuzzer as damage to the file of a store with three commits. Recovery must come to a
// state or an error, and to one of the commits that were made unless checksums were mended.
//
// The first byte tells how much of the file is there and whether checksums are mended after the
// edits; each edit is a page, an offset in it and four bytes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "swap/format.h"
#include "swap/layout.h"
#include "swap/recovery.h"
#include "swap/store_fixture.h"

namespace {

using namespace offload;        // NOLINT: a fuzz target
using namespace offload::swap;  // NOLINT

constexpr uint64_t kCommits = 3;
constexpr size_t kEditBytes = 8;

// The pages that recovery reads, of a store that was really made.
class Image {
 public:
  Image() : layout_(*Layout::Make(SmallSpec())) {
    TemporaryPool pool;
    auto store = Store::Create(pool.path(), SmallSpec(), QuickOptions());
    OFFLOAD_CHECK(store.ok()) << store.status();
    for (uint64_t i = 0; i < kCommits; ++i) OFFLOAD_CHECK(CommitScript(**store).ok());
    OFFLOAD_CHECK((*store)->Publish().ok());
    store->reset();
    std::ifstream file(pool.path() + "/job.offload", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    metadata_pages_ = layout_.PlaceOffset(0) / kPageBytes;
  }

  uint64_t size() const { return bytes_.size(); }
  void Edit(uint16_t page, uint16_t offset, const uint8_t* value) {
    const uint64_t at =
        page % metadata_pages_ * kPageBytes + offset % (kPageBytes - sizeof(uint32_t));
    undo_.emplace_back(at, bytes_.substr(at, sizeof(uint32_t)));
    std::memcpy(bytes_.data() + at, value, sizeof(uint32_t));
    edited_.insert(at / kPageBytes * kPageBytes);
  }
  void MendChecksums() {
    for (uint32_t copy = 0; copy < 2; ++copy)
      Mend<HeaderPage>(Layout::HeaderOffset(copy), SealHeader);
    std::vector<uint32_t> root_crcs;
    for (uint32_t copy = 0; copy < 2; ++copy) {
      std::vector<uint32_t> crcs;
      for (uint64_t page = 0; page < layout_.table_page_count(); ++page) {
        for (uint32_t mirror = 0; mirror < 2; ++mirror) {
          const uint64_t offset = layout_.TableOffset(copy, mirror) + page * kPageBytes;
          const TablePage sealed = Mend<TablePage>(offset, SealTablePage);
          if (mirror == 0) crcs.push_back(sealed.crc);
        }
      }
      root_crcs.push_back(RootCrc(crcs));
    }
    for (uint32_t copy = 0; copy < kSuperblockCount; ++copy) {
      Mend<SuperblockPage>(Layout::SuperblockOffset(copy), [&](SuperblockPage* page) {
        page->table_root_crc = root_crcs[page->table_copy % 2];
        SealSuperblock(page);
      });
    }
  }
  void Restore() {
    for (auto edit = undo_.rbegin(); edit != undo_.rend(); ++edit)
      bytes_.replace(edit->first, edit->second.size(), edit->second);
    undo_.clear();
    edited_.clear();
  }
  absl::Status Read(uint64_t file_bytes, uint64_t offset, std::span<std::byte> target) const {
    OFFLOAD_CHECK(offset % kPageBytes == 0 && target.size() % kPageBytes == 0);
    if (offset > file_bytes || target.size() > file_bytes - offset)
      return absl::DataLossError("end of file");
    std::memcpy(target.data(), bytes_.data() + offset, target.size());
    return absl::OkStatus();
  }

 private:
  template <typename Page, typename Seal>
  Page Mend(uint64_t offset, Seal seal) {
    Page page;
    std::memcpy(&page, bytes_.data() + offset, sizeof(page));
    if (edited_.count(offset) == 0 && !std::is_same_v<Page, SuperblockPage>) return page;
    undo_.emplace_back(offset, bytes_.substr(offset, sizeof(page)));
    seal(&page);
    std::memcpy(bytes_.data() + offset, &page, sizeof(page));
    return page;
  }

  Layout layout_;
  std::string bytes_;
  uint64_t metadata_pages_ = 0;
  std::vector<std::pair<uint64_t, std::string>> undo_;
  std::set<uint64_t> edited_;  // offsets of pages
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const image = new Image;
  if (size == 0) return 0;
  const bool mend = (data[0] & 1) != 0;
  const bool summary = (data[0] & 2) != 0;
  const uint64_t missing_pages = data[0] >> 4;
  for (const uint8_t* edit = data + 1; edit + kEditBytes <= data + size; edit += kEditBytes) {
    uint16_t page = 0, offset = 0;
    std::memcpy(&page, edit, 2);
    std::memcpy(&offset, edit + 2, 2);
    image->Edit(page, offset, edit + 4);
  }
  if (mend) image->MendChecksums();
  const uint64_t file_bytes = image->size() - missing_pages * kPageBytes;
  const auto found = Recover(
      "image", file_bytes,
      [&](uint64_t offset, std::span<std::byte> bytes) {
        return image->Read(file_bytes, offset, bytes);
      },
      summary ? RecoveryDepth::kSummary : RecoveryDepth::kWhole);
  if (found.ok() && !mend) OFFLOAD_CHECK(found->committed.sequence <= kCommits);
  image->Restore();
  return 0;
}
