// The importer for other languages: JSON in, JSON out, found by name in the shared library. A
// result belongs to the caller, who gives it back to offloadd_config_free(). No call throws or
// keeps anything.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "config/ds_config.h"
#include "config/json_text.h"
#include "config/settings.h"
#include "config/toml_file.h"

namespace {

using offload::config::Json;

char* Given(const Json& object) {
  const std::string text = object.dump(-1, ' ', false, Json::error_handler_t::replace);
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

Json ErrorAsJson(const absl::Status& status) { return {{"error", std::string(status.message())}}; }

}  // namespace

extern "C" {

// A DeepSpeed configuration: ImportAsJson() and "document", the configuration as it was read, or
// {"error": text}.
__attribute__((visibility("default"))) char* offloadd_config_import(const char* text,
                                                                    const char* name,
                                                                    int64_t world_size,
                                                                    int has_pool) {
  offload::config::ImportOptions options;
  options.name = name;
  options.world_size = std::max<int64_t>(1, world_size);
  options.processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  options.has_pool = has_pool != 0;
  const auto import = offload::config::ImportDsConfig(text, options);
  if (!import.ok()) return Given(ErrorAsJson(import.status()));
  Json object = offload::config::ImportAsJson(*import);
  std::string decoded;
  auto document = offload::config::ReadRelaxedJson(text, name);
  if (!document.ok() &&
      absl::WebSafeBase64Unescape(absl::StripAsciiWhitespace(absl::string_view(text)), &decoded))
    document = offload::config::ReadRelaxedJson(decoded, name);
  object["document"] = document.ok() ? *std::move(document) : Json::object();
  return Given(object);
}

// The settings of a file ("": the machine's and the user's) under the environment: {"options":
// {…}} as offload::Options names them, or {"error": text}.
__attribute__((visibility("default"))) char* offloadd_config_read(const char* file) {
  const auto settings =
      offload::config::ReadFilesAndEnvironment(file, offload::config::ProcessEnvironment());
  if (!settings.ok()) return Given(ErrorAsJson(settings.status()));
  Json options = Json::object();
  for (const auto& [name, value] : settings->EngineOptions()) options[name] = value;
  return Given({{"options", options}});
}

__attribute__((visibility("default"))) void offloadd_config_free(char* text) { std::free(text); }

}  // extern "C"
