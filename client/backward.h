// client/backward.h
//
// Tells the client which phase of a step the calling thread is in: only its caller knows.
//
// Thread safety: any thread; each speaks for itself.
#pragma once

namespace offload::client {

// Whether what the calling thread does from now on belongs to a backward pass. False until it is
// called; the call of a step ends the backward pass of its thread.
void SetBackward(bool in_backward);
bool IsInBackward();

}  // namespace offload::client
