// swap/verified_read.h
//
// One extent, for those who go through a store from end to end with nobody else at work.
#pragma once

#include "absl/status/status.h"
#include "swap/store.h"

namespace offload::swap {

// Reads an extent, again where its bytes do not have their checksum, and polls until it is there;
// zeros when it was never written. Sets the stamp that the bytes have. Errors as Store::ReadAgain.
absl::Status ReadVerified(Store& store, const ReadRequest& request, Stamp* stamp);

}  // namespace offload::swap
