// offloadctl doctor: what this machine can do, what falls back, and what to do about it.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "accelerator/copy_rates.h"
#include "accelerator/cuda_loader.h"
#include "aio/device.h"
#include "aio/probe.h"
#include "base/byte_size.h"
#include "base/cpu_list.h"
#include "base/error.h"
#include "base/numa.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "kernels/isa.h"
#include "proto/shared_memory.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/daemons.h"
#include "tools/gpu_probe.h"

namespace offload::tools {
namespace {

constexpr double kDaemonTimeoutSeconds = 2;
constexpr uint64_t kPinnableBytesWanted = uint64_t{1} << 30;
constexpr uint64_t kDescriptorsWanted = 1024;
constexpr char kMemlockFix[] = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit";

enum class Grade { kOk, kWarn, kFail };

const char* GradeName(Grade grade) {
  return grade == Grade::kOk ? "OK" : grade == Grade::kWarn ? "WARN" : "FAIL";
}

struct Check {
  std::string area, name;
  Grade grade = Grade::kOk;
  std::string detail;
  std::string fix;    // "" when nothing is to be done
  std::string error;  // "OFD-1203" when the finding has an identifier
  Json figures;       // what was measured, where a program may want it
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t MachineMemoryBytes() {
  struct sysinfo info = {};
  return ::sysinfo(&info) == 0 ? uint64_t{info.totalram} * info.mem_unit : 0;
}

Check MemlockCheck(const aio::Capabilities& capabilities) {
  const std::optional<uint64_t> limit_bytes = capabilities.memlock_bytes;
  Check check = {"Limits", "memlock"};
  check.detail = limit_bytes.has_value() ? FormatBytes(*limit_bytes) : "unlimited";
  if (!limit_bytes.has_value()) return check;
  if (capabilities.ignores_memlock) {
    check.detail += ", which does not bind this user (CAP_IPC_LOCK)";
  } else if (*limit_bytes < kPinnableBytesWanted) {
    check.grade = Grade::kWarn;
    check.detail += ": memory stays unpinned (training on the CPU does not need it)";
    check.fix = kMemlockFix;
  }
  return check;
}

Check DescriptorCheck() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  Check check = {"Limits", "nofile"};
  check.detail = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit.rlim_cur);
  if (limit.rlim_cur < kDescriptorsWanted) {
    check.grade = Grade::kWarn;
    check.fix = absl::StrCat("ulimit -n ", kDescriptorsWanted);
  }
  return check;
}

Check MemoryCheck() {
  Check check = {"Memory", "available"};
  const std::optional<proto::AvailableMemory> available = proto::FindAvailableMemory();
  check.detail = absl::StrCat(available.has_value() ? available->Describe() : "unknown", " of ",
                              FormatBytes(MachineMemoryBytes()));
  return check;
}

// A job's memory lies on those that its ranks compute on.
Check NumaCheck() {
  Check check = {"Memory", "NUMA nodes"};
  for (const NumaNode& node : UsableNumaNodes()) {
    absl::StrAppend(&check.detail, check.detail.empty() ? "" : ", ", node.number, " (processors ",
                    FormatCpuList(node.processors), ")");
  }
  if (check.detail.empty()) check.detail = "the kernel tells of none";
  if (HasMemoryPolicy()) absl::StrAppend(&check.detail, ", numactl says where memory lies");
  return check;
}

// Slab and regions are memfds: no /dev/shm is needed, but files must be allowed to be that large,
// and sealing must be there.
Check SharedMemoryCheck() {
  Check check = {"Memory", "shared (memfd)"};
  rlimit limit = {};
  getrlimit(RLIMIT_FSIZE, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  const UniqueFd file(memfd_create("offloadctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool works = file.valid() && ftruncate(file.get(), 1 << 20) == 0 &&
                     posix_fallocate(file.get(), 0, 1 << 20) == 0 &&
                     fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) == 0;
  if (!works) {
    check.grade = Grade::kFail;
    check.detail = ErrnoText(errno);
    check.error = "OFD-1302";
    check.fix = "allow memfd_create and fallocate in the container's seccomp profile";
    return check;
  }
  check.detail = unlimited ? "can be made and sealed, no size limit"
                           : absl::StrCat("can be made and sealed, at most ",
                                          FormatBytes(limit.rlim_cur), " (file size limit)");
  if (!unlimited && limit.rlim_cur < MachineMemoryBytes()) {
    check.grade = Grade::kWarn;
    check.fix = "ulimit -f unlimited";
  }
  return check;
}

Check KernelCheck(const aio::Capabilities& capabilities) {
  Check check = {"Kernel", capabilities.kernel_release};
  check.detail = capabilities.has_seccomp_filter ? "with a seccomp filter" : "no seccomp filter";
  if (capabilities.uring_disabled != 0) {
    absl::StrAppend(&check.detail, ", kernel.io_uring_disabled = ", capabilities.uring_disabled);
  }
  absl::StrAppend(&check.detail, ", ", capabilities.aio_requests_free, " libaio requests free");
  return check;
}

// An engine that is refused matters only where no better one works.
Check EngineCheck(const aio::EngineCapability& capability, bool better_one_works) {
  const bool is_uring = capability.engine == aio::Engine::kUring;
  const std::string name(aio::EngineName(capability.engine));
  Check check = {"Engine", is_uring ? "io_uring" : name};
  if (capability.status.ok()) {
    check.detail = "works: a write was read back";
    if (is_uring) {
      check.detail += capability.registers_buffers ? ", buffers can be registered"
                                                   : ", buffers cannot be registered";
    }
    return check;
  }
  check.detail = std::string(capability.status.message());
  if (better_one_works) return check;
  check.grade = Grade::kWarn;
  if (is_uring) {
    check.fix = absl::StrContains(check.detail, "ENOMEM")
                    ? kMemlockFix
                    : "allow the three io_uring system calls in the seccomp profile";
  }
  return check;
}

// The environment's choice, where there is one.
std::optional<Check> ChosenEngineCheck() {
  const char* const variable = std::getenv("OFFLOADD_IO");
  const std::string name = variable == nullptr ? "" : variable;
  if (name.empty() || name == "auto" || name == "uring") return std::nullopt;
  Check check = {"Engine", "OFFLOADD_IO", Grade::kWarn, "using " + name, "unset OFFLOADD_IO"};
  if (!aio::EngineOfName(name).has_value()) {
    check.grade = Grade::kFail;
    check.detail = absl::StrCat(name, " is no engine");
    check.error = absl::StrCat("OFD-", static_cast<int>(ErrorId::kBadValue));
  }
  return check;
}

std::vector<Check> EngineChecks(const aio::Capabilities& capabilities) {
  std::vector<Check> checks;
  bool works = false;
  for (const aio::EngineCapability& capability : capabilities.engines) {
    checks.push_back(EngineCheck(capability, works));
    works |= capability.status.ok();
  }
  if (!works) {
    checks.back().grade = Grade::kFail;
    checks.back().error = absl::StrCat("OFD-", static_cast<int>(ErrorId::kEngineUnavailable));
  }
  if (std::optional<Check> chosen = ChosenEngineCheck()) checks.push_back(*std::move(chosen));
  return checks;
}

// AMX is only read from what the processor says: some virtual machines announce it and kill the
// process that uses it, which a trainer has to try for itself.
Check ProcessorCheck() {
  Check check = {"CPU", "update kernel"};
  const kernels::Isa isa = kernels::BestIsa();
  const bool amx = ReadFile("/proc/cpuinfo").find(" amx_bf16") != std::string::npos;
  check.detail = absl::StrCat(kernels::IsaName(isa), ", ", sysconf(_SC_NPROCESSORS_ONLN),
                              " processors, AMX ", amx ? "announced (not tried)" : "not announced");
  if (isa == kernels::Isa::kReference) {
    check.grade = Grade::kWarn;
    check.fix = "the update runs without vector instructions and may be slower than the drive";
  }
  return check;
}

absl::StatusOr<accelerator::CopyRates> CopyRatesOf(size_t device) {
  OFFLOAD_ASSIGN_OR_RETURN(
      const std::unique_ptr<accelerator::Accelerator> cuda,
      accelerator::OpenCuda(static_cast<int>(device), accelerator::CudaPluginPath()));
  return accelerator::MeasureCopyRates(cuda.get());
}

// Whatever the plug-in says is about GPUs only: training on the CPU goes on without it.
Check CopyCheck(size_t device) {
  Check check = {"GPU", absl::StrCat("cuda:", device, " copies")};
  const absl::StatusOr<accelerator::CopyRates> rates = CopyRatesOf(device);
  if (!rates.ok()) {
    check.grade = Grade::kWarn;
    check.detail = std::string(rates.status().message());
    check.fix = "docs/gpu_reference.md#build";
    return check;
  }
  check.figures = {{"to_device_gbps", rates->to_device * 1e-9},
                   {"to_host_gbps", rates->to_host * 1e-9},
                   {"both_gbps", rates->both * 1e-9}};
  check.detail =
      absl::StrFormat("%.1f GB/s to the device, %.1f back, %.1f in all both ways at once; %s",
                      rates->to_device * 1e-9, rates->to_host * 1e-9, rates->both * 1e-9,
                      rates->registers_slab
                          ? "it reads the slab itself"
                          : "it cannot read the slab itself: weights pass through a staging ring");
  return check;
}

std::vector<Check> GpuChecks() {
  std::vector<Check> checks;
  const GpuProbe probe = ProbeGpus();
  for (const GpuFinding& finding : GpuFindings(probe)) {
    const Grade grade = finding.fix.empty() ? Grade::kOk : Grade::kWarn;
    checks.push_back({"GPU", finding.name, grade, finding.detail, finding.fix});
  }
  for (size_t i = 0; i < probe.devices.size(); ++i) checks.push_back(CopyCheck(i));
  return checks;
}

// The file system and the device under a directory. Bind mounts are of one device, too: the
// shortest mount point is the device's own.
struct Mount {
  std::string point, type, source;
};
std::optional<Mount> MountOf(const std::string& folder) {
  struct stat info = {};
  if (stat(folder.c_str(), &info) != 0) return std::nullopt;
  const std::string device = absl::StrCat(major(info.st_dev), ":", minor(info.st_dev));
  std::istringstream lines(ReadFile("/proc/self/mountinfo"));
  std::optional<Mount> found;
  for (std::string line; std::getline(lines, line);) {
    // "36 35 98:0 /root /point options... - type source super-options"
    std::istringstream words(line);
    std::string id, parent, number, root, word;
    Mount mount;
    words >> id >> parent >> number >> root >> mount.point;
    while (words >> word && word != "-") continue;
    words >> mount.type >> mount.source;
    if (number != device) continue;
    if (!found.has_value() || mount.point.size() < found->point.size()) found = mount;
  }
  return found;
}

std::string AlignmentText(const aio::Capabilities& capabilities) {
  if (!capabilities.geometry_is_known)
    return ", direct I/O alignment unknown (kernel before 6.1): 4096 is used";
  return absl::StrCat(", direct I/O align ", capabilities.geometry.offset_alignment, " (memory ",
                      capabilities.geometry.memory_alignment, ")");
}

// Fills `capabilities` where a file in the pool could be tried.
Check StorageCheck(const std::string& pool, std::optional<aio::Capabilities>* capabilities) {
  Check check = {"Storage", pool};
  if (const absl::Status status = swap::CheckPool(pool); !status.ok()) {
    check.grade = Grade::kFail;
    check.detail = std::string(status.message());
    const std::optional<ErrorId> id = ErrorIdOf(status);
    if (id.has_value()) check.error = absl::StrCat("OFD-", static_cast<int>(*id));
    return check;
  }
  if (const std::optional<Mount> mount = MountOf(pool); mount.has_value()) {
    check.detail = absl::StrCat(mount->type, " on ", mount->source, ", ");
  }
  struct statvfs space = {};
  if (statvfs(pool.c_str(), &space) == 0) {
    absl::StrAppend(&check.detail, FormatDecimalBytes(space.f_bavail * space.f_frsize), " free of ",
                    FormatDecimalBytes(space.f_blocks * space.f_frsize));
  }
  if (absl::StatusOr<aio::Capabilities> found = aio::ProbeCapabilities(pool); found.ok()) {
    check.detail += AlignmentText(*found);
    *capabilities = *std::move(found);
  }
  return check;
}

std::vector<Check> DaemonChecks() {
  std::vector<Check> checks;
  for (const DaemonAddress& address : FindDaemons()) {
    const auto reply = AskStatus(address.socket, kDaemonTimeoutSeconds);
    // What a killed private daemon left in a temporary directory is no trouble.
    if (!reply.ok() && address.is_private) continue;
    Check check = {"Daemon", address.socket};
    if (reply.ok()) {
      check.detail =
          absl::StrCat("v", reply->version(), ", up ", FormatDuration(reply->uptime_seconds()),
                       ", jobs ", reply->jobs_size(), address.is_private ? " (private)" : "");
    } else {
      check.grade = Grade::kWarn;
      check.detail = "does not answer";
      check.error = "OFD-1501";
      check.fix = "remove the socket if its daemon is gone";
    }
    checks.push_back(std::move(check));
  }
  if (checks.empty()) {
    checks.push_back({"Daemon", "none", Grade::kOk, "a trainer starts a private one"});
  }
  return checks;
}

std::string Line(const Check& check) {
  std::string line = absl::StrFormat("%-8s %-5s %-15s %s", check.area, GradeName(check.grade),
                                     check.name, check.detail);
  if (!check.fix.empty()) absl::StrAppend(&line, "  -> ", check.fix);
  return line + "\n";
}

class DoctorCommand : public Command {
 public:
  const char* name() const override { return "doctor"; }
  const char* summary() const override {
    return "Checks what this machine can do and what falls back";
  }
  const char* examples() const override {
    return "  offloadctl doctor --pool /nvme0\n  offloadctl doctor --strict --json\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option(
           "--pool", pools_,
           "a directory for stores, or several with commas between; may be given more than once")
        ->envname("OFFLOADD_POOL");
    app.add_flag("--strict", strict_, "exit code 3 on warnings, too")
        ->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    std::vector<Check> storage;
    std::optional<aio::Capabilities> capabilities;  // of the last pool, else of memory
    for (const std::string& given : pools_) {
      for (const std::string& pool : SplitPools(given).value_or(std::vector{given}))
        storage.push_back(StorageCheck(pool, &capabilities));
    }
    if (!capabilities.has_value()) {
      OFFLOAD_ASSIGN_OR_RETURN(capabilities, aio::ProbeCapabilities(""));
    }
    std::vector<Check> checks = {KernelCheck(*capabilities),
                                 MemlockCheck(*capabilities),
                                 DescriptorCheck(),
                                 MemoryCheck(),
                                 NumaCheck(),
                                 SharedMemoryCheck()};
    for (Check& check : storage) checks.push_back(std::move(check));
    for (Check& check : EngineChecks(*capabilities)) checks.push_back(std::move(check));
    checks.push_back(ProcessorCheck());
    for (Check& check : GpuChecks()) checks.push_back(std::move(check));
    for (Check& check : DaemonChecks()) checks.push_back(std::move(check));
    return Judge(checks);
  }

 private:
  Answer Judge(const std::vector<Check>& checks) const {
    Answer answer;
    answer.data["checks"] = Json::array();
    std::string first_error;
    size_t fails = 0, warnings = 0;
    for (const Check& check : checks) {
      answer.text += Line(check);
      answer.data["checks"].push_back(
          {{"area", check.area},
           {"name", check.name},
           {"grade", GradeName(check.grade)},
           {"detail", check.detail},
           {"fix", check.fix},
           {"error", check.error.empty() ? Json(nullptr) : Json(check.error)},
           {"figures", check.figures}});
      fails += check.grade == Grade::kFail ? 1 : 0;
      warnings += check.grade == Grade::kWarn ? 1 : 0;
      if (check.grade == Grade::kFail && first_error.empty()) first_error = check.error;
    }
    const bool failed = fails > 0 || (strict_ && warnings > 0);
    const std::string next = NextCommand(first_error);
    answer.data["fail"] = fails;
    answer.data["warn"] = warnings;
    answer.data["next"] = next;
    absl::StrAppend(&answer.text, fails, " FAIL, ", warnings, " WARN.  Next: ", next, "\n");
    answer.exit_code = failed ? kDoesNotFit : kDone;
    return answer;
  }

  std::string NextCommand(const std::string& first_error) const {
    if (!first_error.empty()) return "offloadctl explain " + first_error;
    if (pools_.empty()) return "offloadctl doctor --pool DIR";
    return absl::StrCat("offloadctl plan --params 1B --ram 4GiB --pool ",
                        absl::StrJoin(pools_, ","));
  }

  std::vector<std::string> pools_;
  bool strict_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeDoctorCommand() { return std::make_unique<DoctorCommand>(); }

}  // namespace offload::tools
