#include "zero3/saved_tensor.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

using Form = SavedTensorWriter::Form;

class SavedTensorTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return testing::TempDir() + "/" + name; }

  std::string Written(const std::string& name, std::vector<int64_t> shape,
                      const std::vector<float>& values, Form form) const {
    std::filesystem::remove(path(name));
    absl::StatusOr<SavedTensorWriter> writer = SavedTensorWriter::Create(path(name), shape, form);
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (const float& value : values)  // in pieces
      EXPECT_TRUE(writer->Append(std::as_bytes(std::span(&value, 1))).ok());
    EXPECT_TRUE(writer->Commit().ok());
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

// What torch reads of it: python/tests/serving_test.py.
TEST_F(SavedTensorTest, ElementsLieAlignedAndTheirChecksumIsZips) {
  const std::vector<float> values = {1, -2, 3.5, 0, 1e30f, -0.0f};
  const std::string file = Written("elements.pt", {2, 3}, values, Form::kParameter);
  const std::string_view elements(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(float));
  const size_t at = file.find(elements);
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(at % 64, 0u);
  // As zlib's crc32() computes it, byte by byte.
  uint32_t crc = ~0u;
  for (const char byte : elements) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320u : 0u);
  }
  crc = ~crc;
  const std::string_view number(reinterpret_cast<const char*>(&crc), sizeof(crc));
  const size_t header = file.find("archive/data/0") - 30;
  EXPECT_EQ(file.substr(header, 4), "PK\x03\x04");
  EXPECT_EQ(file.substr(header + 14, 4), number);
}

TEST_F(SavedTensorTest, ScalarHasNoDimensions) {
  const std::string file = Written("scalar.pt", {}, {7}, Form::kTensor);
  EXPECT_EQ(file.find("param"), std::string::npos);
  EXPECT_NE(file.find("FloatStorage"), std::string::npos);
}

TEST_F(SavedTensorTest, RefusesTooManyElementsAndTooFew) {
  std::filesystem::remove(path("short.pt"));
  const std::vector<int64_t> shape = {2};
  absl::StatusOr<SavedTensorWriter> writer =
      SavedTensorWriter::Create(path("short.pt"), shape, Form::kTensor);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const float values[3] = {};
  EXPECT_FALSE(writer->Append(std::as_bytes(std::span(values))).ok());
  EXPECT_TRUE(writer->Append(std::as_bytes(std::span(values, 1))).ok());
  EXPECT_FALSE(writer->Commit().ok());
  EXPECT_FALSE(writer->is_complete());
}

TEST_F(SavedTensorTest, FileThatIsThereIsLeftAlone) {
  std::ofstream(path("there.pt")) << "mine";
  const absl::Status status =
      SavedTensorWriter::Create(path("there.pt"), {}, Form::kTensor).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kFileWrite) << status;
  EXPECT_EQ(std::filesystem::file_size(path("there.pt")), 4u);
  std::filesystem::remove(path("there.pt"));
}

}  // namespace
}  // namespace offload::zero3
