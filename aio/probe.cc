#include "aio/probe.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/mapped_region.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace offload::aio {
namespace {

constexpr uint64_t kScratchBytes = 64 << 10;

absl::StatusOr<UniqueFd> MakeScratchFile(const std::string& folder) {
  UniqueFd file(folder.empty()
                    ? ::memfd_create("offload-probe", MFD_CLOEXEC)
                    : ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
  const int error =
      file.valid() ? ::posix_fallocate(file.get(), 0, static_cast<off_t>(kScratchBytes)) : errno;
  if (error == 0) return file;
  return MakeError(ErrorId::kPoolNotUsable,
                   absl::StrCat("a scratch file in ", folder.empty() ? "memory" : folder, ": ",
                                ErrnoText(error)));
}

// A number that stands alone in a file of the kernel; 0 where there is none.
uint64_t NumberIn(const char* path) {
  uint64_t number = 0;
  std::ifstream(path) >> number;
  return number;
}

// The value behind "Key:" in /proc/thread-self/status.
int ThreadStatus(const std::string& key) {
  std::ifstream file("/proc/thread-self/status");
  for (std::string word; file >> word;) {
    int value = 0;
    if (word == key && file >> value) return value;
    std::string rest;
    std::getline(file, rest);
  }
  return 0;
}

bool HasIpcLock() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[2] = {};
  return ::syscall(SYS_capget, &header, sets) == 0 &&
         (sets[0].effective & (1u << CAP_IPC_LOCK)) != 0;
}

bool TellsAlignment(int fd) {
  struct statx info = {};
  return ::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
         (info.stx_mask & STATX_DIOALIGN) != 0;
}

absl::Status RunToEnd(Device& device, Device::Kind kind, const iovec& piece) {
  absl::Status status;
  const Device::Done done = [&status](absl::Status outcome) { status = std::move(outcome); };
  kind == Device::Kind::kRead ? device.Read(0, {&piece, 1}, done)
                              : device.Write(0, {&piece, 1}, done);
  while (device.in_flight() > 0) device.Poll(/*wait=*/true);
  return status;
}

absl::Status WriteAndReadBack(Device& device) {
  const size_t size_bytes = device.geometry().write_alignment();
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion written, MappedRegion::Anonymous(size_bytes));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion got, MappedRegion::Anonymous(size_bytes));
  Random(/*seed=*/1).Fill(written.span());
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(device, Device::Kind::kWrite, {written.data(), size_bytes}));
  OFFLOAD_RETURN_IF_ERROR(RunToEnd(device, Device::Kind::kRead, {got.data(), size_bytes}));
  if (std::memcmp(written.data(), got.data(), size_bytes) == 0) return absl::OkStatus();
  return absl::DataLossError("other bytes were read than were written");
}

absl::StatusOr<Geometry> TryEngine(int fd, EngineCapability* capability) {
  UniqueFd file(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  OFFLOAD_ASSIGN_OR_RETURN(
      const std::unique_ptr<Device> device,
      OpenDevice(file.release(), {.engine = capability->engine, .queue_depth = 4}));
  OFFLOAD_RETURN_IF_ERROR(WriteAndReadBack(*device));
  OFFLOAD_ASSIGN_OR_RETURN(const MappedRegion buffer, MappedRegion::Anonymous(kScratchBytes));
  device->RegisterBuffer(buffer.span());
  capability->registers_buffers = device->registered_bytes() > 0;
  return device->geometry();
}

}  // namespace

absl::StatusOr<Capabilities> ProbeCapabilities(const std::string& folder) {
  OFFLOAD_ASSIGN_OR_RETURN(const UniqueFd file, MakeScratchFile(folder));
  Capabilities found;
  utsname name = {};
  if (::uname(&name) == 0) found.kernel_release = name.release;
  found.uring_disabled = static_cast<int>(NumberIn("/proc/sys/kernel/io_uring_disabled"));
  found.has_seccomp_filter = ThreadStatus("Seccomp:") == 2;
  rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    found.memlock_bytes = limit.rlim_cur;
  }
  found.ignores_memlock = HasIpcLock();
  const uint64_t requests_max = NumberIn("/proc/sys/fs/aio-max-nr");
  const uint64_t requests_used = NumberIn("/proc/sys/fs/aio-nr");
  found.aio_requests_free = requests_max > requests_used ? requests_max - requests_used : 0;
  found.geometry_is_known = TellsAlignment(file.get());
  for (const Engine engine : {Engine::kUring, Engine::kLibaio, Engine::kThreads}) {
    EngineCapability capability = {.engine = engine, .status = absl::OkStatus()};
    absl::StatusOr<Geometry> geometry = TryEngine(file.get(), &capability);
    capability.status = geometry.status();
    if (geometry.ok()) found.geometry = *geometry;
    found.engines.push_back(std::move(capability));
  }
  return found;
}

}  // namespace offload::aio
