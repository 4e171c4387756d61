#include "proto/slab_layout.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "proto/shm_abi.h"

namespace offload::proto {
namespace {

using kernels::OptimizerSpec;

Tensor MakeTensor(std::string name, std::vector<int64_t> shape, Dtype dtype = Dtype::kBFloat16,
                  bool trainable = true) {
  return {
      .name = std::move(name), .shape = std::move(shape), .dtype = dtype, .trainable = trainable};
}

Catalogue Build(std::vector<Tensor> tensors) {
  absl::StatusOr<Catalogue> catalogue = BuildCatalogue(std::move(tensors));
  EXPECT_TRUE(catalogue.ok()) << catalogue.status();
  return *std::move(catalogue);
}

// Everything resident, gradients in the region one after the other.
MemoryPlan ResidentPlan(const Catalogue& catalogue) {
  MemoryPlan plan;
  for (const StoreTensor& tensor : catalogue.store_tensors) {
    plan.weight_resident.push_back(true);
    plan.state_resident.push_back(ExtentCount(tensor.element_count));
  }
  plan.region_bytes = kRegionFixedBytes;
  for (const Tensor& tensor : catalogue.tensors) {
    GradientPlacement gradient;
    if (tensor.trainable) {
      gradient = {.home = GradientHome::kRegion, .offset_bytes = plan.region_bytes};
      plan.region_bytes += PaddedBytes(tensor.element_count * DtypeBytes(tensor.dtype));
    }
    plan.gradients.push_back(gradient);
  }
  return plan;
}

// One bundle (two biases) and one big matrix of three extents, the last short.
Catalogue SmallModel() {
  return Build({MakeTensor("a.bias", {100}), MakeTensor("a.weight", {2 * kExtentElements + 5}),
                MakeTensor("b.bias", {7})});
}

TEST(BuildCatalogueTest, BundlesSmallTensorsOfOneKindInOrder) {
  const Catalogue catalogue = SmallModel();
  ASSERT_EQ(catalogue.store_tensors.size(), 2u);
  EXPECT_TRUE(catalogue.store_tensors[0].bundle);
  EXPECT_EQ(catalogue.store_tensors[0].members, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(catalogue.placements[2].store_tensor, 0u);
  EXPECT_EQ(catalogue.placements[2].element_offset, 128u);  // 100, aligned to 64
  EXPECT_EQ(catalogue.store_tensors[0].element_count, 135u);
  EXPECT_FALSE(catalogue.store_tensors[1].bundle);
  EXPECT_EQ(catalogue.placements[1].element_offset, 0u);
}

TEST(BuildCatalogueTest, KeepsDtypesAndFrozenTensorsApart) {
  const Catalogue catalogue = Build({MakeTensor("a", {4}, Dtype::kBFloat16, true),
                                     MakeTensor("b", {4}, Dtype::kFloat32, true),
                                     MakeTensor("c", {4}, Dtype::kBFloat16, false),
                                     MakeTensor("d", {4}, Dtype::kBFloat16, true)});
  ASSERT_EQ(catalogue.store_tensors.size(), 3u);
  EXPECT_EQ(catalogue.placements[3].store_tensor, catalogue.placements[0].store_tensor);
  EXPECT_FALSE(catalogue.store_tensors[catalogue.placements[2].store_tensor].trainable);
}

TEST(BuildCatalogueTest, BeginsABundleWhenTheOpenOneIsFull) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < 9; ++i) {
    tensors.push_back(MakeTensor("t" + std::to_string(i), {kBundledElementsMax}));
  }
  const Catalogue catalogue = Build(std::move(tensors));
  ASSERT_EQ(catalogue.store_tensors.size(), 2u);
  EXPECT_EQ(catalogue.store_tensors[0].element_count, kExtentElements);
  EXPECT_EQ(catalogue.store_tensors[1].members, (std::vector<uint32_t>{8}));
}

TEST(BuildCatalogueTest, ATensorAboveTheLimitStandsAlone) {
  const Catalogue catalogue = Build({MakeTensor("a", {kBundledElementsMax + 1})});
  EXPECT_FALSE(catalogue.store_tensors[0].bundle);
}

TEST(BuildCatalogueTest, AScalarHasOneElement) {
  EXPECT_EQ(Build({MakeTensor("scale", {})}).tensors[0].element_count, 1u);
}

TEST(BuildCatalogueTest, RefusesWhatCannotBeStored) {
  const auto error = [](std::vector<Tensor> tensors) {
    return ErrorIdOf(BuildCatalogue(std::move(tensors)).status());
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(error({MakeTensor("a", {1}), MakeTensor("a", {2})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("", {1})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {3, 0})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {-1})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {kHuge, kHuge, kHuge})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {kHuge})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {4, kHuge})}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {int64_t{kElementsMax}}), MakeTensor("b", {1})}),
            ErrorId::kUnsupportedModel);
  EXPECT_EQ(error({MakeTensor("a", {1}, static_cast<Dtype>(7))}), ErrorId::kUnsupportedModel);
  Tensor contradictory = MakeTensor("a", {3});
  contradictory.element_count = 4;
  EXPECT_EQ(error({contradictory}), ErrorId::kUnsupportedModel);
  EXPECT_EQ(error(std::vector<Tensor>(kTensorsMax + 1)), ErrorId::kUnsupportedModel);
}

TEST(BuildCatalogueTest, AcceptsTheOrdersThatAShapeHasEachInOneWay) {
  Tensor tensor = MakeTensor("a", {2, 1, 3, 4});
  const auto accepts = [&](std::vector<uint32_t> order) {
    tensor.dimension_order = std::move(order);
    return BuildCatalogue({tensor}).ok();
  };
  EXPECT_TRUE(accepts({}));
  EXPECT_TRUE(accepts({0, 3, 2}));
  EXPECT_TRUE(accepts({3, 2, 0}));
  EXPECT_FALSE(accepts({0, 2, 3})) << "rows";
  EXPECT_FALSE(accepts({0, 3, 2, 1})) << "a dimension of one element";
  EXPECT_FALSE(accepts({0, 3}));
  EXPECT_FALSE(accepts({3, 3, 0}));
  EXPECT_FALSE(accepts({4, 2, 0}));
}

TEST(BuildCatalogueTest, AcceptsACountThatAgreesWithTheShape) {
  Tensor counted = MakeTensor("a", {3, 2});
  counted.element_count = 6;
  EXPECT_TRUE(BuildCatalogue({counted}).ok());
}

TEST(BuildCatalogueTest, AcceptsTheLargestModel) {
  const Catalogue catalogue = Build({MakeTensor("a", {int64_t{kElementsMax}})});
  EXPECT_EQ(ExtentCount(catalogue.tensors[0].element_count), kElementsMax / kExtentElements);
}

TEST(ExtentTest, CoversATensorWithoutGapOrTail) {
  for (const uint64_t count :
       {uint64_t{1}, uint64_t{kExtentElements} - 1, uint64_t{kExtentElements},
        uint64_t{kExtentElements} + 1, uint64_t{5} * kExtentElements + 17}) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < ExtentCount(count); ++i) sum += ExtentElements(count, i);
    EXPECT_EQ(sum, count);
    EXPECT_EQ(ExtentElements(count, ExtentCount(count)), 0u);
  }
  EXPECT_EQ(ExtentCount(0), 0u);
}

TEST(StateBytesTest, CountsTwelveBytesPerElementWithTheWeight) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
    const StoreTensor tensor = Build({MakeTensor("a", {kExtentElements}, dtype)}).store_tensors[0];
    EXPECT_EQ(WeightSlotBytes(tensor) + StateBytes(tensor, 0), 12ull * kExtentElements);
  }
}

TEST(StateBytesTest, PadsEveryPlaneAndLeavesFrozenTensorsOut) {
  const auto bytes = [](const OptimizerSpec& optimizer, bool trainable = true) {
    const auto catalogue =
        BuildCatalogue({MakeTensor("a", {1}, Dtype::kBFloat16, trainable)}, optimizer);
    return StateBytes(catalogue->store_tensors[0], 0);
  };
  EXPECT_EQ(bytes(OptimizerSpec("adamw")), 3 * kSectorBytes);
  EXPECT_EQ(bytes(OptimizerSpec("adamw", {{"amsgrad", 1}})), 4 * kSectorBytes);
  EXPECT_EQ(bytes(OptimizerSpec("sgd", {{"momentum", 0.9}})), 2 * kSectorBytes);
  EXPECT_EQ(bytes(OptimizerSpec("sgd")), kSectorBytes);
  EXPECT_EQ(bytes(OptimizerSpec("adamw"), /*trainable=*/false), 0u);
}

TEST(SlabLayoutTest, PiecesAreAlignedDisjointAndInside) {
  const Catalogue catalogue = SmallModel();
  MemoryPlan plan = ResidentPlan(catalogue);
  plan.weight_resident[1] = false;
  plan.state_resident[1] = 2;
  plan.window_bytes = WeightSlotBytes(catalogue.store_tensors[1]);
  plan.pipeline_blocks = 3;
  plan.pipeline_gradients = true;
  const absl::StatusOr<SlabLayout> layout = ComputeSlabLayout(catalogue, plan);
  ASSERT_TRUE(layout.ok()) << layout.status();

  std::vector<std::pair<uint64_t, uint64_t>> pieces = {
      {0, sizeof(SlabHeader)},
      {layout->tensor_words_offset, 8 * catalogue.tensors.size()},
      {layout->weight_offset[0], WeightSlotBytes(catalogue.store_tensors[0])},
      {layout->window_offset, layout->window_bytes},
      {layout->pipeline_offset, 3 * layout->pipeline_block_bytes}};
  for (size_t i = 0; i < layout->state_offset.size(); ++i) {
    ASSERT_EQ(layout->state_offset[i].size(), plan.state_resident[i]);
    for (uint32_t extent = 0; extent < layout->state_offset[i].size(); ++extent) {
      pieces.emplace_back(layout->state_offset[i][extent],
                          StateBytes(catalogue.store_tensors[i], extent));
    }
  }
  std::sort(pieces.begin(), pieces.end());
  uint64_t end = 0;
  for (const auto& [offset, size] : pieces) {
    EXPECT_EQ(offset % kSectorBytes, 0u);
    EXPECT_GE(offset, end);
    end = offset + size;
  }
  EXPECT_LE(end, layout->total_bytes);
  EXPECT_EQ(layout->weight_offset[1], 0u);
  EXPECT_EQ(layout->pipeline_block_bytes, 12ull * kExtentElements);  // 10 of state, 2 of gradient
}

TEST(SlabLayoutTest, AnEmptyModelIsHeaderAndNothing) {
  const Catalogue catalogue = Build({});
  const auto layout = ComputeSlabLayout(catalogue, ResidentPlan(catalogue));
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->total_bytes, kSectorBytes);
}

class RefusedPlanTest : public testing::Test {
 protected:
  RefusedPlanTest() : catalogue_(SmallModel()), plan_(ResidentPlan(catalogue_)) {}
  void ExpectRefused() const {
    const auto layout = ComputeSlabLayout(catalogue_, plan_);
    EXPECT_EQ(ErrorIdOf(layout.status()), ErrorId::kProtocol) << layout.status();
  }
  Catalogue catalogue_;
  MemoryPlan plan_;
};

TEST_F(RefusedPlanTest, TheUntouchedPlanIsAccepted) {
  EXPECT_TRUE(ComputeSlabLayout(catalogue_, plan_).ok());
}
TEST_F(RefusedPlanTest, WeightVectorOfAnotherSize) {
  plan_.weight_resident.pop_back();
  ExpectRefused();
}
TEST_F(RefusedPlanTest, StateVectorOfAnotherSize) {
  plan_.state_resident.push_back(0);
  ExpectRefused();
}
TEST_F(RefusedPlanTest, GradientVectorOfAnotherSize) {
  plan_.gradients.clear();
  ExpectRefused();
}
TEST_F(RefusedPlanTest, BundleThatIsNotResident) {
  plan_.weight_resident[0] = false;
  plan_.window_bytes = 1ull << 30;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, MoreResidentStateThanExtents) {
  plan_.state_resident[1] = 4;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, WindowThatDoesNotHoldTheLargestTensor) {
  plan_.weight_resident[1] = false;
  plan_.window_bytes = WeightSlotBytes(catalogue_.store_tensors[1]) - kSectorBytes;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, UnalignedWindow) {
  plan_.window_bytes = 100;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, WindowBeyondTheAddressSpace) {
  plan_.window_bytes = std::numeric_limits<uint64_t>::max() - 4095;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, StateOnTheDriveWithoutPipeline) {
  plan_.state_resident[1] = 1;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, GradientOverTheRings) {
  plan_.gradients[0].offset_bytes = 4096;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, GradientBeyondTheRegion) {
  plan_.gradients[1].offset_bytes = std::numeric_limits<uint64_t>::max() - 4095;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, UnalignedGradient) {
  plan_.gradients[0].offset_bytes += 64;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, UnknownGradientHome) {
  plan_.gradients[0].home = static_cast<GradientHome>(9);
  ExpectRefused();
}
TEST_F(RefusedPlanTest, TrainableTensorWithoutGradient) {
  plan_.gradients[0].home = GradientHome::kNone;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, SpilledGradientBeyondTheScratchFile) {
  plan_.gradients[1] = {.home = GradientHome::kScratch, .offset_bytes = 0};
  plan_.pipeline_blocks = 1;
  plan_.pipeline_gradients = true;
  ExpectRefused();
  plan_.scratch_bytes = WeightSlotBytes(catalogue_.store_tensors[1]);
  EXPECT_TRUE(ComputeSlabLayout(catalogue_, plan_).ok());
}
TEST_F(RefusedPlanTest, SpilledGradientWithoutRoomInThePipeline) {
  plan_.gradients[1] = {.home = GradientHome::kScratch, .offset_bytes = 0};
  plan_.scratch_bytes = 1ull << 30;
  plan_.pipeline_blocks = 1;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, SpilledGradientWithoutPipeline) {
  plan_.gradients[1] = {.home = GradientHome::kScratch, .offset_bytes = 0};
  plan_.scratch_bytes = 1ull << 30;
  plan_.pipeline_gradients = true;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, RegionThatDoesNotHoldTheRings) {
  plan_.region_bytes = kRegionFixedBytes - kSectorBytes;
  ExpectRefused();
}
class WorldPlanTest : public RefusedPlanTest {
 protected:
  WorldPlanTest() {
    plan_.world_size = 2;
    plan_.other_region_bytes = plan_.region_bytes;
    for (size_t i = 0; i < plan_.gradients.size(); ++i) {
      if (catalogue_.tensors[i].trainable) plan_.gradients[i] = {.home = GradientHome::kSlab};
    }
  }
  void SpillSecond() {
    plan_.gradients[1] = {.home = GradientHome::kSlabScratch, .offset_bytes = 0};
    plan_.scratch_bytes = 1ull << 30;
    plan_.pipeline_blocks = 1;
    plan_.pipeline_gradients = true;
    plan_.sum_blocks = 3;
  }
};

TEST_F(WorldPlanTest, GradientWordsAndSumsStandSideBySide) {
  SpillSecond();
  const auto layout = ComputeSlabLayout(catalogue_, plan_);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->gradient_words_offset, GradientWordsOffset(catalogue_.tensors.size()));
  uint64_t end = layout->pipeline_offset + layout->pipeline_block_bytes;
  for (size_t i = 0; i < catalogue_.tensors.size(); ++i) {
    if (plan_.gradients[i].home != GradientHome::kSlab) {
      EXPECT_EQ(layout->sum_offset[i], 0u);
      continue;
    }
    EXPECT_EQ(layout->sum_offset[i], end);
    end +=
        PaddedBytes(catalogue_.tensors[i].element_count * DtypeBytes(catalogue_.tensors[i].dtype));
  }
  EXPECT_EQ(layout->sum_blocks_offset, end);
  EXPECT_EQ(layout->sum_block_bytes, WeightSlotBytes({.dtype = catalogue_.tensors[1].dtype,
                                                      .element_count = kExtentElements}));
  EXPECT_EQ(layout->total_bytes, end + 3 * layout->sum_block_bytes);
}
TEST_F(WorldPlanTest, SumsOfOneRank) {
  plan_.world_size = 1;
  plan_.other_region_bytes = 0;
  ExpectRefused();
}
TEST_F(WorldPlanTest, SumThatSaysWhereItStands) {
  plan_.gradients[0].offset_bytes = kSectorBytes;
  ExpectRefused();
}
TEST_F(WorldPlanTest, SpilledSumWithoutBlocks) {
  SpillSecond();
  EXPECT_TRUE(ComputeSlabLayout(catalogue_, plan_).ok());
  plan_.sum_blocks = 0;
  ExpectRefused();
}
TEST_F(WorldPlanTest, SpilledSumBeyondTheScratchFile) {
  SpillSecond();
  plan_.scratch_bytes = kSectorBytes;
  ExpectRefused();
}
TEST_F(WorldPlanTest, SpilledSumWithoutRoomInThePipeline) {
  SpillSecond();
  plan_.pipeline_gradients = false;
  ExpectRefused();
}
TEST_F(WorldPlanTest, OtherRanksWithoutRings) {
  plan_.other_region_bytes = kRegionFixedBytes - kSectorBytes;
  ExpectRefused();
}
TEST_F(WorldPlanTest, NoRankOrTooMany) {
  plan_.world_size = 0;
  ExpectRefused();
  plan_.world_size = kWorldSizeMax + 1;
  ExpectRefused();
}
TEST_F(WorldPlanTest, GradientOfARankBeyondItsRegion) {
  plan_.gradients[0] = {.home = GradientHome::kRegion, .offset_bytes = kRegionFixedBytes};
  EXPECT_TRUE(ComputeSlabLayout(catalogue_, plan_).ok());
  plan_.other_region_bytes = kRegionFixedBytes;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, OtherRanksOfOneRank) {
  plan_.other_region_bytes = kRegionFixedBytes;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, SumBlocksOfOneRank) {
  plan_.sum_blocks = 1;
  ExpectRefused();
}
TEST_F(RefusedPlanTest, FrozenTensorWithGradient) {
  catalogue_ = Build({MakeTensor("frozen", {100}, Dtype::kBFloat16, /*trainable=*/false)});
  plan_ = ResidentPlan(catalogue_);
  ASSERT_TRUE(ComputeSlabLayout(catalogue_, plan_).ok());
  plan_.region_bytes += kSectorBytes;
  plan_.gradients[0] = {.home = GradientHome::kRegion, .offset_bytes = kRegionFixedBytes};
  ExpectRefused();
}

TEST(OverheadTest, GrowsWithTensorsAndExtents) {
  const Catalogue empty = Build({});
  const Catalogue model = SmallModel();
  EXPECT_EQ(OverheadBytes(empty), 24ull << 20);
  // Four planes of the bundle's one extent and of the matrix's three, three tensors.
  EXPECT_EQ(OverheadBytes(model), (24ull << 20) + 4 * 4 * 128 + 3 * 512);
  const Catalogue plain = *BuildCatalogue(model.tensors, OptimizerSpec("sgd"));
  EXPECT_LT(OverheadBytes(plain), OverheadBytes(model));
}

}  // namespace
}  // namespace offload::proto
