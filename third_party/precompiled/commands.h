// What files are compiled with that read flags or JSON: cc.bzl.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "third_party/precompiled/common.h"
