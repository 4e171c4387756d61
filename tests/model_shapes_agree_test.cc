// A plan that `offloadctl plan --params N` makes must be of the model that `examples/train --params
// N` builds.

#include <gtest/gtest.h>

#include "examples/model_shape.h"
#include "zero3/model_shapes.h"

namespace offload {
namespace {

TEST(ModelShapesAgreeTest, PlannerAndTrainerChooseTheSameLlama) {
  for (const int64_t parameters : {20'000LL, 1'000'000LL, 10'000'000LL, 110'000'000LL,
                                   150'000'000LL, 1'000'000'000LL, 8'000'000'000LL}) {
    const auto planned = zero3::LlamaShapeFor(static_cast<uint64_t>(parameters));
    const auto built = examples::ShapeForParameters(
        {.kind = examples::ModelKind::kLlama, .parameters = parameters, .context = 128});
    ASSERT_TRUE(planned.ok() && built.ok()) << parameters;
    EXPECT_EQ(planned->layers, built->layers) << parameters;
    EXPECT_EQ(planned->hidden, built->hidden) << parameters;
    EXPECT_EQ(planned->heads, built->heads) << parameters;
    EXPECT_EQ(zero3::ParameterCount(*planned), examples::ParameterCount(*built)) << parameters;
  }
}

}  // namespace
}  // namespace offload
