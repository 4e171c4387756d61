#include "client/health.h"

#include <pthread.h>

#include <mutex>

#include "base/error.h"

namespace offload::client {

std::atomic<uint32_t> Health::fork_count_{0};

void Health::CountFork() { fork_count_.fetch_add(1, std::memory_order_relaxed); }

Health::Health() {
  static std::once_flag registered;
  std::call_once(registered, [] { ::pthread_atfork(nullptr, nullptr, &Health::CountFork); });
  forks_ = fork_count_.load(std::memory_order_relaxed);
}

absl::Status Health::status() const {
  // Before any lock: a thread that does not exist in the child may hold it.
  if (forked()) {
    return MakeError(
        ErrorId::kSessionEnded,
        "this process was forked after the session began; the session is its parent's",
        "Use the model there, give this process a copy that was made before, or start it anew "
        "(in Python multiprocessing.get_context(\"spawn\")); it may open a session for a model of "
        "its own");
  }
  absl::MutexLock lock(&mutex_);
  return reason_;
}

bool Health::Fail(const absl::Status& reason) {
  if (forked()) return false;
  absl::MutexLock lock(&mutex_);
  if (!reason_.ok()) return false;
  reason_ = reason;
  failed_.store(true, std::memory_order_release);
  return true;
}

}  // namespace offload::client
