#include "offloadd/shared_square_roots.h"

#include <optional>
#include <utility>

namespace offload::daemon {

std::shared_ptr<const kernels::SquareRoots> SharedSquareRoots::Share(std::string_view bytes) {
  std::optional<kernels::SquareRoots> read = kernels::SquareRoots::FromBytes(bytes);
  if (!read.has_value()) return nullptr;
  const absl::MutexLock lock(&mutex_);
  std::erase_if(tables_, [](const auto& table) { return table.expired(); });
  for (const auto& table : tables_) {
    std::shared_ptr<const kernels::SquareRoots> known = table.lock();
    if (known != nullptr && *known == *read) return known;
  }
  auto made = std::make_shared<const kernels::SquareRoots>(*std::move(read));
  tables_.push_back(made);
  return made;
}

}  // namespace offload::daemon
