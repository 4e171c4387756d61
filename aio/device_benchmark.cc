// Measures a Device as fio would: device_benchmark FILE uring|libaio|threads read|write [SECONDS].
// The file must have at least 64 MiB; `write` overwrites it. Transfers of 1 MiB, 16 in flight, one
// after the other through the file.

#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "aio/device.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mapped_region.h"

namespace offload::aio {
namespace {

constexpr size_t kTransferBytes = 1 << 20;
constexpr size_t kDepth = 16;

int Run(const char* path, std::string_view engine, bool writes, double seconds) {
  OpenOptions options;
  options.engine = EngineOfName(engine).value_or(Engine::kAuto);
  options.queue_depth = kDepth;
  options.thread_count = kDepth;
  auto device = OpenDevice(::open(path, O_RDWR | O_DIRECT | O_CLOEXEC), options);
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().ToString().c_str());
    return 1;
  }
  auto memory = MappedRegion::Anonymous(kDepth * kTransferBytes);
  OFFLOAD_CHECK_OK(memory);
  const uint64_t place_count = (*device)->geometry().size_bytes / kTransferBytes;
  OFFLOAD_CHECK(place_count >= 64) << path << " is too small";

  const double start = Clock::Real().NowSeconds();
  uint64_t next_place = 0, transferred_bytes = 0;
  std::function<void(size_t)> start_next = [&](size_t slot) {
    const iovec piece = {memory->data() + slot * kTransferBytes, kTransferBytes};
    const uint64_t offset = next_place++ % place_count * kTransferBytes;
    const auto done = [&, slot](absl::Status status) {
      OFFLOAD_CHECK_OK(status);
      transferred_bytes += kTransferBytes;
      if (Clock::Real().NowSeconds() - start < seconds) start_next(slot);
    };
    writes ? (*device)->Write(offset, {&piece, 1}, done)
           : (*device)->Read(offset, {&piece, 1}, done);
  };
  for (size_t slot = 0; slot < kDepth; ++slot) start_next(slot);
  while ((*device)->in_flight() > 0) (*device)->Poll(/*wait=*/true);
  const double elapsed = Clock::Real().NowSeconds() - start;
  std::printf("%s %s %.0f MiB/s\n", engine.data(), writes ? "write" : "read",
              static_cast<double>(transferred_bytes) / 0x1p20 / elapsed);
  return 0;
}

}  // namespace
}  // namespace offload::aio

int main(int argument_count, char** arguments) {
  if (argument_count < 4) {
    std::fprintf(stderr,
                 "usage: device_benchmark FILE uring|libaio|threads read|write [SECONDS]\n");
    return 2;
  }
  const double seconds = argument_count > 4 ? std::atof(arguments[4]) : 4;
  return offload::aio::Run(arguments[1], arguments[2], std::string_view(arguments[3]) == "write",
                           seconds);
}
