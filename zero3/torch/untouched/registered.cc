#include "zero3/torch/untouched/registered.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace offload::untouched {
namespace {

using torch::nn::Module;

// A module without a class of its own.
struct Part final : Module {};

// Makes the modules on the way to a dotted name; returns the last one, and cuts the name to its
// end.
Module& ParentOf(Module& root, std::string& name) {
  Module* parent = &root;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
    const std::string head = name.substr(0, dot);
    name.erase(0, dot + 1);
    Module* next = nullptr;
    for (const auto& child : parent->named_children()) {
      if (child.key() == head) next = child.value().get();
    }
    parent = next != nullptr ? next : parent->register_module(head, std::make_shared<Part>()).get();
  }
  return *parent;
}

// Tensors of InferenceMode are never trained, and stay where they are.
bool IsAttachable(const at::Tensor& tensor) { return tensor.defined() && !tensor.is_inference(); }

class ModelBuilder {
 public:
  explicit ModelBuilder(const std::unordered_set<const c10::TensorImpl*>& sparse)
      : sparse_(&sparse) {}
  void Put(std::string name, const at::Tensor& tensor, bool is_buffer) {
    named_.insert(tensor.unsafeGetTensorImpl());
    Module& parent = ParentOf(*root_, name);
    if (is_buffer) {
      parent.register_buffer(name, tensor);
    } else {
      parent.register_parameter(name, tensor, tensor.requires_grad());
      if (sparse_->contains(tensor.unsafeGetTensorImpl()) && tensor.requires_grad() &&
          tensor.dim() == 2) {
        parent.register_module(
            name + "/table",
            torch::nn::Embedding(torch::nn::EmbeddingOptions(tensor.size(0), tensor.size(1))
                                     .sparse(true)
                                     ._weight(tensor)));
      }
    }
  }
  bool HasNamed(const at::Tensor& tensor) const {
    return named_.contains(tensor.unsafeGetTensorImpl());
  }
  std::shared_ptr<Module> root() const { return root_; }

 private:
  const std::unordered_set<const c10::TensorImpl*>* const sparse_;
  const std::shared_ptr<Module> root_ = std::make_shared<Part>();
  std::unordered_set<const c10::TensorImpl*> named_;
};

}  // namespace

void Registered::Add(const at::Tensor& tensor, bool is_buffer) {
  if (!IsAttachable(tensor) || !known_.insert(tensor.unsafeGetTensorImpl()).second) return;
  if (tensors_.size() >= forget_at_) ForgetDead();
  tensors_.push_back(MakeEntry("", tensor, is_buffer));
}

Registered::Entry Registered::MakeEntry(std::string name, const at::Tensor& tensor,
                                        bool is_buffer) {
  return {.name = std::move(name),
          .impl = tensor.unsafeGetTensorImpl(),
          .tensor = Weak(tensor.getIntrusivePtr()),
          .is_buffer = is_buffer};
}

// A program that makes and drops modules all the time would fill memory.
void Registered::ForgetDead() {
  const auto is_dead = [](const Entry& entry) { return entry.tensor.expired(); };
  for (const Entry& entry : tensors_) {
    if (!is_dead(entry)) continue;
    known_.erase(entry.impl);
    sparse_.erase(entry.impl);
  }
  std::erase_if(tensors_, is_dead);
  for (Names& names : names_) std::erase_if(names, is_dead);
  std::erase_if(names_, [](const Names& names) { return names.empty(); });
  forget_at_ = std::max<size_t>(forget_at_, 2 * tensors_.size());
}

void Registered::AddNames(const NamedTensors& parameters, const NamedTensors& buffers) {
  Names names;
  const auto add = [&names](const NamedTensors& tensors, bool is_buffer) {
    for (const auto& [name, tensor] : tensors) {
      if (IsAttachable(tensor)) names.push_back(MakeEntry(name, tensor, is_buffer));
    }
  };
  add(parameters, /*is_buffer=*/false);
  add(buffers, /*is_buffer=*/true);
  const auto is_same = [&names](const Names& other) {
    return std::equal(
        names.begin(), names.end(), other.begin(), other.end(),
        [](const Entry& a, const Entry& b) { return a.name == b.name && a.impl == b.impl; });
  };
  if (!names.empty() && std::none_of(names_.begin(), names_.end(), is_same))
    names_.push_back(std::move(names));
}

bool Registered::HasMemoryOf(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const auto memory_of = [](const c10::TensorImpl& impl) {
    return impl.unsafe_storage().unsafeGetStorageImpl();
  };
  return std::any_of(tensors_.begin(), tensors_.end(), [&](const Entry& entry) {
    const auto alive = entry.tensor.lock();
    return alive.defined() && alive->has_storage() &&
           memory_of(*alive) == memory_of(*tensor.unsafeGetTensorImpl());
  });
}

int64_t Registered::CountBufferWrites() const {
  int64_t count = 0;
  for (const Entry& entry : tensors_) {
    const auto alive = entry.is_buffer ? entry.tensor.lock() : nullptr;
    if (alive) count += at::Tensor(alive)._version();
  }
  return count;
}

std::shared_ptr<Module> Registered::Model() const {
  ModelBuilder builder(sparse_);
  std::vector<const Names*> by_size;
  for (const Names& names : names_) by_size.push_back(&names);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const Names* a, const Names* b) { return a->size() > b->size(); });
  int modules = 0;
  for (const Names* names : by_size) {
    // Several names of one tensor in one module all count, those in further modules do not.
    std::vector<std::pair<const Entry*, at::Tensor>> unnamed;
    for (const Entry& entry : *names) {
      const auto alive = entry.tensor.lock();
      if (alive && !builder.HasNamed(at::Tensor(alive))) unnamed.emplace_back(&entry, alive);
    }
    if (unnamed.empty()) continue;
    const std::string prefix = modules == 0 ? "" : absl::StrCat(modules, "/");
    ++modules;
    for (const auto& [entry, tensor] : unnamed)
      builder.Put(prefix + entry->name, tensor, entry->is_buffer);
  }
  int number = 0;
  for (const Entry& entry : tensors_) {
    const auto alive = entry.tensor.lock();
    if (!alive || builder.HasNamed(at::Tensor(alive))) continue;
    builder.Put(absl::StrCat("registered/", number++), at::Tensor(alive), entry.is_buffer);
  }
  return builder.root();
}

}  // namespace offload::untouched
