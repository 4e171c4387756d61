// What a hostile neighbour costs an honest job: latencies of its acquires, each of which reads the
// drive, beside an equally busy honest neighbour and beside attacks, in turn.
//
//   OFFLOADD_BINARY=… HOSTILE_CLIENT=… hostile_benchmark POOL [SECONDS_EACH=10] [ROUNDS=3]

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/honest_neighbour.h"

namespace {

using offload::tests::HonestNeighbour;

pid_t Spawn(std::vector<std::string> arguments) {
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t pid = -1;
  if (posix_spawn(&pid, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0) std::exit(1);
  return pid;
}
void End(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}
std::unique_ptr<HonestNeighbour> OpenOrDie(const std::string& job, const std::string& pool) {
  auto neighbour = HonestNeighbour::Open(job, pool);
  if (neighbour.ok()) return *std::move(neighbour);
  std::fprintf(stderr, "%s\n", neighbour.status().ToString().c_str());
  std::exit(1);
}
double Quantile(std::vector<double> values, double part) {
  const auto place = values.begin() + static_cast<ptrdiff_t>(part * (values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

struct Bench {
  std::string pool, socket;
  double seconds;

  // The honest job's latencies beside `neighbour`: nobody, an honest one, or an attack that is
  // begun again whenever it ends.
  void Measure(const std::string& neighbour, std::vector<double>& latencies) const {
    auto honest = OpenOrDie("measured", pool);
    auto other = neighbour == "honest" ? OpenOrDie("other", pool) : nullptr;
    if (other != nullptr) other->Start();
    const bool attacked = neighbour != "honest" && neighbour != "nobody";
    const auto attack = [&] {
      return Spawn({getenv("HOSTILE_CLIENT"), "--socket", socket, "--pool", pool, "--attack",
                    neighbour, "--count", "100000000"});
    };
    pid_t attacker = attacked ? attack() : -1;
    honest->Start();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (attacked && waitpid(attacker, nullptr, WNOHANG) == attacker) attacker = attack();
    }
    if (!honest->Stop().ok()) std::exit(1);
    if (attacked) End(attacker);
    const std::vector<double>& measured = honest->latencies_seconds();
    latencies.insert(latencies.end(), measured.begin(), measured.end());
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || getenv("OFFLOADD_BINARY") == nullptr || getenv("HOSTILE_CLIENT") == nullptr) {
    std::fprintf(stderr, "usage: hostile_benchmark POOL [SECONDS_EACH] [ROUNDS]\n");
    return 2;
  }
  std::string directory = "/tmp/offloadd-bench-XXXXXX";
  Bench bench{.pool = argv[1],
              .socket = absl::StrCat(mkdtemp(directory.data()), "/offloadd.sock"),
              .seconds = argc > 2 ? std::atof(argv[2]) : 10};
  setenv("OFFLOADD_SOCKET", bench.socket.c_str(), 1);
  const pid_t daemon = Spawn({getenv("OFFLOADD_BINARY"), "--socket", bench.socket, "--pool",
                              bench.pool, "--log-level", "error"});
  while (!std::filesystem::exists(directory + "/control.sock")) usleep(1000);
  const char* const neighbours[] = {"nobody", "honest", "flips", "cursors", "nodrain", "garbage"};
  std::map<std::string, std::vector<double>> latencies;
  for (int round = argc > 3 ? std::atoi(argv[3]) : 3; round > 0; --round) {
    for (const char* neighbour : neighbours) bench.Measure(neighbour, latencies[neighbour]);
  }
  const double reference = Quantile(latencies["honest"], 0.99);
  for (const char* neighbour : neighbours) {
    const std::vector<double>& values = latencies[neighbour];
    const double p99 = Quantile(values, 0.99);
    std::printf("beside %-8s %8zu reads  p50 %7.3f ms  p99 %7.3f ms  %5.2f of beside honest\n",
                neighbour, values.size(), Quantile(values, 0.5) * 1e3, p99 * 1e3, p99 / reference);
  }
  End(daemon);
  std::filesystem::remove_all(directory);
}
