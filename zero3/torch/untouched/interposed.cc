// In front of libtorch, by LD_PRELOAD: the functions through which a program makes modules and
// optimizers. Each does what libtorch's does, and tells the watch.
//
// libtorch_cpu.so is linked without -Bsymbolic, so that its own calls come here, too
// (LinearImpl::reset registers the weight of a Linear). A class of which this file defines a
// virtual function has its table of virtual functions here as well, as in
// zero3/torch/own_optimizer.cc.

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/input-archive.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/error.h"
#include "zero3/torch/copied_groups.h"
#include "zero3/torch/untouched/watch.h"

namespace offload::untouched {
namespace {

using torch::optim::Optimizer;
using zero3::CopyGroups;

// What stands behind ours under a name.
template <typename Function>
Function Next(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  OFFLOAD_CHECK(found != nullptr) << name;
  return reinterpret_cast<Function>(found);
}

using StepFunction = at::Tensor (*)(Optimizer*, Optimizer::LossClosure);
using SaveFunction = void (*)(const Optimizer*, torch::serialize::OutputArchive&);
using LoadFunction = void (*)(Optimizer*, torch::serialize::InputArchive&);

at::Tensor Step(Optimizer& optimizer, Optimizer::LossClosure closure, StepFunction next) {
  // Threads may train a model each, and have one engine: their steps come one after another. A
  // closure runs beside those of others. The attached object's step comes through here, too.
  static auto* const mutex = new std::recursive_mutex;
  std::unique_lock lock(*mutex);
  const bool reads_groups_first = dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr;
  const auto outside = [&]() -> at::Tensor {
    lock.unlock();
    at::Tensor loss = closure();
    lock.lock();
    // It may have changed options, and added groups. LBFGS has references into its own meanwhile.
    if (!reads_groups_first) Watch::OfProcess().BeforeStep(optimizer);
    return loss;
  };
  const Optimizer::LossClosure given = closure != nullptr ? outside : Optimizer::LossClosure();
  Optimizer* const attached = Watch::OfProcess().BeforeStep(optimizer);
  return attached != nullptr ? attached->step(given) : next(&optimizer, given);
}

void Save(const Optimizer& optimizer, torch::serialize::OutputArchive& archive, SaveFunction next) {
  // Only the state that it does not keep any more is taken away.
  const Optimizer* const attached =
      Watch::OfProcess().BeforeFile(const_cast<Optimizer&>(optimizer));
  if (attached != nullptr) return attached->save(archive);
  Watch::OfProcess().WithOwnState(optimizer, [&] { next(&optimizer, archive); });
}

void Load(Optimizer& optimizer, torch::serialize::InputArchive& archive, LoadFunction next) {
  Optimizer* const attached = Watch::OfProcess().BeforeFile(optimizer);
  if (attached == nullptr) {
    Watch::OfProcess().WithOwnState(optimizer, [&] { next(&optimizer, archive); });
    return Watch::OfProcess().OnRead(optimizer);
  }
  attached->load(archive);
  CopyGroups(*attached, optimizer);
}

using StateMap = std::remove_reference_t<decltype(std::declval<Optimizer&>().state())>;

StateMap& State(Optimizer& optimizer) {
  static const auto next = Next<StateMap& (*)(Optimizer*)>("_ZN5torch5optim9Optimizer5stateEv");
  Optimizer* const attached = Watch::OfProcess().BeforeLook(optimizer);
  return next(attached != nullptr ? attached : &optimizer);
}

// ---- Begin and end of the process ---------------------------------------------------------------

// Programs that this one starts are their own.
void LeaveEnvironment() {
  Dl_info library{};
  const char* const preloaded = ::getenv("LD_PRELOAD");
  if (preloaded == nullptr ||
      ::dladdr(reinterpret_cast<const void*>(&LeaveEnvironment), &library) == 0)
    return;
  const std::string folder(library.dli_fname, ::strrchr(library.dli_fname, '/') + 1);
  std::vector<std::string> others;
  for (const absl::string_view each : absl::StrSplit(preloaded, absl::ByAnyChar(": "))) {
    if (!absl::StartsWith(each, absl::StrCat(folder, "liboffload"))) others.emplace_back(each);
  }
  if (others.empty()) {
    ::unsetenv("LD_PRELOAD");
  } else {
    ::setenv("LD_PRELOAD", absl::StrJoin(others, ":").c_str(), 1);
  }
}

std::string ReleaseText(uint64_t abi_version) {
  return absl::StrCat(abi_version >> 56, ".", abi_version >> 48 & 0xff);
}

void CheckRelease() {
  const std::string theirs = ReleaseText(::aoti_torch_abi_version()),
                    ours = ReleaseText(TORCH_ABI_VERSION);
  if (theirs == ours) return;
  const absl::Status refused = MakeError(
      ErrorId::kUnsupportedModel,
      absl::StrCat("the program runs with libtorch ", theirs, ", offload was built with ", ours),
      "Build one of them with the other's libtorch (TORCH_DIR=… tools/install)");
  EndProgram(std::string(refused.message()).c_str());
}

pid_t begun_by = 0;  // not a forked child

// A forked child lives on, and may train: the program leaves it alone, as those do that become
// daemons. The engine's own daemon is a child, too.
bool MayTrainInChild() {
  siginfo_t ended{};
  return !Watch::OfProcess().has_engine() &&
         ::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
}

// Registered before anything of the program, and called behind all of it.
void OnExit(int status, void*) {
  Watch::OfProcess().Close();
  if (Watch::OfProcess().has_attached() || begun_by != ::getpid() || MayTrainInChild()) return;
  const int64_t step = status == EXIT_SUCCESS ? Watch::OfProcess().FindStepOfJob() : 0;
  if (step > 0) {
    return Say(
        absl::StrCat("the program has ended without a forward pass, the job stays at step ", step));
  }
  const absl::Status refused = MakeError(
      ErrorId::kUnsupportedModel,
      "nothing was offloaded: the program has ended without a forward pass of a torch::nn::Module "
      "for an optimizer of torch::optim",
      "Start programs that do not train without offloadctl run, and open libraries that train "
      "without RTLD_DEEPBIND");
  if (status == EXIT_SUCCESS) EndProgram(std::string(refused.message()).c_str());
  Say(std::string(refused.message()));
}

__attribute__((constructor)) void Begin() {
  CheckRelease();
  LeaveEnvironment();
  begun_by = ::getpid();
  Watch::OfProcess();  // as the environment is now
  ::on_exit(&OnExit, nullptr);
}

}  // namespace
}  // namespace offload::untouched

using offload::untouched::Next;
using offload::untouched::Watch;

// ---- Modules ------------------------------------------------------------------------------------

namespace torch::nn {

Tensor& Module::register_parameter(std::string name, Tensor tensor, bool requires_grad) {
  static const auto next = Next<Tensor& (*)(Module*, std::string, Tensor, bool)>(
      "_ZN5torch2nn6Module18register_parameterENSt7__cxx1112basic_"
      "stringIcSt11char_traitsIcESaIcEEEN2at6TensorEb");
  Tensor& registered = next(this, std::move(name), std::move(tensor), requires_grad);
  Watch::OfProcess().OnParameter(*this, registered);
  return registered;
}

Tensor& Module::register_buffer(std::string name, Tensor tensor) {
  static const auto next = Next<Tensor& (*)(Module*, std::string, Tensor)>(
      "_ZN5torch2nn6Module15register_bufferENSt7__cxx1112basic_"
      "stringIcSt11char_traitsIcESaIcEEEN2at6TensorE");
  Tensor& registered = next(this, std::move(name), std::move(tensor));
  Watch::OfProcess().OnBuffer(registered);
  return registered;
}

// parameters() calls it, too.
OrderedDict<std::string, Tensor> Module::named_parameters(bool recurse) const {
  static const auto next = Next<OrderedDict<std::string, Tensor> (*)(const Module*, bool)>(
      "_ZNK5torch2nn6Module16named_parametersB5cxx11Eb");
  OrderedDict<std::string, Tensor> named = next(this, recurse);
  if (recurse) {
    offload::untouched::NamedTensors parameters;
    for (const auto& each : named) parameters.emplace_back(each.key(), each.value());
    Watch::OfProcess().OnNames(*this, parameters);
  }
  return named;
}

void Module::to(Device device, Dtype dtype, bool non_blocking) {
  static const auto next = Next<void (*)(Module*, Device, Dtype, bool)>(
      "_ZN5torch2nn6Module2toEN3c106DeviceENS2_10ScalarTypeEb");
  Watch::OfProcess().Cast(*this, [&] { next(this, device, dtype, non_blocking); });
}

void Module::to(Dtype dtype, bool non_blocking) {
  static const auto next =
      Next<void (*)(Module*, Dtype, bool)>("_ZN5torch2nn6Module2toEN3c1010ScalarTypeEb");
  Watch::OfProcess().Cast(*this, [&] { next(this, dtype, non_blocking); });
}

void Module::to(Device device, bool non_blocking) {
  static const auto next =
      Next<void (*)(Module*, Device, bool)>("_ZN5torch2nn6Module2toEN3c106DeviceEb");
  Watch::OfProcess().Cast(*this, [&] { next(this, device, non_blocking); });
}

}  // namespace torch::nn

namespace torch::serialize {

void InputArchive::read(const std::string& key, Tensor& tensor, bool is_buffer) {
  static const auto next = Next<void (*)(InputArchive*, const std::string&, Tensor&, bool)>(
      "_ZN5torch9serialize12InputArchive4readERKNSt7__cxx1112basic_"
      "stringIcSt11char_traitsIcESaIcEEERN2at6TensorEb");
  Watch::OfProcess().Read(tensor, [&] { next(this, key, tensor, is_buffer); });
}

}  // namespace torch::serialize

// ---- Graphs -------------------------------------------------------------------------------------

namespace torch::autograd::impl {

Edge gradient_edge(const Variable& variable) {
  static const auto next =
      Next<Edge (*)(const Variable&)>("_ZN5torch8autograd4impl13gradient_edgeERKN2at6TensorE");
  Watch::OfProcess().BeforeEdge(variable);
  return next(variable);
}

}  // namespace torch::autograd::impl

// ---- Optimizers ---------------------------------------------------------------------------------

#define OFFLOAD_FOLLOW(Class, mangled)                                      \
  Tensor Class::step(LossClosure closure) {                                 \
    static const auto next = Next<offload::untouched::StepFunction>(        \
        "_ZN5torch5optim" mangled "4stepESt8functionIFN2at6TensorEvEE");    \
    return offload::untouched::Step(*this, std::move(closure), next);       \
  }                                                                         \
  void Class::save(serialize::OutputArchive& archive) const {               \
    static const auto next = Next<offload::untouched::SaveFunction>(        \
        "_ZNK5torch5optim" mangled "4saveERNS_9serialize13OutputArchiveE"); \
    offload::untouched::Save(*this, archive, next);                         \
  }                                                                         \
  void Class::load(serialize::InputArchive& archive) {                      \
    static const auto next = Next<offload::untouched::LoadFunction>(        \
        "_ZN5torch5optim" mangled "4loadERNS_9serialize12InputArchiveE");   \
    offload::untouched::Load(*this, archive, next);                         \
  }

namespace torch::optim {

void Optimizer::add_param_group(const OptimizerParamGroup& group) {
  static const auto next = Next<void (*)(Optimizer*, const OptimizerParamGroup&)>(
      "_ZN5torch5optim9Optimizer15add_param_groupERKNS0_19OptimizerParamGroupE");
  next(this, group);
  Watch::OfProcess().OnGroup(*this);
}

// What the attached object keeps, since nothing else does.
auto Optimizer::state() noexcept -> offload::untouched::StateMap& {
  return offload::untouched::State(*this);
}
auto Optimizer::state() const noexcept -> const offload::untouched::StateMap& {
  return offload::untouched::State(const_cast<Optimizer&>(*this));
}

void Optimizer::zero_grad(bool set_to_none) {
  static const auto next =
      Next<void (*)(Optimizer*, bool)>("_ZN5torch5optim9Optimizer9zero_gradEb");
  Watch::OfProcess().BeforeZeroGrad(*this);
  next(this, set_to_none);
}

OFFLOAD_FOLLOW(AdamW, "5AdamW")
OFFLOAD_FOLLOW(Adam, "4Adam")
OFFLOAD_FOLLOW(SGD, "3SGD")
OFFLOAD_FOLLOW(Adagrad, "7Adagrad")
OFFLOAD_FOLLOW(RMSprop, "7RMSprop")
OFFLOAD_FOLLOW(LBFGS, "5LBFGS")

}  // namespace torch::optim

#undef OFFLOAD_FOLLOW
