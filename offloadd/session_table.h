// offloadd/session_table.h
//
// The sessions of the daemon, found by number or by token, and which jobs they have open.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/error.h"
#include "offloadd/session.h"

namespace offload::daemon {

class SessionTable {
 public:
  void Add(std::shared_ptr<Session> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    sessions_.emplace(session->id(), std::move(session));
  }
  // Null when there is none.
  std::shared_ptr<Session> Remove(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = sessions_.find(id);
    if (entry == sessions_.end()) return nullptr;
    std::shared_ptr<Session> session = std::move(entry->second);
    sessions_.erase(entry);
    claims_.erase(id);
    return session;
  }
  // Gives `session` the claim of a job, named by anything that is the same for the same store, for
  // as long as it lives. Otherwise returns the process of the session that has it. One that is
  // leaving does not count: its store's lock is waited for. OFD-1503 when the session has claimed a
  // job before, OFD-1802 when it has ended.
  absl::StatusOr<std::optional<pid_t>> Claim(const std::shared_ptr<Session>& session,
                                             const std::string& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (sessions_.count(session->id()) == 0)
      return MakeError(ErrorId::kSessionEnded, "the session is closed");
    if (claims_.count(session->id()) != 0)
      return MakeError(ErrorId::kProtocol, "OpenJob for the second time");
    if (const std::shared_ptr<Session> holder = Holder(job); holder != nullptr)
      return holder->client_pid();
    claims_[session->id()] = job;
    return std::optional<pid_t>();
  }
  // For a job that could not be opened.
  void DropClaim(const std::shared_ptr<Session>& session) {
    std::lock_guard<std::mutex> lock(mutex_);
    claims_.erase(session->id());
  }
  // The session that has the claim of a job and is not leaving; null when there is none.
  std::shared_ptr<Session> FindByClaim(const std::string& job) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return Holder(job);
  }
  // Compares with every token, each in constant time. Null when it is nobody's.
  std::shared_ptr<Session> FindByToken(const proto::Token& token) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Session> found;
    for (const auto& [id, session] : sessions_) {
      if (proto::TokensEqual(token, session->token())) found = session;
    }
    return found;
  }
  std::vector<std::shared_ptr<Session>> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Session>> all;
    for (const auto& [id, session] : sessions_) all.push_back(session);
    return all;
  }
  size_t CountOfProcess(pid_t pid) const {
    return Count([pid](const Session& session) { return session.peer().pid == pid; });
  }
  size_t CountOfUser(uid_t uid) const {
    return Count([uid](const Session& session) { return session.peer().uid == uid; });
  }
  size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return sessions_.size();
  }

 private:
  std::shared_ptr<Session> Holder(const std::string& job) const {
    for (const auto& [id, claimed] : claims_) {
      const std::shared_ptr<Session>& session = sessions_.at(id);
      if (claimed == job && !session->IsLeaving()) return session;
    }
    return nullptr;
  }
  template <typename Predicate>
  size_t Count(Predicate holds) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(
        std::count_if(sessions_.begin(), sessions_.end(),
                      [&](const auto& entry) { return holds(*entry.second); }));
  }

  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Session>> sessions_;  // guarded by mutex_
  std::map<uint64_t, std::string> claims_;  // by session, one of sessions_; guarded by mutex_
};

}  // namespace offload::daemon
