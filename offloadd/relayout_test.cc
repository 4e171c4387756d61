#include "offloadd/relayout.h"

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aio/memory_device.h"
#include "base/error.h"
#include "base/random.h"
#include "gtest/gtest.h"
#include "kernels/split.h"
#include "offloadd/extent_update.h"
#include "offloadd/job_catalogue.h"

namespace offload::daemon {
namespace {

using proto::Dtype;
using proto::Plane;

constexpr uint32_t kSectorBytes = 4096;

// Large and small ones of all types; `thawed` of them are trained after all.
std::vector<proto::Tensor> Tensors(bool thawed) {
  std::vector<proto::Tensor> tensors;
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat16, Dtype::kFloat64}) {
    const std::string name = proto::DtypeName(dtype);
    const auto add = [&](const std::string& rest, int64_t elements, bool trainable) {
      tensors.push_back(
          {.name = name + rest, .shape = {elements}, .dtype = dtype, .trainable = trainable});
    };
    add(".first", 300'000, true);
    add(".first_bias", 1000, true);
    add(".frozen", 270'000, thawed);
    add(".frozen_bias", 700, thawed);
    add(".last_bias", 900, true);
    add(".still_frozen", 600'000, false);
    add(".still_frozen_bias", 30, false);
  }
  return tensors;
}

// The values of one plane of a tensor, by element: of bf16 and fp16 the masters. Of fp64 numbers
// half of the bits, the others follow from them.
using Values = std::vector<uint32_t>;

// Many ties, so that those of some extents need their plane, and those of others do not.
Values RandomMasters(Random& random, uint64_t count, uint64_t one_tie_in) {
  Values values(count);
  for (uint32_t& value : values) {
    value = static_cast<uint32_t>(random.Next());
    if ((value & 0x7F800000) == 0x7F800000) value ^= 0x40000000;  // finite
    if (random.OneIn(one_tie_in)) value = (value & 0xFFFF0000) | 0x8000;
  }
  return values;
}

Values WideOf(const uint32_t* halves, uint64_t count) {
  Values wide;
  for (uint64_t i = 0; i < count; ++i) wide.insert(wide.end(), {halves[i], halves[i] * 3 + 1});
  return wide;
}
Values HalvesOf(const MappedRegion& bytes, uint64_t count) {
  const auto* const wide = reinterpret_cast<const uint32_t*>(bytes.data());
  Values halves(count);
  for (uint64_t i = 0; i < count; ++i) {
    halves[i] = wide[2 * i];
    const bool is_zero = wide[2 * i] == 0 && wide[2 * i + 1] == 0;
    EXPECT_TRUE(is_zero || wide[2 * i + 1] == wide[2 * i] * 3 + 1) << i;
  }
  return halves;
}

std::unique_ptr<swap::Store> MakeStore(const proto::Catalogue& catalogue, uint8_t uuid) {
  const swap::StoreSpec spec = MakeStoreSpec("job", catalogue, {});
  auto memory = std::make_unique<aio::MemoryDevice>(swap::FormattedBytes(spec), std::nullopt,
                                                    kSectorBytes, kSectorBytes);
  auto store = swap::Store::CreateOn(std::move(memory), spec, std::array<uint8_t, 16>{uuid});
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

void Write(swap::Store& store, const swap::ExtentId& id, const void* bytes, uint64_t size_bytes,
           uint64_t word = 0, uint32_t flags = 0) {
  const MappedRegion padded = *MappedRegion::Anonymous(store.ExtentBytes(id));
  std::memcpy(padded.data(), bytes, size_bytes);
  swap::Checksum checksum = store.StartChecksum(id, store.open_sequence());
  checksum.Update(padded.span());
  const swap::WriteRequest request{id, padded.data(), checksum.Finish(), word, flags};
  ASSERT_EQ(RunToEnd(store,
                     [&](swap::Store::Done done) {
                       store.Write({&request, 1}, std::move(done));
                     }),
            absl::OkStatus());
}

// What a job holds: by plane and element of a store tensor.
struct Contents {
  Values masters, exp_avg;
};

void WriteContents(swap::Store& store, const proto::Catalogue& catalogue, uint32_t store_tensor,
                   const Contents& contents) {
  const proto::StoreTensor& tensor = catalogue.store_tensors[store_tensor];
  for (uint32_t index = 0; index < proto::ExtentCount(tensor.element_count); ++index) {
    const uint32_t count = proto::ExtentElements(tensor.element_count, index);
    const uint64_t begin = uint64_t{index} * proto::kExtentElements;
    const uint32_t* const masters = contents.masters.data() + begin;
    const auto id = [&](Plane plane) { return ExtentIdOf(store_tensor, plane, index); };
    if (tensor.dtype == Dtype::kFloat64) {
      Write(store, id(Plane::kWeight), WideOf(masters, count).data(), count * 8);
      if (tensor.trainable)
        Write(store, id(Plane::kState0), WideOf(contents.exp_avg.data() + begin, count).data(),
              count * 8);
      continue;
    }
    if (tensor.trainable)
      Write(store, id(Plane::kState0), contents.exp_avg.data() + begin, count * 4);
    if (tensor.dtype == Dtype::kFloat16) {
      std::vector<kernels::Half> weights(count);
      Values residual(count);
      kernels::SplitHalf(reinterpret_cast<const float*>(masters), count, weights.data(),
                         residual.data());
      Write(store, id(Plane::kWeight), weights.data(), count * 2);
      if (tensor.trainable) Write(store, id(Plane::kResidual), residual.data(), count * 4);
      continue;
    }
    if (tensor.dtype == Dtype::kFloat32) {
      Write(store, id(Plane::kWeight), masters, count * 4);
      continue;
    }
    std::vector<uint16_t> weights(count);
    std::vector<int16_t> residual(count);
    TieSink sink(count);
    kernels::Split(masters, count, weights.data(), residual.data(), &sink.writer());
    const TieBits ties = *sink.Finish();
    Write(store, id(Plane::kWeight), weights.data(), count * 2);
    if (!tensor.trainable) continue;
    Write(store, id(Plane::kResidual), residual.data(), count * 2, ties.word,
          ties.plane.has_value() ? swap::kFlagTiesPlane : 0);
    if (ties.plane.has_value())
      Write(store, id(Plane::kTies), ties.plane->data(), ties.plane->size());
  }
}

MappedRegion Read(swap::Store& store, const swap::ExtentId& id, swap::Stamp* stamp) {
  MappedRegion bytes = *MappedRegion::Anonymous(store.ExtentBytes(id));
  const swap::ReadRequest request{id, bytes.data()};
  EXPECT_EQ(RunToEnd(store,
                     [&](swap::Store::Done done) {
                       store.Read({&request, 1}, {stamp, 1}, std::move(done));
                     }),
            absl::OkStatus());
  EXPECT_TRUE(stamp->never_written() || store.Verify(id, *stamp, bytes.span())) << NameOf(id);
  return bytes;
}

Contents ReadContents(swap::Store& store, const proto::Catalogue& catalogue,
                      uint32_t store_tensor) {
  const proto::StoreTensor& tensor = catalogue.store_tensors[store_tensor];
  Contents contents{Values(tensor.element_count), Values(tensor.element_count)};
  for (uint32_t index = 0; index < proto::ExtentCount(tensor.element_count); ++index) {
    const uint32_t count = proto::ExtentElements(tensor.element_count, index);
    const uint64_t begin = uint64_t{index} * proto::kExtentElements;
    swap::Stamp stamp;
    const auto read = [&](Plane plane) {
      return Read(store, ExtentIdOf(store_tensor, plane, index), &stamp);
    };
    const auto take = [&](Plane plane, Values& values) {
      const MappedRegion bytes = read(plane);
      if (tensor.dtype != Dtype::kFloat64) {
        std::memcpy(values.data() + begin, bytes.data(), count * 4);
        return;
      }
      const Values halves = HalvesOf(bytes, count);
      std::copy(halves.begin(), halves.end(), values.begin() + static_cast<ptrdiff_t>(begin));
    };
    if (tensor.trainable) take(Plane::kState0, contents.exp_avg);
    if (tensor.dtype == Dtype::kFloat64) {
      take(Plane::kWeight, contents.masters);
      continue;
    }
    const MappedRegion weights = read(Plane::kWeight);
    if (tensor.dtype == Dtype::kFloat16) {
      MappedRegion residual = *MappedRegion::Anonymous(proto::PaddedBytes(count * 4));
      if (tensor.trainable) residual = read(Plane::kResidual);
      kernels::MergeHalf(reinterpret_cast<const kernels::Half*>(weights.data()),
                         reinterpret_cast<const uint32_t*>(residual.data()), count,
                         reinterpret_cast<float*>(contents.masters.data() + begin));
      continue;
    }
    if (tensor.dtype == Dtype::kFloat32) {
      std::memcpy(contents.masters.data() + begin, weights.data(), count * 4);
      continue;
    }
    MappedRegion residual = *MappedRegion::Anonymous(proto::PaddedBytes(count * 2));
    stamp = {};
    if (tensor.trainable) residual = read(Plane::kResidual);
    TieBits ties{.word = stamp.word, .plane = {}, .stamp = {}};
    if ((stamp.flags & swap::kFlagTiesPlane) != 0) ties.plane = read(Plane::kTies);
    TieSource source(ties);
    kernels::Merge(reinterpret_cast<const uint16_t*>(weights.data()),
                   reinterpret_cast<const int16_t*>(residual.data()), count,
                   contents.masters.data() + begin, &source.reader());
  }
  return contents;
}

std::vector<Contents> ReadAll(swap::Store& store, const proto::Catalogue& catalogue) {
  std::vector<Contents> contents;
  for (uint32_t i = 0; i < catalogue.store_tensors.size(); ++i)
    contents.push_back(ReadContents(store, catalogue, i));
  return contents;
}

// Those of one tensor, of what `all` store tensors hold.
Values ValuesOf(const proto::Catalogue& catalogue, const std::vector<Contents>& all, uint32_t id,
                Values Contents::*values) {
  const proto::Placement& placement = catalogue.placements[id];
  const auto begin = (all[placement.store_tensor].*values).begin() +
                     static_cast<ptrdiff_t>(placement.element_offset);
  return Values(begin, begin + static_cast<ptrdiff_t>(catalogue.tensors[id].element_count));
}

// Every tensor is itself.
Moves Stay(const proto::Catalogue& catalogue) {
  Moves moves;
  for (uint32_t i = 0; i < catalogue.tensors.size(); ++i) moves.sources.emplace_back(i);
  return moves;
}

class RelayoutTest : public testing::TestWithParam<uint64_t> {
 protected:
  // Values of every element of every store tensor, those between members of bundles zeros.
  void Fill() {
    for (uint32_t i = 0; i < before_.store_tensors.size(); ++i) {
      const proto::StoreTensor& tensor = before_.store_tensors[i];
      Contents contents{Values(tensor.element_count), Values(tensor.element_count)};
      for (const uint32_t member : tensor.members) {
        const uint64_t count = before_.tensors[member].element_count;
        Values masters = RandomMasters(random_, count, GetParam());
        if (!tensor.trainable && tensor.dtype == Dtype::kBFloat16) {
          for (uint32_t& master : masters) master &= 0xFFFF0000;
        }
        if (!tensor.trainable && tensor.dtype == Dtype::kFloat16) {
          for (uint32_t& master : masters) {
            const float value = std::bit_cast<float>(master);
            master = std::bit_cast<uint32_t>(kernels::FromHalf(kernels::ToHalf(value)));
          }
        }
        const Values moments = RandomMasters(random_, count, GetParam());
        const uint64_t offset = before_.placements[member].element_offset;
        std::copy(masters.begin(), masters.end(), contents.masters.begin() + offset);
        if (tensor.trainable)
          std::copy(moments.begin(), moments.end(), contents.exp_avg.begin() + offset);
      }
      WriteContents(*from_, before_, i, contents);
      contents_.push_back(std::move(contents));
    }
    ASSERT_EQ(RunToEnd(*from_,
                       [&](swap::Store::Done done) { from_->Commit(7, "blob", std::move(done)); }),
              absl::OkStatus());
  }

  Random random_{GetParam()};
  const proto::Catalogue before_ = *proto::BuildCatalogue(Tensors(false));
  const proto::Catalogue after_ = *proto::BuildCatalogue(Tensors(true));
  const std::unique_ptr<swap::Store> from_ = MakeStore(before_, 1), to_ = MakeStore(after_, 2);
  std::vector<Contents> contents_;
};

TEST_P(RelayoutTest, EveryValueIsWhereTheOtherLayoutHasIt) {
  Fill();
  ASSERT_EQ(CopyEpoch({from_.get(), &before_}, {to_.get(), &after_}, Stay(after_), nullptr),
            absl::OkStatus());
  EXPECT_EQ(to_->committed().epoch, 7u);
  EXPECT_EQ(to_->committed().blob, "blob");
  const std::vector<Contents> copied = ReadAll(*to_, after_);
  for (uint32_t id = 0; id < before_.tensors.size(); ++id) {
    for (const auto values : {&Contents::masters, &Contents::exp_avg}) {
      EXPECT_EQ(ValuesOf(before_, contents_, id, values), ValuesOf(after_, copied, id, values))
          << before_.tensors[id].name;
    }
  }
}

// In another order, without some, and with further ones, large and small.
TEST_P(RelayoutTest, OtherTensorsFindTheirValues) {
  Fill();
  std::vector<proto::Tensor> tensors;
  Moves moves;
  for (uint32_t id = before_.tensors.size(); id-- > 0;) {
    const proto::Tensor& tensor = before_.tensors[id];
    if (id % 5 == 0) {
      tensors.push_back(tensor);
      tensors.back().name += ".further";
      moves.sources.emplace_back();
    }
    if (id % 4 == 0) continue;
    tensors.push_back(tensor);
    tensors.back().name += ".renamed";
    moves.sources.emplace_back(id);
  }
  moves.blob = "another";
  const proto::Catalogue others = *proto::BuildCatalogue(tensors);
  const std::unique_ptr<swap::Store> to = MakeStore(others, 3);
  ASSERT_EQ(CopyEpoch({from_.get(), &before_}, {to.get(), &others}, moves, nullptr),
            absl::OkStatus());
  EXPECT_EQ(to->committed().epoch, 7u);
  EXPECT_EQ(to->committed().blob, "another");
  const std::vector<Contents> copied = ReadAll(*to, others);
  for (uint32_t id = 0; id < others.tensors.size(); ++id) {
    for (const auto values : {&Contents::masters, &Contents::exp_avg}) {
      const std::optional<uint32_t> source = moves.sources[id];
      const Values expected = source.has_value() ? ValuesOf(before_, contents_, *source, values)
                                                 : Values(others.tensors[id].element_count);
      EXPECT_EQ(expected, ValuesOf(others, copied, id, values)) << others.tensors[id].name;
    }
  }
}

TEST_P(RelayoutTest, ADamagedExtentEndsItBeforeAnythingIsCommitted) {
  Fill();
  const swap::ExtentId id = ExtentIdOf(0, Plane::kResidual, 1);
  const MappedRegion bytes = *MappedRegion::Anonymous(from_->ExtentBytes(id));
  const swap::WriteRequest wrong{id, bytes.data(), /*crc=*/1};
  ASSERT_EQ(RunToEnd(*from_,
                     [&](swap::Store::Done done) {
                       from_->Write({&wrong, 1}, std::move(done));
                     }),
            absl::OkStatus());
  const absl::Status status =
      CopyEpoch({from_.get(), &before_}, {to_.get(), &after_}, Stay(after_), nullptr);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kChecksum) << status;
  EXPECT_EQ(to_->committed().sequence, 0u);
}

TEST_P(RelayoutTest, ItEndsWhenNobodyWantsItAnyMore) {
  Fill();
  const absl::Status status =
      CopyEpoch({from_.get(), &before_}, {to_.get(), &after_}, Stay(after_), [] { return true; });
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kSessionEnded) << status;
}

// One element in so many is a tie.
INSTANTIATE_TEST_SUITE_P(Ties, RelayoutTest, testing::Values(3, 200'000));

}  // namespace
}  // namespace offload::daemon
