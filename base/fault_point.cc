#include "base/fault_point.h"

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/string_view.h"

namespace offload {
namespace internal {

std::atomic<bool> fault_point_armed{false};

}  // namespace internal
namespace {

constexpr int kFaultExitStatus = 86;

struct Armed {
  std::string name;
  std::atomic<uint64_t> passages_left{0};
  bool exits = false;
};

// Never destroyed: threads may pass fault points while the process ends.
Armed& GetArmed() {
  static Armed* armed = new Armed;
  return *armed;
}

// Reads the environment before main, in every program that has a fault point.
const bool environment_read = [] {
  const char* text = std::getenv("OFFLOADD_FAULT_POINT");
  if (text == nullptr || *text == '\0') return true;
  if (!ArmFaultPoint(text)) {
    std::fprintf(stderr, "OFFLOADD_FAULT_POINT=%s: expected name:count[:kill|exit]\n", text);
    std::_Exit(2);
  }
  return true;
}();

}  // namespace

bool ArmFaultPoint(std::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(ToAbsl(text), ':');
  if (parts.size() < 2 || parts.size() > 3 || parts[0].empty()) return false;
  uint64_t count = 0;
  if (!absl::SimpleAtoi(parts[1], &count) || count == 0) return false;
  if (parts.size() == 3 && parts[2] != "kill" && parts[2] != "exit") return false;
  Armed& armed = GetArmed();
  armed.name = parts[0];
  armed.passages_left = count;
  armed.exits = parts.size() == 3 && parts[2] == "exit";
  internal::fault_point_armed.store(true, std::memory_order_release);
  return true;
}

namespace internal {

void PassFaultPoint(std::string_view name) {
  std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the release in ArmFaultPoint
  Armed& armed = GetArmed();
  if (armed.name != name || armed.passages_left.fetch_sub(1) != 1) return;
  if (armed.exits) std::_Exit(kFaultExitStatus);
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();  // the signal may take a moment; nothing more may happen here
}

}  // namespace internal
}  // namespace offload
