// Runs the program as a user does: arguments in, standard output, standard error and exit code out.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "proto/offload.grpc.pb.h"
#include "swap/store.h"
#include "zero3/safetensors.h"

namespace offload::tools {
namespace {

using Json = nlohmann::ordered_json;

struct Result {
  int exit_code = -1;
  std::string out, error;
};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class OffloadctlTest : public ::testing::Test {
 protected:
  OffloadctlTest() {
    std::string name =
        absl::StrCat(std::getenv("TEST_TMPDIR") ? std::getenv("TEST_TMPDIR") : ".", "/ctl-XXXXXX");
    folder_ = mkdtemp(name.data());
    std::filesystem::create_directory(pool());
  }
  ~OffloadctlTest() override { std::filesystem::remove_all(folder_); }

  std::string pool() const { return folder_ / "pool"; }

  // `environment` is in front of the command, as in a shell.
  Result Run(const std::string& arguments, const std::string& environment = "",
             const std::string& program = "tools/offloadctl") const {
    const std::string out = folder_ / "out", error = folder_ / "error";
    const std::string command = absl::StrCat(
        "unset OFFLOADD_POOL OFFLOADD_RAM OFFLOADD_IO OFFLOADD_SOCKET OFFLOADD_CONFIG; ",
        environment, " ", program, " ", arguments, " >'", out, "' 2>'", error, "'");
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadFile(out), ReadFile(error)};
  }

  // The same with --json; fails the test unless stdout is one object that begins as promised.
  Json RunJson(const std::string& command, const std::string& arguments, int exit_code) const {
    const Result result = Run(absl::StrCat(command, " ", arguments, " --json"));
    EXPECT_EQ(result.exit_code, exit_code) << result.error;
    Json object = Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(object.is_object() && object.size() >= 2) << result.out;
    if (!object.is_object() || object.size() < 2) return Json::object();
    EXPECT_EQ(object.begin().key(), "schema_version");
    EXPECT_EQ(std::next(object.begin()).key(), "command");
    EXPECT_EQ(object["command"], command);
    return object;
  }

  // Makes a store of one small tensor with one commit.
  void MakeStore(const std::string& job) const {
    swap::StoreSpec spec;
    spec.job = job;
    spec.extent_elements = 32768;
    spec.tensors = {{.element_count = 1000, .planes = {{swap::Plane::kWeight, 32}}}};
    auto store = swap::Store::Create(pool(), spec, {});
    ASSERT_TRUE(store.ok()) << store.status();
    absl::Status committed = absl::UnknownError("never called");
    bool is_done = false;
    (*store)->Commit(/*epoch=*/7, "", [&](absl::Status status) {
      committed = status;
      is_done = true;
    });
    while (!is_done) (*store)->Poll(/*wait=*/true);
    ASSERT_TRUE(committed.ok()) << committed;
    ASSERT_TRUE((*store)->Publish().ok());
  }

  std::filesystem::path folder_;
};

TEST_F(OffloadctlTest, HelpOfEveryCommandBeginsWithAnExample) {
  for (const char* command :
       {"", "doctor", "plan", "status", "top", "report", "ls", "rm", "fsck", "snapshot", "export",
        "import", "config", "run", "explain", "version"}) {
    const Result result = Run(absl::StrCat(command, " --help"));
    EXPECT_EQ(result.exit_code, 0) << command;
    EXPECT_TRUE(result.out.starts_with(absl::StrCat("For example:\n  offloadctl ", command)))
        << result.out;
    for (const absl::string_view line : absl::StrSplit(result.out, '\n'))
      EXPECT_TRUE(line.size() <= 80 || absl::StartsWith(line, "  offloadctl ")) << line;
    EXPECT_EQ(result.out.find("=[]"), std::string::npos) << result.out;
  }
}

TEST_F(OffloadctlTest, SnapshotSaysWhatItWouldTakeAndDoesItWithYes) {
  MakeStore("run1");
  const std::string where = pool() + " run1 ";
  const Json would = RunJson("snapshot", "create " + where + "best", 0);
  EXPECT_EQ(would["created"], false);
  EXPECT_GT(would["grows_by_bytes"], 0);
  EXPECT_EQ(RunJson("snapshot", "ls " + where, 0)["snapshots"].size(), 0u);
  EXPECT_EQ(RunJson("snapshot", "create " + where + "best --yes", 0)["step"], 7);
  EXPECT_EQ(RunJson("snapshot", "create " + where + "best --yes", 1)["error"]["id"], "OFD-1216");
  const Json listed = RunJson("snapshot", "ls " + where, 0);
  ASSERT_EQ(listed["snapshots"].size(), 1u);
  EXPECT_EQ(listed["snapshots"][0]["name"], "best");
  EXPECT_EQ(listed["snapshots"][0]["step"], 7);
  EXPECT_EQ(RunJson("snapshot", "fork " + where + "best --as run2", 0)["forked"], false);
  EXPECT_EQ(RunJson("ls", pool(), 0)["jobs"].size(), 1u);
  const Json forked = RunJson("snapshot", "fork " + where + "best --as run2 --yes", 0);
  EXPECT_EQ(forked["step"], 7);
  for (const char* yes : {"", " --yes"}) {
    const Json again = RunJson("snapshot", "fork " + where + "best --as run2" + yes, 1);
    EXPECT_EQ(again["error"]["id"], "OFD-1205") << again;
  }
  EXPECT_EQ(RunJson("snapshot", "fork " + where + "best --as a/b", 2)["error"]["id"], "OFD-1002");
  EXPECT_EQ(RunJson("snapshot", "fork " + where + "best --as run3 --to /no/such", 1)["error"]["id"],
            "OFD-1201");
  const Json jobs = RunJson("ls", pool(), 0);
  ASSERT_EQ(jobs["jobs"].size(), 2u);
  EXPECT_EQ(jobs["jobs"][1]["step"], 7);
  EXPECT_EQ(jobs["jobs"][1]["file_bytes"], forked["file_bytes"]);
  EXPECT_EQ(RunJson("snapshot", "rm " + where + "best", 0)["removed"], false);
  EXPECT_EQ(RunJson("snapshot", "rm " + where + "best --yes", 0)["removed"], true);
  EXPECT_EQ(RunJson("snapshot", "ls " + where, 0)["snapshots"].size(), 0u);
  EXPECT_NE(Run("snapshot rm " + where + "best --yes").exit_code, 0);
  EXPECT_EQ(Run("snapshot fork " + where + " --yes").exit_code, 2) << "needs --as";
}

TEST_F(OffloadctlTest, WhatIsMissingLeadsToTheHelpOfItsCommand) {
  EXPECT_NE(Run("ls").error.find("POOL is required. See offloadctl ls --help."), std::string::npos)
      << Run("ls").error;
  EXPECT_NE(Run("").error.find("no command is given. See offloadctl --help."), std::string::npos);
  EXPECT_NE(Run("config check").error.find("offloadctl config check FILE"), std::string::npos);
}

TEST_F(OffloadctlTest, TellsItsVersionAsAFlagToo) {
  const Result flag = Run("--version");
  EXPECT_EQ(flag.exit_code, 0) << flag.error;
  EXPECT_TRUE(flag.out.starts_with("offloadctl ")) << flag.out;
}

TEST_F(OffloadctlTest, UnknownFlagsAndCommandsGetASuggestion) {
  const Result flag = Run("plan --parms 1M");
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_TRUE(flag.error.starts_with("OFD-1001 unknown flag --parms. Did you mean --params?"))
      << flag.error;
  EXPECT_EQ(flag.out, "");
  const Result command = Run("docter");
  EXPECT_EQ(command.exit_code, 2);
  EXPECT_NE(command.error.find("Did you mean doctor?"), std::string::npos) << command.error;
  EXPECT_EQ(Run("").exit_code, 2);
  EXPECT_EQ(Run("version superfluous").exit_code, 2);
}

TEST_F(OffloadctlTest, UsageErrorsAreJsonToo) {
  EXPECT_EQ(RunJson("plan", "--parms 1M", 2)["error"]["id"], "OFD-1001");
  EXPECT_EQ(RunJson("plan", "--params 1M --ram much", 2)["error"]["id"], "OFD-1002");
}

TEST_F(OffloadctlTest, ExplainKnowsEveryIdentifierThatItLists) {
  const Json all = RunJson("explain", "", 0);
  ASSERT_GT(all["errors"].size(), 20u);
  const Json one = RunJson("explain", "ofd-1203", 0);
  EXPECT_EQ(one["id"], "OFD-1203");
  EXPECT_NE(one["fix"], "");
  const Result near = Run("explain OFD-1293");
  EXPECT_EQ(near.exit_code, 2);
  EXPECT_NE(near.error.find("Did you mean OFD-1203?"), std::string::npos) << near.error;
}

TEST_F(OffloadctlTest, BashCompletesCommandsFlagsAndValuesAndLeavesFilesToItself) {
  const std::string script = folder_ / "completion";
  std::ofstream(script) << Run("completion bash").out
                        << "COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1))\n"
                           "_offloadctl offloadctl \"${!#}\" \"${@:$COMP_CWORD:1}\"\n"
                           "echo \"${COMPREPLY[@]}\"\n";
  // What is there for the last of the words.
  const auto completed = [&](const std::string& words) {
    return Run(absl::StrCat(script, " offloadctl ", words), "", "bash").out;
  };
  EXPECT_EQ(completed("do"), "doctor\n");
  EXPECT_EQ(completed("plan --opt"), "--optimizer\n");
  EXPECT_EQ(completed("plan --optimizer ada"), "adamw adam adagrad\n");
  EXPECT_EQ(completed("config ''"), "check dump import schema\n");
  EXPECT_EQ(completed("config check ./"), "\n") << "a file";
  EXPECT_EQ(completed("plan --safetensors ./"), "\n") << "a file";
  EXPECT_EQ(completed("run --nvme-path /nvme0 -- ./tr"), "\n") << "a file";
  EXPECT_EQ(completed("run --nvme-path /nvme0 -- ./trainer --r"), "\n") << "the trainer's";
}

TEST_F(OffloadctlTest, EveryShellCompletesWhatHelpLists) {
  const Result help = Run("plan --help");
  const std::string bash = Run("completion bash").out, zsh = Run("completion zsh").out,
                    fish = Run("completion fish").out;
  int flags = 0;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(help.out, '\n'))) {
    if (!absl::StartsWith(line, "  --")) continue;
    const std::string flag = line.substr(2, line.find_first_of(" ,", 2) - 2);
    EXPECT_NE(bash.find(flag), std::string::npos) << flag;
    EXPECT_NE(zsh.find(absl::StrCat("'", flag)), std::string::npos) << flag;
    EXPECT_NE(fish.find(absl::StrCat("-l ", flag.substr(2), " ")), std::string::npos) << flag;
    ++flags;
  }
  EXPECT_GT(flags, 15);
  EXPECT_EQ(Run("completion tcsh").exit_code, 2);
  for (const std::string shell : {"bash", "zsh", "fish"}) {
    if (std::system(absl::StrCat("command -v ", shell, " >/dev/null").c_str()) != 0) continue;
    const std::string script = folder_ / shell;
    std::ofstream(script) << Run("completion " + shell).out;
    EXPECT_EQ(Run("-n " + script, "", shell).exit_code, 0) << shell;
  }
}

TEST_F(OffloadctlTest, RunHasACodeOfItsOwnForWhatIsNotTheProgramsEnd) {
  const std::string flags = absl::StrCat("--nvme-path ", pool(), " --ram 1GiB");
  EXPECT_EQ(Run("run " + flags + " -- ./no-such-trainer").exit_code, 125);
  EXPECT_EQ(Run("run " + flags).exit_code, 125) << "no program";
  EXPECT_EQ(RunJson("run", flags + " -- ./no-such-trainer", 125)["error"]["exit_code"], 125);
}

TEST_F(OffloadctlTest, ConfigCheckNamesLineColumnAndTheNearestKey) {
  const std::filesystem::path file = folder_ / "offloadd.toml";
  std::ofstream(file) << "job = \"run1\"\nmemory = { ram = \"1GiB\" }\n";
  EXPECT_EQ(RunJson("config", "check " + file.string(), 0)["settings"].size(), 2u);
  std::ofstream(file) << "memroy = { ram = \"1GiB\" }\n";
  const Result wrong = Run("config check " + file.string());
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.error.find(":1:12: unknown key \"memroy.ram\". Did you mean \"memory.ram\"?"),
            std::string::npos)
      << wrong.error;
  EXPECT_EQ(Run("config check").exit_code, 2) << "needs a file";
}

TEST_F(OffloadctlTest, ConfigDumpSaysWhereSettingsComeFrom) {
  const std::filesystem::path file = folder_ / "offloadd.toml";
  std::ofstream(file) << "job = \"file\"\nio.engine = \"libaio\"\n";
  const Result dump = Run("config dump --origin --set memory.ram=2GiB",
                          absl::StrCat("OFFLOADD_JOB=env OFFLOADD_CONFIG=", file.string()));
  EXPECT_EQ(dump.exit_code, 0) << dump.error;
  for (const std::string& line :
       {std::string("job                env              env OFFLOADD_JOB\n"),
        std::string("memory.ram         2GiB             flag --set\n"),
        "io.engine          libaio           " + file.string() + ":2\n",
        std::string("durability         step             default\n")}) {
    EXPECT_NE(dump.out.find(line), std::string::npos) << dump.out;
  }
  EXPECT_EQ(Run("config dump --set memory.ram=lots").exit_code, 2);
  EXPECT_GT(RunJson("config", "schema", 0)["keys"].size(), 8u);
}

TEST_F(OffloadctlTest, ConfigImportWritesWhatItMapsOrNothing) {
  const std::string file = folder_ / "ds.json", toml = folder_ / "out.toml";
  std::ofstream(file) << R"({"zero_optimization": {"stage": 3, "offload_optimizer":
                             {"device": "nvme", "nvme_path": "/nvme0"}}, "gradient_clipping": 1})";
  const Json import = RunJson("config", absl::StrCat("import ", file, " -o ", toml), 0);
  EXPECT_EQ(import["settings"]["pool"], "/nvme0");
  EXPECT_EQ(import["training"]["gradient_clipping"], 1.0);
  EXPECT_EQ(RunJson("config", "check " + toml, 0)["settings"].size(), 3u);
  std::filesystem::remove(toml);
  std::ofstream(file) << R"({"zero_optimization": {"zenflow": {}}})";
  const Result rejected = Run(absl::StrCat("config import ", file, " -o ", toml));
  EXPECT_EQ(rejected.exit_code, 2);
  EXPECT_TRUE(rejected.error.starts_with("OFD-1107 zero_optimization.zenflow")) << rejected.error;
  EXPECT_NE(rejected.out.find("0 mapped, 0 ignored, 0 trainer, 1 rejected."), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(toml));
  std::ofstream(file) << R"({"unknown": 1})";
  EXPECT_EQ(Run("config import " + file).exit_code, 0);
  EXPECT_EQ(Run("config import --strict " + file).exit_code, 2);
}

TEST_F(OffloadctlTest, VersionNamesProtocolAndFormat) {
  const Json version = RunJson("version", "", 0);
  EXPECT_TRUE(version["protocol"].is_number_unsigned());
  EXPECT_TRUE(version["store_format"].is_number_unsigned());
  EXPECT_TRUE(Run("version").out.starts_with("offloadctl "));
}

TEST_F(OffloadctlTest, DoctorPassesAGoodPoolAndFailsABadOne) {
  const Json good = RunJson("doctor", absl::StrCat("--pool ", pool()), 0);
  EXPECT_EQ(good["fail"], 0);
  const Json bad = RunJson("doctor", absl::StrCat("--pool ", pool(), "/missing"), 3);
  EXPECT_EQ(bad["fail"], 1);
  EXPECT_EQ(bad["next"], "offloadctl explain OFD-1201");
  const Result text = Run(absl::StrCat("doctor --pool ", pool()));
  EXPECT_NE(text.out.find("Storage  OK"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("\nGPU      "), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("Next: offloadctl plan"), std::string::npos) << text.out;
}

// As a trainer takes it, and as OFFLOADD_POOL names several.
TEST_F(OffloadctlTest, DoctorLooksAtEachOfSeveralPools) {
  const std::string both = absl::StrCat(pool(), ",", pool(), "/missing");
  for (const Result& text :
       {Run("doctor --pool " + both), Run("doctor", "OFFLOADD_POOL=" + both)}) {
    EXPECT_EQ(text.exit_code, 3);
    EXPECT_NE(text.out.find(absl::StrCat("Storage  OK    ", pool(), " ")), std::string::npos)
        << text.out;
    EXPECT_NE(text.out.find(absl::StrCat("Storage  FAIL  ", pool(), "/missing ")),
              std::string::npos)
        << text.out;
  }
}

// Of two devices, as a driver and a plug-in that stand in have them.
TEST_F(OffloadctlTest, DoctorMeasuresTheCopiesOfDevices) {
  const Result text =
      Run(absl::StrCat("doctor --pool ", pool()),
          "LD_LIBRARY_PATH=tools OFFLOADD_CUDA_PLUGIN=accelerator/libstandin_plugin.so");
  EXPECT_EQ(text.exit_code, 0) << text.out << text.error;
  EXPECT_NE(text.out.find("Fake GPU 1"), std::string::npos) << text.out;
  for (const char* device : {"cuda:0", "cuda:1"}) {
    const size_t copies = text.out.find(absl::StrCat(device, " copies"));
    ASSERT_NE(copies, std::string::npos) << text.out;
    const std::string line = text.out.substr(copies, text.out.find('\n', copies) - copies);
    EXPECT_NE(line.find("GB/s to the device"), std::string::npos) << line;
    EXPECT_NE(line.find("it reads the slab itself"), std::string::npos) << line;
  }
}

TEST_F(OffloadctlTest, StrictDoctorFailsOnWarnings) {
  EXPECT_EQ(Run("doctor", "OFFLOADD_IO=threads").exit_code, 0);
  const Result strict = Run("doctor --strict", "OFFLOADD_IO=threads");
  EXPECT_EQ(strict.exit_code, 3);
  EXPECT_NE(strict.out.find("Engine   WARN"), std::string::npos) << strict.out;
}

TEST_F(OffloadctlTest, PlanAddsUpToTheBudget) {
  const Json plan = RunJson(
      "plan", "--params 100M --ram 512MiB --read-gbps 2 --write-gbps 1 --mixed-gbps 2.5", 0);
  EXPECT_TRUE(plan["fits"].get<bool>());
  const Json& memory = plan["memory"];
  const uint64_t sum = memory["slab_bytes"].get<uint64_t>() +
                       memory["region_bytes"].get<uint64_t>() +
                       memory["overhead_bytes"].get<uint64_t>();
  EXPECT_EQ(sum, memory["sum_bytes"].get<uint64_t>());
  EXPECT_LE(sum, uint64_t{512} << 20);
  EXPECT_GT(plan["per_step"]["seconds"]["serial"], plan["per_step"]["seconds"]["overlapped"]);
  EXPECT_TRUE(plan["per_step"]["seconds"]["mixed"].is_number());
}

TEST_F(OffloadctlTest, PlanKnowsTheLinkOfADevice) {
  const std::string model = "--params 100M --ram 512MiB --read-gbps 2 --write-gbps 1 ";
  const Json plan = RunJson("plan",
                            model +
                                "--gpu-ram 2GiB --to-device-gbps 10 --to-host-gbps 5 "
                                "--compute-seconds 0.01 --micro-batches 3",
                            0);
  const Json& link = plan["link"];
  EXPECT_EQ(link["to_device_bytes"].get<uint64_t>(), 2 * plan["parameters"].get<uint64_t>());
  EXPECT_EQ(link["to_host_bytes"].get<uint64_t>(), 3 * plan["gradient_bytes"].get<uint64_t>());
  EXPECT_DOUBLE_EQ(link["seconds"].get<double>(),
                   static_cast<double>(link["to_host_bytes"].get<uint64_t>()) / 5e9);
  EXPECT_EQ(plan["bound"]["bound_by"], "drive");
  EXPECT_EQ(plan["bound"]["link_seconds"], link["seconds"]);
  EXPECT_EQ(RunJson("plan", model + "--gpu-ram 2GiB --advise", 0)["budgets"].is_array(), true);
  EXPECT_TRUE(RunJson("plan", model + "--compute-seconds 9", 0)["bound"]["seconds"].is_number());
  const Json estimate = RunJson("plan", model + "--tokens 1000 --gflops 100", 0);
  const double operations = 6.0 * 1000 * estimate["parameters"].get<double>();
  EXPECT_TRUE(estimate["bound"]["compute_is_estimated"].get<bool>());
  EXPECT_NEAR(estimate["bound"]["compute_seconds"].get<double>(), 1.3 * operations / 100e9,
              0.01 * operations / 100e9)
      << "norms are no matrices";
  for (const char* wrong : {"--tokens 1000", "--tokens 1000 --gflops 100 --compute-seconds 9",
                            "--device cuda:0", "--gpu-ram 2GiB --to-host-gbps 5",
                            "--gpu-ram 2GiB --device gpu", "--gpu-ram 2GiB --ranks 2"})
    EXPECT_EQ(RunJson("plan", model + wrong, 2)["error"]["id"], "OFD-1002") << wrong;
}

TEST_F(OffloadctlTest, PlanCountsTheRegionsOfAllRanks) {
  const Json one = RunJson("plan", "--params 100M --ram 1GiB", 0);
  const Json two = RunJson("plan", "--params 100M --ram 1GiB --ranks 2", 0);
  const Json& memory = two["memory"];
  EXPECT_EQ(memory["slab_bytes"].get<uint64_t>() + memory["region_bytes"].get<uint64_t>() +
                memory["overhead_bytes"].get<uint64_t>(),
            memory["sum_bytes"].get<uint64_t>());
  EXPECT_LE(memory["sum_bytes"].get<uint64_t>(), uint64_t{1} << 30);
  EXPECT_GT(two["floor_bytes"].get<uint64_t>(), one["floor_bytes"].get<uint64_t>());
  // 200 MB of gradients in each of them.
  const Json reduced =
      RunJson("plan", "--params 100M --ram 1GiB --ranks 2 --gradients reduced_by_trainer", 0);
  EXPECT_GT(reduced["memory"]["region_bytes"].get<uint64_t>(), 400'000'000u);
  EXPECT_EQ(RunJson("plan", "--params 100M --ram 1GiB --ranks 0", 2)["error"]["id"], "OFD-1002");
}

TEST_F(OffloadctlTest, PlanRefusesASmallBudgetWithBothFloors) {
  const Json plan = RunJson("plan", "--params 100M --ram 1MiB", 3);
  EXPECT_FALSE(plan["fits"].get<bool>());
  EXPECT_EQ(plan["error"]["id"], "OFD-1301");
  EXPECT_LT(plan["floor_bytes"], plan["floor_without_spilling_bytes"]);
  const Json device = RunJson("plan", "--params 100M --ram 1GiB --gpu-ram 1MiB", 3);
  EXPECT_EQ(device["error"]["id"], "OFD-2003");
}

TEST_F(OffloadctlTest, PlanReadsTheConfigurationOfACheckpoint) {
  std::ofstream(folder_ / "config.json")
      << R"({"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376,
            "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 32000})";
  const Json file = RunJson("plan", absl::StrCat(folder_.string(), "/config.json --ram 1GiB"), 0);
  const Json folder =
      RunJson("plan", absl::StrCat("--config ", folder_.string(), " --ram 1GiB"), 0);
  EXPECT_EQ(file["parameters"], 51'747'328);
  EXPECT_EQ(folder["parameters"], file["parameters"]);
}

TEST_F(OffloadctlTest, PlanReadsTheTensorsOfACheckpoint) {
  const std::string path = folder_ / "model.safetensors";
  const std::vector<zero3::FileTensor> tensors = {
      {"weight", zero3::FileDtype::kBF16, {300, 200}},
      {"bias", zero3::FileDtype::kF32, {7}},
      {"positions", zero3::FileDtype::kI64, {64}},
      {"layers.0.rotary_emb.inv_freq", zero3::FileDtype::kF32, {32}}};
  auto writer = zero3::SafetensorsWriter::Create(path, tensors);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const zero3::FileTensor& tensor : tensors) {
    const std::vector<std::byte> zeros(*zero3::DataBytes(tensor));
    ASSERT_TRUE((*writer)->Append(tensor.name, zeros).ok());
  }
  ASSERT_TRUE((*writer)->Commit().ok());
  for (const std::string& model : {path, folder_.string(), "--safetensors " + path}) {
    const Json plan = RunJson("plan", model + " --ram 1GiB", 0);
    EXPECT_EQ(plan["parameters"], 300 * 200 + 7) << model;
  }
  std::filesystem::resize_file(path, 4096);
  EXPECT_EQ(RunJson("plan", path + " --ram 1GiB", 1)["error"]["id"], "OFD-1401");
}

TEST_F(OffloadctlTest, PlanNeedsExactlyOneModelAndAWholeDrive) {
  EXPECT_EQ(Run("plan --ram 1GiB").exit_code, 2);
  EXPECT_EQ(Run("plan x.json --params 1M --ram 1GiB").exit_code, 2);
  EXPECT_EQ(Run("plan /no/such/config.json --ram 1GiB").exit_code, 2);
  EXPECT_EQ(Run("plan --params 1M --ram 1GiB --read-gbps 1").exit_code, 2);
}

TEST_F(OffloadctlTest, PlanMeasuresTheDriveOfAPoolAndLeavesNothingThere) {
  const Json plan = RunJson("plan", absl::StrCat("--params 1M --ram 1GiB --pool ", pool()), 0);
  EXPECT_EQ(plan["per_step"]["drive"]["source"], "measured");
  EXPECT_GT(plan["per_step"]["seconds"]["mixed"], 0);
  EXPECT_GT(plan["pool"]["free_bytes"], plan["store_bytes"]);
  EXPECT_TRUE(std::filesystem::is_empty(pool()));
}

TEST_F(OffloadctlTest, PlanRefusesAPoolThatCannotHoldStores) {
  EXPECT_EQ(RunJson("plan", "--params 1M --ram 1GiB --pool /dev/shm", 3)["error"]["id"],
            "OFD-1203");
  EXPECT_EQ(RunJson("plan", "--params 1M --ram 1GiB --pool /no/such", 1)["error"]["id"],
            "OFD-1201");
}

TEST_F(OffloadctlTest, ListShowsWhatAPoolHolds) {
  const Result empty = Run("ls " + pool());
  EXPECT_EQ(empty.exit_code, 0) << empty.error;
  EXPECT_EQ(empty.out, "");
  MakeStore("run1");
  const Json jobs = RunJson("ls", pool(), 0)["jobs"];
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0]["job"], "run1");
  EXPECT_EQ(jobs[0]["step"], 7);
  EXPECT_EQ(jobs[0]["damage"], nullptr);
  EXPECT_NE(Run("ls " + pool()).out.find("run1"), std::string::npos);
  EXPECT_EQ(RunJson("ls", pool() + "/missing", 1)["error"]["id"], "OFD-1201");
}

TEST_F(OffloadctlTest, ListSaysWhichStoreCannotBeRead) {
  std::filesystem::create_directories(pool() + "/odd.offload");  // no file: damaged it is not
  const Result listed = Run("ls " + pool());
  EXPECT_EQ(listed.exit_code, 1) << listed.error;
  EXPECT_NE(listed.out.find("cannot be read: OFD-1202 "), std::string::npos) << listed.out;
  EXPECT_NE(listed.out.find("odd.offload is a folder"), std::string::npos) << listed.out;
  std::filesystem::remove(pool() + "/odd.offload");
  std::filesystem::create_symlink("/elsewhere", pool() + "/odd.offload");
  const Result linked = Run("ls " + pool());
  EXPECT_NE(linked.out.find("odd.offload is a symbolic link"), std::string::npos) << linked.out;
  EXPECT_EQ(listed.out.find("damaged"), std::string::npos) << listed.out;
}

TEST_F(OffloadctlTest, ListSaysWhichStoreIsDamaged) {
  MakeStore("run1");
  const std::string path = RunJson("ls", pool(), 0)["jobs"][0]["path"];
  std::filesystem::resize_file(path, 4096);
  EXPECT_NE(RunJson("ls", pool(), 6)["jobs"][0]["damage"], nullptr);
  for (const char* action : {"ls ", "create ", "create --yes "})  // not that it has no snapshots
    EXPECT_EQ(RunJson("snapshot", absl::StrCat(action, pool(), " run1 best"), 6)["error"]["id"],
              "OFD-1207");
}

TEST_F(OffloadctlTest, AnswersThatCannotBeWrittenAreAFailure) {
  const std::string to_full = absl::StrCat(" >/dev/full 2>'", folder_.string(), "/error' #");
  for (const char* command : {"version", "explain", "--help", "config schema --json"}) {
    const Result result = Run(command + to_full);
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_EQ(result.error.find("OFD-1404 standard output cannot be written"), 0u) << result.error;
  }
}

TEST_F(OffloadctlTest, LimitOfTheSizeOfFilesIsNamed) {
  MakeStore("run1");
  for (const std::string& command :
       {absl::StrCat("plan --params 1M --ram 1GiB --pool ", pool()),
        absl::StrCat("snapshot create ", pool(), " run1 best --yes"),
        absl::StrCat("snapshot fork ", pool(), " run1 --as run2 --yes"),
        absl::StrCat("fsck ", pool(), " run1")}) {
    // Through a pipe, which no limit is for.
    const Result result = Run(command + " 2>&1 | cat", "ulimit -f 2;");
    EXPECT_NE(result.out.find("(ulimit -f)"), std::string::npos) << command << ": " << result.out;
  }
}

TEST_F(OffloadctlTest, ImportRefusesStepsThatNobodyCouldHaveTaken) {
  for (const char* step : {"99999999999999999999", "-1", "9007199254740993"}) {
    const Json answer =
        RunJson("import", absl::StrCat(pool(), " run1 folder --as run2 --step ", step), 2);
    EXPECT_NE(std::string(answer["error"]["text"]).find("--step"), std::string::npos) << answer;
  }
}

TEST_F(OffloadctlTest, RemoveIsADryRunUntilYes) {
  MakeStore("run1");
  EXPECT_FALSE(RunJson("rm", pool() + " run1", 0)["removed"].get<bool>());
  EXPECT_EQ(RunJson("ls", pool(), 0)["jobs"].size(), 1u);
  EXPECT_TRUE(RunJson("rm", pool() + " run1 --yes", 0)["removed"].get<bool>());
  EXPECT_EQ(RunJson("ls", pool(), 0)["jobs"].size(), 0u);
  EXPECT_EQ(Run("rm " + pool() + " run1 --yes").exit_code, 2);
}

TEST_F(OffloadctlTest, FsckReadsAStoreAndRepairsACopyFromItsTwin) {
  MakeStore("run1");
  const std::string arguments = pool() + " run1";
  EXPECT_TRUE(RunJson("fsck", arguments, 0)["clean"].get<bool>());
  {
    std::fstream file(pool() + "/run1.offload", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 100);  // the second header
    file.put('x');
  }
  const Json damaged = RunJson("fsck", arguments, 6);
  ASSERT_EQ(damaged["findings"].size(), 1u);
  EXPECT_FALSE(damaged["findings"][0]["lost"].get<bool>());
  EXPECT_NE(Run("fsck " + arguments).error.find("--repair"), std::string::npos);
  EXPECT_TRUE(RunJson("fsck", arguments + " --repair", 0)["findings"][0]["repaired"].get<bool>());
  EXPECT_TRUE(RunJson("fsck", arguments, 0)["clean"].get<bool>());
  EXPECT_EQ(Run("fsck " + pool() + " run2").exit_code, 2);
}

TEST_F(OffloadctlTest, RemoveLeavesAStoreInUseAlone) {
  MakeStore("run1");
  const auto store = swap::Store::Open(pool(), "run1", {});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(RunJson("rm", pool() + " run1 --yes", 1)["error"]["id"], "OFD-1205");
  EXPECT_TRUE(std::filesystem::exists((*store)->path()));
}

// What a whole job looks like in files: python/tests/serving_test.py.
TEST_F(OffloadctlTest, ExportRefusesWhatItCannotRead) {
  MakeStore("run1");
  const std::string to = " '" + (folder_ / "weights").string() + "'";
  EXPECT_EQ(RunJson("export", pool() + " run2" + to, 2)["error"]["id"], "OFD-1002");
  EXPECT_EQ(RunJson("export", pool() + " run1" + to, 6)["error"]["id"], "OFD-1207")
      << "nobody has said what its tensors are";
  EXPECT_EQ(RunJson("export", pool() + " run1" + to + " --snapshot best", 1)["error"]["id"],
            "OFD-1216");
  EXPECT_EQ(Run("export " + pool() + " run1" + to + " --dtype int8").exit_code, 2);
  EXPECT_EQ(Run("export " + pool() + " run1" + to + " --universal --dtype float32").exit_code, 2);
  EXPECT_EQ(RunJson("export", pool() + " run1" + to + " --universal", 6)["error"]["id"],
            "OFD-1207");
  const auto store = swap::Store::Open(pool(), "run1", {});
  ASSERT_TRUE(store.ok()) << store.status();
  const Json in_use = RunJson("export", pool() + " run1" + to, 1);
  EXPECT_EQ(in_use["error"]["id"], "OFD-1205");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "weights"));
}

TEST_F(OffloadctlTest, IoBenchPrintsTheRatesOfADrive) {
  const Result result =
      Run(absl::StrCat("--path ", pool(), " --size 96MiB --seconds 0.05"), "", "tools/io_bench");
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const Json rates = Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(rates.is_object()) << result.out;
  for (const char* rate : {"read_gbps", "write_gbps", "mixed_gbps"}) EXPECT_GT(rates[rate], 0);
  EXPECT_TRUE(std::filesystem::is_empty(pool()));
  EXPECT_EQ(Run("--path /no/such", "", "tools/io_bench").exit_code, 1);
}

// Answers as a daemon with one job would; every answer has read a million bytes more.
class FakeDaemon : public proto::v1::Control::Service {
 public:
  explicit FakeDaemon(const std::string& folder) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("unix:", folder, "/control.sock"),
                             grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    // The socket of ranks: that it is there is all that offloadctl looks for.
    ranks_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    absl::StrCat(folder, "/offloadd.sock").copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(ranks_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~FakeDaemon() override { server_->Shutdown(); }

  // Of its answers: as which of all daemons' answers each was given.
  const std::vector<int>& turns() const { return turns_; }

 private:
  grpc::Status Status(grpc::ServerContext*, const proto::v1::StatusRequest*,
                      proto::v1::StatusReply* reply) override {
    turns_.push_back(answers_of_all_++);
    reply->set_version("9.9.9");
    reply->set_uptime_seconds(8040);
    proto::v1::JobStatus* job = reply->add_jobs();
    job->set_job("train\x1b[31m");
    job->set_step(118);
    job->set_durable_step(117);
    job->set_bytes_read(bytes_read_ += 1'000'000);
    proto::v1::DeviceStatus* device = job->add_devices();
    device->set_file("store");
    device->mutable_read()->set_count(42);
    device->mutable_read()->set_p99_seconds(0.012);
    device->mutable_write()->set_errors(3);
    job->mutable_store_errors()->set_read_errors(3);
    job->mutable_scrub()->set_bad_extents(1);
    job->mutable_scrub()->add_bad_names("tensor 4, plane state0, index 2");
    return grpc::Status::OK;
  }

  inline static std::atomic<int> answers_of_all_{0};
  std::vector<int> turns_;
  std::atomic<uint64_t> bytes_read_{0};
  std::unique_ptr<grpc::Server> server_;
  UniqueFd ranks_;
};

class StatusTest : public OffloadctlTest {
 protected:
  StatusTest() {
    char name[] = "/tmp/ctl-XXXXXX";  // short: paths of sockets are limited
    runtime_ = mkdtemp(name);
    std::filesystem::create_directory(runtime_ / "offloadd-1");
  }
  ~StatusTest() override { std::filesystem::remove_all(runtime_); }

  std::string socket() const { return runtime_ / "offloadd-1/offloadd.sock"; }

  std::filesystem::path runtime_;
};

TEST_F(StatusTest, ShowsTheJobsOfADaemonAndTheirRates) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const Json status = RunJson("status", absl::StrCat("--interval 0.01 --socket ", socket()), 0);
  const Json& job = status["daemons"][0]["jobs"][0];
  EXPECT_EQ(job["step"], 118);
  EXPECT_EQ(job["durable_step"], 117);
  EXPECT_GT(job["read_bytes_per_second"], 0);
  ASSERT_EQ(job["devices"].size(), 1u);
  EXPECT_EQ(job["devices"][0]["read"]["count"], 42);
  EXPECT_EQ(job["devices"][0]["read"]["p99_seconds"], 0.012);
  EXPECT_EQ(job["devices"][0]["write"]["errors"], 3);
  const Result text = Run(absl::StrCat("status --interval 0.01 --socket ", socket()));
  EXPECT_NE(text.out.find("reads 42 (p50 0 ms, p99 12 ms"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("errors 0r/3w/0f"), std::string::npos) << text.out;
}

TEST_F(StatusTest, FindsPrivateDaemonsUnderTheRuntimeDirectory) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const Result result = Run("status --interval 0.01", "XDG_RUNTIME_DIR=" + runtime_.string());
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.out.find(socket() + " (private)  v9.9.9"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("up 2h14m"), std::string::npos) << result.out;
}

TEST_F(StatusTest, PausesOnceForAllDaemons) {
  std::filesystem::create_directory(runtime_ / "offloadd-2");
  const FakeDaemon one(runtime_ / "offloadd-1"), other(runtime_ / "offloadd-2");
  for (const std::string command : {"status --interval 0.01", "top --once --interval 0.01"}) {
    const size_t before = one.turns().size();
    const Result result = Run(command, "XDG_RUNTIME_DIR=" + runtime_.string());
    EXPECT_EQ(result.exit_code, 0) << result.error;
    ASSERT_EQ(one.turns().size(), before + 2) << command;
    ASSERT_EQ(other.turns().size(), before + 2) << command;
    EXPECT_LT(one.turns()[before], other.turns()[before + 1]) << command;
    EXPECT_LT(other.turns()[before], one.turns()[before + 1]) << command;
  }
}

TEST_F(StatusTest, NamesOfOthersDoNotReachTheTerminalAsControlCodes) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const Result result = Run(absl::StrCat("status --interval 0.01 --socket ", socket()));
  EXPECT_NE(result.out.find("train?[31m"), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
}

TEST_F(StatusTest, ShowsErrorsByKindAndWhatTheScrubberFound) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const std::string arguments = absl::StrCat("--interval 0.01 --socket ", socket());
  const std::string text = Run("status " + arguments).out;
  EXPECT_NE(text.find("read_errors 3  found_by_scrubber 1"), std::string::npos) << text;
  EXPECT_NE(text.find("tensor 4, plane state0, index 2"), std::string::npos) << text;
  EXPECT_EQ(text.find("write_errors"), std::string::npos) << "what did not happen is not shown";
  const Json job = RunJson("status", arguments, 0)["daemons"][0]["jobs"][0];
  EXPECT_EQ(job["errors"]["read_errors"], 3);
  EXPECT_EQ(job["errors"]["flush_errors"], 0);
  EXPECT_EQ(job["scrub"]["bad_names"][0], "tensor 4, plane state0, index 2");
}

TEST_F(StatusTest, TopLooksOnceWhereThereIsNoTerminal) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const std::string arguments = absl::StrCat("--interval 0.01 --socket ", socket());
  const Result text = Run("top " + arguments);
  EXPECT_EQ(text.exit_code, 0) << text.error;
  EXPECT_NE(text.out.find("offloadd 9.9.9"), std::string::npos) << text.out;
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos) << text.out;
  EXPECT_EQ(RunJson("top", "--once " + arguments, 0)["daemons"][0]["jobs"][0]["step"], 118);
  EXPECT_EQ(
      RunJson("top", absl::StrCat("--socket ", socket(), "x/offloadd.sock"), 4)["error"]["id"],
      "OFD-1501");
}

TEST_F(StatusTest, AReportIsOfAJobThatIsOpen) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const Json none = RunJson("report", "run1 --socket " + socket(), 2);
  EXPECT_EQ(none["error"]["id"], "OFD-1002");
  EXPECT_EQ(Run("report").exit_code, 2) << "needs a job";
}

TEST_F(StatusTest, SaysThatNobodyAnswers) {
  const Json none = RunJson("status", absl::StrCat("--socket ", socket()), 4)["error"];
  EXPECT_EQ(none["id"], "OFD-1501");
  EXPECT_NE(none.dump().find(absl::StrCat("no daemon answers at ", socket(), ": there is no ")),
            std::string::npos)
      << none.dump();
}

TEST_F(StatusTest, SaysWhichDaemonDoesNotAnswerInTime) {
  const std::string folder = runtime_ / "offloadd-1";
  std::filesystem::create_directory(folder);
  const UniqueFd stopped(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {.sun_family = AF_UNIX};
  absl::StrCat(folder, "/control.sock").copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(stopped.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(stopped.get(), 1), 0);
  const Json late = RunJson("status", absl::StrCat("--timeout 0.2 --socket ", socket()), 5);
  EXPECT_EQ(late["error"]["id"], "OFD-1501") << late;
  EXPECT_NE(late.dump().find(absl::StrCat("the daemon at ", socket(), " did not answer in time")),
            std::string::npos)
      << late;
}

TEST_F(StatusTest, DoctorSeesTheDaemon) {
  FakeDaemon daemon(runtime_ / "offloadd-1");
  const Result result = Run("doctor", "XDG_RUNTIME_DIR=" + runtime_.string());
  EXPECT_NE(result.out.find("v9.9.9, up 2h14m"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace offload::tools
