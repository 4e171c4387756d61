#include "examples/flags.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace offload::examples {
namespace {

absl::StatusOr<Flags> Parse(std::vector<const char*> words) {
  words.insert(words.begin(), "train");
  return ParseFlags(static_cast<int>(words.size()), words.data());
}

TEST(FlagsTest, EveryFlagIsRead) {
  const auto flags = Parse({"--model",
                            "gpt2",
                            "--params",
                            "150M",
                            "--dtype",
                            "bf16",
                            "--steps",
                            "7",
                            "--micro-batches",
                            "2",
                            "--seq",
                            "32",
                            "--batch",
                            "3",
                            "--text",
                            "/etc/hostname",
                            "--optimizer",
                            "sgd",
                            "--clip",
                            "0.5",
                            "--seed",
                            "9",
                            "--ram",
                            "1GiB",
                            "--nvme-path",
                            "/x",
                            "--job",
                            "j",
                            "--zero-stage",
                            "3",
                            "--weights-home",
                            "nvme",
                            "--state-home",
                            "0.5",
                            "--offload",
                            "on",
                            "--threads",
                            "2",
                            "--json",
                            "--eval-every",
                            "4"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->model, ModelKind::kGpt2);
  EXPECT_EQ(flags->parameters, 150'000'000);
  EXPECT_EQ(flags->precision, Precision::kBFloat16);
  EXPECT_EQ(flags->steps, 7);
  EXPECT_EQ(flags->micro_batches, 2);
  EXPECT_EQ(flags->sequence_length, 32);
  EXPECT_EQ(flags->batch_rows, 3);
  EXPECT_EQ(flags->text_paths, std::vector<std::string>{"/etc/hostname"});
  EXPECT_EQ(flags->optimizer, OptimizerKind::kSgd);
  EXPECT_EQ(flags->clip, 0.5);
  EXPECT_EQ(flags->seed, 9u);
  EXPECT_EQ(flags->ram, "1GiB");
  EXPECT_EQ(flags->nvme_path, "/x");
  EXPECT_EQ(flags->job, "j");
  EXPECT_EQ(flags->zero_stage, 3);
  EXPECT_EQ(flags->weights_home, "nvme");
  EXPECT_EQ(flags->state_home, "0.5");
  EXPECT_TRUE(flags->offload);
  EXPECT_EQ(flags->threads, 2);
  EXPECT_TRUE(flags->json);
  EXPECT_EQ(flags->eval_every, 4);
}

TEST(FlagsTest, NamingAPlaceOnADriveTurnsOffloadingOn) {
  const auto flags = Parse({"--ram", "3GiB", "--nvme-path", "/x", "--job", "j"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_TRUE(flags->offload);
  const auto in_memory = Parse({"--steps", "3"});
  ASSERT_TRUE(in_memory.ok());
  EXPECT_FALSE(in_memory->offload);
}

TEST(FlagsTest, FlagsOfOffloadingWithoutItAreErrors) {
  for (const std::vector<const char*>& words :
       std::vector<std::vector<const char*>>{{"--ram", "3GiB"},
                                             {"--job", "j"},
                                             {"--zero-stage", "3"},
                                             {"--checksums"},
                                             {"--offload", "off", "--nvme-path", "/x"}}) {
    const auto flags = Parse(words);
    EXPECT_EQ(ErrorIdOf(flags.status()), ErrorId::kBadValue) << words.back();
    EXPECT_NE(flags.status().message().find("no effect"), std::string_view::npos) << words.back();
  }
}

TEST(FlagsTest, UnknownFlagSuggestsTheNearestOne) {
  const auto flags = Parse({"--parms=150M"});
  EXPECT_EQ(ErrorIdOf(flags.status()), ErrorId::kUnknownFlag);
  EXPECT_EQ(flags.status().message(),
            "OFD-1001 unknown flag --parms. Did you mean --params? --help lists all flags.");
}

TEST(FlagsTest, UnknownFlagFarFromAllHasNoSuggestion) {
  const auto flags = Parse({"--zzzzzzzzzz"});
  EXPECT_EQ(ErrorIdOf(flags.status()), ErrorId::kUnknownFlag);
  EXPECT_EQ(flags.status().message().find("Did you mean"), std::string_view::npos);
}

TEST(FlagsTest, ValuesThatCannotBeUsedAreNamed) {
  for (const std::vector<const char*>& words :
       std::vector<std::vector<const char*>>{{"--model", "bert"},
                                             {"--params", "many"},
                                             {"--steps", "-1"},
                                             {"--batch", "0"},
                                             {"--ram", "lots"},
                                             {"--offload", "on"},
                                             {"--nvme-path=/x", "--zero-stage=4"},
                                             {"--micro-batches=4", "--as-ranks=3"},
                                             {"--seq"}}) {
    EXPECT_EQ(ErrorIdOf(Parse(words).status()), ErrorId::kBadValue) << words.front();
  }
}

TEST(FlagsTest, HelpBeginsWithAnExample) {
  const auto flags = Parse({"--help"});
  ASSERT_TRUE(flags.ok());
  EXPECT_TRUE(flags->help);
  EXPECT_NE(flags->help_text.find("train --model llama"), std::string::npos);
}

TEST(FlagsTest, LearningRateRisesThenFallsAlongACosine) {
  Flags flags;
  flags.steps = 21;
  flags.warm_up_steps = 10;
  flags.learning_rate = 1.0;
  EXPECT_DOUBLE_EQ(LearningRate(flags, 0), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(flags, 9), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(flags, 10), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(flags, 15), 0.55);
  EXPECT_DOUBLE_EQ(LearningRate(flags, 20), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(flags, 1000), 0.1) << "beyond the end it stays";
  flags.steps = 1;
  flags.warm_up_steps = -1;
  EXPECT_DOUBLE_EQ(LearningRate(flags, 0), 1.0) << "a single step has a rate";
}

TEST(FlagsTest, WeightsFromAFileBringTheirOwnShape) {
  const auto flags = Parse({"--init-from", "/in", "--export", "/out", "--export-shard", "2MB"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->init_from, "/in");
  EXPECT_EQ(flags->export_folder, "/out");
  EXPECT_EQ(flags->export_shard_bytes, 2'000'000u);
  for (const char* const other : {"--params=1M", "--kv-heads=2", "--tied"}) {
    EXPECT_EQ(ErrorIdOf(Parse({"--init-from", "/in", other}).status()), ErrorId::kBadValue)
        << other;
  }
  EXPECT_EQ(ErrorIdOf(Parse({"--model", "gpt2", "--export", "/out"}).status()), ErrorId::kBadValue);
}

}  // namespace
}  // namespace offload::examples
