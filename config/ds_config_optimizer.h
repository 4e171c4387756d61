// config/ds_config_optimizer.h
//
// The section `optimizer` of a DeepSpeed configuration: its type and its parameters, which come in
// any order and mean nothing without each other.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "config/ds_config.h"
#include "config/json_text.h"

namespace offload::config {

class OptimizerSection {
 public:
  // Of the type in small letters; `fate`: its place among those of the import. False when there is
  // no such optimizer here.
  bool TakeType(std::string_view type, size_t fate);
  // For messages.
  static std::string Types();
  // As torch.optim names it; there must be one.
  const char* named() const { return optimizer_->named; }

  void TakeParam(const std::string& name, const Json& value, size_t fate);

  // When all keys were read: fills in the optimizer of `import`, and the fates of its parameters.
  void Finish(Import& import);

 private:
  // What an optimizer takes, and its value where the file has none.
  struct Optimizer {
    const char* type;   // DeepSpeed's, in small letters
    const char* named;  // as torch.optim names it
    Json params;
  };
  struct Param {
    std::string name;
    Json value;
    size_t fate;
  };

  static const std::vector<Optimizer>& Optimizers();
  static bool Take(const Param& param, Json& slot);

  void FinishParam(const Param& param, Import& import) const;
  bool IsAdam() const { return std::string_view(optimizer_->named) == "AdamW"; }
  bool HasParam(std::string_view name) const;
  // Switches of DeepSpeed's Adam that torch's does not have; true when `param` was one.
  bool AdamSwitch(const Param& param, Import& import) const;
  void AdamSwitch(const Param& param, bool on, bool otherwise, Import& import) const;

  const Optimizer* optimizer_ = nullptr;
  size_t fate_ = 0;  // of its type
  std::vector<Param> params_;
};

}  // namespace offload::config
