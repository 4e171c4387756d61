// The fallback kernel of the dispatch key: what of an operator's arguments has to be in memory, and
// the run itself.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "base/error.h"
#include "zero3/torch/operator_gate.h"
#include "zero3/torch/residency.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/weight_residency.h"

namespace offload::zero3 {
namespace {

thread_local int raw_kernels = 0;  // that run on this thread, one inside of another

// While one of them runs, the thread's large allocations are in memory, also in a construction.
class RawKernel {
 public:
  explicit RawKernel(bool is_one) : count_(is_one ? 1 : 0) { raw_kernels += count_; }
  ~RawKernel() { raw_kernels -= count_; }
  RawKernel(const RawKernel&) = delete;
  RawKernel& operator=(const RawKernel&) = delete;

 private:
  const int count_;
};

// kStatistics: written while the operator's own argument says that it trains, else read.
enum class Argument : uint8_t { kSkip, kRead, kWrite, kOverwrite, kStatistics };

// What the schema of an operator says, worked out once.
struct Verdict {
  const c10::FunctionSchema* schema = nullptr;
  bool pins = false;  // any argument but kSkip
  Pins::Allocates allocates = Pins::Allocates::kResults;
  bool is_split = false;  // runs for each tensor of its first list, with those of the others
  bool is_loop = false;   // _foreach_*
  bool takes_raw_memory = false;
  bool is_communication = false;  // of c10d: goes on when the operator has returned
  bool is_message = false;        // from one rank to another
  bool gives_all_the_same = false;
  bool is_lazy_clone = false;
  Special special = Special::kNone;
  std::vector<Argument> arguments;
  std::optional<size_t> trains;  // the argument that says so
};

// Operators that read or change metadata only, though their schema does not say so.
bool ReadsNoData(std::string_view name) {
  static const auto* const kNames =
      new absl::flat_hash_set<std::string_view>{"aten::_has_compatible_shallow_copy_type",
                                                "aten::set_data",
                                                "aten::requires_grad_",
                                                "aten::detach_",
                                                "aten::retain_grad",
                                                "aten::retains_grad",
                                                "aten::_backward",
                                                "aten::is_leaf",
                                                "aten::output_nr",
                                                "aten::_version",
                                                "aten::size",
                                                "aten::stride",
                                                "aten::numel",
                                                "aten::dim",
                                                "aten::sym_size",
                                                "aten::sym_stride",
                                                "aten::sym_numel",
                                                "aten::sym_storage_offset",
                                                "aten::storage_offset",
                                                "aten::is_same_size",
                                                "aten::is_contiguous",
                                                "aten::is_floating_point",
                                                "aten::is_complex",
                                                "aten::is_signed",
                                                "aten::is_inference",
                                                "aten::result_type",
                                                "aten::can_cast",
                                                "aten::is_set_to",
                                                "aten::is_pinned",
                                                "aten::record_stream",
                                                "aten::set_",
                                                "aten::resize_",
                                                "aten::resize_as_",
                                                "aten::as_strided_",
                                                "aten::t_",
                                                "aten::transpose_",
                                                "aten::squeeze_",
                                                "aten::unsqueeze_",
                                                "aten::swapaxes_",
                                                "aten::swapdims_",
                                                "aten::rename_",
                                                "aten::_fw_primal",
                                                "aten::_is_zerotensor",
                                                "aten::is_neg",
                                                "aten::is_conj",
                                                "aten::_debug_has_internal_overlap",
                                                "aten::infer_size"};
  // Of _foreach_* only loops over dispatched operators run (BelowManaged), which come here one by
  // one: pinning the list would gather the whole model.
  return kNames->contains(name) ||
         absl::StartsWith(absl::string_view(name.data(), name.size()), "aten::_foreach_") ||
         absl::StartsWith(absl::string_view(name.data(), name.size()), "aten::new_") ||
         absl::EndsWith(absl::string_view(name.data(), name.size()), "_like");
}

// Operators that give every element of their first argument a value without looking at the old one.
bool Overwrites(std::string_view name) {
  static const auto* const kNames = new absl::flat_hash_set<std::string_view>{
      "aten::zero_",       "aten::fill_",   "aten::copy_",        "aten::uniform_",
      "aten::normal_",     "aten::random_", "aten::exponential_", "aten::bernoulli_",
      "aten::log_normal_", "aten::cauchy_", "aten::geometric_"};
  return kNames->contains(name);
}

// Of batch norm: running statistics are written, though the schema does not say so. Programs keep
// them in frozen parameters, too.
bool IsStatistics(std::string_view name, std::string_view argument) {
  static const auto* const kNames =
      new absl::flat_hash_set<std::string_view>{"aten::batch_norm",
                                                "aten::instance_norm",
                                                "aten::_batch_norm_impl_index",
                                                "aten::native_batch_norm",
                                                "aten::cudnn_batch_norm",
                                                "aten::miopen_batch_norm",
                                                "aten::batch_norm_update_stats",
                                                "aten::batch_norm_gather_stats",
                                                "aten::batch_norm_gather_stats_with_counts"};
  return (argument == "running_mean" || argument == "running_var") && kNames->contains(name);
}

Special SpecialOf(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name(), overload = schema.overload_name();
  if (name == "aten::norm" && overload == "Scalar") return Special::kNorm;
  if (name == "aten::linalg_vector_norm" && overload.empty()) return Special::kVectorNorm;
  if (name == "aten::_foreach_norm" && overload == "Scalar") return Special::kListNorm;
  if (name == "aten::mul_") return Special::kMultiply;
  if (name == "aten::zero_") return Special::kZero;
  if (name == "aten::set_") {
    return overload == "source_Tensor"                   ? Special::kSet
           : overload == "source_Storage"                ? Special::kSetStorage
           : overload == "source_Storage_storage_offset" ? Special::kSetStrides
                                                         : Special::kNone;
  }
  // set_data() is no operator. This is what it asks before it takes the other tensor's memory.
  if (name == "aten::_has_compatible_shallow_copy_type") return Special::kSetData;
  if (name == "aten::record_stream") return Special::kRecordStream;
  return Special::kNone;
}

Pins::Allocates AllocatesOf(absl::string_view name) {
  if (absl::StartsWith(name, "aten::empty") || absl::StartsWith(name, "aten::new_empty"))
    return Pins::Allocates::kEmpty;
  return absl::StartsWith(name, "aten::resize_") ? Pins::Allocates::kForCaller
                                                 : Pins::Allocates::kResults;
}

// GradScaler's and the fused optimizers: one kernel over whole lists, unlike those of _foreach_*.
bool IsOverWholeLists(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return schema.returns().empty() && (name == "aten::_amp_foreach_non_finite_check_and_unscale_" ||
                                      absl::StartsWith(name, "aten::_fused_"));
}

// Operators whose kernels may be oneDNN's, which asks torch's allocator for bytes that are no
// tensor's (raw_allocate()) and have to be in memory.
bool TakesRawMemory(absl::string_view name) {
  static constexpr std::array<absl::string_view, 14> kPrefixes = {
      "aten::convolution", "aten::_convolution",
      "aten::slow_conv",   "aten::thnn_conv",
      "aten::mkldnn",      "aten::_mkldnn",
      "aten::addmm",       "aten::_addmm",
      "aten::mm",          "aten::bmm",
      "aten::baddbmm",     "aten::addbmm",
      "aten::gelu",        "aten::_scaled_dot_product"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [name](absl::string_view prefix) { return absl::StartsWith(name, prefix); });
}

// Operators of c10d write their first argument, though their schema does not say so.
bool IsCommunication(absl::string_view name) { return absl::StartsWith(name, "c10d::"); }

bool IsMessage(absl::string_view name) {
  return name == "c10d::send" || absl::StartsWith(name, "c10d::recv_");
}

bool IsBarrier(absl::string_view name) {
  return name == "c10d::barrier" || name == "c10d::monitored_barrier_";
}

// Afterwards all ranks of the group have the same in it.
bool GivesAllTheSame(absl::string_view name) {
  return absl::StartsWith(name, "c10d::allreduce_") || absl::StartsWith(name, "c10d::allgather_") ||
         name == "c10d::_allgather_base_" || name == "c10d::broadcast_";
}

// A clone that shares bytes until one of both is written: bytes that come and go are not shared.
bool CloneAtOnce(torch::jit::Stack* stack) {
  const at::Tensor self = torch::jit::peek(*stack, 0, 1).toTensor();
  if (Residency::Of(self) == nullptr) return false;
  torch::jit::drop(*stack, 1);
  torch::jit::push(*stack, self.clone());
  return true;
}

// What a point-to-point operation has of bytes of ours. Its work may be waited for once only, and
// by the caller, who may start others before: so it sends copies, and receives nothing.
void LeaveOutOfMessages(const Verdict& verdict, torch::jit::Stack* stack) {
  c10::IValue& tensors = torch::jit::peek(*stack, 0, verdict.arguments.size());
  c10::List<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors.toTensorVector()) {
    const Residency* const residency = Residency::Of(tensor);
    if (residency != nullptr && verdict.schema->name() != "c10d::send") {
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedModel,
          absl::StrCat("'", residency->name(), "' is offloaded, and would be received into"),
          "Receive into a tensor of its own, and copy_() that"));
    }
    copies.push_back(residency != nullptr ? tensor.detach().clone() : tensor);
  }
  tensors = std::move(copies);
}

// Its kernel has handed the bytes to other threads, which are done with them at its end.
void WaitForWork(size_t count, const torch::jit::Stack& stack) {
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = torch::jit::peek(stack, i, count);
    if (value.isCustomClass()) value.toCustomClass<c10d::Work>()->wait();
  }
}

// While a collective operation has its pins. Others ask for nothing of the thread.
class CollectiveScope {
 public:
  explicit CollectiveScope(bool is_one) : sets_(is_one && !WritesAlike()) {
    if (sets_) SetWritesAlike(true);
  }
  ~CollectiveScope() {
    if (sets_) SetWritesAlike(false);
  }
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

 private:
  const bool sets_;
};

std::unique_ptr<Verdict> Judge(const c10::FunctionSchema& schema) {
  auto verdict = std::make_unique<Verdict>();
  verdict->schema = &schema;
  verdict->special = SpecialOf(schema);
  verdict->is_split = IsOverWholeLists(schema);
  verdict->is_loop = absl::StartsWith(schema.name(), "aten::_foreach_");
  verdict->allocates = AllocatesOf(schema.name());
  verdict->takes_raw_memory = TakesRawMemory(schema.name());
  verdict->is_communication = IsCommunication(schema.name());
  verdict->is_message = IsMessage(schema.name());
  verdict->gives_all_the_same = GivesAllTheSame(schema.name());
  verdict->is_lazy_clone = schema.name() == "aten::_lazy_clone";
  const bool reads_no_data = ReadsNoData(schema.name());
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::AliasInfo* alias = argument.alias_info();
    Argument use = Argument::kRead;
    if (reads_no_data) {
      use = Argument::kSkip;
    } else if (alias != nullptr) {
      // An alias that is not written belongs to a view: metadata only.
      use = !alias->isWrite()           ? Argument::kSkip
            : Overwrites(schema.name()) ? Argument::kOverwrite
                                        : Argument::kWrite;
    } else if (IsStatistics(schema.name(), argument.name())) {
      use = Argument::kStatistics;
    }
    if (argument.name() == "training" || argument.name() == "use_input_stats")
      verdict->trains = verdict->arguments.size();
    if (verdict->is_communication && verdict->arguments.empty() && !IsBarrier(schema.name()))
      use = Argument::kWrite;
    verdict->pins |= use != Argument::kSkip;
    verdict->arguments.push_back(use);
  }
  return verdict;
}

// Verdicts by the address of the schema, which lives as long as its operator. Entries are only
// added: readers take no lock.
class VerdictTable {
 public:
  const Verdict& Find(const c10::FunctionSchema& schema) {
    size_t at = Hash(&schema);
    for (size_t probes = 0; probes < kEntries; ++probes, at = (at + 1) % kEntries) {
      const Verdict* verdict = entries_[at].load(std::memory_order_acquire);
      if (verdict == nullptr) break;
      if (verdict->schema == &schema && verdict->arguments.size() == schema.arguments().size())
        return *verdict;
    }
    return Add(schema);
  }

 private:
  static constexpr size_t kEntries = 1 << 14;  // torch has some 3500 operators
  static size_t Hash(const void* address) {
    return (reinterpret_cast<uintptr_t>(address) >> 4) * 0x9e3779b97f4a7c15ull >> 50;
  }

  const Verdict& Add(const c10::FunctionSchema& schema) {
    std::lock_guard lock(mutex_);
    owned_.push_back(Judge(schema));
    const Verdict* verdict = owned_.back().get();
    size_t at = Hash(&schema);
    for (size_t probes = 0; probes < kEntries; ++probes, at = (at + 1) % kEntries) {
      if (entries_[at].load(std::memory_order_relaxed) != nullptr) continue;
      entries_[at].store(verdict, std::memory_order_release);
      break;
    }
    return *verdict;
  }

  std::array<std::atomic<const Verdict*>, kEntries> entries_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Verdict>> owned_;
};

// The residencies of an operation, each once, with what is done to it in all.
using Uses = absl::InlinedVector<std::pair<Residency*, Access>, 4>;

void AddUse(Uses& uses, Residency* residency, Access access) {
  for (auto& [known, known_access] : uses) {
    if (known != residency) continue;
    // Read and overwritten by one operation (copy_ onto itself): the old bytes count.
    if (known_access != access) known_access = Access::kWrite;
    return;
  }
  uses.emplace_back(residency, access);
}

void Collect(const c10::IValue& value, Argument argument, Uses& uses) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    Residency* residency = Residency::Of(tensor);
    if (residency == nullptr) return;
    residency->Learn(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    const bool overwrites = argument == Argument::kOverwrite && residency->IsWhole(tensor);
    AddUse(uses, residency,
           argument == Argument::kRead ? Access::kRead
           : overwrites                ? Access::kOverwrite
                                       : Access::kWrite);
  } else if (value.isStorage()) {
    if (Residency* residency = Residency::Of(value.toStorage().unsafeGetStorageImpl())) {
      AddUse(uses, residency, argument == Argument::kRead ? Access::kRead : Access::kWrite);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) Collect(element, argument, uses);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements())
      Collect(element, argument, uses);
  }
}

bool ServedByResidency(const Verdict& verdict, torch::jit::Stack* stack) {
  const c10::IValue& first = torch::jit::peek(*stack, 0, verdict.arguments.size());
  if (!first.isTensor() || !first.toTensor().defined()) return false;
  Residency* residency = Residency::Of(first.toTensor());
  return residency != nullptr && residency->IsWhole(first.toTensor()) &&
         residency->Serve(verdict.special, stack);
}

void LearnStorages(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    if (Residency* residency = Residency::Of(value.toTensor())) {
      residency->Learn(
          value.toTensor().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) LearnStorages(element);
  }
}

void LearnResults(size_t count, const torch::jit::Stack& stack) {
  for (size_t i = 0; i < count; ++i) LearnStorages(torch::jit::peek(stack, i, count));
}

// Of an operator over weights or gradients. On a device their commands have the order of their
// streams, but who has pinned a weight before a step has its place in the window meanwhile, with
// the old value.
std::optional<OperatorGate::Passage> PassageOf(const Uses& uses) {
  std::optional<OperatorGate::Passage> passage;
  for (const auto& [residency, access] : uses) {
    if (dynamic_cast<const WeightResidency*>(residency) == nullptr) {
      passage = passage.value_or(OperatorGate::Passage::kBesideSteps);
      continue;
    }
    if (access > Access::kReadCopy) return OperatorGate::Passage::kAlone;
    passage = OperatorGate::Passage::kTogether;
  }
  return passage;
}

// An operator's passage, and what it uses as of then: who lays a store out anew for another thread
// leaves gradients in memory, whose residencies are gone afterwards.
class PassWithUses {
 public:
  // `collect` is called until nothing has changed meanwhile.
  explicit PassWithUses(absl::FunctionRef<Uses&()> collect) {
    const OperatorGate& gate = OperatorGate::OfProcess();
    for (;;) {
      if (gate.is_laying_out()) Take(OperatorGate::Passage::kBesideSteps);
      const uint64_t laid_out = gate.laid_out();
      if (const auto passage = PassageOf(collect())) Take(*passage);
      if (gate.laid_out() == laid_out) return;
    }
  }

 private:
  void Take(OperatorGate::Passage passage) {
    if (taken_.has_value() && *taken_ >= passage) return;
    pass_.reset();
    pass_.emplace(passage);
    taken_ = passage;
  }

  std::optional<OperatorGate::Pass> pass_;
  std::optional<OperatorGate::Passage> taken_;
};

// Several weights in one operation: who has one and waits for room for the next may wait for ever,
// since another has the next and waits for room, too. So either there is room for all of them,
// however it is divided, and one operation at a time has it; or all but the last have bytes of
// their own.
class SharedRoom {
 public:
  explicit SharedRoom(Uses& uses) {
    if (uses.size() < 2) return;
    size_t count = 0;
    uint64_t size_bytes = 0;
    Residency* last = nullptr;
    for (const auto& [residency, access] : uses) {
      if (access != Access::kRead || residency->window_bytes() == 0) continue;
      ++count;
      size_bytes += residency->window_bytes();
      last = residency;
    }
    if (count < 2) return;
    if (last->BeginHolding(count, size_bytes)) {
      holder_ = last;
      return;
    }
    for (auto& [residency, access] : uses) {
      if (access == Access::kRead && residency->window_bytes() > 0 && residency != last)
        access = Access::kReadCopy;
    }
    // The one that waits for room comes when the others are there.
    std::stable_partition(uses.begin(), uses.end(),
                          [last](const auto& use) { return use.first != last; });
  }
  ~SharedRoom() {
    if (holder_ != nullptr) holder_->EndHolding();
  }
  SharedRoom(const SharedRoom&) = delete;
  SharedRoom& operator=(const SharedRoom&) = delete;

 private:
  Residency* holder_ = nullptr;
};

void RunManaged(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// One of a list that is as long as the first, what is for all as it is.
c10::IValue ElementOf(const c10::IValue& argument, size_t i, size_t count) {
  if (!argument.isTensorList() || argument.toListRef().size() != count) return argument;
  return c10::List<at::Tensor>({argument.toListRef()[i].toTensor()});
}

// Runs an operator that changes the tensors of its first argument, a list, for each of them.
void RunOneByOne(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::vector<c10::IValue> arguments = torch::jit::last(*stack, count).vec();
  torch::jit::drop(*stack, count);
  const size_t tensors = arguments.front().toListRef().size();
  for (size_t i = 0; i < tensors; ++i) {
    torch::jit::Stack one;
    for (const c10::IValue& argument : arguments) one.push_back(ElementOf(argument, i, tensors));
    RunManaged(op, keys, &one);
  }
}

// The kernel that a device has for the norms of a list adds in another order than that of one
// tensor, and torch takes it for lists of one kind. It takes each tensor for itself, so that what
// else is in the list changes nothing of its norm.
bool TakesListKernel(const torch::jit::Stack& stack, size_t count) {
  const std::vector<at::Tensor> list = torch::jit::peek(stack, 0, count).toTensorVector();
  if (list.empty() || !list.front().defined() || list.front().is_cpu()) return false;
  return std::ranges::all_of(list, [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.device() == list.front().device() &&
           tensor.scalar_type() == list.front().scalar_type() && tensor.layout() == at::kStrided &&
           tensor.is_non_overlapping_and_dense();
  });
}

at::Tensor ListNormOf(const at::Tensor& tensor, const c10::OperatorHandle& op,
                      c10::DispatchKeySet below, const std::vector<c10::IValue>& arguments) {
  torch::jit::Stack one = arguments;
  one.front() = c10::List<at::Tensor>({tensor});
  Residency* const residency = Residency::Of(tensor);
  if (residency == nullptr || !residency->IsWhole(tensor) ||
      !residency->Serve(Special::kListNorm, &one)) {
    Uses uses;
    const PassWithUses pass([&]() -> Uses& {
      uses.clear();
      Collect(one.front(), Argument::kRead, uses);
      return uses;
    });
    Pins pins;
    for (const auto& [used, access] : uses) pins.Add(used, access);
    op.redispatchBoxed(below, &one);
    pins.Finish();
  }
  return one.front().toTensorVector().front();
}

void RunListNorms(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                  torch::jit::Stack* stack) {
  const std::vector<c10::IValue> arguments =
      torch::jit::pop(*stack, op.schema().arguments().size());
  c10::List<at::Tensor> norms;
  for (const at::Tensor& tensor : arguments.front().toTensorVector())
    norms.push_back(ListNormOf(tensor, op, below, arguments));
  torch::jit::push(*stack, std::move(norms));
}

bool IsCopiedAmongSeveral(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().requires_grad())
    return false;
  const Residency* const residency = Residency::Of(value.toTensor());
  return residency != nullptr && residency->is_copied_among_several();
}

// Several spilled gradients that one operator reads (cat) would have to be in their window at once:
// it gets copies of them.
bool CopySeveral(const Verdict& verdict, const Uses& uses, torch::jit::Stack* stack) {
  const auto is_copied = [](const auto& use) {
    return use.second == Access::kRead && use.first->is_copied_among_several();
  };
  if (std::count_if(uses.begin(), uses.end(), is_copied) < 2) return false;
  const size_t count = verdict.arguments.size();
  for (size_t i = 0; i < count; ++i) {
    if (verdict.arguments[i] != Argument::kRead) continue;
    c10::IValue& value = torch::jit::peek(*stack, i, count);
    if (IsCopiedAmongSeveral(value)) {
      value = value.toTensor().clone();
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> copies;
      for (const at::Tensor& tensor : value.toTensorVector())
        copies.push_back(IsCopiedAmongSeveral(tensor) ? tensor.clone() : tensor);
      value = std::move(copies);
    }
  }
  return true;
}

// The keys that are left. The kernels of _foreach_* are loops on the CPU; those of a device take
// the addresses of all tensors at once, so there, too, the CPU's run (but RunListNorms()). A mode
// in Python would take the list to the device's kernel: it sees the operators of the loop instead.
c10::DispatchKeySet BelowManaged(const Verdict& verdict, c10::DispatchKeySet keys) {
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kManagedKey);
  if (!verdict.is_loop) return below;
  c10::DispatchKeySet on_cpu = below | c10::DispatchKeySet(c10::BackendComponent::CPUBit);
  for (const auto backend :
       {c10::BackendComponent::CUDABit, c10::BackendComponent::PrivateUse1Bit}) {
    on_cpu = on_cpu.remove_backend(backend);
  }
  return on_cpu.remove(c10::DispatchKey::Python);
}

// Whether a mode of the trainer's in Python, or a class of tensors with operators of its own, is
// asked next: it may make something else of the operator, or nothing.
bool MayBecomeAnother(c10::DispatchKeySet below) { return below.has(c10::DispatchKey::Python); }

Argument StatisticsUse(const Verdict& verdict, const torch::jit::Stack& stack) {
  const bool trains = !verdict.trains.has_value() ||
                      torch::jit::peek(stack, *verdict.trains, verdict.arguments.size()).toBool();
  return trains ? Argument::kWrite : Argument::kRead;
}

Uses CollectUses(const Verdict& verdict, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  Uses uses;
  for (size_t i = 0; verdict.pins && i < verdict.arguments.size(); ++i) {
    Argument use = verdict.arguments[i];
    if (use == Argument::kSkip) continue;
    if (use == Argument::kStatistics) use = StatisticsUse(verdict, *stack);
    Collect(torch::jit::peek(*stack, i, verdict.arguments.size()), use, uses);
  }
  if (!MayBecomeAnother(below)) return uses;
  for (auto& [residency, access] : uses) {
    if (access == Access::kOverwrite) access = Access::kWrite;  // which counts on the old bytes
  }
  return uses;
}

void RunManaged(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static auto* const kVerdicts = new VerdictTable();
  const Verdict& verdict = kVerdicts->Find(op.schema());
  const c10::DispatchKeySet below = BelowManaged(verdict, keys);
  if (verdict.special == Special::kListNorm && TakesListKernel(*stack, verdict.arguments.size())) {
    const c10::DispatchKeySet all_below =
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kManagedKey);
    return RunListNorms(op, all_below.remove(c10::DispatchKey::Python), stack);
  }
  const bool computes = verdict.special != Special::kNone && verdict.special < Special::kSet;
  if (verdict.special != Special::kNone && !(computes && MayBecomeAnother(below)) &&
      ServedByResidency(verdict, stack))
    return;
  if (verdict.is_lazy_clone && CloneAtOnce(stack)) return;
  if (verdict.is_split &&
      torch::jit::peek(*stack, 0, verdict.arguments.size()).toListRef().size() > 1)
    return RunOneByOne(op, keys, stack);
  if (verdict.is_message) LeaveOutOfMessages(verdict, stack);
  Uses uses;
  const PassWithUses pass([&]() -> Uses& { return uses = CollectUses(verdict, below, stack); });
  if (CopySeveral(verdict, uses, stack)) uses = CollectUses(verdict, below, stack);
  // Whether two storages are one, which set_() asks, is seen only where both have bytes.
  for (size_t i = 0; verdict.special == Special::kSet && i < verdict.arguments.size(); ++i)
    Collect(torch::jit::peek(*stack, i, verdict.arguments.size()), Argument::kRead, uses);
  const SharedRoom room(uses);
  const RawKernel raw_kernel(verdict.takes_raw_memory);
  const CollectiveScope collective(verdict.gives_all_the_same);
  for (const auto& [residency, access] : uses) {
    if (access > Access::kReadCopy) residency->MakeRoomToWrite();
  }
  Pins pins(verdict.allocates, verdict.is_loop);
  for (const auto& [residency, access] : uses) pins.Add(residency, access);
  op.redispatchBoxed(below, stack);
  if (verdict.is_communication && !uses.empty()) WaitForWork(op.schema().returns().size(), *stack);
  // What is only allocated has no bytes and no pin, and has to be known all the same: whoever
  // touches it outside of the construction is told so.
  if (verdict.allocates == Pins::Allocates::kEmpty || pins.HasAllocated())
    LearnResults(op.schema().returns().size(), *stack);
  pins.Finish();
}

}  // namespace

bool RunsRawKernel() { return raw_kernels > 0; }

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunManaged>());
}

}  // namespace offload::zero3
