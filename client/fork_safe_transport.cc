#include "client/fork_safe_transport.h"

#include <grpc/grpc.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "client/health.h"

// Of the library, which has no public headers for these. Its own grpc_prefork() wants to be called
// around each fork, gives up while another thread is in a call, and knows nothing of the engine.

void grpc_timer_manager_set_threading(bool enabled);

namespace grpc_event_engine::experimental {

class EventEngine;
std::shared_ptr<EventEngine> GetDefaultEventEngine();
// Forgets the engine, which lives on where somebody has it.
void EventEngineFactoryReset();

}  // namespace grpc_event_engine::experimental

namespace grpc_core {

class Executor {
 public:
  static void SetThreadingAll(bool enable);
};

}  // namespace grpc_core

namespace offload::client {
namespace {

constexpr char kStrategy[] = "GRPC_POLL_STRATEGY";

void Start() {
  // An epoll instance would be one for parent and child: each would be woken for the other's
  // sockets, by addresses that mean nothing to it.
  const bool is_chosen = ::getenv(kStrategy) != nullptr;
  if (!is_chosen) ::setenv(kStrategy, "poll", 1);
  // Never shut down: another start would bring the threads back.
  grpc_init();
  if (!is_chosen) ::unsetenv(kStrategy);
  // A child would leave work to threads that only its parent has. Without them it is done by the
  // threads that call.
  grpc_core::Executor::SetThreadingAll(false);
  // The thread of timers rests during a fork, so that a child has none that waits.
  ::pthread_atfork([] { grpc_timer_manager_set_threading(false); },
                   [] { grpc_timer_manager_set_threading(true); }, nullptr);
}

// A process, and the engine that it is given for good.
struct Process {
  Health health;  // since it was given it
  std::shared_ptr<grpc_event_engine::experimental::EventEngine> engine;
  const Process* parent = nullptr;
};

// The engine's threads wait for work in its memory. A child has another engine, whose threads are
// there, and never destroys the one of its parent, which would wait for those that are not.
void GiveProcessItsEngine() {
  static std::atomic<Process*> current{nullptr};
  Process* parent = current.load();
  if (parent != nullptr && !parent->health.forked()) return;
  auto process = std::make_unique<Process>();
  process->parent = parent;
  if (!current.compare_exchange_strong(parent, process.get())) return;
  namespace engines = grpc_event_engine::experimental;
  if (parent != nullptr) {
    engines::EventEngineFactoryReset();
    grpc_timer_manager_set_threading(true);
  }
  process.release()->engine = engines::GetDefaultEventEngine();
}

}  // namespace

void StartForkSafeTransport() {
  static std::once_flag started;
  std::call_once(started, &Start);
  GiveProcessItsEngine();
}

}  // namespace offload::client
