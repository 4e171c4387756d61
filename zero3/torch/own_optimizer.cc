#include "zero3/torch/own_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <dlfcn.h>
#include <offload/torch.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "zero3/torch/copied_groups.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/log.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/named_optimizer.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/sparse_update.h"
#include "zero3/torch/square_roots.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_state.h"

namespace offload {
namespace zero3 {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using Closure = Optimizer::LossClosure;

struct Attached {
  uintptr_t mark = 0;
  Engine* engine = nullptr;
  const Optimizer* attached_at = nullptr;
  const std::type_info* type = nullptr;          // of the object
  const Optimizer* own = nullptr;                // where it was last seen
  std::unordered_set<const void*> parameters;    // TensorImpl
  std::vector<std::vector<const void*>> groups;  // of them, when it was attached
  std::shared_ptr<Optimizer> inner;              // null: libtorch's own step
  std::function<void(Optimizer&)> after;         // of a step; null: it is one of the job's
  size_t number = 0;                             // of one that runs in this process
  std::shared_ptr<ProcessMemory> memory;         // for a step in this process, of a job
  absl::Status refusal;                          // of each step
  bool may_keep = false;                         // it has stepped, or has loaded a state
  bool has_stepped = false;                      // in this process, or has got a state
  bool is_heir = false;         // taken for another at the place of one that is dead
  ShownState shown;             // since the last step
  std::vector<KeptState> left;  // for libtorch's own steps after the engine
  std::exception_ptr failure;   // why there is none
};

StateKeeper& KeeperOf(const Attached& attached) {
  auto* const keeper = dynamic_cast<StateKeeper*>(attached.inner.get());
  OFFLOAD_CHECK(keeper != nullptr) << "an optimizer of ours that keeps nothing";
  return *keeper;
}

MasterKeeper& MasterKeeperOf(const Attached& attached) {
  auto* const keeper = dynamic_cast<MasterKeeper*>(attached.inner.get());
  OFFLOAD_CHECK(keeper != nullptr) << "an optimizer of ours that has no masters";
  return *keeper;
}

std::vector<std::vector<const void*>> GroupsOf(const Optimizer& optimizer) {
  std::vector<std::vector<const void*>> groups;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<const void*>& parameters = groups.emplace_back();
    for (const at::Tensor& parameter : group.params())
      parameters.push_back(parameter.unsafeGetTensorImpl());
  }
  return groups;
}

// What libtorch has under a name.
template <typename Function>
Function Next(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  OFFLOAD_CHECK(found != nullptr) << name;
  return reinterpret_cast<Function>(found);
}

// The object's own map: state() shows what the inner optimizer keeps.
using StateMap = std::remove_reference_t<decltype(std::declval<Optimizer&>().state())>;
StateMap& MapOf(const Optimizer& own) {
  using StateFunction = StateMap& (*)(Optimizer*);
  static const auto next = Next<StateFunction>("_ZN5torch5optim9Optimizer5stateEv");
  return next(const_cast<Optimizer*>(&own));  // attached as one that may be changed
}
// An attached object has a mark among its state, where no parameter has its place: it goes where
// the object is moved to, and dies with it.
void* KeyOf(const Attached& attached) { return reinterpret_cast<void*>(attached.mark); }
void SetMark(Optimizer& own, std::shared_ptr<Attached> attached) {
  MapOf(own)[KeyOf(*attached)] = BlankState(own, attached);
}

// What is kept begins anew, as in memory when state() is cleared.
void BeginAnew(const Attached& attached) {
  std::vector<KeptState> blank;
  for (const OptimizerParamGroup& group : attached.inner->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!IsTable(parameter)) blank.push_back({.parameter = parameter});
    }
  }
  KeeperOf(attached).ReplaceState(blank);
}

// The object has what the closed engine has left, and no mark.
void GoOnInMemory(Optimizer& own, const Attached& attached) {
  if (attached.failure) std::rethrow_exception(attached.failure);
  MapOf(own).erase(KeyOf(attached));
  if (attached.left.empty() || attached.shown.is_shown)
    return;  // what is shown is the same, or edited
  const PlainState plain;
  SetState(own, attached.left);
}

// What dead objects have left to a living one.
struct Left {
  std::unordered_set<const void*> all;      // TensorImpl
  std::unordered_set<const void*> stepped;  // of them: in this process
};

// Of a dead object that ran in this process, whose place one of its class and groups takes.
struct Former {
  size_t number = 0;
  bool has_stepped = false;
};

// Attached objects of engines that are there, and of closed ones while the objects live.
class Table {
 public:
  void Add(Optimizer& own, Attached attached) {
    std::lock_guard lock(mutex_);
    attached.mark = last_mark_ += 2;  // odd: no address of a parameter
    attached.own = attached.attached_at = &own;
    attached.type = &typeid(own);
    attached.parameters = ParametersOf(own.param_groups());
    attached.groups = GroupsOf(own);
    std::erase_if(attached_, [&](const auto& other) {
      return IsFormer(other, attached) && other->number == attached.number;
    });
    attached_.push_back(std::make_shared<Attached>(std::move(attached)));
    SetMark(own, attached_.back());
  }

  std::optional<Former> FindFormer(Engine& engine, const Optimizer& own) {
    const Attached self{.engine = &engine, .type = &typeid(own), .groups = GroupsOf(own)};
    std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Attached>& attached : attached_) {
      if (IsFormer(attached, self))
        return Former{.number = attached->number, .has_stepped = attached->has_stepped};
    }
    return std::nullopt;
  }

  // Null: an ordinary object.
  std::shared_ptr<Attached> Find(Optimizer& own) {
    if (const std::shared_ptr<Attached> closed = FindClosed(own)) {
      GoOnInMemory(own, *closed);
      return nullptr;
    }
    if (std::shared_ptr<Attached> marked = FindMarked(own)) return marked;
    std::shared_ptr<Attached> cleared = FindCleared(own);
    if (cleared == nullptr) return nullptr;
    SetMark(own, cleared);
    cleared->is_heir = true;
    if (cleared->inner != nullptr) {
      CopyGroups(own, *cleared->inner);
      BeginAnew(*cleared);
    }
    return cleared;
  }

  bool IsAttached(Optimizer& own) { return FindMarked(own) != nullptr; }

  // What a closed engine has left of an object is in it afterwards.
  void TakeLeft(Optimizer& own) {
    if (const std::shared_ptr<Attached> closed = FindClosed(own)) GoOnInMemory(own, *closed);
  }

  // Whether it is attached to this engine already, without having been asked for.
  bool IsHeir(Optimizer& own, const Engine& engine) {
    const std::shared_ptr<Attached> marked = FindMarked(own);
    return marked != nullptr && marked->engine == &engine && std::exchange(marked->is_heir, false);
  }

  // Those that step themselves write weights, as the trainer may, and own nothing beside others.
  bool IsLeftByDead(const void* parameter) {
    std::lock_guard lock(mutex_);
    bool is_left = false;
    for (const std::shared_ptr<Attached>& attached : attached_) {
      if (!attached->parameters.contains(parameter)) continue;
      if (IsDead(attached)) {
        is_left = true;
      } else if (attached->inner != nullptr) {
        return false;
      }
    }
    return is_left;
  }

  // Whether another object that lives has one of these parameters.
  bool HasLivingOwner(const Attached& self, const std::unordered_set<const void*>& parameters) {
    std::lock_guard lock(mutex_);
    return std::any_of(attached_.begin(), attached_.end(), [&](const auto& other) {
      return other.get() != &self && other->engine == self.engine && other->inner != nullptr &&
             !IsDead(other) &&
             std::any_of(parameters.begin(), parameters.end(), [&](const void* parameter) {
               return other->parameters.contains(parameter);
             });
    });
  }

  // The parameters of an object that is being attached that no other, which lives, has.
  std::vector<OptimizerParamGroup> WithoutOwned(Engine& engine,
                                                std::vector<OptimizerParamGroup> groups) {
    const Attached self{.engine = &engine};
    for (OptimizerParamGroup& group : groups) {
      std::erase_if(group.params(), [&](const at::Tensor& parameter) {
        return HasLivingOwner(self, {parameter.unsafeGetTensorImpl()});
      });
    }
    return groups;
  }

  // What dead objects have left of these parameters.
  Left FindLeft(const Engine& engine, const std::unordered_set<const void*>& parameters) {
    std::lock_guard lock(mutex_);
    Left left;
    for (const std::shared_ptr<Attached>& attached : attached_) {
      if (attached->engine != &engine || !IsDead(attached)) continue;
      for (const void* const parameter : attached->parameters) {
        if (!parameters.contains(parameter)) continue;
        left.all.insert(parameter);
        if (attached->has_stepped) left.stepped.insert(parameter);
      }
    }
    return left;
  }

  // The same; a living object has them now.
  Left Inherit(const Engine& engine, const std::unordered_set<const void*>& parameters) {
    const Left left = FindLeft(engine, parameters);
    std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Attached>& attached : attached_) {
      if (attached->engine != &engine || !IsDead(attached)) continue;
      std::erase_if(attached->parameters,
                    [&](const void* parameter) { return parameters.contains(parameter); });
    }
    std::erase_if(attached_, [&](const std::shared_ptr<Attached>& attached) {
      return attached->engine == &engine && IsDead(attached) && attached->parameters.empty();
    });
    return left;
  }

  void AddParameters(Attached& attached, const std::unordered_set<const void*>& parameters) {
    std::lock_guard lock(mutex_);
    attached.parameters.insert(parameters.begin(), parameters.end());
  }

  void Close(const Optimizer* attached_at, const Engine* engine) {
    const std::shared_ptr<Attached> attached = Take(attached_at, engine);
    if (attached == nullptr) return;
    const bool lives = attached.use_count() > 1;  // its mark is there
    try {
      if (lives && attached->inner != nullptr && KeeperOf(*attached).IsLeft())
        attached->left = KeeperOf(*attached).GatherState();
    } catch (...) {
      attached->failure = std::current_exception();
    }
    attached->inner.reset();
    attached->after = nullptr;
    std::lock_guard lock(mutex_);
    std::erase_if(closed_, [](const auto& closed) { return closed.expired(); });
    closed_.push_back(attached);
  }

 private:
  // Nobody but the table has it: no object's mark.
  static bool IsDead(const std::shared_ptr<Attached>& attached) {
    return attached.use_count() == 1;
  }
  static bool IsFormer(const std::shared_ptr<Attached>& attached, const Attached& of) {
    return IsDead(attached) && attached->after != nullptr && attached->engine == of.engine &&
           *attached->type == *of.type && attached->groups == of.groups;
  }
  static bool IsMarked(const Optimizer& own, const Attached& attached) {
    const StateMap& map = MapOf(own);
    return map.find(KeyOf(attached)) != map.end();
  }
  std::shared_ptr<Attached> FindClosed(const Optimizer& own) {
    std::lock_guard lock(mutex_);
    for (const std::weak_ptr<Attached>& weak : closed_) {
      const std::shared_ptr<Attached> closed = weak.lock();
      if (closed != nullptr && IsMarked(own, *closed)) return closed;
    }
    return nullptr;
  }
  std::shared_ptr<Attached> FindMarked(const Optimizer& own) {
    std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Attached>& attached : attached_) {
      if (!IsMarked(own, *attached)) continue;
      attached->own = &own;
      return attached;
    }
    return nullptr;
  }
  // The trainer has cleared state(), or has made another at the place of one that is dead: the last
  // that was attached there.
  std::shared_ptr<Attached> FindCleared(const Optimizer& own) {
    std::lock_guard lock(mutex_);
    for (auto it = attached_.rbegin(); it != attached_.rend(); ++it) {
      const std::shared_ptr<Attached>& attached = *it;
      if (attached->own != &own || *attached->type != typeid(own)) continue;
      for (const void* const parameter : ParametersOf(own.param_groups())) {
        if (attached->parameters.contains(parameter)) return attached;
      }
    }
    return nullptr;
  }
  std::shared_ptr<Attached> Take(const Optimizer* attached_at, const Engine* engine) {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(attached_.begin(), attached_.end(), [&](const auto& attached) {
      return attached->attached_at == attached_at && attached->engine == engine;
    });
    if (found == attached_.end()) return nullptr;
    std::shared_ptr<Attached> taken = std::move(*found);
    attached_.erase(found);
    return taken;
  }

  std::mutex mutex_;
  uintptr_t last_mark_ = 1;
  std::vector<std::shared_ptr<Attached>> attached_;
  std::vector<std::weak_ptr<Attached>> closed_;
};
Table& OfProcess() {
  static auto* const kTable = new Table;
  return *kTable;
}

// ---- What state() shows -------------------------------------------------------------------------

// The object is given copies of what is kept, and the next step takes back what the trainer has
// changed of them.
void Show(Optimizer& own, Attached& attached) {
  if (attached.shown.is_shown) return;
  CopyGroups(own, *attached.inner);
  ShowState(own, KeeperOf(attached), attached.shown, KeyOf(attached));
}

// With its groups: the trainer may have put there what a parameter keeps that only they have.
void TakeBack(Optimizer& own, Attached& attached) {
  if (attached.inner == nullptr) return;
  CopyGroups(own, *attached.inner);
  TakeBackState(own, KeeperOf(attached), attached.shown, KeyOf(attached));
}

// What the trainer holds of it has the values of now.
void FollowHeld(Optimizer& own, Attached& attached) {
  if (attached.inner != nullptr)
    ShowAgain(own, KeeperOf(attached), attached.shown, KeyOf(attached));
}

// What an optimizer that is dead has kept of these parameters goes, and with it masters of 16-bit
// ones: what comes begins with the weights, as one in memory does. One parameter after the other,
// since their masters are in memory meanwhile.
void BeginWithWeights(StateKeeper& keeper, const std::vector<OptimizerParamGroup>& groups,
                      const std::unordered_set<const void*>& parameters) {
  const at::NoGradGuard no_grad;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameters.contains(parameter.unsafeGetTensorImpl()) || parameter.numel() == 0 ||
          IsTable(parameter))
        continue;
      KeptState blank{.parameter = parameter};
      if (parameter.scalar_type() != MasterType(parameter))
        blank.master = parameter.detach().to(MasterType(parameter));
      keeper.ReplaceState({&blank, 1});
    }
  }
}

// A parameter of a dead object has another one now. Whether none of the job's steps is that
// other's: the dead one may have stepped in an earlier run.
bool SucceedsAnew(const Engine& engine) {
  const auto* const offloads = dynamic_cast<const ModuleEngine*>(&engine);
  return offloads != nullptr && offloads->tensors().Succeed() && offloads->tensors().keeps_state();
}

// The inner optimizer gets what the trainer has changed: kept state, groups, options.
void Update(Optimizer& own, Attached& attached) {
  std::unordered_set<const void*> gained;
  for (const OptimizerParamGroup& group : own.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const void* const impl = parameter.unsafeGetTensorImpl();
      if (!attached.parameters.contains(impl)) gained.insert(impl);
    }
  }
  if (!gained.empty() && OfProcess().HasLivingOwner(attached, gained)) {
    ThrowStatus(MakeError(
        ErrorId::kBadValue,
        "a group was added to the optimizer with a parameter that another one has already",
        "Destroy the other one before, or name every parameter in the groups of one optimizer"));
  }
  TakeBack(own, attached);
  if (gained.empty()) return;
  const Left left = OfProcess().Inherit(*attached.engine, gained);
  if (auto* const offloads = dynamic_cast<ModuleEngine*>(attached.engine))
    offloads->TakeToDaemon(gained);
  const bool begins_anew = !left.all.empty() && SucceedsAnew(*attached.engine);
  BeginWithWeights(KeeperOf(attached), own.param_groups(), begins_anew ? left.all : left.stepped);
  OfProcess().AddParameters(attached, gained);
}

using StepFunction = at::Tensor (*)(Optimizer*, Closure);
using SaveFunction = void (*)(const Optimizer*, torch::serialize::OutputArchive&);
using LoadFunction = void (*)(Optimizer*, torch::serialize::InputArchive&);

at::Tensor Step(Optimizer* own, Closure closure, StepFunction next) {
  const std::shared_ptr<Attached> attached = OfProcess().Find(*own);
  if (attached == nullptr) {
    ForgetReadMasters(*own);  // libtorch steps without
    return next(own, std::move(closure));
  }
  ThrowIfError(attached->refusal);
  std::optional<ProcessMemory::Use> use;
  if (attached->memory != nullptr) use.emplace(attached->memory, /*inside_passes=*/true);
  // What steps in this process holds gradients, which an Attach() of another thread may move. No
  // closure runs meanwhile.
  const auto take_turn = [&]() -> std::optional<TensorEngine::Turn> {
    const auto* const offloads = dynamic_cast<const ModuleEngine*>(attached->engine);
    if (offloads == nullptr || attached->memory == nullptr) return std::nullopt;
    return offloads->tensors().TakeTurn();
  };
  if (attached->inner != nullptr && attached->memory != nullptr) {
    at::Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    const auto turn = take_turn();
    Update(*own, *attached);
    attached->inner->step();
    attached->may_keep = attached->has_stepped = true;
    FollowHeld(*own, *attached);
    attached->after(*own);
    return loss;
  }
  if (attached->inner != nullptr) {
    Update(*own, *attached);
    const auto follow = [&]() -> at::Tensor {  // a closure may change options, and look at state()
      at::Tensor loss = closure();
      Update(*own, *attached);
      return loss;
    };
    at::Tensor loss = attached->inner->step(closure != nullptr ? Closure(follow) : Closure());
    attached->may_keep = attached->has_stepped = true;
    FollowHeld(*own, *attached);
    return loss;
  }
  const auto turn = closure == nullptr ? take_turn() : std::nullopt;
  at::Tensor loss = next(own, std::move(closure));
  attached->has_stepped = true;
  attached->after(*own);
  return loss;
}

// While an object is attached: it begins anew with what a dead one has left. Optimizers that the
// engine makes do not.
class Heritage {
 public:
  Heritage() { open = true; }
  ~Heritage() { open = false; }
  Heritage(const Heritage&) = delete;
  Heritage& operator=(const Heritage&) = delete;
  static bool is_open() { return open; }

 private:
  static thread_local bool open;
};
thread_local bool Heritage::open = false;

// While libtorch looks at all of an object's state: without the mark; what was put there of ours is
// gone afterwards.
class Lent {
 public:
  Lent(Optimizer& own, std::shared_ptr<Attached> attached)
      : own_(own), attached_(std::move(attached)) {
    MapOf(own_).erase(KeyOf(*attached_));
  }
  ~Lent() {
    if (attached_->inner != nullptr) MapOf(own_).clear();
    SetMark(own_, attached_);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  const PlainState plain_;
  Optimizer& own_;
  const std::shared_ptr<Attached> attached_;
};

// A file as libtorch writes it of an optimizer in memory.
void Save(const Optimizer* own, torch::serialize::OutputArchive& archive, SaveFunction next) {
  auto& object = const_cast<Optimizer&>(*own);  // was attached as one that may be changed
  const std::shared_ptr<Attached> attached = OfProcess().Find(object);
  if (attached == nullptr) {
    next(own, archive);
    return WriteReadMasters(object, archive);
  }
  TakeBack(object, *attached);
  {
    const Lent lent(object, attached);
    if (attached->inner != nullptr) SetState(object, KeeperOf(*attached).GatherState());
    next(own, archive);
    if (attached->inner != nullptr) WriteMasters(MasterKeeperOf(*attached), archive);
  }
  FollowHeld(object, *attached);
}

// Options come with the file; what it says of no parameter stays as it is, as in libtorch.
void Load(Optimizer* own, torch::serialize::InputArchive& archive, LoadFunction next) {
  const std::shared_ptr<Attached> attached = OfProcess().Find(*own);
  if (attached == nullptr) {
    next(own, archive);
    return ReadMasters(*own, archive);  // it may be attached later
  }
  TakeBack(*own, *attached);
  const Lent lent(*own, attached);
  next(own, archive);
  if (attached->inner == nullptr) return;
  KeeperOf(*attached).ReplaceState(StateOf(*own));
  ReadMasters(*own, archive);
  MasterKeeperOf(*attached).TakeReadMasters(/*is_last=*/false);
  attached->may_keep = attached->has_stepped = true;  // who comes after it begins anew
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

// It takes square roots that the daemon does not have.
bool HasRootsOfItsOwn(const NamedOptimizer& named, const std::vector<OptimizerParamGroup>& groups) {
  const auto has_double = [](const OptimizerParamGroup& group) {
    return std::any_of(group.params().begin(), group.params().end(), [](const at::Tensor& tensor) {
      return tensor.scalar_type() == at::kDouble;
    });
  };
  return std::any_of(groups.begin(), groups.end(), has_double) &&
         SpecOfAll(named, groups).TakesLibraryRoots() && !TorchDoubleRootsAreNearest();
}

bool KeepsSparsely(const torch::nn::Module& module, const Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr &&
         HasSparseMomentum(module, optimizer.param_groups(),
                           static_cast<const torch::optim::SGDOptions&>(optimizer.defaults()));
}

// Leaves out of `groups` what they have named before. Whether there was something.
bool NameEachOnce(std::vector<OptimizerParamGroup>& groups) {
  std::unordered_set<const void*> seen;
  size_t again = 0;
  for (OptimizerParamGroup& group : groups) {
    again += std::erase_if(group.params(), [&seen](const at::Tensor& parameter) {
      return !seen.insert(parameter.unsafeGetTensorImpl()).second;
    });
  }
  return again > 0;
}

// What an optimizer is going to keep that runs in this process: its file.
// `has_masters`: with it there are masters of 16-bit weights, and it keeps numbers of their type.
uint64_t ExpectedBytes(const Optimizer& optimizer, bool has_masters) {
  uint64_t weight_bytes = 0, vectors = has_masters ? 3 : 2;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto type = has_masters ? MasterType(parameter) : parameter.scalar_type();
      weight_bytes += parameter.requires_grad() ? parameter.numel() * c10::elementSize(type) : 0;
    }
    if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr) continue;
    const auto& options = static_cast<const torch::optim::LBFGSOptions&>(
        group.has_options() ? group.options() : optimizer.defaults());
    vectors = std::max(vectors, 2 * static_cast<uint64_t>(options.history_size()) + 4);
  }
  // Beside its tensors there is what a file says of them.
  return std::bit_ceil(vectors * weight_bytes + vectors * weight_bytes / 16 + (64 << 10));
}
void Expect(Engine& engine, const Optimizer& optimizer, bool has_masters = false) {
  auto* const offloads = dynamic_cast<ModuleEngine*>(&engine);
  if (offloads == nullptr) return;
  const uint64_t size_bytes = ExpectedBytes(optimizer, has_masters);
  offloads->tensors().ExpectForeign({&size_bytes, 1});
}

// What an object that is being attached has in itself.
std::vector<KeptState> OwnStateOf(Optimizer& own) {
  const PlainState plain;
  return StateOf(own);
}

// The daemon does not have the planes of an object of another kind than the job's: it steps with
// the arithmetic of OFFLOADD_DISABLE=1, and each step is committed like an edit of the trainer's.
void AttachInProcess(ModuleEngine& engine, torch::nn::Module& module, Optimizer& own,
                     NamedOptimizer named) {
  const std::vector<KeptState> states = OwnStateOf(own);
  const std::vector<OptimizerParamGroup> groups = own.param_groups();
  const kernels::OptimizerSpec spec = SpecOfAll(named, groups);
  const auto parameters = ParametersOf(own.param_groups());
  const Left left = OfProcess().FindLeft(engine, parameters);
  const bool follows = left.all.size() == parameters.size();
  const bool is_new = !left.all.empty() && engine.tensors().Succeed();
  const std::optional<Former> former = OfProcess().FindFormer(engine, own);
  const size_t number =
      former.has_value() ? former->number : engine.NextForeign(c10::demangle(typeid(own).name()));
  // One of an earlier run that has lost what it kept. It may be there only for the next to follow.
  absl::Status refusal;
  const bool goes_on = left.stepped.size() < parameters.size() && !is_new;
  if (goes_on) refusal = engine.CheckResumes(groups, spec, number);
  if (!follows) ThrowIfError(refusal);
  if (!former.has_value()) Expect(engine, own, ModuleEngine::HasMasters(groups));
  {
    const Heritage heritage;
    engine.AttachInProcess(module, groups, spec);
  }
  auto inner = std::make_shared<InMemoryOptimizer>(groups, std::move(named));
  engine.AddForeign(number, /*commits_itself=*/true, inner);
  if (!goes_on) engine.ForgetForeign(number);
  if (!states.empty()) inner->ReplaceState(states);
  MapOf(own).clear();
  const auto commit = [weak = engine.weak_from_this(), number](Optimizer& stepped) {
    if (const auto alive = std::static_pointer_cast<ModuleEngine>(weak.lock()))
      alive->CommitForeign(number, stepped);
  };
  OfProcess().Add(own, {.engine = &engine,
                        .inner = std::move(inner),
                        .after = commit,
                        .number = number,
                        .memory = engine.tensors().process_memory(),
                        .refusal = std::move(refusal),
                        .may_keep = !states.empty(),
                        .has_stepped = !states.empty() || (former && former->has_stepped)});
  if (!goes_on || !engine.HasForeign(number)) return;
  engine.GiveForeign(number, own);
  OfProcess().Find(own)->has_stepped = false;  // it has the job's state, as who comes after it may
}

// The same, of an object that is being attached. `engine`: null in memory.
bool BeginsAnew(ModuleEngine* engine, const Left& left) {
  if (engine == nullptr) return false;
  if (!left.all.empty()) return SucceedsAnew(*engine);
  if (const uint64_t successions = engine->tensors().CountSuccessions(); successions > 0) {
    Log().info(
        "the job has had {} optimizers one after another: the first of this run goes on with what "
        "the last has kept (state().clear() lets it begin anew), and so does each that takes its "
        "place without a step between, as often as before",
        successions + 1);
  }
  return false;
}

// The same of one that runs unmodified.
bool FollowsAnew(Engine& engine, const std::optional<Former>& former) {
  auto* const offloads = dynamic_cast<ModuleEngine*>(&engine);
  if (offloads == nullptr || !former.has_value()) return BeginsAnew(offloads, {});
  offloads->GiveNumber(former->number);
  return offloads->tensors().Succeed() || former->has_stepped;
}

// Threads may attach at once. In memory engines have nothing to wait for: one turn for all.
class AttachTurn {
 public:
  explicit AttachTurn(Engine& engine) {
    if (const auto* const offloads = dynamic_cast<ModuleEngine*>(&engine)) {
      of_engine_.emplace(offloads->TakeAttachTurn());
    } else {
      static auto* const kInMemory = new std::mutex;
      in_memory_ = std::unique_lock(*kInMemory);
    }
  }

 private:
  std::optional<ModuleEngine::AttachTurn> of_engine_;
  std::unique_lock<std::mutex> in_memory_;
};

// An object that was asked for its state, or was given one, before it was attached: it has begun
// anew, in place of the dead one that was where it is.
void CountHeir(Engine& engine) {
  auto* const offloads = dynamic_cast<ModuleEngine*>(&engine);
  if (offloads == nullptr || offloads->tensors().Succeed() || !offloads->has_resumed()) return;
  Log().warn(
      "an optimizer's state() was read, or loaded, before the optimizer was attached: it begins "
      "anew, though an earlier run may have stepped it; attach it first to go on");
}

}  // namespace

void Divert(Optimizer& own, Engine& engine, std::shared_ptr<Optimizer> inner, bool may_keep,
            bool has_state) {
  OfProcess().Add(own, {.engine = &engine,
                        .inner = std::move(inner),
                        .may_keep = may_keep,
                        .has_stepped = has_state});
}
void Follow(Optimizer& own, Engine& engine, size_t number, bool has_stepped,
            std::function<void(Optimizer&)> after) {
  const auto* const offloads = dynamic_cast<const ModuleEngine*>(&engine);
  OfProcess().Add(own,
                  {.engine = &engine,
                   .after = std::move(after),
                   .number = number,
                   .memory = offloads != nullptr ? offloads->tensors().process_memory() : nullptr,
                   .has_stepped = has_stepped});
}
std::unique_ptr<Optimizer> MakeSparselyKept(Engine& engine, torch::nn::Module& module,
                                            const std::vector<OptimizerParamGroup>& groups,
                                            const NamedOptimizer& optimizer) {
  const auto* const defaults =
      dynamic_cast<const torch::optim::SGDOptions*>(optimizer.defaults.get());
  if (defaults == nullptr || engine.world_size() > 1 ||
      !HasSparseMomentum(module, groups, *defaults))
    return nullptr;
  SpecOfAll(optimizer, groups);  // throws for options that make no sense
  auto own = std::make_unique<torch::optim::SGD>(groups, *defaults);
  engine.Attach(module, *own);
  return own;
}
void TakeLeftState(Optimizer& own) { OfProcess().TakeLeft(own); }
bool IsLeftByDead(const at::Tensor& parameter) {
  return Heritage::is_open() && OfProcess().IsLeftByDead(parameter.unsafeGetTensorImpl());
}

static StateMap& StateToShow(Optimizer& own) {
  StateMap& map = MapOf(own);
  if (PlainState::is_on()) return map;
  try {
    const std::shared_ptr<Attached> attached = OfProcess().Find(own);
    if (attached != nullptr) {
      if (attached->inner != nullptr && attached->may_keep) Show(own, *attached);
    } else if (auto* const keeper = dynamic_cast<StateKeeper*>(&own)) {  // engine->AdamW(…)
      ShowState(own, *keeper, keeper->shown_state());
    }
  } catch (const std::exception& error) {  // whoever asks for a state may not be thrown at
    Log().error("state() of the optimizer has nothing of the job: {}", error.what());
  }
  return map;
}

void Undivert(const Optimizer* attached_at, const Engine& engine) {
  OfProcess().Close(attached_at, &engine);
}

}  // namespace zero3

void Engine::Attach(torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  const zero3::AttachTurn turn(*this);
  std::optional<zero3::NamedOptimizer> named = zero3::NamedAs(optimizer);
  zero3::TakeLeftState(optimizer);
  if (zero3::OfProcess().IsHeir(optimizer, *this)) return zero3::CountHeir(*this);
  const ParamGroups groups = optimizer.param_groups();
  ParamGroups each_once = groups;
  // Each step updates such a parameter twice, which the daemon does not.
  const bool names_twice = zero3::NameEachOnce(each_once);
  if (world_size() > 1 && dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    zero3::ThrowStatus(MakeError(
        ErrorId::kUnsupportedOptimizer,
        "torch::optim::LBFGS with several ranks: it decides by the loss, which is another one in "
        "each of them",
        "Use an optimizer that takes gradients only, or train with one rank"));
  }
  // What a living one has in the daemon is the job's: of an encoder that both have this one keeps
  // its own.
  const bool shares = named.has_value() && !zero3::OfProcess().IsAttached(optimizer) &&
                      zero3::OfProcess().HasLivingOwner(
                          {.engine = this}, zero3::ParametersOf(optimizer.param_groups()));
  const bool steps_itself =
      named.has_value()
          ? shares || zero3::HasRootsOfItsOwn(*named, groups) ||
                ((names_twice || zero3::KeepsSparsely(module, optimizer)) && world_size() == 1)
          : dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr;
  if (named.has_value() || steps_itself) zero3::CheckIsInFront();
  if (steps_itself) {
    if (named.has_value() && names_twice) {
      zero3::Log().warn(
          "the optimizer names parameters in two places (parameters() does so for a submodule that "
          "is registered twice), and each of its steps updates them twice");
    }
    const auto former = zero3::OfProcess().FindFormer(*this, optimizer);
    if (!former.has_value()) zero3::Expect(*this, optimizer);
    const bool begins_anew = zero3::FollowsAnew(*this, former);
    const size_t number = AttachForeign(
        module, shares ? zero3::OfProcess().WithoutOwned(*this, each_once) : each_once,
        c10::demangle(typeid(optimizer).name()), /*commits_itself=*/true);
    zero3::Follow(optimizer, *this, number, former && former->has_stepped,
                  [weak = weak_from_this(), number](torch::optim::Optimizer& stepped) {
                    if (const auto engine = weak.lock()) engine->CommitForeign(number, stepped);
                  });
    auto* const offloads = dynamic_cast<zero3::ModuleEngine*>(this);
    if (!begins_anew) {
      GiveForeign(number, optimizer);
    } else if (offloads != nullptr) {
      offloads->ForgetForeign(number);
    }
  } else if (auto* const offloads = dynamic_cast<zero3::ModuleEngine*>(this);
             named.has_value() && offloads != nullptr &&
             offloads->IsOfOtherKind(zero3::SpecOfAll(*named, groups))) {
    zero3::AttachInProcess(*offloads, module, optimizer, *std::move(named));
  } else if (named.has_value()) {
    const std::vector<zero3::KeptState> states = zero3::OwnStateOf(optimizer);
    const bool may_keep = step() > 0 || !states.empty();
    std::shared_ptr<torch::optim::Optimizer> inner = [&] {
      const zero3::Heritage heritage;
      return MakeOptimizer(module, groups, *std::move(named));
    }();
    auto& keeper = dynamic_cast<zero3::StateKeeper&>(*inner);
    const zero3::Left left =
        zero3::OfProcess().Inherit(*this, zero3::ParametersOf(optimizer.param_groups()));
    const bool begins_anew = zero3::BeginsAnew(offloads, left);
    zero3::BeginWithWeights(keeper, groups, begins_anew ? left.all : left.stepped);
    const bool goes_on = !begins_anew && left.stepped.empty();
    if (!states.empty()) goes_on ? keeper.BeginWith(states) : keeper.ReplaceState(states);
    if (goes_on && step() > 0) zero3::ForgetReadMasters(optimizer);  // the job has its own
    zero3::MapOf(optimizer).clear();
    zero3::Divert(optimizer, *this, std::move(inner), may_keep, /*has_state=*/!states.empty());
  } else {
    zero3::Expect(*this, optimizer);
    foreign_[&optimizer] = AttachForeign(module, each_once, c10::demangle(typeid(optimizer).name()),
                                         /*commits_itself=*/false);
    GiveForeign(foreign_[&optimizer], optimizer);
  }
  own_optimizers_.push_back(&optimizer);
}

void Engine::CommitStep(torch::optim::Optimizer& optimizer) {
  const std::optional<size_t> number = [&]() -> std::optional<size_t> {
    const zero3::AttachTurn turn(*this);  // others may be attached meanwhile
    const auto found = foreign_.find(&optimizer);
    if (found == foreign_.end()) return std::nullopt;
    return found->second;
  }();
  if (!number.has_value()) {
    zero3::ThrowStatus(MakeError(
        ErrorId::kBadValue,
        absl::StrCat("CommitStep() of a ", c10::demangle(typeid(optimizer).name()),
                     " that is not attached, or commits its steps itself"),
        "Attach it first, engine->Attach(module, optimizer), and leave it where it is; objects of "
        "torch::optim need no CommitStep()"));
  }
  CommitForeign(*number, optimizer);
}

Engine::~Engine() {
  for (const torch::optim::Optimizer* optimizer : own_optimizers_)
    zero3::Undivert(optimizer, *this);
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

auto Optimizer::state() noexcept -> offload::zero3::StateMap& {
  return offload::zero3::StateToShow(*this);
}
auto Optimizer::state() const noexcept -> const offload::zero3::StateMap& {
  return offload::zero3::StateToShow(const_cast<Optimizer&>(*this));
}

OFFLOAD_DIVERT(AdamW, "5AdamW")
OFFLOAD_DIVERT(Adam, "4Adam")
OFFLOAD_DIVERT(SGD, "3SGD")
OFFLOAD_DIVERT(Adagrad, "7Adagrad")
OFFLOAD_DIVERT(RMSprop, "7RMSprop")
OFFLOAD_DIVERT(LBFGS, "5LBFGS")

}  // namespace torch::optim

#undef OFFLOAD_DIVERT
