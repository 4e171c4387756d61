// offload/torch.h: train a libtorch model that is bigger than memory, without changing the trainer.
//
//   offload::Options options;  // or Options::FromEnvironment()
//   options.nvme_path = "/nvme0", options.ram = "8GiB", options.job = "llama-run-1";
//   auto engine = offload::Engine::Open(options);
//   auto optimizer = engine->AdamW(*model, torch::optim::AdamWOptions(1e-4));
//
// Open() connects to the node's daemon, else starts a private one that ends with us. AdamW()
// attaches the model and gives a torch::optim::Optimizer, and the loop stays as it is:
// model->forward(...), loss.backward(), torch::nn::utils::clip_grad_norm_, optimizer->step(),
// optimizer->zero_grad(). Weights, masters and moments live on NVMe; every step is a checkpoint:
// start the program again with the same job and it continues at engine->step(). What the trainer
// itself writes into weights (copy_(), init_) is durable with the next step(): closed, killed or
// snapshotted before it, the job holds the last epoch without any of it.
//
// Buffers of the modules (running statistics, masks) stay in memory and belong to the job, too:
// they are committed with every step and given back when it is attached again.
//
// What is computed is what the trainer computes without us, bit for bit (fp32 and fp64: torch's own
// optimizers; bf16 and fp16: fp32 masters and moments, nearest-even cast). OFFLOADD_DISABLE=1 makes
// all of this a no-op with the same arithmetic in memory, so that you can check it yourself. Scaled
// losses: <offload/grad_scaler.h>.
//
// Errors are thrown as offload::Error, from the call or from the operator that met them; what()
// begins with the identifier (OFD-nnnn) and ends with the way out.
//
// Several models: each may have an engine with a job of its own, side by side, on one thread or
// several; or several modules are parts of one job, with an optimizer each (a GAN):
//
//   auto optimizer_g = engine->AdamW(*generator, options), optimizer_d = engine->AdamW(*critic, …);
//
// Thread safety: an engine and its optimizers belong to one thread at a time; operators, forward
// and backward may run on any, several at once.
#pragma once

#ifndef NDEBUG
#error "compile with -DNDEBUG: a class layout in libtorch depends on it"
#endif

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace offload {

namespace zero3 {
struct NamedOptimizer;
}

class Error : public std::runtime_error {
 public:
  Error(int id, const std::string& text) : std::runtime_error(text), id_(id) {}
  int id() const { return id_; }  // 1203 for OFD-1203; 0 when there is none

 private:
  int id_;
};

struct Options {
  // The pool: a directory on a drive with direct I/O, or several on several drives, over which the
  // state is striped by their speed: "/nvme0,/nvme1".
  std::string nvme_path;
  std::string
      ram;  // the memory budget, "8GiB": what the daemon and this library hold never exceeds it
  // A second budget, of the device that the module is on, "8GiB": the window of weights and the
  // gradients on their way, never exceeded. Beside it: activations, one weight and one gradient
  // that an operator writes. "auto": half of what the device has free when the module is attached,
  // and no more than all weights and gradients. Of no meaning on the CPU.
  std::string gpu_ram = "auto";
  // A device by torch's name, "cuda:0": what a module has in the memory of the host goes there when
  // it is attached, parameters by way of the window, so that they are never there as a whole. For
  // models that are larger than the device's memory: they are built on the host (InitGuard, where
  // they are larger than that, too) and not moved with to(). "": modules stay where they are.
  std::string device;
  std::string job = "default";  // names the run in the pool; the same name resumes it
  std::string io = "auto";      // auto | uring | libaio | threads
  // Or "checkpoint:100": a commit after so many steps only; "checkpoint:10min": after so long.
  std::string durability = "step";
  int generations = 0;  // spare ones of a new store: so many snapshots need no growth
  // Of the daemon's optimizer. 0: half of the cores, more where the drive is fast or all state
  // stays in memory (docs/tuning.md).
  int update_threads = 0;
  // "auto": updates begin during the backward, tensor by tensor, beside the state that there is,
  // and become the step's when step() says the same (docs/tuning.md); "never": they begin at
  // step(). Results are the same.
  std::string update_in_backward = "auto";
  // Pointers into offloaded tensors (data_ptr(), accessors, custom kernels, torch::save): "serve"
  // brings a tensor to memory, beside `ram`, at the first touch and until the end of the step, and
  // puts back what was written; "error" refuses the pointer (OFD-1603).
  std::string raw_access = "serve";
  // A moving average of the weights, kept by the daemon beside them, one more plane in the type of
  // the masters: "ema:0.999" moves it by lerp with every update of a tensor, as
  // torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(0.999) does; "swa:1000:100" is
  // the mean of the weights after updates 1000, 1100, …, as a plain AveragedModel's. Gather() and
  // SaveWeights() give it as "average"; of a tensor without an update it is the weight. Part of the
  // job: a run that goes on says the same kind. Refused (OFD-1604) for optimizers that run in the
  // trainer's process, for sparse gradients, and on devices.
  std::string average = "none";
  // Frozen parameters (requires_grad == false) have optimizer state in the store, too, so that
  // requires_grad_(true) may come later. Part of the job: the same in every run.
  bool may_thaw = false;
  // What the module's weights are when the engine is closed: "released", any use of them throws
  // OFD-1802, or ordinary tensors in "memory", which has to hold them all.
  std::string weights_at_close = "released";
  // Bytes one gradient needs beside the accumulators are not counted, nor are activations and torch
  // itself.
  bool spill_gradients = false;  // keep gradients on NVMe even where memory could hold them (frees
                                 // 2, 4 or 8 bytes per parameter)

  // What `ram` is spent on. A stage of ZeRO, 0 to 3, says what comes first and never refuses; -1:
  // what saves most traffic (docs/ranks.md). A home is a demand, refused (OFD-1301) when ram does
  // not hold it: "ram", all of it stays in memory; "nvme", it passes through memory only; a share
  // such as "0.25" stays; "auto", as much as ram holds. Results are the same.
  int zero_stage = -1;
  std::string weights_home = "auto", state_home = "auto";
  // Hints, in elements; 0: none. Weights of at most so many are the first to stay in memory; so
  // many are read ahead; at most so many weights are in memory, if that can be.
  int64_t persistence = 0, prefetch = 0, max_live = 0;

  // Several processes that train one model. By default they are what the launcher says (torchrun,
  // mpirun, srun), else there is one; values that are set here count instead, all of them together.
  int rank = -1, world_size = 0, local_rank = -1, local_world_size = 0;
  std::string run_id = "auto";  // of the launch, restarts included: equal in all its ranks
  // Of the ranks' gradients; false: their sum, for trainers that divide losses by all
  // micro-batches.
  bool gradient_average = true;
  // Who makes the ranks' gradients one: "added", the daemon adds them in a fixed order; or
  // "reduced_by_trainer", every rank keeps those that torch gives it, in memory, and the trainer
  // reduces `.grad` itself (c10d, NCCL, MPI). All ranks step with the same bits, or the step is
  // refused (OFD-1805, with tensor and ranks).
  std::string gradients = "added";

  // OFFLOADD_POOL, OFFLOADD_RAM, OFFLOADD_JOB, OFFLOADD_IO, OFFLOADD_DEVICE, OFFLOADD_GPU_RAM.
  static Options FromEnvironment();
};

// Whose roundings AdamW and Adam have, bit for bit: kMulAdd those of the C++ classes
// torch::optim::AdamW and Adam, kLerp those of torch.optim in Python, kFused those of
// at::_fused_adamw_ and at::_fused_adam_ (Python's fused=True), which is the fastest. Square roots
// of the first two are those of torch's vector library on this processor, which are not always the
// nearest; they are measured when the first such optimizer is attached. Those of fp64 are too many:
// where they are not the nearest, fp64 parameters take kFused, and the others are refused
// (OFD-1604).
enum class AdamWFlavour { kFused, kLerp, kMulAdd };

// torch has no Lion: these are the options of its paper (arXiv:2302.06675), in torch's manner.
struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  using betas_t = std::tuple<double, double>;
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT: implicit, like torch's
  TORCH_ARG(double, lr) = 1e-4;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
};

// torch has no LAMB: these are the options of its paper (arXiv:1904.00962), in torch's manner. The
// trust ratio is that of a whole parameter.
struct LAMBOptions : torch::optim::OptimizerCloneableOptions<LAMBOptions> {
  using betas_t = std::tuple<double, double>;
  LAMBOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, like torch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 1e-2;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
};

struct Statistics {
  uint64_t bytes_read = 0, bytes_written = 0;  // by the daemon, since it started, on the drive
  uint64_t resident_bytes = 0,
           peak_bytes = 0;    // of shared memory holding tensors now, and at most; ≤ ram
  uint64_t budget_bytes = 0;  // ram
  int64_t durable_step = 0;   // the last committed epoch
  double wait_seconds = 0;    // this process blocked on the daemon, in all
  uint64_t raw_accesses = 0;  // tensors brought to memory for a pointer
  // Of a module on a device: gpu_ram, what was held of it at most, and how often the host waited
  // for a copy of a weight.
  uint64_t gpu_ram_bytes = 0, gpu_peak_bytes = 0, gpu_waits = 0;
};

// What the planner decided, for printing. All in bytes.
struct PlanSummary {
  uint64_t parameters = 0, state_bytes = 0, gradient_bytes = 0, store_bytes = 0;
  uint64_t window_bytes = 0, pipeline_bytes = 0, resident_bytes = 0, region_bytes = 0,
           overhead_bytes = 0;
  uint64_t total_bytes = 0;                               // the sum, ≤ ram
  uint64_t gpu_window_bytes = 0, gpu_gradient_bytes = 0;  // the sum, ≤ gpu_ram; 0 on the CPU
  bool gradients_spilled = false;
  // Predicted for a step of one micro-batch, and for each further one.
  double read_bytes_per_parameter = 0, write_bytes_per_parameter = 0;
  double further_read_bytes_per_parameter = 0, further_write_bytes_per_parameter = 0;
  uint64_t floor_bytes = 0, floor_without_spilling_bytes = 0;
  std::string text;  // a table of the above
};

// Weights come from a safetensors file, or from a folder as Hugging Face lays it out. Its tensors
// are the model's, exactly: same names (of module.named_parameters(); a tied weight under its first
// name), same shapes. F32, BF16 and F16, of an fp64 weight F64, too, become the model's type,
// rounded to the nearest, ties to even, where it is narrower; the fp32 master of a bf16 or fp16
// weight is the rounded value.
struct LoadOptions {
  std::vector<std::string> ignored;  // tensors that may be there and are not loaded
};

struct SaveOptions {
  uint64_t shard_bytes = 5'000'000'000;  // of one file; there is an index when there are several
  std::string plane = "weight";          // or "average" (Options::average), in the model's type
};

class Engine;

// What a DeepSpeed configuration makes of a module.
struct Initialized {
  std::shared_ptr<Engine> engine;
  // Its step() clips as the configuration says, before the daemon updates.
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  // Micro-batches of a step, for the loop: divide each loss by it, and call step() after the last.
  int64_t accumulation = 1;
  std::string report;  // a line for each key: mapped, ignored, left to the trainer
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Engine and optimizer from a DeepSpeed configuration (the path of a file, or JSON):
  //   auto [engine, optimizer, accumulation, report] =
  //       offload::Engine::Initialize(*model, "ds_config.json");
  // casts the module to bf16 where it says so, opens the job and attaches. The environment counts
  // more than the configuration, and that more than an offloadd.toml. OFD-11xx for what would train
  // something else than the configuration says; learning rate schedules are the loop's.
  static Initialized Initialize(torch::nn::Module& module, const std::string& ds_config);

  // Connects to the node's daemon (OFFLOADD_SOCKET, user socket, system socket), else starts a
  // private one, and opens the job.
  static std::shared_ptr<Engine> Open(const Options& options);
  // Drains and commits what was stepped, then closes. Weights that were written since are dropped.
  // A private daemon ends.
  virtual ~Engine();

  // Attach the parameters of `module` and give the optimizer that runs in the daemon. A new job
  // takes its weights from the module; an existing one replaces the module's values by those of its
  // last committed epoch. Parameters with requires_grad == false are paged, never updated; tied
  // ones are one tensor. Later changes of param_groups() options (lr schedules) count at the next
  // step(). Each of them also takes explicit groups; options that a group does not have are the
  // defaults, and parameters that are in none are not updated.
  //
  // Further calls add modules to the job, always in the same order: tensors of the first have their
  // names in the module, those of the n-th further one begin with "n/". What an optimizer already
  // has, also through another module, is left to it, and refused (OFD-1002) in explicit groups;
  // optimizers of one job are of one kind, and the step of each is a step of the job. The job's
  // store is made by Seal(), or by the first operator that touches a parameter, step(), Gather(),
  // plan(), LoadWeights() or SaveWeights(). For a module that comes later, and for parameters that
  // a group of an optimizer gets and that a module held by a shared_ptr has, it is laid out anew
  // (docs/attach.md, models that grow); with several ranks, or on a device, they are refused
  // (OFD-1601).
  //
  // Throws OFD-1002 for options that make no sense, also from step(), and OFD-1604 from a step()
  // whose options need state that the job was made without (momentum, amsgrad, centered).
  using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  OptimizerPointer AdamW(torch::nn::Module& module, torch::optim::AdamWOptions options,
                         AdamWFlavour flavour = AdamWFlavour::kMulAdd);
  OptimizerPointer AdamW(torch::nn::Module& module, ParamGroups groups,
                         torch::optim::AdamWOptions defaults,
                         AdamWFlavour flavour = AdamWFlavour::kMulAdd);
  OptimizerPointer SGD(torch::nn::Module& module, torch::optim::SGDOptions options);
  OptimizerPointer SGD(torch::nn::Module& module, ParamGroups groups,
                       torch::optim::SGDOptions defaults);
  OptimizerPointer Adam(torch::nn::Module& module, torch::optim::AdamOptions options,
                        AdamWFlavour flavour = AdamWFlavour::kMulAdd);
  OptimizerPointer Adam(torch::nn::Module& module, ParamGroups groups,
                        torch::optim::AdamOptions defaults,
                        AdamWFlavour flavour = AdamWFlavour::kMulAdd);
  OptimizerPointer Adagrad(torch::nn::Module& module, torch::optim::AdagradOptions options);
  OptimizerPointer Adagrad(torch::nn::Module& module, ParamGroups groups,
                           torch::optim::AdagradOptions defaults);
  OptimizerPointer RMSprop(torch::nn::Module& module, torch::optim::RMSpropOptions options);
  OptimizerPointer RMSprop(torch::nn::Module& module, ParamGroups groups,
                           torch::optim::RMSpropOptions defaults);
  OptimizerPointer Lion(torch::nn::Module& module, LionOptions options);
  OptimizerPointer Lion(torch::nn::Module& module, ParamGroups groups, LionOptions defaults);
  OptimizerPointer LAMB(torch::nn::Module& module, LAMBOptions options);
  OptimizerPointer LAMB(torch::nn::Module& module, ParamGroups groups, LAMBOptions defaults);

  // Attaches a module with an optimizer that the trainer has made itself, and keeps: an existing
  // trainer goes on with its own line. One that takes square roots of fp64 numbers that the daemon
  // does not have (AdamWFlavour) runs as LBFGS does.
  //
  //   torch::optim::AdamW optimizer(model->parameters(), 1e-4);
  //   engine->Attach(*model, optimizer);
  //
  // step() of torch::optim's AdamW, Adam, SGD, Adagrad and RMSprop then runs as that of the
  // optimizers above (AdamW and Adam as kMulAdd), reading groups and options of the object. What it
  // has kept of steps in memory is what a new job begins with; a job that exists has its own.
  // Either way it holds no state any more. torch::save and torch::load are of the job's state, in
  // libtorch's format; what was loaded is durable with the next step. OFD-1604 for a file of a
  // state that is large beside `ram`, 1002 for a state of other shapes. LBFGS and optimizers of the
  // trainer's own run unmodified in this process on offloaded weights, and what they keep is in
  // memory. LBFGS commits its steps with it; after a step of one's own, CommitStep(optimizer) does.
  // The optimizer outlives its last step, not the engine.
  void Attach(torch::nn::Module& module, torch::optim::Optimizer& optimizer);
  // What was written into weights is a step of the job.
  virtual void CommitStep() = 0;
  // The same, with what an optimizer of the trainer's own keeps: what its save() writes, which its
  // load() gets back when a run that goes on attaches it. Of a class without them nothing is kept,
  // and the job is not resumed (OFD-1604), as after a CommitStep() alone.
  void CommitStep(torch::optim::Optimizer& optimizer);

  // Makes the store of a new job, or opens that of an existing one, for all modules attached so
  // far. Without it the first use does, and throws what there is to throw.
  virtual void Seal() = 0;

  // Where this process stands among the ranks that train the model: 0 of 1 when it is alone.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Gives every rank what each has said (≤ 1 MiB), in the order of ranks. All ranks call it.
  virtual std::vector<std::string> Exchange(std::string blob) = 0;

  // Steps taken by this job, over all its runs; 0 for a new job.
  virtual int64_t step() const = 0;
  // Blocks until every step() that returned is durable. Makes nothing else durable.
  virtual void WaitDurable() = 0;
  // Makes the last step() that returned a checkpoint, whatever `durability` says, with what was
  // handed over with it; written beside the steps that follow. Returns its number at once: it is
  // durable after WaitDurable(), or once statistics().durable_step has come to it.
  virtual int64_t Checkpoint() = 0;
  // The trainer's own small state (RNG, data position; ≤ 1 MiB, with N ranks each a part of it):
  // handed over with the next step(), committed with its epoch, and given back after a resume. Each
  // rank has its own; one that the run before did not have gets none.
  virtual void SetTrainerState(std::string blob) = 0;
  virtual std::string TrainerState() const = 0;

  // A private copy of a parameter ("weight"), its "master" (fp32; of fp64 the weight itself), or
  // what the optimizer keeps of it
  // under torch.optim's names, as of the last step() that returned; zeros before its first:
  //   AdamW      exp_avg, exp_avg_sq; with amsgrad max_exp_avg_sq
  //   SGD        momentum_buffer, or exp_avg
  //   Adam       as AdamW
  //   Adagrad    sum
  //   RMSprop    square_avg; with momentum momentum_buffer; centered grad_avg
  //   Lion       exp_avg
  //   LAMB       exp_avg, exp_avg_sq
  // and "average", where the job keeps one (Options::average).
  // For checks, export and code that needs a raw pointer.
  virtual torch::Tensor Gather(const torch::Tensor& parameter,
                               const std::string& plane = "weight") = 0;

  // Names the weights that a new job takes when it is made, instead of the module's. They are
  // checked before anything is made; a job that exists keeps its own, and that is said.
  // OFD-1401 malformed, 1402 other names or shapes, 1403 other types, 1405 cannot be read: thrown
  // by Seal(), or by the first use.
  virtual void SetInitialWeights(std::string path, LoadOptions options) = 0;
  // Replaces the weights of the attached modules; moments and step stay. All of the file is checked
  // before the first weight changes. Durable as a whole when it returns, under the present step();
  // until then the last epoch is the one before, whole, whoever is killed. Call between steps. When
  // it fails midway (OFD-1405, 1209) so it stays: load again, or open the job again; step() and
  // SaveWeights() are refused until then (OFD-1406). All ranks call it; the first reads the file.
  virtual void LoadWeights(const std::string& path, const LoadOptions& options) = 0;
  // Both of them also take the modules' buffers, as they are in memory; a file that has none of
  // them leaves them as they are.
  // Writes the weights as of the last step() that returned, in the model's type, into a folder that
  // holds no checkpoint yet (OFD-1404). Names appear when all is durable. One rank calls it.
  virtual void SaveWeights(const std::string& folder, const SaveOptions& options) = 0;
  void SetInitialWeights(std::string path) { SetInitialWeights(std::move(path), LoadOptions()); }
  void LoadWeights(const std::string& path) { LoadWeights(path, LoadOptions()); }
  void SaveWeights(const std::string& folder) { SaveWeights(folder, SaveOptions()); }

  virtual Statistics statistics() const = 0;
  virtual PlanSummary plan() const = 0;

 protected:
  virtual OptimizerPointer MakeOptimizer(torch::nn::Module& module, ParamGroups groups,
                                         zero3::NamedOptimizer&& optimizer) = 0;
  // For an optimizer that runs in this process: by its class, and whether each of its steps is
  // seen. Returns its number in the job.
  virtual size_t AttachForeign(torch::nn::Module& module, ParamGroups groups,
                               const std::string& optimizer, bool commits_itself) = 0;
  // It takes what the job has of it.
  virtual void GiveForeign(size_t number, torch::optim::Optimizer& optimizer) = 0;
  virtual void CommitForeign(size_t number, torch::optim::Optimizer& optimizer) = 0;

 private:
  std::vector<const torch::optim::Optimizer*> own_optimizers_;  // attached, by address only
  // Of the trainer's own classes: their numbers in the job.
  std::unordered_map<const torch::optim::Optimizer*, size_t> foreign_;
};

// The same for a module in memory.
void LoadWeights(torch::nn::Module& module, const std::string& path,
                 const LoadOptions& options = LoadOptions());
void SaveWeights(const torch::nn::Module& module, const std::string& folder,
                 const SaveOptions& options = SaveOptions());

// Builds a model that is larger than memory: while it lives, big tensors made on this thread go to
// the pool as soon as the operation that fills them ends. Initialisation, casts and
// module->to(dtype) inside it give the same bits as without.
class InitGuard {
 public:
  explicit InitGuard(const std::shared_ptr<Engine>& engine);
  ~InitGuard();
  InitGuard(const InitGuard&) = delete;
  InitGuard& operator=(const InitGuard&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The in-memory trainer that everything above is compared with, and what OFFLOADD_DISABLE=1 gives:
// fp32 and fp64 parameters are updated as torch's optimizer of that name does it, bf16 and fp16
// ones by the same on fp32 masters and moments, then cast back.
std::unique_ptr<torch::optim::Optimizer> InMemoryAdamW(
    torch::nn::Module& module, torch::optim::AdamWOptions options,
    AdamWFlavour flavour = AdamWFlavour::kMulAdd);
std::unique_ptr<torch::optim::Optimizer> InMemorySGD(torch::nn::Module& module,
                                                     torch::optim::SGDOptions options);
std::unique_ptr<torch::optim::Optimizer> InMemoryAdam(torch::nn::Module& module,
                                                      torch::optim::AdamOptions options,
                                                      AdamWFlavour flavour = AdamWFlavour::kMulAdd);
std::unique_ptr<torch::optim::Optimizer> InMemoryAdagrad(torch::nn::Module& module,
                                                         torch::optim::AdagradOptions options);
std::unique_ptr<torch::optim::Optimizer> InMemoryRMSprop(torch::nn::Module& module,
                                                         torch::optim::RMSpropOptions options);
std::unique_ptr<torch::optim::Optimizer> InMemoryLion(torch::nn::Module& module,
                                                      LionOptions options);
std::unique_ptr<torch::optim::Optimizer> InMemoryLAMB(torch::nn::Module& module,
                                                      LAMBOptions options);

}  // namespace offload
