// <offload/client.h>: a session and its plan under C names. No torch here.

#include <offload/client.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/durability.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "client/session.h"
#include "kernels/optimizer.h"
#include "kernels/update.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"
#include "zero3/planner.h"
#include "zero3/torch/update_counts.h"
#include "zero3/trainer_state.h"

namespace offload::zero3 {
namespace {

static_assert(OFFLOAD_EXTENT_ELEMENTS == proto::kExtentElements);

constexpr int kErrorWithoutNumber = 1;

// The text of a thread, freed when it ends. The main thread's stays: functions of atexit() and
// destructors of statics run when its thread-local objects are gone, and may use a job.
thread_local std::string* last_error = nullptr;

struct FreesLastError {
  ~FreesLastError() {
    if (getpid() != gettid()) delete std::exchange(last_error, nullptr);
  }
};

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  if (last_error == nullptr) {
    thread_local const FreesLastError frees;
    last_error = new std::string;
  }
  *last_error = ToStd(status.message());
  const std::optional<ErrorId> id = ErrorIdOf(status);
  return id.has_value() ? static_cast<int>(*id) : kErrorWithoutNumber;
}

absl::Status BadValue(std::string_view what) { return MakeError(ErrorId::kBadValue, what); }

// A list that may be NULL when it is empty, for Guarded().
const void* ListOf(const void* list, size_t count) { return count > 0 ? list : ""; }

// No exception crosses the border, and no pointer that is needed and NULL.
template <typename Work>
int Guarded(std::initializer_list<std::pair<const char*, const void*>> needed, Work work) noexcept {
  try {
    for (const auto& [name, pointer] : needed) {
      if (pointer == nullptr) return Report(BadValue(absl::StrCat(name, " is NULL")));
    }
    return Report(work());
  } catch (const std::exception& error) {
    return Report(absl::InternalError(error.what()));
  }
}

std::string TextOr(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

absl::StatusOr<proto::Tensor> TensorOf(const offload_tensor& given, size_t number) {
  if (given.name == nullptr || (given.shape == nullptr && given.dimension_count > 0))
    return BadValue(absl::StrCat("tensor ", number, " has no name or no shape"));
  if (given.dtype != OFFLOAD_FLOAT32 && given.dtype != OFFLOAD_BFLOAT16)
    return BadValue(
        absl::StrCat("tensor \"", given.name, "\" has the dtype ", static_cast<int>(given.dtype)));
  return proto::Tensor{
      .name = given.name,
      .shape = {given.shape, given.shape + given.dimension_count},
      .dtype = given.dtype == OFFLOAD_FLOAT32 ? proto::Dtype::kFloat32 : proto::Dtype::kBFloat16,
      .trainable = given.trainable != 0};
}

absl::Status CheckValues(const std::string& violation) {
  if (violation.empty()) return absl::OkStatus();
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat("optimizer options that cannot be: ", violation),
                   "Give the parameter such a value");
}

absl::Status SetParameters(const offload_parameter* parameters, size_t count,
                           kernels::OptimizerSpec* optimizer) {
  kernels::OptimizerSpec changed = *optimizer;
  for (size_t i = 0; i < count; ++i) {
    const std::string_view name = parameters[i].name != nullptr ? parameters[i].name : "";
    const auto& known = optimizer->row().parameters;
    const auto has_name = [&](const kernels::Parameter& each) { return name == each.name; };
    if (std::none_of(known.begin(), known.end(), has_name)) {
      std::vector<std::string> names;
      for (const kernels::Parameter& each : known) names.push_back(each.name);
      return MakeError(ErrorId::kBadValue,
                       absl::StrCat(std::string(optimizer->name()), " has no parameter \"",
                                    std::string(name), "\""),
                       absl::StrCat("It has ", absl::StrJoin(names, ", ")));
    }
    changed.Set(name, parameters[i].value);
  }
  OFFLOAD_RETURN_IF_ERROR(CheckValues(changed.Violation()));
  *optimizer = changed;
  return absl::OkStatus();
}

absl::StatusOr<kernels::OptimizerSpec> OptimizerOf(const char* name,
                                                   const offload_parameter* parameters,
                                                   size_t count) {
  const std::string_view wanted = name != nullptr ? name : "";
  const auto names = kernels::OptimizerNames();
  if (std::find(names.begin(), names.end(), wanted) == names.end()) {
    return MakeError(
        ErrorId::kBadValue, absl::StrCat("there is no optimizer \"", std::string(wanted), "\""),
        absl::StrCat("Use ",
                     absl::StrJoin(std::vector<std::string>(names.begin(), names.end()), ", ")));
  }
  kernels::OptimizerSpec optimizer(wanted);
  OFFLOAD_RETURN_IF_ERROR(SetParameters(parameters, count, &optimizer));
  OFFLOAD_RETURN_IF_ERROR(CheckValues(optimizer.ViolationWhenNew()));
  return optimizer;
}

// Which threads have acquired which tensor. A step waits until what it updates is released: its own
// thread would wait for itself, and one release too many would leave the tensor pinned for good.
class Holders {
 public:
  void Add(size_t tensor) {
    const std::lock_guard lock(mutex_);
    held_.emplace(tensor, std::this_thread::get_id());
  }
  // Of what another thread has acquired, too. False when nobody has.
  bool Remove(size_t tensor) {
    const std::lock_guard lock(mutex_);
    const auto [begin, end] = held_.equal_range(tensor);
    if (begin == end) return false;
    const auto own = std::find_if(begin, end, IsOwn);
    held_.erase(own != end ? own : begin);
    return true;
  }
  absl::Status CheckReleased(size_t tensor, const std::string& name, std::string_view call) const {
    const std::lock_guard lock(mutex_);
    const auto [begin, end] = held_.equal_range(tensor);
    if (std::none_of(begin, end, IsOwn)) return absl::OkStatus();
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat(ToAbsl(call), " with tensor \"", name, "\", which this thread has acquired"),
        "Call offload_release() before, as often as offload_acquire()");
  }

 private:
  static bool IsOwn(const std::pair<const size_t, std::thread::id>& each) {
    return each.second == std::this_thread::get_id();
  }
  mutable std::mutex mutex_;
  std::multimap<size_t, std::thread::id> held_;
};

}  // namespace
}  // namespace offload::zero3

// Everything of one job. Calls check what comes from outside, the daemon checks the rest.
struct offload_job {
  offload_job() = default;

  absl::Status Open(const offload_options& options, std::vector<offload::proto::Tensor> tensors);
  absl::Status Put(size_t tensor, const char* plane, uint64_t begin, uint64_t count,
                   const void* values);
  absl::Status Get(size_t tensor, const char* plane, uint64_t begin, uint64_t count, void* values);
  absl::Status Publish();
  absl::Status CheckTensor(size_t tensor) const;
  absl::Status DeliverGradient(size_t tensor, const void* gradient);
  absl::Status Step(const offload_parameter* parameters, size_t count);

  const offload::proto::Tensor& tensor(size_t number) const {
    return input.catalogue.tensors[number];
  }
  // A piece of a plane, as the calls name it.
  struct Piece {
    offload::proto::Plane plane;
    uint64_t element_bytes;
  };
  absl::StatusOr<Piece> PieceOf(size_t tensor, const char* plane, uint64_t begin,
                                uint64_t count) const;
  absl::Status WaitForUpdate(size_t tensor);
  absl::Status WriteToScratch(size_t tensor, const std::byte* bytes, uint64_t size_bytes);

  std::unique_ptr<offload::client::Session> session;
  offload::client::JobInfo info;
  offload::kernels::OptimizerSpec optimizer;
  offload::zero3::PlanInput input;
  offload::zero3::Plan plan;
  offload::zero3::TrainerState state;
  uint64_t step = 0;
  bool published = false;
  std::vector<bool> delivered;  // by tensor
  offload::zero3::Holders holders;
};

using offload::ErrorId;
using offload::MakeError;
using offload::zero3::BadValue;
namespace client = offload::client;
namespace proto = offload::proto;

absl::Status offload_job::Open(const offload_options& options, std::vector<proto::Tensor> tensors) {
  using offload::zero3::MakePlan, offload::zero3::TextOr;
  if (options.nvme_path == nullptr) return MakeError(ErrorId::kPoolMissing, "nvme_path is not set");
  if (options.ram == nullptr)
    return MakeError(ErrorId::kBadValue, "ram is not set",
                     "Set ram to a size, for example \"8GiB\"");
  OFFLOAD_ASSIGN_OR_RETURN(input.ram_bytes, offload::ParseByteSize(options.ram));
  const std::string durability = TextOr(options.durability, "step");
  OFFLOAD_ASSIGN_OR_RETURN(input.durability, offload::ParseDurability(durability));
  OFFLOAD_ASSIGN_OR_RETURN(input.catalogue, proto::BuildCatalogue(std::move(tensors), optimizer));
  OFFLOAD_RETURN_IF_ERROR(MakePlan(input).status());  // before anything is made
  OFFLOAD_ASSIGN_OR_RETURN(session, client::Session::Connect({}));
  OFFLOAD_ASSIGN_OR_RETURN(info, session->OpenJob({.job = TextOr(options.job, "default"),
                                                   .pool = options.nvme_path,
                                                   .ram_bytes = input.ram_bytes,
                                                   .io_engine = TextOr(options.io, "auto"),
                                                   .durability = durability}));
  input.good_pipeline_blocks = std::max(info.pipeline_blocks, input.good_pipeline_blocks);
  input.write_cost = info.write_cost;
  OFFLOAD_ASSIGN_OR_RETURN(plan, MakePlan(input));
  OFFLOAD_RETURN_IF_ERROR(session->DeclareTensors(input.catalogue.tensors));
  OFFLOAD_RETURN_IF_ERROR(session->Seal(optimizer, plan.memory, plan.pins_offset, nullptr));
  OFFLOAD_RETURN_IF_ERROR(session->CountUses(plan.use_times_offset));
  OFFLOAD_ASSIGN_OR_RETURN(state, offload::zero3::DecodeTrainerState(info.trainer_state));
  step = info.step;
  published = info.exists;
  state.update_counts.resize(input.catalogue.tensors.size());
  delivered.resize(input.catalogue.tensors.size());
  return absl::OkStatus();
}

absl::Status offload_job::CheckTensor(size_t number) const {
  if (number < input.catalogue.tensors.size()) return absl::OkStatus();
  return BadValue(absl::StrCat("tensor ", number, " of ", input.catalogue.tensors.size()));
}

absl::StatusOr<offload_job::Piece> offload_job::PieceOf(size_t number, const char* plane,
                                                        uint64_t begin, uint64_t count) const {
  OFFLOAD_RETURN_IF_ERROR(CheckTensor(number));
  const proto::Tensor& named = tensor(number);
  const bool ends = begin <= named.element_count && count == named.element_count - begin;
  const bool is_whole =
      begin % proto::kExtentElements == 0 &&
      (ends || (count % proto::kExtentElements == 0 && begin <= named.element_count &&
                count <= named.element_count - begin));
  if (!is_whole) {
    return BadValue(absl::StrCat("elements ", begin, " to ", begin + count, " of \"", named.name,
                                 "\", which has ", named.element_count, " in extents of ",
                                 proto::kExtentElements));
  }
  const proto::PlaneSet& planes = input.catalogue.planes(static_cast<uint32_t>(number));
  const std::string_view wanted = plane != nullptr ? plane : "";
  std::optional<proto::Plane> found = planes.Find(wanted);
  if (wanted == "master" && !planes.Has(proto::Plane::kResidual) &&
      named.dtype == proto::Dtype::kFloat32)
    found = proto::Plane::kWeight;
  if (!found.has_value() || *found == proto::Plane::kResidual) {
    return MakeError(
        ErrorId::kBadValue,
        absl::StrCat("tensor \"", named.name, "\" has no plane \"", std::string(wanted), "\""),
        absl::StrCat("Its planes are ", planes.Names()));
  }
  return Piece{*found, planes.Bytes(*found, 1)};
}

absl::Status offload_job::Put(size_t number, const char* plane, uint64_t begin, uint64_t count,
                              const void* values) {
  OFFLOAD_ASSIGN_OR_RETURN(const Piece piece, PieceOf(number, plane, begin, count));
  OFFLOAD_RETURN_IF_ERROR(holders.CheckReleased(number, tensor(number).name, "offload_put()"));
  const auto* const from = static_cast<const std::byte*>(values);
  for (uint64_t at = 0; at < count; at += proto::kExtentElements) {
    const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count - at);
    std::memcpy(session->region() + plan.staging_offset, from + at * piece.element_bytes,
                elements * piece.element_bytes);
    OFFLOAD_RETURN_IF_ERROR(session->Wait(session->PutPlane(
        static_cast<uint32_t>(number), piece.plane, begin + at, elements, plan.staging_offset)));
  }
  return absl::OkStatus();
}

absl::Status offload_job::Get(size_t number, const char* plane, uint64_t begin, uint64_t count,
                              void* values) {
  OFFLOAD_ASSIGN_OR_RETURN(const Piece piece, PieceOf(number, plane, begin, count));
  auto* const to = static_cast<std::byte*>(values);
  for (uint64_t at = 0; at < count; at += proto::kExtentElements) {
    const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count - at);
    OFFLOAD_RETURN_IF_ERROR(session->Wait(session->Get(static_cast<uint32_t>(number), piece.plane,
                                                       begin + at, elements, plan.staging_offset)));
    std::memcpy(to + at * piece.element_bytes, session->region() + plan.staging_offset,
                elements * piece.element_bytes);
  }
  return absl::OkStatus();
}

absl::Status offload_job::Publish() {
  if (published) return absl::OkStatus();
  OFFLOAD_ASSIGN_OR_RETURN(const std::string blob, offload::zero3::EncodeTrainerState(state));
  OFFLOAD_RETURN_IF_ERROR(session->Publish(blob));
  published = true;
  return absl::OkStatus();
}

// Until then the daemon reads the gradient of the last step.
absl::Status offload_job::WaitForUpdate(size_t number) {
  const auto id = static_cast<uint32_t>(number);
  if (session->State(id) != proto::kPending) return absl::OkStatus();
  OFFLOAD_RETURN_IF_ERROR(session->Acquire(id).status());
  session->Release(id);
  return absl::OkStatus();
}

absl::Status offload_job::WriteToScratch(size_t number, const std::byte* bytes,
                                         uint64_t size_bytes) {
  const uint64_t scratch = plan.memory.gradients[number].offset_bytes;
  const uint64_t extent_bytes =
      uint64_t{proto::kExtentElements} * proto::DtypeBytes(tensor(number).dtype);
  for (uint64_t begin = 0; begin < size_bytes; begin += extent_bytes) {
    const uint64_t length = std::min(extent_bytes, size_bytes - begin);
    std::memcpy(session->region() + plan.staging_offset, bytes + begin, length);
    OFFLOAD_RETURN_IF_ERROR(session->Wait(
        session->ScratchWrite(scratch + begin, proto::PaddedBytes(length), plan.staging_offset)));
  }
  return absl::OkStatus();
}

absl::Status offload_job::DeliverGradient(size_t number, const void* gradient) {
  OFFLOAD_RETURN_IF_ERROR(CheckTensor(number));
  const proto::Tensor& named = tensor(number);
  if (!named.trainable)
    return MakeError(ErrorId::kBadValue, absl::StrCat("tensor \"", named.name, "\" is frozen"),
                     "Open the job again with trainable = 1");
  const auto dtype = named.dtype == proto::Dtype::kFloat32 ? offload::kernels::Dtype::kFloat32
                                                           : offload::kernels::Dtype::kBFloat16;
  if (!offload::kernels::AllFinite(dtype, gradient, named.element_count))
    return MakeError(ErrorId::kNonFinite,
                     absl::StrCat("the gradient of \"", named.name, "\" holds NaN or infinity"));
  OFFLOAD_RETURN_IF_ERROR(WaitForUpdate(number));
  const auto* const bytes = static_cast<const std::byte*>(gradient);
  const uint64_t size_bytes = named.element_count * proto::DtypeBytes(named.dtype);
  const proto::GradientPlacement& placement = plan.memory.gradients[number];
  if (placement.home == proto::GradientHome::kScratch) {
    OFFLOAD_RETURN_IF_ERROR(WriteToScratch(number, bytes, size_bytes));
  } else {
    std::memcpy(session->region() + placement.offset_bytes, bytes, size_bytes);
  }
  delivered[number] = true;
  return absl::OkStatus();
}

absl::Status offload_job::Step(const offload_parameter* parameters, size_t count) {
  if (!published)
    return MakeError(ErrorId::kBadValue, "a step of a new job without weights",
                     "Put its weights, then call offload_publish()");
  offload::kernels::OptimizerSpec next = optimizer;
  OFFLOAD_RETURN_IF_ERROR(offload::zero3::SetParameters(parameters, count, &next));
  if (!offload::proto::PlaneSet(proto::Dtype::kFloat32, true, optimizer).Serves(next)) {
    return MakeError(ErrorId::kUnsupportedOptimizer,
                     "parameters that need a state that the job was opened without",
                     "Give them to offload_open(), with a new job");
  }
  client::StepCommand command;
  command.step = step + 1;
  command.groups = {next};
  offload::zero3::TrainerState after = state;
  for (uint32_t id = 0; id < delivered.size(); ++id) {
    if (!delivered[id]) continue;
    OFFLOAD_RETURN_IF_ERROR(holders.CheckReleased(id, tensor(id).name, "offload_step()"));
    command.updates.push_back({id, /*group=*/0, after.update_counts[id] + 1});
    if (offload::zero3::IsCounted(next)) ++after.update_counts[id];
  }
  command.has_trainer_state = true;
  OFFLOAD_ASSIGN_OR_RETURN(command.trainer_state, offload::zero3::EncodeTrainerState(after));
  OFFLOAD_RETURN_IF_ERROR(session->Step(command));
  optimizer = next;
  state = std::move(after);
  ++step;
  delivered.assign(delivered.size(), false);
  return absl::OkStatus();
}

// ---- The calls ---------------------------------------------------------------------------------

using offload::zero3::Guarded;
using offload::zero3::ListOf;

const char* offload_error(void) {
  return offload::zero3::last_error != nullptr ? offload::zero3::last_error->c_str() : "";
}

int offload_open(const offload_options* options, const offload_tensor* tensors, size_t tensor_count,
                 const char* optimizer, const offload_parameter* parameters, size_t parameter_count,
                 offload_job** job) {
  return Guarded(
      {{"job", job},
       {"options", options},
       {"tensors", ListOf(tensors, tensor_count)},
       {"parameters", ListOf(parameters, parameter_count)}},
      [&]() -> absl::Status {
        *job = nullptr;
        std::vector<proto::Tensor> declared;
        for (size_t i = 0; i < tensor_count; ++i) {
          OFFLOAD_ASSIGN_OR_RETURN(proto::Tensor tensor, offload::zero3::TensorOf(tensors[i], i));
          declared.push_back(std::move(tensor));
        }
        auto opened = std::make_unique<offload_job>();
        OFFLOAD_ASSIGN_OR_RETURN(
            opened->optimizer, offload::zero3::OptimizerOf(optimizer, parameters, parameter_count));
        OFFLOAD_RETURN_IF_ERROR(opened->Open(*options, std::move(declared)));
        *job = opened.release();
        return absl::OkStatus();
      });
}

int offload_exists(const offload_job* job) { return job != nullptr && job->info.exists ? 1 : 0; }
int64_t offload_step_count(const offload_job* job) {
  return job != nullptr ? static_cast<int64_t>(job->step) : 0;
}

int offload_put(offload_job* job, size_t tensor, const char* plane, uint64_t begin, uint64_t count,
                const void* values) {
  return Guarded({{"job", job}, {"values", values}},
                 [&] { return job->Put(tensor, plane, begin, count, values); });
}

int offload_get(offload_job* job, size_t tensor, const char* plane, uint64_t begin, uint64_t count,
                void* values) {
  return Guarded({{"job", job}, {"values", values}},
                 [&] { return job->Get(tensor, plane, begin, count, values); });
}

int offload_publish(offload_job* job) {
  return Guarded({{"job", job}}, [&] { return job->Publish(); });
}

int offload_acquire(offload_job* job, size_t tensor, const void** weights) {
  return Guarded({{"job", job}, {"weights", weights}}, [&]() -> absl::Status {
    OFFLOAD_RETURN_IF_ERROR(job->CheckTensor(tensor));
    OFFLOAD_ASSIGN_OR_RETURN(*weights, job->session->Acquire(static_cast<uint32_t>(tensor)));
    job->holders.Add(tensor);
    return absl::OkStatus();
  });
}

void offload_release(offload_job* job, size_t tensor) {
  if (job != nullptr && job->holders.Remove(tensor))
    job->session->Release(static_cast<uint32_t>(tensor));
}

void offload_prefetch(offload_job* job, size_t tensor) {
  if (job != nullptr && job->CheckTensor(tensor).ok())
    job->session->Prefetch(static_cast<uint32_t>(tensor));
}

int offload_deliver_gradient(offload_job* job, size_t tensor, const void* gradient) {
  return Guarded({{"job", job}, {"gradient", gradient}},
                 [&] { return job->DeliverGradient(tensor, gradient); });
}

int offload_step(offload_job* job, const offload_parameter* parameters, size_t parameter_count) {
  return Guarded({{"job", job}, {"parameters", ListOf(parameters, parameter_count)}},
                 [&] { return job->Step(parameters, parameter_count); });
}

int offload_wait_durable(offload_job* job) {
  return Guarded({{"job", job}}, [&] { return job->session->WaitDurable().status(); });
}

int offload_close(offload_job* job) {
  const std::unique_ptr<offload_job> closing(job);
  if (closing == nullptr) return 0;
  return Guarded({}, [&] { return closing->session->CloseJob(); });
}
