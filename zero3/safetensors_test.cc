#include "zero3/safetensors.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/random.h"

namespace offload::zero3 {
namespace {

namespace fs = std::filesystem;

constexpr ErrorId kMalformed = ErrorId::kFileFormat;

std::string NewFolder() {
  const char* base = getenv("TEST_TMPDIR");
  std::string name = std::string(base != nullptr ? base : "/tmp") + "/safetensors_XXXXXX";
  EXPECT_NE(mkdtemp(name.data()), nullptr);
  return name;
}

void WriteRaw(const std::string& path, uint64_t length, std::string_view rest) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file.write(rest.data(), static_cast<std::streamsize>(rest.size()));
}

std::vector<std::byte> RandomBytes(size_t count, uint64_t seed) {
  std::vector<std::byte> bytes(count);
  Random(seed).Fill(bytes);
  return bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

absl::Status ParseStatus(std::string_view json, uint64_t data_bytes) {
  return ParseHeader(json, 100, data_bytes, "file").status();
}

TEST(SafetensorsHeaderTest, PlainHeaderIsRead) {
  const auto header = ParseHeader(
      " \n{\"__metadata__\":{\"format\":\"pt\"},"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[2,26]},"
      "\"a\":{\"shape\":[],\"data_offsets\":[0,2],\"dtype\":\"BF16\"},"
      "\"empty\":{\"dtype\":\"F4\",\"shape\":[0,7],\"data_offsets\":[2,2]}}  ",
      100, 26, "file");
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].tensor, (FileTensor{"a", FileDtype::kBF16, {}}));
  EXPECT_EQ(header->entries[1].tensor, (FileTensor{"empty", FileDtype::kF4, {0, 7}}));
  EXPECT_EQ(header->entries[2].tensor, (FileTensor{"b", FileDtype::kF32, {2, 3}}));
  EXPECT_EQ(header->entries[2].offset_bytes, 102u);
  EXPECT_EQ(header->entries[2].size_bytes, 24u);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsHeaderTest, MetadataMayBeAbsentNullOrEmpty) {
  for (const char* json : {"{}", "{\"__metadata__\":null}", "{\"__metadata__\":{}}"}) {
    EXPECT_TRUE(ParseStatus(json, 0).ok()) << json;
  }
}

TEST(SafetensorsHeaderTest, EveryTypeHasItsNameAndWidth) {
  for (const char* name :
       {"BOOL",    "U8",          "I8",          "I16",     "U16",     "I32", "U32",     "I64",
        "U64",     "F16",         "BF16",        "F32",     "F64",     "C64", "F8_E4M3", "F8_E5M2",
        "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"}) {
    const auto dtype = FileDtypeByName(name);
    ASSERT_TRUE(dtype.has_value()) << name;
    EXPECT_EQ(FileDtypeName(*dtype), name);
  }
  EXPECT_EQ(DataBytes({"x", FileDtype::kF6E2M3, {4}}), 3u);
  EXPECT_EQ(DataBytes({"x", FileDtype::kF4, {3}}), std::nullopt) << "half a byte is left";
  EXPECT_EQ(DataBytes({"x", FileDtype::kC64, {2, 5}}), 80u);
  EXPECT_EQ(DataBytes({"x", FileDtype::kF32, {1ull << 32, 1ull << 32}}), std::nullopt);
}

TEST(SafetensorsHeaderTest, UnknownTypeHasItsOwnError) {
  const absl::Status status =
      ParseStatus(R"({"a":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}})", 1);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kFileDtype);
  EXPECT_NE(status.message().find("F7"), std::string_view::npos);
}

struct Hostile {
  const char* what;
  const char* json;
  uint64_t data_bytes;
};

TEST(SafetensorsHeaderTest, HostileHeadersAreMalformed) {
  const Hostile cases[] = {
      {"empty", "", 0},
      {"no object", "[]", 0},
      {"cut off", "{\"a\":", 0},
      {"text behind", "{} {}", 0},
      {"mark before", "\xEF\xBB\xBF{}", 0},
      {"not UTF-8", "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0},
      {"tail", "{}", 1},
      {"tensor twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0},
      {"metadata key twice", R"({"__metadata__":{"a":"1","a":"2"}})", 0},
      {"metadata number", R"({"__metadata__":{"a":1}})", 0},
      {"metadata nested", R"({"__metadata__":{"a":{}}})", 0},
      {"metadata list", R"({"__metadata__":[]})", 0},
      {"tensor null", R"({"a":null})", 0},
      {"field twice", R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0},
      {"field unknown", R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}})", 0},
      {"field missing", R"({"a":{"dtype":"U8","data_offsets":[0,0]}})", 0},
      {"dtype number", R"({"a":{"dtype":1,"shape":[0],"data_offsets":[0,0]}})", 0},
      {"shape text", R"({"a":{"dtype":"U8","shape":["0"],"data_offsets":[0,0]}})", 0},
      {"shape negative", R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}})", 0},
      {"shape fraction", R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1},
      {"shape nested", R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1},
      {"shape beyond 64 bits",
       R"({"a":{"dtype":"U8","shape":[18446744073709551617],"data_offsets":[0,1]}})", 1},
      {"product overflows to the right size",
       R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 4},
      {"one offset", R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}})", 0},
      {"three offsets", R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}})", 0},
      {"end before begin", R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}})", 1},
      {"size of another shape", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4},
      {"hole at the beginning", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2},
      {"hole between",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3},
      {"overlap",
       R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3},
      {"same place",
       R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
       2},
      {"short file", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3},
      {"far behind the file",
       R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}})",
       3},
  };
  for (const Hostile& hostile : cases) {
    const absl::Status status = ParseStatus(hostile.json, hostile.data_bytes);
    EXPECT_EQ(ErrorIdOf(status), kMalformed) << hostile.what << ": " << status;
  }
}

TEST(SafetensorsHeaderTest, DepthCostsNoStack) {
  const std::string deep(1 << 20, '[');
  EXPECT_EQ(ErrorIdOf(ParseStatus(deep, 0)), kMalformed);
  EXPECT_EQ(ErrorIdOf(ParseStatus("{\"a\":{\"shape\":" + deep, 0)), kMalformed);
}

TEST(SafetensorsHeaderTest, ManyDimensionsAreRefused) {
  std::string shape = "1";
  for (int i = 0; i < 100; ++i) shape += ",1";
  EXPECT_EQ(ErrorIdOf(ParseStatus(
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[" + shape + "],\"data_offsets\":[0,1]}}", 1)),
            kMalformed);
}

TEST(SafetensorsHeaderTest, AnyFlippedByteIsAnErrorOrAnotherValidHeader) {
  const std::string good =
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F16","shape":[2],"data_offsets":[3,7]}})";
  ASSERT_TRUE(ParseStatus(good, 7).ok());
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    text[random.Below(text.size())] = static_cast<char>(random.Next());
    const auto header = ParseHeader(text, 0, 7, "file");
    if (!header.ok()) continue;
    uint64_t end = 0;  // what was accepted covers the data
    for (const FileEntry& entry : header->entries) {
      EXPECT_EQ(entry.offset_bytes, end);
      end += entry.size_bytes;
    }
    EXPECT_EQ(end, 7u) << text;
  }
}

TEST(SafetensorsHeaderTest, NamesInMessagesArePrintableAndShort) {
  EXPECT_EQ(ShownName("a\n\x1b"), "a\\n\\x1b");
  EXPECT_LT(ShownName(std::string(100'000, 'x')).size(), 200u);
}

TEST(SafetensorsReaderTest, LengthOutsideOfFileOrLimitIsRefused) {
  const std::string path = NewFolder() + "/x";
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 40, UINT64_MAX}) {
    WriteRaw(path, length, "{}");
    EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(path).status()), kMalformed) << length;
  }
  WriteRaw(path, 2, "{}");
  EXPECT_TRUE(SafetensorsReader::Open(path).ok());
  EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(path, {.header_bytes = 1}).status()), kMalformed);
  std::ofstream(path, std::ios::trunc) << "short";
  EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(path).status()), kMalformed);
}

TEST(SafetensorsReaderTest, WhatIsNoFileIsRefusedWithoutWaiting) {
  const std::string folder = NewFolder();
  EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(folder + "/missing").status()), ErrorId::kFileRead);
  EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(folder).status()), kMalformed);
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  EXPECT_EQ(ErrorIdOf(SafetensorsReader::Open(folder + "/pipe").status()), kMalformed);
}

TEST(SafetensorsReaderTest, FileThatShrankIsAnErrorNotGarbage) {
  const std::string path = NewFolder() + "/x";
  const std::string header = R"({"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}})";
  WriteRaw(path, header.size(), header + std::string(64, 'x'));
  const auto reader = SafetensorsReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  fs::resize_file(path, 8 + header.size() + 10);
  std::vector<std::byte> bytes(64);
  EXPECT_EQ(ErrorIdOf(reader->Read(*reader->Find("a"), 0, bytes)), ErrorId::kFileRead);
}

TEST(SafetensorsWriterTest, WhatIsWrittenIsRead) {
  const std::string path = NewFolder() + "/model.safetensors";
  const auto small = RandomBytes(6, 1), large = RandomBytes(40'000, 2);
  auto writer = SafetensorsWriter::Create(path, {{"z/ä \"quoted\"", FileDtype::kBF16, {3}},
                                                 {"large", FileDtype::kF32, {100, 100}},
                                                 {"none", FileDtype::kF32, {0}}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::span<const std::byte> span(large);
  ASSERT_TRUE((*writer)->Append("large", span.first(1)).ok());
  ASSERT_TRUE((*writer)->Append("z/ä \"quoted\"", small).ok());
  ASSERT_TRUE((*writer)->Append("large", span.subspan(1)).ok());
  EXPECT_FALSE(fs::exists(path)) << "not before it is whole";
  ASSERT_TRUE((*writer)->Commit().ok());
  EXPECT_EQ(fs::file_size(path), (*writer)->file_bytes());

  const auto reader = SafetensorsReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->metadata().at("format"), "pt");
  EXPECT_EQ(reader->entries().front().offset_bytes % 4096, 0u);
  EXPECT_EQ(reader->entries().back().tensor.name, "z/ä \"quoted\"") << "narrow types last";
  EXPECT_EQ(reader->Find("other"), nullptr);
  std::vector<std::byte> bytes(40'000);
  ASSERT_TRUE(reader->Read(*reader->Find("large"), 0, bytes).ok());
  EXPECT_EQ(bytes, large);
  std::vector<std::byte> part(2);
  ASSERT_TRUE(reader->Read(*reader->Find("z/ä \"quoted\""), 4, part).ok());
  EXPECT_EQ(part, std::vector<std::byte>(small.begin() + 4, small.end()));
}

TEST(SafetensorsWriterTest, IncompleteFileNeverGetsItsName) {
  const std::string folder = NewFolder();
  const std::string path = folder + "/model.safetensors";
  std::ofstream(path) << "old";
  {
    auto writer = SafetensorsWriter::Create(path, {{"a", FileDtype::kU8, {4}}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append("a", RandomBytes(3, 1)).ok());
    EXPECT_FALSE((*writer)->Commit().ok());
    EXPECT_FALSE((*writer)->Append("a", RandomBytes(2, 1)).ok()) << "too long";
    EXPECT_FALSE((*writer)->Append("b", RandomBytes(1, 1)).ok()) << "not declared";
  }
  EXPECT_EQ(ReadFile(path), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1)
      << "the temporary file is gone";
}

TEST(SafetensorsWriterTest, WhatAKilledWriterHasLeftIsRemovedByTheNext) {
  const std::string folder = NewFolder();
  const std::string path = folder + "/model.safetensors";
  const std::vector<FileTensor> tensors = {{"a", FileDtype::kU8, {4}}};
  const pid_t child = fork();
  if (child == 0) {
    const auto killed = SafetensorsWriter::Create(path, tensors);
    _exit(killed.ok() && (*killed)->Append("a", RandomBytes(3, 1)).ok() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  const auto count = [&] {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  };
  ASSERT_EQ(count(), 1);

  auto living = SafetensorsWriter::Create(path, tensors);
  ASSERT_TRUE(living.ok());
  EXPECT_EQ(count(), 1) << "its own";
  auto second = SafetensorsWriter::Create(path, tensors);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(count(), 2) << "that of a writer which lives stays";
  for (auto* writer : {&*living, &*second}) {
    ASSERT_TRUE((*writer)->Append("a", RandomBytes(4, 1)).ok());
    EXPECT_TRUE((*writer)->Commit().ok());
  }
  EXPECT_EQ(count(), 1);
}

TEST(SafetensorsWriterTest, DeclarationsThatCannotBeAreRefused) {
  const std::string path = NewFolder() + "/x";
  for (const std::vector<FileTensor>& tensors : std::vector<std::vector<FileTensor>>{
           {{"a", FileDtype::kU8, {1}}, {"a", FileDtype::kF32, {1}}},
           {{"__metadata__", FileDtype::kU8, {1}}},
           {{"\xff", FileDtype::kU8, {1}}},
           {{"a", FileDtype::kF32, {1ull << 62}}},
           {{"a", FileDtype::kU8, {1ull << 63}}, {"b", FileDtype::kU8, {1ull << 63}}}}) {
    EXPECT_EQ(SafetensorsWriter::Create(path, tensors).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(ErrorIdOf(SafetensorsWriter::Create("/nonexistent/x", {}).status()),
            ErrorId::kFileWrite);
}

TEST(SafetensorsWriterTest, SameTensorsMakeTheSameBytes) {
  const std::string folder = NewFolder();
  for (const char* name : {"/1", "/2"}) {
    std::vector<FileTensor> tensors = {{"b", FileDtype::kU8, {2}}, {"a", FileDtype::kU8, {2}}};
    if (name[1] == '2') std::swap(tensors[0], tensors[1]);
    auto writer = SafetensorsWriter::Create(folder + name, tensors);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append("b", RandomBytes(2, 1)).ok());
    ASSERT_TRUE((*writer)->Append("a", RandomBytes(2, 2)).ok());
    ASSERT_TRUE((*writer)->Commit().ok());
  }
  EXPECT_EQ(ReadFile(folder + "/1"), ReadFile(folder + "/2"));
}

}  // namespace
}  // namespace offload::zero3
