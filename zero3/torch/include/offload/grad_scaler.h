// offload/grad_scaler.h: dynamic loss scaling, for models whose gradients are fp16.
//
//   offload::GradScaler scaler(*engine);
//   scaler.Scale(loss).backward();
//   scaler.Unscale(*optimizer);  // only where gradients are looked at before the step, for
//   clipping scaler.Step(*optimizer);     // not taken when a gradient is not finite
//   scaler.Update();
//   optimizer->zero_grad();
//
// The arithmetic and its order are those of torch.amp.GradScaler, which libtorch does not have for
// C++: the same operators of ATen, fp32 scales, gradients that are unscaled in place and in their
// own type. Other than in Python that may be fp16, too: what a gradient has below 2^-24 after it
// was unscaled is lost, as it is when such a model is trained without a scale in memory; what the
// scale saves is what backward() would lose on the way there.
//
// The scale and how long it has stood belong to the job. They are committed with every step() of
// the optimizer as Update() will leave them, and a run that is started again goes on with them: a
// skipped step is no step of the job, and a run that was killed after it does it again. Scalers of
// one engine are told apart by the order in which they are made.
//
// With OFFLOADD_DISABLE=1 the same in memory. Optimizers are those that the engine has given, or
// libtorch's own that are attached to it.
//
// Thread safety: as offload::Engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <offload/torch.h>

#include <cstdint>
#include <memory>

namespace offload {

// Those of torch.amp.GradScaler, with its defaults. A run that goes on takes them from the program,
// not from the job.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // steps in a row that were taken
  bool enabled = true;             // false: Step() takes the step and nothing else does anything
};

class GradScaler {
 public:
  // Throws OFD-1002 for a growth_factor that is not above 1 or a backoff_factor that is not below.
  explicit GradScaler(Engine& engine, GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  // The loss, of any shape, times the scale; torch promotes a 0-dim fp16 loss to fp32.
  at::Tensor Scale(const at::Tensor& loss) const;
  // Divides the gradients of the optimizer's parameters by the scale, in place, and notes whether
  // all were finite. Once between two calls of Update(), before Step(): OFD-1002. Of several ranks
  // the trainer reduces the gradients before (Options::gradients), or it is refused (OFD-1002).
  void Unscale(torch::optim::Optimizer& optimizer);
  // Unscales what Unscale() did not, and takes the optimizer's step, unless a gradient was not
  // finite: then weights, state and Engine::step() stay as they are. Whether it was taken. OFD-1002
  // when called twice between two calls of Update(), or when no parameter has a gradient.
  bool Step(torch::optim::Optimizer& optimizer);
  // At the end of an iteration, after Step() of all its optimizers: the scale shrinks when a step
  // was skipped, and grows after `growth_interval` that were not.
  void Update();
  // Sets it in that place. Committed with the next step of the job.
  void Update(double new_scale);

  double scale() const;            // 1 when it is not enabled
  int64_t growth_tracker() const;  // steps since the scale has changed
  bool enabled() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace offload
