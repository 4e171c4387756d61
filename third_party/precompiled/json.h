// What files are compiled with that read JSON and no flags, of which every file would compile a
// part: cc.bzl.
#include <nlohmann/json.hpp>

#include "third_party/precompiled/common.h"
