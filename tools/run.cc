// offloadctl run: trains with a program that knows nothing of offload.

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/rank_environment.h"
#include "proto/pool_path.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/program.h"

namespace offload::tools {
namespace {

constexpr char kPreloaded[] = "liboffload_untouched.so";
// Installed, and in a build's own folder.
constexpr const char* kLibraryFolders[] = {"../lib", ".."};
constexpr const char* kLibraryNames[] = {"liboffload.so.0", "liboffload.so"};

struct Libraries {
  std::string preloaded, offload;
};

// Both, beside this program.
absl::StatusOr<Libraries> FindLibraries() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const char* folder : kLibraryFolders) {
    const std::filesystem::path lib = (program.parent_path() / folder).lexically_normal();
    for (const char* name : kLibraryNames) {
      if (std::filesystem::exists(lib / name, error) &&
          std::filesystem::exists(lib / kPreloaded, error))
        return Libraries{lib / kPreloaded, lib / name};
    }
  }
  return MakeError(
      ErrorId::kBadValue,
      absl::StrCat(kPreloaded, " is not in ",
                   (program.parent_path() / kLibraryFolders[0]).lexically_normal().string()),
      "Install it: tools/install --prefix DIR, and use DIR/bin/offloadctl");
}

class RunCommand : public Command {
 public:
  const char* name() const override { return "run"; }
  const char* summary() const override {
    return "Starts a program that was built with libtorch and knows nothing of offload, and "
           "offloads the model that it trains";
  }
  const char* examples() const override {
    return "  offloadctl run --nvme-path /nvme0 --ram 8GiB -- ./trainer --epochs 3\n"
           "  offloadctl run --nvme-path /nvme0 --ram 8GiB --job run1 --resume -- ./trainer\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("--nvme-path,--pool", pool_, "a directory on a drive with direct I/O")
        ->envname("OFFLOADD_POOL")
        ->required();
    app.add_option("--ram", ram_, "the memory budget, such as 8GiB")
        ->envname("OFFLOADD_RAM")
        ->required();
    app.add_option("--job", job_, "names the run in the pool; none: as the program")
        ->envname("OFFLOADD_JOB");
    app.add_flag("--resume", resume_, "go on with the job where there is one")
        ->always_capture_default(false);
    app.add_flag(
           "--from-first-use", from_first_use_,
           "with --resume: the job's weights take the place of the program's before the first "
           "operator that uses one, also without gradients (a rollout, a target network), and "
           "not before the first with gradients")
        ->always_capture_default(false)
        ->needs("--resume");
    app.add_option("--born-above", born_above_,
                   "a size, such as 64MiB: parameters of at least that leave memory as soon as "
                   "the program makes them; none: when it begins to train");
    app.add_option("COMMAND", command_, "behind --: the program and its arguments")->required();
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_RETURN_IF_ERROR(ParseByteSize(ram_).status());
    if (!born_above_.empty()) OFFLOAD_RETURN_IF_ERROR(ParseByteSize(born_above_).status());
    OFFLOAD_RETURN_IF_ERROR(CheckAlone());
    const char* const path = std::getenv("PATH");
    OFFLOAD_ASSIGN_OR_RETURN(const std::string program,
                             FindProgram(command_.front(), path == nullptr ? "" : path));
    OFFLOAD_ASSIGN_OR_RETURN(const Libraries libraries, FindLibraries());
    OFFLOAD_RETURN_IF_ERROR(CheckPreloadable(program, libraries.offload));
    if (job_.empty()) job_ = program.substr(program.rfind('/') + 1);
    OFFLOAD_RETURN_IF_ERROR(CheckJob());
    return Start(program, libraries);
  }

 private:
  // Ranks would need gradients that are added, which their program does otherwise.
  static absl::Status CheckAlone() {
    OFFLOAD_ASSIGN_OR_RETURN(
        const client::World world,
        client::WorldFromEnvironment(client::EnvironmentOfProcess(), ::getppid()));
    if (world.world_size == 1) return absl::OkStatus();
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat(world.launcher, " starts ", world.world_size,
                                  " ranks, offloadctl run serves one process"),
                     absl::StrCat("Attach the model in the program (docs/ranks.md), which ",
                                  world.launcher, " then starts without offloadctl run"));
  }

  // A second run into a job is never by accident.
  absl::Status CheckJob() const {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<swap::StoreSummary> stores, swap::ListStores(pool_));
    for (const swap::StoreSummary& store : stores) {
      if (store.job != job_ || resume_) continue;
      return MakeError(
          ErrorId::kBadValue,
          absl::StrCat("pool ", pool_, " holds a job ", job_, ", at step ", store.committed.epoch),
          absl::StrCat("Add --resume to go on with it, name another one with --job, or remove it: "
                       "offloadctl rm ",
                       pool_, " ", job_, " --yes"));
    }
    return absl::OkStatus();
  }

  // Becomes the program. Returns when that is not possible.
  absl::Status Start(const std::string& program, const Libraries& libraries) const {
    std::string preload = absl::StrCat(libraries.preloaded, ":", libraries.offload);
    const char* const before = std::getenv("LD_PRELOAD");
    if (before != nullptr && *before != '\0') absl::StrAppend(&preload, ":", before);
    ::setenv("LD_PRELOAD", preload.c_str(), 1);
    // The program may change its folder.
    ::setenv("OFFLOADD_POOL", proto::AbsolutePools(pool_).c_str(), 1);
    ::setenv("OFFLOADD_RAM", ram_.c_str(), 1);
    ::setenv("OFFLOADD_JOB", job_.c_str(), 1);
    if (resume_) ::setenv("OFFLOADD_RESUME", "1", 1);
    if (from_first_use_) ::setenv("OFFLOADD_FROM_FIRST_USE", "1", 1);
    if (!born_above_.empty()) ::setenv("OFFLOADD_BORN_ABOVE", born_above_.c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : command_) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(program.c_str(), arguments.data());
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat(program, " cannot be started: ", ErrnoText(errno)));
  }

  std::string pool_, ram_, job_, born_above_;
  std::vector<std::string> command_;
  bool resume_ = false, from_first_use_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeRunCommand() { return std::make_unique<RunCommand>(); }

}  // namespace offload::tools
