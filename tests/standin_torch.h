// tests/standin_torch.h
//
// A device of torch without a GPU: PrivateUse1 under the name "standin", over a HostAccelerator.
// Its tensors have their own device, autograd runs their backward in a device thread, and torch
// asks it for streams and events. Its kernels are those of the CPU over the device's memory: they
// run on the calling thread, behind everything that the current stream was given, and tell the
// checker what they use. So a trainer on it has the CPU's bits, and a copy that nobody waited for
// is found.
//
// Memory that torch frees is the stream's that it was allocated on, as with CUDA's caching
// allocator: it is used again behind what that stream was given, and behind the streams that
// record_stream() has named.
//
// Where torch itself takes another way for such backends, so does this one: dropout has the kernel
// of GPUs, convolutions have operators of their own, and the norms of a list are added in another
// order than that of one tensor.
//
// Thread safety: UseStandin() before the first tensor; a device is used by any number of threads.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "accelerator/host_accelerator.h"

namespace offload {

// standin:0.
c10::Device StandinDevice();

// From now on the device is this accelerator, and models on it can be attached. The first call
// registers the backend. No tensor of an earlier accelerator may live; the accelerator outlives
// every tensor.
void UseStandin(accelerator::HostAccelerator& accelerator);

// A further stream of the device.
c10::Stream NewStandinStream();

}  // namespace offload
