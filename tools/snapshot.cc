// offloadctl snapshot: keeps states of a job, lists and deletes them, and makes new jobs of them.

#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "swap/fork.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/daemons.h"
#include "tools/jobs.h"

namespace offload::tools {
namespace {

std::string TimeText(int64_t unix_seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixSeconds(unix_seconds),
                          absl::LocalTimeZone());
}

uint64_t FreeBytes(const std::string& pool) {
  uint64_t free_bytes = 0;
  for (const std::string& each : SplitPools(pool).value_or(std::vector<std::string>())) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(each, error);
    if (!error) free_bytes += space.available;
  }
  return free_bytes;
}

class SnapshotCommand : public Command {
 public:
  const char* name() const override { return "snapshot"; }
  const char* summary() const override {
    return "Keeps states of a job: create, ls, rm; fork makes a new job of one; without --yes only "
           "says what would take space or be deleted";
  }
  const char* examples() const override {
    return "  offloadctl snapshot create /nvme0 run1 best\n"
           "  offloadctl snapshot ls /nvme0 run1\n"
           "  offloadctl snapshot fork /nvme0 run1 best --as run2 --yes\n"
           "  offloadctl snapshot rm /nvme0 run1 best --yes\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("ACTION", action_, "create, ls, rm or fork")
        ->required()
        ->check(CLI::IsMember({"create", "ls", "rm", "fork"}));
    app.add_option("POOL", pool_, "a directory: nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "as offloadctl ls names it")->required();
    app.add_option("NAME", snapshot_, "of the snapshot; fork without one: the last committed step");
    app.add_option("--as", fork_job_, "fork: the new job's name");
    app.add_option("--to", fork_pool_, "fork: the new job's pool; none: the same");
    app.add_option("--generations", generations_, "fork: spare ones, for snapshots of the new job")
        ->check(CLI::Range(0u, swap::kGenerationsMax));
    app.add_flag("--yes", yes_, "do what takes space or deletes")->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_ASSIGN_OR_RETURN(store_, FindJob(pool_, job_));
    // Nobody knows the snapshots of a store that cannot be read; another one is served from twins.
    if (!store_.damage.ok() && store_.generation_bytes == 0) return store_.damage;
    OFFLOAD_RETURN_IF_ERROR(CheckArguments());
    if (action_ == "ls") return List();
    if (action_ == "create") return Create();
    if (action_ == "rm") return Remove();
    return Fork();
  }

 private:
  absl::Status CheckArguments() const {
    if (action_ != "ls" && action_ != "fork" && snapshot_.empty()) {
      return MakeError(
          ErrorId::kBadValue, absl::StrCat("snapshot ", action_, " needs a name for the snapshot"),
          absl::StrCat("Give it: offloadctl snapshot ", action_, " ", pool_, " ", job_, " NAME"));
    }
    if (action_ == "fork" && fork_job_.empty())
      return MakeError(ErrorId::kBadValue, "snapshot fork needs --as, the new job's name",
                       "Give it: --as NAME");
    if (action_ == "create") OFFLOAD_RETURN_IF_ERROR(swap::CheckSnapshotName(snapshot_));
    if (action_ == "create" && FindSnapshot().ok()) {
      return MakeError(ErrorId::kSnapshot,
                       absl::StrCat("job ", job_, " has a snapshot ", snapshot_));
    }
    if (action_ == "rm" || (action_ == "fork" && !snapshot_.empty()))
      return FindSnapshot().status();
    return absl::OkStatus();
  }

  absl::StatusOr<swap::SnapshotInfo> FindSnapshot() const {
    for (const swap::SnapshotInfo& snapshot : store_.snapshots) {
      if (snapshot.name == snapshot_) return snapshot;
    }
    return MakeError(ErrorId::kSnapshot, absl::StrCat("job ", job_, " has no snapshot ", snapshot_),
                     absl::StrCat("offloadctl snapshot ls ", pool_, " ", job_, " lists them"));
  }

  Answer NewAnswer() const {
    Answer answer;
    answer.data = {{"pool", pool_}, {"job", job_}, {"action", action_}};
    if (!snapshot_.empty()) answer.data["snapshot"] = snapshot_;
    return answer;
  }

  absl::StatusOr<Answer> List() {
    Answer answer = NewAnswer();
    answer.data["generations"] = store_.generation_count;
    answer.data["generation_bytes"] = store_.generation_bytes;
    answer.data["snapshots"] = Json::array();
    for (const swap::SnapshotInfo& snapshot : store_.snapshots) {
      const bool lost = !snapshot.damage.ok();
      answer.data["snapshots"].push_back({{"name", snapshot.name},
                                          {"step", snapshot.epoch},
                                          {"created", snapshot.created_unix_seconds},
                                          {"lost", lost}});
      absl::StrAppend(&answer.text,
                      absl::StrFormat("%-24s step %-10d %s%s\n", snapshot.name, snapshot.epoch,
                                      TimeText(snapshot.created_unix_seconds),
                                      lost ? "  lost: its table is damaged" : ""));
      if (lost) answer.exit_code = kDamaged;
    }
    answer.advice = absl::StrCat(store_.snapshots.size(), " of ", store_.generation_count,
                                 " spare generations hold a snapshot; each takes ",
                                 FormatDecimalBytes(store_.generation_bytes));
    return answer;
  }

  absl::StatusOr<Answer> Create() {
    Answer answer = NewAnswer();
    const bool grows = store_.snapshots.size() >= store_.generation_count;
    answer.data["grows_by_bytes"] = grows ? store_.generation_bytes : 0;
    answer.data["created"] = !grows || yes_;
    if (grows && !yes_) {
      answer.text = absl::StrCat("would write ", FormatDecimalBytes(store_.generation_bytes),
                                 " of zeros: no spare generation of job ", job_,
                                 " is free, so its store grows by one; ",
                                 FormatDecimalBytes(FreeBytes(pool_)), " free in ", pool_, "\n");
      answer.advice = "Nothing was made. Add --yes.";
      return answer;
    }
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t step,
                             store_.in_use ? CreateInDaemon() : CreateInStore());
    answer.data["step"] = step;
    answer.text = absl::StrCat("snapshot ", snapshot_, " of job ", job_, " at step ", step, "\n");
    return answer;
  }

  absl::StatusOr<uint64_t> CreateInStore() const {
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> store,
                             swap::Store::Open(pool_, job_, {}));
    if (!store->has_free_generation()) {
      OFFLOAD_RETURN_IF_ERROR(RunToEnd(
          *store, [&](swap::Store::Done done) { store->Grow(ProgressLine(), std::move(done)); }));
    }
    OFFLOAD_RETURN_IF_ERROR(RunToEnd(*store, [&](swap::Store::Done done) {
      store->CreateSnapshot(snapshot_, std::time(nullptr), std::move(done));
    }));
    return store->committed().epoch;
  }

  absl::StatusOr<uint64_t> CreateInDaemon() const {
    OFFLOAD_ASSIGN_OR_RETURN(const std::string socket, FindDaemonOf(pool_, job_));
    return AskCreateSnapshot(socket, SnapshotName{pool_, job_, snapshot_}, yes_, ProgressLine());
  }

  absl::StatusOr<Answer> Remove() {
    OFFLOAD_ASSIGN_OR_RETURN(const swap::SnapshotInfo snapshot, FindSnapshot());
    if (yes_) OFFLOAD_RETURN_IF_ERROR(store_.in_use ? RemoveInDaemon() : RemoveInStore());
    Answer answer = NewAnswer();
    answer.data["step"] = snapshot.epoch;
    answer.data["removed"] = yes_;
    answer.text =
        absl::StrCat(yes_ ? "deleted" : "would delete", " snapshot ", snapshot_, " of job ", job_,
                     " at step ", snapshot.epoch, "; its generation is free for another one\n");
    if (!yes_) answer.advice = "Nothing was deleted. Add --yes.";
    return answer;
  }

  absl::Status RemoveInStore() const {
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> store,
                             swap::Store::Open(pool_, job_, {}));
    return RunToEnd(
        *store, [&](swap::Store::Done done) { store->DeleteSnapshot(snapshot_, std::move(done)); });
  }

  absl::Status RemoveInDaemon() const {
    OFFLOAD_ASSIGN_OR_RETURN(const std::string socket, FindDaemonOf(pool_, job_));
    return AskDeleteSnapshot(socket, SnapshotName{pool_, job_, snapshot_});
  }

  absl::StatusOr<Answer> Fork() {
    const std::string target = fork_pool_.empty() ? pool_ : fork_pool_;
    if (snapshot_.empty() && store_.in_use) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat(store_.path, " is in use"),
                       "Make a snapshot and fork that");
    }
    OFFLOAD_RETURN_IF_ERROR(CheckIsNewJob(target, fork_job_));
    OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<swap::Store> source,
                             swap::OpenForkSource(pool_, job_, snapshot_, {}));
    const uint64_t copied_bytes = swap::WrittenBytes(*source);
    swap::StoreSpec spec = source->spec();
    spec.job = fork_job_;
    const uint64_t file_bytes = swap::FormattedBytes(spec, generations_);
    if (yes_) {
      swap::StoreOptions options;
      options.generations = generations_;
      options.progress = ProgressLine();
      OFFLOAD_RETURN_IF_ERROR(swap::Fork(*source, target, fork_job_, options));
    }
    Answer answer = NewAnswer();
    answer.data["fork_job"] = fork_job_;
    answer.data["fork_pool"] = target;
    answer.data["step"] = source->committed().epoch;
    answer.data["copied_bytes"] = copied_bytes;
    answer.data["file_bytes"] = file_bytes;
    answer.data["forked"] = yes_;
    answer.text = absl::StrCat(yes_ ? "forked" : "would fork", " job ", fork_job_, " from step ",
                               source->committed().epoch, " of job ", job_, ": ",
                               FormatDecimalBytes(copied_bytes), yes_ ? " copied" : " to copy",
                               " into a store of ", FormatDecimalBytes(file_bytes), " in ", target,
                               "; ", FormatDecimalBytes(FreeBytes(target)), " free\n");
    if (!yes_) answer.advice = "Nothing was written. Add --yes.";
    return answer;
  }

  std::string action_, pool_, job_, snapshot_, fork_job_, fork_pool_;
  uint32_t generations_ = 0;
  bool yes_ = false;
  swap::StoreSummary store_;
};

}  // namespace

std::unique_ptr<Command> MakeSnapshotCommand() { return std::make_unique<SnapshotCommand>(); }

}  // namespace offload::tools
