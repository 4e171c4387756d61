#include "config/settings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "config/toml_file.h"

namespace offload::config {
namespace {

std::string ErrorOf(const absl::Status& status) {
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kConfiguration) << status;
  return std::string(status.message());
}

std::string ErrorOfToml(const std::string& text) {
  Settings settings;
  return ErrorOf(ReadToml(text, "offloadd.toml", settings));
}

Settings FromToml(const std::string& text) {
  Settings settings;
  const absl::Status status = ReadToml(text, "offloadd.toml", settings);
  EXPECT_TRUE(status.ok()) << status;
  return settings;
}

TEST(SettingsTest, EveryKeyTakesItsOwnDefault) {
  for (const Key& key : AllKeys()) {
    Settings settings;
    EXPECT_EQ(settings.Get(key.name).value, key.otherwise);
    EXPECT_EQ(settings.Get(key.name).origin, "default");
    if (*key.otherwise == '\0') continue;
    EXPECT_TRUE(settings.Set(key.name, key.otherwise, "test").ok()) << key.name;
    EXPECT_EQ(settings.Get(key.name).origin, "test");
  }
}

TEST(SettingsTest, AValueThatDoesNotFitIsRefusedWithItsOrigin) {
  const struct {
    const char *key, *value;
  } wrong[] = {{"memory.ram", "lots"},
               {"memory.ram", ""},
               {"memory.ram", "-1"},
               {"memory.ram", "auto"},
               {"gpu.ram", "half"},
               {"gpu.device", ""},
               {"state.generations", "15"},
               {"state.generations", "two"},
               {"state.generations", "-1"},
               {"update.threads", "1.5"},
               {"io.engine", "aio"},
               {"policy.params", "gpu"},
               {"policy.optimizer", "1.5"},
               {"policy.optimizer", "-0.5"},
               {"policy.stage", "4"},
               {"policy.max_live", "1e9"},
               {"policy.gradients", "gpu"},
               {"durability", "always"},
               {"durability", "checkpoint:0"},
               {"durability", "checkpoint:x"},
               {"pool", "/a,,/b"},
               {"job", ""},
               {"state.layout", "compact8"},
               {"durability", "checkpoint:10m"}};
  for (const auto& each : wrong) {
    Settings settings;
    const std::string error = ErrorOf(settings.Set(each.key, each.value, "flag --x"));
    EXPECT_NE(error.find("flag --x"), std::string::npos) << error;
    EXPECT_NE(error.find(each.key), std::string::npos) << error;
    EXPECT_FALSE(settings.has(each.key));
  }
}

TEST(SettingsTest, AnUnknownKeyGetsASuggestion) {
  Settings settings;
  EXPECT_EQ(ErrorOf(settings.Set("memroy.ram", "1GiB", "flag --set")),
            "OFD-1003 flag --set: unknown key \"memroy.ram\". Did you mean \"memory.ram\"? "
            "offloadctl config schema lists the keys.");
}

TEST(SettingsTest, ArgumentsWinOverTheEnvironmentAndThatOverTheFile) {
  Settings settings = FromToml(
      "job = \"file\"\nmemory.ram = \"1GiB\"\nio.engine = \"libaio\"\ndurability = "
      "\"checkpoint:5\"\n");
  ASSERT_TRUE(
      ReadEnvironment({{"OFFLOADD_JOB", "env"}, {"OFFLOADD_RAM", "2GiB"}, {"OFFLOADD_IO", ""}},
                      settings)
          .ok());
  Settings arguments;
  ASSERT_TRUE(arguments.Set("job", "argument", "flag --job").ok());
  settings.Override(arguments);
  EXPECT_EQ(settings.Get("job").value, "argument");
  EXPECT_EQ(settings.Get("job").origin, "flag --job");
  EXPECT_EQ(settings.Get("memory.ram").origin, "env OFFLOADD_RAM");
  EXPECT_EQ(settings.Get("io.engine").value, "libaio") << "an empty variable is none";
  EXPECT_EQ(settings.Get("io.engine").origin, "offloadd.toml:3");
  EXPECT_EQ(settings.Get("state.layout").origin, "default");
}

TEST(SettingsTest, EverySettingIsAnOptionOfTheEngineOrTheOnlyChoice) {
  Settings settings;
  for (const Key& key : AllKeys()) {
    if (*key.otherwise != '\0') {
      ASSERT_TRUE(settings.Set(key.name, key.otherwise, "test").ok());
    }
  }
  ASSERT_TRUE(settings.Set("memory.ram", "1GiB", "test").ok());
  ASSERT_TRUE(settings.Set("pool", "/a", "test").ok());
  ASSERT_TRUE(settings.Set("gpu.device", "cuda:0", "test").ok());
  ASSERT_TRUE(settings.Set("policy.gradients", "nvme", "test").ok());
  ASSERT_TRUE(settings.Set("ranks.gradients", "sum", "test").ok());
  const auto options = settings.EngineOptions();
  // state.layout describes what is always so.
  EXPECT_EQ(options.size() + 1, AllKeys().size());
  const auto has = [&](const char* name, const char* value) {
    return std::find(options.begin(), options.end(),
                     std::pair<std::string, std::string>(name, value)) != options.end();
  };
  EXPECT_TRUE(has("ram", "1GiB"));
  EXPECT_TRUE(has("nvme_path", "/a"));
  EXPECT_TRUE(has("spill_gradients", "1"));
  EXPECT_TRUE(has("zero_stage", "-1"));
  EXPECT_TRUE(has("weights_home", "auto"));
  EXPECT_TRUE(has("gradient_average", "0"));
  EXPECT_TRUE(Settings().EngineOptions().empty());
  ASSERT_TRUE(settings.Set("ranks.gradients", "reduced_by_trainer", "test").ok());
  const auto reduced = settings.EngineOptions();
  EXPECT_EQ(reduced.size(), options.size());
  EXPECT_NE(std::find(reduced.begin(), reduced.end(),
                      std::pair<std::string, std::string>("gradients", "reduced_by_trainer")),
            reduced.end());
}

TEST(SettingsTest, AWrongVariableIsNamed) {
  Settings settings;
  const std::string error = ErrorOf(ReadEnvironment({{"OFFLOADD_RAM", "much"}}, settings));
  EXPECT_NE(error.find("env OFFLOADD_RAM"), std::string::npos) << error;
}

TEST(SettingsTest, WhatIsWrittenAsTomlIsReadBack) {
  Settings settings;
  ASSERT_TRUE(settings.Set("job", "a-b", "test\nline").ok());
  ASSERT_TRUE(settings.Set("pool", "/nvme \"0\" \\ c,/nvme 1", "test").ok());
  ASSERT_TRUE(settings.Set("state.generations", "3", "test").ok());
  ASSERT_TRUE(settings.Set("memory.ram", "1.5GiB", "test").ok());
  const Settings read = FromToml(settings.ToToml());
  for (const Key& key : AllKeys()) {
    EXPECT_EQ(read.has(key.name), settings.has(key.name)) << key.name;
    EXPECT_EQ(read.Get(key.name).value, settings.Get(key.name).value);
  }
}

TEST(TomlFileTest, PoolsAreATextAListOrTables) {
  EXPECT_EQ(FromToml("pool = \"/nvme0\"").Get("pool").value, "/nvme0");
  EXPECT_EQ(FromToml("pool = [\"/nvme0\", \"/nvme1\"]").Get("pool").value, "/nvme0,/nvme1");
  EXPECT_EQ(FromToml("pool = [{ path = \"/nvme0\" }, { path = \"/nvme1\" }]").Get("pool").value,
            "/nvme0,/nvme1");
  EXPECT_EQ(FromToml("[[pool]]\npath = \"/a\"\n[[pool]]\npath = \"/b\"\n").Get("pool").value,
            "/a,/b");
}

TEST(TomlFileTest, NumbersAreSizesAndCounts) {
  const Settings settings =
      FromToml("[memory]\nram = 8_000_000_000\n[state]\ngenerations = 2\n[update]\nthreads = 4\n");
  EXPECT_EQ(settings.Get("memory.ram").value, "8000000000");
  EXPECT_EQ(settings.Get("state.generations").value, "2");
  EXPECT_EQ(settings.Get("update.threads").value, "4");
  EXPECT_EQ(FromToml("memory.ram = 8e9").Get("memory.ram").value, "8000000000");
  const Settings policy = FromToml(
      "policy = { stage = 3, params = \"nvme\", optimizer = 0.25, max_live = 1_000_000 }\n");
  EXPECT_EQ(policy.Get("policy.stage").value, "3");
  EXPECT_EQ(policy.Get("policy.params").value, "nvme");
  EXPECT_EQ(policy.Get("policy.optimizer").value, "0.25");
  EXPECT_EQ(policy.Get("policy.max_live").value, "1000000");
  EXPECT_EQ(FromToml("policy.params = 1").Get("policy.params").value, "1");
}

TEST(TomlFileTest, WhatIsWrongIsNamedWithLineAndColumn) {
  EXPECT_EQ(ErrorOfToml("job = \"a\"\n\nmemroy.ram = \"1GiB\"\n"),
            "OFD-1003 offloadd.toml:3:8: unknown key \"memroy.ram\". Did you mean \"memory.ram\"? "
            "offloadctl config schema lists the keys.");
  const struct {
    const char *text, *place, *words;
  } wrong[] = {
      {"job = 7", ":1:1", "a number where a text belongs"},
      {"\nstate.generations = \"2\"", ":2:7", "a text where an integer belongs"},
      {"memory = 5", ":1:1", "a section where a key belongs"},
      {"[memory]\nram = true", ":2:1", "a boolean where a size belongs"},
      {"[memory]\nram = \"lots\"", ":2:1", "no size"},
      {"memory.ram = nan", ":1:8", "no size"},
      {"job = \"a\"\njob = \"b\"", ":2:", "no TOML"},
      {"job = ", ":1:", "no TOML"},
      {"[memory]\ngpu = \"auto\"", ":2:1", "the memory of a GPU is gpu.ram"},
      {"memory = \"64GiB\"", ":1:1", "Did you mean \"memory.ram\"?"},
      {"ram = \"64GiB\"", ":1:1", "Did you mean \"memory.ram\", \"gpu.ram\"?"},
      {"mem.ram = \"64GiB\"", ":1:5", "Did you mean \"memory.ram\"?"},
      {"[memory]\nlimit = \"64GiB\"", ":2:1", "Did you mean \"memory.ram\"?"},
      {"nvme_path = \"/nvme0\"", ":1:1", "Did you mean \"pool\"?"},
      {"threads = 4", ":1:1", "Did you mean \"update.threads\"?"},
      {"pool = \"~/pool\"", ":1:8", "begins with the ~ of shells"},
      {"pool = [{ path = \"/a\" }, { path = \"/a/\" }]", ":1:8", "names /a/ twice"},
      {"job = \"a b/c\"", ":1:1", "is no name of a job. Use letters"},
      {"gpu.device = \"gpu0\"", ":1:5", "is no device of torch that is served. Write cuda:0"},
      {"[train]\nclip_norm = 1.0", ":2:1", "clipping is the trainer's"},
      {"pool = [{ path = \"/a\", max = \"1TB\" }]", ":1:", "a job's file is as large as its state"},
      {"pool = [{ }]", ":1:", "no path"},
      {"pool = []", ":1:", "is empty"},
      {"policy.stage = 4", ":1:", "none of auto, 0, 1, 2, 3"},
      {"policy.params = 2", ":1:", "none of auto, ram, nvme"},
      {"policy.params = true", ":1:8", "a boolean where a home belongs"},
      {"pool = [7]", ":1:", "no path"},
      {"pool = 7", ":1:", "no path"},
      {"pool = [{ path = \"/a,b\" }]", ":1:", "comma"},
      {"[nothing]", ":1:", "unknown key \"nothing\""},
      {"[io.engine]\nx = 1", ":1:", "a table where a text belongs"},
      {"job = 2024-01-01", ":1:1", "a date where"},
  };
  for (const auto& each : wrong) {
    const std::string error = ErrorOfToml(each.text);
    EXPECT_NE(error.find(std::string("offloadd.toml") + each.place), std::string::npos) << error;
    EXPECT_NE(error.find(each.words), std::string::npos) << error;
  }
}

TEST(TomlFileTest, ANamedFileIsTheOnlyOneAndOthersMayBeMissing) {
  EXPECT_EQ(FilesToRead("mine.toml", {{"OFFLOADD_CONFIG", "other.toml"}}),
            std::vector<std::string>{"mine.toml"});
  EXPECT_EQ(FilesToRead("", {{"OFFLOADD_CONFIG", "other.toml"}}),
            std::vector<std::string>{"other.toml"});
  EXPECT_EQ(FilesToRead("", {{"HOME", "/home/ann"}}).back(),
            "/home/ann/.config/offloadd/offloadd.toml");
  EXPECT_EQ(FilesToRead("", {{"HOME", "/home/ann"}, {"XDG_CONFIG_HOME", "/x"}}).back(),
            "/x/offloadd/offloadd.toml");
  EXPECT_TRUE(ReadFilesAndEnvironment("", {{"XDG_CONFIG_HOME", "/nowhere"}}).ok());
  EXPECT_EQ(ErrorIdOf(ReadFilesAndEnvironment("/nowhere.toml", {}).status()), ErrorId::kFileRead);
  EXPECT_EQ(ErrorIdOf(ReadFilesAndEnvironment("/", {}).status()), ErrorId::kFileRead);
}

TEST(TomlFileTest, AFileIsReadAndTheEnvironmentWins) {
  const char* const scratch = std::getenv("TEST_TMPDIR");
  const std::filesystem::path path =
      std::filesystem::path(scratch == nullptr ? "." : scratch) / "settings_test.toml";
  std::ofstream(path) << "job = \"file\"\nmemory.ram = \"1GiB\"\n";
  const auto settings = ReadFilesAndEnvironment(path, {{"OFFLOADD_JOB", "env"}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->Get("job").value, "env");
  EXPECT_EQ(settings->Get("memory.ram").origin, path.string() + ":2");
  std::filesystem::remove(path);
}

TEST(SettingsTest, TheGpuIsTheEnginesDevice) {
  const Settings settings = FromToml("gpu = { device = \"cuda:1\", ram = \"20GiB\" }");
  const std::vector<std::pair<std::string, std::string>> expected = {{"device", "cuda:1"},
                                                                     {"gpu_ram", "20GiB"}};
  EXPECT_EQ(settings.EngineOptions(), expected);
  EXPECT_EQ(FromToml("gpu.ram = \"auto\"").Get("gpu.ram").value, "auto");
}

}  // namespace
}  // namespace offload::config
