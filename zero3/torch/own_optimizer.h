// zero3/torch/own_optimizer.h
//
// Engine::Attach(module, optimizer): an object of torch::optim that the trainer has made and keeps,
// whose step() is another's.
//
// libtorch has no hooks around step(). Its classes' virtual functions are symbols of
// libtorch_cpu.so that a program may define in front of it, also for calls from inside libtorch:
// here step(), save() and load() of the attached objects are diverted, and those of all others go
// on to libtorch. An attached object holds no state but while it is saved or loaded.
//
// Thread safety: as torch::optim::Optimizer: one thread for each.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>

namespace offload::zero3 {

// From now on step() of `own` is that of `inner`, a StateKeeper, with the options that `own` has
// then; save() and load() are libtorch's, of what `inner` keeps.
void Divert(torch::optim::Optimizer& own, std::shared_ptr<torch::optim::Optimizer> inner);
// From now on `after` follows each step() of `own` that libtorch has made.
void Follow(torch::optim::Optimizer& own, std::function<void()> after);
// The engine is gone: they are ordinary objects again, whose parameters may be released.
void Undivert(const torch::optim::Optimizer& own);

}  // namespace offload::zero3
