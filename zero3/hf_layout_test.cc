#include "zero3/hf_layout.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace offload::zero3 {
namespace {

namespace fs = std::filesystem;

std::string NewFolder() {
  const char* base = getenv("TEST_TMPDIR");
  std::string name = std::string(base != nullptr ? base : "/tmp") + "/hf_layout_XXXXXX";
  EXPECT_NE(mkdtemp(name.data()), nullptr);
  return name;
}

std::vector<std::byte> Pattern(size_t count, int first) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

const std::vector<FileTensor>& Tensors() {
  static const auto* tensors = new std::vector<FileTensor>{{"embed", FileDtype::kF32, {2, 2}},
                                                           {"layer.0", FileDtype::kBF16, {4}},
                                                           {"norm", FileDtype::kF32, {1}}};
  return *tensors;
}

std::vector<WantedTensor> Wanted() { return {{"embed", {2, 2}}, {"layer.0", {4}}, {"norm", {1}}}; }

// Writes the tensors above, 16, 8 and 4 bytes long, with at most `shard_bytes` in a shard.
void WriteCheckpoint(const std::string& folder, uint64_t shard_bytes) {
  auto writer = HfCheckpointWriter::Create(folder, Tensors(), {.shard_bytes = shard_bytes});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append("norm", Pattern(4, 3)).ok());
  ASSERT_TRUE((*writer)->Append("embed", Pattern(16, 1)).ok());
  ASSERT_TRUE((*writer)->Append("layer.0", Pattern(8, 2)).ok());
  const absl::Status status = (*writer)->Commit();
  ASSERT_TRUE(status.ok()) << status;
}

nlohmann::json ReadIndex(const std::string& folder) {
  return nlohmann::json::parse(std::ifstream(folder + "/" + kIndexFileName));
}

void WriteIndex(const std::string& folder, const nlohmann::json& index) {
  std::ofstream(folder + "/" + kIndexFileName) << index.dump();
}

std::optional<ErrorId> OpenError(const std::string& path) {
  return ErrorIdOf(HfCheckpoint::Open(path).status());
}

TEST(HfLayoutTest, SingleFileAndShardsHoldTheSame) {
  for (const uint64_t shard_bytes : {uint64_t{1000}, uint64_t{24}, uint64_t{12}}) {
    const std::string folder = NewFolder() + "/made";
    WriteCheckpoint(folder, shard_bytes);
    EXPECT_EQ(fs::exists(folder + "/" + kIndexFileName), shard_bytes < 1000);
    const auto checkpoint = HfCheckpoint::Open(folder);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->tensor_count(), 3u);
    EXPECT_EQ(checkpoint->Names().size(), 3u);
    std::vector<std::byte> bytes(8);
    ASSERT_TRUE(checkpoint->Read("layer.0", 0, bytes).ok());
    EXPECT_EQ(bytes, Pattern(8, 2));
    EXPECT_EQ(checkpoint->Find("other"), nullptr);
    EXPECT_TRUE(CheckFits(*checkpoint, Wanted()).ok());
  }
}

TEST(HfLayoutTest, FileItselfCanBeOpened) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 1000);
  const auto checkpoint = HfCheckpoint::Open(folder + "/model.safetensors");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensor_count(), 3u);
}

TEST(HfLayoutTest, IndexNamesShardsAndTotals) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 24);
  const nlohmann::json index = ReadIndex(folder);
  EXPECT_EQ(index["weight_map"]["embed"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"]["norm"], "model-00002-of-00002.safetensors");
  EXPECT_EQ(index["metadata"]["total_size"], 28);
  EXPECT_EQ(index["metadata"]["total_parameters"], 9);
}

TEST(HfLayoutTest, IndexAndShardsMustAgree) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 24);
  const nlohmann::json good = ReadIndex(folder);
  nlohmann::json index = good;
  index["weight_map"].erase("layer.0");
  WriteIndex(folder, index);
  EXPECT_EQ(OpenError(folder), ErrorId::kFileFormat) << "a tensor that the index has not";
  index = good;
  index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors";
  WriteIndex(folder, index);
  EXPECT_EQ(OpenError(folder), ErrorId::kFileFormat) << "a tensor that the shard has not";
  index = good;
  index["weight_map"]["norm"] = "model-00001-of-00002.safetensors";
  WriteIndex(folder, index);
  EXPECT_EQ(OpenError(folder), ErrorId::kFileFormat) << "a tensor in another shard";
  WriteIndex(folder, good);
  EXPECT_TRUE(HfCheckpoint::Open(folder).ok());
  fs::remove(folder + "/model-00002-of-00002.safetensors");
  EXPECT_EQ(OpenError(folder), ErrorId::kFileRead) << "a shard that is not there";
}

TEST(HfLayoutTest, TensorInTwoShardsIsRefused) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 24);
  fs::copy_file(folder + "/model-00001-of-00002.safetensors", folder + "/copy.safetensors");
  nlohmann::json index = ReadIndex(folder);
  index["weight_map"]["embed"] = "copy.safetensors";
  WriteIndex(folder, index);
  EXPECT_EQ(OpenError(folder), ErrorId::kFileFormat);
}

TEST(HfLayoutTest, HostileIndexesAreMalformed) {
  for (const char* json : {
           "",
           "[]",
           "1",
           "{}",
           "{} {}",
           R"({"weight_map": null})",
           R"({"weight_map": []})",
           R"({"weight_map": {"a": 1}})",
           R"({"weight_map": {"a": {}}})",
           R"({"weight_map": {"a": ["x.safetensors"]}})",
           R"({"weight_map": {"a": "../x.safetensors"}})",
           R"({"weight_map": {"a": "/etc/x.safetensors"}})",
           R"({"weight_map": {"a": ".safetensors"}})",
           R"({"weight_map": {"a": "x.bin"}})",
           "{\"weight_map\": {\"a\": \"x\\u0000.safetensors\"}}",
           R"({"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}})",
           R"({"weight_map": {}, "weight_map": {}})",
       }) {
    EXPECT_EQ(ErrorIdOf(ParseIndex(json, "index").status()), ErrorId::kFileFormat) << json;
  }
  const auto index = ParseIndex(
      R"({"metadata": {"total_size": 1.5e10, "weight_map": {"x": [1]}}, "more": [{"a": null}], "weight_map": {"a": "x.safetensors"}})",
      "index");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->file_by_tensor.size(), 1u);
}

TEST(HfLayoutTest, FirstDifferenceFromTheModelIsNamed) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 1000);
  const auto checkpoint = HfCheckpoint::Open(folder);
  ASSERT_TRUE(checkpoint.ok());
  auto wanted = Wanted();
  wanted.push_back({"head", {4}});
  absl::Status status = CheckFits(*checkpoint, wanted);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kFileMismatch);
  EXPECT_NE(std::string(status.message()).find("\"head\""), std::string::npos);

  wanted = Wanted();
  wanted[0].shape = {4};
  status = CheckFits(*checkpoint, wanted);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kFileMismatch);
  EXPECT_NE(std::string(status.message()).find("[2, 2]"), std::string::npos);

  wanted = Wanted();
  wanted.pop_back();
  EXPECT_EQ(ErrorIdOf(CheckFits(*checkpoint, wanted)), ErrorId::kFileMismatch);
  const std::vector<std::string> ignored = {"norm"};
  EXPECT_TRUE(CheckFits(*checkpoint, wanted, ignored).ok());
}

TEST(HfLayoutTest, IncompleteCheckpointGetsNoName) {
  const std::string folder = NewFolder();
  {
    auto writer = HfCheckpointWriter::Create(folder, Tensors(), {.shard_bytes = 12});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append("embed", Pattern(16, 1)).ok());
    EXPECT_FALSE((*writer)->Commit().ok());
  }
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(HfLayoutTest, FolderThatHoldsACheckpointIsLeftAlone) {
  const std::string folder = NewFolder();
  WriteCheckpoint(folder, 24);
  EXPECT_EQ(ErrorIdOf(HfCheckpointWriter::Create(folder, Tensors()).status()), ErrorId::kFileWrite);
  EXPECT_TRUE(HfCheckpoint::Open(folder).ok());
}

}  // namespace
}  // namespace offload::zero3
