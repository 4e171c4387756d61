#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <offload/vertical.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "zero3/torch/boundaries.h"
#include "zero3/torch/throw_status.h"

namespace offload {
namespace zero3 {
namespace {

using at::Tensor;

[[noreturn]] void Refuse(const std::string& what, std::string_view way_out) {
  ThrowStatus(MakeError(ErrorId::kBadValue, "VerticalBackward: " + what, way_out));
}

// The whole number that has the bits of an element of `type`; none: elements are compared as such.
std::optional<at::ScalarType> BitsOf(at::ScalarType type) {
  if (!at::isFloatingType(type)) return std::nullopt;
  switch (c10::elementSize(type)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return std::nullopt;
  }
}

// Also equal where both are the same NaN.
bool SameBits(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const std::optional<at::ScalarType> bits = BitsOf(a.scalar_type());
  return bits.has_value() ? at::equal(a.view(*bits), b.view(*bits)) : at::equal(a, b);
}

// torch's generators that blocks on the CPU, and on the device of their inputs, draw from.
class RandomNumbers {
 public:
  explicit RandomNumbers(const std::vector<Tensor>& inputs) {
    generators_.push_back(at::detail::getDefaultCPUGenerator());
    for (const Tensor& input : inputs) {
      if (input.is_cpu() || input.is_meta() || generators_.size() > 1) continue;
      generators_.push_back(at::globalContext().defaultGenerator(input.device()));
    }
  }

  using States = std::vector<Tensor>;
  States Save() const {
    States states;
    for (at::Generator generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }
  void Restore(const States& states) {
    for (size_t i = 0; i < generators_.size(); ++i) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(states[i]);
    }
  }
  static bool Same(const States& a, const States& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      if (!at::equal(a[i], b[i])) return false;
    }
    return true;
  }

 private:
  std::vector<at::Generator> generators_;
};

// The buffers that a block may change.
class BufferValues {
 public:
  explicit BufferValues(const torch::nn::Module& module) : buffers_(module.buffers()) {
    for (const Tensor& buffer : buffers_) known_.push_back(buffer.detach().clone());
  }

  // What has changed since the last call, by the buffer's number, as it was before.
  using Values = std::map<size_t, Tensor>;
  Values TakeChanges() {
    Values before;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (SameBits(buffers_[i], known_[i])) continue;
      before[i] = std::exchange(known_[i], buffers_[i].detach().clone());
    }
    return before;
  }
  void Set(const Values& values) {
    const at::NoGradGuard no_gradients;
    for (const auto& [i, value] : values) buffers_[i].copy_(value);
  }
  // All of them as they were known last.
  void Restore() {
    const at::NoGradGuard no_gradients;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!SameBits(buffers_[i], known_[i])) buffers_[i].copy_(known_[i]);
    }
  }

 private:
  const std::vector<Tensor> buffers_;
  std::vector<Tensor> known_;
};

// Parameters whose gradients a backward from `output` adds to.
std::vector<Tensor> ParametersBehind(const Tensor& output) {
  std::vector<Tensor> parameters;
  std::vector<torch::autograd::Node*> waiting;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) waiting.push_back(node);
  };
  visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!waiting.empty()) {
    torch::autograd::Node* const node = waiting.back();
    waiting.pop_back();
    if (auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      parameters.push_back(leaf->variable);
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return parameters;
}

class VerticalPass {
 public:
  using LossFunction = std::function<Tensor(const Tensor& output, size_t micro_batch)>;

  VerticalPass(torch::nn::Module& model, const std::vector<Block>& blocks,
               const std::vector<Tensor>& inputs, const LossFunction& loss,
               const VerticalOptions& options)
      : model_(model),
        blocks_(blocks),
        inputs_(inputs),
        loss_(loss),
        exact_(options.exact),
        random_(inputs),
        boundaries_(blocks.size() * inputs.size(), options.spill_folder),
        runs_(blocks.size() * inputs.size()),
        upstream_needs_gradients_(blocks.size(), false) {
    for (const auto& [name, parameter] : model.named_parameters().pairs()) {
      names_.emplace(parameter.unsafeGetTensorImpl(), name);
    }
  }

  std::vector<Tensor> Run() {
    const size_t last = blocks_.size() - 1;
    for (size_t block = 0; block < last; ++block) Forward(block);
    std::vector<Tensor> losses = BackwardFromLosses(last);
    const RandomNumbers::States end = random_.Save();
    for (size_t block = last; block-- > 0 && Backward(block);) {
    }
    random_.Restore(end);
    return losses;
  }

 private:
  // What block and micro-batch found.
  struct Found {
    RandomNumbers::States random;
    BufferValues::Values buffers;  // those that it changed, before
  };

  size_t IndexOf(size_t block, size_t micro_batch) const {
    return block * inputs_.size() + micro_batch;
  }
  struct Owner {
    Tensor parameter;  // kept, so that no other gets its address
    size_t block = 0;
  };

  torch::nn::Module& ModuleOf(size_t block) {
    return blocks_[block].module != nullptr ? *blocks_[block].module : model_;
  }

  // A copy, since blocks may write into what they are given.
  Tensor Compute(size_t block, const Tensor& input) {
    Tensor output = blocks_[block].forward(input.clone());
    if (!output.defined()) {
      Refuse(absl::StrCat("block ", block, " gives no tensor"), "Return the block's output");
    }
    return output;
  }

  // The outputs of a block, which the next one gets. Graphs are dropped: they are made again when
  // the backward comes here. With gradients all the same: operators are those of a forward.
  void Forward(size_t block) {
    BufferValues buffers(ModuleOf(block));
    for (size_t m = 0; m < inputs_.size(); ++m) {
      Found& found = runs_[IndexOf(block, m)];
      found.random = random_.Save();
      const Tensor input = block == 0 ? inputs_[m] : Input(block, m);
      const Tensor output = Compute(block, input);
      found.buffers = buffers.TakeChanges();
      CheckRandomNumbers(block, found);
      if (m == 0) CheckParameters(block, input, output);
      upstream_needs_gradients_[block + 1] = output.requires_grad();
      boundaries_.Put(IndexOf(block + 1, m), output);
    }
  }

  // What the block before gave for this micro-batch, as a leaf where a gradient has to come to it.
  Tensor Input(size_t block, size_t m) {
    Tensor input = boundaries_.Get(IndexOf(block, m));
    return input.set_requires_grad(upstream_needs_gradients_[block]);
  }

  std::vector<Tensor> BackwardFromLosses(size_t block) {
    std::vector<Tensor> losses;
    incoming_.resize(inputs_.size());
    taken_.resize(inputs_.size());
    for (size_t m = 0; m < inputs_.size(); ++m) {
      const Found found{random_.Save(), {}};
      const Tensor input = block == 0 ? inputs_[m] : Input(block, m);
      const Tensor loss = loss_(Compute(block, input), m);
      CheckRandomNumbers(block, found);
      if (m == 0) CheckParameters(block, input, loss);
      losses.push_back(loss.detach());
      loss.backward();
      Keep(block, m, input);
    }
    return losses;
  }

  // False when nothing before this block has a gradient.
  bool Backward(size_t block) {
    BufferValues buffers(ModuleOf(block));
    bool further = false;
    for (size_t m = 0; m < inputs_.size(); ++m) {
      const Tensor gradient = std::exchange(incoming_[m], Tensor());
      const Tensor expected = std::exchange(taken_[m], Tensor());
      if (!gradient.defined()) continue;
      random_.Restore(runs_[IndexOf(block, m)].random);
      buffers.Set(ValuesAt(block, m));
      const Tensor input = block == 0 ? inputs_[m] : Input(block, m);
      const Tensor output = Compute(block, input);
      if (!SameBits(output, expected)) {
        Refuse(
            absl::StrCat("block ", block,
                         " computed something else the second time for "
                         "micro-batch ",
                         m),
            "A block's output must depend on its input, on weights, on buffers of its module and "
            "on torch's default generator only; leave a model with other state to micro-batches "
            "one after the other");
      }
      torch::autograd::backward({output}, {gradient});
      Keep(block, m, input);
      further |= incoming_[m].defined();
    }
    buffers.Restore();
    return further;
  }

  // Of the buffers that this or a later micro-batch changed, as this one found them.
  BufferValues::Values ValuesAt(size_t block, size_t m) const {
    BufferValues::Values values;
    for (; m < inputs_.size(); ++m) {
      const BufferValues::Values& before = runs_[IndexOf(block, m)].buffers;
      values.insert(before.begin(), before.end());  // the first of a buffer stays
    }
    return values;
  }

  // The gradient that the backward has left at a block's input, for the block before.
  void Keep(size_t block, size_t m, const Tensor& input) {
    if (block == 0) return;
    boundaries_.Drop(IndexOf(block, m));
    if (!upstream_needs_gradients_[block]) return;
    incoming_[m] = input.grad();
    taken_[m] = input.detach();
  }

  void CheckRandomNumbers(size_t block, const Found& found) const {
    if (!exact_ || inputs_.size() == 1 || RandomNumbers::Same(found.random, random_.Save())) return;
    Refuse(absl::StrCat("block ", block,
                        " draws random numbers (dropout?), which micro-batches one "
                        "after the other would draw in another order"),
           "Set VerticalOptions::exact to false to train with these numbers, or take the "
           "micro-batches one after the other");
  }

  void CheckParameters(size_t block, const Tensor& input, const Tensor& output) {
    if (!exact_ || !output.requires_grad()) return;
    for (const Tensor& parameter : ParametersBehind(output)) {
      if (parameter.is_same(input)) continue;
      const auto [owner, is_new] =
          owners_.try_emplace(parameter.unsafeGetTensorImpl(), Owner{parameter, block});
      if (is_new || owner->second.block == block) continue;
      if (inputs_.size() == 1 && !parameter.grad().defined()) continue;  // one sum of two
      const auto name = names_.find(parameter.unsafeGetTensorImpl());
      Refuse(absl::StrCat("parameter '", name != names_.end() ? name->second : "(no name)",
                          "' is of blocks ", owner->second.block, " and ", block,
                          " (tied?): its gradients would be added in another order than those of "
                          "micro-batches one after the other, and rounded otherwise"),
             "Set VerticalOptions::exact to false to accept these sums, or take the micro-batches "
             "one after the other");
    }
  }

  torch::nn::Module& model_;
  const std::vector<Block>& blocks_;
  const std::vector<Tensor>& inputs_;
  const LossFunction& loss_;
  const bool exact_;

  RandomNumbers random_;
  Boundaries boundaries_;  // inputs, by block and micro-batch; those of the first are the caller's
  std::vector<Found> runs_;                     // likewise
  std::vector<bool> upstream_needs_gradients_;  // by block: of its input
  std::vector<Tensor> incoming_;                // by micro-batch: of the present block's output
  std::vector<Tensor> taken_;                   // by micro-batch: that output
  std::unordered_map<const c10::TensorImpl*, Owner> owners_;
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
};

}  // namespace
}  // namespace zero3

std::vector<Block> Blocks(torch::nn::Sequential& sequence) {
  std::vector<Block> blocks;
  for (const torch::nn::AnyModule& module : *sequence) {
    blocks.push_back(
        {[module = module](const torch::Tensor& input) mutable { return module.forward(input); },
         module.ptr().get()});
  }
  return blocks;
}

std::vector<torch::Tensor> VerticalBackward(
    torch::nn::Module& model, const std::vector<Block>& blocks,
    const std::vector<torch::Tensor>& inputs,
    const std::function<torch::Tensor(const torch::Tensor& output, size_t micro_batch)>& loss,
    const VerticalOptions& options) {
  if (blocks.empty()) zero3::Refuse("there are no blocks", "Give at least one");
  for (const Block& block : blocks) {
    if (block.forward == nullptr) zero3::Refuse("a block has no function", "Give every block one");
  }
  if (loss == nullptr) zero3::Refuse("there is no loss", "Give a function that makes a scalar");
  for (const torch::Tensor& input : inputs) {
    if (!input.defined()) zero3::Refuse("a micro-batch is no tensor", "Give every one a tensor");
  }
  if (inputs.empty()) return {};
  return zero3::VerticalPass(model, blocks, inputs, loss, options).Run();
}

}  // namespace offload
