#include "proto/plane_set.h"

#include "gtest/gtest.h"

namespace offload::proto {
namespace {

using kernels::OptimizerSpec;

TEST(PlaneSetTest, ABf16TensorHasBothHalvesOfItsMasterAndTheOptimizersState) {
  const PlaneSet planes(Dtype::kBFloat16, /*trainable=*/true, OptimizerSpec("adamw"));
  EXPECT_EQ(planes.Bits(Plane::kWeight), 16u);
  EXPECT_EQ(planes.Bits(Plane::kResidual), 16u);
  EXPECT_EQ(planes.Bits(Plane::kState0), 32u);
  EXPECT_EQ(planes.Bits(Plane::kState1), 32u);
  EXPECT_EQ(planes.Bits(Plane::kState2), 0u);
  EXPECT_EQ(planes.Bits(Plane::kTies), 1u);
  EXPECT_EQ(planes.updated_count(), 4u);
  EXPECT_EQ(planes.Names(), "weight, master, exp_avg, exp_avg_sq");
}

TEST(PlaneSetTest, AnFp32WeightIsItsOwnMaster) {
  const PlaneSet planes(Dtype::kFloat32, /*trainable=*/true, OptimizerSpec("sgd"));
  EXPECT_EQ(planes.Bits(Plane::kWeight), 32u);
  EXPECT_EQ(planes.Bits(Plane::kMaster), 32u);
  EXPECT_FALSE(planes.Has(Plane::kResidual));
  EXPECT_EQ(planes.updated_count(), 1u);
}

TEST(PlaneSetTest, AFrozenTensorHasItsWeightAlone) {
  const PlaneSet planes(Dtype::kBFloat16, /*trainable=*/false, OptimizerSpec("adamw"));
  EXPECT_EQ(planes.updated_count(), 1u);
  EXPECT_FALSE(planes.Has(Plane::kMaster));
  EXPECT_EQ(planes.Names(), "weight");
}

TEST(PlaneSetTest, StateIsFoundByTheOptimizersNames) {
  const PlaneSet sgd(Dtype::kFloat32, true, OptimizerSpec("sgd", {{"momentum", 0.9}}));
  EXPECT_EQ(sgd.Find("momentum_buffer"), Plane::kState0);
  EXPECT_EQ(sgd.Find("exp_avg"), Plane::kState0) << "the name of an earlier release";
  EXPECT_EQ(sgd.Find("exp_avg_sq"), std::nullopt);
  EXPECT_STREQ(sgd.name(Plane::kState0), "momentum_buffer");
  const PlaneSet adamw(Dtype::kFloat32, true, OptimizerSpec("adamw", {{"amsgrad", 1}}));
  EXPECT_EQ(adamw.Find("max_exp_avg_sq"), Plane::kState2);
  EXPECT_EQ(adamw.Find("master"), Plane::kMaster);
  EXPECT_EQ(PlaneSet(Dtype::kFloat32, true, OptimizerSpec("adamw")).Find("max_exp_avg_sq"),
            std::nullopt);
}

TEST(PlaneSetTest, NumbersThatNoPlaneHasAreNotThere) {
  const PlaneSet planes(Dtype::kBFloat16, true, OptimizerSpec("adamw"));
  for (const uint32_t number : {6u, 15u, 17u, 0xFFFFFFFFu})
    EXPECT_FALSE(planes.Has(static_cast<Plane>(number))) << number;
}

TEST(PlaneSetTest, AnOptimizerIsServedWhereWhatItKeepsIsKept) {
  const OptimizerSpec plain("sgd"), momentum("sgd", {{"momentum", 0.5}});
  EXPECT_TRUE(PlaneSet(Dtype::kFloat32, true, momentum).Serves(plain));
  EXPECT_FALSE(PlaneSet(Dtype::kFloat32, true, plain).Serves(momentum));
  EXPECT_FALSE(PlaneSet(Dtype::kFloat32, true, momentum).Serves(OptimizerSpec("adamw")));
}

}  // namespace
}  // namespace offload::proto
