// offloadd/environment.h
//
// Numbers from the environment: what operators may change without another flag.
#pragma once

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "offloadd/limits.h"

namespace offload::daemon {

// A number, not below zero, from the environment: seconds, or bytes per second.
inline double NumberFrom(const char* variable, double otherwise) {
  double number = 0;
  const char* const text = std::getenv(variable);
  const bool is_good = text != nullptr && absl::SimpleAtod(text, &number) && number >= 0;
  return is_good ? number : otherwise;
}

// How long ranks of a launch wait for those that are missing.
inline double JoinTimeoutSeconds() {
  return NumberFrom("OFFLOADD_JOIN_TIMEOUT", kLimits.join_timeout_seconds);
}

}  // namespace offload::daemon
