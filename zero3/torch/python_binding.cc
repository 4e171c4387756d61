// What the Python package offloadd calls: TensorEngine as a class of torch's own registry
// (torchbind), which needs no Python at build time, so that one library serves every Python.
// Whatever can be said in Python is said there (python/offloadd); here are only numbers, names and
// tensors.

#include <ATen/core/grad_mode.h>
#include <offload/torch.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bytes_digest.h"
#include "base/error.h"
#include "base/parse_averaging.h"
#include "kernels/optimizer.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/module_engine.h"
#include "zero3/torch/option_text.h"
#include "zero3/torch/options_check.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/tensor_engine.h"
#include "zero3/torch/throw_hook.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_instructions.h"
#include "zero3/torch/weight_residency.h"
#include "zero3/torch/weights_io.h"

// ---- Errors ------------------------------------------------------------------------------------

struct _object;  // PyObject

// torch's Python layer catches this class of its own and raises what python_type() says. Its header
// needs Python's; class and layout are therefore declared once more. Catching compares names.
namespace torch {
struct __attribute__((visibility("default"))) PyTorchError : public std::exception {
  explicit PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch

namespace offload::zero3 {
namespace {

_object* error_class = nullptr;

struct PythonError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  _object* python_type() override { return error_class; }
};

void ThrowPythonError(const std::string& text) { throw PythonError(text); }

// ---- Options -----------------------------------------------------------------------------------

using Strings = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;
using Values = std::vector<double>;

// Name, value, name, value …; what is not named is as the environment says.
Options OptionsOf(const Strings& pairs) {
  Options options = Options::FromEnvironment();
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) SetOption(options, pairs[i], pairs[i + 1]);
  return options;
}

kernels::OptimizerSpec SpecOf(const std::string& kind, const Values& values) {
  kernels::OptimizerSpec spec;
  const std::string violation = kernels::OptimizerSpec::Read(kind, values, &spec);
  if (violation.empty()) return spec;
  ThrowStatus(MakeError(ErrorId::kBadValue,
                        absl::StrCat("optimizer options that cannot be: ", violation),
                        "Set it in optimizer.param_groups before the step"));
}

at::Tensor BytesOf(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string TextOf(const at::Tensor& bytes) {
  const at::Tensor whole = bytes.to(at::kByte).contiguous();
  return {static_cast<const char*>(whole.const_data_ptr()), static_cast<size_t>(whole.numel())};
}

std::vector<NamedTensor> Named(const Strings& names, const Tensors& tensors) {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < names.size(); ++i) named.push_back({names[i], tensors.at(i)});
  return named;
}

// ---- The engine --------------------------------------------------------------------------------

// Thread safety: as TensorEngine. Calls run without Python's lock.
class PythonEngine final : public torch::CustomClassHolder {
 public:
  explicit PythonEngine(const Strings& options)
      : engine_(std::dynamic_pointer_cast<ModuleEngine>(Engine::Open(OptionsOf(options)))) {
    if (engine_ == nullptr)
      ThrowStatus(MakeError(ErrorId::kBadValue, "OFFLOADD_DISABLE is set: there is no engine"));
  }

  TensorEngine& tensors() const {
    if (engine_ == nullptr) ThrowStatus(SessionEnded("the job"));
    return engine_->tensors();
  }
  Engine& engine() const {
    tensors();
    return *engine_;
  }

  // One row of values for every group of the optimizer. Buffers without a name are not part of the
  // job.
  bool Attach(const Strings& names, const Tensors& tensors, const Strings& buffer_names,
              const Tensors& buffers, const std::string& kind, const std::vector<Values>& groups) {
    TensorEngine& engine = this->tensors();
    guard_.reset();
    EndConstruction();
    for (const at::Tensor& buffer : buffers) LearnStorage(buffer);
    kernels::OptimizerSpec optimizer = SpecOf(kind, groups.at(0));
    for (const Values& values : groups) optimizer.KeepToo(SpecOf(kind, values));
    std::vector<NamedTensor> kept = Named(buffer_names, buffers);
    std::erase_if(kept, [](const NamedTensor& buffer) { return buffer.name.empty(); });
    // The package seals the job next.
    const bool has_new = engine.Attach(Named(names, tensors), optimizer, kept, /*takes_now=*/true);
    engine.MoveOthers(buffers);
    engine.AttachBuffers(kept);
    return has_new;
  }

  // What has come since; the lists are of everything that is trained now.
  bool Grow(const Strings& names, const Tensors& tensors, const Strings& buffer_names,
            const Tensors& buffers) {
    for (const at::Tensor& buffer : buffers) LearnStorage(buffer);
    std::vector<NamedTensor> kept = Named(buffer_names, buffers);
    std::erase_if(kept, [](const NamedTensor& buffer) { return buffer.name.empty(); });
    return this->tensors().Grow(Named(names, tensors), kept);
  }

  // `counts`: of each group, whether torch counts its update as a write of the tensors (their
  // version), which lets the backward of a graph from before the step fail.
  void Step(const std::string& kind, const std::vector<Tensors>& groups,
            const std::vector<Values>& values, const c10::List<bool>& counts) {
    const at::NoGradGuard no_grad;
    TensorEngine& engine = tensors();
    std::vector<GroupUpdate> updates;
    std::vector<client::Group> now;
    for (size_t i = 0; i < groups.size(); ++i) {
      updates.push_back({GroupOf(kind, values.at(i)), groups[i]});
      now.push_back(updates.back().group);
    }
    SetForeseen(std::move(now));
    engine.Step(updates, [foreseen = foreseen_] {
      const std::lock_guard lock(foreseen->mutex);
      return foreseen->groups;
    });
    Tensors written;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (counts.get(i)) written.insert(written.end(), groups[i].begin(), groups[i].end());
    }
    engine.CountAsWrites(written);
  }

  void SetForeseen(std::vector<client::Group> groups) {
    const std::lock_guard lock(foreseen_->mutex);
    foreseen_->groups = std::move(groups);
  }

  // What the groups of the optimizer have now, the next step will probably have.
  void Foresee(const std::string& kind, const std::vector<Values>& values) {
    std::vector<client::Group> groups;
    try {
      for (const Values& each : values) groups.push_back(GroupOf(kind, each));
    } catch (const std::exception&) {  // the step says why
      groups.clear();
    }
    SetForeseen(std::move(groups));
  }

  // What the optimizer keeps, under torch.optim's names, and "master": for each parameter one
  // tensor per name, one without elements where there is none.
  void BeginWith(const Tensors& parameters, const std::vector<int64_t>& counts,
                 const Strings& names, const std::vector<Tensors>& planes) {
    tensors().BeginWith(KeptStates(parameters, counts, names, planes));
  }
  void ReplaceState(const Tensors& parameters, const std::vector<int64_t>& counts,
                    const Strings& names, const std::vector<Tensors>& planes) {
    tensors().ReplaceState(KeptStates(parameters, counts, names, planes));
  }

  void BeginConstruction() {
    tensors();
    guard_ = std::make_unique<InitGuard>(engine_);
  }
  void EndConstructionHere() { guard_.reset(); }

  void Close() {
    guard_.reset();
    if (engine_ != nullptr) ForgetConstructed(engine_->tensors().attachment().get());
    engine_.reset();
  }
  // As Close(): (what went wrong, a step that is durable).
  std::tuple<std::string, int64_t> End() {
    const auto end = std::make_shared<EndOfJob>();
    tensors().SetEnd(end);
    Close();
    return {end->failure, end->durable_step};
  }

 private:
  kernels::OptimizerSpec GroupOf(const std::string& kind, const Values& values) const {
    kernels::OptimizerSpec group = SpecOf(kind, values);
    for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
      const kernels::StatePlane* const needed = group.Plane(i);
      if (needed == nullptr || tensors().optimizer().Plane(i) != nullptr) continue;
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedOptimizer,
          absl::StrCat("options that need ", needed->name, ", for a job that was made without"),
          "Give the optimizer these options when it is made, with a new job"));
    }
    return group;
  }

  std::vector<KeptState> KeptStates(const Tensors& parameters, const std::vector<int64_t>& counts,
                                    const Strings& names,
                                    const std::vector<Tensors>& planes) const {
    std::vector<KeptState> states(parameters.size());
    for (size_t i = 0; i < states.size(); ++i) {
      states[i].parameter = parameters[i];
      states[i].update_count = static_cast<uint64_t>(counts.at(i));
      for (size_t n = 0; n < names.size(); ++n) {
        const at::Tensor& plane = planes.at(i).at(n);
        if (plane.numel() == 0) continue;
        if (names[n] == "master") {
          states[i].master = plane;
        } else {
          states[i].planes.at(PlaneNumber(names[n])) = plane;
        }
      }
    }
    return states;
  }

  size_t PlaneNumber(const std::string& name) const {
    for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
      const kernels::StatePlane* const plane = tensors().optimizer().Plane(i);
      if (plane != nullptr && name == plane->name) return i;
    }
    ThrowStatus(
        MakeError(ErrorId::kUnsupportedOptimizer,
                  absl::StrCat("options that need ", name, ", for a job that was made without"),
                  "Give the optimizer these options when it is made, with a new job"));
  }

  // Read by backwards, which may outlive this.
  struct Foreseen {
    std::mutex mutex;
    std::vector<client::Group> groups;
  };

  std::shared_ptr<ModuleEngine> engine_;
  std::unique_ptr<InitGuard> guard_;
  const std::shared_ptr<Foreseen> foreseen_ = std::make_shared<Foreseen>();
};

using Pointer = c10::intrusive_ptr<PythonEngine>;

LoadOptions Ignoring(Strings names) { return {.ignored = std::move(names)}; }

SaveOptions ShardsOf(int64_t shard_bytes) {
  SaveOptions options;
  if (shard_bytes > 0) options.shard_bytes = static_cast<uint64_t>(shard_bytes);
  return options;
}

// Parameters and buffers that are in memory, as files see them.
std::vector<FileWeight> FileWeightsOf(const Strings& names, const Tensors& tensors,
                                      const Strings& buffer_names, const Tensors& buffers) {
  std::vector<FileWeight> weights =
      ValueOrThrow(FindFileWeights(Named(names, tensors)), "the model");
  ThrowIfError(AddFileBuffers(Named(buffer_names, buffers), weights), "the model");
  return weights;
}

Values StatisticsOf(const Pointer& self) {
  const Statistics s = self->tensors().statistics();
  const auto number = [](auto value) { return static_cast<double>(value); };
  return {number(s.bytes_read),     number(s.bytes_written), number(s.resident_bytes),
          number(s.peak_bytes),     number(s.budget_bytes),  number(s.durable_step),
          s.wait_seconds,           number(s.raw_accesses),  number(s.gpu_ram_bytes),
          number(s.gpu_peak_bytes), number(s.gpu_waits)};
}

std::tuple<Values, std::string> PlanOf(const Pointer& self) {
  const PlanSummary p = self->tensors().plan();
  const auto number = [](auto value) { return static_cast<double>(value); };
  return {
      {number(p.parameters), number(p.state_bytes), number(p.gradient_bytes), number(p.store_bytes),
       number(p.window_bytes), number(p.pipeline_bytes), number(p.resident_bytes),
       number(p.region_bytes), number(p.overhead_bytes), number(p.total_bytes),
       number(p.gradients_spilled), p.read_bytes_per_parameter, p.write_bytes_per_parameter,
       p.further_read_bytes_per_parameter, p.further_write_bytes_per_parameter,
       number(p.floor_bytes), number(p.floor_without_spilling_bytes), number(p.gpu_window_bytes),
       number(p.gpu_gradient_bytes)},
      p.text};
}

// ---- Questions that need no engine -------------------------------------------------------------

// The parameters of an optimizer of the table, in the order of their values; empty when it is not
// there.
Strings ParametersOf(const std::string& kind) {
  Strings names;
  for (const std::string_view known : kernels::OptimizerNames()) {
    if (known != kind) continue;
    for (const kernels::Parameter& each : kernels::OptimizerSpec(kind).row().parameters)
      names.emplace_back(each.name);
  }
  return names;
}

// What it keeps with these values, under torch.optim's names.
Strings PlanesOf(const std::string& kind, const Values& values) {
  const kernels::OptimizerSpec spec = SpecOf(kind, values);
  Strings names;
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    if (const kernels::StatePlane* const plane = spec.Plane(i)) names.emplace_back(plane->name);
  }
  return names;
}

bool IsManaged(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && Residency::Of(tensor) != nullptr;
}

// A number that tells tensors over managed storages apart as data_ptr() does for others, for code
// that compares addresses and never follows them: the same in the middle of operations, where hooks
// and dispatch modes ask. 0 for what is not managed.
int64_t IdentityOf(const at::Tensor& tensor) {
  if (!IsManaged(tensor)) return 0;
  return reinterpret_cast<int64_t>(Residency::Of(tensor)->home()) +
         tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

// The same of a whole storage, by the address of torch's object.
int64_t IdentityOfStorage(int64_t address) {
  const Residency* const residency = Residency::Of(reinterpret_cast<c10::StorageImpl*>(address));
  return residency != nullptr ? reinterpret_cast<int64_t>(residency->home()) : 0;
}

TORCH_LIBRARY(offloadd, m) {
  m.class_<PythonEngine>("Engine")
      .def(torch::init<const Strings&>())
      .def_static("check", [](const Strings& options) { CheckOptions(OptionsOf(options)); })
      .def_static("check_instructions", [] { CheckInstructions(); })
      .def("attach", &PythonEngine::Attach)
      .def("grow", &PythonEngine::Grow)
      .def("seal", [](const Pointer& self) { self->tensors().Seal(); })
      .def("replace_buffer",
           [](const Pointer& self, const std::string& name, const at::Tensor& tensor) {
             return self->tensors().ReplaceBuffer(name, tensor);
           })
      .def("apply", &PythonEngine::Step)
      .def("foresee", &PythonEngine::Foresee)
      .def("begin_with", &PythonEngine::BeginWith)
      .def("replace_state", &PythonEngine::ReplaceState)
      .def("step_count", [](const Pointer& self) { return self->tensors().step(); })
      .def("update_count",
           [](const Pointer& self, const at::Tensor& parameter) {
             return static_cast<int64_t>(self->tensors().update_count(parameter));
           })
      .def("wait_durable", [](const Pointer& self) { self->tensors().WaitDurable(); })
      .def("checkpoint", [](const Pointer& self) { return self->tensors().Checkpoint(); })
      .def("set_trainer_state",
           [](const Pointer& self, const at::Tensor& bytes) {
             self->tensors().SetTrainerState(TextOf(bytes));
           })
      .def("trainer_state",
           [](const Pointer& self) { return BytesOf(self->tensors().trainer_state()); })
      // Of optimizers that run in this process: class, whether what it keeps is the job's, and in
      // which form, or why not; no class where the job does not know of it.
      .def("foreign",
           [](const Pointer& self, int64_t number) {
             const ForeignState* const state = self->tensors().foreign(static_cast<size_t>(number));
             const ForeignState there = state != nullptr ? *state : ForeignState();
             return std::make_tuple(there.optimizer, there.is_kept, BytesOf(there.described));
           })
      .def("take_foreign_storages",
           [](const Pointer& self, int64_t number) {
             return self->tensors().TakeForeignStorages(static_cast<size_t>(number));
           })
      .def("add_foreign",
           [](const Pointer& self, int64_t number, const std::string& optimizer) {
             self->tensors().AddForeign(static_cast<size_t>(number), optimizer);
           })
      .def("expect_foreign",
           [](const Pointer& self, const std::vector<int64_t>& storages_bytes) {
             self->tensors().ExpectForeign(
                 std::vector<uint64_t>(storages_bytes.begin(), storages_bytes.end()));
           })
      // Empty where it is kept, else why not.
      .def("keep_foreign",
           [](const Pointer& self, int64_t number, const at::Tensor& described,
              const Tensors& storages) {
             const absl::Status status = self->tensors().KeepForeign(static_cast<size_t>(number),
                                                                     TextOf(described), storages);
             return std::string(status.message());
           })
      .def("leave_foreign",
           [](const Pointer& self, int64_t number, const std::string& reason) {
             self->tensors().LeaveForeign(static_cast<size_t>(number), reason);
           })
      .def("make_room_for_foreign",
           [](const Pointer& self) { return self->tensors().MakeRoomForForeign(); })
      .def("add_loss_scale",
           [](const Pointer& self, double scale, int64_t count) {
             LossScale start = {static_cast<float>(scale), static_cast<int32_t>(count)};
             const size_t index = self->tensors().AddLossScale(&start);
             return std::make_tuple(static_cast<int64_t>(index), double{start.scale},
                                    int64_t{start.growth_tracker});
           })
      .def("set_loss_scale",
           [](const Pointer& self, int64_t index, double scale, int64_t count) {
             self->tensors().SetLossScale(static_cast<size_t>(index),
                                          {static_cast<float>(scale), static_cast<int32_t>(count)});
           })
      .def("gather",
           [](const Pointer& self, const at::Tensor& parameter, const std::string& plane) {
             const at::NoGradGuard no_grad;
             return self->tensors().Gather(parameter, plane);
           })
      .def("set_initial_weights",
           [](const Pointer& self, const std::string& path, const Strings& ignored) {
             self->tensors().SetInitialWeights(path, Ignoring(ignored));
           })
      .def("load_weights",
           [](const Pointer& self, const std::string& path, const Strings& ignored) {
             self->tensors().LoadWeights(path, Ignoring(ignored));
           })
      .def("save_weights",
           [](const Pointer& self, const std::string& folder, int64_t shard_bytes,
              const Strings& left_out, const std::string& plane) {
             SaveOptions options = ShardsOf(shard_bytes);
             options.plane = plane;
             self->tensors().SaveWeights(folder, options, left_out);
           })
      .def("begin_construction", &PythonEngine::BeginConstruction)
      .def("end_construction", &PythonEngine::EndConstructionHere)
      .def("exchange",
           [](const Pointer& self, const at::Tensor& bytes) {
             Tensors all;
             for (const std::string& each : self->tensors().Exchange(TextOf(bytes)))
               all.push_back(BytesOf(each));
             return all;
           })
      .def("rank", [](const Pointer& self) { return static_cast<int64_t>(self->engine().rank()); })
      .def("why_fixed",
           [](const Pointer& self) { return std::string(self->tensors().why_fixed()); })
      .def("world_size",
           [](const Pointer& self) { return static_cast<int64_t>(self->engine().world_size()); })
      .def("daemon_pid",
           [](const Pointer& self) {
             return static_cast<int64_t>(self->tensors().attachment()->session().daemon_pid());
           })
      .def("statistics", &StatisticsOf)
      .def("plan", &PlanOf)
      .def("close", &PythonEngine::Close)
      .def("end", &PythonEngine::End)
      .def_static("load_into_memory",
                  [](const Strings& names, const Tensors& tensors, const Strings& buffer_names,
                     const Tensors& buffers, const std::string& path, const Strings& ignored) {
                    LoadIntoMemory(FileWeightsOf(names, tensors, buffer_names, buffers), path,
                                   Ignoring(ignored));
                  })
      .def_static("save_from_memory",
                  [](const Strings& names, const Tensors& tensors, const Strings& buffer_names,
                     const Tensors& buffers, const std::string& folder, int64_t shard_bytes) {
                    SaveFromMemory(FileWeightsOf(names, tensors, buffer_names, buffers), folder,
                                   ShardsOf(shard_bytes));
                  })
      // (kind, value) of an average's step: 0 keep, 1 take, 2 lerp, 3 mean.
      .def_static("average_step",
                  [](const std::string& average, int64_t update) -> std::tuple<int64_t, double> {
                    const AverageStep step = StepOf(ValueOrThrow(ParseAveraging(average)), update);
                    return {static_cast<int64_t>(step.kind), step.value};
                  })
      .def_static("parameters_of", &ParametersOf)
      .def_static("planes_of", &PlanesOf)
      .def_static("is_managed", &IsManaged)
      .def_static("leave_data", [] { WeightResidency::LeaveData(); })
      .def_static("share",
                  [](const at::Tensor& own, const at::Tensor& data) {
                    auto* const weight = dynamic_cast<WeightResidency*>(Residency::Of(own));
                    return weight != nullptr && weight->Share(own, data);
                  })
      // Of the bytes of a contiguous tensor in memory.
      .def_static("digest",
                  [](const at::Tensor& tensor) {
                    BytesDigest digest;
                    digest.Update(static_cast<const std::byte*>(tensor.const_data_ptr()),
                                  tensor.nbytes());
                    return static_cast<int64_t>(digest.Finish());
                  })
      .def_static("forget_given",
                  [](const at::Tensor& own) {
                    auto* const weight = dynamic_cast<WeightResidency*>(Residency::Of(own));
                    if (weight != nullptr) weight->ForgetGiven();
                  })
      // Around a step that an optimizer takes in this process.
      .def("begin_own_step",
           [](const Pointer& self, bool inside_passes) {
             self->tensors().process_memory()->BeginStep(inside_passes);
           })
      .def_static("end_own_step", [] { ProcessMemory::EndStep(); })
      .def_static("set_writes_alike", [](bool alike) { SetWritesAlike(alike); })
      .def_static("identity_of", &IdentityOf)
      .def_static("identity_of_storage", &IdentityOfStorage);
}

}  // namespace
}  // namespace offload::zero3

// By ctypes: the class of errors, which lives as long as the process.
extern "C" __attribute__((visibility("default"))) void offloadd_set_error_class(_object* type) {
  offload::zero3::error_class = type;
  offload::zero3::SetThrowHook(offload::zero3::ThrowPythonError);
}
