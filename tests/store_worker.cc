// A process that lives on one store, for tests that kill it and cut its power. The oracle, a file
// that must stand elsewhere, outlives it: a line "pending N" before commit N is begun, a line
// "acked N" when it has been acknowledged. `check` opens what is left and judges it by these lines.
//
//   store_worker write POOL ORACLE [--epochs N] [--pause] [--lock-timeout SECONDS] [--reports FILE]
//   store_worker check POOL ORACLE [--lock-timeout SECONDS]
//
// Both print one line of JSON at the end; the exit code is 1, and "error" is there, when the store
// says no or what it holds is wrong. With --pause a writer, after its epochs, waits for a byte on
// standard input, writes the extents of one more epoch without a commit, prints "written", and
// waits for the end of standard input. The file of --reports is replaced after every epoch, when
// nothing is under way, by what the process then holds.

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/posix_io.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"
#include "swap/fsck.h"
#include "swap/store_fixture.h"

namespace offload::swap {
namespace {

struct Options {
  std::string pool, oracle, reports;
  uint64_t epochs = 1;
  bool pause = false;
  double lock_timeout_seconds = 30;

  StoreOptions ForStore() const {
    StoreOptions options;
    options.lock_timeout_seconds = lock_timeout_seconds;
    return options;
  }
};

// Each line is one write, so that a kill leaves whole lines.
class Oracle {
 public:
  explicit Oracle(const std::string& path)
      : file_(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) {}

  absl::Status Note(const char* what, uint64_t sequence) const {
    const std::string line = absl::StrCat(what, " ", sequence, "\n");
    return WriteFully(file_.get(), std::as_bytes(std::span(line)));
  }

  // The last numbers of both kinds; 0 for none.
  struct Words {
    uint64_t pending = 0, acked = 0;
  };
  static Words Read(const std::string& path) {
    std::ifstream lines(path);
    Words words;
    std::string what;
    for (uint64_t sequence; lines >> what >> sequence;)
      (what == "acked" ? words.acked : words.pending) = sequence;
    return words;
  }

 private:
  UniqueFd file_;
};

absl::Status CommitNoted(Store& store, const Oracle& oracle) {
  const bool first = store.committed().sequence == 0;
  const uint64_t sequence = store.open_sequence();
  OFFLOAD_RETURN_IF_ERROR(oracle.Note("pending", sequence));
  OFFLOAD_RETURN_IF_ERROR(CommitScript(store));
  if (first) OFFLOAD_RETURN_IF_ERROR(store.Publish());
  return oracle.Note("acked", sequence);
}

// Memory of its own, in RAM or swapped out. Not the pages of files: the kernel takes those and maps
// them again as it likes.
uint64_t PrivateBytes() {
  std::ifstream lines("/proc/self/smaps_rollup");
  uint64_t sum_kib = 0;
  for (std::string word; lines >> word;) {
    uint64_t value_kib = 0;
    if (word != "Anonymous:" && word != "Pss_Shmem:" && word != "Swap:") continue;
    if (lines >> value_kib) sum_kib += value_kib;
  }
  return sum_kib * 1024;
}

uint64_t DescriptorCount() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<uint64_t>(std::distance(begin(entries), end(entries))) - 1;  // less its own
}

// By a rename, so that a reader never sees half of it.
void Report(const std::string& path) {
  const nlohmann::json report = {{"private bytes", PrivateBytes()},
                                 {"descriptors", DescriptorCount()}};
  const std::string next = path + ".next";
  std::ofstream(next) << report;
  std::filesystem::rename(next, path);
}

absl::StatusOr<std::unique_ptr<Store>> OpenOrCreate(const Options& options) {
  auto store = Store::Open(options.pool, "job", options.ForStore());
  if (store.ok() || !absl::IsNotFound(store.status())) return store;
  return Store::Create(options.pool, SmallSpec(), options.ForStore());
}

absl::Status Write(const Options& options, nlohmann::ordered_json* result) {
  const Oracle oracle(options.oracle);
  OFFLOAD_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenOrCreate(options));
  (*result)["engine"] = std::string(store->device().engine());
  for (uint64_t epoch = 0; epoch < options.epochs; ++epoch) {
    OFFLOAD_RETURN_IF_ERROR(CommitNoted(*store, oracle));
    if (!options.reports.empty()) Report(options.reports);
  }
  (*result)["committed"] = store->committed().sequence;
  if (!options.pause) return absl::OkStatus();
  char byte;
  if (read(STDIN_FILENO, &byte, 1) != 1) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(WriteScript(*store));
  std::printf("written\n");
  std::fflush(stdout);
  while (read(STDIN_FILENO, &byte, 1) == 1) {
  }
  return absl::OkStatus();
}

// After an opening nothing is left to repair.
absl::Status CheckCopies(const Options& options) {
  OFFLOAD_ASSIGN_OR_RETURN(const FsckReport report, CheckStore(options.pool, "job", {}));
  if (report.findings.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("fsck: ", report.findings[0].what));
}

absl::Status Check(const Options& options, nlohmann::ordered_json* result) {
  const Oracle::Words words = Oracle::Read(options.oracle);
  const Clock& clock = Clock::Real();
  const double begin = clock.NowSeconds();
  auto opened = Store::Open(options.pool, "job", options.ForStore());
  (*result)["opening_seconds"] = clock.NowSeconds() - begin;
  (*result)["acked"] = words.acked;
  (*result)["found"] = 0;
  if (absl::IsNotFound(opened.status()) && words.acked == 0) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(opened.status());
  std::unique_ptr<Store> store = *std::move(opened);
  const uint64_t found = store->committed().sequence;
  (*result)["found"] = found;
  (*result)["engine"] = std::string(store->device().engine());
  if (found != words.acked && found != words.pending) {
    return absl::InternalError(absl::StrCat("found commit ", found, ", acknowledged ", words.acked,
                                            ", begun ", words.pending));
  }
  OFFLOAD_RETURN_IF_ERROR(CheckScript(*store, found));
  store.reset();
  // Somebody has seen it: from now on it must be there as if it had been acknowledged.
  if (found != words.acked) OFFLOAD_RETURN_IF_ERROR(Oracle(options.oracle).Note("acked", found));
  return CheckCopies(options);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Commits epochs to a store, or checks what is left of it.");
  app.require_subcommand(1);
  CLI::App* const write = app.add_subcommand("write", "commits epochs");
  CLI::App* const check = app.add_subcommand("check", "judges by the oracle");
  for (CLI::App* const command : {write, check}) {
    command->add_option("pool", options.pool)->required();
    command->add_option("oracle", options.oracle)->required();
    command->add_option("--lock-timeout", options.lock_timeout_seconds);
  }
  write->add_option("--epochs", options.epochs);
  write->add_flag("--pause", options.pause);
  write->add_option("--reports", options.reports);
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGXFSZ, SIG_IGN);          // as the daemon: a write beyond a limit is an error
  spdlog::set_level(spdlog::level::off);  // standard output is for the result

  nlohmann::ordered_json result;
  const absl::Status status = write->parsed() ? Write(options, &result) : Check(options, &result);
  if (!status.ok()) result["error"] = status.ToString();
  std::printf("%s\n", result.dump().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace offload::swap

int main(int argc, char** argv) { return offload::swap::Main(argc, argv); }
