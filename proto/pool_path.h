// proto/pool_path.h
//
// How a pool is named to the daemon, which has a working directory of its own.
#pragma once

#include <string>

namespace offload::proto {

// The pool, or each of several that are separated by commas, as an absolute path. Empty, for the
// daemon's default, stays empty.
std::string AbsolutePools(const std::string& pool);

}  // namespace offload::proto
