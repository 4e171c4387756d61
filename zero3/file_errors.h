// zero3/file_errors.h
//
// What can go wrong with a checkpoint's files, as statuses that name the file.
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace offload::zero3 {

// OFD-1401.
inline absl::Status Malformed(const std::string& path, const std::string& what) {
  return MakeError(ErrorId::kFileFormat, absl::StrCat(path, ": ", what));
}

// OFD-1405.
inline absl::Status CannotRead(const std::string& path, int error_number) {
  return MakeError(ErrorId::kFileRead,
                   absl::StrCat(path, " cannot be read: ", ErrnoText(error_number)));
}

// OFD-1404.
inline absl::Status CannotWrite(const std::string& path, int error_number) {
  return MakeError(ErrorId::kFileWrite,
                   absl::StrCat(path, " cannot be written: ", ErrnoText(error_number)));
}

}  // namespace offload::zero3
