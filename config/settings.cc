#include "config/settings.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/durability.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/parse_averaging.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "base/suggest.h"

namespace offload::config {
namespace {

constexpr Key kKeys[] = {
    {"job", "OFFLOADD_JOB", KeyType::kJob, "default", "",
     "names the run in the pool; the same name resumes it"},
    {"memory.ram", "OFFLOADD_RAM", KeyType::kSize, "", "",
     "what daemon and library together may hold in memory"},
    {"gpu.device", "OFFLOADD_DEVICE", KeyType::kDevice, "", "",
     "where models of the host are trained, by torch's name (cuda:0); none: where they are"},
    {"gpu.ram", "OFFLOADD_GPU_RAM", KeyType::kSize, "auto", "",
     "what the library may hold of a GPU's memory for weights and gradients; auto: half of it"},
    {"pool", "OFFLOADD_POOL", KeyType::kPools, "", "",
     "directories on drives with direct I/O; several are striped by their speed"},
    {"policy.stage", nullptr, KeyType::kChoice, "auto", "auto|0|1|2|3",
     "of ZeRO: what memory is spent on first; results are the same"},
    {"policy.params", nullptr, KeyType::kHome, "auto", "",
     "where weights live: in memory as far as ram reaches, or what must stay there"},
    {"policy.optimizer", nullptr, KeyType::kHome, "auto", "",
     "where optimizer state lives: in memory as far as ram reaches, or what must stay there"},
    {"policy.gradients", nullptr, KeyType::kChoice, "auto", "auto|nvme",
     "auto: in memory where ram holds them; nvme: always spilled"},
    {"policy.persistence", nullptr, KeyType::kCount, "0", "17592186044416",
     "a hint: weights of at most so many elements are the first to stay in memory"},
    {"policy.prefetch", nullptr, KeyType::kCount, "0", "17592186044416",
     "a hint: elements of weights that the window reads ahead; 0: an eighth of ram"},
    {"policy.max_live", nullptr, KeyType::kCount, "0", "17592186044416",
     "a hint: elements of weights in memory at a time; 0: as many as ram holds"},
    {"ranks.gradients", nullptr, KeyType::kChoice, "mean", "mean|sum|reduced_by_trainer",
     "what several ranks' gradients become; reduced_by_trainer: the trainer makes them one"},
    {"state.layout", nullptr, KeyType::kChoice, "exact", "exact",
     "fp32 masters and moments, bit for bit"},
    {"state.generations", nullptr, KeyType::kCount, "0", "14",
     "spare generations of a new store: so many snapshots need no growth"},
    {"state.average", nullptr, KeyType::kAverage, "none", "",
     "a moving average of the weights beside them: ema:DECAY or swa:FROM:EVERY, in updates"},
    {"io.engine", "OFFLOADD_IO", KeyType::kChoice, "auto", kIoChoices,
     "how the daemon reads and writes"},
    {"update.threads", nullptr, KeyType::kCount, "0", "1024",
     "of the daemon's optimizer; 0: half of the cores, and more where no drive paces it"},
    {"update.in_backward", nullptr, KeyType::kChoice, "auto", "auto|never",
     "auto: work for a step begins during its backward where results are the same"},
    {"durability", nullptr, KeyType::kDurability, "step", "",
     "step, or a commit after every N steps (checkpoint:N) or so long after the one before "
     "(checkpoint:10min) only"},
};

bool IsInteger(std::string_view text, uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool IsHome(std::string_view value) {
  if (value == "auto" || value == "ram" || value == "nvme") return true;
  double share = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), share);
  return error == std::errc() && end == value.data() + value.size() && share >= 0 && share <= 1;
}

// Says what is wrong with a value of a key; empty when nothing is.
std::string Complaint(const Key& key, std::string_view value) {
  const absl::string_view text = ToAbsl(value);
  if (absl::StripAsciiWhitespace(text).empty()) return "is empty";
  uint64_t number = 0;
  switch (key.type) {
    case KeyType::kSize:
      if (!text.empty() && text == key.otherwise) return "";
      return ParseByteSize(value).ok() ? "" : "is no size; write one such as 8GiB";
    case KeyType::kCount:
      if (!IsInteger(value, number)) return "is no count; write an integer from 0";
      return number <= std::stoull(key.choices) ? "" : absl::StrCat("is more than ", key.choices);
    case KeyType::kChoice: {
      const std::vector<std::string> choices = ChoicesIn(key.choices);
      if (std::find(choices.begin(), choices.end(), value) != choices.end()) return "";
      return absl::StrCat("is none of ", absl::StrJoin(choices, ", "));
    }
    case KeyType::kHome:
      return IsHome(value) ? "" : "is none of auto, ram, nvme and a share such as 0.25";
    case KeyType::kJob:
    case KeyType::kDevice:
    case KeyType::kPools:
      return "";  // ComplainOfName
    case KeyType::kDurability:
      return ParseDurability(value).ok() ? ""
                                         : "is none of step, checkpoint:N and checkpoint:10min";
    case KeyType::kAverage:
      return ParseAveraging(value).ok() ? "" : "is none of none, ema:DECAY and swa:FROM:EVERY";
  }
  return "cannot be read";
}

std::optional<NameComplaint> ComplainOfName(const Key& key, std::string_view value) {
  switch (key.type) {
    case KeyType::kJob:
      return ComplainOfJob(value);
    case KeyType::kDevice:
      return ComplainOfDevice(value);
    case KeyType::kPools:
      return ComplainOfPools(value);
    default:
      return std::nullopt;
  }
}

std::vector<std::string> KeyNames() {
  std::vector<std::string> names;
  for (const Key& key : kKeys) names.push_back(key.name);
  return names;
}

std::string_view LastPart(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// Keys whose last part is the last part of `name`, or else nearly so.
std::vector<std::string> KeysThatEndIn(std::string_view name) {
  std::vector<std::string> ends, found;
  for (const Key& key : kKeys) ends.emplace_back(LastPart(key.name));
  const std::string nearest = NearestWord(LastPart(name), ends);
  for (const Key& key : kKeys) {
    if (!nearest.empty() && LastPart(key.name) == nearest) found.emplace_back(key.name);
  }
  return found;
}

// The key that somebody means who knows the options of the engine, or the words of other pages.
constexpr std::pair<std::string_view, const char*> kOtherNames[] = {
    {"nvme_path", "pool"},
    {"pools", "pool"},
    {"path", "pool"},
    {"gpu_ram", "gpu.ram"},
    {"update_threads", "update.threads"},
    {"update_in_backward", "update.in_backward"},
    {"weights_home", "policy.params"},
    {"state_home", "policy.optimizer"},
    {"zero_stage", "policy.stage"},
    {"memory.limit", "memory.ram"},
    {"memory.cpu", "memory.ram"},
};

// What is said of a key that there is not, and which one is meant.
std::pair<std::string, std::string> DescribeUnknown(std::string_view name) {
  const std::string quoted = absl::StrCat("\"", ToAbsl(name), "\"");
  std::vector<std::string> meant;
  for (const Key& key : kKeys) {
    if (std::string_view(key.name).starts_with(absl::StrCat(ToAbsl(name), ".")))
      meant.emplace_back(key.name);
  }
  const bool is_section = !meant.empty();
  for (const auto& [other, key] : kOtherNames) {
    if (meant.empty() && other == name) meant = {key};
  }
  if (meant.empty()) {
    if (std::string nearest = NearestWord(name, KeyNames()); !nearest.empty()) meant = {nearest};
  }
  if (meant.empty()) meant = KeysThatEndIn(name);
  const std::string list = "offloadctl config schema lists the keys";
  const std::string fix =
      meant.empty() ? list
                    : absl::StrCat("Did you mean \"", absl::StrJoin(meant, "\", \""), "\"? ", list);
  return {absl::StrCat(is_section ? "a section where a key belongs: " : "unknown key ", quoted),
          fix};
}

// A string of TOML in quotes.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\', quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += absl::StrFormat("\\u%04X", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string TomlValue(const Key& key, const std::string& value) {
  if (key.type == KeyType::kCount) return value;
  if (key.type != KeyType::kPools) return Quoted(value);
  std::vector<std::string> pools;
  for (absl::string_view pool : absl::StrSplit(value, ',')) {
    pools.push_back(
        absl::StrCat("{ path = ", Quoted(std::string(absl::StripAsciiWhitespace(pool))), " }"));
  }
  return absl::StrCat("[", absl::StrJoin(pools, ", "), "]");
}

}  // namespace

std::span<const Key> AllKeys() { return kKeys; }

const Key* FindKey(std::string_view name) {
  for (const Key& key : kKeys) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

absl::Status Settings::Set(std::string_view name, std::string_view value, std::string_view origin) {
  const std::string where(origin);
  const Key* const key = FindKey(name);
  if (key == nullptr) {
    const auto [what, fix] = DescribeUnknown(name);
    return MakeError(ErrorId::kConfiguration, absl::StrCat(where, ": ", what), fix);
  }
  if (const std::string complaint = Complaint(*key, value); !complaint.empty()) {
    return MakeError(ErrorId::kConfiguration, absl::StrCat(where, ": ", key->name, " = \"",
                                                           ToAbsl(value), "\" ", complaint));
  }
  if (const std::optional<NameComplaint> complaint = ComplainOfName(*key, value)) {
    return MakeError(
        ErrorId::kConfiguration,
        absl::StrCat(where, ": ", key->name, " = \"", ToAbsl(value), "\" ", complaint->what),
        complaint->fix);
  }
  set_[key->name] = {std::string(value), where};
  return absl::OkStatus();
}

Setting Settings::Get(std::string_view name) const {
  if (const auto found = set_.find(name); found != set_.end()) return found->second;
  const Key* const key = FindKey(name);
  return {key == nullptr ? "" : key->otherwise, "default"};
}

std::vector<std::pair<std::string, std::string>> Settings::EngineOptions() const {
  constexpr std::pair<const char*, const char*> kSame[] = {
      {"pool", "nvme_path"},
      {"memory.ram", "ram"},
      {"gpu.device", "device"},
      {"gpu.ram", "gpu_ram"},
      {"job", "job"},
      {"io.engine", "io"},
      {"durability", "durability"},
      {"state.generations", "generations"},
      {"state.average", "average"},
      {"update.threads", "update_threads"},
      {"update.in_backward", "update_in_backward"},
      {"policy.params", "weights_home"},
      {"policy.optimizer", "state_home"},
      {"policy.persistence", "persistence"},
      {"policy.prefetch", "prefetch"},
      {"policy.max_live", "max_live"}};
  std::vector<std::pair<std::string, std::string>> options;
  for (const auto& [key, option] : kSame) {
    if (has(key)) options.emplace_back(option, Get(key).value);
  }
  if (has("policy.stage")) {
    const std::string stage = Get("policy.stage").value;
    options.emplace_back("zero_stage", stage == "auto" ? "-1" : stage);
  }
  if (has("policy.gradients"))
    options.emplace_back("spill_gradients", Get("policy.gradients").value == "nvme" ? "1" : "0");
  if (has("ranks.gradients")) {
    const std::string gradients = Get("ranks.gradients").value;
    if (gradients == "reduced_by_trainer") {
      options.emplace_back("gradients", gradients);
    } else {
      options.emplace_back("gradient_average", gradients == "mean" ? "1" : "0");
    }
  }
  return options;
}

void Settings::Override(const Settings& stronger) {
  for (const auto& [name, setting] : stronger.set_) set_[name] = setting;
}

std::string Settings::Table(bool with_defaults) const {
  std::string table;
  for (const Key& key : kKeys) {
    if (!with_defaults && !has(key.name)) continue;
    const Setting setting = Get(key.name);
    absl::StrAppend(&table,
                    absl::StrFormat("%-18s %-16s %s\n", key.name,
                                    setting.value.empty() ? "-" : setting.value, setting.origin));
  }
  return table;
}

std::string Settings::ToToml() const {
  std::string toml;
  for (const Key& key : kKeys) {
    if (!has(key.name)) continue;
    const Setting setting = Get(key.name);
    std::string origin = setting.origin;
    std::replace_if(
        origin.begin(), origin.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; },
        ' ');
    absl::StrAppend(&toml, key.name, " = ", TomlValue(key, setting.value), "  # ", origin, "\n");
  }
  return toml;
}

absl::Status ReadEnvironment(const std::map<std::string, std::string>& environment,
                             Settings& settings) {
  for (const Key& key : kKeys) {
    if (key.environment == nullptr) continue;
    const auto found = environment.find(key.environment);
    if (found == environment.end() || found->second.empty()) continue;
    OFFLOAD_RETURN_IF_ERROR(
        settings.Set(key.name, found->second, absl::StrCat("env ", key.environment)));
  }
  return absl::OkStatus();
}

}  // namespace offload::config
