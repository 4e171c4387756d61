#include "zero3/torch/module_engine.h"

#include <ATen/Functions.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "zero3/torch/born_residency.h"
#include "zero3/torch/dtypes.h"
#include "zero3/torch/in_memory.h"
#include "zero3/torch/log.h"
#include "zero3/torch/optimizers.h"
#include "zero3/torch/own_optimizer.h"
#include "zero3/torch/process_memory.h"
#include "zero3/torch/supported_model.h"
#include "zero3/torch/throw_status.h"
#include "zero3/torch/torch_instructions.h"
#include "zero3/trainer_marks.h"

namespace offload::zero3 {

// ---- Modules and their optimizers --------------------------------------------------------------

std::vector<NamedTensor> ModuleList::Names(const torch::nn::Module& module) const {
  std::vector<NamedTensor> names = NamedParameters(module, PrefixOf(module));
  std::erase_if(names, [](const NamedTensor& named) { return IsTable(named.tensor); });
  return names;
}

std::vector<NamedTensor> ModuleList::BufferNames(const torch::nn::Module& module) const {
  std::vector<NamedTensor> names = NamedBuffers(module, PrefixOf(module));
  for (NamedTensor& named : NamedParameters(module, PrefixOf(module))) {
    if (IsTable(named.tensor)) names.push_back(std::move(named));
  }
  return names;
}

std::string ModuleList::PrefixOf(const torch::nn::Module& module) const {
  for (const Member& member : members_) {
    if (member.address == &module) return member.prefix;
  }
  return count_ == 0 ? "" : absl::StrCat(count_, "/");
}

void ModuleList::Add(const torch::nn::Module& module, bool has_new) {
  if (!has_new) return;
  std::string prefix = PrefixOf(module);
  std::erase_if(members_, [&module](const Member& member) { return member.address == &module; });
  members_.push_back({&module, module.weak_from_this(), std::move(prefix)});
  ++count_;
}

std::vector<NamedTensor> ModuleList::NamesNow() const {
  std::vector<NamedTensor> names;
  for (const Member& member : members_) {
    if (const auto module = member.module.lock())
      absl::c_copy(Names(*module), std::back_inserter(names));
  }
  return names;
}

bool ModuleList::AreAllThere() const {
  return absl::c_none_of(members_, [](const Member& member) { return member.module.expired(); });
}

std::vector<NamedTensor> ModuleList::BufferNamesNow() const {
  std::vector<NamedTensor> names;
  for (const Member& member : members_) {
    if (const auto module = member.module.lock())
      absl::c_copy(BufferNames(*module), std::back_inserter(names));
  }
  return names;
}

int ModuleList::NumberOf(std::string_view name) {
  const size_t slash = name.find('/');
  int number = 0;
  if (slash == std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(name.data(), slash), &number))
    return 0;
  return number;
}

static constexpr char kToGoOn[] =
    "To go on with another one: attached objects of torch::optim may follow each other, when the "
    "first is destroyed before; else close the engine with weights_at_close = memory and open a "
    "new job";

ParameterGroups ModuleList::LeaveToOthers(const torch::nn::Module& module,
                                          ParameterGroups groups) const {
  if (claimed_.empty() || groups.size() != 1 || groups.front().has_options()) return groups;
  const std::vector<at::Tensor>& all = groups.front().params();
  const ParameterGroups whole = OneGroup(module);
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::equal(all.begin(), all.end(), whole.front().params().begin(),
                  whole.front().params().end(), is_same))
    return groups;
  std::vector<at::Tensor> free;
  for (const at::Tensor& parameter : all) {
    if (!IsClaimed(parameter)) free.push_back(parameter);
  }
  if (free.empty()) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                          "every parameter of the module has an optimizer already",
                          absl::StrCat("Give each optimizer a module, or explicit groups, of its "
                                       "own. ",
                                       kToGoOn)));
  }
  ParameterGroups left;
  left.emplace_back(std::move(free));
  return left;
}

bool ModuleList::IsClaimed(const at::Tensor& parameter) const {
  return claimed_.contains(parameter.unsafeGetTensorImpl()) && !IsLeftByDead(parameter);
}

void ModuleList::CheckFree(const ParameterGroups& groups) const {
  std::unordered_set<const void*> seen;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      const void* const impl = parameter.unsafeGetTensorImpl();
      const bool twice = !seen.insert(impl).second;
      if (!twice && !IsClaimed(parameter)) continue;
      ThrowStatus(MakeError(
          ErrorId::kBadValue,
          absl::StrCat("a parameter of shape [", absl::StrJoin(parameter.sizes(), ", "), "] is in ",
                       twice ? "two places of the optimizer's groups"
                             : "the groups of an optimizer, but another one has it already"),
          absl::StrCat("Name every parameter once, in the groups of one optimizer. ", kToGoOn)));
    }
  }
}

void ModuleList::Claim(const ParameterGroups& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params())
      claimed_.insert(parameter.unsafeGetTensorImpl());
  }
}

// ---- The engine --------------------------------------------------------------------------------

void ModuleEngine::Attach(torch::nn::Module& module, const ParameterGroups& groups,
                          const kernels::OptimizerSpec& optimizer) {
  EndConstruction();
  for (const at::Tensor& buffer : module.buffers()) LearnStorage(buffer);
  modules_->CheckFree(groups);
  const std::vector<NamedTensor> names = modules_->Names(module);
  const std::vector<NamedTensor> buffers = modules_->BufferNames(module);
  CheckSupported(names, Memory::kOfTorch, tensors_->destination());
  Buffers::CheckSupported(buffers);
  const bool has_new = tensors_->Attach(names, optimizer, buffers);
  std::vector<at::Tensor> others;
  for (const NamedTensor& named : buffers) others.push_back(named.tensor);
  tensors_->MoveOthers(others);
  tensors_->AttachBuffers(buffers);
  modules_->Add(module, has_new);
  modules_->Claim(groups);
}

void ModuleEngine::TakeWhatCame() {
  if (modules_->IsEmpty() || !modules_->AreAllThere()) return;
  tensors_->Seal();
  const std::vector<NamedTensor> names = modules_->NamesNow();
  const std::vector<NamedTensor> buffers = modules_->BufferNamesNow();
  if (tensors_->may_grow()) {
    tensors_->Grow(names, buffers);
  } else {
    tensors_->NameForFilesAnew(names, buffers);
  }
}

void ModuleEngine::AttachWeights(torch::nn::Module& module, const ParameterGroups& groups) {
  const std::vector<at::Tensor> parameters = module.parameters();
  if (std::all_of(parameters.begin(), parameters.end(), [this](const at::Tensor& parameter) {
        return parameter.numel() == 0 || tensors_->Has(parameter);
      })) {
    CheckHas(module, groups);  // it writes weights, as the trainer itself may
    return;
  }
  Attach(module, groups,
         modules_->IsEmpty() ? kernels::OptimizerSpec("sgd", {}) : tensors_->optimizer());
}

bool ModuleEngine::IsOfOtherKind(const kernels::OptimizerSpec& optimizer) const {
  if (modules_->IsEmpty() || tensors_->destination().has_value() ||
      tensors_->attachment()->device() != nullptr)
    return false;
  kernels::OptimizerSpec all = optimizer;
  all.SetAveraging(tensors_->optimizer().averaging());
  if (all.index() == tensors_->optimizer().index()) all.KeepToo(tensors_->optimizer());
  return !KeepTheSame(all, tensors_->optimizer());
}

bool ModuleEngine::HasMasters(const ParameterGroups& groups) {
  const auto has_master = [](const torch::optim::OptimizerParamGroup& group) {
    return std::any_of(group.params().begin(), group.params().end(), [](const at::Tensor& tensor) {
      return tensor.scalar_type() != MasterType(tensor);
    });
  };
  return std::any_of(groups.begin(), groups.end(), has_master);
}

bool ModuleEngine::IsNew(size_t number) const {
  return tensors_->foreign(number) == nullptr &&
         (tensors_->trainer_state() == kNotesForeign || tensors_->foreign(0) != nullptr);
}

absl::Status ModuleEngine::CheckResumes(const ParameterGroups& groups,
                                        const kernels::OptimizerSpec& optimizer,
                                        size_t number) const {
  const bool keeps = optimizer.KeepsAnything() || HasMasters(groups);
  if (begun_at_ == 0 || !keeps || HasForeign(number) || IsNew(number)) return absl::OkStatus();
  const std::string name(optimizer.name());
  const ForeignState* const state = tensors_->foreign(number);
  return MakeError(
      ErrorId::kUnsupportedOptimizer,
      absl::StrCat("the job is at step ", tensors_->step(), " and keeps what ",
                   std::string(tensors_->optimizer().name()), " does; ", name,
                   " trained in the memory of an earlier run, where its state was lost",
                   state == nullptr || state->is_kept || state->described.empty()
                       ? ""
                       : ": " + state->described),
      absl::StrCat("Give the phase that trains with ", name,
                   " a job of its own, from saved weights, to resume it"));
}

void ModuleEngine::AttachInProcess(torch::nn::Module& module, const ParameterGroups& groups,
                                   const kernels::OptimizerSpec& optimizer) {
  modules_->CheckFree(groups);
  AttachWeights(module, groups);
  Log().info(
      "the job keeps what {} does: {} runs in this process, weight by weight; what it keeps is "
      "beside ram, and part of the job",
      tensors_->optimizer().name(), optimizer.name());
}

// ---- Optimizers that run in this process -------------------------------------------------------

// What one keeps is a file as torch::save() writes it of its object, in memory.

namespace {

// Powers of two: the store is not laid out anew for every byte.
class FileBytes {
 public:
  // `expected`: as many come, or a few more.
  explicit FileBytes(size_t expected) : bytes_(Make(expected)) {}

  size_t Append(const void* data, size_t size_bytes) {
    if (size_bytes_ + size_bytes > bytes_.nbytes()) {
      const at::Tensor larger = Make(size_bytes_ + size_bytes);
      std::memcpy(larger.mutable_data_ptr(), bytes_.const_data_ptr(), size_bytes_);
      bytes_ = larger;
    }
    std::memcpy(bytes_.mutable_data_ptr<uint8_t>() + size_bytes_, data, size_bytes);
    size_bytes_ += size_bytes;
    return size_bytes;
  }

  // Whatever is there.
  void Extend(size_t size_bytes) { size_bytes_ = std::max(size_bytes_, size_bytes); }

  size_t size_bytes() const { return size_bytes_; }
  const char* data() const { return static_cast<const char*>(bytes_.const_data_ptr()); }
  at::Tensor Padded() {
    const size_t padded = RoundUp(size_bytes_);
    std::memset(bytes_.mutable_data_ptr<uint8_t>() + size_bytes_, 0, padded - size_bytes_);
    return bytes_.narrow(0, 0, static_cast<int64_t>(padded));
  }

 private:
  static size_t RoundUp(size_t size_bytes) {
    return std::bit_ceil(std::max<size_t>(size_bytes, 4096));
  }
  static at::Tensor Make(size_t size_bytes) {
    return at::empty({static_cast<int64_t>(RoundUp(size_bytes))}, at::kByte);
  }

  at::Tensor bytes_;
  size_t size_bytes_ = 0;
};

// What LBFGS has computed with is not in a file: each step computes it before it reads it, and
// libtorch cannot write what a history leaves undefined of it.
class WithoutScratch {
 public:
  explicit WithoutScratch(torch::optim::Optimizer& optimizer) {
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr) return;
    for (auto& [parameter, state] : optimizer.state()) {
      auto* const own = dynamic_cast<torch::optim::LBFGSParamState*>(state.get());
      if (own != nullptr && own->al().has_value())
        taken_.emplace_back(own, std::exchange(own->al(), std::nullopt));
    }
  }
  ~WithoutScratch() {
    for (auto& [state, scratch] : taken_) state->al(std::move(scratch));
  }
  WithoutScratch(const WithoutScratch&) = delete;
  WithoutScratch& operator=(const WithoutScratch&) = delete;

 private:
  std::vector<std::pair<torch::optim::LBFGSParamState*, std::optional<std::vector<at::Tensor>>>>
      taken_;
};

// libtorch reads the state of a parameter that is named twice once, and leaves none for the second.
class EachNamedOnce {
 public:
  explicit EachNamedOnce(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::unordered_set<const void*> seen;
    for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      named_.push_back(group.params());
      std::erase_if(group.params(), [&seen](const at::Tensor& parameter) {
        return !seen.insert(parameter.unsafeGetTensorImpl()).second;
      });
    }
  }
  ~EachNamedOnce() {
    for (size_t i = 0; i < named_.size(); ++i)
      optimizer_.param_groups()[i].params() = std::move(named_[i]);
  }
  EachNamedOnce(const EachNamedOnce&) = delete;
  EachNamedOnce& operator=(const EachNamedOnce&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> named_;
};

// Options stay the program's, as those of the daemon's optimizers do.
class KeepsOptions {
 public:
  explicit KeepsOptions(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
      options_.push_back(group.has_options() ? group.options().clone() : nullptr);
  }
  ~KeepsOptions() {
    for (size_t i = 0; i < options_.size(); ++i) {
      if (options_[i] != nullptr) optimizer_.param_groups()[i].set_options(std::move(options_[i]));
    }
  }
  KeepsOptions(const KeepsOptions&) = delete;
  KeepsOptions& operator=(const KeepsOptions&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

FileBytes FileOf(torch::optim::Optimizer& optimizer, size_t expected_bytes) {
  const WithoutScratch without(optimizer);
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  FileBytes file(expected_bytes);
  archive.save_to(
      [&file](const void* bytes, size_t size_bytes) { return file.Append(bytes, size_bytes); });
  return file;
}

bool IsEmpty(const FileBytes& file) {
  constexpr size_t kEmptyBytesMax = 64 << 10;
  if (file.size_bytes() > kEmptyBytesMax) return false;
  torch::serialize::InputArchive archive;
  archive.load_from(file.data(), file.size_bytes());
  return archive.keys().empty();
}

// A file has addresses of the process that wrote it: that of the first rank is the one that is
// kept. Where it goes into the store it puts it, and the others only know how long it is.
absl::Status TakeFirstRanks(TensorEngine& tensors, absl::Status own,
                            std::optional<FileBytes>& file) {
  const bool is_first = tensors.attachment()->rank() == 0;
  constexpr std::string_view kOk = "ok";
  std::string said = own.ok() ? std::string(kOk) : std::string(own.message());
  std::string bytes;
  uint64_t size_bytes = 0;
  if (own.ok()) {
    size_bytes = file->size_bytes();
    if (is_first && size_bytes <= Buffers::kSmallBytesMax) bytes.assign(file->data(), size_bytes);
  }
  said.append(1, '\0').append(reinterpret_cast<const char*>(&size_bytes), sizeof(size_bytes));
  const std::vector<std::string> all = tensors.Exchange(said + bytes);
  for (const std::string& each : all) {
    const std::string reason(each.c_str());
    if (reason != kOk) return absl::FailedPreconditionError(reason);
  }
  if (is_first) return own;
  std::string_view first = all.front();
  first.remove_prefix(kOk.size() + 1);
  std::memcpy(&size_bytes, first.data(), sizeof(size_bytes));
  first.remove_prefix(sizeof(size_bytes));
  file.emplace(size_bytes);
  file->Append(first.data(), first.size());
  file->Extend(size_bytes);
  return absl::OkStatus();
}

}  // namespace

size_t ModuleEngine::NextForeign(const std::string& optimizer) {
  if (given_number_.has_value()) return *std::exchange(given_number_, std::nullopt);
  foreign_.push_back({.optimizer = optimizer});
  return foreign_.size() - 1;
}

void ModuleEngine::AddForeign(size_t number, bool commits_itself,
                              const std::shared_ptr<InMemoryOptimizer>& in_process) {
  foreign_.at(number).commits_itself = commits_itself;
  foreign_.at(number).in_process = in_process;
  tensors_->AddForeign(number, foreign_.at(number).optimizer, commits_itself);
}

void ModuleEngine::TakeToDaemon(const std::unordered_set<const void*>& parameters) {
  for (Foreign& foreign : foreign_)
    std::erase_if(foreign.stepped, [&](const void* each) { return parameters.contains(each); });
}

// Of what is updated in this process the daemon has the weight only.
torch::Tensor ModuleEngine::Gather(const torch::Tensor& parameter, const std::string& plane) {
  const bool is_weight = !parameter.defined() || plane == "weight" ||
                         (plane == "master" && parameter.scalar_type() == MasterType(parameter));
  for (auto foreign = foreign_.rbegin(); !is_weight && foreign != foreign_.rend(); ++foreign) {
    const std::shared_ptr<InMemoryOptimizer> in_process = foreign->in_process.lock();
    if (in_process != nullptr && in_process->StateOf(parameter) != nullptr)
      return in_process->Gather(parameter, plane);
    if (foreign->stepped.contains(parameter.unsafeGetTensorImpl())) {
      ThrowStatus(MakeError(
          ErrorId::kBadValue,
          absl::StrCat("what ", foreign->optimizer, " kept of a parameter of shape [",
                       absl::StrJoin(parameter.sizes(), ", "), "] went with the optimizer"),
          "Gather() it before the optimizer is destroyed, or \"weight\""));
    }
  }
  return tensors_->Gather(parameter, plane);
}

bool ModuleEngine::HasForeign(size_t number) const {
  const ForeignState* const state = tensors_->foreign(number);
  return state != nullptr && state->optimizer == foreign_.at(number).optimizer && state->is_kept;
}

absl::Status ModuleEngine::ForeignIsLost(size_t number) const {
  const ForeignState* const state = tensors_->foreign(number);
  const std::string& optimizer = foreign_.at(number).optimizer;
  const bool is_other = state != nullptr && state->optimizer != optimizer;
  return MakeError(
      ErrorId::kUnsupportedOptimizer,
      absl::StrCat("the job is at step ", tensors_->step(), ", but what ", optimizer,
                   " keeps is not part of it",
                   state == nullptr ? ""
                   : is_other       ? absl::StrCat(": it has what ", state->optimizer, " keeps")
                                    : absl::StrCat(": ", state->described)),
      "Begin a new job, with SetInitialWeights() from saved weights; for a class of your own give "
      "it save() and load(), and commit its steps with CommitStep(optimizer)");
}

size_t ModuleEngine::AttachForeign(torch::nn::Module& module, ParameterGroups groups,
                                   const std::string& optimizer, bool commits_itself) {
  const size_t number = NextForeign(optimizer);
  if (begun_at_ > 0 && !HasForeign(number) && !IsNew(number)) ThrowStatus(ForeignIsLost(number));
  AttachWeights(module, groups);
  AddForeign(number, commits_itself);
  Log().info("{} runs in this process, weight by weight", optimizer);
  return number;
}

void ModuleEngine::GiveForeign(size_t number, torch::optim::Optimizer& optimizer) {
  const ForeignState* const state = tensors_->foreign(number);
  if (begun_at_ == 0 || state == nullptr || state->described.empty()) return;
  if (!tensors_->HasAllOfStore()) {
    ThrowStatus(MakeError(ErrorId::kUnsupportedOptimizer,
                          absl::StrCat("the job goes on with ", foreign_.at(number).optimizer,
                                       ", which is attached before all of its modules are"),
                          "Attach the other modules first"));
  }
  const ProcessMemory::Use use(tensors_->process_memory(), /*inside_passes=*/false);
  const size_t file_bytes = std::stoul(state->described);
  const std::vector<at::Tensor> storages = tensors_->TakeForeignStorages(number);
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(storages.at(0).const_data_ptr()), file_bytes);
  std::optional<EachNamedOnce> once;
  std::optional<KeepsOptions> options;
  if (foreign_.at(number).commits_itself) {
    once.emplace(optimizer);
    options.emplace(optimizer);
  }
  optimizer.load(archive);
  tensors_->ForgetForeignBytes(number);
}

void ModuleEngine::ForgetForeign(size_t number) {
  const ForeignState* const state = tensors_->foreign(number);
  if (state == nullptr || state->described.empty()) return;
  ThrowIfError(tensors_->KeepForeign(number, /*described=*/"", {}));
}

// A run that goes on and makes them in another order, or not all, gives one what another has kept.
void ModuleEngine::TellOfMissingForeign() {
  if (begun_at_ == 0 || std::exchange(has_told_of_missing_, true)) return;
  for (size_t number = foreign_.size(); const ForeignState* const state = tensors_->foreign(number);
       ++number) {
    if (!state->is_kept || state->described.empty()) continue;
    Log().warn(
        "the job has what a further {} keeps that ran in the process of an earlier run, and that "
        "this run has not attached before its first step: each gets what the one at its place has "
        "kept, so make all of them in the order of that run",
        state->optimizer);
    return;
  }
}

void ModuleEngine::CommitForeign(size_t number, torch::optim::Optimizer& optimizer) {
  const TensorEngine::Turn turn = tensors_->TakeTurn();
  TellOfMissingForeign();
  Foreign& foreign = foreign_.at(number);
  if (const std::shared_ptr<InMemoryOptimizer> in_process = foreign.in_process.lock()) {
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (in_process->StateOf(parameter) != nullptr)
          foreign.stepped.insert(parameter.unsafeGetTensorImpl());
      }
    }
  }
  if (const absl::Status kept = Keep(number, optimizer); !kept.ok()) {
    const std::string reason(kept.message());
    tensors_->LeaveForeign(number, reason);
    if (!std::exchange(foreign.has_told, true)) {
      Log().warn("what {} keeps is not part of the job, which cannot be resumed: {}",
                 foreign.optimizer, reason);
    }
  }
  tensors_->CommitStep();
  tensors_->ForgetForeignBytes(number);
}

absl::Status ModuleEngine::Keep(size_t number, torch::optim::Optimizer& optimizer) {
  Foreign& foreign = foreign_.at(number);
  const ProcessMemory::Use use(tensors_->process_memory(), /*inside_passes=*/false);
  std::optional<FileBytes> file;
  absl::Status status;
  try {
    std::optional<EachNamedOnce> once;
    if (foreign.commits_itself) once.emplace(optimizer);
    file = FileOf(optimizer, foreign.file_bytes);
    if (IsEmpty(*file)) status = absl::FailedPreconditionError("its class has no save()");
  } catch (const c10::Error& error) {
    status = absl::FailedPreconditionError(
        absl::StrCat("its save() throws: ", error.what_without_backtrace()));
  }
  if (world_size() > 1) status = TakeFirstRanks(*tensors_, std::move(status), file);
  if (!status.ok()) return status;
  foreign.file_bytes = file->size_bytes();
  const at::Tensor bytes = file->Padded();
  return tensors_->KeepForeign(number, std::to_string(foreign.file_bytes), {&bytes, 1},
                               /*is_first_ranks=*/true);
}

void ModuleEngine::CheckHas(const torch::nn::Module& module, const ParameterGroups& groups) const {
  std::unordered_set<const void*> known;
  for (const at::Tensor& parameter : module.parameters())
    known.insert(parameter.unsafeGetTensorImpl());
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (known.contains(parameter.unsafeGetTensorImpl()) || tensors_->Has(parameter)) continue;
      ThrowStatus(MakeError(
          ErrorId::kUnsupportedModel,
          absl::StrCat("the optimizer has a parameter of shape [",
                       absl::StrJoin(parameter.sizes(), ", "), "] that the module has not"),
          "Attach a module that holds all that the optimizer trains: register_parameter() or "
          "register_module() before"));
    }
  }
}

// A trainer in Python has noted whose kind is which.
static void CheckIsOfOneKind(std::string_view trainer_state) {
  if (!trainer_state.starts_with(kMarkOfKinds)) return;
  ThrowStatus(MakeError(ErrorId::kOtherModel,
                        "the job was trained in Python with optimizers of several kinds",
                        "Train it there, or begin a new job with its weights (offloadctl export, "
                        "SetInitialWeights)"));
}

static bool IsOfHost(const ParameterGroups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& tensor) { return tensor.is_cpu(); });
  });
}

std::unique_ptr<torch::optim::Optimizer> ModuleEngine::MakeOptimizer(torch::nn::Module& module,
                                                                     ParameterGroups groups,
                                                                     NamedOptimizer&& optimizer) {
  if (auto own = MakeSparselyKept(*this, module, groups, optimizer)) return own;
  if (!tensors_->destination().has_value() && IsOfHost(groups)) CheckInstructions();
  const AttachTurn turn = TakeAttachTurn();
  if (begun_at_ > 0) CheckIsOfOneKind(tensors_->trainer_state());
  groups = modules_->LeaveToOthers(module, std::move(groups));
  CheckHas(module, groups);
  kernels::OptimizerSpec spec = SpecOfAll(optimizer, groups);
  // One that keeps less finds all that it needs.
  if (!modules_->IsEmpty() && spec.index() == tensors_->optimizer().index())
    spec.KeepToo(tensors_->optimizer());
  Attach(module, groups, spec);
  TakeToDaemon(ParametersOf(groups));
  return MakeOffloadOptimizer(tensors_, modules_, std::move(groups), std::move(optimizer));
}

}  // namespace offload::zero3
