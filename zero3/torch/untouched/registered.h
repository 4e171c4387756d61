// zero3/torch/untouched/registered.h
//
// The parameters and buffers that a program has registered with its modules, and what it calls
// them.
//
// libtorch's modules do not know their parents, and nobody says which of them is the model. What is
// known is each tensor when it is registered, and the names below a module whenever the program
// asks that module for its parameters, as trainers do for their optimizer. So the model is all that
// was registered and lives. The module that lists most of it names its tensors as they are named
// there; what only the n-th further one lists begins with "n/"; what none lists is called
// "registered/n", by the order of registration; a tensor of an optimizer that no module has
// registered, "optimizer0/group0/0". The same program gives the same names in every run.
//
// Thread safety: the caller's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace offload::untouched {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

class Registered {
 public:
  void AddParameter(const at::Tensor& parameter, bool has_sparse_gradients = false) {
    Add(parameter, /*is_buffer=*/false);
    if (has_sparse_gradients) sparse_.insert(parameter.unsafeGetTensorImpl());
  }
  void AddBuffer(const at::Tensor& buffer) { Add(buffer, /*is_buffer=*/true); }
  // What a module calls its tensors and those of its children.
  void AddNames(const NamedTensors& parameters, const NamedTensors& buffers);

  bool Contains(const at::Tensor& tensor) const {
    return tensor.defined() && known_.contains(tensor.unsafeGetTensorImpl());
  }

  // Also of views, and of what data() gives.
  bool HasMemoryOf(const at::Tensor& tensor) const;

  // Grows with each write to a buffer.
  int64_t CountBufferWrites() const;
  // A module that has everything that lives, under these names. Tables with sparse gradients are in
  // it as embeddings, too, behind that name.
  std::shared_ptr<torch::nn::Module> Model() const;

 private:
  // Does not keep the tensor's bytes; its address is not another tensor's while this lives.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    std::string name;                       // as a module calls it; empty without one
    const c10::TensorImpl* impl = nullptr;  // for comparisons
    Weak tensor;
    bool is_buffer = false;
  };
  static Entry MakeEntry(std::string name, const at::Tensor& tensor, bool is_buffer);
  using Names = std::vector<Entry>;

  void Add(const at::Tensor& tensor, bool is_buffer);
  void ForgetDead();

  std::vector<Entry> tensors_;  // in the order of registration
  std::unordered_set<const c10::TensorImpl*> known_;
  std::unordered_set<const c10::TensorImpl*> sparse_;
  std::vector<Names> names_;  // one of each module that was asked
  size_t forget_at_ = 1024;   // tensors
};

}  // namespace offload::untouched
