// offloadd/job_table.h
//
// The jobs of the daemon, by the store that they have. A job is kept by the sessions of its ranks
// and by those who are just calling it; the table only knows it.
//
// Invariants
//   * At most one job of a store is not leaving. One that is leaving does not count: its store's
//   lock is waited for.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "offloadd/job.h"

namespace offload::daemon {

class JobTable {
 public:
  struct Claim {
    std::shared_ptr<Job> job;
    bool is_ours = false;  // else somebody else's, who keeps it
  };

  // The job of this store, for who wants to open it: a new one, or the one that others of the same
  // user and the same launch have opened already.
  absl::StatusOr<Claim> Take(const JobIdentity& identity) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<Job>& known = jobs_[identity.store];
    if (std::shared_ptr<Job> job = known.lock(); job != nullptr && !job->IsLeaving()) {
      const bool is_ours = !identity.run_id.empty() && identity.run_id == job->identity().run_id &&
                           identity.user == job->identity().user;
      return Claim{std::move(job), is_ours};
    }
    absl::StatusOr<std::shared_ptr<Job>> job = Job::Create(identity);
    if (!job.ok()) return job.status();
    known = *job;
    ForgetEnded();
    return Claim{*std::move(job), true};
  }

  // The job of this store that is not leaving; null when there is none.
  std::shared_ptr<Job> Find(const std::string& store) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = jobs_.find(store);
    std::shared_ptr<Job> job = known == jobs_.end() ? nullptr : known->second.lock();
    return job == nullptr || job->IsLeaving() ? nullptr : job;
  }

  // In the order of their stores. One that is leaving is not shown once another has its name.
  std::vector<std::shared_ptr<Job>> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Job>> all;
    for (const auto& [store, known] : jobs_) {
      if (std::shared_ptr<Job> job = known.lock(); job != nullptr) all.push_back(std::move(job));
    }
    return all;
  }

 private:
  void ForgetEnded() {
    std::erase_if(jobs_, [](const auto& entry) { return entry.second.expired(); });
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Job>> jobs_;  // by store; guarded by mutex_
};

}  // namespace offload::daemon
