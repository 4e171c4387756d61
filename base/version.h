// base/version.h
//
// The release that this tree builds: what daemon and tools say when they are asked.
#pragma once

namespace offload {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace offload
