// io_bench: what a drive gives our own I/O path, as one JSON object. See tools/drive_benchmark.h
// for the patterns; tools/bench runs it between trainers.

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/byte_size.h"
#include "tools/drive_benchmark.h"

namespace offload::tools {
namespace {

int Main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_logger_st("io_bench"));
  spdlog::set_level(spdlog::level::warn);
  DriveBenchmarkOptions options;
  std::string path = ".", size = "1GiB";
  const std::map<std::string, aio::Engine> engines = {{"auto", aio::Engine::kAuto},
                                                      {"uring", aio::Engine::kUring},
                                                      {"libaio", aio::Engine::kLibaio},
                                                      {"threads", aio::Engine::kThreads}};
  CLI::App app(
      "For example:\n  io_bench --path /nvme0 --seconds 5\n\n"
      "Measures a drive with direct reads, direct writes and the mix of a training step.");
  app.name("io_bench");
  app.option_defaults()->always_capture_default();
  app.add_option("--path", path, "a directory on the drive; the scratch file there has no name");
  app.add_option("--size", size, "of the scratch file");
  app.add_option("--seconds", options.seconds_per_pattern, "of each of the three patterns")
      ->check(CLI::Range(0.05, 600.0));
  app.add_option("--io", options.engine, std::string(aio::kEngineNames))
      ->transform(CLI::CheckedTransformer(engines));
  CLI11_PARSE(app, argc, argv);

  const absl::StatusOr<uint64_t> file_bytes = ParseByteSize(size);
  if (!file_bytes.ok()) {
    std::cerr << file_bytes.status().message() << std::endl;
    return 2;
  }
  options.file_bytes = *file_bytes;
  const absl::StatusOr<DriveRates> rates = MeasureDrive(path, options);
  if (!rates.ok()) {
    std::cerr << rates.status().message() << std::endl;
    return 1;
  }
  const nlohmann::ordered_json result = {{"path", path},
                                         {"engine", rates->engine},
                                         {"file_bytes", rates->file_bytes},
                                         {"read_gbps", rates->read * 1e-9},
                                         {"write_gbps", rates->write * 1e-9},
                                         {"mixed_gbps", rates->mixed * 1e-9}};
  std::cout << result.dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) { return offload::tools::Main(argc, argv); }
