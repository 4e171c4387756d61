// io_bench: what a drive gives our own I/O path (tools/drive_benchmark.h).
//
// By itself it prints the rates of the bare device as one JSON object. With --turns it runs what
// standard input says, line by line, so that tools/drive_bench can let it and fio take turns:
// "store|device read|write|mixed SECONDS" is answered with bytes per second.

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/byte_size.h"
#include "base/status_macros.h"
#include "tools/drive_benchmark.h"

namespace offload::tools {
namespace {

struct Flags {
  DriveBenchmarkOptions drive;
  double seconds_per_pattern = 2;
  bool takes_turns = false;
};

// The exit code, or -1 to go on.
int ParseFlags(int argc, char** argv, Flags& flags) {
  const std::map<std::string, aio::Engine> engines = {{"auto", aio::Engine::kAuto},
                                                      {"uring", aio::Engine::kUring},
                                                      {"libaio", aio::Engine::kLibaio},
                                                      {"threads", aio::Engine::kThreads}};
  DriveBenchmarkOptions& drive = flags.drive;
  drive.pool = ".";
  std::string size = "1GiB", block = "1MiB", checksums = "thread";
  CLI::App app(
      "For example:\n  io_bench --path /nvme0 --seconds 5\n"
      "  echo store read 2 | io_bench --path /nvme0 --block 64KiB --turns\n\n"
      "Measures a drive with direct reads, direct writes and the mix of a training step.");
  app.name("io_bench");
  app.option_defaults()->always_capture_default();
  app.add_option("--path", drive.pool, "a directory on the drive");
  app.add_option("--size", size, "of the scratch file, which holds two places of each block");
  app.add_option("--seconds", flags.seconds_per_pattern, "of each of the three patterns")
      ->check(CLI::Range(0.05, 600.0));
  app.add_option("--io", drive.engine, std::string(aio::kEngineNames))
      ->transform(CLI::CheckedTransformer(engines));
  app.add_option("--block", block, "bytes of one transfer");
  app.add_option("--depth", drive.depth, "blocks under way");
  app.add_option("--register", drive.registers_buffers, "whether buffers are registered");
  app.add_flag("--turns", flags.takes_turns, "runs what standard input says, on device and store");
  app.add_option("--scratch", drive.scratch_path, "a name for the scratch file, which then stays");
  app.add_option("--checksums", checksums,
                 "of the store: on a thread of their own, or inline on the polling one")
      ->check(CLI::IsMember({"thread", "inline"}));
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<uint64_t> file_bytes = ParseByteSize(size),
                                 block_bytes = ParseByteSize(block);
  for (const absl::Status& status : {file_bytes.status(), block_bytes.status()}) {
    if (status.ok()) continue;
    std::cerr << status.message() << std::endl;
    return 2;
  }
  drive.file_bytes = *file_bytes;
  drive.block_bytes = *block_bytes;
  drive.checksums_on_thread = checksums == "thread";
  drive.has_store = flags.takes_turns;
  return -1;
}

absl::StatusOr<double> RunLine(DriveBenchmark& benchmark, const std::string& line) {
  using Pattern = DriveBenchmark::Pattern;
  using Through = DriveBenchmark::Through;
  const std::map<std::string, Pattern> patterns = {
      {"read", Pattern::kRead}, {"write", Pattern::kWrite}, {"mixed", Pattern::kMixed}};
  const std::map<std::string, Through> ways = {{"device", Through::kDevice},
                                               {"store", Through::kStore}};
  std::istringstream words(line);
  std::string way, pattern;
  double seconds = 0;
  words >> way >> pattern >> seconds;
  if (!words || !ways.contains(way) || !patterns.contains(pattern)) {
    return absl::InvalidArgumentError("say: store|device read|write|mixed SECONDS");
  }
  return benchmark.Run(ways.at(way), patterns.at(pattern), seconds);
}

absl::Status TakeTurns(const Flags& flags) {
  OFFLOAD_ASSIGN_OR_RETURN(const auto benchmark, DriveBenchmark::Make(flags.drive));
  for (std::string line; std::getline(std::cin, line);) {
    OFFLOAD_ASSIGN_OR_RETURN(const double rate, RunLine(*benchmark, line));
    std::cout << rate << std::endl;
  }
  return absl::OkStatus();
}

absl::Status PrintRates(const Flags& flags) {
  OFFLOAD_ASSIGN_OR_RETURN(const DriveRates rates,
                           MeasureDrive(flags.drive, flags.seconds_per_pattern));
  const nlohmann::ordered_json result = {
      {"path", flags.drive.pool},         {"engine", rates.engine},
      {"file_bytes", rates.file_bytes},   {"read_gbps", rates.read * 1e-9},
      {"write_gbps", rates.write * 1e-9}, {"mixed_gbps", rates.mixed * 1e-9}};
  std::cout << result.dump() << std::endl;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_logger_st("io_bench"));
  spdlog::set_level(spdlog::level::warn);
  Flags flags;
  if (const int code = ParseFlags(argc, argv, flags); code >= 0) return code;
  const absl::Status status = flags.takes_turns ? TakeTurns(flags) : PrintRates(flags);
  if (status.ok()) return 0;
  std::cerr << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) { return offload::tools::Main(argc, argv); }
