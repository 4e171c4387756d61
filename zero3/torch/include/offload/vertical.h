// offload/vertical.h: accumulation of gradients that reads each weight twice a step, however many
// micro-batches there are.
//
// Micro-batches one after the other, as trainers accumulate, carry every weight from the drive for
// every one of them. A model that is a sequence of blocks can go through them the other way: all
// micro-batches through a block before the next block. What is kept between blocks are their
// outputs; each block is computed again in the backward, as with checkpointed activations.
//
//   auto losses = offload::VerticalBackward(
//       *model, offload::Blocks(model->layers), micro_batches,
//       [&](const torch::Tensor& output, size_t m) { return Loss(output, targets[m]) / count; });
//   optimizer->step();
//
// stands for
//
//   for (size_t m = 0; m < count; ++m) loss(model->forward(micro_batches[m]), m).backward();
//
// and gives its losses and gradients, bit for bit. What cannot be: random numbers that a block
// draws (dropout) would be drawn in another order, and gradients of a parameter of two blocks (tied
// embeddings) be added in another order; with more than one micro-batch both are refused (OFD-1002)
// unless `exact` is false. A block that computes something else the second time is refused.
//
// Works on any libtorch module, offloaded or not.
#pragma once

#include <offload/torch.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace offload {

// One of the blocks: a function of what the block before it gave, of the weights, and of nothing
// else that changes.
struct Block {
  std::function<torch::Tensor(const torch::Tensor& input)> forward;
  // Whose buffers it may change (running statistics); null: any of the model's, which is slower to
  // watch. Not owned.
  torch::nn::Module* module = nullptr;
};

// The modules of a sequence, in its order. They have to outlive the blocks.
std::vector<Block> Blocks(torch::nn::Sequential& sequence);

struct VerticalOptions {
  // Refuse what would not have the bits of micro-batches one after the other.
  bool exact = true;
  // A folder for what is kept between the blocks, in a file without a name; empty: in memory, which
  // holds (blocks + 2) x micro-batches of them. On a device it stays in memory.
  std::string spill_folder;
};

// Forward and backward of the micro-batches `inputs` through `blocks` of `model`. `loss` makes a
// scalar of the last block's output for micro-batch number m; whoever wants the mean divides in it.
// Gradients are added to `.grad`. Returns the losses, detached, in the order of the micro-batches.
//
// Throws OFD-1002 for blocks that cannot be taken in this order, 1209 when the folder cannot hold
// what is kept; gradients are then those of a backward that was broken off: zero_grad().
std::vector<torch::Tensor> VerticalBackward(
    torch::nn::Module& model, const std::vector<Block>& blocks,
    const std::vector<torch::Tensor>& inputs,
    const std::function<torch::Tensor(const torch::Tensor& output, size_t micro_batch)>& loss,
    const VerticalOptions& options = VerticalOptions());

}  // namespace offload
