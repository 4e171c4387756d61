#include "zero3/stored_buffers.h"

#include "base/error.h"
#include "gtest/gtest.h"

namespace offload::zero3 {
namespace {

template <typename T>
void Put(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void AppendStoredBuffer(std::string& to, const StoredBuffer& buffer) {
  Put(to, static_cast<uint32_t>(buffer.name.size()));
  Put(to, buffer.type);
  Put(to, static_cast<uint32_t>(buffer.shape.size()));
  Put(to, uint32_t{buffer.is_in_store});
  Put(to, uint64_t{buffer.bytes.size()});
  for (const int64_t dimension : buffer.shape) Put(to, dimension);
  to.append(buffer.name).append(buffer.bytes);
}

std::string Encoded() {
  std::string encoded;
  AppendStoredBuffer(encoded, {.name = "norm.count", .type = 4, .bytes = "12345678"});
  AppendStoredBuffer(encoded,
                     {.name = "mask", .type = 11, .shape = {1024, 4096}, .is_in_store = true});
  AppendStoredBuffer(encoded, {.name = "norm.mean", .type = 6, .shape = {2}, .bytes = "abcdefgh"});
  return encoded;
}

TEST(StoredBuffersTest, EveryBufferComesBack) {
  const std::string encoded = Encoded();
  const auto buffers = DecodeStoredBuffers(encoded);
  ASSERT_TRUE(buffers.ok()) << buffers.status();
  ASSERT_EQ(buffers->size(), 3u);
  EXPECT_EQ((*buffers)[0].name, "norm.count");
  EXPECT_TRUE((*buffers)[0].shape.empty());
  EXPECT_EQ((*buffers)[0].bytes, "12345678");
  EXPECT_EQ((*buffers)[1].shape, (std::vector<int64_t>{1024, 4096}));
  EXPECT_TRUE((*buffers)[1].is_in_store);
  EXPECT_EQ((*buffers)[2].type, 6u);
  EXPECT_FALSE((*buffers)[2].is_in_store);
  EXPECT_EQ((*buffers)[2].bytes, "abcdefgh");
}

TEST(StoredBuffersTest, NothingIsNoBuffers) {
  EXPECT_TRUE(DecodeStoredBuffers("").value().empty());
}

TEST(StoredBuffersTest, BytesThatAreCutShortAreDamaged) {
  const std::string encoded = Encoded();
  int whole = 0;
  for (size_t size = 1; size < encoded.size(); ++size) {
    const auto buffers = DecodeStoredBuffers(std::string_view(encoded).substr(0, size));
    whole += buffers.ok();
    if (!buffers.ok()) {
      EXPECT_EQ(ErrorIdOf(buffers.status()), ErrorId::kStoreDamaged);
    }
  }
  EXPECT_EQ(whole, 2) << "it may end behind a buffer";
}

TEST(StoredBuffersTest, BytesBesideOnesInTheStoreAreDamaged) {
  std::string encoded;
  AppendStoredBuffer(encoded, {.name = "mask", .type = 11, .is_in_store = true, .bytes = "x"});
  EXPECT_FALSE(DecodeStoredBuffers(encoded).ok());
}

TEST(StoredBuffersTest, TypesOfFilesAreKnown) {
  EXPECT_EQ(FileDtypeOfStored(11), FileDtype::kBool);
  EXPECT_EQ(FileDtypeOfStored(15), FileDtype::kBF16);
  EXPECT_FALSE(FileDtypeOfStored(9).has_value()) << "complex";
}

}  // namespace
}  // namespace offload::zero3
