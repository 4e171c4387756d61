// accelerator/cuda_peers.h
//
// The devices of CUDA that other ranks have, and their connection by NCCL, which is opened when
// ranks join: the library that torch has loaded, else the system's.
//
// Thread safety: as Peers.
#pragma once

#include <memory>

#include "accelerator/peers.h"

namespace offload::accelerator {

// Of device number `device`. A build without NCCL's header gives one that reaches no other.
std::unique_ptr<Peers> MakeCudaPeers(int device);

}  // namespace offload::accelerator
