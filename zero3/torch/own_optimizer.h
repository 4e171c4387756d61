// zero3/torch/own_optimizer.h
//
// Engine::Attach(module, optimizer): an object of torch::optim that the trainer has made and keeps,
// whose step() is another's.
//
// libtorch has no hooks around step(). Its classes' virtual functions are symbols of
// libtorch_cpu.so that a program may define in front of it, also for calls from inside libtorch:
// here step(), save() and load() of the attached objects are diverted, and those of all others go
// on to libtorch. An attached object may be moved. It holds no state but while it is saved or
// loaded, and from state(), which is diverted, too, to the next step: that takes back what the
// trainer has changed of it. Groups and options are those of the object at each step, and after
// state().clear() all that is kept begins anew.
//
// Thread safety: as torch::optim::Optimizer: one thread for each.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace offload {
class Engine;
}

namespace offload::zero3 {

struct NamedOptimizer;

// From now on step() of `own` is that of `inner`, a StateKeeper, with the groups and options that
// `own` has then; save() and load() are libtorch's, of what `inner` keeps. `may_keep`: it does
// already. `has_state`: it has brought its own.
void Divert(torch::optim::Optimizer& own, Engine& engine,
            std::shared_ptr<torch::optim::Optimizer> inner, bool may_keep, bool has_state);
// From now on `after` follows each step() of `own` that libtorch has made. `number`: among those
// that run in this process; `has_stepped`: one before it under that number has.
void Follow(torch::optim::Optimizer& own, Engine& engine, size_t number, bool has_stepped,
            std::function<void(torch::optim::Optimizer&)> after);
// An object of torch's SGD, attached, where that is what is named and it keeps sparse buffers
// (HasSparseMomentum); null: it does not.
std::unique_ptr<torch::optim::Optimizer> MakeSparselyKept(
    Engine& engine, torch::nn::Module& module,
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const NamedOptimizer& optimizer);
// Whether an object that is being attached by this thread may have the parameter: an attached one
// has had it that is dead, and none that lives has it.
bool IsLeftByDead(const at::Tensor& parameter);
// What a closed engine has left of an object is in it afterwards.
void TakeLeftState(torch::optim::Optimizer& own);
// The engine closes: the object that was attached at this address, and may be elsewhere or dead, is
// an ordinary one again. It goes on with what was kept where the weights stay in memory, too;
// where that cannot be had, its step() throws why.
void Undivert(const torch::optim::Optimizer* attached_at, const Engine& engine);

}  // namespace offload::zero3
