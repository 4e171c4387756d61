#include "zero3/saved_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "zero3/saved_tensor.h"

namespace offload::zero3 {
namespace {

using Form = SavedTensorWriter::Form;
using Kind = PickledObject::Kind;

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteContents(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
}

class SavedFileTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return testing::TempDir() + "/" + name; }

  std::string Write(const std::string& name, const std::vector<int64_t>& shape,
                    const std::vector<float>& values, Form form) const {
    std::filesystem::remove(path(name));
    absl::StatusOr<SavedTensorWriter> writer = SavedTensorWriter::Create(path(name), shape, form);
    EXPECT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE(writer->Append(std::as_bytes(std::span(values))).ok());
    EXPECT_TRUE(writer->Commit().ok());
    return path(name);
  }

  // The elements of the tensor that a file is, or that it has as "param".
  static absl::StatusOr<std::vector<float>> Read(const std::string& path, size_t piece = 2) {
    absl::StatusOr<SavedFile> opened = SavedFile::Open(path);
    if (!opened.ok()) return opened.status();
    const auto file = std::make_shared<const SavedFile>(*std::move(opened));
    const PickledObject& root = file->contents().root();
    const PickledObject* const held = root.kind == Kind::kDictionary ? root.Find("param") : &root;
    if (held == nullptr || held->kind != Kind::kTensor) return absl::NotFoundError("no tensor");
    absl::StatusOr<SavedTensorReader> reader = SavedTensorReader::Open(file, *held->tensor);
    if (!reader.ok()) return reader.status();
    std::vector<float> values(held->tensor->element_count);
    for (size_t at = 0; at < values.size(); at += piece) {
      const std::span<float> next =
          std::span(values).subspan(at, std::min(piece, values.size() - at));
      if (absl::Status status = reader->Next(std::as_writable_bytes(next)); !status.ok())
        return status;
    }
    EXPECT_FALSE(reader->Next(std::as_writable_bytes(std::span(values))).ok()) << "at its end";
    return values;
  }
};

TEST_F(SavedFileTest, WhatTheWriterWritesComesBack) {
  const std::vector<float> values = {1, -2, 3.5, 0, 1e30f, -0.0f};
  for (const Form form : {Form::kTensor, Form::kParameter}) {
    const auto found = Read(Write("back.pt", {2, 3}, values, form));
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(std::memcmp(found->data(), values.data(), values.size() * sizeof(float)), 0);
  }
  const auto scalar = Read(Write("scalar.pt", {}, {7}, Form::kTensor));
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_EQ(*scalar, std::vector<float>{7});
}

TEST_F(SavedFileTest, AFileThatEndsEarlyIsMalformed) {
  const std::string whole =
      Contents(Write("whole.pt", {2, 3}, {1, 2, 3, 4, 5, 6}, Form::kParameter));
  for (size_t size = 0; size < whole.size(); ++size) {
    WriteContents(path("short.pt"), whole.substr(0, size));
    const auto found = Read(path("short.pt"));
    ASSERT_EQ(ErrorIdOf(found.status()), ErrorId::kFileFormat) << size << found.status();
  }
}

// A byte that is another one is told, or says nothing of the values.
TEST_F(SavedFileTest, AByteThatIsAnotherOneIsToldOrDoesNotMatter) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const std::string whole = Contents(Write("good.pt", {2, 3}, values, Form::kParameter));
  const size_t pickle = whole.find("\x80\x02");
  const size_t data = whole.find(std::string_view(reinterpret_cast<const char*>(values.data()),
                                                  values.size() * sizeof(float)));
  ASSERT_NE(pickle, std::string::npos);
  ASSERT_NE(data, std::string::npos);
  size_t told = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x41);
    WriteContents(path("damaged.pt"), damaged);
    const auto found = Read(path("damaged.pt"));
    told += !found.ok();
    if (found.ok()) {
      ASSERT_EQ(*found, values) << at;
    }
    if (at == pickle + 20 || at == data + 5) {
      ASSERT_FALSE(found.ok()) << at;
    }
  }
  EXPECT_GT(told, 200u);
}

TEST_F(SavedFileTest, OtherFilesAreRefused) {
  WriteContents(path("text.pt"), "not a tensor");
  EXPECT_EQ(ErrorIdOf(Read(path("text.pt")).status()), ErrorId::kFileFormat);
  EXPECT_EQ(ErrorIdOf(Read(path("missing.pt")).status()), ErrorId::kFileRead);
  EXPECT_EQ(ErrorIdOf(Read(testing::TempDir()).status()), ErrorId::kFileRead);
}

// ---- Pickles -----------------------------------------------------------------------------------

std::string Corpus(const std::string& name) {
  return Contents("zero3/corpus/unpickle_fuzz/" + name);
}

TEST(UnpickleTest, PlainDataOfSeveralProtocols) {
  for (const char* const name : {"numbers2", "numbers4"}) {
    const auto pickle = Unpickle(Corpus(name));
    ASSERT_TRUE(pickle.ok()) << name << pickle.status();
    const PickledObject* const numbers = pickle->root().Find("a");
    ASSERT_NE(numbers, nullptr);
    ASSERT_EQ(numbers->items.size(), 11u);
    const std::vector<double> expected = {1, -2, 300, 70000, 1099511627776., -1099511627776.};
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(numbers->items[i]->Number(), expected[i]) << i;
    EXPECT_EQ(numbers->items[6]->kind, Kind::kOther) << "2 ** 80";
    EXPECT_EQ(numbers->items[7]->Number(), 1.5);
    EXPECT_EQ(numbers->items[8]->kind, Kind::kNone);
    EXPECT_EQ(numbers->items[9]->integer, 1);
    EXPECT_FALSE(numbers->items[9]->Number().has_value()) << "a flag is no number";
    const PickledObject* const tuples = pickle->root().Find("t");
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(tuples->items[i]->items.size(), i);
    EXPECT_EQ(pickle->root().Find("text")->text.size(), 300u);
    EXPECT_EQ(pickle->root().Find("nothing"), nullptr);
  }
}

TEST(UnpickleTest, NothingIsRunAndTheRestIsRead) {
  for (const char* const name : {"runs2", "runs4"}) {
    const auto pickle = Unpickle(Corpus(name));
    ASSERT_TRUE(pickle.ok()) << name << pickle.status();
    EXPECT_TRUE(pickle->has_others());
    EXPECT_EQ(pickle->root().Find("loss_scaler")->kind, Kind::kOther);
    const PickledObject* const state = pickle->root().Find("optimizer_state_dict")->Find("state");
    ASSERT_EQ(state->items.size(), 2u);
    EXPECT_EQ(state->items[1]->Find("step")->Number(), 2);
  }
  EXPECT_FALSE(Unpickle(Corpus("ordered2"))->has_others());
  EXPECT_EQ(Unpickle(Corpus("ordered4"))->root().Find("b")->Find("step")->Number(), 3);
}

TEST(UnpickleTest, ObjectsMayHoldThemselves) {
  const auto pickle = Unpickle(Corpus("cycle2"));
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  EXPECT_EQ(pickle->root().items[1], &pickle->root());
}

TEST(UnpickleTest, TensorsSayWhereTheirElementsAre) {
  const auto pickle = Unpickle(Corpus("tensor"));
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  const TensorOnFile& tensor = *pickle->root().Find("param")->tensor;
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor.element_count, 6u);
  EXPECT_EQ(tensor.storage, "0");
  EXPECT_TRUE(tensor.is_row_by_row);
  EXPECT_FALSE(Unpickle(Corpus("transposed"))->root().Find("param")->tensor->is_row_by_row);
  EXPECT_FALSE(Unpickle(Corpus("too_long")).ok());
}

TEST(UnpickleTest, WhatGrowsWithoutEndIsRefused) {
  std::string pickle("\x80\x02]q", 4);
  pickle += std::string("\0", 1);
  for (int i = 0; i < 1'100'000; ++i) pickle += "K\x01";
  EXPECT_FALSE(Unpickle(pickle + ".").ok());
  for (const char* const bytes : {"", ".", "(", "t.", "h\x05.", "\x80", "K", "N0.", "}K\x01s."})
    EXPECT_FALSE(Unpickle(bytes).ok()) << bytes;
}

}  // namespace
}  // namespace offload::zero3
