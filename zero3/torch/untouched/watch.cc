#include "zero3/torch/untouched/watch.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <cxxabi.h>
#include <sys/mman.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/check.h"
#include "base/error.h"
#include "zero3/torch/copied_groups.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/home_pages.h"
#include "zero3/trainer_marks.h"

namespace offload::untouched {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using zero3::CopyGroups;
using ParamGroups = std::vector<OptimizerParamGroup>;

constexpr char kOtherOptimizers[] =
    "Use an optimizer of torch::optim, or attach the model in the program (docs/attach.md)";

// Optimizers take turns over the same parameters where `ram` is so much of what the job keeps.
constexpr uint64_t kRamPerState = 4;

// This thread is at work for the watch: what it does to modules and tensors is not the program's.
thread_local bool inside = false;

class Inside {
 public:
  Inside() { inside = true; }
  ~Inside() { inside = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const bool before_ = inside;
};

[[noreturn]] void Refuse(ErrorId id, const std::string& what, const std::string& fix) {
  EndProgram(std::string(MakeError(id, what, fix).message()).c_str());
}

// Runs what may throw on behalf of a program that expects no such exception.
template <class Function>
auto OrEnd(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    EndProgram(error.what());
  }
}

std::string NameOf(const std::type_info& type) {
  int status = 0;
  char* const name = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string text = name != nullptr ? name : type.name();
  std::free(name);
  return text;
}

const at::Tensor* FirstParameter(const ParamGroups& groups) {
  for (const OptimizerParamGroup& group : groups) {
    if (!group.params().empty()) return &group.params().front();
  }
  return nullptr;
}

bool Share(const ParamGroups& a, const ParamGroups& b) {
  std::unordered_set<const void*> tensors;
  for (const OptimizerParamGroup& group : a) {
    for (const at::Tensor& tensor : group.params()) tensors.insert(tensor.unsafeGetTensorImpl());
  }
  return std::any_of(b.begin(), b.end(), [&tensors](const OptimizerParamGroup& group) {
    return std::any_of(group.params().begin(), group.params().end(), [&](const at::Tensor& tensor) {
      return tensors.contains(tensor.unsafeGetTensorImpl());
    });
  });
}

template <class Class, class Options>
std::unique_ptr<Optimizer> MakeAs(const ParamGroups& groups, const OptimizerOptions& options) {
  const auto* const own = dynamic_cast<const Options*>(&options);
  return own == nullptr ? nullptr : std::make_unique<Class>(groups, *own);
}

// An object of torch's class that has these options; null when they are not torch's.
std::unique_ptr<Optimizer> MakeObject(const ParamGroups& groups, const OptimizerOptions& options) {
  using namespace torch::optim;  // NOLINT: names of twelve classes
  for (const auto make : {&MakeAs<AdamW, AdamWOptions>, &MakeAs<Adam, AdamOptions>,
                          &MakeAs<SGD, SGDOptions>, &MakeAs<Adagrad, AdagradOptions>,
                          &MakeAs<RMSprop, RMSpropOptions>, &MakeAs<LBFGS, LBFGSOptions>}) {
    if (auto made = make(groups, options)) return made;
  }
  return nullptr;
}

bool IsTorchs(const std::type_info& type) {
  return type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adagrad) ||
         type == typeid(torch::optim::RMSprop) || type == typeid(torch::optim::LBFGS);
}

// Among an object's state, where no parameter has its place: it goes where the object is moved to,
// and dies with it.
struct LifeMark final : torch::optim::OptimizerParamState {
  explicit LifeMark(std::shared_ptr<void> life) : held(std::move(life)) {}
  std::shared_ptr<void> held;
};
void* KeyOfMark() { return reinterpret_cast<void*>(uintptr_t{1}); }

// Takes the mark out of the state for as long as this lives.
class WithoutMark {
 public:
  explicit WithoutMark(Optimizer& optimizer) : optimizer_(optimizer) {
    const Inside here;
    auto& state = optimizer_.state();
    const auto found = state.find(KeyOfMark());
    if (found == state.end()) return;
    mark_ = std::move(found->second);
    state.erase(found);
  }
  ~WithoutMark() {
    const Inside here;
    if (mark_ != nullptr) optimizer_.state()[KeyOfMark()] = std::move(mark_);
  }
  WithoutMark(const WithoutMark&) = delete;
  WithoutMark& operator=(const WithoutMark&) = delete;

 private:
  Optimizer& optimizer_;
  std::unique_ptr<torch::optim::OptimizerParamState> mark_;
};

// It may call the step of torch's class in its own.
bool DerivesFromTorchs(const Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::RMSprop*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
}

bool HasGradients(const ParamGroups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const OptimizerParamGroup& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& tensor) { return tensor.grad().defined(); });
  });
}

bool HasSparseGradients(const torch::nn::Module& module) {
  const auto* const one = module.as<torch::nn::EmbeddingImpl>();
  const auto* const bag = module.as<torch::nn::EmbeddingBagImpl>();
  return (one != nullptr && one->options.sparse()) || (bag != nullptr && bag->options.sparse());
}

// Of an optimizer that runs unmodified there are none.
bool HasMasters(const OptimizerOptions& options) {
  return dynamic_cast<const torch::optim::LBFGSOptions*>(&options) == nullptr;
}

int64_t CountOf16Bits(const ParamGroups& groups) {
  int64_t count = 0;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& tensor : group.params()) {
      const bool counts = tensor.requires_grad() && tensor.element_size() == 2;
      count += counts ? tensor.numel() : 0;
    }
  }
  return count;
}

// What one keeps becomes what the other keeps, by way of libtorch's own format.
void MoveState(Optimizer& from, Optimizer& to) {
  const WithoutMark without(from);
  std::stringstream bytes;
  torch::serialize::OutputArchive out;
  from.save(out);
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  to.load(in);
  from.state().clear();
}

// A tensor over the same storage, whose bytes every operator asks for before it touches them (the
// dispatch key of zero3/torch/interception.cc).
at::Tensor WithKey(const at::Tensor& tensor) {
  auto keyed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set().add(c10::DispatchKey::DeferredInit),
      tensor.dtype());
  keyed.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return keyed;
}

// A flag that forked children share.
std::atomic<bool>* MakeShared() {
  void* const page = ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  OFFLOAD_CHECK(page != MAP_FAILED) << "a page of memory";
  return new (page) std::atomic<bool>(false);
}

std::unique_ptr<at::ObserverContext> OnOperator(const at::RecordFunction& function) {
  Watch::OfProcess().BeforeOperator(function.name(), function.inputs());
  return nullptr;
}

}  // namespace

void EndProgram(const char* reason) {
  std::fflush(nullptr);
  Say(reason);
  ::_exit(EXIT_FAILURE);
}

void Say(const std::string& text) { std::fprintf(stderr, "offloadctl run: %s\n", text.c_str()); }

// Made before the program begins, which may clear its environment and fork.
Watch::Watch()
    : options_(Options::FromEnvironment()),
      resumes_(std::getenv("OFFLOADD_RESUME") != nullptr),
      from_first_use_(std::getenv("OFFLOADD_FROM_FIRST_USE") != nullptr),
      has_attached_(MakeShared()) {
  const char* const size = std::getenv("OFFLOADD_BORN_ABOVE");
  if (size == nullptr) return;
  const absl::StatusOr<uint64_t> bytes = ParseByteSize(size);
  if (!bytes.ok()) EndProgram(std::string(bytes.status().message()).c_str());
  born_above_bytes_ = *bytes;
}

Watch& Watch::OfProcess() {
  static auto* const kWatch = new Watch;
  return *kWatch;
}

int64_t Watch::FindStepOfJob() const {
  try {
    return resumes_ ? Engine::Open(options_)->step() : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

// ---- What the program does ----------------------------------------------------------------------

void Watch::OnParameter(const torch::nn::Module& module, at::Tensor& parameter) {
  if (inside || state_ != State::kWatching || !parameter.defined()) return;
  std::lock_guard lock(mutex_);
  registered_.AddParameter(parameter, HasSparseGradients(module));
  const Inside here;
  if (IsBorn(parameter)) {
    OrEnd([this, &parameter] { BearOffloaded(parameter); });
  } else if (parameter.use_count() == 1 && parameter.storage().use_count() == 1) {
    // Nobody else has it, and so no pointer.
    zero3::HomePages::Give(parameter);
  }
}

// Only what a module has made for itself: nobody else has its bytes.
bool Watch::IsBorn(const at::Tensor& parameter) const {
  return born_above_bytes_.has_value() && parameter.nbytes() >= *born_above_bytes_ &&
         zero3::TrainedDtype(parameter.scalar_type()).has_value() && parameter.is_cpu() &&
         parameter.is_contiguous() && parameter.is_leaf() &&
         parameter.storage().nbytes() == parameter.nbytes() && parameter.storage().use_count() == 1;
}

void Watch::BearOffloaded(at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  OpenEngine();
  at::Tensor born;
  {
    const InitGuard guard(engine_);
    born = at::empty(parameter.sizes(), parameter.options());
    born.copy_(parameter);
  }
  parameter.set_data(WithKey(born));
}

void Watch::OnBuffer(const at::Tensor& buffer) {
  if (inside || state_ != State::kWatching) return;
  std::lock_guard lock(mutex_);
  registered_.AddBuffer(buffer);
}

void Watch::OnNames(const torch::nn::Module& module, const NamedTensors& parameters) {
  if (inside || state_ != State::kWatching) return;
  NamedTensors buffers;
  for (const auto& buffer : module.named_buffers())
    buffers.emplace_back(buffer.key(), buffer.value());
  std::lock_guard lock(mutex_);
  registered_.AddNames(parameters, buffers);
}

void Watch::OnGroup(const Optimizer& optimizer) {
  if (inside || state_ == State::kClosed) return;
  const ParamGroups& groups = optimizer.param_groups();
  std::lock_guard lock(mutex_);
  Seen* seen = Find(optimizer);
  // Its constructor runs; what has had its place is dead.
  const bool begins = typeid(optimizer) == typeid(Optimizer) && groups.size() == 1;
  if (begins && seen != nullptr) {
    seen->identity = nullptr;  // until another has its parameters
    if (state_ == State::kWatching)
      optimizers_.remove_if([seen](const Seen& other) { return &other == seen; });
    seen = nullptr;
  }
  if (FirstParameter(groups) == nullptr) return;
  if (seen == nullptr) {
    seen = &optimizers_.emplace_back();
    Mark(optimizer, *seen);
  }
  for (const at::Tensor& tensor : groups.back().params()) {
    if (state_ == State::kWatching) foreign_count_ += registered_.Contains(tensor) ? 0 : 1;
    registered_.AddParameter(tensor);
  }
  if (state_ == State::kWatching) buffer_writes_ = registered_.CountBufferWrites();
  seen->identity = &optimizer.defaults();
  seen->groups = ParamGroups(groups);
  seen->defaults = optimizer.defaults().clone();
  if (state_ == State::kWatching && callback_ == at::INVALID_CALLBACK_HANDLE) {
    callback_ = at::addGlobalCallback(at::RecordFunctionCallback(&OnOperator)
                                          .needsInputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
  }
}

void Watch::Mark(const Optimizer& optimizer, Seen& seen) {
  const Inside here;
  const auto life = std::make_shared<char>();
  seen.life = life;
  const_cast<Optimizer&>(optimizer).state()[KeyOfMark()] = std::make_unique<LifeMark>(life);
}

void Watch::WithOwnState(const Optimizer& optimizer, const std::function<void()>& function) {
  const WithoutMark without(const_cast<Optimizer&>(optimizer));
  function();
}

void Watch::Cast(const torch::nn::Module& module, const std::function<void()>& cast) {
  const Inside here;
  if (state_ != State::kWatching) return cast();
  WithOtherMemory(module.parameters(), cast);
}

void Watch::Read(const at::Tensor& tensor, const std::function<void()>& read) {
  if (inside || state_ != State::kWatching || !IsRegistered(tensor)) return read();
  WithOtherMemory({tensor}, read);
}

bool Watch::IsRegistered(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  return tensor.defined() && registered_.Contains(tensor);
}

void Watch::WithOtherMemory(const std::vector<at::Tensor>& parameters,
                            const std::function<void()>& change) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> before;
  for (const at::Tensor& parameter : parameters)
    before.push_back(parameter.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl());
  change();
  for (size_t i = 0; i < parameters.size(); ++i) {
    // One whose storage has stayed may have pointers into it.
    if (before[i].expired()) zero3::HomePages::Give(parameters[i]);
  }
}

void Watch::OnRead(const Optimizer& optimizer) {
  if (inside) return;
  std::lock_guard lock(mutex_);
  Seen* const seen = Find(optimizer);
  if (seen != nullptr && seen->attached == nullptr) seen->has_read = true;
}

Watch::Seen* Watch::Find(const Optimizer& optimizer) {
  // The watch's own may have their defaults where those of one that is dead were.
  if (std::any_of(optimizers_.begin(), optimizers_.end(),
                  [&optimizer](const Seen& seen) { return seen.attached.get() == &optimizer; }))
    return nullptr;
  for (Seen& seen : optimizers_) {
    if (seen.identity == &optimizer.defaults()) return &seen;
  }
  return nullptr;
}

// A newer object has some of its parameters.
bool Watch::IsSuperseded(const Seen& seen) const {
  const auto at = std::find_if(optimizers_.begin(), optimizers_.end(),
                               [&seen](const Seen& other) { return &other == &seen; });
  return std::any_of(std::next(at), optimizers_.end(),
                     [&seen](const Seen& newer) { return Share(seen.groups, newer.groups); });
}

void Watch::BeforeZeroGrad(const Optimizer& optimizer) {
  if (inside || state_ == State::kClosed) return;
  std::lock_guard lock(mutex_);
  const Seen* const seen = Find(optimizer);
  if (seen == nullptr || IsTorchs(typeid(optimizer))) return;
  const Inside here;
  if (DerivesFromTorchs(optimizer) && (seen->has_stepped || !HasGradients(seen->groups))) return;
  Refuse(ErrorId::kUnsupportedOptimizer,
         absl::StrCat("the program trains with ", NameOf(typeid(optimizer)),
                      ", whose step cannot be followed: it is not that of torch's class"),
         kOtherOptimizers);
}

// ---- The attach ---------------------------------------------------------------------------------

void Watch::BeforeOperator(const char* name, c10::ArrayRef<const c10::IValue> inputs) {
  if (inside || state_ != State::kWatching) return;
  // Of embeddings with a largest norm the forward pass begins with this one, without gradients.
  const bool is_forward = std::string_view(name) == "aten::embedding_renorm_";
  if (!c10::GradMode::is_enabled() && !is_forward) return NoteLook(name, inputs);
  std::unique_lock lock(mutex_);
  if (state_ != State::kWatching) return;
  if (!IsTrigger(inputs)) {
    lock.unlock();
    return NoteLook(name, inputs);  // at what data() gives
  }
  const Inside here;
  OrEnd([this] { Attach(); });
}

// Of a run that goes on: it computes with weights that the job's replace, or replace here where the
// user says so (--from-first-use). An initialisation writes its first input, and looks at the
// others.
void Watch::NoteLook(const char* name, c10::ArrayRef<const c10::IValue> inputs) {
  static constexpr std::string_view kInitialises[] = {"aten::copy_",    "aten::fill_",
                                                      "aten::normal_",  "aten::random_",
                                                      "aten::uniform_", "aten::zero_"};
  if (!resumes_ || has_looked_ || inputs.empty()) return;
  const bool initialises =
      std::ranges::find(kInitialises, std::string_view(name)) != std::ranges::end(kInitialises);
  // Also on threads that the library has started and waits for while it attaches.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const auto inputs_looked_at = initialises ? inputs.slice(1) : inputs;
  const auto looks = [this](const at::Tensor& tensor) { return registered_.HasMemoryOf(tensor); };
  const bool looks_now = std::any_of(
      inputs_looked_at.begin(), inputs_looked_at.end(), [&looks](const c10::IValue& input) {
        if (input.isTensor()) return looks(input.toTensor());
        if (!input.isTensorList()) return false;
        const std::vector<at::Tensor> tensors = input.toTensorVector();
        return std::any_of(tensors.begin(), tensors.end(), looks);
      });
  if (!looks_now) return;
  if (!from_first_use_ || state_ != State::kWatching) {
    has_looked_ = true;
    return;
  }
  const Inside here;
  const c10::InferenceMode ordinary(false);  // what the attach makes is used with gradients later
  OrEnd([this] { Attach(); });
}

void Watch::BeforeEdge(const at::Tensor& tensor) {
  if (inside || state_ != State::kWatching || !c10::GradMode::is_enabled()) return;
  std::lock_guard lock(mutex_);
  const bool has_optimizer = callback_ != at::INVALID_CALLBACK_HANDLE;
  if (state_ != State::kWatching || !has_optimizer || !tensor.defined()) return;
  // One that computes its pieces anew in the backward has the weights among no inputs.
  if (!registered_.Contains(tensor) && !(resumes_ && tensor.requires_grad())) return;
  const Inside here;
  OrEnd([this] { Attach(); });
}

bool Watch::IsTrigger(c10::ArrayRef<const c10::IValue> inputs) const {
  return std::any_of(inputs.begin(), inputs.end(), [this](const c10::IValue& input) {
    if (input.isTensor()) return registered_.Contains(input.toTensor());
    if (!input.isTensorList()) return false;
    const std::vector<at::Tensor> tensors = input.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(),
                       [this](const at::Tensor& tensor) { return registered_.Contains(tensor); });
  });
}

void Watch::OpenEngine() {
  if (engine_ != nullptr) return;
  engine_ = Engine::Open(options_);
  if (engine_->step() > 0 && !resumes_) {
    Refuse(ErrorId::kBadValue,
           absl::StrCat("job ", options_.job, " exists, at step ", engine_->step()),
           "Add --resume to go on with it, or name another one with --job");
  }
}

// A gradient that is there already is of weights that the job replaces. A new job takes both as
// they are.
void Watch::CheckNothingRan(const Seen& seen) const {
  for (const OptimizerParamGroup& group : seen.groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      Refuse(ErrorId::kUnsupportedModel,
             "parameters have gradients before a forward pass over them was seen, and the job that "
             "is resumed has other weights",
             "Make the optimizer before the first forward pass, and no gradients before it, or "
             "attach the model in the program (docs/attach.md)");
    }
  }
}

void Watch::Attach() {
  OpenEngine();
  if (engine_->step() > 0) {
    for (const Seen& seen : optimizers_) CheckNothingRan(seen);
  }
  const bool wrote_buffers = registered_.CountBufferWrites() != buffer_writes_;
  model_ = registered_.Model();
  if (engine_->step() == 0) engine_->SetTrainerState(zero3::kNotesForeign);
  for (const at::Tensor& parameter : model_->parameters())
    attached_tensors_.insert(parameter.unsafeGetTensorImpl());
  for (Seen& seen : optimizers_) {
    if (!IsSuperseded(seen)) AttachOptimizer(seen);
  }
  engine_->Seal();
  begun_at_ = engine_->step();
  state_ = State::kAttached;
  *has_attached_ = true;
  attached_by_ = ::getpid();
  SayAttached();
  if (begun_at_ > 0 && wrote_buffers) {
    Say("buffers were written without gradients before the job's took their place: where a first "
        "forward pass did that (the power iteration of a spectral norm), its loss differs from "
        "that of a run that was not interrupted. --from-first-use lets it begin with the job's "
        "(docs/attach_reference.md)");
  } else if (begun_at_ > 0 && has_looked_) {
    Say("weights were read or changed without gradients before the job's took their place: where a "
        "first forward pass begins with that (a rollout, a target network, a momentum encoder, "
        "masks), its loss differs from that of a run that was not interrupted. "
        "--from-first-use lets it begin with the job's (docs/attach_reference.md)");
  }
  for (const Seen& seen : optimizers_) SayMasters(seen);
  std::atexit([] { Watch::OfProcess().Commit(); });
}

void Watch::AttachOptimizer(Seen& seen) {
  seen.attached = MakeObject(seen.groups, *seen.defaults);
  if (seen.attached == nullptr) {
    const OptimizerOptions& options = *seen.defaults;
    Refuse(ErrorId::kUnsupportedOptimizer,
           absl::StrCat("the program trains with an optimizer of its own (options ",
                        NameOf(typeid(options)), "), whose step cannot be followed"),
           kOtherOptimizers);
  }
  engine_->Attach(*model_, *seen.attached);
}

void Watch::SayAttached() const {
  if (foreign_count_ > 0) {
    Say(absl::StrCat(foreign_count_,
                     " tensors of the optimizer belong to no torch::nn::Module: what else their "
                     "model keeps (a TorchScript module's buffers) is not part of the job"));
  }
  if (engine_->step() == 0) {
    Say(absl::StrCat("job ", options_.job, " in ", options_.nvme_path, ": ",
                     engine_->plan().parameters, " parameters are offloaded"));
    return;
  }
  Say(absl::StrCat("job ", options_.job, " in ", options_.nvme_path, " goes on after ",
                   engine_->step(),
                   " steps: weights, buffers and what the optimizer keeps are the job's; what the "
                   "program counts itself begins anew"));
}

// Also of those that are thawed, added or trained by another optimizer later: the first are told.
void Watch::SayMasters(const Seen& seen) {
  if (has_said_masters_ || seen.attached == nullptr || !HasMasters(*seen.defaults)) return;
  const int64_t count = CountOf16Bits(seen.attached->param_groups());
  if (count == 0) return;
  has_said_masters_ = true;
  Say(absl::StrCat(count,
                   " parameters of 16 bits are trained on fp32 masters, as in every job, and not "
                   "with torch's state of 16 bits: results differ from those of the program in "
                   "memory (docs/attach.md)"));
}

// ---- Steps --------------------------------------------------------------------------------------

void Watch::CheckIsNotReplaced(const Seen& seen) const {
  if (seen.attached != nullptr || !seen.has_stepped) return;
  const uint64_t ram_bytes = kRamPerState * engine_->plan().state_bytes;
  const bool is_for_ram = !seen.life.expired() && ram_bytes > engine_->statistics().budget_bytes;
  Refuse(ErrorId::kUnsupportedOptimizer,
         "the program goes back to an optimizer after another one has trained the same "
         "parameters: what it had kept of them is not in the job any more",
         absl::StrCat(is_for_ram ? absl::StrCat("Give it --ram ", ram_bytes,
                                                " or more, then they take turns; or train")
                                 : "Train",
                      " each phase with a job of its own (save the weights, load them in the "
                      "next), or give every optimizer parameters of its own"));
}

// Beside one that lives another trains in this process, where what it keeps has to find room.
bool Watch::MayStepAgain(const Seen& seen) const {
  return seen.has_stepped && !seen.life.expired() &&
         kRamPerState * engine_->plan().state_bytes <= engine_->statistics().budget_bytes;
}

// What has trained some of these parameters is replaced, unless it may train them again.
void Watch::TakeOver(Seen& seen) {
  CheckIsNotReplaced(seen);
  TakeWhatCame(seen.groups);
  for (Seen& other : optimizers_) {
    if (&other == &seen || other.attached == nullptr || !Share(other.groups, seen.groups) ||
        MayStepAgain(other))
      continue;
    seen.begins_anew |= other.has_stepped;
    other.attached.reset();
  }
  optimizers_.remove_if([&seen](const Seen& other) {
    return &other != &seen && other.attached == nullptr && other.IsDead();
  });
  const Inside here;
  OrEnd([this, &seen] { AttachOptimizer(seen); });
}

// Parameters that were made since the attach join the job with the next step.
void Watch::TakeWhatCame(const ParamGroups& groups) {
  const Inside here;
  size_t count = 0;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!attached_tensors_.insert(parameter.unsafeGetTensorImpl()).second) continue;
      model_->register_parameter(absl::StrCat("later/", later_count_++), parameter,
                                 parameter.requires_grad());
      ++count;
    }
  }
  if (count == 0) return;
  Say(absl::StrCat("the optimizer has ", count,
                   " parameters that were made after the first forward pass: they are offloaded, "
                   "too, and the job cannot be resumed, since the program begins without them"));
}

// Parameters that the program has added to an optimizer are of no other optimizer.
void Watch::CheckGroups(const Optimizer& optimizer, const Seen& seen) {
  TakeWhatCame(optimizer.param_groups());
  std::unordered_set<const void*> known;
  for (const OptimizerParamGroup& group : seen.groups) {
    for (const at::Tensor& parameter : group.params())
      known.insert(parameter.unsafeGetTensorImpl());
  }
  bool has_gained = false;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params())
      has_gained |= !known.contains(parameter.unsafeGetTensorImpl());
  }
  if (!has_gained) return;
  for (const Seen& other : optimizers_) {
    if (&other == &seen || other.attached == nullptr ||
        !Share(other.groups, optimizer.param_groups()))
      continue;
    Refuse(ErrorId::kUnsupportedOptimizer,
           "a group was added to an optimizer with parameters that another one has trained: what "
           "that one keeps of them cannot be told from what the first would",
           "Make one optimizer anew with all groups, or attach the model in the program "
           "(docs/attach.md)");
  }
}

// The attached object gets the groups that the program's has, and, from one that has read a file
// before it was attached, the state, unless the job has its own.
void Watch::Follow(Optimizer& optimizer, Seen& seen) {
  CheckGroups(optimizer, seen);
  if (std::exchange(seen.has_read, false) && (begun_at_ == 0 || seen.begins_anew)) {
    const Inside here;
    OrEnd([&] { MoveState(optimizer, *seen.attached); });
  }
  CopyGroups(optimizer, *seen.attached);
  seen.groups = ParamGroups(optimizer.param_groups());
  SayMasters(seen);
}

Optimizer* Watch::BeforeFile(Optimizer& optimizer) {
  if (inside) return nullptr;
  std::lock_guard lock(mutex_);
  Seen* const seen = Find(optimizer);
  if (seen == nullptr) return nullptr;
  CheckIsNotReplaced(*seen);
  if (seen->attached == nullptr) return nullptr;
  Follow(optimizer, *seen);
  return seen->attached.get();
}

Optimizer* Watch::BeforeLook(Optimizer& optimizer) {
  if (!inside) {
    std::lock_guard lock(mutex_);
    Seen* const seen = Find(optimizer);
    if (seen != nullptr && seen->attached == nullptr) {
      const Inside here;
      optimizer.state().erase(KeyOfMark());  // nothing of ours is to be seen
      seen->was_looked_at = true;
      if (seen->has_stepped) return nullptr;
    }
  }
  return BeforeFile(optimizer);
}

Optimizer* Watch::BeforeStep(Optimizer& optimizer) {
  if (inside) return nullptr;
  std::lock_guard lock(mutex_);
  Seen* const seen = Find(optimizer);
  if (seen == nullptr) return nullptr;
  if (state_ == State::kWatching) {  // the first forward pass may be in the closure
    const Inside here;
    OrEnd([this] { Attach(); });
  }
  if (callback_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(std::exchange(callback_, at::INVALID_CALLBACK_HANDLE));
  }
  if (seen->attached == nullptr) TakeOver(*seen);  // made after the first forward pass
  Follow(optimizer, *seen);
  seen->has_stepped = true;
  has_seen_step_ = true;
  return seen->attached.get();
}

void Watch::Commit() {
  if (attached_by_ != ::getpid()) return;  // a forked child's exit
  std::lock_guard lock(mutex_);
  if (state_ != State::kAttached) return;
  const Inside here;
  try {
    engine_->WaitDurable();
    if (engine_->step() == begun_at_) {
      Say(absl::StrCat("job ", options_.job, " is still at step ", begun_at_, ": no step of ",
                       has_seen_step_
                           ? "the program's optimizer was taken (the program was told why)"
                           : "an optimizer of torch::optim was seen",
                       ", and what the program has made of the weights by itself is not part of "
                       "the job"));
    }
  } catch (const std::exception& error) {
    Say(error.what());
  }
  const std::vector<at::Tensor> parameters = model_->parameters();
  if (!std::all_of(parameters.begin(), parameters.end(),
                   [](const at::Tensor& parameter) { return parameter.is_cpu(); }))
    CloseEngine();  // while what drives the device is there
}

void Watch::Close() {
  if (attached_by_ != ::getpid()) return;  // a forked child's exit
  std::lock_guard lock(mutex_);
  if (state_ == State::kAttached) CloseEngine();
}

void Watch::CloseEngine() {
  state_ = State::kClosed;
  optimizers_.clear();
  model_.reset();
  engine_.reset();
}

}  // namespace offload::untouched
