// block_bench: runs what it is told on standard input, line by line, so that tools/drive_bench can
// let it and fio take turns: "store|device read|write|mixed SECONDS" is answered with bytes per
// second. See tools/block_bench.h.

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "base/byte_size.h"
#include "tools/block_bench.h"

namespace offload::tools {
namespace {

absl::StatusOr<double> RunLine(BlockBench& bench, const std::string& line) {
  const std::map<std::string, BlockBench::Pattern> patterns = {
      {"read", BlockBench::Pattern::kRead},
      {"write", BlockBench::Pattern::kWrite},
      {"mixed", BlockBench::Pattern::kMixed}};
  std::istringstream words(line);
  std::string target, pattern;
  double seconds = 0;
  words >> target >> pattern >> seconds;
  const auto found = patterns.find(pattern);
  if (!words || found == patterns.end() || (target != "store" && target != "device")) {
    return absl::InvalidArgumentError("say: store|device read|write|mixed SECONDS");
  }
  return target == "store" ? bench.RunStore(found->second, seconds)
                           : bench.RunDevice(found->second, seconds);
}

int Main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_logger_st("block_bench"));
  spdlog::set_level(spdlog::level::warn);
  BlockBenchOptions options;
  options.pool = ".";
  std::string block = "1MiB", size = "256MiB", engine = "auto", checksums = "thread";
  CLI::App app(
      "For example:\n  echo store read 2 | block_bench --path /nvme0 --block 64KiB\n\n"
      "Moves blocks through the store or the bare device, as standard input says.");
  app.name("block_bench");
  app.add_option("--path", options.pool, "a directory on the drive");
  app.add_option("--scratch", options.scratch_path,
                 "a name for the device's file, which then stays");
  app.add_option("--block", block, "bytes of one transfer");
  app.add_option("--size", size, "of the data; files take twice as much");
  app.add_option("--depth", options.depth, "blocks under way");
  app.add_option("--io", engine, std::string(aio::kEngineNames));
  app.add_option("--checksums", checksums,
                 "thread: on one of their own; inline: on the polling one")
      ->check(CLI::IsMember({"thread", "inline"}));
  app.add_option("--register", options.registers_buffers, "whether buffers are registered");
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<uint64_t> block_bytes = ParseByteSize(block),
                                 data_bytes = ParseByteSize(size);
  const std::optional<aio::Engine> known = aio::EngineOfName(engine);
  if (!block_bytes.ok() || !data_bytes.ok() || !known.has_value()) {
    std::cerr << "block_bench: --block, --size or --io cannot be read" << std::endl;
    return 2;
  }
  options.block_bytes = *block_bytes;
  options.data_bytes = *data_bytes;
  options.engine = *known;
  options.checksums_on_thread = checksums == "thread";
  const absl::StatusOr<std::unique_ptr<BlockBench>> bench = BlockBench::Make(options);
  absl::Status status = bench.status();
  for (std::string line; status.ok() && std::getline(std::cin, line);) {
    const absl::StatusOr<double> rate = RunLine(**bench, line);
    status = rate.status();
    if (rate.ok()) std::cout << *rate << std::endl;
  }
  if (status.ok()) return 0;
  std::cerr << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) { return offload::tools::Main(argc, argv); }
