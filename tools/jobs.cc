// offloadctl ls and rm: the stores of a pool, without a daemon.

#include "tools/jobs.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "swap/store.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

Json Describe(const swap::StoreSummary& store) {
  return {
      {"job", store.job},
      {"path", store.path},
      {"pools", store.pools},
      {"file_bytes", store.file_bytes},
      {"step", store.committed.epoch},
      {"in_use", store.in_use},
      {"damage", store.damage.ok() ? Json(nullptr) : Json(std::string(store.damage.message()))}};
}

// Others may not be this user's, or of another version.
bool IsDamaged(const swap::StoreSummary& store) { return ExitCodeOf(store.damage) == kDamaged; }

std::string StateText(const swap::StoreSummary& store) {
  if (!store.damage.ok()) {
    return absl::StrCat(IsDamaged(store) ? "damaged: " : "cannot be read: ",
                        store.damage.message());
  }
  const std::string where =
      store.pools.empty() ? "" : absl::StrCat(", over ", absl::StrJoin(store.pools, ","));
  return absl::StrCat(store.in_use ? "in use" : "idle", where);
}

class ListCommand : public Command {
 public:
  const char* name() const override { return "ls"; }
  const char* summary() const override { return "Lists the jobs whose stores a pool holds"; }
  const char* examples() const override { return "  offloadctl ls /nvme0\n"; }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "a directory: nvme_path of the trainer")->required();
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<swap::StoreSummary> stores, swap::ListStores(pool_));
    Answer answer;
    answer.data = {{"pool", pool_}, {"jobs", Json::array()}};
    size_t width = 3;
    for (const swap::StoreSummary& store : stores) width = std::max(width, store.job.size());
    if (!stores.empty()) {
      answer.text = absl::StrFormat("%-*s %10s %10s  %s\n", width, "job", "size", "step", "state");
    }
    for (const swap::StoreSummary& store : stores) {
      answer.data["jobs"].push_back(Describe(store));
      absl::StrAppend(&answer.text, absl::StrFormat("%-*s %10s %10d  %s\n", width, store.job,
                                                    FormatDecimalBytes(store.file_bytes),
                                                    store.committed.epoch, StateText(store)));
      if (!store.damage.ok() && answer.exit_code != kDamaged)
        answer.exit_code = IsDamaged(store) ? kDamaged : kFailed;
      if (IsDamaged(store) && answer.advice.empty()) {
        answer.advice = absl::StrCat("Next: offloadctl fsck ", pool_, " ", store.job,
                                     ", which says what is lost");
      }
    }
    if (stores.empty()) answer.advice = absl::StrCat("No jobs in ", pool_);
    return answer;
  }

 private:
  std::string pool_;
};

class RemoveCommand : public Command {
 public:
  const char* name() const override { return "rm"; }
  const char* summary() const override {
    return "Removes a job's store from a pool; without --yes only says what it would do";
  }
  const char* examples() const override {
    return "  offloadctl rm /nvme0 run1\n  offloadctl rm /nvme0 run1 --yes\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "a directory: nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "as offloadctl ls names it")->required();
    app.add_flag("--yes", yes_, "remove it")->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_ASSIGN_OR_RETURN(const swap::StoreSummary store, FindJob(pool_, job_));
    if (store.in_use) {
      return MakeError(ErrorId::kStoreLocked, absl::StrCat(store.path, " is in use"));
    }
    if (yes_) OFFLOAD_RETURN_IF_ERROR(swap::RemoveStore(pool_, job_));
    Answer answer;
    answer.data = {{"pool", pool_},
                   {"job", job_},
                   {"path", store.path},
                   {"file_bytes", store.file_bytes},
                   {"step", store.committed.epoch},
                   {"removed", yes_}};
    answer.text =
        absl::StrCat(yes_ ? "freed " : "would free ", FormatDecimalBytes(store.file_bytes),
                     ": job ", job_, " at step ", store.committed.epoch, " (", store.path, ")\n");
    if (!yes_) answer.advice = "Nothing was removed. Add --yes.";
    return answer;
  }

 private:
  std::string pool_, job_;
  bool yes_ = false;
};

}  // namespace

std::function<void(uint64_t, uint64_t)> ProgressLine() {
  auto last =
      std::make_shared<std::chrono::steady_clock::time_point>(std::chrono::steady_clock::now());
  return [last](uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (now - *last < std::chrono::seconds(1)) return;
    *last = now;
    std::cerr << FormatDecimalBytes(done) << " of " << FormatDecimalBytes(total) << std::endl;
  };
}

absl::StatusOr<swap::StoreSummary> FindJob(const std::string& pool, const std::string& job) {
  OFFLOAD_ASSIGN_OR_RETURN(std::vector<swap::StoreSummary> stores, swap::ListStores(pool));
  for (swap::StoreSummary& store : stores) {
    if (store.job == job) return std::move(store);
  }
  return MakeError(ErrorId::kBadValue, absl::StrCat("pool ", pool, " holds no job ", job),
                   absl::StrCat("offloadctl ls ", pool, " lists the jobs"));
}

absl::Status CheckIsNewJob(const std::string& pool, const std::string& job) {
  OFFLOAD_RETURN_IF_ERROR(CheckJobName(job));
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<swap::StoreSummary> stores, swap::ListStores(pool));
  for (const swap::StoreSummary& store : stores) {
    if (store.job != job) continue;
    return MakeError(ErrorId::kStoreLocked,
                     absl::StrCat("job '", job, "' already has a store, ", store.path),
                     "Remove it with offloadctl rm, or choose another job name");
  }
  return absl::OkStatus();
}

std::unique_ptr<Command> MakeListCommand() { return std::make_unique<ListCommand>(); }
std::unique_ptr<Command> MakeRemoveCommand() { return std::make_unique<RemoveCommand>(); }

}  // namespace offload::tools
