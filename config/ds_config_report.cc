// What is told of an import: its first rejection, the table for people, the same for programs.

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "config/ds_config.h"

namespace offload::config {
namespace {

absl::Status StatusOf(const Fate& fate, size_t more) {
  const std::string others =
      more == 0 ? "" : absl::StrCat(" (and ", more, " more: offloadctl config import lists them)");
  return MakeError(*fate.error, absl::StrCat(fate.key, fate.value.empty() ? "" : " = ", fate.value,
                                             ": ", fate.note, others));
}

}  // namespace

size_t Import::Count(Verdict verdict) const {
  return static_cast<size_t>(std::count_if(
      fates.begin(), fates.end(), [&](const Fate& fate) { return fate.verdict == verdict; }));
}

absl::Status Import::Problem() const {
  for (const Fate& fate : fates) {
    if (fate.verdict == Verdict::kRejected) return StatusOf(fate, Count(Verdict::kRejected) - 1);
  }
  return absl::OkStatus();
}

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMapped:
      return "mapped";
    case Verdict::kIgnored:
      return "ignored";
    case Verdict::kTrainer:
      return "trainer";
    case Verdict::kRejected:
      return "rejected";
  }
  return "";
}

std::string ImportTable(const Import& import) {
  std::string table;
  for (const Fate& fate : import.fates) {
    std::string line = VerdictName(fate.verdict);
    line.resize(10, ' ');
    absl::StrAppend(&line, fate.key, fate.value.empty() ? "" : " = ", fate.value);
    if (!fate.target.empty()) absl::StrAppend(&line, "   -> ", fate.target);
    if (fate.error.has_value())
      absl::StrAppend(&line, "   OFD-", static_cast<int>(*fate.error), " ", fate.note);
    else if (!fate.note.empty())
      absl::StrAppend(&line, "   (", fate.note, ")");
    absl::StrAppend(&table, line, "\n");
  }
  for (const std::string& warning : import.warnings)
    absl::StrAppend(&table, "note      ", warning, "\n");
  absl::StrAppend(&table, import.Count(Verdict::kMapped), " mapped, ",
                  import.Count(Verdict::kIgnored), " ignored, ", import.Count(Verdict::kTrainer),
                  " trainer, ", import.Count(Verdict::kRejected), " rejected.\n");
  return table;
}

namespace {

// What is mapped of the section fp16; empty where that is off. The keys without their prefix.
Json Fp16AsJson(const Import& import) {
  constexpr std::string_view kTarget = "training.fp16.";
  Json section = Json::object();
  for (const Fate& fate : import.fates) {
    const std::string_view target = fate.target;
    if (fate.verdict != Verdict::kMapped || !target.starts_with(kTarget)) continue;
    const size_t value = target.find(" = ");
    section[std::string(target.substr(kTarget.size(), value - kTarget.size()))] =
        Json::parse(target.substr(value + 3));
  }
  return section;
}

}  // namespace

Json ImportAsJson(const Import& import) {
  const auto or_null = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  const Training& training = import.training;
  Json object;
  object["settings"] = Json::object();
  for (const Key& key : AllKeys()) {
    if (import.settings.has(key.name))
      object["settings"][key.name] = import.settings.Get(key.name).value;
  }
  object["options"] = Json::object();
  for (const auto& [name, value] : import.settings.EngineOptions()) object["options"][name] = value;
  object["training"] = {{"batch_size", or_null(training.batch_size)},
                        {"micro_batch_size", or_null(training.micro_batch_size)},
                        {"accumulation", or_null(training.accumulation)},
                        {"gradient_clipping", or_null(training.gradient_clipping)},
                        {"bf16", or_null(training.bf16)},
                        {"autocast", training.autocast},
                        {"fp16", Fp16AsJson(import)},
                        {"optimizer", training.optimizer},
                        {"optimizer_params", training.optimizer_params},
                        {"scheduler", training.scheduler},
                        {"scheduler_params", training.scheduler_params},
                        {"load_universal", training.load_universal}};
  object["keys"] = Json::array();
  object["rejected"] = Json::array();
  for (const Fate& fate : import.fates) {
    object["keys"].push_back({{"key", fate.key},
                              {"value", fate.value},
                              {"verdict", VerdictName(fate.verdict)},
                              {"target", fate.target},
                              {"note", fate.note}});
    if (fate.error.has_value())
      object["rejected"].push_back(std::string(StatusOf(fate, 0).message()));
  }
  object["warnings"] = import.warnings;
  return object;
}

}  // namespace offload::config
