// offloadd/version.h
//
// The release.
#pragma once

namespace offload::daemon {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace offload::daemon
