// config/ds_config_keys.h
//
// The keys of a DeepSpeed configuration and what becomes of each; those whose value decides more
// than that are kSpecial, and config/ds_config.cc knows them.
//
// Thread safety: constant.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace offload::config {

enum class Shape { kAny, kBool, kInteger, kNumber, kText, kList, kSection };

enum class Treatment {
  kRecurse,          // its members have entries of their own
  kIgnored,          // accepted without effect; `note` says why
  kMissed,           // likewise, with a warning where it is switched on: it would be looked for
  kTrainer,          // the trainer's business
  kRejectedIfSet,    // true, a number above 1, a text, a list or a section: rejected with 1104
  kRejectedIfLossy,  // likewise with 1107: it changes what is computed
  kSpecial,
};

struct DsKey {
  const char* name;  // with its section: "zero_optimization.stage"
  Shape shape;
  Treatment treatment;
  const char* note;
};

std::span<const DsKey> AllDsKeys();
// Also finds zero_optimization.X for zero_optimization.stage3_X, as DeepSpeed does. Null when there
// is none.
const DsKey* FindDsKey(std::string_view name);
// Whether the section, named as in the table, is off in DeepSpeed unless it says "enabled": true.
bool IsOffUnlessEnabled(std::string_view section);
// For suggestions: what has this name in another section, else what its own section calls nearly
// so; empty when there is none.
std::string NearestDsKey(std::string_view name);

}  // namespace offload::config
