// aio/submit_loop.h
//
// Hands all queued entries of a submission ring to the kernel, whatever the kernel answers. A pure
// template, so that a scripted kernel can test every answer.
//
//   answer                              what is done
//   > 0 (possibly fewer than queued)    counted; on with the rest
//   -EINTR                              the same again
//   0, -EAGAIN, -EBUSY, -ENOMEM         completions are reaped, which frees what the kernel lacks;
//                                       then again
//   64 of the last two kinds without    that error (EIO for 0)
//   any progress
//   anything else                       that error
//
// After an error some entries may have been taken and the rest still stand in the ring; `submitted`
// says how many were taken.
//
// Thread safety: that of the functions passed.
#pragma once

#include <cerrno>
#include <cstdint>

namespace offload::aio {

struct SubmitResult {
  uint64_t submitted = 0;
  int error = 0;  // a positive errno
};

inline constexpr int kSubmitStallsMax = 64;

// queued(): entries that stand in the ring.  submit(): entries taken, or a negated errno.  reap():
// takes completions out of the ring without running callbacks; true if there were any.  pause(n):
// waits a little, before the n-th attempt in a row.
template <typename Queued, typename Submit, typename Reap, typename Pause>
SubmitResult SubmitAll(Queued&& queued, Submit&& submit, Reap&& reap, Pause&& pause) {
  SubmitResult result;
  int stalls = 0;
  while (queued() > 0) {
    const int answer = submit();
    if (answer > 0) {
      result.submitted += static_cast<uint64_t>(answer);
      stalls = 0;
      continue;
    }
    switch (-answer) {
      case EINTR:
        break;
      case 0:
      case EAGAIN:
      case EBUSY:
      case ENOMEM:
        if (!reap()) break;
        stalls = 0;
        continue;
      default:
        result.error = -answer;
        return result;
    }
    if (++stalls >= kSubmitStallsMax) {
      result.error = answer == 0 ? EIO : -answer;
      return result;
    }
    pause(stalls);
  }
  return result;
}

}  // namespace offload::aio
