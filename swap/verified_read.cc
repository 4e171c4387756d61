#include "swap/verified_read.h"

#include <cstddef>
#include <span>
#include <utility>

#include "base/status_macros.h"

namespace offload::swap {

absl::Status ReadVerified(Store& store, const ReadRequest& request, Stamp* stamp) {
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(store, [&](Store::Done done) {
    store.Read({&request, 1}, {stamp, 1}, std::move(done));
  }));
  const std::span<const std::byte> bytes(request.bytes, store.ExtentBytes(request.id));
  if (stamp->never_written() || store.Verify(request.id, *stamp, bytes)) return absl::OkStatus();
  return RunToEnd(store,
                  [&](Store::Done done) { store.ReadAgain(request, *stamp, std::move(done)); });
}

}  // namespace offload::swap
