#include "examples/text_data.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

namespace offload::examples {
namespace {

namespace fs = std::filesystem;

fs::path NewFolder() {
  const char* base = getenv("TEST_TMPDIR");
  std::string name = std::string(base != nullptr ? base : "/tmp") + "/text_XXXXXX";
  EXPECT_NE(mkdtemp(name.data()), nullptr);
  return name;
}

void Write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TextData Counting(int64_t count, int64_t sequence_length) {
  std::vector<uint16_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return *TextData::Make(std::move(tokens), sequence_length);
}

TEST(TextDataTest, FolderGivesItsRegularFilesInOrderOfName) {
  const fs::path folder = NewFolder();
  Write(folder / "b", "two");
  Write(folder / "a", std::string("1\xff", 2));
  fs::create_symlink("a", folder / "c");
  fs::create_directory(folder / "d");
  const auto tokens = ReadTokens({folder.string()});
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(*tokens, (std::vector<uint16_t>{256, '1', 255, 257, 256, 't', 'w', 'o', 257}));
}

TEST(TextDataTest, MissingFileIsNamed) {
  const auto tokens = ReadTokens({"/nonexistent/file"});
  ASSERT_FALSE(tokens.ok());
  EXPECT_NE(tokens.status().message().find("/nonexistent/file"), std::string_view::npos);
}

TEST(TextDataTest, BatchDependsOnSeedStepAndMicroBatchOnly) {
  const TextData data = Counting(5000, 16);
  const auto batch = data.TrainingBatch(7, 3, 1, 2);
  EXPECT_EQ(batch.size(), 2u * 17u);
  EXPECT_EQ(batch, data.TrainingBatch(7, 3, 1, 2));
  EXPECT_NE(batch, data.TrainingBatch(8, 3, 1, 2));
  EXPECT_NE(batch, data.TrainingBatch(7, 4, 1, 2));
  EXPECT_NE(batch, data.TrainingBatch(7, 3, 0, 2));
  for (size_t i = 1; i < 17; ++i) EXPECT_EQ(batch[i], batch[i - 1] + 1) << "a row is running text";
}

TEST(TextDataTest, TrainingNeverSeesTheHeldOutPart) {
  const TextData data = Counting(2000, 16);
  int64_t highest = 0;
  for (int64_t step = 0; step < 3000; ++step) {
    for (const int64_t token : data.TrainingBatch(1, step, 0, 1)) {
      highest = std::max(highest, token);
    }
  }
  EXPECT_EQ(highest, data.training_tokens() - 1) << "the last training token is reachable";
  for (const int64_t token : data.EvaluationBatch(0, 2, 3)) {
    EXPECT_GE(token, data.training_tokens());
    EXPECT_LT(token, 2000);
  }
}

TEST(TextDataTest, TooLittleTextIsRefused) {
  EXPECT_FALSE(TextData::Make(std::vector<uint16_t>(33), 16).ok());
  EXPECT_TRUE(TextData::Make(std::vector<uint16_t>(34), 16).ok());
  EXPECT_FALSE(TextData::Make({}, 16).ok());
}

}  // namespace
}  // namespace offload::examples
