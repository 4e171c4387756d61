#include "zero3/torch/own_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <dlfcn.h>
#include <offload/torch.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/error.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_state.h"

namespace offload {
namespace zero3 {
namespace {

using torch::optim::Optimizer;
using Closure = Optimizer::LossClosure;

struct Attached {
  Optimizer* own = nullptr;
  std::shared_ptr<Optimizer> inner;  // null: libtorch's own step, then `after`
  std::function<void()> after;
  std::vector<const void*> parameters;  // TensorImpl, in the order of the groups
};

std::vector<const void*> ParametersOf(const Optimizer& optimizer) {
  std::vector<const void*> parameters;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params())
      parameters.push_back(parameter.unsafeGetTensorImpl());
  }
  return parameters;
}

class Table {
 public:
  void Set(Optimizer& own, Attached attached) {
    std::lock_guard lock(mutex_);
    attached.parameters = ParametersOf(own);
    attached_[&own] = std::make_shared<Attached>(std::move(attached));
  }
  void Erase(const Optimizer& own) {
    std::lock_guard lock(mutex_);
    attached_.erase(&own);
  }
  std::shared_ptr<Attached> Find(const Optimizer& own) {
    std::lock_guard lock(mutex_);
    const auto found = attached_.find(&own);
    if (found == attached_.end()) return nullptr;
    const std::vector<const void*> parameters = ParametersOf(own);
    const std::vector<const void*>& known = found->second->parameters;
    // The one that was attached has died, another has its place.
    if (parameters.size() < known.size() ||
        !std::equal(known.begin(), known.end(), parameters.begin()))
      return nullptr;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const Optimizer*, std::shared_ptr<Attached>> attached_;
};
Table& OfProcess() {
  static auto* const kTable = new Table;
  return *kTable;
}

void CopyOptions(Optimizer& from, Optimizer& to) {
  auto &source = from.param_groups(), &target = to.param_groups();
  if (source.size() != target.size()) {
    ThrowStatus(
        MakeError(ErrorId::kUnsupportedOptimizer,
                  absl::StrCat("the optimizer has ", source.size(),
                               " groups of parameters, it was attached with ", target.size()),
                  "Add all groups before Engine::Attach"));
  }
  for (size_t i = 0; i < source.size(); ++i)
    target[i].set_options(source[i].has_options() ? source[i].options().clone()
                                                  : from.defaults().clone());
}

// What libtorch has under a name.
template <typename Function>
Function Next(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  OFFLOAD_CHECK(found != nullptr) << name;
  return reinterpret_cast<Function>(found);
}

using StepFunction = at::Tensor (*)(Optimizer*, Closure);
using SaveFunction = void (*)(const Optimizer*, torch::serialize::OutputArchive&);
using LoadFunction = void (*)(Optimizer*, torch::serialize::InputArchive&);

at::Tensor Step(Optimizer* own, Closure closure, StepFunction next) {
  const std::shared_ptr<Attached> attached = OfProcess().Find(*own);
  if (attached == nullptr) return next(own, std::move(closure));
  if (attached->inner != nullptr) {
    CopyOptions(*own, *attached->inner);
    return attached->inner->step(std::move(closure));
  }
  at::Tensor loss = next(own, std::move(closure));
  attached->after();
  return loss;
}

StateKeeper& KeeperOf(const Attached& attached) {
  auto* const keeper = dynamic_cast<StateKeeper*>(attached.inner.get());
  OFFLOAD_CHECK(keeper != nullptr) << "an optimizer of ours that keeps nothing";
  return *keeper;
}

// Empties the object again: its state is elsewhere.
class Lent {
 public:
  explicit Lent(Optimizer& own) : own_(own) {}
  ~Lent() { own_.state().clear(); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  Optimizer& own_;
};

// A file as libtorch writes it of an optimizer in memory.
void Save(const Optimizer* own, torch::serialize::OutputArchive& archive, SaveFunction next) {
  const std::shared_ptr<Attached> attached = OfProcess().Find(*own);
  if (attached == nullptr || attached->inner == nullptr) return next(own, archive);
  const Lent lent(*attached->own);
  SetState(*attached->own, KeeperOf(*attached).GatherState());
  next(own, archive);
}

// Options come with the file; what it says of no parameter stays as it is, as in libtorch.
void Load(Optimizer* own, torch::serialize::InputArchive& archive, LoadFunction next) {
  const std::shared_ptr<Attached> attached = OfProcess().Find(*own);
  if (attached == nullptr || attached->inner == nullptr) return next(own, archive);
  const Lent lent(*own);
  next(own, archive);
  KeeperOf(*attached).ReplaceState(StateOf(*own));
}

// Throws when libtorch's functions stand in front of ours: its own step() would be called, and the
// job would never hear of it. Others may stand in front of both, and go on to ours.
void CheckIsInFront() {
  constexpr char kStep[] = "_ZN5torch5optim3SGD4stepESt8functionIFN2at6TensorEvEE";
  void* const first = ::dlsym(RTLD_DEFAULT, kStep);
  void* const behind = ::dlsym(RTLD_NEXT, kStep);
  if (first != nullptr && behind != nullptr && first != behind) return;
  ThrowStatus(MakeError(
      ErrorId::kUnsupportedOptimizer,
      "the program links libtorch before offload, which then cannot serve an optimizer object of "
      "torch's",
      "Link offload first, or make the optimizer with engine->AdamW(…) or its siblings"));
}

}  // namespace

void Divert(Optimizer& own, std::shared_ptr<Optimizer> inner) {
  OfProcess().Set(own, {.own = &own, .inner = std::move(inner), .after = {}, .parameters = {}});
}
void Follow(Optimizer& own, std::function<void()> after) {
  OfProcess().Set(own, {.own = &own, .inner = {}, .after = std::move(after), .parameters = {}});
}
void Undivert(const Optimizer& own) { OfProcess().Erase(own); }

}  // namespace zero3

void Engine::Attach(torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  std::optional<zero3::NamedOptimizer> named = zero3::NamedAs(optimizer);
  const ParamGroups groups = optimizer.param_groups();
  if (named.has_value() || dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr)
    zero3::CheckIsInFront();
  if (named.has_value()) {
    std::vector<zero3::KeptState> states = zero3::StateOf(optimizer);
    std::shared_ptr<torch::optim::Optimizer> inner =
        MakeOptimizer(module, groups, *std::move(named));
    if (!states.empty()) dynamic_cast<zero3::StateKeeper&>(*inner).BeginWith(std::move(states));
    optimizer.state().clear();
    zero3::Divert(optimizer, std::move(inner));
  } else if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    AttachForeign(module, groups, "torch::optim::LBFGS");
    zero3::Follow(optimizer, [weak = weak_from_this()] {
      if (const auto engine = weak.lock()) engine->CommitStep();
    });
  } else {
    AttachForeign(module, groups, "an optimizer of the trainer's own");
  }
  own_optimizers_.push_back(&optimizer);
}

Engine::~Engine() {
  for (const torch::optim::Optimizer* optimizer : own_optimizers_) zero3::Undivert(*optimizer);
}

}  // namespace offload

// ---- In front of libtorch -----------------------------------------------------------------------

// An exported definition in the program hides libtorch's, whose tables of virtual functions name
// it.
#define OFFLOAD_DIVERT(Class, mangled)                                           \
  at::Tensor Class::step(LossClosure closure) {                                  \
    static const auto next = offload::zero3::Next<offload::zero3::StepFunction>( \
        "_ZN5torch5optim" mangled "4stepESt8functionIFN2at6TensorEvEE");         \
    return offload::zero3::Step(this, std::move(closure), next);                 \
  }                                                                              \
  void Class::save(serialize::OutputArchive& archive) const {                    \
    static const auto next = offload::zero3::Next<offload::zero3::SaveFunction>( \
        "_ZNK5torch5optim" mangled "4saveERNS_9serialize13OutputArchiveE");      \
    offload::zero3::Save(this, archive, next);                                   \
  }                                                                              \
  void Class::load(serialize::InputArchive& archive) {                           \
    static const auto next = offload::zero3::Next<offload::zero3::LoadFunction>( \
        "_ZN5torch5optim" mangled "4loadERNS_9serialize12InputArchiveE");        \
    offload::zero3::Load(this, archive, next);                                   \
  }

namespace torch::optim {

OFFLOAD_DIVERT(AdamW, "5AdamW")
OFFLOAD_DIVERT(Adam, "4Adam")
OFFLOAD_DIVERT(SGD, "3SGD")
OFFLOAD_DIVERT(Adagrad, "7Adagrad")
OFFLOAD_DIVERT(RMSprop, "7RMSprop")
OFFLOAD_DIVERT(LBFGS, "5LBFGS")

}  // namespace torch::optim

#undef OFFLOAD_DIVERT
