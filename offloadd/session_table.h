// offloadd/session_table.h
//
// The sessions of the daemon, found by number or by token.
//
// Thread safety: all methods may be called from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

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
    return session;
  }
  // From now on sessions end because the daemon does: before the first of them is told.
  void EndWithDaemon() { daemon_ends_.store(true, std::memory_order_release); }
  bool daemon_ends() const { return daemon_ends_.load(std::memory_order_acquire); }
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
  template <typename Predicate>
  size_t Count(Predicate holds) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(
        std::count_if(sessions_.begin(), sessions_.end(),
                      [&](const auto& entry) { return holds(*entry.second); }));
  }

  std::atomic<bool> daemon_ends_{false};
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Session>> sessions_;  // guarded by mutex_
};

}  // namespace offload::daemon
