#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/device.h"
#include "aio/file_device.h"
#include "aio/kernel_queue.h"
#include "aio/queue_device.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace offload::aio {
namespace {

using MakeDevice = absl::StatusOr<std::unique_ptr<FileDevice>> (*)(int, const Geometry&,
                                                                   const OpenOptions&);

constexpr uint32_t kSectorBytesMin = 512;

// What the kernel says about direct I/O on this file; 4096 where it says nothing (before 6.1,
// tmpfs).
absl::StatusOr<Geometry> ReadGeometry(int fd) {
  struct statx info = {};
  // Old seccomp profiles of containers refuse it with EPERM; then nothing is said.
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) info.stx_mask = 0;
  struct stat file = {};
  if (::fstat(fd, &file) != 0) {
    return MakeError(ErrorId::kIo, absl::StrCat("fstat: ", ErrnoText(errno)));
  }
  if (!S_ISREG(file.st_mode)) return absl::InvalidArgumentError("not a regular file");
  Geometry geometry;
  geometry.size_bytes = static_cast<uint64_t>(file.st_size);
  if ((info.stx_mask & STATX_DIOALIGN) == 0) return geometry;
  if (info.stx_dio_offset_align == 0) {
    return MakeError(ErrorId::kPoolNoDirectIo, "the file system refuses direct I/O on this file");
  }
  if (IsPowerOfTwo(info.stx_dio_offset_align) && IsPowerOfTwo(info.stx_dio_mem_align)) {
    geometry.offset_alignment = std::max(kSectorBytesMin, info.stx_dio_offset_align);
    geometry.memory_alignment = info.stx_dio_mem_align;
  }
  return geometry;
}

// One aligned read, because some engines are there and yet refuse to read. A bad sector is not the
// engine's fault: whoever reads the file for its content will see it.
absl::Status Probe(Device& device) {
  const Geometry& geometry = device.geometry();
  if (geometry.size_bytes < geometry.write_alignment()) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion buffer,
                           MappedRegion::Anonymous(geometry.write_alignment()));
  absl::Status status;
  const iovec piece = {buffer.data(), buffer.size()};
  device.Read(0, {&piece, 1}, [&status](absl::Status outcome) { status = std::move(outcome); });
  while (device.in_flight() > 0) device.Poll(/*wait=*/true);
  if (absl::IsDataLoss(status)) return absl::OkStatus();
  if (!status.ok()) return absl::Status(status.code(), absl::StrCat("probe: ", status.message()));
  return status;
}

absl::StatusOr<std::unique_ptr<FileDevice>> MakeAndProbe(MakeDevice make, int fd,
                                                         const Geometry& geometry,
                                                         const OpenOptions& options) {
  OFFLOAD_ASSIGN_OR_RETURN(std::unique_ptr<FileDevice> device, make(fd, geometry, options));
  OFFLOAD_RETURN_IF_ERROR(Probe(*device));
  return device;
}

absl::StatusOr<Engine> ChooseEngine(Engine engine) {
  const char* name = std::getenv("OFFLOADD_IO");
  if (engine != Engine::kAuto || name == nullptr || *name == '\0') return engine;
  if (const std::optional<Engine> named = EngineOfName(name)) return *named;
  return MakeError(ErrorId::kBadValue, absl::StrCat("OFFLOADD_IO=", name),
                   absl::StrCat("Use ", ToAbsl(kEngineNames)));
}

// "io_uring_setup: EPERM (...)" is what a container says; name the usual causes.
std::string ExplainRefusal(const absl::Status& status) {
  std::string text(status.message());
  if (text.starts_with("io_uring_setup: EPERM")) {
    text += ", by a seccomp filter or by sysctl kernel.io_uring_disabled";
  } else if (text.starts_with("io_uring_setup: ENOMEM")) {
    text += ", this user's limit of locked memory is used up (ulimit -l)";
  }
  return text;
}

template <MakeKernelQueue& make_queue>
absl::StatusOr<std::unique_ptr<FileDevice>> Make(int fd, const Geometry& geometry,
                                                 const OpenOptions& options) {
  return QueueDevice::Make(make_queue, fd, geometry, options);
}

struct Choice {
  std::unique_ptr<FileDevice> device;
  std::string reason;
  bool is_fallback = false;  // the reason is what refused the better ones
};

// In the order of preference.
constexpr struct {
  Engine engine;
  MakeDevice make;
} kEngines[] = {{Engine::kUring, &Make<MakeUringQueue>},
                {Engine::kLibaio, &Make<MakeLibaioQueue>},
                {Engine::kThreads, &MakeThreadDevice}};

// Tries the engine, or all of them; the reason of a choice is what refused those before it.
absl::StatusOr<Choice> Choose(Engine wanted, int fd, const Geometry& geometry,
                              const OpenOptions& options) {
  std::string refusals;
  for (const auto& [engine, make] : kEngines) {
    if (wanted != Engine::kAuto && engine != wanted) continue;
    auto device = MakeAndProbe(make, fd, geometry, options);
    if (device.ok()) {
      if (wanted != Engine::kAuto) return Choice{*std::move(device), "asked for by name"};
      if (refusals.empty()) return Choice{*std::move(device), "probed with a read"};
      return Choice{*std::move(device), refusals, /*is_fallback=*/true};
    }
    absl::StrAppend(&refusals, refusals.empty() ? "" : "; ", "engine ", ToAbsl(EngineName(engine)),
                    ": ", ExplainRefusal(device.status()));
  }
  if (wanted != Engine::kAuto) return MakeError(ErrorId::kEngineUnavailable, refusals);
  return MakeError(ErrorId::kEngineUnavailable, refusals,
                   "Set nvme_path to a directory on an ext4 or xfs mount");
}

// Each choice with its reason once: a later device may fall back where the first one did not.
void LogOnce(const Choice& choice) {
  static std::mutex mutex;
  static std::set<std::string> logged;  // guarded by mutex
  const std::string text =
      absl::StrCat("I/O engine ", ToAbsl(choice.device->engine()), " (", choice.reason, ")");
  {
    const std::lock_guard lock(mutex);
    if (!logged.insert(text).second) return;
  }
  spdlog::log(choice.is_fallback ? spdlog::level::warn : spdlog::level::info, "{}", text);
}

}  // namespace

std::string_view EngineName(Engine engine) {
  switch (engine) {
    case Engine::kAuto:
      return "auto";
    case Engine::kUring:
      return "uring";
    case Engine::kLibaio:
      return "libaio";
    case Engine::kThreads:
      return "threads";
  }
  return "";
}

std::optional<Engine> EngineOfName(std::string_view name) {
  for (const Engine engine : {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads}) {
    if (name == EngineName(engine)) return engine;
  }
  return std::nullopt;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(int fd, const OpenOptions& options,
                                                   std::string* reason) {
  UniqueFd file(fd);
  OFFLOAD_ASSIGN_OR_RETURN(const Geometry geometry, ReadGeometry(file.get()));
  OFFLOAD_ASSIGN_OR_RETURN(const Engine engine, ChooseEngine(options.engine));
  OFFLOAD_ASSIGN_OR_RETURN(Choice choice, Choose(engine, file.get(), geometry, options));
  choice.device->Own(std::move(file));
  LogOnce(choice);
  if (reason != nullptr) *reason = choice.reason;
  return std::unique_ptr<Device>(std::move(choice.device));
}

}  // namespace offload::aio
